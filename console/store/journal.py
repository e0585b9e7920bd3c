"""The journal of a job: JSON lines that are on the disk before what they announce is done."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from console.model.operation import OPERATION_SCHEMA, Event, Progress
from console.store.disk import check_schema, read_whole, write_new
from console.store.state import StateProblem

_DECODER = msgspec.json.Decoder(Event)


class JournalProblem(StateProblem):
    """The journal cannot be read or written; the message names it, and says why and what to do."""


class _Header(msgspec.Struct, frozen=True):
    schema: int
    journal_of: str


class Journal:
    """A job's journal, opened for going on with it. One process at a time writes it.

    ``events`` are all that are in it. A last line that was cut short, by a crash in the
    middle of a write, is cut off. JournalProblem when it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events, end = _parse(_content(path), path)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._descriptor, end)
        except OSError as problem:
            raise _unwritable(path, problem) from None
        self._end = end

    @staticmethod
    def create(path: Path, job: str, events: tuple[Event, ...] = ()) -> None:
        """A new journal on the disk. OSError when it cannot be written."""
        header = msgspec.json.encode(_Header(OPERATION_SCHEMA, job))
        write_new(path, b"".join(line + b"\n" for line in (header, *map(msgspec.json.encode, events))))

    def append(self, event: Event, *, sync: bool = True) -> None:
        """Add an event; with ``sync`` it is on the disk on return. JournalProblem when it is not."""
        line = msgspec.json.encode(event) + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self._descriptor, line[written:], self._end + written)
            if sync:
                os.fdatasync(self._descriptor)
        except OSError as problem:
            with contextlib.suppress(OSError):  # else the reader ignores what was cut short
                os.ftruncate(self._descriptor, self._end)
            raise _unwritable(self.path, problem) from None
        self._end += len(line)
        self.events.append(event)

    def close(self) -> None:
        os.close(self._descriptor)


class Tail:
    """Reads a journal that another process writes: ``events`` grows with each ``update``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self._seen = 0

    def update(self) -> bool:
        """Whether there is something new. JournalProblem when it cannot be read."""
        try:
            size = self.path.stat().st_size
        except OSError as problem:
            raise JournalProblem(f"{self.path}: {problem.strerror}") from None
        if size == self._seen:
            return False
        events, _ = _parse(_content(self.path), self.path)
        self._seen = size
        changed = events != self.events
        self.events = events
        return changed


def read(path: Path) -> list[Event]:
    """All events of a journal. JournalProblem when it is not there, not ours or of a newer gpuops."""
    return _parse(_content(path), path)[0]


def _content(path: Path) -> bytes:
    try:
        return read_whole(path)
    except StateProblem as problem:
        raise JournalProblem(str(problem)) from None


def _parse(content: bytes, path: Path) -> tuple[list[Event], int]:
    """The events, and where the last whole line ends. Progress that is past is left out."""
    end = content.rfind(b"\n") + 1
    lines = content[:end].split(b"\n")[:-1]
    try:
        check_schema(lines[0] if lines else b"", path, OPERATION_SCHEMA)
    except StateProblem as problem:
        raise JournalProblem(str(problem)) from None
    events: list[Event] = []
    for number, line in enumerate(lines[1:], 2):
        try:
            event = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise JournalProblem(
                f"{path}:{number}: expected an event of a job: {problem}; "
                "look at the host by hand, then move the job's directory away"
            ) from None
        if events and isinstance(events[-1], Progress) and isinstance(event, Progress):
            events[-1] = event
        else:
            events.append(event)
    return events, end


def _unwritable(path: Path, problem: OSError) -> JournalProblem:
    return JournalProblem(f"{path}: {problem.strerror}; nothing is changed that is not announced there first")
