"""Steps that free the cards: stop the unit, end what else holds them, wait for their memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from console.operations.service import world
from console.operations.service.request import Orphan, ServiceRequest
from console.operations.service.world import (
    ENDED,
    holders_of,
    is_new_run,
    patience_of,
    systemctl,
    unit_now,
    wait_cards_free,
    wait_inactive,
)
from console.operations.step import Context, Step, StepFailed

#: Seconds between SIGTERM and SIGKILL for a foreign process, and then until it must be gone.
TERM_S = 10.0
KILL_S = 10.0

#: Seconds until the cards' memory must be free after the last program ended: the driver gives
#: 90 GB back within a few.
FREE_S = 90.0

#: Brings the service back as it ran before; the evidence.
WayBack = Callable[[Context], Awaitable[str]]


class Stop(Step):
    """SIGTERM, and wait until the unit's control group is empty."""

    id = "stop"

    def __init__(self, request: ServiceRequest, way_back: WayBack | None = None, back_s: float = 0.0) -> None:
        self._request = request
        self._way_back = way_back
        self.words = f"stop {request.unit} (SIGTERM; SIGKILL after {request.stop_timeout_s:.0f} s)"
        self.deadline = patience_of(request.stop_timeout_s) + 30.0
        self.undo_deadline = back_s + self.deadline
        if request.was_running and request.replaces:
            name = request.old.name if request.old is not None else "what ran before"
            self.undo_words = f"start {name} again and wait until it is ready"

    async def done(self, context: Context) -> str | None:
        unit = await unit_now(context)
        if unit.active_state in ENDED and not unit.tasks:
            return f"{unit.id} is {unit.active_state}"
        if await is_new_run(context, self._request, unit):
            return f"the run before has ended; {unit.id} runs anew"
        return None

    async def do(self, context: Context) -> None:
        if await self.done(context) is None:
            await systemctl(context, "stop", "--no-block", "--", self._request.unit)

    async def verify(self, context: Context) -> str:
        if await is_new_run(context, self._request, await unit_now(context)):
            return "the run before has ended"
        return await wait_inactive(context, self._request)

    async def undo(self, context: Context) -> str:
        if self._way_back is None:
            raise StepFailed(
                f"there is no earlier state to go back to: {self._request.unit} is left as it is now"
            )
        if not self._request.was_running:
            return f"{self._request.unit} did not run before"
        return await self._way_back(context)


class Orphans(Step):
    """Ends, by pid, the processes that the plan names. Others are named, and nothing happens to them."""

    id = "orphans"
    deadline = TERM_S + KILL_S + 30.0

    def __init__(self, request: ServiceRequest) -> None:
        self._request = request
        named = ", ".join(orphan.words for orphan in request.orphans)
        self.words = f"end what else holds the cards: {named}; SIGTERM, after {TERM_S:.0f} s SIGKILL"

    async def done(self, context: Context) -> str | None:
        alive = self._alive(context)
        return None if alive else f"{_counted(len(self._request.orphans))} ended"

    async def do(self, context: Context) -> None:
        for signal, seconds in (("TERM", TERM_S), ("KILL", KILL_S)):
            for orphan in self._alive(context):
                # It may end between the look and the signal: what counts is the look afterwards.
                await context.host.run(("kill", f"-{signal}", str(orphan.pid)), deadline=5.0)
            if await self._gone(context, seconds, signal):
                return

    async def verify(self, context: Context) -> str:
        alive = self._alive(context)
        if alive:
            raise StepFailed(
                "these do not end, not even by SIGKILL: " + ", ".join(orphan.words for orphan in alive)
            )
        return f"{_counted(len(self._request.orphans))} ended"

    def _alive(self, context: Context) -> list[Orphan]:
        root = context.host.root
        return [one for one in self._request.orphans if start_ticks(root, one.pid) == one.start_ticks]

    async def _gone(self, context: Context, seconds: float, signal: str) -> bool:
        ends = context.clock() + seconds
        while alive := self._alive(context):
            if context.clock() > ends:
                return False
            context.say(f"SIG{signal} sent, waiting for {', '.join(orphan.words for orphan in alive)}")
            await asyncio.sleep(world.BEAT_S)
        return True


class Free(Step):
    """Nothing starts before the cards' memory is really free: an engine that finds less dies later."""

    id = "free"
    deadline = FREE_S + 15.0

    def __init__(self, request: ServiceRequest) -> None:
        self._request = request
        self.words = f"wait until the memory of {_counted(len(request.cards), 'card')} is free"

    async def done(self, context: Context) -> str | None:
        unit = await unit_now(context)
        return "the new run has them" if await is_new_run(context, self._request, unit) else None

    async def do(self, context: Context) -> None:
        """Waiting is all there is to do."""

    async def verify(self, context: Context) -> str:
        evidence = await wait_cards_free(context, self._request, FREE_S)
        await context.monitor.read_holders()
        _refuse_holders(context, self._request)
        return evidence


def _refuse_holders(context: Context, request: ServiceRequest) -> None:
    """A process that came since the plan was made is named, and left alone."""
    snapshot = context.monitor.snapshot()
    planned = {orphan.pid for orphan in request.orphans}
    strangers = [
        holder
        for holder in snapshot.holders
        if holder.orphan
        and holder.pid not in planned
        and _much(holder.memory_bytes)
        and set(holder.memory_bytes) & set(request.cards)
        and start_ticks(context.host.root, holder.pid) is not None
    ]
    if strangers:
        named = holders_of(snapshot, request.cards, {holder.pid for holder in strangers})
        raise StepFailed(f"processes that the plan does not name hold the cards: {'; '.join(named)}")


#: A process with less than this on every card, bytes, is a display or a monitor: it is left alone.
SMALL_BYTES = 256 * 1024**2


def _much(memory: dict[str, int | None]) -> bool:
    return any(held is None or held >= SMALL_BYTES for held in memory.values())


def start_ticks(root: Path, pid: int) -> int | None:
    """When a process began, in clock ticks since boot (field 22 of proc_pid_stat(5)); None: it is gone.

    A process that has ended and waits for its parent is gone, too: it holds nothing any more.
    """
    try:
        text = (root / "proc" / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in ("Z", "X") or not fields[19].isdigit():
        return None
    return int(fields[19])


def _counted(number: int, word: str = "process") -> str:
    plural = "es" if word.endswith("s") else "s"
    return f"{number} {word}{'' if number == 1 else plural}"
