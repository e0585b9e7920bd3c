"""``gpuops switch``, ``restart``, ``stop``, ``start`` as an operator types them, on the box."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.cli import run
from console.store.jobs import list_jobs
from console.store.lock import Holder, hold
from console.store.process import this_process
from tests.operations.command_lab import Typed, forked_jobs, on_a_terminal
from tests.operations.service_lab import ServiceLab, hurry, killer, service_lab


@pytest.fixture(scope="module")
def shared_box() -> Iterator[ServiceLab]:
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        with service_lab() as lab:
            yield lab


@pytest.fixture
def lab(shared_box: ServiceLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceLab]:
    hurry(monkeypatch)
    with forked_jobs(monkeypatch):
        yield shared_box


def jobs(lab: ServiceLab) -> int:
    return len(list_jobs(lab.state)) if lab.state.jobs.exists() else 0


# Looking only ------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_with_its_difference_and_changes_nothing(lab: ServiceLab) -> None:
    text, before = lab.text, jobs(lab)
    typed = Typed(lab, "switch", "qwen3.5-397b-nvfp4", "--dry-run")
    assert typed.code == 0
    assert typed.out.startswith("switch to qwen3.5-397b-nvfp4\n")
    for words in (
        "CHECKS",
        "STEPS",
        "back: put back /etc/systemd/system/sglang.service",
        "CHANGES ON CT:129",
    ):
        assert words in typed.out
    assert "\n+    --model-path nvidia/Qwen3.5-397B-A17B-NVFP4 \\\n" in typed.out
    assert "\x1b" not in typed.out
    assert (lab.text, jobs(lab)) == (text, before)


def test_a_dry_run_for_machines_is_one_document(lab: ServiceLab) -> None:
    typed = Typed(lab, "switch", "qwen3.5-397b-nvfp4", "--dry-run", "--json")
    document = json.loads(typed.out)
    assert next(iter(document)) == "schema"
    assert (document["action"], document["target"]) == ("switch", "qwen3.5-397b-nvfp4")
    assert (document["blocked"], typed.code) == (False, 0)
    assert [step["id"] for step in document["steps"]][-1] == "enable"
    (change,) = document["changes"]
    assert any(line.startswith("+") for line in change["diff"])
    assert {"id", "title", "verdict", "evidence", "remedy"} == set(document["findings"][0])


def test_a_blocked_plan_is_shown_and_ends_with_3(lab: ServiceLab) -> None:
    for words in (("--dry-run",), ("--yes",)):
        typed = Typed(lab, "switch", "kimi-k2.5-int4", *words)
        assert typed.code == 3
        assert "kimi-k2.5-int4 is the unit's profile already" in typed.out
        assert "The pre-flight forbids it: nothing is changed." in typed.out


# Bad usage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("switch", "qwen3.5-397b-nvfp", "--yes"), "did you mean qwen3.5-397b-nvfp4?"),
        (("switch", "../../etc/passwd", "--yes"), "there is no profile ../../etc/passwd"),
        (("switch", "a\x1b[31mb\n", "--yes"), "there is no profile a"),
        (("switch",), "Missing argument 'PROFILE'"),
        (("restart",), "without a terminal nobody can confirm: add --yes, or --dry-run"),
        (("restart", "--json"), "--json asks nothing: add --yes, or --dry-run"),
        (("--read-only", "restart", "--yes"), "read only: nothing is changed"),
        (("restart", "--yes", "--note", "x" * 501), "--note: expected at most 500 characters"),
    ],
)
def test_bad_usage_ends_with_2_and_says_what_was_expected(
    lab: ServiceLab, words: tuple[str, ...], said: str
) -> None:
    before = jobs(lab)
    typed = Typed(lab, *words)
    assert typed.code == 2
    assert said in typed.err
    assert "\x1b" not in typed.err
    assert "Traceback" not in typed.err
    assert jobs(lab) == before


def test_on_a_real_host_only_root_changes_anything(
    lab: ServiceLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("schema: 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert run(["--site", str(site), "restart", "--yes"]) == 2
    assert "needs root" in err.getvalue()


# Doing it ----------------------------------------------------------------------------------------


def test_the_answer_no_changes_nothing(lab: ServiceLab) -> None:
    text, before = lab.text, jobs(lab)
    code, shown = on_a_terminal(lab, b"n\n", "switch", "qwen3.5-397b-nvfp4")
    assert code == 3
    assert "switch to qwen3.5-397b-nvfp4? [y/N]" in shown
    assert "not confirmed: nothing was changed" in shown
    assert (lab.text, jobs(lab)) == (text, before)


def test_the_answer_yes_switches_and_rings_at_the_end(lab: ServiceLab) -> None:
    code, shown = on_a_terminal(lab, b"y\n", "switch", "qwen3.5-397b-nvfp4")
    assert code == 0
    assert lab.served() == "qwen3.5-397b"
    assert "\x1b[32m" in shown, "the difference is coloured on a terminal"
    assert shown.rstrip().endswith("\a\x1b]9;switch to qwen3.5-397b-nvfp4: done\a")
    assert Typed(lab, "switch", "kimi-k2.5-int4", "--yes").code == 0


def test_for_machines_every_change_is_a_line_and_the_note_is_kept(lab: ServiceLab) -> None:
    typed = Typed(lab, "restart", "--yes", "--json", "--note", "after the \x1b[31mupdate")
    assert typed.code == 0, typed.err
    documents = [json.loads(line) for line in typed.out.splitlines()]
    assert documents[-1]["state"] == "done"
    assert documents[-1]["note"] == "after the update"
    assert all(next(iter(document)) == "schema" for document in documents)


def test_without_waiting_the_id_is_printed_and_the_job_can_be_followed(lab: ServiceLab) -> None:
    typed = Typed(lab, "restart", "--yes", "--no-wait")
    assert typed.code == 0
    job = typed.out.strip()
    assert job.endswith("-restart")
    second = Typed(lab, "stop", "--yes")
    assert second.code == 75
    assert f"another operation holds the host: restart, job {job}" in second.err
    followed = Typed(lab, "jobs", "follow", job)
    assert followed.code == 0
    assert followed.out.rstrip().endswith("done")


def test_who_holds_the_host_is_named_before_any_check_is_made(lab: ServiceLab) -> None:
    holder = Holder(
        process=this_process(), job="20261130-000000-rebind", action="rebind", user="anna", since=time.time()
    )
    lab.state.create()
    with hold(lab.state, holder):
        typed = Typed(lab, "switch", "qwen3.5-397b-nvfp4", "--yes")
    assert typed.code == 75
    assert "rebind, job 20261130-000000-rebind, by anna" in typed.err


def test_an_interrupted_job_comes_first(lab: ServiceLab) -> None:
    from console.operations.service import plan_restart

    job = lab.put(lab.plan(plan_restart))
    assert lab.run(job, on_point=killer("after systemctl stop")) == -9
    typed = Typed(lab, "switch", "qwen3.5-397b-nvfp4", "--yes")
    assert typed.code == 3
    assert f"gpuops jobs resume {job}, or gpuops jobs rollback {job}" in typed.err
    assert lab.run(job) == 0
    assert lab.served() == "kimi-k2.5"
