"""Gathers what the pre-flight of a rebind wants to know beside the inventory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from console.model.card import Address
from console.model.rebind.facts import Facts
from console.model.rebind.holders import HolderScan
from console.model.rebind.inventory import Slot
from console.model.rebind.kernel_log import CardEvent
from console.model.text import clean
from console.sources.card_holders import scan_holders
from console.sources.host_memory import groups_of, read_held
from console.sources.kernel_events import recent_events
from console.sources.source import Apart, Unavailable
from console.transport.runner import Runner

_DAY = 86_400.0

#: Seconds for one command.
_DEADLINE = 5.0


async def read_facts(
    host: Runner,
    slots: Iterable[Slot],
    *,
    root: bool,
    own: Iterable[int] = (),
    persistence: Mapping[Address, bool] | None = None,
    returned_mib: int = 0,
) -> Facts:
    """Holders, the kernel's log of the last day and the driver's module on disk, side by side.

    ``root``: whether this program may change the host. ``own`` are pids of this program.
    What cannot be read is None, with the reason.
    """
    cards = tuple(slots)
    mine = tuple(own)
    holders: Apart[HolderScan] = Apart("card holders")
    (scan, scan_problem), (log, log_problem), module = await asyncio.gather(
        _scan(holders, host, cards, mine), _log(host, cards), _module(host)
    )
    return Facts(
        root=root,
        module_on_disk=module,
        log=log,
        log_s=_DAY,
        log_problem=log_problem,
        holders=scan,
        holders_problem=scan_problem,
        persistence=dict(persistence or {}),
        returned_mib=returned_mib,
    )


async def _scan(
    apart: Apart[HolderScan], host: Runner, cards: tuple[Slot, ...], own: tuple[int, ...]
) -> tuple[HolderScan | None, str | None]:
    try:
        async with asyncio.timeout(_DEADLINE):
            return await apart(lambda: scan_holders(host.root, cards, own=own)), None
    except Unavailable as problem:
        return None, str(problem)
    except TimeoutError:
        return None, f"the processes could not be looked through within {_DEADLINE:g} s"


async def _log(host: Runner, cards: tuple[Slot, ...]) -> tuple[tuple[CardEvent, ...] | None, str | None]:
    try:
        return await recent_events(host, cards, _DAY, deadline=_DEADLINE), None
    except Unavailable as problem:
        return None, str(problem)


def service_memory_mib(root: Path, container: int | None, unit: str) -> int:
    """Host memory that comes back when the service is stopped, in MiB; 0 when the kernel does not tell."""
    group = groups_of(container, f"/system.slice/{unit}")[-1]
    return (read_held(root, group) or 0) // (1024 * 1024)


async def _module(host: Runner) -> str | None:
    """None also where modinfo knows no such module: then the loaded one alone can be judged."""
    result = await host.run(("modinfo", "-F", "version", "nvidia"), deadline=_DEADLINE)
    lines = result.stdout.decode("utf-8", "replace").split()
    return clean(lines[0])[:40] if result.ok and lines else None
