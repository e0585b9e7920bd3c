"""Commands on the simulated box: one JSON line asks, JSON lines answer, over its socket.

The client sends ``{"argv": [...]}``, with ``"stdin": text`` when the command reads any; the
box answers ``{"out": text}`` and ``{"err": text}`` as the command speaks and ``{"exit": code}``
when it ends.
A client that hangs up ends the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from console.transport.lines import LineSplitter
from console.transport.local import STDERR_TAIL, Ended, end_words
from console.transport.runner import LINE_LIMIT, OUTPUT_LIMIT, Result, Stream

SOCKET_NAME = "box.sock"
ROOT_NAME = "root"

#: Linux's limit for a socket's path, its closing zero included.
_SOCKET_PATH_LIMIT = 108

#: Seconds within which the box must take a connection.
_CONNECT_DEADLINE = 5.0


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the client sends: the command, and what it reads."""

    argv: tuple[str, ...]
    stdin: str | None = None


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the answer. ``out`` and ``err`` may hold several lines or a part of one."""

    out: str | None = None
    err: str | None = None
    exit: int | None = None


class BoxRunner:
    """The box that lives in ``directory``; its /proc and /sys lie in ``directory/root``."""

    def __init__(self, directory: Path) -> None:
        self.name = "box"
        self.root = directory / ROOT_NAME
        self._socket = directory / SOCKET_NAME

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        command = tuple(argv)
        out, err = bytearray(), bytearray()
        returncode: int | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(deadline), _session(self._socket, command, stdin) as frames:
                async for frame in frames:
                    out += _bytes(frame.out)[: OUTPUT_LIMIT - len(out)]
                    err += _bytes(frame.err)[: OUTPUT_LIMIT - len(err)]
                    returncode = frame.exit
        except BoxError as problem:
            error = str(problem)
        except TimeoutError:
            error = "deadline passed"
        return Result(command, returncode if error is None else None, bytes(out), bytes(err), error)

    @contextlib.asynccontextmanager
    async def stream(self, argv: Sequence[str]) -> AsyncIterator[Stream]:
        command = tuple(argv)
        async with contextlib.AsyncExitStack() as stack:
            try:
                frames = await stack.enter_async_context(_session(self._socket, command))
            except BoxError as problem:
                yield Ended(f"{command[0]}: {problem}")
                return
            yield _BoxStream(command[0], frames)


class BoxError(Exception):
    """The box did not answer as it should; the message says how."""


class _BoxStream:
    def __init__(self, program: str, frames: AsyncIterator[Frame]) -> None:
        self._program = program
        self._frames = frames
        self._splitter = LineSplitter()
        self._err = bytearray()
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        return self._reason

    async def lines(self) -> AsyncIterator[bytes]:
        try:
            async for frame in self._frames:
                self._err += _bytes(frame.err)
                del self._err[:-STDERR_TAIL]
                if frame.exit is not None:
                    self._reason = end_words(self._program, frame.exit, bytes(self._err))
                for line in self._splitter.feed(_bytes(frame.out)):
                    yield line
        except BoxError as problem:
            self._reason = f"{self._program}: {problem}"
        for line in self._splitter.finish():
            yield line


@contextlib.asynccontextmanager
async def _session(
    socket: Path, command: tuple[str, ...], stdin: bytes = b""
) -> AsyncIterator[AsyncIterator[Frame]]:
    """One command on the box: its frames, the last one with ``exit``. BoxError when there is none."""
    reader, writer = await _connect(socket)
    try:
        writer.write(msgspec.json.encode(Ask(command, stdin.decode("utf-8") if stdin else None)) + b"\n")
        yield _frames(reader)
    finally:
        writer.close()
        with contextlib.suppress(OSError):  # the box went first: closed is closed
            await writer.wait_closed()


async def _connect(socket: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(_CONNECT_DEADLINE):
            if len(os.fsencode(socket)) < _SOCKET_PATH_LIMIT:
                return await asyncio.open_unix_connection(str(socket), limit=LINE_LIMIT)
            folder = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY)
            try:
                return await asyncio.open_unix_connection(
                    f"/proc/self/fd/{folder}/{socket.name}", limit=LINE_LIMIT
                )
            finally:
                os.close(folder)
    except TimeoutError:
        raise BoxError(f"the simulated box does not answer at {socket}") from None
    except OSError:
        raise BoxError(f"no simulated box runs at {socket}") from None


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[Frame]:
    decode = msgspec.json.Decoder(Frame).decode
    splitter = LineSplitter(limit=OUTPUT_LIMIT)
    try:
        while data := await reader.read(65536):
            for line in splitter.feed(data):
                frame = decode(line)
                yield frame
                if frame.exit is not None:
                    return
    except msgspec.DecodeError as problem:
        raise BoxError(f"the simulated box sent nonsense: {problem}") from None
    except OSError as problem:
        raise BoxError(f"the simulated box hung up: {problem.strerror}") from None
    raise BoxError("the simulated box hung up before the command ended")


def _bytes(text: str | None) -> bytes:
    return text.encode("utf-8", "replace") if text else b""
