"""The host's lock: one holder at a time, known by name, gone with its process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest

from console.store.lock import Holder, Locked, hold, holder
from console.store.process import ProcessId, alive, boot_id, this_process
from console.store.state import State, StateProblem


@pytest.fixture
def state(tmp_path: Path) -> State:
    state = State(tmp_path)
    state.create()
    return state


def named(job: str = "20261130-101502-switch", process: ProcessId | None = None) -> Holder:
    return Holder(process=process or this_process(), job=job, action="switch", user="root", since=time.time())


def test_a_second_one_is_told_who_holds_it(state: State) -> None:
    with hold(state, named()):
        with pytest.raises(Locked) as locked, hold(state, named("other")):
            pytest.fail("two hold one lock")
        assert locked.value.holder == holder(state)
        words = str(locked.value)
        assert words.startswith(
            "another operation holds the host: switch, job 20261130-101502-switch, by root"
        )
        assert f"pid {os.getpid()}" in words
        assert holder(state) is not None
    assert holder(state) is None
    with hold(state, named("other")):
        pass


def test_nobody_holds_a_lock_that_was_never_taken(state: State) -> None:
    assert holder(state) is None


def test_the_lock_of_a_killed_process_is_free_and_its_name_is_stale(state: State) -> None:
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        with hold(state, named(process=this_process())):
            os.write(told, b"x")
            signal.pause()
    os.read(ready, 1)
    held = holder(state)
    assert held is not None
    assert held.process.pid == child
    with pytest.raises(Locked), hold(state, named()):
        pytest.fail("it is held")
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert holder(state) is None  # a zombie holds nothing
    os.waitpid(child, 0)
    assert b"switch" in state.lock.read_bytes()  # its name still stands there
    assert holder(state) is None
    with hold(state, named("next")):
        assert holder(state) == msgspec.json.decode(state.lock.read_bytes(), type=Holder)


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(this_process(), start_ticks=1),
        msgspec.structs.replace(this_process(), boot_id="before the reboot"),
        ProcessId(0, 0, boot_id()),
        ProcessId(-1, 0, boot_id()),
        ProcessId(2**30, 0, boot_id()),
    ],
    ids=["pid used again", "another boot", "none", "all", "no such pid"],
)
def test_a_pid_alone_is_no_proof_of_life(state: State, other: ProcessId) -> None:
    assert alive(this_process())
    assert not alive(other)
    state.lock.write_bytes(msgspec.json.encode(named(process=other)))
    assert holder(state) is None


def test_a_lock_file_with_rubbish_can_be_taken(state: State) -> None:
    state.lock.write_bytes(b'{"process":{"pi\xff')
    assert holder(state) is None
    with hold(state, named()):
        assert holder(state) is not None


def test_a_lock_that_is_soon_free_is_waited_for(state: State) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with hold(state, named()):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    threading.Timer(0.1, leave.set).start()
    with hold(state, named("mine"), wait_s=10):
        found = holder(state)
    thread.join()
    assert found is not None
    assert found.job == "mine"


def test_a_directory_without_a_place_for_the_lock_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(StateProblem, match=r"lock: No such file or directory"),
        hold(State(tmp_path / "x"), named()),
    ):
        pytest.fail("it cannot be held")
