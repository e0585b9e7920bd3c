"""The client side of the simulated box, against a small server that follows the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.transport.box import BoxRunner
from console.transport.lines import LineSplitter

Answer = Callable[[list[str], asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def frame(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


@contextlib.asynccontextmanager
async def box(directory: Path, answer: Answer) -> AsyncIterator[BoxRunner]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        argv = json.loads(await reader.readline())["argv"]
        with contextlib.suppress(ConnectionError):
            await answer(argv, reader, writer)
            await writer.drain()
        writer.close()

    here = os.open(directory, os.O_PATH)
    server = await asyncio.start_unix_server(serve, f"/proc/self/fd/{here}/box.sock")
    try:
        yield BoxRunner(directory)
    finally:
        server.close()
        os.close(here)


async def echo(argv: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(frame(out=" ".join(argv)[:3]) + frame(out=" ".join(argv)[3:] + "\nsecond\nthi"))
    writer.write(frame(err="warned\n") + frame(out="rd") + frame(exit=len(argv)))


async def test_output_is_put_together_from_its_pieces(tmp_path: Path):
    async with box(tmp_path, echo) as runner:
        result = await runner.run(["systemctl", "show"], deadline=2)
    assert result.stdout == b"systemctl show\nsecond\nthird"
    assert (result.stderr, result.returncode, result.error) == (b"warned\n", 2, None)
    assert runner.root == tmp_path / "root"


async def test_a_stream_gives_whole_lines_and_the_reason(tmp_path: Path):
    async with box(tmp_path, echo) as runner, runner.stream(["journalctl"]) as stream:
        assert [line async for line in stream.lines()] == [b"journalctl", b"second", b"third"]
        assert stream.reason == "warned"


async def test_a_socket_deep_in_the_tree_is_reached(tmp_path: Path):
    deep = tmp_path / ("d" * 80) / ("e" * 80)
    deep.mkdir(parents=True)
    async with box(deep, echo) as runner:
        assert (await runner.run(["true"], deadline=2)).returncode == 1


async def test_no_box_is_a_value(tmp_path: Path):
    result = await BoxRunner(tmp_path).run(["true"], deadline=1)
    assert result.returncode is None
    assert "no simulated box runs" in result.reason
    async with BoxRunner(tmp_path / "nowhere").stream(["true"]) as stream:
        assert [line async for line in stream.lines()] == []
        assert "no simulated box runs" in str(stream.reason)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (frame(out="half a l"), "hung up before the command ended"),
        (b"what?\n", "sent nonsense"),
        (frame(exit="three"), "sent nonsense"),
    ],
)
async def test_a_box_that_breaks_off_or_babbles_is_a_value(tmp_path: Path, said: bytes, words: str):
    async def answer(argv: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)

    async with box(tmp_path, answer) as runner:
        result = await runner.run(["x"], deadline=2)
        assert result.returncode is None
        assert words in result.reason
        async with runner.stream(["x"]) as stream:
            lines = [line async for line in stream.lines()]
            assert words in str(stream.reason)
    assert lines == ([b"half a l"] if b"half" in said else [])


async def test_hanging_up_is_how_the_client_ends_a_command(tmp_path: Path):
    ended = asyncio.Event()

    async def forever(argv: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(out="working\n"))
        await reader.read()
        ended.set()

    async with box(tmp_path, forever) as runner:
        result = await runner.run(["sleep"], deadline=0.2)
        assert (result.returncode, result.error, result.stdout) == (None, "deadline passed", b"working\n")
        await asyncio.wait_for(ended.wait(), 2)
        ended.clear()
        async with runner.stream(["sleep"]) as stream:
            assert await anext(stream.lines()) == b"working"
            assert stream.reason is None
        await asyncio.wait_for(ended.wait(), 2)


@given(st.lists(st.binary(max_size=40)), st.integers(1, 30))
def test_lines_do_not_depend_on_how_the_bytes_were_cut(pieces: list[bytes], limit: int):
    splitter = LineSplitter(limit)
    lines = [line for piece in pieces for line in splitter.feed(piece)] + splitter.finish()
    whole = b"".join(pieces).split(b"\n")
    if not whole[-1]:
        whole.pop()
    assert lines == [line[:limit] for line in whole]
