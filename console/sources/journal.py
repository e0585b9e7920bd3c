"""The service's journal as it grows, in batches, each line read and safe to print."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from console.model.log import LogLine
from console.model.reading import Reading
from console.model.text import clean
from console.sources.engine_log import read_line, read_manager_line
from console.transport.runner import Runner, Stream

#: Characters of one line that are kept.
TEXT_LIMIT = 2000
CUT_MARK = " … (cut)"

#: Lines of the past that are read at first.
BACKLOG = 3000

#: Seconds for which lines are gathered into one reading.
GATHER = 0.25

#: Lines held for the next reading; past this journalctl is left to wait.
BATCH_LIMIT = 4096

#: The event loop gets its turn after this many lines.
_TURN = 64

_BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)

FIELDS = "MESSAGE,_PID,_SYSTEMD_INVOCATION_ID,INVOCATION_ID,UNIT"


class JournalSource:
    """Follows one unit's journal: ``Reading.value`` is the lines that are new since the reading before.

    An idle journal gives an empty reading once a period, so it does not look
    stale. When journalctl ends, the readings carry its reason in ``error`` and
    no lines until it runs again, from the cursor of the last line.
    """

    name = "journal"

    def __init__(
        self,
        runner: Runner,
        unit: str,
        period: float = 2.0,
        *,
        backlog: int = BACKLOG,
        backoff: Sequence[float] = _BACKOFF,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.period = period
        self.deadline = period
        self._runner = runner
        self._unit = unit
        self._backlog = backlog
        self._backoff = tuple(backoff)
        self._clock = clock
        self._decoder = EntryDecoder()
        self._cursor: str | None = None
        self._last_at: float | None = None  # of the newest line, Unix seconds

    async def watch(self) -> AsyncIterator[Reading[tuple[LogLine, ...]]]:
        reading: Reading[tuple[LogLine, ...]] = Reading(self.name, self.period)
        silent_ends = 0
        while True:
            heard = False
            async with self._runner.stream(self._command()) as stream, _pump(stream, self._decoder) as inbox:
                while (lines := await inbox.take(self.period)) is not None:
                    heard = heard or bool(lines)
                    reading = reading.fresh(self._keep(lines), self._clock())
                    yield reading
                reason = clean(stream.reason or "journalctl ended")
            silent_ends = 0 if heard else silent_ends + 1
            if self._cursor is not None and "cursor" in reason.lower():  # it was vacuumed away
                self._cursor = None
                reading = reading.fresh((self._notice(),), self._clock())
                yield reading
            # The lines of the last reading were handed over; a failure must not hand them over again.
            handed_over = None if reading.value is None else ()
            reading = msgspec.structs.replace(reading, value=handed_over, error=reason)
            yield reading
            await asyncio.sleep(self._backoff[min(silent_ends, len(self._backoff) - 1)])

    def _command(self) -> list[str]:
        command = ["journalctl", "-f", "-o", "json", "--no-pager", "--all", f"--output-fields={FIELDS}"]
        command += ["-u", self._unit]
        if self._cursor is not None:
            return [*command, "--no-tail", f"--after-cursor={self._cursor}"]
        if self._last_at is not None:
            return [*command, "--no-tail", f"--since=@{self._last_at:.6f}"]
        return [*command, "-n", str(self._backlog)]

    def _keep(self, lines: tuple[LogLine, ...]) -> tuple[LogLine, ...]:
        if lines:
            self._cursor = lines[-1].cursor or self._cursor
            self._last_at = lines[-1].at or self._last_at
        return lines

    def _notice(self) -> LogLine:
        return LogLine(
            at=self._last_at or 0.0,
            text="(the journal was not resumed where it was left: lines may be missing or repeated here)",
            kind="warning",
        )


_Bytes = list[int]
_Value = str | list[str | int | _Bytes | None] | None


class _Entry(msgspec.Struct):
    """One line of ``journalctl -o json``. A field that occurs twice is an array; so are odd bytes."""

    cursor: str | None = msgspec.field(default=None, name="__CURSOR")
    at: str | None = msgspec.field(default=None, name="__REALTIME_TIMESTAMP")
    message: _Value = msgspec.field(default=None, name="MESSAGE")
    pid: _Value = msgspec.field(default=None, name="_PID")
    service_run: _Value = msgspec.field(default=None, name="_SYSTEMD_INVOCATION_ID")
    run: _Value = msgspec.field(default=None, name="INVOCATION_ID")
    unit: _Value = msgspec.field(default=None, name="UNIT")


class EntryDecoder:
    """Journal entries to log lines. Never raises: what cannot be read becomes a line that says so."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Entry).decode
        self._at = 0.0

    def __call__(self, raw: bytes) -> LogLine:
        try:
            entry = self._decode(raw)
        except (msgspec.DecodeError, RecursionError):  # cut by the line limit, or not JSON at all
            text = f"(a journal entry of {len(raw)} bytes is not readable)"
            return LogLine(at=self._at, text=text, kind="warning")
        if entry.at is not None and entry.at.isascii() and entry.at.isdigit() and len(entry.at) <= 17:
            self._at = int(entry.at) / 1e6
        text = message_text(entry.message)
        manager = entry.unit is not None
        meaning = read_manager_line(text) if manager else read_line(text)
        pid = entry.pid
        return LogLine(
            at=self._at,
            text=text,
            kind=meaning.kind,
            cursor=entry.cursor,
            invocation=_one(entry.run if manager else entry.service_run),
            pid=int(pid) if isinstance(pid, str) and pid.isascii() and pid.isdigit() else None,
            rank=meaning.rank,
            fields=meaning.fields,
            phase=meaning.phase,
            percent=meaning.percent,
            ends=meaning.ends,
        )


def message_text(message: _Value) -> str:
    """A MESSAGE as one printable line of at most TEXT_LIMIT characters and the mark.

    journald writes bytes that are not printable UTF-8 as an array of numbers,
    several MESSAGE fields as an array of such values, and null for what it
    does not show. Of a progress bar, redrawn after each carriage return, the
    last state is kept.
    """
    if message is None:
        return "(journalctl does not show this message)"
    if isinstance(message, list):
        message = _from_array(message)
    if "\r" in message:
        message = next((part for part in reversed(message.split("\r")) if part.strip("\0 \n")), "")
    if len(message) <= TEXT_LIMIT:
        return clean(message)
    text = clean(message[: 4 * TEXT_LIMIT])
    return text[:TEXT_LIMIT] + CUT_MARK


def _from_array(values: Sequence[str | int | _Bytes | None]) -> str:
    """One message of byte values, or several messages, each a string or byte values."""
    numbers = [value for value in values if isinstance(value, int)]
    if numbers:
        return bytes(number & 0xFF for number in numbers).decode("utf-8", "replace")
    parts = (_from_array(value) if isinstance(value, list) else value for value in values)
    return " ".join(part for part in parts if isinstance(part, str))


def _one(value: _Value) -> str | None:
    return clean(value) if isinstance(value, str) else None


class _Inbox:
    """Between the stream, which must be read at once, and the readings, which go out at their own pace."""

    def __init__(self) -> None:
        self.lines: list[LogLine] = []
        self.ended = False
        self.arrived = asyncio.Event()
        self.room = asyncio.Event()
        self.room.set()

    async def take(self, within: float) -> tuple[LogLine, ...] | None:
        """The lines of the next GATHER seconds; none after ``within`` seconds; None at the end."""
        if not self.lines and not self.ended:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it loses a cancellation that comes together with a line.
                async with asyncio.timeout(within):
                    await self.arrived.wait()
        if self.lines and not self.ended:
            await asyncio.sleep(GATHER)
        if self.ended and not self.lines:
            return None
        lines = tuple(self.lines)
        self.lines.clear()
        self.room.set()
        if not self.ended:
            self.arrived.clear()
        return lines


@contextlib.asynccontextmanager
async def _pump(stream: Stream, decode: EntryDecoder) -> AsyncIterator[_Inbox]:
    inbox = _Inbox()

    async def fill() -> None:
        count = 0
        try:
            async for raw in stream.lines():
                inbox.lines.append(decode(raw))
                inbox.arrived.set()
                count += 1
                if count % _TURN == 0:
                    await asyncio.sleep(0)
                if len(inbox.lines) >= BATCH_LIMIT:
                    inbox.room.clear()
                    await inbox.room.wait()
        finally:
            inbox.ended = True
            inbox.arrived.set()

    task = asyncio.create_task(fill())
    try:
        yield inbox
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
