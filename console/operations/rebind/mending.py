"""Makes the plans for cards that were left half way, and for a card that does not answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from console.model.card import Address
from console.model.finding import Finding
from console.model.operation import Plan
from console.model.rebind.holders import HolderScan, is_reader
from console.model.rebind.inventory import Function, Inventory, Slot, Target
from console.model.rebind.moves import CardMove
from console.model.rebind.pve import normal
from console.model.rebind.stranded import Stranded, reconcile
from console.operations.rebind.planning import (
    chosen_cards,
    moves_of,
    read_all_facts,
    read_cards,
    root_finding,
    written,
)
from console.operations.rebind.repair import COLD, RUNGS
from console.operations.rebind.request import RecoverRequest, Repaired, RepairRequest, Rung
from console.operations.step import Context, Refused
from console.store.jobs import list_jobs


async def plan_repair(context: Context, asked: tuple[str, ...] = ()) -> Plan:
    """Bring what was left half way to a side where it is of use. Refused when nothing was."""
    inventory, chosen = await chosen_cards(context, asked)
    found = [
        one
        for one in reconcile(inventory, container=context.site.container.id)
        if one.card in {slot.address for slot in chosen}
    ]
    mended = [one for one in found if one.repair in ("container", "vm", "override") and not one.harmless]
    if not mended:
        raise Refused(_nothing_to_mend(found))
    facts = await read_all_facts(context, chosen, {})
    cards = tuple(_repaired(context, inventory, mended))
    findings = [
        root_finding(facts),
        *(Finding(one.kind, one.card, "warn", one.words) for one in mended),
        *(
            Finding(one.kind, one.card, "fail", one.words, one.remedy)
            for one in found
            if one.kind == "pending"
        ),
        *_in_use(facts.holders, {one.card for one in mended}),
    ]
    request = RepairRequest(cards=cards, container=context.site.container.id)
    title = f"repair {', '.join(card.move.name for card in cards)}"
    costs = ["there is no way back to how they are: what fails stays as it is and is said"]
    return written(context, "repair", title, "repair", request, findings, costs)


async def plan_recover(context: Context, card: str, rung: Rung = "reset") -> Plan:
    """Try one rung of the ladder on a card that does not answer, or that an earlier rung took off the bus."""
    patient = await _patient(context, card)
    inventory, move = patient.inventory, patient.move
    beside = patient.beside if rung == "bus-reset" else ()
    concerned = beside if patient.slot is None else (patient.slot, *beside)
    facts = await read_all_facts(context, concerned, {})
    findings = [
        root_finding(facts),
        _dead_finding(patient),
        *_in_use(facts.holders, {one.address for one in concerned}),
        _rung_finding(patient, rung),
    ]
    rest = [f"{name}: {RUNGS[name]}" for name in list(RUNGS)[list(RUNGS).index(rung) + 1 :]]
    costs = [
        f"this tries one rung only: {RUNGS[rung]}",
        *(f"{one.name} on the same port is reset too" for one in beside),
        *(f"when it does not help, next is {words}" for words in rest[:1]),
        f"in the end {COLD}",
    ]
    others = moves_of(context, inventory, beside)
    request = RecoverRequest(
        move=move, rung=rung, port=patient.port, bus_reset=patient.bus_reset, beside=others
    )
    title = f"recover {move.name}: {rung}"
    return written(context, "recover", title, move.name, request, findings, costs)


@dataclass(frozen=True)
class _Patient:
    """The card to recover. ``slot`` is None once a rung has taken it off the bus and it did not come back."""

    inventory: Inventory
    move: CardMove
    port: Address | None
    bus_reset: bool
    slot: Slot | None

    @property
    def beside(self) -> tuple[Slot, ...]:
        """Other cards below the same port."""
        return tuple(
            one
            for one in self.inventory.slots
            if one.address != self.move.address and one.upstream == self.port is not None
        )

    @property
    def strangers(self) -> tuple[Function, ...]:
        """What else is on the card's bus, is no card, and has a driver that would not know of a reset."""
        bus = self.move.name.rpartition(":")[0]
        return tuple(
            one
            for one in self.inventory.others
            if one.address.rpartition(":")[0] == bus and one.driver is not None
        )


async def _patient(context: Context, card: str) -> _Patient:
    try:
        inventory, (slot,) = await chosen_cards(context, (card,))
    except Refused:
        earlier = _last_rung(context, card)
        if earlier is None:
            raise
        inventory = await read_cards(context)
        if inventory.slot(earlier.move.address) is not None:
            raise
        return _Patient(inventory, earlier.move, earlier.port, earlier.bus_reset, None)
    move = moves_of(context, inventory, (slot,))[0]
    return _Patient(inventory, move, slot.upstream, slot.bus_reset, slot)


def _last_rung(context: Context, card: str) -> RecoverRequest | None:
    """The rung that was last tried on the card of this name."""
    for job in list_jobs(context.state):
        if job.plan.action == "recover" and job.begun:
            request = msgspec.json.decode(job.plan.request, type=RecoverRequest)
            if normal(card) in (request.move.name, request.move.address):
                return request
    return None


def _nothing_to_mend(found: list[Stranded]) -> str:
    if not found:
        return "nothing was left half way"
    return "nothing to repair here: " + "; ".join(f"{one.card} {one.words} ({one.remedy})" for one in found)


def _repaired(context: Context, inventory: Inventory, found: list[Stranded]) -> Iterable[Repaired]:
    sides: dict[Address, Target] = {}
    for one in found:
        if one.repair in ("container", "vm"):
            sides.setdefault(one.card, one.repair)
    for one in found:  # with nothing but an override left behind, a card stays on its side
        slot = inventory.slot(one.card)
        if slot is not None:
            sides.setdefault(one.card, "vm" if slot.on_vfio else "container")
    for move in moves_of(context, inventory, [slot for slot in inventory.slots if slot.address in sides]):
        yield Repaired(move, sides[move.address])


def _in_use(scan: HolderScan | None, cards: set[Address]) -> Iterable[Finding]:
    id, title = "holders", "Processes on the cards"
    if scan is None:
        yield Finding(id, title, "fail", "it cannot be read who has the cards open", "run gpuops as root")
        return
    found = [one for one in scan.holders if cards.intersection(one.cards) and not is_reader(one)]
    if found:
        told = "; ".join(one.words for one in found[:3])
        yield Finding(id, title, "fail", told, f"end it: {found[0].remedy}")
    else:
        yield Finding(id, title, "pass", f"none of {scan.processes} has one of them open")


def _dead_finding(patient: _Patient) -> Finding:
    id, address = "dead", patient.move.address
    if patient.slot is None:
        return Finding(id, address, "pass", "an earlier rung took it off the bus, and it did not come back")
    if any(function.config_ok is False for function in patient.slot.functions):
        return Finding(id, address, "pass", "its config space reads all ones: it does not answer")
    words = "its config space can be read: it answers"
    return Finding(id, address, "warn", words, "gpuops doctor tells more")


def _rung_finding(patient: _Patient, rung: Rung) -> Finding:
    id, title = "rung", "What can be tried"
    slot, move = patient.slot, patient.move
    if rung == "reset" and slot is None:
        return Finding(id, title, "fail", f"{move.address} is not on the bus", "--rung rescan")
    if rung == "reset" and slot is not None and not slot.gpu.reset_methods:
        told = f"the kernel knows no way to reset {move.address}"
        return Finding(id, title, "fail", told, "--rung rescan")
    if rung == "bus-reset":
        if patient.port is None:
            return Finding(id, title, "fail", f"the port of {move.name} is not known", COLD)
        if patient.strangers:
            told = ", ".join(f"{one.address} ({one.kind}) on {one.driver}" for one in patient.strangers)
            return Finding(id, title, "fail", f"{told} is on the same bus, and would be reset too", COLD)
        if not patient.bus_reset:
            told = f"this kernel has no file to reset the bus below {patient.port}"
            hint = f"{COLD}; Linux 6.13 and the later updates of older kernels have the file"
            return Finding(id, title, "fail", told, hint)
    return Finding(id, title, "pass", RUNGS[rung])
