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
from collections.abc import Callable

#: Seconds that an orderly end may take before the process ends itself.
GRACE = 1.0

#: Exit status of a process that lost its terminal: 128 + SIGHUP.
HUNG_UP = 129


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


def leave_on_hangup(leave: Callable[[], None]) -> None:
    """Call ``leave`` on SIGHUP and SIGTERM, also when the parent had SIGHUP ignored."""
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: leave())


def end_for_certain(status: int = HUNG_UP, after: float = GRACE) -> None:
    """End this process in ``after`` seconds, whatever else waits: by a thread, as the loop may be stuck."""
    timer = threading.Timer(after, os._exit, (status,))
    timer.daemon = True
    timer.start()
