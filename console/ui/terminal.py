"""What to do when the terminal goes away: leave, at once and for certain.

With SIGHUP ignored (nohup, some shells), a terminal program whose tty has gone
otherwise spins for ever on a read that returns nothing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from console.model.text import clean

#: Seconds that an orderly end may take before the process ends itself.
GRACE = 1.0

#: Exit status of a process that lost its terminal: 128 + SIGHUP.
HUNG_UP = 129


def encoding(environ: Mapping[str, str] | None = None) -> str:
    """What the terminal reads, by the locale the console was started with.

    Not sys.stdout.encoding alone: Python takes UTF-8 in the C locale (PEP 538 and 540).
    A locale that is not set says nothing of the terminal, and today's are UTF-8.
    """
    if environ is None:
        environ = _started_with()
    locale = next((told for name in ("LC_ALL", "LC_CTYPE", "LANG") if (told := environ.get(name))), "")
    if locale in ("C", "POSIX"):
        return "ascii"
    return sys.stdout.encoding or "utf-8"


def _started_with() -> Mapping[str, str]:
    """The environment at the start: Python itself sets LC_CTYPE in the C locale."""
    try:
        told = Path("/proc/self/environ").read_bytes()
    except OSError:
        return os.environ
    pairs = (os.fsdecode(pair).partition("=") for pair in told.split(b"\0"))
    return {name: value for name, _, value in pairs}


def gone(descriptor: int) -> bool:
    """True when the terminal behind the descriptor has hung up."""
    poller = select.poll()
    try:
        poller.register(descriptor, 0)
        events = poller.poll(0)
    except (OSError, ValueError):
        return True
    return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in events)


def watched_descriptor() -> int | None:
    """The descriptor of the terminal that is read; None when stdin is no terminal."""
    stream = sys.__stdin__
    if stream is None:
        return None
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return None
    return descriptor if os.isatty(descriptor) else None


def size(descriptor: int) -> tuple[int, int] | None:
    """Columns and rows as the kernel has them now; None for a terminal without a size."""
    try:
        columns, rows = os.get_terminal_size(descriptor)
    except OSError:
        return None
    return (columns, rows) if columns > 0 and rows > 0 else None


def notification(words: str) -> str:
    """OSC 9: a terminal that knows it shows the words even while its window is hidden; others drop it."""
    return f"\x1b]9;{clean(words)}\x07"


def leave_on_hangup(leave: Callable[[], None]) -> None:
    """Call ``leave`` on SIGHUP and SIGTERM, also when the parent had SIGHUP ignored."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: leave())


def end_for_certain(status: int = HUNG_UP, after: float = GRACE) -> None:
    """End this process in ``after`` seconds, whatever else waits: by a thread, as the loop may be stuck."""
    timer = threading.Timer(after, os._exit, (status,))
    timer.daemon = True
    timer.start()
