"""A job is killed at every point of its way, and goes on, or back, as if it had not been.

The points are not chosen: a first run notes all that it passes, before, inside and after every
line of the journal and every move of every step, and then a process is killed at each.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from console.store.job_directory import journal_path
from console.store.jobs import get_job
from console.store.journal import read
from console.store.lock import holder
from console.store.state import State
from tests.operations.job_lab import (
    in_a_process,
    killer,
    make_old,
    plan_in,
    points_of,
    put_on_disk,
    world,
)


class Bench:
    """A fresh world and a fresh job for each crash."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made = 0

    def fresh(self, kind: str = "plain") -> tuple[State, str, Path]:
        self._made += 1
        place = self._directory / str(self._made)
        place.mkdir()
        files = make_old(place / "files")
        state = State(place / "state")
        return state, put_on_disk(state, plan_in(files, kind)), files

    def points(self, kind: str, direction: str = "resume") -> list[str]:
        state, job, _ = self.fresh(kind)
        return points_of(state, job, "resume" if direction == "resume" else "rollback", state.directory / "n")

    def crashed(self, nth: int, kind: str = "plain") -> tuple[State, str, Path]:
        """A job killed at the nth point of its way forward."""
        state, job, files = self.fresh(kind)
        kill(state, job, "resume", nth)
        return state, job, files


def kill(state: State, job: str, direction: str, nth: int) -> None:
    way = "resume" if direction == "resume" else "rollback"
    code = in_a_process(state, job, way, killer(nth, journal_path(state, job)))
    assert code == -signal.SIGKILL
    read(journal_path(state, job))  # whatever was cut short, it can be read
    assert holder(state) is None  # and nobody is kept waiting by the dead


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """In memory where that can be: a killed process, other than a power cut, loses nothing of it."""
    memory = Path("/dev/shm")
    place = tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path)
    yield Bench(Path(place))
    shutil.rmtree(place)


def test_the_points_are_all_there(bench: Bench) -> None:
    forward = bench.points("plain")
    for file in "abc":
        step = f"replace-{file}"
        for moment in ("look", "do", "half", "written", "moved", "did", "verified"):
            assert f"{step} {moment}" in forward
        for moment in ("before", "inside", "after"):
            assert f"{moment} {step} doing" in forward
            assert f"{moment} {step} done" in forward
    back = bench.points("broken")
    for file in "abc":
        assert {f"inside replace-{file} undoing", f"replace-{file} undid"} <= set(back)


def test_killed_anywhere_on_its_way_it_goes_on_to_the_new_state_or_back_to_the_old(bench: Bench) -> None:
    """From the very same moment of the crash both ways are tried."""
    points = bench.points("plain")
    for nth, point in enumerate(points[: points.index("after JobEnd")]):
        state, job, files = bench.crashed(nth)
        place, crashed = files.parent, files.parent.with_suffix(".crashed")
        shutil.copytree(place, crashed)
        assert get_job(state, job).state == "interrupted", point

        assert in_a_process(state, job, "resume") == 0, point
        assert world(files) == "new", point
        view = get_job(state, job)
        assert view.state == "done", point
        assert {step.state for step in view.steps} <= {"done", "skipped"}, point

        shutil.rmtree(place)
        crashed.rename(place)
        assert in_a_process(state, job, "rollback") == 4, point
        assert world(files) == "old", point
        view = get_job(state, job)
        assert view.state == "rolled-back", point
        assert {step.state for step in view.steps} <= {"waiting", "undone"}, point


def test_killed_anywhere_on_its_way_back_it_still_comes_to_the_old_state(bench: Bench) -> None:
    """The last step fails by itself, so the same process turns round; it is killed there, too."""
    points = bench.points("broken")
    for nth in range(points.index("after broken failed"), points.index("after JobEnd")):
        state, job, files = bench.crashed(nth, "broken")
        assert in_a_process(state, job, "rollback") == 4, points[nth]
        assert world(files) == "old", points[nth]
        view = get_job(state, job)
        assert view.state == "rolled-back", points[nth]
        assert view.reasons == ("it cannot be done",), points[nth]


@pytest.mark.parametrize("direction", ["resume", "rollback"])
def test_killed_twice_it_still_comes_to_an_end(bench: Bench, direction: str) -> None:
    """Killed in the middle, then at every point of the way that was to put things right."""
    middle = bench.points("plain").index("replace-b written")

    def crashed() -> tuple[State, str, Path]:
        return bench.crashed(middle)

    points = _points_after(crashed, direction)
    for nth, point in enumerate(points[: points.index("after JobEnd")]):
        state, job, files = crashed()
        kill(state, job, direction, nth)
        way = "resume" if direction == "resume" else "rollback"
        assert in_a_process(state, job, way) == (0 if direction == "resume" else 4), point
        assert world(files) == ("new" if direction == "resume" else "old"), point


def _points_after(crashed: Callable[[], tuple[State, str, Path]], direction: str) -> list[str]:
    state, job, _ = crashed()
    way = "resume" if direction == "resume" else "rollback"
    return points_of(state, job, way, state.directory / "n")
