"""A switch is killed at every point of its way, and goes on to the new model, or back to the old one.

The points are not chosen: a first run notes all that it passes: before and after every line of the
journal, before and after every command that changes something, and once while each step waits.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from console.model.managed_unit import parse
from console.model.operation import Plan
from console.operations.engine import failure_of
from console.operations.service.request import request_of
from console.store.journal import read
from console.store.lock import holder
from tests.operations.service_lab import (
    ServiceLab,
    hurry,
    killer,
    noting,
    points_in,
    replace_request,
    service_lab,
    side_by_side,
)

STEPS = ("stop", "free", "disable", "write", "reload", "start", "ready", "smoke", "enable")

#: For each step, a moment in the middle of what it does.
INSIDE = (
    "before check skipped",
    "after systemctl stop",
    "while free",
    "after systemctl disable",
    "before mv",
    "after mv",
    "before systemctl daemon-reload",
    "after systemctl reset-failed",
    "after systemctl start",
    "while ready",
    "while smoke",
    "after systemctl enable",
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hurry(monkeypatch)
    return


class Sides:
    """Two models and the plans between them, made once; each time for the run that is there then."""

    def __init__(self, lab: ServiceLab) -> None:
        self.lab = lab
        self._texts: dict[str, str] = {}
        self._plans: dict[str, Plan] = {}
        self.here, self.there = "kimi", "qwen"

    def plan(self) -> Plan:
        known = self._plans.get(self.there)
        if known is None:
            known = self._plans[self.there] = self.lab.plan(self.there)
            assert not known.blocked, known.findings
        return self.lab.again(known)

    def turn(self) -> None:
        self.here, self.there = self.there, self.here

    def crash(self, point: str) -> str:
        """A job that dies there, on its way to the other side; nobody is kept waiting by the dead."""
        job = self.lab.put(self.plan())
        code = self.lab.run(job, on_point=killer(point))
        assert code == -signal.SIGKILL, f"{point}: exit status {code}: {self.lab.view(job).reasons}"
        assert failure_of(read(self.lab.journal_of(job))) is None, (
            "it turned back before it came to the point"
        )
        assert holder(self.lab.state) is None, point
        assert self.lab.view(job).state == "interrupted", point
        return job

    def stands(self, side: str, point: str) -> None:
        """The world is wholly on one side."""
        lab = self.lab
        profile = lab.profile(side)
        unit = parse(lab.text)
        assert (unit.managed, unit.edited, unit.profile) == (True, False, profile.name), point
        assert unit.argv[3:] == profile.argv(), point
        known = self._texts.setdefault(side, lab.text)
        assert lab.text == known, f"{point}: the unit of {side} is not the same, byte for byte"
        assert lab.served() == profile.served_name, point
        assert lab.property("UnitFileState") == "enabled", point
        assert lab.property("ActiveState") == "active", point
        assert lab.property("NeedDaemonReload") == "no", point
        assert lab.leftovers == [], point

    def try_both_ways(self, point: str) -> None:
        """Die there and go back; die there again and go on. Then the sides change."""
        lab = self.lab
        job = self.crash(point)
        assert lab.run(job, "rollback") == 4, f"{point}: {lab.view(job).reasons}"
        self.stands(self.here, point)
        assert lab.view(job).state == "rolled-back", point

        job = self.crash(point)
        assert lab.run(job, "resume") == 0, f"{point}: {lab.view(job).reasons}"
        self.stands(self.there, point)
        assert {step.state for step in lab.view(job).steps} <= {"done", "skipped"}, point
        self.turn()


def try_each(points: Sequence[str], trial: Callable[[Sides, str], None]) -> None:
    with service_lab() as lab:
        sides = Sides(lab)
        sides.stands("kimi", "at the start")
        for point in points:
            trial(sides, point)


def shared_out(
    points: Sequence[str], trial: Callable[[Sides, str], None], hands: int = 4
) -> list[Callable[[], None]]:
    return [partial(try_each, points[hand::hands], trial) for hand in range(hands)]


def points_of_a_switch(lab: ServiceLab) -> list[str]:
    notes = lab.directory / "notes"
    job = lab.put(lab.plan("qwen"))
    assert lab.run(job, on_point=noting(notes)) == 0, lab.view(job).reasons
    return points_in(notes)


def test_a_switch_has_a_point_before_inside_and_after_every_step() -> None:
    with service_lab() as lab:
        points = points_of_a_switch(lab)
    for step in STEPS:
        for moment in ("before {} doing", "after {} doing", "before {} done", "after {} done"):
            assert moment.format(step) in points
    assert {"before check skipped", "after check skipped"} <= set(points)
    assert set(INSIDE) <= set(points)


def test_killed_inside_any_step_it_goes_on_to_the_new_model_or_back_to_the_old() -> None:
    side_by_side(shared_out(INSIDE, Sides.try_both_ways))


@pytest.mark.rig
def test_killed_at_every_point_it_goes_on_to_the_new_model_or_back_to_the_old() -> None:
    with service_lab() as lab:
        points = points_of_a_switch(lab)
    side_by_side(shared_out(points[: points.index("after JobEnd")], Sides.try_both_ways))


def killed_on_its_way_back(sides: Sides, point: str) -> None:
    """The job dies in the middle, and once more while it is taken back."""
    lab = sides.lab
    job = sides.crash("after systemctl start")
    assert lab.run(job, "rollback", killer(point)) == -signal.SIGKILL, point
    assert lab.run(job, "rollback") == 4, f"{point}: {lab.view(job).reasons}"
    sides.stands(sides.here, point)


@pytest.mark.rig
def test_killed_again_at_every_point_of_the_way_back_it_still_comes_to_the_old_model() -> None:
    with service_lab() as lab:
        sides = Sides(lab)
        sides.stands("kimi", "at the start")
        job = sides.crash("after systemctl start")
        notes = lab.directory / "back"
        assert lab.run(job, "rollback", noting(notes)) == 4
        points = points_in(notes)
    assert "after stop undoing" in points
    side_by_side(shared_out(points[: points.index("after JobEnd")], killed_on_its_way_back))


def test_a_plan_that_is_stale_when_it_goes_on_is_taken_back_without_touching_what_a_hand_wrote() -> None:
    """The unit is edited while the job lies dead: neither way may overwrite that."""
    with service_lab() as lab:
        sides = Sides(lab)
        job = sides.crash("before mv")
        lab.text += "# by hand\n"
        edited = lab.text
        assert lab.run(job, "resume") == 5
        assert lab.text == edited
        assert any("changed" in reason for reason in lab.view(job).reasons)


def test_the_request_of_a_plan_is_all_that_another_process_needs() -> None:
    with service_lab() as lab:
        plan = lab.plan("qwen")
    request = request_of(plan)
    assert (request.was_running, request.was_enabled, request.enable) == (True, True, True)
    assert request.old_text is not None and parse(request.old_text).profile == "kimi-k2.5-int4"
    assert len(request.cards) == 8
    assert replace_request(plan) == plan.request
