"""``gpuops rebind`` as an operator types it, on the box."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from console.sources.inventory import read_inventory
from console.store.jobs import list_jobs
from tests.operations.command_lab import Typed, forked_jobs, on_a_terminal
from tests.operations.service_lab import ServiceLab, hurry, service_lab


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


def untouched(lab: ServiceLab) -> bool:
    jobs = list_jobs(lab.state) if lab.state.jobs.exists() else ()
    return not jobs and all(slot.on_nvidia for slot in read_inventory(lab.runner.root).slots)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected one of --to vm|container, --repair, --recover BDF; found none of them"),
        (("--to", "vm", "--repair"), "found --to and --repair"),
        (("--to", "moon"), "'moon' is not one of 'vm', 'container'"),
        (("--to", "vm", "--force-stop"), "--force-stop goes with --to container"),
        (("--to", "vm", "--rung", "reset"), "--rung goes with --recover"),
        (("--recover", "0000:01:00", "--gpu", "0000:01:00"), "--recover names its card itself"),
        (("--to", "vm"), "without a terminal nobody can confirm"),
        (("--to", "vm", "--json"), "--json asks nothing: add --yes, or --dry-run"),
    ],
)
def test_what_does_not_go_together_is_an_error_of_usage(
    lab: ServiceLab, words: tuple[str, ...], said: str
) -> None:
    typed = Typed(lab, "rebind", *words)
    assert typed.code == 2
    assert said in typed.err
    assert untouched(lab)


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("0000:01:00.1", "the audio function of a card: name the card, 0000:01:00.0"),
        ("0000:77:00.0", "0000:77:00.0 is not on the PCI bus; the cards are: 0000:01:00.0"),
        ("gpu0", "gpu0 is no PCI address: expected one such as 0000:41:00.0"),
    ],
)
def test_what_is_no_card_is_refused(lab: ServiceLab, gpu: str, said: str) -> None:
    typed = Typed(lab, "rebind", "--to", "vm", "--gpu", gpu, "--yes")
    assert typed.code == 3
    assert said in typed.err
    assert untouched(lab)


def test_a_plan_that_the_preflight_forbids_is_shown_and_refused(lab: ServiceLab) -> None:
    typed = Typed(lab, "rebind", "--to", "vm", "--gpu", "01:00.0", "--yes")
    assert typed.code == 3
    assert "FAIL Cards of the VM: VM 100 also names 0000:21:00.0" in typed.out
    assert "The pre-flight forbids it: nothing is changed." in typed.out
    assert untouched(lab)


def test_a_dry_run_for_machines_names_the_target_and_every_step(lab: ServiceLab) -> None:
    typed = Typed(lab, "rebind", "--to", "vm", "--dry-run", "--json")
    document = json.loads(typed.out)
    assert (typed.code, document["action"], document["target"]) == (0, "rebind", "vm 100")
    assert sum(step["id"].startswith("to-vfio-") for step in document["steps"]) == 8
    assert untouched(lab)


def test_without_root_nothing_is_moved(lab: ServiceLab, monkeypatch: pytest.MonkeyPatch) -> None:
    site = lab.site_path.with_name("real.yaml")
    site.write_text("schema: 1\ngpus: auto\nvm: {id: 100}\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    from console.cli import run

    assert run(["--site", str(site), "rebind", "--to", "vm", "--yes"]) == 2


def test_it_is_confirmed_by_typing_the_target_and_by_nothing_else(lab: ServiceLab) -> None:
    code, shown = on_a_terminal(lab, b"y\r", "rebind", "--to", "vm", asks=b"Type vm 100 to go on")
    assert code == 3
    assert "not confirmed: nothing was changed" in shown
    assert untouched(lab)
    code, shown = on_a_terminal(lab, b"vm 100\r", "rebind", "--to", "vm", asks=b"Type vm 100 to go on")
    assert code == 0, shown
    assert "move 8 cards to vm 100: done" in shown
    typed = Typed(lab, "rebind", "--to", "container", "--yes", "--note", "evening")
    assert typed.code == 0, (typed.out, typed.err)
    assert all(slot.on_nvidia for slot in read_inventory(lab.runner.root).slots)
    assert list_jobs(lab.state)[0].note == "evening"
