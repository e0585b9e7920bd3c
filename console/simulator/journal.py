"""A journal as journald keeps it, and ``journalctl``'s JSON of it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

#: Entries kept; journald would vacuum by size.
LIMIT = 20_000

#: Bytes journald takes for printable; anything below a space but tab and newline makes an array.
_PLAIN_CONTROL = frozenset("\t\n")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry. ``about`` is the unit that systemd itself speaks of (its ``UNIT=``)."""

    sequence: int
    at: float  # Unix seconds
    message: str
    pid: int
    identifier: str
    unit: str | None = None
    invocation: str | None = None
    about: str | None = None
    priority: int = 6
    transport: str = "stdout"


class Journal:
    """The journal of one machine: entries in order, and those who follow it."""

    def __init__(self, hostname: str, booted_at: float, wall: Callable[[], float]) -> None:
        self.hostname = hostname
        self._booted_at = booted_at
        self._wall = wall
        self._boot = hashlib.md5(f"boot {hostname}".encode()).hexdigest()
        self._source = hashlib.md5(f"journal {hostname}".encode()).hexdigest()
        self._entries: deque[Entry] = deque(maxlen=LIMIT)
        self._sequence = 0
        self._followers: set[asyncio.Event] = set()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def last(self) -> int:
        """The sequence of the newest entry; 0 before the first."""
        return self._sequence

    def write(
        self,
        message: str,
        *,
        pid: int,
        identifier: str,
        at: float | None = None,
        unit: str | None = None,
        invocation: str | None = None,
        about: str | None = None,
        priority: int = 6,
        transport: str = "stdout",
    ) -> None:
        """Add an entry; ``at`` defaults to now. Several lines become several entries."""
        moment = self._wall() if at is None else at
        for line in message.split("\n"):
            if not line:
                continue
            self._sequence += 1
            self._entries.append(
                Entry(
                    sequence=self._sequence,
                    at=moment,
                    message=line,
                    pid=pid,
                    identifier=identifier,
                    unit=unit,
                    invocation=invocation,
                    about=about,
                    priority=priority,
                    transport=transport,
                )
            )
        for follower in self._followers:
            follower.set()

    def cursor(self, entry: Entry) -> str:
        """``s=…;i=…`` as journalctl writes it; ``i`` counts entries in hexadecimal."""
        realtime = int(entry.at * 1e6)
        monotonic = max(0, int((entry.at - self._booted_at) * 1e6))
        check = hashlib.md5(f"{entry.sequence} {entry.message}".encode()).hexdigest()[:16]
        return (
            f"s={self._source};i={entry.sequence:x};b={self._boot};m={monotonic:x};t={realtime:x};x={check}"
        )

    def sequence_of(self, cursor: str) -> int | None:
        """The entry a cursor names; None when it is not one of this journal or was vacuumed."""
        parts = dict(part.partition("=")[::2] for part in cursor.split(";"))
        if parts.get("s") != self._source:
            return None
        try:
            sequence = int(parts.get("i", ""), 16)
        except ValueError:
            return None
        oldest = self._entries[0].sequence if self._entries else 1
        return sequence if sequence >= oldest - 1 else None

    def fields(self, entry: Entry) -> dict[str, object]:
        """All fields of an entry, by journald's names."""
        found: dict[str, object] = {
            "__CURSOR": self.cursor(entry),
            "__REALTIME_TIMESTAMP": str(int(entry.at * 1e6)),
            "__MONOTONIC_TIMESTAMP": str(max(0, int((entry.at - self._booted_at) * 1e6))),
            "_BOOT_ID": self._boot,
            "_HOSTNAME": self.hostname,
            "_TRANSPORT": entry.transport,
            "PRIORITY": str(entry.priority),
            "SYSLOG_IDENTIFIER": entry.identifier,
            "MESSAGE": _printable(entry.message),
        }
        if entry.transport != "kernel":
            found["_PID"] = str(entry.pid)
        if entry.unit is not None:
            found["_SYSTEMD_UNIT"] = entry.unit
        if entry.about is not None:
            found["UNIT"] = entry.about
        if entry.invocation is not None:
            found["INVOCATION_ID" if entry.about else "_SYSTEMD_INVOCATION_ID"] = entry.invocation
        return found

    async def follow(self, after: int, wanted: Callable[[Entry], bool]) -> AsyncIterator[Entry]:
        """Entries after ``after``, those there are and those to come."""
        news = asyncio.Event()
        self._followers.add(news)
        try:
            while True:
                news.clear()
                for entry in self.since(after):
                    after = entry.sequence
                    if wanted(entry):
                        yield entry
                await news.wait()
        finally:
            self._followers.discard(news)

    def since(self, after: int) -> list[Entry]:
        """Entries with a sequence above ``after``."""
        newer: list[Entry] = []
        for entry in reversed(self._entries):
            if entry.sequence <= after:
                break
            newer.append(entry)
        newer.reverse()
        return newer


def _printable(message: str) -> object:
    """Text, or the array of bytes that journalctl prints for text with control characters."""
    if all(character >= " " or character in _PLAIN_CONTROL for character in message):
        return message
    return list(message.encode())
