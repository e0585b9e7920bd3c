"""The service as the steps see it: its unit, its file, its cards; and the commands that change them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from console.model.snapshot import Snapshot
from console.model.text import clean
from console.model.unit import UnitStatus
from console.operations.service.request import ServiceRequest
from console.operations.step import Context, StepFailed
from console.sources.source import Unavailable
from console.transport.files import FileProblem, exists, read_text, remove, replace

#: Seconds between two looks while something is waited for.
BEAT_S = 0.5

#: Seconds for one command of systemctl that does not wait for a job.
COMMAND_S = 30.0

#: Seconds for which systemctl may give no answer before that is a failure: a loading host is slow.
SILENCE_S = 60.0

#: A card whose programs are gone has less than this in use, bytes; persistence mode and the
#: driver's own context leave a few hundred MB.
FREE_BYTES = 512 * 1024**2

#: Where the version before a change is kept, beside the unit's file; systemd ignores the ending.
PREVIOUS = ".gpuops-previous"

#: What ``replace`` leaves behind when it is killed between writing and moving.
UNFINISHED = ".gpuops-new"

RUNNING = frozenset({"active", "activating", "reloading", "refreshing"})
ENDED = frozenset({"inactive", "failed"})


async def unit_now(context: Context) -> UnitStatus:
    """The unit as systemd has it at this moment. StepFailed when systemctl does not answer."""
    try:
        return await context.monitor.sources.unit.read()
    except Unavailable as problem:
        raise StepFailed(f"systemctl does not answer for {context.site.service.unit}: {problem}") from None


async def wait_for_unit(
    context: Context, holds: Callable[[UnitStatus], Awaitable[bool]], seconds: float
) -> UnitStatus | None:
    """Look until ``holds``; the unit then, or None after ``seconds``.

    Every look is asked for after this call, never the monitor's own, which may be older.
    StepFailed when systemctl is silent for a minute.
    """
    ends = context.clock() + seconds
    heard = context.clock()
    while True:
        try:
            unit = await context.monitor.sources.unit.read()
        except Unavailable as problem:
            if context.clock() - heard > SILENCE_S:
                raise StepFailed(f"systemctl does not answer for a minute: {problem}") from None
        else:
            heard = context.clock()
            if await holds(unit):
                return unit
        if context.clock() >= ends:
            return None
        await asyncio.sleep(BEAT_S)


async def systemctl(context: Context, *words: str) -> None:
    """One command of systemctl on the service's machine. StepFailed with its own words."""
    result = await context.service.run(("systemctl", *words), deadline=COMMAND_S)
    if not result.ok:
        said = result.stderr.decode("utf-8", "replace").strip().splitlines()
        lines = tuple(clean(line) for line in said[:20])
        raise StepFailed(f"systemctl {' '.join(words)}: {clean(result.reason)}", lines)


async def file_now(context: Context, request: ServiceRequest) -> str | None:
    """The text of the unit's file; None when there is none. StepFailed when it cannot be read."""
    try:
        return await read_text(context.service, request.path)
    except FileProblem as problem:
        raise StepFailed(clean(str(problem))) from None


async def is_new_run(context: Context, request: ServiceRequest, unit: UnitStatus) -> bool:
    """Whether what runs in the unit is the run that this job started, not the one it found."""
    if unit.active_state not in RUNNING or unit.invocation_id == request.invocation:
        return False
    return not request.replaces or await file_now(context, request) == request.new_text


async def put_file(context: Context, request: ServiceRequest, text: str | None) -> None:
    """Bring the unit's file to ``text`` (None: no file) and let systemd read it. StepFailed."""
    try:
        if text is None:
            await remove(context.service, request.path)
        else:
            await replace(context.service, request.path, text, keep=request.path + PREVIOUS)
    except FileProblem as problem:
        raise StepFailed(clean(str(problem))) from None


async def sweep(context: Context, request: ServiceRequest) -> None:
    """Remove what a write that was cut short left beside the unit's file. StepFailed."""
    try:
        if await exists(context.service, request.path + UNFINISHED):
            await remove(context.service, request.path + UNFINISHED)
    except FileProblem as problem:
        raise StepFailed(clean(str(problem))) from None


async def reload_units(context: Context) -> str:
    """``daemon-reload``, and a look whether systemd has read the file: the evidence. StepFailed."""
    await systemctl(context, "daemon-reload")
    return await loaded(context)


async def loaded(context: Context) -> str:
    """That systemd has read the unit's files as they are. StepFailed when it has not, or refuses them."""
    unit = await unit_now(context)
    if unit.load_state not in ("loaded", "not-found"):
        raise StepFailed(f"systemd does not take {unit.id}: {unit.load_state}")
    if unit.need_daemon_reload:
        raise StepFailed(f"systemd still has an older version of {unit.id}")
    return f"systemd has read {unit.id}" if unit.load_state == "loaded" else f"there is no {unit.id} any more"


async def wait_inactive(context: Context, request: ServiceRequest) -> str:
    """Wait until the unit has ended and its control group is empty: the evidence. StepFailed."""
    began = context.clock()
    patience = patience_of(request.stop_timeout_s)

    async def ended(unit: UnitStatus) -> bool:
        if unit.active_state in ENDED and not unit.tasks:
            return True
        context.say(_stopping_words(context, unit, request, context.clock() - began))
        return False

    unit = await wait_for_unit(context, ended, patience)
    if unit is None:
        unit = await unit_now(context)
        left = f"{unit.tasks} tasks left" if unit.tasks else unit.sub_state
        raise StepFailed(
            f"{unit.id} has not ended after {patience:.0f} s ({unit.active_state}, {left}); "
            "a process that waits in the driver ends only with its card"
        )
    took = context.clock() - began
    how = "killed after its time to stop had passed" if unit.result == "timeout" else unit.active_state
    return f"{unit.id} ended after {took:.0f} s ({how}), no process left"


def patience_of(stop_timeout_s: float) -> float:
    """Seconds until an end: systemd waits once after SIGTERM, and once more after SIGKILL."""
    return 2 * min(stop_timeout_s, 3600.0) + 30.0


def _stopping_words(context: Context, unit: UnitStatus, request: ServiceRequest, waited: float) -> str:
    words = ["stopping"]
    rates = context.monitor.snapshot().rates.value
    if rates is not None and rates.requests_running and unit.active_state == "deactivating":
        words.append(f"draining {rates.requests_running:.0f} requests")
    left = request.stop_timeout_s - waited
    words.append(
        f"SIGKILL in {left:.0f} s" if left > 0 else "past its time to stop: systemd kills what is left"
    )
    return ", ".join(words)


def cards_in_use(snapshot: Snapshot, addresses: tuple[str, ...]) -> tuple[tuple[str, ...], float | None]:
    """What keeps each of these cards from being free, in words, and when that was read (monotonic).

    A card whose memory could not be read is not free.
    """
    reasons = []
    rows = {card.pci.address: card for card in snapshot.cards}
    for address in addresses:
        card = rows.get(address)
        seen = card.telemetry if card is not None else None
        if card is None:
            reasons.append(f"{address} is not there any more")
        elif seen is None or seen.memory_used_bytes is None or card.stale_s is not None:
            reasons.append(f"card {card.index} ({address}): its memory cannot be read")
        elif seen.memory_used_bytes > FREE_BYTES:
            reasons.append(f"card {card.index} ({address}) has {seen.memory_used_bytes / 1e9:.1f} GB in use")
    return tuple(reasons), snapshot.cards_at


def holders_of(
    snapshot: Snapshot, addresses: tuple[str, ...], pids: set[int] | None = None
) -> tuple[str, ...]:
    """Who holds memory on these cards, in words; only ``pids`` where they are given."""
    index_of = {card.pci.address: card.index for card in snapshot.cards}
    found = []
    for holder in snapshot.holders:
        held = [address for address in holder.memory_bytes if address in addresses]
        if held and (pids is None or holder.pid in pids):
            cards = ", ".join(str(index_of.get(address, address)) for address in held)
            found.append(f"{holder.name} (pid {holder.pid}) on card {cards}")
    return tuple(found)


async def wait_cards_free(context: Context, request: ServiceRequest, seconds: float) -> str:
    """Wait until two readings in a row show the cards' memory free: the evidence. StepFailed.

    Only readings that began after this call count.
    """
    if not request.cards:
        return "this service uses no card"
    began = context.clock()
    counted: float = began
    free_readings = 0
    reasons: tuple[str, ...] = ("the cards have not been read yet",)
    while context.clock() - began < seconds:
        snapshot = context.monitor.snapshot()
        found, read_at = cards_in_use(snapshot, request.cards)
        if read_at is not None and read_at > counted:
            counted, reasons = read_at, found
            free_readings = 0 if found else free_readings + 1
            if free_readings == 2:
                return f"{len(request.cards)} cards free in two readings"
        if reasons:
            context.say(f"waiting for memory: {reasons[0]}")
        await asyncio.sleep(BEAT_S / 2)
    who = holders_of(context.monitor.snapshot(), request.cards)
    by = f"; held by {'; '.join(who)}" if who else "; no process that NVML names holds it"
    raise StepFailed(f"the cards are not free after {seconds:.0f} s: {'; '.join(reasons)}{by}", reasons + who)
