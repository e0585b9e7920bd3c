"""A move of a card is killed at every point of its way, and goes on to the other side, or back.

As for a switch, the points are not chosen: a first run notes all that it passes. The single writes
to the kernel are tried on a real one, with the rigs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from console.model.operation import Plan
from console.operations.rebind import plan_rebind
from console.sources.inventory import read_inventory
from console.store.lock import holder
from tests.operations.service_lab import (
    ServiceLab,
    hurry,
    killer,
    noting,
    points_in,
    service_lab,
    side_by_side,
)

CARD = "0000:e1:00"

#: For each side that the card can be on, moments in the middle of leaving it.
INSIDE = {
    "container": (
        "before check skipped",
        "after systemctl stop",
        "after nvidia-smi",
        "before unused done",
        "after dd",
        f"after to-vfio-{CARD} done",
        "after qm start",
        "before guest done",
    ),
    "vm": (
        "after qm shutdown",
        "after dd",
        f"after to-host-{CARD} done",
        "after nvidia-modprobe",
        "after systemctl start",
        "while ready",
    ),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    hurry(monkeypatch)
    monkeypatch.setattr("console.operations.rebind.clients.APART_S", 0.05)
    monkeypatch.setattr("console.operations.rebind.guests.BEAT_S", 0.05)
    return


class Sides:
    """A VM that names one card, which goes to and fro."""

    def __init__(self, lab: ServiceLab) -> None:
        self.lab = lab
        self.here, self.there = "container", "vm"
        path = lab.runner.root / "etc/pve/qemu-server/100.conf"
        lines = path.read_text().splitlines()
        kept = [line for line in lines if not line.startswith("hostpci") or CARD in line]
        path.write_text("\n".join(kept) + "\n")

    def plan(self) -> Plan:
        plan = self.lab.plan(partial(plan_rebind, target=self.there, asked=(CARD,)))
        assert not plan.blocked, [one for one in plan.findings if one.verdict == "fail"]
        return plan

    def turn(self) -> None:
        self.here, self.there = self.there, self.here

    def crash(self, point: str) -> str:
        """A job that dies there, on its way to the other side."""
        job = self.lab.put(self.plan())
        code = self.lab.run(job, on_point=killer(point))
        assert code == -signal.SIGKILL, f"{point}: exit status {code}: {self.lab.view(job).reasons}"
        assert holder(self.lab.state) is None, point
        assert self.lab.view(job).state == "interrupted", point
        return job

    def stands(self, side: str, point: str) -> None:
        """The world is wholly on one side."""
        inventory = read_inventory(self.lab.runner.root)
        card = next(slot for slot in inventory.slots if slot.name == CARD)
        vm = inventory.vm(100)
        assert vm is not None
        wanted = ["vfio-pci", "vfio-pci"] if side == "vm" else ["nvidia", "snd_hda_intel"]
        assert [function.driver for function in card.functions] == wanted, point
        assert {function.override for function in card.functions} == {None}, point
        assert vm.status == ("running" if side == "vm" else "stopped"), point
        assert self.lab.served() == (None if side == "vm" else "kimi-k2.5"), point
        minors = [slot.minor for slot in inventory.slots]
        assert minors == [*range(7), None if side == "vm" else 7], point

    def try_both_ways(self, point: str) -> None:
        """Die there and go back; die there again and go on. Then the sides change."""
        lab = self.lab
        job = self.crash(point)
        assert lab.run(job, "rollback") == 4, f"{point}: {lab.view(job).reasons}"
        self.stands(self.here, point)
        job = self.crash(point)
        assert lab.run(job, "resume") == 0, f"{point}: {lab.view(job).reasons}"
        self.stands(self.there, point)
        self.turn()

    def go(self, side: str) -> None:
        """To this side, with nothing in the way."""
        if self.here != side:
            job = self.lab.put(self.plan())
            assert self.lab.run(job) == 0, self.lab.view(job).reasons
            self.turn()


def try_each(side: str, points: Sequence[str]) -> None:
    with service_lab() as lab:
        sides = Sides(lab)
        sides.stands("container", "at the start")
        for point in points:
            sides.go(side)
            sides.try_both_ways(point)


def shared_out(side: str, points: Sequence[str], hands: int = 4) -> list[Callable[[], None]]:
    return [partial(try_each, side, points[hand::hands]) for hand in range(hands)]


def points_of_a_move(side: str) -> list[str]:
    with service_lab() as lab:
        sides = Sides(lab)
        sides.go(side)
        notes = lab.directory / "notes"
        job = lab.put(sides.plan())
        assert lab.run(job, on_point=noting(notes)) == 0, lab.view(job).reasons
        return points_in(notes)


@pytest.mark.rig
@pytest.mark.parametrize("side", ["container", "vm"])
def test_killed_at_every_point_of_a_move_it_goes_on_or_back(side: str) -> None:
    points = points_of_a_move(side)
    assert set(INSIDE[side]) <= set(points), set(INSIDE[side]) - set(points)
    side_by_side(shared_out(side, points[: points.index("after JobEnd")]))


def test_killed_in_the_middle_of_a_move_it_goes_on_or_back() -> None:
    side_by_side(
        [
            partial(try_each, "container", ("after qm start",)),
            partial(try_each, "vm", ("after nvidia-modprobe",)),
        ]
    )
