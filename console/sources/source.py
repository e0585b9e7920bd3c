"""The small protocol behind every source, and the loop that polls one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, Protocol, TypeVar

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


class Apart(Generic[T]):
    """Runs a read that may block in the kernel in a thread of its own, one at a time.

    Who gives up waiting leaves the thread behind, and the next call waits for what
    it will bring: a card that keeps one read costs one thread, not one more each
    period. It is no thread of the event loop's pool, which HTTP needs to resolve
    names and which the process would wait for when it ends.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: asyncio.Future[T] | None = None

    async def __call__(self, read: Callable[[], T]) -> T:
        if self._running is None or self._running.get_loop() is not asyncio.get_running_loop():
            self._running = self._start(read)
        running = self._running
        try:
            return await asyncio.shield(running)
        finally:
            if running.done() and self._running is running:
                self._running = None

    def _start(self, read: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        # Left behind, nobody may ask for its outcome.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

        def settle(value: T | None, problem: BaseException | None) -> None:
            if future.done():
                return
            if problem is not None:
                future.set_exception(problem)
            else:
                future.set_result(value)  # type: ignore[arg-type]

        def work() -> None:
            value: T | None = None
            problem: BaseException | None = None
            try:
                value = read()
            except Exception as raised:  # noqa: BLE001  it is raised again where the outcome is awaited
                problem = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, value, problem)

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future
