"""A context to plan in and to act in: every source followed in the background."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

from console.model.profile import Profile
from console.model.site import Site
from console.operations.step import Context
from console.sources.monitor import Monitor
from console.store.load_memory import LoadMemory
from console.store.state import State

#: Seconds that the first readings are waited for; a source that keeps silent says so by its age.
FIRST_READINGS_S = 5.0

_LOOK_S = 0.02


@contextlib.asynccontextmanager
async def opened(site: Site, profiles: tuple[Profile, ...], *, state: State) -> AsyncIterator[Context]:
    """Follow the site while the context is open. It begins once every source has said its first word."""
    monitor = Monitor(site, profiles=profiles, expected=LoadMemory(state).expected)
    follower = asyncio.create_task(monitor.run())
    follower.add_done_callback(_tell_defect)
    try:
        await _first_readings(monitor, follower)
        yield Context(
            site=site,
            profiles=profiles,
            monitor=monitor,
            state=state,
            clock=time.monotonic,
            wall_clock=time.time,
        )
    finally:
        follower.cancel()
        await asyncio.wait({follower})
        await monitor.close()


async def _first_readings(monitor: Monitor, follower: asyncio.Task[None]) -> None:
    ends = monitor.clock() + FIRST_READINGS_S
    while monitor.clock() < ends and not follower.done():
        waiting = [
            reading
            for reading in (monitor.unit, monitor.pci, monitor.nvml, monitor.models, monitor.journal)
            if reading.taken_at is None and reading.error is None
        ]
        if not waiting:
            return
        await asyncio.sleep(_LOOK_S)


def _tell_defect(follower: asyncio.Task[None]) -> None:
    """The readings then grow old, which every step sees; why goes to the job's output."""
    if not follower.cancelled() and (defect := follower.exception()) is not None:
        print(f"gpuops: defect: the sources are followed no longer: {defect!r}", file=sys.stderr)
