"""Commands on this host: bounded in time and output, never outliving the console."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from console.transport.lines import LineSplitter
from console.transport.runner import OUTPUT_LIMIT, Result, Stream

#: Seconds between SIGTERM and SIGKILL to the group of a command that is ended.
TERM_GRACE = 0.5

#: Seconds to wait for a killed process. One that is blocked in the kernel never ends; we go on.
KILL_GRACE = 1.0

#: Seconds to go on reading when a command has ended but a child of it still holds its output.
DRAIN_GRACE = 0.5

#: A stream whose reader lags is not read from while it holds this many bytes.
STREAM_BUFFER = 2 * 1024 * 1024

STDERR_TAIL = 4096


class LocalRunner:
    """This host. ``root`` is where its /proc and /sys are seen, for tests with a tree of their own."""

    def __init__(self, root: Path = Path("/"), name: str = "host") -> None:
        self.root = root
        self.name = name

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        command = tuple(argv)
        try:
            with _readable(stdin) as descriptor:
                transport, capture = await _spawn(command, _Capture, descriptor)
        except (OSError, ValueError) as problem:
            return Result(command, None, b"", b"", _spawn_error(problem))
        error: str | None = "ended by the console"
        try:
            error = await _finish(capture, deadline)
        finally:
            if error is not None:
                await _end_group(transport, capture)
            transport.close()
        returncode = transport.get_returncode() if error is None else None
        return Result(command, returncode, bytes(capture.out), bytes(capture.err), error)

    @contextlib.asynccontextmanager
    async def stream(self, argv: Sequence[str]) -> AsyncIterator[Stream]:
        command = tuple(argv)
        try:
            transport, output = await _spawn(_mortal(command), _Lines)
        except (OSError, ValueError) as problem:
            yield Ended(f"{command[0]}: {_spawn_error(problem)}")
            return
        try:
            yield _LocalStream(command[0], transport, output)
        finally:
            await _end_group(transport, output)
            transport.close()


class Ended:
    """A stream that is over before it began, and why."""

    def __init__(self, reason: str) -> None:
        self.reason: str | None = reason

    async def lines(self) -> AsyncIterator[bytes]:
        nothing: tuple[bytes, ...] = ()
        for line in nothing:
            yield line


class _LocalStream:
    def __init__(self, program: str, transport: asyncio.SubprocessTransport, output: _Lines) -> None:
        self._program = program
        self._transport = transport
        self._output = output

    async def lines(self) -> AsyncIterator[bytes]:
        while (line := await self._output.next()) is not None:
            yield line

    @property
    def reason(self) -> str | None:
        if not self._output.exited.is_set():
            return None
        return end_words(self._program, self._transport.get_returncode(), bytes(self._output.err))


def end_words(program: str, returncode: int | None, stderr: bytes) -> str:
    """How a command that should have gone on came to its end, in one line."""
    said = stderr.decode("utf-8", "replace").strip().splitlines()
    if said:
        return said[-1]
    if returncode is not None and returncode < 0:
        return f"{program}: killed by signal {-returncode}"
    return f"{program}: exit status {returncode}"


class _Child(asyncio.SubprocessProtocol):
    """Both ends of a child's life: when it exited, and when its output was closed."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()
        self.err = bytearray()
        self._open = {1, 2}

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()


class _Capture(_Child):
    """Output as a whole; what passes OUTPUT_LIMIT is read and dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.out = bytearray()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        buffer = self.out if fd == 1 else self.err
        buffer += data[: OUTPUT_LIMIT - len(buffer)]


class _Lines(_Child):
    """Output line by line. A reader that lags stops the reading, so the pipe holds the command back."""

    def __init__(self) -> None:
        super().__init__()
        self._splitter = LineSplitter()
        self._ready: deque[bytes] = deque()
        self._held = 0
        self._paused = False
        self._more = asyncio.Event()
        self._pipe: asyncio.ReadTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        pipe = transport.get_pipe_transport(1)
        assert isinstance(pipe, asyncio.ReadTransport)
        self._pipe = pipe

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self.err += data
            del self.err[:-STDERR_TAIL]
            return
        self._add(self._splitter.feed(data))
        if self._held > STREAM_BUFFER and self._pipe is not None and not self._paused:
            self._pipe.pause_reading()
            self._paused = True

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        super().pipe_connection_lost(fd, exc)
        if fd == 1:
            self._pipe = None
            self._add(self._splitter.finish())
            self._more.set()

    async def next(self) -> bytes | None:
        """The next line; None once the output is closed and, as far as can be, the exit is known."""
        while not self._ready:
            if self._pipe is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_GRACE):
                        await self.exited.wait()
                return None
            self._more.clear()
            await self._more.wait()
        line = self._ready.popleft()
        self._held -= len(line)
        if self._paused and self._held < STREAM_BUFFER // 4 and self._pipe is not None:
            self._pipe.resume_reading()
            self._paused = False
        return line

    def _add(self, lines: list[bytes]) -> None:
        if lines:
            self._ready.extend(lines)
            self._held += sum(map(len, lines))
            self._more.set()


ChildT = TypeVar("ChildT", bound=_Child)


@contextlib.contextmanager
def _readable(content: bytes) -> Iterator[int]:
    """A descriptor that a command can read ``content`` from.

    A file in memory: a command that reads nothing, or ends early, blocks nobody.
    """
    if not content:
        yield asyncio.subprocess.DEVNULL
        return
    descriptor = os.memfd_create("stdin")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


async def _spawn(
    command: tuple[str, ...], protocol: type[ChildT], stdin: int = asyncio.subprocess.DEVNULL
) -> tuple[asyncio.SubprocessTransport, ChildT]:
    """Start it in a session of its own, so that it and its children can be signalled as one group."""
    transport, child = await asyncio.get_running_loop().subprocess_exec(
        protocol,
        *command,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(),
        start_new_session=True,
    )
    return transport, child


def _spawn_error(problem: OSError | ValueError) -> str:
    """In words; a ValueError is a NUL byte among the arguments."""
    if isinstance(problem, FileNotFoundError):
        return "not found"
    return getattr(problem, "strerror", None) or str(problem)


def _environment() -> dict[str, str]:
    """Ours, with plain English output: what we parse must not depend on who logged in."""
    kept = {name: value for name, value in os.environ.items() if name != "LANGUAGE"}
    return kept | {"LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_URLIFY": "0", "NO_COLOR": "1"}


@lru_cache(maxsize=1)
def _setpriv() -> str | None:
    return shutil.which("setpriv")


def _mortal(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command, arranged to get SIGTERM when this process dies, even by SIGKILL.

    ``setpriv`` (util-linux) sets the parent-death signal and becomes the
    command; a preexec_fn would do the same but forces a slow fork. Where it is
    missing, or where a guest lies between, the broken pipe remains:
    ``journalctl -f`` watches its stdout for hang-up and ends (systemd >= 240).
    """
    setpriv = _setpriv()
    if setpriv is None:
        return command
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(command[0])
    return (setpriv, "--pdeathsig", "TERM", "--", program, *command[1:])


async def _finish(capture: _Capture, deadline: float) -> str | None:
    """Wait for the command to end by itself: None when it did, else what was in the way."""
    try:
        async with asyncio.timeout(deadline):
            await capture.exited.wait()
    except TimeoutError:
        return "deadline passed"
    try:
        async with asyncio.timeout(DRAIN_GRACE):
            await capture.closed.wait()
    except TimeoutError:
        # A child it left behind on purpose (a daemon) holds the pipes; the command itself is done.
        return None
    return None


async def _end_group(transport: asyncio.SubprocessTransport, child: _Child) -> None:
    """SIGTERM, then SIGKILL, to the command and all its children. The command itself is reaped."""
    group = transport.get_pid()
    try:
        if _signal_group(group, signal.SIGTERM):
            await _group_gone(group, TERM_GRACE)
    finally:
        _signal_group(group, signal.SIGKILL)
    if not child.exited.is_set():
        with contextlib.suppress(TimeoutError):  # blocked in the kernel: nothing more can be done
            async with asyncio.timeout(KILL_GRACE):
                await child.exited.wait()


def _signal_group(group: int, number: int) -> bool:
    """False when no process of the group is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def _group_gone(group: int, within: float) -> None:
    pause = 0.005
    while within > 0 and _signal_group(group, 0):
        await asyncio.sleep(pause)
        within -= pause
        pause = min(pause * 2, 0.05)
