"""The one port through which commands run and a machine's files are read.

Commands are argument lists, never shell strings. A command that fails, is not
there or passes its deadline is a value; nothing here raises for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgspec

#: Output past this many bytes is cut: no command we run says more.
OUTPUT_LIMIT = 8 * 1024 * 1024

#: A streamed line longer than this is cut; its rest is dropped.
LINE_LIMIT = 1024 * 1024


class Result(msgspec.Struct, frozen=True):
    """How a command ended.

    ``returncode`` is None when it never ended by itself: ``error`` then says
    ``not found``, ``deadline passed`` or what else was in the way.
    """

    argv: tuple[str, ...]
    returncode: int | None
    stdout: bytes
    stderr: bytes
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def reason(self) -> str:
        """Why it is not ok, in one line: the error, or the last line of stderr, or the exit status."""
        if self.error:
            return f"{self.argv[0]}: {self.error}"
        lines = self.stderr.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"{self.argv[0]}: exit status {self.returncode}"


class Stream(Protocol):
    """A command that goes on: its lines as they come, then how it ended."""

    def lines(self) -> AsyncIterator[bytes]:
        """Lines of stdout without their newline, each at most LINE_LIMIT bytes."""

    @property
    def reason(self) -> str | None:
        """Why it ended, once it has; None while it runs."""


class Runner(Protocol):
    """A place where commands run: this host, a container on it, the simulated box."""

    name: str
    #: Where that machine's /proc and /sys are seen from here: "/" on this host.
    root: Path

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        """Run to the end, or kill it (with its children) after ``deadline`` seconds.

        It reads ``stdin`` to its end, which comes at once when there is none.
        """

    def stream(self, argv: Sequence[str]) -> AbstractAsyncContextManager[Stream]:
        """Run for as long as the context is open; killed with its children on leaving."""
