"""What every plan about cards is made with: which cards, what is known of them, how it is written."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

import msgspec

from console.model.card import Address
from console.model.finding import Finding
from console.model.operation import Plan
from console.model.rebind.choice import ChoiceProblem, choose
from console.model.rebind.facts import Facts
from console.model.rebind.inventory import Inventory, Slot
from console.model.rebind.moves import CardMove, move_of
from console.operations.rebind.request import RebindRequest, RecoverRequest, RepairRequest
from console.operations.rebind.route import steps_for
from console.operations.rebind.world import look
from console.operations.step import Context, Refused, StepFailed
from console.sources.rebind_facts import read_facts, service_memory_mib
from console.store.jobs import list_jobs


async def chosen_cards(context: Context, asked: tuple[str, ...]) -> tuple[Inventory, tuple[Slot, ...]]:
    """Refused with the reason when the cards cannot be read, or are none."""
    inventory = await read_cards(context)
    try:
        return inventory, choose(inventory, asked, context.site.gpus)
    except ChoiceProblem as problem:
        raise Refused(str(problem)) from None


async def read_cards(context: Context) -> Inventory:
    """All there is now, sleeping cards woken. Refused with the reason when it cannot be read."""
    try:
        return await look(context, wake=True)
    except StepFailed as problem:
        raise Refused(str(problem)) from None


async def read_all_facts(
    context: Context, chosen: tuple[Slot, ...], persistence: dict[Address, bool]
) -> Facts:
    site = context.site
    root = context.host.root
    return await read_facts(
        context.host,
        chosen,
        root=site.simulated is not None or os.geteuid() == 0,
        own=(os.getpid(),),
        persistence=persistence,
        returned_mib=await asyncio.to_thread(service_memory_mib, root, site.container.id, site.service.unit),
    )


def moves_of(context: Context, inventory: Inventory, chosen: Iterable[Slot]) -> tuple[CardMove, ...]:
    homes = _homes(context)
    return tuple(
        move_of(slot, inventory.drivers, homes) for slot in sorted(chosen, key=lambda slot: slot.address)
    )


def _homes(context: Context) -> dict[Address, str | None]:
    """Of each function, the driver from which the last job took it away."""
    found: dict[Address, str | None] = {}
    for job in list_jobs(context.state):
        if job.plan.action != "rebind" or not job.begun:
            continue
        request = msgspec.json.decode(job.plan.request, type=RebindRequest)
        for move in request.moves if request.target == "vm" else ():
            for function in move.functions:
                found.setdefault(function.address, function.home)
    return found


def written(
    context: Context,
    action: str,
    title: str,
    target: str,
    request: RebindRequest | RepairRequest | RecoverRequest,
    findings: list[Finding],
    costs: list[str],
) -> Plan:
    return Plan(
        action=action,
        title=title,
        target=target,
        made_at=context.wall_clock(),
        request=msgspec.Raw(msgspec.json.encode(request)),
        steps=tuple(step.planned() for step in steps_for(request)),
        findings=tuple(findings),
        costs=tuple(costs),
        typed=True,
    )


def root_finding(facts: Facts) -> Finding:
    """Whether this program may change the host."""
    if facts.root:
        return Finding("root", "Permissions", "pass", "running as root")
    words = "not root: only root may bind drivers and see who holds the cards"
    return Finding("root", "Permissions", "fail", words, "run gpuops as root")
