"""A load that is followed: which looks at the unit count, and when one that died is believed to be dead.

systemctl's answers are scripted, one a look; the last one stays. The monitor is the real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from console.model.engine import Probe
from console.model.log import LogLine
from console.model.reading import Reading
from console.model.site import Site
from console.model.unit import UnitStatus
from console.operations.service import following, starting, world
from console.operations.service.following import Followed, follow_to_ready
from console.operations.service.request import ServiceRequest
from console.operations.service.starting import start
from console.operations.step import Context, StepFailed
from console.sources.engine.client import Answer
from console.sources.listeners import Listener
from console.sources.monitor import Monitor
from console.sources.source import Unavailable
from console.store.state import State
from console.transport.runner import Result

UNIT = "sglang.service"
BEFORE, OURS, LATER, OTHER = (letter * 32 for letter in "abcd")

Look = UnitStatus | Unavailable


def unit(invocation: str | None, active: str = "active", sub: str = "running", **more: Any) -> UnitStatus:
    known: dict[str, Any] = {
        "id": UNIT,
        "load_state": "loaded",
        "active_state": active,
        "sub_state": sub,
        "invocation_id": invocation,
        "restarts": 0,
        **more,
    }
    return UnitStatus(**known)


LOADING = unit(OURS)
STOPPED_BEFORE = unit(BEFORE, "inactive", "dead")
FAILED_BEFORE = unit(BEFORE, "failed", "failed", result="exit-code", exit_status=1)
WAITS = unit(OURS, "activating", "auto-restart", result="exit-code", exit_status=2)
RESTARTED = unit(LATER, restarts=1)


class Scene:
    """The unit, the engine and the commands; the engine answers once all looks were given, if it is to."""

    def __init__(self, looks: Sequence[Look], *, serves: bool, look_s: float = 0.0) -> None:
        self.looks = list(looks)
        self.given = 0
        self.commands: list[tuple[str, ...]] = []
        self.said: list[str] = []
        self._serves = serves
        self._look_s = look_s
        self._now = 1000.0
        site = Site()
        sources: Any = SimpleNamespace(
            unit=self, client=SimpleNamespace(get=self.get), service=self, host=self, nvml=None
        )
        self.monitor = Monitor(site, sources, clock=self.clock, wall_clock=self.clock)
        self.root = Path("/")
        self.context = Context(
            site=site,
            profiles=(),
            monitor=self.monitor,
            state=State(Path("/nowhere")),
            clock=self.clock,
            wall_clock=self.clock,
            say=lambda words, **_: self.said.append(words),
        )

    def clock(self) -> float:
        self._now += 0.001
        return self._now

    async def read(self) -> UnitStatus:
        self._now += self._look_s
        look = self.looks[min(self.given, len(self.looks) - 1)]
        self.given += 1
        if isinstance(look, Unavailable):
            raise look
        return look

    async def get(self, path: str, deadline: float) -> Answer:
        up = self._serves and self.given >= len(self.looks)
        body = json.dumps({"data": [{"id": "m"}]}).encode() if path == "/v1/models" else b""
        return Answer(Probe(path, 200 if up else None, None if up else "refused", 0.01), body if up else b"")

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        self.commands.append(tuple(argv))
        return Result(argv=tuple(argv), returncode=0, stdout=b"", stderr=b"")

    def told(self, line: LogLine) -> None:
        """The journal has brought this line."""
        nothing: Reading[tuple[LogLine, ...]] = Reading("journal", 2.0)
        self.monitor.take_journal(nothing.fresh((line,), self.clock()))

    def follow(self, before: str | None = BEFORE) -> str:
        wanted = Followed(unit=UNIT, profile=None, served_name="m", limit_s=600.0, before=before)
        return asyncio.run(asyncio.wait_for(follow_to_ready(self.context, wanted), 10))

    def why(self, before: str | None = BEFORE) -> str:
        """Why the load failed."""
        with pytest.raises(StepFailed) as failed:
            self.follow(before)
        return str(failed.value)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "BEAT_S", 0.0)
    monkeypatch.setattr(following, "LINES_S", 0.05)
    own = (Listener(4242, "python", UNIT, own=True),)
    monkeypatch.setattr(following, "listeners", lambda *_, **__: own)


# Looks that were asked for too early ---------------------------------------------------------------


@pytest.mark.parametrize(
    "early",
    [
        [STOPPED_BEFORE],
        [FAILED_BEFORE, FAILED_BEFORE, FAILED_BEFORE],
        [unit(BEFORE)],
        [unit(BEFORE, "deactivating", "stop-sigterm")],
    ],
    ids=["stopped", "failed, again and again", "running", "stopping"],
)
def test_what_is_read_of_the_run_before_the_start_says_nothing_of_this_one(early: list[Look]) -> None:
    assert Scene([*early, LOADING, LOADING], serves=True).follow().startswith("ready")


def test_one_look_of_death_is_not_believed_when_the_next_shows_the_run_alive() -> None:
    dead = msgspec.structs.replace(LOADING, active_state="inactive", sub_state="dead")
    assert Scene([LOADING, dead, LOADING, dead, LOADING], serves=True).follow().startswith("ready")


def test_a_first_look_of_death_is_not_believed_where_nobody_knows_what_ran_before() -> None:
    early = unit(OTHER, "failed", "failed", result="exit-code")
    assert Scene([early, LOADING, LOADING], serves=True).follow(before=None).startswith("ready")


def test_a_unit_that_never_shows_another_run_was_not_started() -> None:
    why = Scene([STOPPED_BEFORE], serves=False, look_s=5.0).why()
    assert why == (
        "sglang.service was not started: for a minute systemctl tells of the run before only, "
        "which is inactive"
    )


def test_a_crash_of_the_run_before_is_not_told_as_the_death_of_this_one() -> None:
    scene = Scene([LOADING, unit(OURS, "failed", "failed", result="oom-kill")], serves=False)
    said = "torch.OutOfMemoryError: CUDA out of memory."
    line = LogLine(at=scene.clock(), text=said, kind="crash", invocation=BEFORE)
    scene.told(line)
    assert scene.monitor.load.progress.crash is not None
    assert scene.why() == "sglang.service ended while it was loading: failed, result oom-kill"


# Deaths --------------------------------------------------------------------------------------------


def test_two_looks_of_death_are_believed() -> None:
    dead = unit(OURS, "failed", "failed", result="exit-code", exit_status=1)
    scene = Scene([LOADING, dead], serves=False)
    assert scene.why() == (
        "sglang.service ended while it was loading: failed, result exit-code, exit status 1"
    )
    assert scene.given == 3


def test_a_run_that_died_before_it_was_first_looked_at_is_dead() -> None:
    dead = unit(OURS, "failed", "failed", result="signal")
    assert "failed, result signal" in Scene([STOPPED_BEFORE, dead], serves=False).why()


def test_the_engines_own_last_words_come_first() -> None:
    scene = Scene([unit(OURS, "failed", "failed", result="exit-code")], serves=False)
    said = "torch.OutOfMemoryError: CUDA out of memory."
    line = LogLine(at=scene.clock() - 50, text=said, kind="crash", invocation=OURS)
    scene.told(line)
    assert scene.why().startswith("the engine died: ")


def test_a_unit_that_ended_well_while_it_was_loading_has_ended() -> None:
    ended = unit(OURS, "inactive", "dead", exit_code="exited", exit_status=0)
    why = Scene([LOADING, ended], serves=False).why()
    assert why == "sglang.service was stopped while it was loading, exit status 0"


def test_a_unit_that_is_seen_on_its_way_down_was_stopped_by_somebody() -> None:
    stopping, stopped = unit(OURS, "deactivating", "stop-sigterm"), unit(OURS, "inactive", "dead")
    why = Scene([LOADING, stopping, stopped], serves=False).why()
    assert why == "somebody stopped sglang.service while it was loading"


@pytest.mark.parametrize(
    "looks",
    [[LOADING, RESTARTED], [LOADING, LOADING, unit(LATER, restarts=7)]],
    ids=["once", "between two looks, for the seventh time"],
)
def test_a_run_that_systemd_replaced_between_two_looks_is_dead(looks: list[UnitStatus]) -> None:
    """However well the next one does: it dies of the same, minutes later."""
    why = Scene(looks, serves=True).why()
    restart = looks[-1].restarts
    assert why == (
        f"sglang.service ended while it was loading: another run has taken its place (restart {restart})"
    )


@pytest.mark.parametrize(
    "looks",
    [[LOADING, WAITS], [LOADING, WAITS, RESTARTED], [WAITS, RESTARTED]],
    ids=["waits", "seen", "first"],
)
def test_a_run_that_waits_for_its_restart_is_dead(looks: list[Look]) -> None:
    why = Scene(looks, serves=False).why()
    assert why == ("sglang.service ended while it was loading: activating, result exit-code, exit status 2")


def test_silence_between_two_looks_of_death_changes_nothing() -> None:
    dead = unit(OURS, "failed", "failed", result="signal")
    scene = Scene([LOADING, dead, Unavailable("no answer"), dead], serves=False)
    assert "failed, result signal" in scene.why()


# Starts --------------------------------------------------------------------------------------------

REQUEST = ServiceRequest(unit=UNIT, path="/etc/systemd/system/sglang.service", invocation=BEFORE)


def test_a_start_waits_for_another_run_and_tells_which_one_was_before() -> None:
    scene = Scene([FAILED_BEFORE, FAILED_BEFORE, STOPPED_BEFORE, LOADING], serves=False)
    assert asyncio.run(start(scene.context, REQUEST)) == BEFORE
    assert [words[1] for words in scene.commands] == ["reset-failed", "start"]
    assert scene.given == 4


def test_a_start_that_took_hold_meanwhile_is_not_asked_for_again() -> None:
    """Of a job that died just after it had asked: its start may begin after the next job's first look."""
    scene = Scene([LOADING], serves=False, look_s=1.0)
    assert asyncio.run(start(scene.context, REQUEST)) is None
    assert scene.commands == []


def test_a_start_that_is_only_queued_is_taken_back() -> None:
    queued = msgspec.structs.replace(STOPPED_BEFORE, job=4117)
    scene = Scene([queued, STOPPED_BEFORE], serves=False)
    words = asyncio.run(starting.Start(REQUEST).undo(scene.context))
    assert scene.commands == [("systemctl", "stop", "--no-block", "--", UNIT)]
    assert "no process left" in words
