"""What a host learns from loads that were only watched: once each, whole ones only, and trouble is told."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest

from console.model.log import Crash, LoadProgress, PhaseTime
from console.model.profile import Profile
from console.model.reading import Reading
from console.model.site import Site
from console.model.snapshot import Snapshot
from console.model.state import ServiceState, StateName
from console.model.unit import UnitStatus
from console.store import loads
from console.store.load_memory import LoadMemory
from console.store.state import State

RUN = "a" * 32
BEGAN = 1_796_000_000.0
KIMI = Profile(name="kimi", title="Kimi", key=1, args={"model-path": "/models/kimi"})
KIMI_DRAFT = msgspec.structs.replace(KIMI, name="kimi-draft")
PHASES = (PhaseTime("starting", BEGAN + 1, BEGAN + 30), PhaseTime("weights", BEGAN + 30, BEGAN + 500))
LOAD = LoadProgress(RUN, PHASES, fired_up_at=BEGAN + 585)


def snapshot(state: StateName = "ready", run: str = RUN, began: float = BEGAN, **changed: object) -> Snapshot:
    unit = UnitStatus(
        id="sglang.service", load_state="loaded", active_state="active", sub_state="running",
        invocation_id=run, started_at=began,
    )  # fmt: skip
    shown = Snapshot(
        now=1000.0,
        wall=BEGAN + 600,
        host="pve1",
        site=Site(),
        state=ServiceState(name=state),
        state_since=999.0,
        unit=Reading("unit", 2.0, unit, 999.0),
        health=Reading("health", 5.0),
        rates=Reading("rates", 1.0),
        load=msgspec.structs.replace(LOAD, invocation=run),
        profile=KIMI,
    )
    return msgspec.structs.replace(shown, **changed)


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path / "state")


def watched(memory: LoadMemory, *snapshots: Snapshot) -> list[bool]:
    """What a console does with each moment: whether there was a load to be kept."""
    found = []
    for one in snapshots:
        found.append(memory.new_load(one))
        if found[-1]:
            memory.record(one)
    return found


def known(state: State, profile: Profile = KIMI) -> int:
    found = LoadMemory(state).expected(profile)
    return 0 if found is None else found.loads


def test_a_load_that_was_only_watched_is_known_the_next_time(state: State):
    memory = LoadMemory(state)
    assert watched(memory, snapshot("starting"), snapshot("warming-up"), snapshot(), snapshot()) == [
        False,
        False,
        True,
        False,
    ]
    found = memory.expected(KIMI)
    assert found is not None
    assert (found.loads, found.median_s) == (1, 584.0)
    assert memory.problem() is None
    assert state.database.stat().st_mode & 0o777 == 0o600


def test_two_consoles_a_job_and_a_console_that_is_opened_again_count_it_once(state: State):
    first, second = LoadMemory(state), LoadMemory(state)
    watched(first, snapshot())
    watched(second, snapshot())
    assert not loads.record(state, KIMI.name, LOAD)
    watched(LoadMemory(state), snapshot("busy"))
    assert known(state) == 1
    watched(first, snapshot(run="b" * 32))
    assert known(state) == 2


def test_one_run_is_one_load_even_where_two_profiles_have_its_model(state: State):
    watched(LoadMemory(state), snapshot())
    watched(LoadMemory(state), snapshot(profile=KIMI_DRAFT))
    assert (known(state), known(state, KIMI_DRAFT)) == (1, 0)


@pytest.mark.parametrize(
    "shown",
    [
        snapshot(began=BEGAN - 120),
        snapshot("crashed"),
        snapshot("hung"),
        snapshot(load=msgspec.structs.replace(LOAD, crash=Crash("oom", "out of memory", BEGAN + 590))),
        snapshot(load=msgspec.structs.replace(LOAD, fired_up_at=None)),
        snapshot(profile=None),
        snapshot(unit=Reading("unit", 2.0)),
    ],
    ids=["joined late", "crashed", "hung", "crashed since", "not up", "no profile", "no unit"],
)
def test_what_says_nothing_of_a_whole_load_is_not_kept(state: State, shown: Snapshot):
    assert watched(LoadMemory(state), shown) == [False]
    assert not state.directory.exists()


def test_where_nothing_may_be_written_nothing_is_and_what_is_known_is_used(state: State):
    watched(LoadMemory(state), snapshot())
    reader = LoadMemory(state, keep=False)
    assert watched(reader, snapshot(run="b" * 32)) == [False]
    found = reader.expected(KIMI)
    assert found is not None and found.loads == 1


def test_a_fresh_install_has_no_memory_and_no_trouble(state: State):
    memory = LoadMemory(state)
    assert memory.expected(KIMI) is None
    assert memory.problem() is None
    assert not state.directory.exists(), "to look makes nothing"


def test_a_directory_that_cannot_be_made_is_told_once(tmp_path: Path):
    (tmp_path / "file").write_text("")
    memory = LoadMemory(State(tmp_path / "file" / "state"))
    assert memory.expected(KIMI) is None
    memory.problem()
    watched(memory, snapshot())
    told = memory.problem()
    assert told is not None and told.startswith("the times of this load are not remembered: ")
    assert str(tmp_path / "file") in told
    watched(memory, snapshot(run="b" * 32))
    assert memory.problem() is None


def test_a_full_disk_is_told_and_costs_the_load_only(state: State, monkeypatch: pytest.MonkeyPatch):
    watched(LoadMemory(state), snapshot())
    small = sqlite3.connect

    def full(*arguments: object, **more: object) -> sqlite3.Connection:
        connection = small(*arguments, **more)  # type: ignore[call-overload]
        pages = connection.execute("pragma page_count").fetchone()[0]
        connection.execute(f"pragma max_page_count = {pages}")
        return connection  # type: ignore[no-any-return]

    monkeypatch.setattr(sqlite3, "connect", full)
    memory = LoadMemory(state)
    for number in range(2000):
        memory.record(snapshot(run=f"{number:032}", profile=msgspec.structs.replace(KIMI, name=f"p{number}")))
        if (told := memory.problem()) is not None:
            break
    assert told is not None and "full" in told
    assert known(state) == 1


def test_a_database_of_a_newer_gpuops_is_told_and_the_profile_has_the_word(state: State):
    watched(LoadMemory(state), snapshot())
    with sqlite3.connect(state.database) as database:
        database.execute("pragma user_version = 99")
    memory = LoadMemory(state)
    assert memory.expected(KIMI) is None
    told = memory.problem()
    assert told is not None
    assert told.startswith("earlier loads are not known: ") and "newer gpuops" in told
