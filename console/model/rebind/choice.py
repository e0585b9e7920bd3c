"""Which cards an operator means, and why a name is none of them."""

from __future__ import annotations

from typing import Literal

from console.model.card import Address
from console.model.rebind.inventory import Inventory, Slot
from console.model.rebind.pve import normal
from console.model.text import clean


class ChoiceProblem(Exception):
    """The cards cannot be chosen as asked; the message says which, why, and what to type instead."""


def choose(
    inventory: Inventory, asked: tuple[str, ...], gpus: Literal["auto"] | tuple[Address, ...] = "auto"
) -> tuple[Slot, ...]:
    """The cards to move, by address: those ``asked`` for, or all of the site's (its ``gpus``).

    An address may be a slot (``0000:41:00``), may leave out the domain and may be written in
    capitals. Raises ChoiceProblem.
    """
    site = inventory.slots if gpus == "auto" else tuple(_site(inventory, address) for address in gpus)
    if not asked:
        if not site:
            raise ChoiceProblem("no NVIDIA card on the PCI bus: check lspci -d 10de: and the site's gpus")
        return tuple(sorted(site, key=lambda slot: slot.address))
    found: dict[Address, str] = {}
    for text in asked:
        slot = _asked(inventory, text)
        if slot not in site:
            known = ", ".join(one.address for one in site) or "none"
            raise ChoiceProblem(f"{slot.address} is not one of this site's cards: {known}")
        if slot.address in found:
            raise ChoiceProblem(f"{slot.address} is named twice: {found[slot.address]} and {clean(text)}")
        found[slot.address] = clean(text)
    return tuple(slot for slot in sorted(site, key=lambda slot: slot.address) if slot.address in found)


def _site(inventory: Inventory, address: Address) -> Slot:
    slot = next((one for one in inventory.slots if one.address == address), None)
    if slot is None:
        raise ChoiceProblem(f"{address} of the site's gpus is {what_is(inventory, address)}")
    return slot


def _asked(inventory: Inventory, text: str) -> Slot:
    address = normal(text)
    if address is None:
        raise ChoiceProblem(
            f"{clean(text)[:60] or 'an empty name'} is no PCI address: expected one such as 0000:41:00.0"
        )
    if "." not in address:
        slot = next((one for one in inventory.slots if one.name == address), None)
        address = slot.address if slot is not None else f"{address}.0"
    slot = next((one for one in inventory.slots if one.address == address), None)
    if slot is not None:
        return slot
    raise ChoiceProblem(f"{address} is {what_is(inventory, address)}")


def what_is(inventory: Inventory, address: Address) -> str:
    """What is at an address that is no card's, and which card to name instead."""
    function = inventory.function(address)
    card = inventory.slot(address)
    if function is None:
        known = ", ".join(slot.address for slot in inventory.slots) or "none"
        return f"not on the PCI bus; the cards are: {known}"
    if card is not None and card.address != address:
        return f"the {function.kind} function of a card: name the card, {card.address}"
    driver = f", driver {function.driver}" if function.driver is not None else ""
    return f"no NVIDIA GPU: {function.kind} {function.vendor:04x}:{function.device:04x}{driver}"
