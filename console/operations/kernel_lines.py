"""What the kernel says about the cards while a job runs, kept in the job's journal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from console.model.operation import Notice
from console.model.rebind.inventory import Inventory
from console.operations.step import Context
from console.sources.inventory import read_apart
from console.sources.kernel_events import KernelEvents
from console.sources.source import Apart, Unavailable
from console.store.journal import Journal, JournalProblem

#: Seconds to learn which cards there are.
_LOOK_S = 10.0

#: After a job's end the kernel's last words are waited for so long, seconds.
_LAST_S = 0.3

#: More lines than this in one job say nothing more.
_KEPT = 200


@contextlib.asynccontextmanager
async def kept(context: Context, journal: Journal) -> AsyncIterator[None]:
    """Follow the kernel while this is open. What keeps it from that is a notice, and stops no job."""
    following = asyncio.create_task(_follow(context, journal))
    following.add_done_callback(_tell_defect)
    try:
        yield
        await asyncio.sleep(_LAST_S)
    finally:
        following.cancel()
        await asyncio.wait({following})


async def _follow(context: Context, journal: Journal) -> None:
    apart: Apart[Inventory] = Apart("cards")
    named = () if context.site.gpus == "auto" else context.site.gpus
    try:
        async with asyncio.timeout(_LOOK_S):
            inventory = await read_apart(apart, context.host.root, named)
    except (TimeoutError, Unavailable) as problem:
        words = str(problem) or f"no answer within {_LOOK_S:g} s"
        _note(context, journal, f"the kernel's words about the cards are not kept: {words}")
        return
    number = 0
    async for event in KernelEvents(context.host, lambda: inventory.slots).watch():
        if event.kind == "source":
            _note(context, journal, event.words)
            continue
        number += 1
        if number > _KEPT:
            _note(context, journal, f"more than {_KEPT} words of the kernel: the rest is in journalctl -k")
            return
        # What is lost of these with a full disk is in the kernel's log; the next intent tells of the disk.
        with contextlib.suppress(JournalProblem):
            journal.append(event.line, sync=False)


def _note(context: Context, journal: Journal, words: str) -> None:
    with contextlib.suppress(JournalProblem):
        journal.append(Notice(at=context.wall_clock(), words=words), sync=False)


def _tell_defect(following: asyncio.Task[None]) -> None:
    if not following.cancelled() and (defect := following.exception()) is not None:
        print(f"gpuops: defect: the kernel is followed no longer: {defect!r}", file=sys.stderr)
