"""Makes the plans for cards that were left half way, and for a card that does not answer."""

from __future__ import annotations

from collections.abc import Iterable

from console.model.card import Address
from console.model.finding import Finding
from console.model.operation import Plan
from console.model.rebind.holders import HolderScan, is_reader
from console.model.rebind.inventory import Inventory, Slot, Target
from console.model.rebind.stranded import Stranded, reconcile
from console.operations.rebind.planning import chosen_cards, moves_of, read_all_facts, root_finding, written
from console.operations.rebind.repair import COLD, RUNGS
from console.operations.rebind.request import RecoverRequest, Repaired, RepairRequest, Rung
from console.operations.step import Context, Refused


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
    """Try one rung of the ladder on a card that does not answer."""
    inventory, (slot,) = await chosen_cards(context, (card,))
    facts = await read_all_facts(context, (slot,), {})
    dead = any(function.config_ok is False for function in slot.functions)
    findings = [
        root_finding(facts),
        Finding("dead", slot.address, "pass", "its config space reads all ones: it does not answer")
        if dead
        else Finding(
            "dead",
            slot.address,
            "warn",
            "its config space can be read: it answers",
            "gpuops doctor tells more",
        ),
        *_in_use(facts.holders, {slot.address}),
        _rung_finding(inventory, slot, rung),
    ]
    neighbours = _neighbours(inventory, slot) if rung == "bus-reset" else ()
    rest = [f"{name}: {RUNGS[name]}" for name in list(RUNGS)[list(RUNGS).index(rung) + 1 :]]
    costs = [
        f"this tries one rung only: {RUNGS[rung]}",
        *(f"{', '.join(neighbours)} on the same port is reset too" for _ in neighbours[:1]),
        *(f"when it does not help, next is {words}" for words in rest[:1]),
        f"in the end {COLD}",
    ]
    request = RecoverRequest(move=moves_of(context, inventory, (slot,))[0], rung=rung, port=slot.upstream)
    title = f"recover {slot.name}: {rung}"
    return written(context, "recover", title, slot.name, request, findings, costs)


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


def _rung_finding(inventory: Inventory, slot: Slot, rung: Rung) -> Finding:
    id, title = "rung", "What can be tried"
    if rung == "reset" and not slot.gpu.reset_methods:
        told = f"the kernel knows no way to reset {slot.address}"
        return Finding(id, title, "fail", told, "--rung rescan")
    if rung == "bus-reset":
        if slot.upstream is None:
            return Finding(id, title, "fail", f"the port of {slot.name} is not known", COLD)
        if slot.upstream_reset_methods and "bus" not in slot.upstream_reset_methods:
            told = f"the port {slot.upstream} can only be reset by {', '.join(slot.upstream_reset_methods)}"
            return Finding(id, title, "warn", told, COLD)
    return Finding(id, title, "pass", RUNGS[rung])


def _neighbours(inventory: Inventory, slot: Slot) -> tuple[str, ...]:
    """Other cards below the same port."""
    return tuple(
        one.name for one in inventory.slots if one is not slot and one.upstream == slot.upstream is not None
    )
