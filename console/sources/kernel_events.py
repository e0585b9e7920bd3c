"""What the kernel says about the cards as it happens: its log by journalctl, its events by netlink."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

from console.model.rebind.inventory import Slot
from console.model.rebind.kernel_log import CardEvent, Flood, read_kernel_line, read_uevent
from console.model.text import clean
from console.sources.journal import EntryDecoder
from console.sources.source import Unavailable
from console.transport.runner import Runner

#: include/uapi/linux/netlink.h; group 1 is what the kernel itself sends.
_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1

#: One message is 2 KiB at most (UEVENT_BUFFER_SIZE); a whole rebind of eight cards is some hundred.
_MESSAGE = 8192
_RECEIVE_BUFFER = 1024 * 1024

#: SO_RCVBUFFORCE, which Python does not name: past the system's limit, for root.
_BUFFER_FORCE = 33

#: Events that wait for a slow reader; older ones are dropped, with a word.
_WAITING = 512

_BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)

#: Lines of the log that ``recent_events`` looks through.
_BACKLOG = 5000


class KernelEvents:
    """Follows the kernel for as long as ``watch`` is read. ``slots`` are the cards, asked at each line."""

    def __init__(
        self,
        host: Runner,
        slots: Callable[[], Iterable[Slot]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        backoff: Sequence[float] = _BACKOFF,
    ) -> None:
        self._host = host
        self._slots = slots
        self._clock = clock
        self._wall = wall
        self._backoff = tuple(backoff)
        self._waiting: asyncio.Queue[CardEvent] = asyncio.Queue(_WAITING)
        self._flood = Flood()
        self._decode = EntryDecoder()
        self._cursor: str | None = None
        self._unread = 0  # events that were dropped since the last one was read

    async def watch(self) -> AsyncIterator[CardEvent]:
        """Events from now on, for ever. A source that fails is an event of kind ``source``, no exception."""
        tasks = [asyncio.create_task(self._follow_log())]
        if self._host.root == Path("/"):  # another machine's events do not come through our socket
            tasks.append(asyncio.create_task(self._follow_uevents()))
        try:
            while True:
                event = await self._waiting.get()
                if self._unread:
                    words = f"{self._unread} older events about cards were not read in time"
                    self._unread = 0
                    yield CardEvent(at=event.at, card=None, kind="source", words=words)
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _put(self, event: CardEvent) -> None:
        for one in self._flood.let(event, self._clock()):
            if self._waiting.full():
                self._waiting.get_nowait()
                self._unread += 1
            self._waiting.put_nowait(one)

    def _complain(self, words: str) -> None:
        self._put(CardEvent(at=self._wall(), card=None, kind="source", words=clean(words)))

    async def _follow_log(self) -> None:
        ends = 0
        said = ""
        while True:
            heard = False
            command = ["journalctl", "-k", "-f", "-o", "json", "--no-pager", "--output-fields=MESSAGE"]
            command += (
                ["-n", "0"] if self._cursor is None else ["--no-tail", f"--after-cursor={self._cursor}"]
            )
            async with self._host.stream(command) as stream:
                async for raw in stream.lines():
                    heard = True
                    self._take(raw)
                reason = stream.reason or "journalctl ended"
            ends = 0 if heard else ends + 1
            if "cursor" in reason.lower():
                self._cursor = None
            if heard or reason != said:
                said = reason
                self._complain(f"the kernel's log cannot be followed: {reason}")
            await asyncio.sleep(self._backoff[min(ends, len(self._backoff) - 1)])

    def _take(self, raw: bytes) -> None:
        line = self._decode(raw)
        self._cursor = line.cursor or self._cursor
        event = read_kernel_line(line.text, line.at, self._slots())
        if event is not None:
            self._put(event)

    async def _follow_uevents(self) -> None:
        try:
            listening = open_uevents()
        except OSError as problem:
            self._complain(f"the kernel's device events cannot be followed: {problem.strerror}")
            return
        loop = asyncio.get_running_loop()
        failures = 0
        with listening:
            while True:
                try:
                    message, sender = await loop.sock_recvfrom(listening, _MESSAGE)
                except OSError as problem:
                    # ENOBUFS: more came than the buffer holds; what is lost is lost, the rest goes on.
                    self._complain(f"some of the kernel's device events were lost: {problem.strerror}")
                    # A socket that fails each time fails at once: without a pause nothing else would run.
                    await asyncio.sleep(self._backoff[min(failures, len(self._backoff) - 1)])
                    failures += 1
                    continue
                failures = 0
                if sender[0] != 0:  # only the kernel's own word counts
                    continue
                event = read_uevent(message, self._wall(), self._slots())
                if event is not None:
                    self._put(event)


def open_uevents() -> socket.socket:
    """A socket that receives every event of the kernel's device model. OSError where that is not allowed."""
    listening = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _KOBJECT_UEVENT)
    try:
        listening.setblocking(False)
        with contextlib.suppress(OSError):  # not as root: the default has to do
            listening.setsockopt(socket.SOL_SOCKET, _BUFFER_FORCE, _RECEIVE_BUFFER)
        listening.bind((0, _KERNEL_GROUP))
    except OSError:
        listening.close()
        raise
    return listening


async def recent_events(
    host: Runner, slots: Iterable[Slot], since_s: float, *, deadline: float = 5.0
) -> tuple[CardEvent, ...]:
    """What the kernel said about the cards in the last ``since_s`` seconds, oldest first.

    Raises Unavailable with journalctl's reason.
    """
    cards = tuple(slots)
    command = ["journalctl", "-k", "-o", "json", "--no-pager", "--output-fields=MESSAGE"]
    command += ["-n", str(_BACKLOG), f"--since=-{since_s:.0f}s"]
    result = await host.run(command, deadline=deadline)
    if not result.ok:
        raise Unavailable(clean(result.reason))
    lines = map(EntryDecoder(), result.stdout.splitlines())
    events = (read_kernel_line(line.text, line.at, cards) for line in lines)
    return tuple(event for event in events if event is not None)
