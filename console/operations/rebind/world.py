"""The cards and guests as the steps see them, each time anew."""

from __future__ import annotations

import asyncio

from console.model.card import Address
from console.model.rebind.holders import CardHolder
from console.model.rebind.inventory import Inventory, Slot
from console.model.site import Site
from console.operations.step import Context, StepFailed
from console.sources.card_holders import scan_holders
from console.sources.inventory import read_apart
from console.sources.source import Apart, Unavailable

#: Seconds for one look at everything. A card that is being reset keeps it waiting.
LOOK_S = 15.0

#: What this program's readings say meanwhile.
MOVING = "the cards are being moved"


def site_cards(site: Site) -> tuple[Address, ...]:
    """The addresses that the site names as its cards; none when it takes what is there."""
    return () if site.gpus == "auto" else site.gpus


async def look(context: Context, *, wake: bool = False) -> Inventory:
    """Everything as it is now. StepFailed when it cannot be read in time."""
    apart: Apart[Inventory] = Apart("cards")
    try:
        async with asyncio.timeout(LOOK_S):
            return await read_apart(apart, context.host.root, site_cards(context.site), wake=wake)
    except TimeoutError:
        raise StepFailed(f"the cards could not be read within {LOOK_S:g} s") from None
    except Unavailable as problem:
        raise StepFailed(f"the cards cannot be read: {problem}") from None


async def who_holds(context: Context, addresses: tuple[Address, ...]) -> tuple[CardHolder, ...]:
    """Every process that has one of these cards open or mapped. StepFailed when that cannot be told."""
    inventory = await look(context)
    found = [inventory.slot(address) for address in addresses]
    slots = tuple(slot for slot in found if slot is not None)
    gone = [address for address, slot in zip(addresses, found, strict=True) if slot is None]
    if gone:
        raise StepFailed(f"{', '.join(gone)} is not on the bus any more")
    unknown = [slot.address for slot in slots if slot.on_nvidia and slot.minor is None]
    if unknown:
        raise StepFailed(f"the driver does not tell the minor of {', '.join(unknown)}, so not who holds it")
    apart = Apart[tuple[tuple[CardHolder, ...], int]]("holders")

    def scan() -> tuple[tuple[CardHolder, ...], int]:
        done = scan_holders(context.host.root, slots)
        return done.holders, done.unreadable

    try:
        async with asyncio.timeout(LOOK_S):
            holders, unreadable = await apart(scan)
    except TimeoutError:
        raise StepFailed(f"the processes could not be looked through within {LOOK_S:g} s") from None
    except Unavailable as problem:
        raise StepFailed(f"it cannot be read who holds the cards: {problem}") from None
    if unreadable:
        raise StepFailed(f"{unreadable} processes did not let us look whether they hold a card: be root")
    return holders


async def release_own(context: Context) -> None:
    """End this process's own NVML reader: it holds every card, as any other client does."""
    await context.monitor.sources.nvml.pause(MOVING)


def slot_of(inventory: Inventory, address: Address) -> Slot:
    """StepFailed for a card that is gone."""
    slot = inventory.slot(address)
    if slot is None:
        raise StepFailed(f"{address} is not on the bus any more")
    return slot
