"""Which ``/dev/nvidiaN`` cards get when the nvidia driver takes them."""

from __future__ import annotations

from collections.abc import Iterable

from console.model.card import Address
from console.model.rebind.inventory import Inventory


def predicted_minors(inventory: Inventory, coming: Iterable[Address]) -> dict[Address, int | None]:
    """By card, the minor it gets when ``coming`` are bound in the order of their addresses.

    The driver gives out the lowest that is free (nv_linux_assign_minor_locked in kernel-open's nv.c).
    None for all of them while the minor of a card that stays is not known.
    """
    arriving = sorted(set(coming))
    staying = [slot for slot in inventory.slots if slot.on_nvidia and slot.address not in arriving]
    if any(slot.minor is None for slot in staying):
        return dict.fromkeys(arriving)
    taken = {slot.minor for slot in staying}
    found: dict[Address, int | None] = {}
    for address in arriving:
        minor = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(minor)
        found[address] = minor
    return found
