"""What of a host's cards decides whether flags can work: how many there are, and of which family."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec

from console.model.card import Address, PciCard
from console.sources.pci import PciSource
from console.sources.source import Unavailable

#: Device ids of GB202 to GB207, compute capability 12.0 (pci.ids); GB100 and its kin, 10.0, are not in it.
_SM120 = range(0x2B80, 0x3000)

#: Seconds for one look at the PCI bus.
_DEADLINE = 5.0


class Hardware(msgspec.Struct, frozen=True):
    """The cards of the host, whoever drives them now. ``sm120``: all are of compute capability 12.0."""

    cards: int
    sm120: bool


def hardware_of(cards: Iterable[PciCard]) -> Hardware | None:
    """None without a card: nothing is then known."""
    devices = [
        next((one.device for one in card.functions if one.address == card.address), 0) for card in cards
    ]
    return Hardware(len(devices), all(device in _SM120 for device in devices)) if devices else None


async def read_hardware(root: Path, only: tuple[Address, ...] | None = None) -> Hardware | None:
    """The cards of the machine whose /sys is under ``root``; None when there is none, or no answer.

    ``only`` are those the site is about.
    """
    try:
        async with asyncio.timeout(_DEADLINE):
            return hardware_of(await PciSource(root, only).read())
    except (Unavailable, TimeoutError):
        return None
