"""The audit trail and the load times: what is kept, and a database that cannot be used."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from console.model.log import LoadProgress, PhaseTime
from console.model.operation import Actor, JobEnd, JobStart, Plan, PlannedStep
from console.store import audit, loads
from console.store.database import BUSY_S
from console.store.job_directory import JobFile
from console.store.jobs import get_job, list_jobs, survey
from console.store.state import State, StateProblem

FILE = JobFile(
    id="20261130-101502-switch",
    created_at=1000.0,
    actor=Actor("root", "10.0.0.9 50022 10.0.0.1 22"),
    note="the new one is faster",
    plan=Plan(
        action="switch", title="switch to b", target="b", made_at=999.0, steps=(PlannedStep("a", "do a"),)
    ),
)
START = JobStart(at=1001.0, direction="forward", pid=77, start_ticks=1, boot_id="b")


@pytest.fixture
def state(tmp_path: Path) -> State:
    state = State(tmp_path)
    state.create()
    return state


def test_who_what_why_when_and_how_it_ended(state: State) -> None:
    audit.asked(state, FILE, "forward", FILE.actor, 1000.0)
    audit.began(state, FILE, START)
    (run,) = audit.runs_of(state, FILE.id)
    assert (run.actor, run.asked_at, run.began_at, run.pid) == (FILE.actor, 1000.0, 1001.0, 77)
    assert (run.ended_at, run.outcome, run.seconds) == (None, None, None)
    audit.ended(state, FILE.id, JobEnd(at=1601.5, outcome="failed", reasons=("no", "nor that")))
    (run,) = audit.runs_of(state, FILE.id)
    assert (run.outcome, run.reasons, run.seconds) == ("failed", ("no", "nor that"), 600.5)
    assert state.database.stat().st_mode & 0o777 == 0o600


def test_a_database_that_another_process_is_about_to_fill_is_none_yet(state: State) -> None:
    sqlite3.connect(state.database).close()
    state.database.touch()
    assert audit.runs_of(state, FILE.id) == ()
    assert loads.expected(state, "kimi") is None
    audit.asked(state, FILE, "forward", FILE.actor, 1000.0)
    assert len(audit.runs_of(state, FILE.id)) == 1


def test_each_run_of_a_job_has_its_own_who(state: State) -> None:
    audit.asked(state, FILE, "forward", FILE.actor, 1000.0)
    audit.began(state, FILE, START)
    other = Actor("ann")
    audit.asked(state, FILE, "rollback", other, 2000.0)
    audit.began(state, FILE, JobStart(at=2001.0, direction="rollback", pid=88, start_ticks=2, boot_id="b"))
    audit.ended(state, FILE.id, JobEnd(at=2002.0, outcome="rolled-back"))
    first, second = audit.runs_of(state, FILE.id)
    assert (first.actor, first.outcome, first.pid) == (FILE.actor, None, 77)
    assert (second.actor, second.direction, second.pid) == (other, "rollback", 88)
    assert second.outcome == "rolled-back"


def test_a_run_that_could_not_be_recorded_when_it_was_asked_for_is_added_when_it_begins(state: State) -> None:
    audit.began(state, FILE, START)
    (run,) = audit.runs_of(state, FILE.id)
    assert (run.actor, run.asked_at, run.pid) == (FILE.actor, 1001.0, 77)


def test_a_job_whose_directory_is_gone_is_still_listed(state: State) -> None:
    audit.asked(state, FILE, "forward", FILE.actor, 1000.0)
    audit.began(state, FILE, START)
    audit.ended(state, FILE.id, JobEnd(at=1601.0, outcome="rolled-back", reasons=("it died",)))
    (view,) = list_jobs(state)
    assert view == get_job(state, FILE.id)
    assert (view.id, view.state, view.note, view.actor) == (FILE.id, "rolled-back", FILE.note, FILE.actor)
    assert (view.created_at, view.ended_at, view.reasons) == (1000.0, 1601.0, ("it died",))
    assert view.plan.title == "switch to b"


def test_nothing_is_made_by_looking(state: State) -> None:
    assert audit.runs_of(state, FILE.id) == ()
    assert loads.expected(state, "kimi") is None
    assert not state.database.exists()


def corrupt(state: State) -> None:
    state.database.write_bytes(b"SQLite format 3\0" + os.urandom(4000))


def of_the_future(state: State) -> None:
    with sqlite3.connect(state.database) as database:
        database.execute("pragma user_version = 2")


def of_another(state: State) -> None:
    with sqlite3.connect(state.database) as database:
        database.execute("create table jobs (x)")
        database.execute("pragma user_version = 1")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (corrupt, "not a database|malformed"),
        (of_the_future, "schema 2 is of a newer gpuops; this one knows 1: use the newer one"),
        (of_another, "no such table|no such column|has no column"),
    ],
)
def test_a_database_that_cannot_be_used_is_said_and_left_as_it_is(state: State, spoil, words: str) -> None:  # type: ignore[no-untyped-def]
    spoil(state)
    before = state.database.read_bytes()
    for use in (
        lambda: audit.asked(state, FILE, "forward", FILE.actor, 1.0),
        lambda: audit.runs_of(state, FILE.id),
        lambda: loads.expected(state, "kimi"),
    ):
        with pytest.raises(StateProblem, match=words) as problem:
            use()
        assert str(state.database) in str(problem.value)
    assert state.database.read_bytes() == before
    assert survey(state).problems


def test_a_database_that_another_writes_for_long_is_not_waited_for_for_ever(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit.asked(state, FILE, "forward", FILE.actor, 1000.0)
    monkeypatch.setattr("console.store.database.BUSY_S", 0.05)
    assert BUSY_S <= 5
    other = sqlite3.connect(state.database, isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(StateProblem, match="database is locked"):
        audit.began(state, FILE, START)
    assert len(audit.runs_of(state, FILE.id)) == 1  # reading goes on meanwhile
    other.close()
    audit.began(state, FILE, START)


def load(
    *seconds: float, invocation: str | None = "i", began: float = 100.0, up: bool = True
) -> LoadProgress:
    names = ("starting", "distributed", "weights", "kv-cache", "graphs", "weights")
    phases, at = [], began
    for name, taken in zip(names, seconds, strict=False):
        phases.append(PhaseTime(name, at, at + taken))  # type: ignore[arg-type]
        at += taken
    return LoadProgress(invocation, tuple(phases), fired_up_at=at if up else None)


def test_the_times_of_loads_are_kept_by_profile_and_phase(state: State) -> None:
    assert loads.record(state, "kimi", load(10, 5, 100, invocation="a"))
    assert loads.record(state, "kimi", load(12, 6, 140, invocation="b"))
    assert loads.record(state, "kimi", load(11, 5, 300, invocation="c"))
    assert loads.record(state, "qwen", load(1, 1, 1, invocation="d"))
    known = loads.expected(state, "kimi")
    assert known is not None
    assert (known.loads, known.median_s, known.fastest_s, known.slowest_s) == (3, 158.0, 115.0, 316.0)
    assert known.phases["weights"] == loads.PhaseExpected(140.0, 300.0)
    assert known.slower_than_ever("weights", 301.0)
    assert not known.slower_than_ever("weights", 299.0)
    assert not known.slower_than_ever("graphs", 1e6)


def test_a_load_is_remembered_once_whoever_saw_it(state: State) -> None:
    assert loads.record(state, "kimi", load(10, 5))
    assert not loads.record(state, "kimi", load(10, 5))
    assert loads.record(state, "kimi", load(10, 5, invocation=None))
    assert not loads.record(state, "kimi", load(10, 5, invocation=None))
    known = loads.expected(state, "kimi")
    assert known is not None
    assert known.loads == 2


def test_a_phase_that_is_passed_twice_counts_as_one(state: State) -> None:
    loads.record(state, "kimi", load(1, 1, 100, 1, 1, 20))
    known = loads.expected(state, "kimi")
    assert known is not None
    assert known.phases["weights"].median_s == 120.0


@pytest.mark.parametrize(
    "seen",
    [
        load(10, 5, up=False),
        LoadProgress("i", (PhaseTime("weights", 1.0, 2.0),), fired_up_at=3.0),
        LoadProgress("i", (), fired_up_at=3.0),
    ],
    ids=["never up", "joined late", "not seen"],
)
def test_a_load_that_was_not_seen_whole_is_not_remembered(state: State, seen: LoadProgress) -> None:
    assert not loads.record(state, "kimi", seen)
    assert loads.expected(state, "kimi") is None


def test_only_the_newest_loads_count(state: State) -> None:
    for number in range(loads.KEPT + 5):
        loads.record(state, "kimi", load(1000 - number * 10, invocation=str(number), began=number * 5000.0))
    known = loads.expected(state, "kimi")
    assert known is not None
    assert (known.loads, known.slowest_s) == (loads.KEPT, 950.0)
