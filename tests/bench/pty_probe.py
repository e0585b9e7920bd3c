"""Measures a terminal program as an operator meets it: on a pty, with all its processes."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyte

COLUMNS, ROWS = 160, 48

#: Seconds that a program has to end after ``q``, and again after SIGTERM.
END_GRACE = 5.0


class Memory(NamedTuple):
    """Of a tree of processes, in bytes: a page that two of them share counts twice in ``resident``, once
    in ``proportional`` (PSS, which also shares it with strangers)."""

    resident: int
    proportional: int


class Window(NamedTuple):
    """A stretch of time in which the program was left alone."""

    seconds: float
    cpu_percent: float  # of one core
    bytes_per_s: float  # written to the terminal
    memory: Memory  # at its end


class Probe:
    """A running program, its terminal and its processes.

    ``counted`` says by its command line whether a process belongs to what is measured; one that does not
    is left out with its children.
    """

    def __init__(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        counted: Callable[[str], bool] = lambda command: True,
    ) -> None:
        self._counted = counted
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(self._master, (ROWS, COLUMNS))
        self._painted: list[tuple[float, bytes]] = []
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *argv],  # execs: this process becomes the program
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ
            | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
            | variables,
        )
        os.close(slave)

    def watch(self, seconds: float) -> None:
        """Let it run and keep what it writes, with the time, for ``painted``."""
        for data in self._read(seconds):
            self._painted.append((time.monotonic() - self._began, data))

    def watch_until(self, seen: Callable[[str], object], within: float) -> None:
        """Watch it, a second at a time, until the text fits; then AssertionError with the screen."""
        until = time.monotonic() + within
        while True:
            self.watch(1.0)
            try:
                self.painted(seen)
            except AssertionError:
                if time.monotonic() > until:
                    raise
            else:
                return

    def painted(self, seen: Callable[[str], object]) -> float:
        """Seconds from the start until the screen's text first fitted.

        What was written is replayed afterwards, so that the emulation takes no time from the program.
        AssertionError with the screen when it never did.
        """
        screen = pyte.Screen(COLUMNS, ROWS)
        stream = pyte.ByteStream(screen)
        for at, data in self._painted:
            stream.feed(data)
            if seen("\n".join(screen.display)):
                return at
        raise AssertionError("never on the screen:\n" + "\n".join(screen.display))

    def measure(self, seconds: float) -> Window:
        """Let it run and count. AssertionError when it ends meanwhile."""
        began, cpu = time.monotonic(), self.cpu_seconds()
        written = sum(map(len, self._read(seconds)))
        cpu, took = self.cpu_seconds() - cpu, time.monotonic() - began
        assert self.process.poll() is None, f"it ended by itself with {self.process.returncode}"
        return Window(took, 100 * cpu / took, written / took, self.memory())

    def cpu_seconds(self) -> float:
        """CPU time of the tree since it began, children that ended included."""
        return sum(cpu_seconds(pid) for pid in self._tree())

    def memory(self) -> Memory:
        """The least of three looks: a child that has yet to exec shows its parent's memory as its own."""
        looks = []
        for _ in range(3):
            parts = [memory(pid) for pid in self._tree()]
            looks.append(
                Memory(sum(part.resident for part in parts), sum(part.proportional for part in parts))
            )
            time.sleep(0.02)
        return min(looks)

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End it as a user does, else by force."""
        with contextlib.suppress(OSError):
            os.write(self._master, b"q")
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._ends(END_GRACE):
                break
            self.process.send_signal(number)
        self._ends(END_GRACE)
        os.close(self._master)

    def _ends(self, within: float) -> bool:
        until = time.monotonic() + within
        while self.process.poll() is None and time.monotonic() < until:
            for _ in self._read(0.02):
                pass
            time.sleep(0.01)  # _read returns at once when the terminal is closed
        return self.process.poll() is not None

    def _read(self, seconds: float) -> Iterator[bytes]:
        """What it writes within the time; less when it closes its terminal."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._master], [], [], left)[0]:
                return
            try:
                yield os.read(self._master, 65536)
            except OSError:  # EIO: nobody holds the other end any more
                return

    def _tree(self) -> list[int]:
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            with contextlib.suppress(OSError):  # it has ended since
                command = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                )
                if self._counted(command):
                    found.append(pid)
                    for task in Path(f"/proc/{pid}/task").iterdir():
                        todo += map(int, (task / "children").read_text().split())
        return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children that ended; 0 when it has ended itself.

    Its own time comes from its CPU clock, which has no unit: /proc counts it in 10 ms, a per cent of
    a second. The clock's number is made as clock_getcpuclockid(3) makes it.
    """
    try:
        own = time.clock_gettime((~pid << 3) | 2)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return own + (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


_KIB = re.compile(r"^(Rss|Pss): +(\d+) kB", re.MULTILINE)


def memory(pid: int) -> Memory:
    """The memory of one process; nothing when it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return Memory(0, 0)
    sizes = {name: int(size) * 1024 for name, size in _KIB.findall(text)}
    return Memory(sizes["Rss"], sizes["Pss"])
