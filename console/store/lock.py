"""The host's lock: one operation at a time, and a name for who holds it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from console.store.disk import read_whole
from console.store.process import ProcessId, alive
from console.store.state import State, StateProblem

#: With these words begins why a job did not begin: another had the lock.
LOCKED_WORDS = "another operation holds the host"

_PAUSE_S = 0.02


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the lock, since when (Unix seconds), for which job."""

    process: ProcessId
    job: str
    action: str
    user: str
    since: float

    @property
    def words(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.action}, job {self.job}, by {self.user} since {since}, pid {self.process.pid}"


class Locked(Exception):
    """Another operation holds the host. ``holder`` is None in the moment before it has given its name."""

    def __init__(self, holder: Holder | None) -> None:
        who = holder.words if holder is not None else "it has just begun and has not given its name yet"
        super().__init__(f"{LOCKED_WORDS}: {who}")
        self.holder = holder


@contextmanager
def hold(state: State, holder: Holder, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock while the context is open, and never longer than this process lives (flock(2)).

    Locked when another still has it after ``wait_s`` seconds; StateProblem when there can be none.
    """
    try:
        descriptor = os.open(state.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise StateProblem(f"{state.lock}: {problem.strerror}; the host's lock is there") from None
    try:
        _take(descriptor, state, wait_s)
        _sign(descriptor, msgspec.json.encode(holder), state)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def holder(state: State) -> Holder | None:
    """Who holds the lock; None when nobody does, or who did is dead. StateProblem when it cannot be read."""
    if not state.lock.exists():
        return None
    content = read_whole(state.lock)
    try:
        found = msgspec.json.decode(content, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # nobody, or one who signs at this moment
    return found if alive(found.process) else None


def _take(descriptor: int, state: State, wait_s: float) -> None:
    ends = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends:
                raise Locked(holder(state)) from None
            time.sleep(_PAUSE_S)
        except OSError as problem:
            raise StateProblem(f"{state.lock}: {problem.strerror}; it must be on a local disk") from None
        else:
            return


def _sign(descriptor: int, content: bytes, state: State) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)
        os.fsync(descriptor)
    except OSError as problem:
        raise StateProblem(f"{state.lock}: {problem.strerror}; the host's lock is there") from None
