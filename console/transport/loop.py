"""An event loop whose end waits for nobody: a thread may be blocked in the kernel for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Value = TypeVar("Value")


def run(work: Coroutine[Any, Any, Value]) -> Value:
    """``asyncio.run``, but a thread that still reads from a card is left behind.

    The interpreter itself waits for such a thread at its end, so the program then
    has to leave by ``os._exit``.
    """
    with asyncio.Runner(loop_factory=_loop) as runner:
        return runner.run(work)


class _Abandoning(ThreadPoolExecutor):
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_Abandoning(thread_name_prefix="patient"))
    return loop
