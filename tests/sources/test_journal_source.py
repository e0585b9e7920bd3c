"""Following the journal: batches, gaps, odd messages, floods; against a journalctl that is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import unicodedata
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.log import LogLine
from console.model.reading import Reading
from console.sources.journal import (
    BATCH_LIMIT,
    CUT_MARK,
    TEXT_LIMIT,
    EntryDecoder,
    JournalSource,
    message_text,
)
from console.transport.runner import Result

LOGS = Path(__file__).parents[1] / "fixtures" / "log"
RUN = "3f0d5b1f6f0f4bb1a4f9d5d0c2e4a6b8"


def entry(number: int, message: object, **fields: object) -> bytes:
    """One line as journalctl prints it."""
    return json.dumps(
        {
            "__CURSOR": f"s=1;i={number:x}",
            "__REALTIME_TIMESTAMP": str(1_796_000_000_000_000 + number * 1000),
            "__MONOTONIC_TIMESTAMP": "1",
            "_BOOT_ID": "b" * 32,
            "_PID": "4711",
            "_SYSTEMD_INVOCATION_ID": RUN,
            "MESSAGE": message,
            **fields,
        }
    ).encode()


Act = Callable[[], AsyncIterator[bytes]]


class Script:
    """A machine whose journalctl runs the acts one after the other, then stays silent."""

    name = "scripted"
    root = Path("/")

    def __init__(self, *acts: tuple[Act, str]) -> None:
        self._acts = list(acts)
        self.commands: list[tuple[str, ...]] = []
        self.running = 0

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        raise AssertionError("the journal is only followed")

    @contextlib.asynccontextmanager
    async def stream(self, argv: Sequence[str]) -> AsyncIterator[Playing]:
        self.commands.append(tuple(argv))
        self.running += 1
        try:
            yield Playing(*(self._acts.pop(0) if self._acts else (silence, "")))
        finally:
            self.running -= 1


class Playing:
    def __init__(self, act: Act, reason: str) -> None:
        self._act = act
        self._reason = reason
        self.reason: str | None = None

    async def lines(self) -> AsyncIterator[bytes]:
        async for line in self._act():
            yield line
        self.reason = self._reason


async def silence() -> AsyncIterator[bytes]:
    await asyncio.sleep(3600)
    yield b""


def saying(*lines: bytes, then_wait: bool = False) -> Act:
    async def act() -> AsyncIterator[bytes]:
        for line in lines:
            yield line
        if then_wait:
            await asyncio.sleep(3600)

    return act


async def readings(
    source: JournalSource, enough: Callable[[list[Reading[tuple[LogLine, ...]]]], bool], within: float = 5.0
) -> list[Reading[tuple[LogLine, ...]]]:
    seen: list[Reading[tuple[LogLine, ...]]] = []
    watch = source.watch()
    try:
        async with asyncio.timeout(within):
            async for reading in watch:
                seen.append(reading)
                if enough(seen):
                    return seen
    finally:
        await watch.aclose()
    raise AssertionError("the watch ended")


def texts(seen: list[Reading[tuple[LogLine, ...]]]) -> list[str]:
    return [line.text for reading in seen for line in reading.value or ()]


async def test_the_backlog_comes_in_one_reading_each_line_read():
    log = (LOGS / "startup.log").read_bytes().decode().split("\n")
    host = Script((saying(*(entry(n, text) for n, text in enumerate(log)), then_wait=True), ""))
    (reading,) = await readings(JournalSource(host, "sglang.service"), bool)
    assert reading.value is not None
    assert len(reading.value) == len(log)
    assert sum(line.kind == "ready" for line in reading.value) == 1
    assert all(len(line.text) <= TEXT_LIMIT + len(CUT_MARK) for line in reading.value)
    first = reading.value[0]
    assert (first.at, first.pid, first.invocation, first.cursor) == (1_796_000_000.0, 4711, RUN, "s=1;i=0")
    assert host.commands[0][:4] == ("journalctl", "-f", "-o", "json")
    assert host.commands[0][-4:] == ("-u", "sglang.service", "-n", "3000")
    assert host.running == 0, "leaving the watch ends journalctl"


async def test_after_an_interruption_it_goes_on_from_the_last_line_and_repeats_none():
    host = Script(
        (saying(entry(1, "one"), entry(2, "two")), "lxc-attach: 129 is not running"),
        (saying(entry(3, "three"), then_wait=True), ""),
    )
    source = JournalSource(host, "sglang.service", backoff=(0.01,))
    seen = await readings(source, lambda seen: "three" in texts(seen))
    assert texts(seen) == ["one", "two", "three"]
    assert [reading.error for reading in seen] == [None, "lxc-attach: 129 is not running", None]
    assert seen[1].taken_at == seen[0].taken_at, "the failure does not make the last lines look new"
    assert "--after-cursor=s=1;i=2" in host.commands[1]
    assert "--no-tail" in host.commands[1]
    assert "-n" not in host.commands[1]


async def test_a_journalctl_that_never_runs_is_a_reading_with_its_reason():
    host = Script((saying(), "journalctl: not found"))
    (reading,) = await readings(JournalSource(host, "sglang.service"), bool)
    assert (reading.value, reading.taken_at, reading.error) == (None, None, "journalctl: not found")


async def test_a_lost_cursor_is_told_in_the_log_itself():
    host = Script(
        (saying(entry(1, "one")), "killed by signal 9"),
        (saying(), "Failed to seek to cursor: Invalid argument"),
        (saying(entry(9, "nine"), then_wait=True), ""),
    )
    source = JournalSource(host, "sglang.service", backoff=(0.01,))
    seen = await readings(source, lambda seen: "nine" in texts(seen))
    assert [text if len(text) < 9 else "notice" for text in texts(seen)] == ["one", "notice", "nine"]
    assert any("lines may be missing" in text for text in texts(seen))
    assert any(part.startswith("--since=@1796000000.001") for part in host.commands[2])
    assert not any("cursor" in part for part in host.commands[2])


async def test_an_idle_journal_is_not_stale():
    source = JournalSource(Script(), "sglang.service", period=0.1)
    seen = await readings(source, lambda seen: len(seen) == 3)
    assert [reading.value for reading in seen] == [(), (), ()]
    assert not seen[-1].stale(time.monotonic())


async def test_a_flood_is_bundled_and_complete():
    async def flood() -> AsyncIterator[bytes]:
        for number in range(2400):
            yield entry(number, f"Decode batch, #running-req: 4, #token: {number}, token usage: 0.02")
            if number % 100 == 99:
                await asyncio.sleep(0.05)
        yield entry(2400, "last")
        await asyncio.sleep(3600)

    began = time.monotonic()
    source = JournalSource(Script((flood, "")), "sglang.service")
    seen = await readings(source, lambda seen: "last" in texts(seen), within=15)
    elapsed = time.monotonic() - began
    assert len(texts(seen)) == 2401
    assert len(seen) <= 4 * elapsed + 1


async def test_a_reader_that_lags_stops_the_reading_at_a_bounded_number_of_lines():
    produced = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal produced
        while True:
            produced += 1
            yield entry(produced, "x")

    watch = JournalSource(Script((endless, "")), "sglang.service").watch()
    reading = await anext(watch)
    assert len(reading.value or ()) <= BATCH_LIMIT
    await asyncio.sleep(0.5)
    assert produced <= 2 * BATCH_LIMIT + 1
    await watch.aclose()


@pytest.mark.parametrize("turns", range(6))
async def test_a_watch_that_is_cancelled_as_a_line_comes_ends(turns: int):
    """In Python 3.11 wait_for would lose the cancellation, and the end of the watch would never come."""
    more = asyncio.Event()

    async def one_then_silence() -> AsyncIterator[bytes]:
        await more.wait()
        yield entry(1, "one")
        await asyncio.sleep(3600)

    async def watch() -> None:
        async for _ in JournalSource(Script((one_then_silence, "")), "sglang.service", period=30.0).watch():
            pass

    task = asyncio.create_task(watch())
    await asyncio.sleep(0.05)
    more.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=2)
    assert done, "it goes on after it was cancelled"
    assert task.cancelled()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("plain", "plain"),
        (None, "(journalctl does not show this message)"),
        (list("Größe ✓".encode()), "Größe ✓"),
        ([255, 254, 65], "\ufffd\ufffdA"),
        ([27, 91, 49, 59, 51, 51, 109, 65, 27, 91, 48, 109], "A"),
        (["one", "two"], "one two"),
        (["one", [116, 119, 111], None], "one two"),
        ("\x1b[1;33mdeprecated\x1b[0m", "deprecated"),
        ("a\0\0b", "ab"),
        ("a\tb", "a b"),
        ("user \u202e gnp.exe", "user  gnp.exe"),
        ("Loading:  10%|█ | 1/10\rLoading:  20%|██ | 2/10\r", "Loading:  20%|██ | 2/10"),
        ("\r\r\r", ""),
        ("dos line\r", "dos line"),
    ],
)
def test_messages_of_every_shape(message: object, text: str):
    line = EntryDecoder()(entry(1, message))
    assert line.text == text


def test_a_message_of_megabytes_is_cut_with_a_mark():
    line = EntryDecoder()(entry(1, "server_args={'x': '" + "y" * 3_000_000))
    assert len(line.text) == TEXT_LIMIT + len(CUT_MARK)
    assert line.text.endswith(CUT_MARK)
    assert line.phase == "starting"


def test_an_entry_that_was_cut_on_the_way_becomes_a_line_that_says_so():
    decode = EntryDecoder()
    decode(entry(1, "before"))
    line = decode(entry(2, "x" * 5000)[:1000])
    assert "not readable" in line.text
    assert line.kind == "warning"
    assert line.at == pytest.approx(1_796_000_000.001), "it stays beside its neighbours"
    assert line.cursor is None


def test_systemds_own_lines_belong_to_the_run_they_are_about():
    line = EntryDecoder()(
        entry(
            1,
            "sglang.service: Main process exited, code=exited, status=1/FAILURE",
            UNIT="sglang.service",
            INVOCATION_ID="a" * 32,
            _PID="1",
        )
    )
    assert (line.kind, line.invocation, line.pid) == ("crash", "a" * 32, 1)


def test_the_service_cannot_speak_as_systemd():
    line = EntryDecoder()(entry(1, "sglang.service: Main process exited, code=exited, status=1/FAILURE"))
    assert line.kind == "plain"


def safe(text: str) -> bool:
    return not any(unicodedata.category(c) in ("Cc", "Cs") or c in "\u202e\u2028\u200f" for c in text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary())
def test_any_bytes_become_a_safe_line(raw: bytes):
    assert safe(EntryDecoder()(raw).text)


@given(JSON, JSON, JSON)
def test_any_json_becomes_a_safe_line(message: object, pid: object, run: object):
    line = EntryDecoder()(entry(1, message, _PID=pid, _SYSTEMD_INVOCATION_ID=run))
    assert safe(line.text)
    assert safe(line.invocation or "")


@given(st.text() | st.lists(st.integers(0, 255), max_size=50) | st.none())
def test_any_message_is_safe_to_print(message: str | list[int] | None):
    text = message_text(message)
    assert safe(text)
    assert len(text) <= TEXT_LIMIT + len(CUT_MARK)
