"""A load that was watched rings at its end: once, when it was worth waiting for, never twice with a job."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from console.model.log import LoadProgress, PhaseTime
from console.model.reading import Reading
from console.model.snapshot import Snapshot
from console.model.state import ServiceState, StateName
from console.store.load_memory import LoadMemory
from console.store.state import State
from console.ui.app import Console
from console.ui.arrivals import Arrivals
from console.ui.terminal import notification
from tests.ui import operations, scenes
from tests.ui.operations import FakeDesk
from tests.ui.scenes import WALL, Frozen

RUN, NEXT = "a" * 32, "b" * 32


def moment(
    name: StateName,
    at: float,
    *,
    run: str | None = RUN,
    took: float | None = None,
    restarts: int = 0,
    up: bool | None = None,
    **state: object,
) -> Snapshot:
    """What is seen ``at`` seconds after the console began to look."""
    fired = up if up is not None else name in ("ready", "busy", "degraded")
    unit = msgspec.structs.replace(scenes.UNIT, invocation_id=run, restarts=restarts)
    return scenes.ready(
        now=1000.0 + at,
        state=ServiceState(name=name, elapsed_s=took, **state),  # type: ignore[arg-type]
        unit=Reading("unit", 2.0, unit, 1000.0 + at),
        load=LoadProgress(run, (PhaseTime("starting", WALL - 300),), fired_up_at=WALL if fired else None),
        profile=operations.KIMI,
    )


def told(*seen: tuple[Snapshot, str | None] | Snapshot) -> list[str]:
    arrivals = Arrivals()
    pairs = (one if isinstance(one, tuple) else (one, None) for one in seen)
    return [words for shown, job in pairs if (words := arrivals.look(shown, job)) is not None]


STARTING = moment("starting", 0, took=5)
LATER = moment("warming-up", 30, took=35)


@pytest.mark.parametrize("name", ["ready", "busy", "degraded"])
def test_a_load_that_was_watched_rings_once_when_the_engine_is_up(name: StateName):
    assert told(STARTING, LATER, moment(name, 31), moment("ready", 32), moment("busy", 33)) == [
        f"kimi-k2.5-int4 is {name}"
    ]


def test_a_load_that_dies_rings_once_and_says_why_however_often_systemd_tries_again():
    crash = moment("crashed", 31, reasons=("CUDA out of memory", "lower it"))
    again = moment("starting", 40, run=NEXT, took=1, restarts=1)
    dying = moment("starting", 80, run=NEXT, took=40, restarts=1)
    looping = moment("crash-looping", 81, run=NEXT, restarts=1, reasons=("CUDA out of memory",))
    assert told(STARTING, LATER, crash, crash, again, dying, looping) == [
        "kimi-k2.5-int4 crashed: CUDA out of memory"
    ]
    by_hand = moment("starting", 100, run="c" * 32, took=1)
    known = moment("starting", 140, run="c" * 32, took=41)
    dead = moment("crashed", 141, run="c" * 32, reasons=("NCCL",))
    assert told(STARTING, LATER, crash, by_hand, known, dead)[1:] == ["kimi-k2.5-int4 crashed: NCCL"]


def test_a_load_that_comes_up_after_a_crash_rings_again():
    again = moment("starting", 40, run=NEXT, took=1, restarts=1)
    loaded = moment("warming-up", 80, run=NEXT, took=40, restarts=1)
    up = moment("ready", 81, run=NEXT, restarts=1)
    assert told(STARTING, LATER, moment("crashed", 31), again, loaded, up) == [
        "kimi-k2.5-int4 crashed",
        "kimi-k2.5-int4 is ready",
    ]


def test_a_load_that_was_joined_in_the_middle_rings():
    assert told(moment("starting", 0, took=300), moment("warming-up", 5, took=305), moment("ready", 6)) != []


@pytest.mark.parametrize(
    "seen",
    [
        [moment("ready", 0), moment("ready", 1)],
        [moment("starting", 0, took=600), moment("ready", 1)],
        [moment("unreachable", 0, looking=True), moment("starting", 0.5, took=600), moment("ready", 2)],
        [STARTING, moment("starting", 10, took=15), moment("ready", 11)],
        [STARTING, LATER, moment("stopping", 31), moment("stopped", 32), moment("ready", 33)],
        [STARTING, LATER, moment("ready", 31, run=NEXT)],
        [STARTING, LATER, moment("ready", 31, up=False)],
        [moment("crashed", 0), moment("crashed", 1)],
    ],
    ids=[
        "already up",
        "the past is read",
        "first looks",
        "quick",
        "stopped by hand",
        "another run",
        "not up by its log",
        "long dead",
    ],
)
def test_what_was_not_waited_for_does_not_ring(seen: list[Snapshot]):
    assert told(*seen) == []


def test_what_a_job_does_is_for_the_job_to_tell_also_when_it_ends_first():
    assert told((STARTING, "running"), (LATER, None), moment("ready", 31)) == []
    assert told((STARTING, "running"), (LATER, "running"), (moment("ready", 31), "running")) == []
    assert told((STARTING, "running"), (LATER, "running"), (moment("crashed", 31), "running")) == []
    assert told(
        (STARTING, "running"), (moment("starting", 10, took=15), "interrupted"), LATER, moment("ready", 31)
    ) == ["kimi-k2.5-int4 is ready"], "its job died: nobody else would tell"


async def test_the_console_rings_notifies_and_remembers(tmp_path: Path):
    watch = Frozen(STARTING)
    memory = LoadMemory(State(tmp_path / "state"))
    desk = FakeDesk()
    app = Console(watch, scenes.SITE, desk=desk, memory=memory, encoding="utf-8", theme="dark")
    async with app.run_test(size=(120, 40)) as pilot:
        sent: list[str] = []
        assert app._driver is not None
        app._driver.write = sent.append  # type: ignore[method-assign]
        app.bell = lambda: sent.append("bell")  # type: ignore[method-assign]  # headless, it is silent
        for shown in (STARTING, LATER, up(), up(1)):
            watch.now = shown
            app.draw()
            await pilot.pause()
        await remembered(app)
        assert sent.count(notification("kimi-k2.5-int4 is ready")) == 1
        assert sent.count("bell") == 1
    found = memory.expected(operations.KIMI)
    assert found is not None and (found.loads, found.median_s) == (1, 300.0)


async def test_a_memory_that_cannot_be_written_is_a_notice_in_the_console(tmp_path: Path):
    (tmp_path / "file").write_text("")
    watch = Frozen(LATER)
    memory = LoadMemory(State(tmp_path / "file" / "state"))
    app = Console(watch, scenes.SITE, memory=memory, encoding="utf-8", theme="dark")
    async with app.run_test(size=(120, 40)) as pilot:
        watch.now = up()
        app.draw()
        await remembered(app)
        app.draw()
        await pilot.pause()
        (notice,) = [one.message for one in app._notifications]
        assert "the times of this load are not remembered" in notice and str(tmp_path) in notice


def up(after: float = 0) -> Snapshot:
    """Up, and whole: the journal shows it from its first line to the engine's word."""
    shown = moment("ready", 31 + after)
    unit = shown.unit.value
    assert unit is not None
    unit = msgspec.structs.replace(unit, started_at=WALL - 301)
    return msgspec.structs.replace(shown, unit=Reading("unit", 2.0, unit, shown.now))


async def remembered(app: Console) -> None:
    """The memory has been asked to keep the load, and has ended. A worker that is done has left the list."""
    for worker in [one for one in app.workers if one.name == "remember the load"]:
        await worker.wait()
