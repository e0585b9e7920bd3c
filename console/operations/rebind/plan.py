"""Makes the plans that move, repair and recover cards: one look at the host, its findings, every step."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from console.checks.rebind import preflight
from console.checks.rebind_cards import there
from console.model.card import Address
from console.model.finding import Finding
from console.model.operation import Plan
from console.model.profile import Profile
from console.model.rebind.holders import KNOWN, HolderScan, kind_of
from console.model.rebind.inventory import Inventory, Slot, Target, VmConfig
from console.model.rebind.timing import SHUTDOWN_S, start_limit_s
from console.model.words import span
from console.operations.rebind.planning import chosen_cards, moves_of, read_all_facts, written
from console.operations.rebind.request import (
    Client,
    Machine,
    Persistence,
    RebindRequest,
)
from console.operations.rebind.world import site_cards
from console.operations.service import service_as_it_is
from console.operations.service.costs import load_cost, traffic_costs
from console.operations.service.request import ServiceRequest
from console.operations.service.world import RUNNING
from console.operations.step import Context, Refused
from console.store.jobs import list_jobs

_DAEMON = "nvidia-persistenced"


async def plan_rebind(
    context: Context, target: Target, asked: tuple[str, ...] = (), *, force_stop: bool = False
) -> Plan:
    """Move cards to the VM, or back to the host and its container. ``asked``: addresses; none: all.

    Refused when there is nothing that could be judged: no such card, no VM in the site.
    """
    inventory, chosen = await chosen_cards(context, asked)
    site = context.site
    vm = inventory.vm(site.vm.id) if site.vm is not None else None
    service, running, profile = await _service(context)
    persistence = _persistence(context)
    facts = await read_all_facts(context, chosen, persistence)
    findings = [
        *_side(inventory, chosen, target, vm),
        *preflight(
            inventory,
            target=target,
            chosen=chosen,
            vm=site.vm.id if site.vm is not None else None,
            container=site.container.id,
            unit=site.service.unit,
            facts=facts,
        ),
    ]
    if service is None and running is None:
        told = f"{site.service.unit} cannot be read: {site.container.kind} {site.container.id or ''}".strip()
        if target == "vm" and not _is_stopped(inventory, site.container.id):
            findings.append(Finding("service", "Service", "fail", told, "gpuops doctor"))
    # A card that the VM has already is looked at again; one that the host has would only be in the way.
    moving = [slot for slot in chosen if target == "vm" or not there(slot, target)]
    stops = target == "vm" and service is not None and running and _in_the_way(context, facts.holders)
    request = RebindRequest(
        target=target,
        moves=moves_of(context, inventory, moving),
        container=site.container.id,
        machine=None if vm is None else _machine(vm, force_stop),
        service=_asked_of_service(
            context, target, service, stops=bool(stops), inventory=inventory, chosen=chosen
        ),
        start_container=target == "container" and _is_stopped(inventory, site.container.id),
        persistent=_persistent(chosen, persistence) if target == "vm" else (),
        persistence=await _comes_back(context) if target == "container" else "off",
        clients=_clients(context, facts.holders) if target == "vm" else (),
    )
    costs = list(_costs(context, request, profile))
    name = f"vm {vm.id}" if target == "vm" and vm is not None else _home_name(context)
    count = f"{len(moving)} card{'' if len(moving) == 1 else 's'}"
    what = count if not asked else ", ".join(slot.name for slot in moving)
    return written(context, "rebind", f"move {what or count} to {name}", name, request, findings, costs)


# What there is -----------------------------------------------------------------------------------


def _persistence(context: Context) -> dict[Address, bool]:
    """By card, as NVML says it now; cards that it does not tell of are left out."""
    sample = context.monitor.nvml.value
    cards = sample.cards if sample is not None and sample.cards is not None else ()
    return {card.address: card.persistence for card in cards if card.persistence is not None}


def _side(
    inventory: Inventory, chosen: tuple[Slot, ...], target: Target, vm: VmConfig | None
) -> Iterable[Finding]:
    """A plan that would change nothing is none."""
    if target == "vm" and vm is not None and vm.status == "running" and all(one.on_vfio for one in chosen):
        yield Finding("side", "Side", "fail", f"VM {vm.id} runs with these cards already: nothing to move")
    elif target == "container" and all(there(slot, target) for slot in chosen):
        told = "the nvidia driver has these cards already: nothing to move"
        yield Finding("side", "Side", "fail", told, "gpuops start, when the service is to run")


async def _service(context: Context) -> tuple[ServiceRequest | None, bool | None, Profile | None]:
    """The service as it is, and whether it runs. None when its systemd cannot be asked."""
    try:
        request, unit = await service_as_it_is(context)
    except Refused:
        return None, None, None
    return request, unit.active_state in RUNNING, request.new


def _in_the_way(context: Context, scan: HolderScan | None) -> bool:
    """Whether the service has one of the cards open, or may still open it while it loads."""
    if context.monitor.snapshot().state.name not in ("ready", "busy", "degraded"):
        return True
    site = context.site
    vm = site.vm.id if site.vm is not None else None
    return scan is None or any(
        kind_of(holder, container=site.container.id, unit=site.service.unit, vm=vm) == "service"
        for holder in scan.holders
    )


def _asked_of_service(
    context: Context,
    target: Target,
    service: ServiceRequest | None,
    *,
    stops: bool,
    inventory: Inventory,
    chosen: tuple[Slot, ...],
) -> ServiceRequest | None:
    if target == "vm":
        return service if stops else None
    staying = {slot.address for slot in inventory.slots if not slot.on_nvidia}
    wanted = staying & {one.address for one in _site_slots(context, inventory)}
    if wanted - {slot.address for slot in chosen}:
        return None  # some of the site's cards stay away: whether the service fits the others is not ours
    if service is not None:
        return service
    # Its container does not run: the unit is read when it does.
    return ServiceRequest(unit=context.site.service.unit, path="") if context.site.container.id else None


def _site_slots(context: Context, inventory: Inventory) -> tuple[Slot, ...]:
    named = site_cards(context.site)
    return tuple(slot for slot in inventory.slots if not named or slot.address in named)


def _is_stopped(inventory: Inventory, container: int | None) -> bool:
    found = inventory.container(container) if container is not None else None
    return found is not None and found.status == "stopped"


def _machine(vm: VmConfig, force_stop: bool) -> Machine:
    return Machine(
        id=vm.id,
        was_running=vm.status == "running",
        agent=vm.agent,
        start_s=start_limit_s(vm),
        shutdown_s=SHUTDOWN_S,
        force_stop=force_stop,
    )


def _persistent(chosen: Iterable[Slot], persistence: dict[Address, bool]) -> tuple[str, ...]:
    return tuple(slot.uuid for slot in chosen if slot.uuid is not None and persistence.get(slot.address))


async def _comes_back(context: Context) -> Persistence:
    """How persistence mode was kept when the cards left, as far as that is known."""
    result = await context.host.run(("systemctl", "is-active", f"{_DAEMON}.service"), deadline=10.0)
    if result.stdout.decode("utf-8", "replace").strip() == "active":
        return "daemon"
    for job in list_jobs(context.state):
        if job.plan.action == "rebind" and job.begun:
            request = msgspec.json.decode(job.plan.request, type=RebindRequest)
            if request.target == "vm":
                return "cards" if request.persistent else "off"
    return "off"


def _clients(context: Context, scan: HolderScan | None) -> tuple[Client, ...]:
    """Known programs of the host that have cards open, by the unit that ends them."""
    site = context.site
    found: dict[str, Client] = {}
    for holder in scan.holders if scan is not None else ():
        kind = kind_of(holder, container=site.container.id, unit=site.service.unit, vm=None)
        daemon = holder.comm[:15] == _DAEMON[:15]  # it lets go card by card
        if kind == "known" and not daemon and holder.unit is not None:
            found.setdefault(holder.unit, Client(holder.unit, KNOWN[holder.comm[:15]].partition(":")[0]))
    return tuple(found.values())


def _home_name(context: Context) -> str:
    id = context.site.container.id
    return f"container {id}" if id is not None else "host"


def _costs(context: Context, request: RebindRequest, profile: Profile | None) -> Iterable[str]:
    if request.target == "vm":
        if request.service is not None:
            yield f"{request.service.unit} is stopped and stays stopped while the VM has the cards"
            yield from traffic_costs(context.monitor.snapshot())
        if request.machine is not None and not request.machine.agent:
            yield "the VM has no guest agent: whether its driver sees the cards cannot be asked"
        if request.machine is not None:
            limit = span(request.machine.start_s)
            yield f"Proxmox gives the VM {limit} to start: all its memory is pinned first"
    else:
        if request.machine is not None and request.machine.was_running:
            yield f"VM {request.machine.id} is shut down; its guest has {span(request.machine.shutdown_s)}"
            if request.machine.force_stop:
                yield "then it is stopped hard: that can leave a card that only a cold start brings back"
        if request.service is not None:
            yield load_cost(context, profile)
        else:
            yield "the service is not started: not all of its cards are back"
    yield "when a card does not move, all go back to where they are now"
