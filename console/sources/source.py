"""The small protocol behind every source, and the loop that polls one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from console.model.reading import Reading

T = TypeVar("T")


class Unavailable(Exception):
    """A source has no value just now; the message says why in words an operator understands."""


class Source(Protocol[T]):
    """Something that is watched: each at its own pace, each with its own deadline."""

    name: str
    period: float  # seconds between readings
    deadline: float  # seconds after which an attempt counts as failed

    def watch(self) -> AsyncIterator[Reading[T]]:
        """Readings for ever. A failure is a reading with ``error``, never an exception."""


async def poll(
    name: str,
    period: float,
    deadline: float,
    read: Callable[[], Awaitable[T]],
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Reading[T]]:
    """Call ``read`` once a period, on an even beat, each call within ``deadline`` seconds.

    A beat that was missed because a call took long is skipped, not made up for.
    """
    reading: Reading[T] = Reading(name, period)
    beat = clock()
    while True:
        reading = await attempt(reading, deadline, read, clock)
        yield reading
        now = clock()
        beat += period
        if beat < now:
            beat = now
        await asyncio.sleep(beat - now)


async def attempt(
    reading: Reading[T],
    deadline: float,
    read: Callable[[], Awaitable[T]],
    clock: Callable[[], float] = time.monotonic,
) -> Reading[T]:
    """One call of ``read``, folded into the reading before it."""
    try:
        async with asyncio.timeout(deadline):
            value = await read()
    except Unavailable as problem:
        return reading.failed(str(problem))
    except TimeoutError:
        return reading.failed(f"no answer within {deadline:g} s")
    except Exception as defect:  # noqa: BLE001  a defect in a source is shown, and costs that source only
        return reading.failed(f"defect in source {reading.source}: {type(defect).__name__}: {defect}")
    return reading.fresh(value, clock())
