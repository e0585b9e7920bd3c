"""Tells a process from a later one with the same number, also across a reboot (proc(5))."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_PROC = Path("/proc")

#: States of a process that is over, though its parent has not asked for its exit status yet.
_OVER = frozenset("ZXx")


class ProcessId(msgspec.Struct, frozen=True):
    """``start_ticks`` is when it started, in clock ticks after the boot that ``boot_id`` names."""

    pid: int
    start_ticks: int
    boot_id: str


def this_process() -> ProcessId:
    pid = os.getpid()
    _, ticks = _stat(pid)
    return ProcessId(pid, ticks, boot_id())


def boot_id() -> str:
    """Another one after each boot; containers have their host's (random(4))."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def alive(process: ProcessId) -> bool:
    """Whether this very process still runs. A zombie does not."""
    if process.pid <= 0 or process.boot_id != boot_id():
        return False
    try:
        state, ticks = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return ticks == process.start_ticks and state not in _OVER


def _stat(pid: int) -> tuple[str, int]:
    """Its state and start time. The name before them, in brackets, may hold anything, brackets too."""
    fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b") ")[2].split()
    return fields[0].decode("ascii"), int(fields[19])
