"""``gpuops jobs`` as an operator types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from console.cli import run
from console.model.operation import Actor, KernelLine, Notice, Progress, StepEvent
from console.operations import launch
from console.store.job_directory import journal_path
from console.store.jobs import get_job
from console.store.journal import Journal
from console.store.state import State
from tests.operations.job_lab import in_a_process, make_old, own_children, plan_in, put_on_disk, world
from tests.operations.test_launch import ended, lab_command, submitted, until, waiting
from tests.rigs.terminal import Terminal

TREE = Path(__file__).parents[2]
NAMES = {"id", "action", "state", "pid", "started_at", "outcome"}


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "job_command", lab_command)
    monkeypatch.setattr(launch, "SYSTEMD", Path("/nowhere"))
    monkeypatch.setenv("PYTHONPATH", str(TREE))
    with own_children(monkeypatch):
        yield


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path / "state")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return make_old(tmp_path / "files")


@pytest.fixture
def site(tmp_path: Path, state: State) -> str:
    path = tmp_path / "site.yaml"
    path.write_text(f"schema: 1\nstate: {state.directory}\n")
    return str(path)


def crashed(state: State, files: Path, kind: str = "plain") -> str:
    """A job that was interrupted after its first step."""
    job = put_on_disk(state, plan_in(files, kind))
    journal = Journal(journal_path(state, job))
    journal.append(StepEvent(at=1.0, step="replace-a", state="doing"))
    journal.close()
    return job


Said = pytest.CaptureFixture[str]


def asked(capsys: Said, *arguments: str) -> tuple[int, Any]:
    code = run(["jobs", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_before_the_first_job_there_is_nothing_and_it_is_said(site: str, state: State, capsys: Said) -> None:
    assert asked(capsys, "list", "--site", site) == (0, {"schema": 1, "jobs": []})
    assert run(["jobs", "--site", site]) == 0
    assert capsys.readouterr().out == "nothing was changed on this host yet\n"
    for command in ("show", "follow", "resume", "rollback"):
        assert run(["jobs", command, "--site", site]) == 2
        assert "there is no job" in capsys.readouterr().err
    assert not state.directory.exists()  # and looking makes nothing


def test_the_list_is_newest_first_and_has_the_promised_names(
    site: str, state: State, files: Path, capsys: Said
) -> None:
    first = submitted(state, plan_in(files), "why not")
    ended(state, first)
    second = submitted(state, plan_in(files, "slow"))
    pid = waiting(state, second)
    code, document = asked(capsys, "list", "--site", site)
    (files / "go").touch()
    assert code == 0
    assert next(iter(document)) == "schema"
    newest, oldest = document["jobs"]
    assert newest.keys() >= NAMES
    assert (newest["id"], newest["state"], newest["pid"], newest["outcome"]) == (second, "running", pid, None)
    assert (oldest["id"], oldest["state"], oldest["pid"], oldest["outcome"]) == (first, "done", None, "done")
    assert (oldest["action"], oldest["note"], oldest["user"]) == ("test", "why not", "tester")
    assert oldest["started_at"].endswith("Z")
    assert newest["started_at"] >= oldest["started_at"]
    ended(state, second)


def test_the_list_says_what_and_by_whom_and_below_it_why_it_failed(
    site: str, state: State, files: Path, capsys: Said
) -> None:
    job = submitted(state, plan_in(files, "broken"))
    ended(state, job)
    assert run(["jobs", "--site", site]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[:3] == [job, "rolled", "back"]
    assert said[0].endswith("make it new, tester")
    assert said[1].strip() == "it cannot be done"
    assert len(said) == 2


def test_one_job_shows_who_why_and_every_step(site: str, state: State, files: Path, capsys: Said) -> None:
    job = submitted(state, plan_in(files, "broken"), "a try")
    ended(state, job)
    code, document = asked(capsys, "show", job, "--site", site)
    assert code == 0
    assert document.keys() >= NAMES
    assert [step["state"] for step in document["steps"][:3]] == ["undone"] * 3
    assert document["steps"][3]["evidence"] == "it cannot be done"
    assert document["steps"][3]["lines"] == ["line one", "line two"]
    assert document["outcome"] == "rolled back: it cannot be done"
    assert [(one["direction"], one["outcome"]) for one in document["runs"]] == [("forward", "rolled-back")]
    assert run(["jobs", "show", "--site", site]) == 0
    said = capsys.readouterr().out
    for words in (
        job,
        "by       tester from 10.0.0.9",
        "a try",
        "because it cannot be done",
        "put a back: old",
    ):
        assert words in said
    assert max(map(len, said.splitlines())) <= 80


def test_text_from_outside_does_nothing_to_the_terminal(
    site: str, state: State, files: Path, capsys: Said
) -> None:
    job = crashed(state, files)
    journal = Journal(journal_path(state, job))
    evil = "\x1b]0;owned\x07\x1b[31m[bold]red[/bold]\u202e"
    journal.append(StepEvent(at=1.0, step="replace-a", state="failed", words=evil, lines=(evil,)))
    journal.append(KernelLine(at=1.0, words=evil))
    journal.append(Notice(at=1.0, words=evil))
    journal.append(Progress(at=1.0, step="replace-a", words=evil))
    journal.close()
    for command in ("show", "follow"):
        run(["jobs", command, job, "--site", site])
        said = capsys.readouterr().out
        assert "[bold]red[/bold]" in said
        assert not set("\x1b\x07\u202e") & set(said)


@pytest.mark.parametrize("job", ["nothing", "../../etc", "20261130-101502-switch", "\x1b[31m"])
def test_a_job_that_is_not_there_is_said(
    site: str, state: State, files: Path, capsys: Said, job: str
) -> None:
    crashed(state, files)
    for command in ("show", "follow", "resume", "rollback"):
        assert run(["jobs", command, "--site", site, "--", job]) == 2
        said = capsys.readouterr().err
        assert "there is no job" in said
        assert "\x1b" not in said


def test_an_interrupted_job_goes_on_or_back(site: str, state: State, files: Path, capsys: Said) -> None:
    job = crashed(state, files)
    assert run(["jobs", "follow", "--site", site]) == 5
    assert f"gpuops jobs resume {job}, or gpuops jobs rollback {job}" in capsys.readouterr().err
    assert run(["jobs", "resume", "--site", site]) == 0
    assert "make it new: done" in capsys.readouterr().out
    assert world(files) == "new"
    assert run(["jobs", "resume", job, "--site", site]) == 3
    assert f"job {job} is over: done" in capsys.readouterr().err


def test_a_rollback_that_was_asked_for_is_a_success(
    site: str, state: State, files: Path, capsys: Said
) -> None:
    job = crashed(state, files)
    assert run(["jobs", "rollback", job, "--site", site]) == 0
    assert "make it new: rolled back" in capsys.readouterr().out
    assert world(files) == "old"
    assert run(["jobs", "follow", job, "--site", site]) == 4


def test_a_job_that_goes_on_may_be_left_alone(site: str, state: State, files: Path, capsys: Said) -> None:
    job = crashed(state, files)
    code, document = asked(capsys, "resume", "--no-wait", "--site", site)
    assert (code, document) == (0, {"schema": 1, "job": job})
    assert ended(state, job).state == "done"


def test_one_that_fails_and_cannot_be_taken_back_ends_with_5(
    site: str, state: State, files: Path, capsys: Said
) -> None:
    job = crashed(state, files, "broken")
    (files / "c").unlink()
    (files / "c").mkdir()
    assert run(["jobs", "resume", job, "--site", site]) == 5
    said = capsys.readouterr().out
    assert "make it new: failed" in said
    assert said.count("because ") == 2
    assert " | " in said  # the lines that show it


def test_read_only_changes_nothing(site: str, state: State, files: Path, capsys: Said) -> None:
    job = crashed(state, files)
    for command in ("resume", "rollback"):
        assert run(["jobs", command, "--read-only", "--site", site]) == 3
        assert "read only" in capsys.readouterr().err
    assert get_job(state, job).state == "interrupted"
    assert run(["jobs", "list", "--read-only", "--site", site]) == 0


def test_while_another_works_it_is_named_and_the_status_is_75(
    site: str, state: State, files: Path, capsys: Said
) -> None:
    job = submitted(state, plan_in(files, "slow"))
    waiting(state, job)
    assert run(["jobs", "rollback", job, "--site", site]) == 75
    assert f"another operation holds the host: test, job {job}, by tester" in capsys.readouterr().err
    (files / "go").touch()
    ended(state, job)


def test_one_job_that_cannot_be_read_hides_none(site: str, state: State, files: Path, capsys: Said) -> None:
    bad = crashed(state, files)
    (state.jobs / bad / "plan.json").write_text('{"schema": 7}')
    good = put_on_disk(state, plan_in(files))
    assert run(["jobs", "list", "--json", "--site", site]) == 2
    said = capsys.readouterr()
    assert [job["id"] for job in json.loads(said.out)["jobs"]] == [good]
    assert "plan.json: schema 7 is of a newer gpuops" in said.err
    assert run(["jobs", "show", bad, "--site", site]) == 2


def test_any_number_follow_and_each_change_is_a_line_for_machines(
    site: str, state: State, files: Path
) -> None:
    job = submitted(state, plan_in(files, "slow"))
    waiting(state, job)
    command = [sys.executable, "-m", "console", "jobs", "follow", job, "--json", "--site", site]
    followers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TREE) for _ in range(2)]
    first = [json.loads(follower.stdout.readline()) for follower in followers if follower.stdout]
    assert [document["progress"]["words"] for document in first] == ["waiting for go"] * 2
    (files / "go").touch()
    for follower in followers:
        said, _ = follower.communicate(timeout=20)
        last = json.loads(said.splitlines()[-1])
        assert (follower.returncode, last["state"], last["outcome"]) == (0, "done", "done")


def test_on_a_terminal_one_line_moves_and_ctrl_c_leaves_the_job_running(
    site: str, state: State, files: Path
) -> None:
    job = submitted(state, plan_in(files, "slow"))
    waiting(state, job)
    terminal = Terminal([sys.executable, "-m", "console", "jobs", "follow", "--site", site], 80, 24)
    try:
        terminal.wait_for(lambda text: "waiting for go, 50 %" in text)
        lines = [line for line in terminal.lines() if line]
        assert lines[0] == f"make it new, job {job}"
        assert lines[1].startswith("  1/4   done    replace a: new")
        assert lines[2].startswith("  2/4 ")
        assert len(lines) == 3
        terminal.type("\x03")
        terminal.wait_for(lambda text: f"job {job} goes on without us" in text)
        until(lambda: terminal.process.poll() is not None)
        assert terminal.process.returncode == 130
    finally:
        terminal.close()
    assert get_job(state, job).state == "running"
    (files / "go").touch()
    assert ended(state, job).state == "done"


def test_a_reader_that_went_away_stops_no_job(site: str, state: State, files: Path) -> None:
    job = submitted(state, plan_in(files, "slow"))
    waiting(state, job)
    ends, begins = os.pipe()
    follower = subprocess.Popen(
        [sys.executable, "-m", "console", "jobs", "follow", job, "--json", "--site", site],
        stdout=begins,
        stderr=subprocess.PIPE,
        cwd=TREE,
    )
    os.close(begins)
    os.read(ends, 1)
    os.close(ends)
    (files / "go").touch()
    _, said = follower.communicate(timeout=20)
    assert b"Traceback" not in said
    assert follower.returncode == 128 + signal.SIGINT
    assert ended(state, job).state == "done"


def test_a_follower_sees_a_job_that_dies(site: str, state: State, files: Path) -> None:
    job = submitted(state, plan_in(files, "slow"))
    pid = waiting(state, job)
    follower = subprocess.Popen(
        [sys.executable, "-m", "console", "jobs", "follow", job, "--site", site],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TREE,
    )
    assert follower.stdout is not None
    while "2/4" not in follower.stdout.readline():
        pass
    os.kill(pid, signal.SIGKILL)
    _, said = follower.communicate(timeout=20)
    assert follower.returncode == 5
    assert f"gpuops jobs rollback {job}" in said


def test_a_job_that_another_beat_to_the_lock_ends_with_75(
    site: str, state: State, files: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitting lets one through; should two processes come all the same, one is refused by the lock."""
    from console.store.lock import Holder, hold
    from console.store.process import this_process

    job = put_on_disk(state, plan_in(files))
    monkeypatch.setattr("console.operations.job.LOCK_WAIT_S", 0.0)
    other = Holder(process=this_process(), job="other", action="switch", user="ann", since=1.0)
    with hold(state, other):
        assert in_a_process(state, job, "forward") == 75
        assert run(["jobs", "follow", job, "--site", site]) == 75
    assert "because another operation holds the host: switch, job other" in capsys.readouterr().out
    assert world(files) == "old"


def test_the_plan_s_actor_is_who_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 50022 10.0.0.1 22")
    monkeypatch.setenv("SUDO_USER", "ann")
    actor = launch.actor_here()
    assert actor.connection == "10.0.0.9 50022 10.0.0.1 22"
    assert actor.user.endswith("(sudo by ann)")
    monkeypatch.delenv("SUDO_USER")
    monkeypatch.delenv("SSH_CONNECTION")
    assert launch.actor_here() == Actor(actor.user.split()[0])
    assert msgspec.json.decode(msgspec.json.encode(actor), type=Actor) == actor
