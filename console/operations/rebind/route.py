"""The way of each operation on cards: its steps in order; taken back in reverse they are the way home."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from console.model.operation import Plan
from console.model.rebind.inventory import NVIDIA, VFIO
from console.operations.rebind.arrival import Answer, Nodes, PersistenceOn
from console.operations.rebind.cards import LoadDriver, ToHost, ToVfio
from console.operations.rebind.checks import Check
from console.operations.rebind.clients import PersistenceOff, StartClients, StopClients, Unused
from console.operations.rebind.guests import AskGuest, StartContainer, StartVm, StopVm
from console.operations.rebind.repair import Mend, Rescue
from console.operations.rebind.request import REQUESTS, RebindRequest, RecoverRequest, RepairRequest
from console.operations.rebind.service import Kept, StopService
from console.operations.service.starting import GENERATION, Ready, Smoke, Start
from console.operations.step import Step


def steps(plan: Plan) -> tuple[Step, ...]:
    """The steps of a plan, from its request alone. msgspec.DecodeError for a request that is not of these."""
    return steps_for(msgspec.json.decode(plan.request, type=REQUESTS[plan.action]))


def steps_for(request: RebindRequest | RepairRequest | RecoverRequest) -> tuple[Step, ...]:
    """The steps of one request."""
    if isinstance(request, RepairRequest):
        return tuple(_repair(request))
    if isinstance(request, RecoverRequest):
        return (Rescue(request),)
    return tuple(_to_vm(request) if request.target == "vm" else _to_container(request))


def _to_vm(request: RebindRequest) -> Iterator[Step]:
    yield Check(request.moves, "vm", request.machine)
    if request.service is not None:
        yield StopService(request.service)
    if request.clients:
        yield StopClients(request.clients)
    if request.persistent:
        yield PersistenceOff(request.persistent)
    yield Unused(request)
    yield LoadDriver(VFIO)
    # The last card first: taken back, they then come in PCI order, and each gets its minor again.
    yield from map(ToVfio, reversed(request.moves))
    if request.machine is not None:
        yield StartVm(request.machine, request.addresses)
    if request.clients:
        yield StartClients(request.clients)
    if request.machine is not None and request.machine.agent:
        yield AskGuest(request.machine, len(request.moves))


def _to_container(request: RebindRequest) -> Iterator[Step]:
    yield Check(request.moves, "container", request.machine)
    if request.machine is not None:
        yield StopVm(request.machine, request.addresses)
    yield Unused(request)
    yield LoadDriver(NVIDIA)
    # In PCI order: the driver gives every card that comes the lowest minor that is free.
    yield from map(ToHost, request.moves)
    yield Nodes(request)
    yield Answer(request)
    if request.persistence != "off":
        yield PersistenceOn(request)
    if request.start_container and request.container is not None:
        yield Kept(StartContainer(request.container))
    if request.service is not None:
        yield Kept(Start(request.service))
        yield Kept(Ready(request.service))
        yield Kept(Smoke(request.service, GENERATION))


def _repair(request: RepairRequest) -> Iterator[Step]:
    sides = dict.fromkeys(card.target for card in request.cards)
    for side in sides:
        yield LoadDriver(VFIO if side == "vm" else NVIDIA)
    yield from map(Mend, request.cards)
