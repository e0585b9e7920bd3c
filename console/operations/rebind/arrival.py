"""Steps after cards have come back to the host: device files, persistence mode, and the driver's own word."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from console.model.card import Address
from console.model.rebind.inventory import Slot
from console.model.text import clean
from console.operations.rebind.clients import COMMAND_S, set_persistence
from console.operations.rebind.guests import said
from console.operations.rebind.request import RebindRequest
from console.operations.rebind.world import look, slot_of
from console.operations.step import Context, Step, StepFailed

_DAEMON = "nvidia-persistenced.service"

#: Seconds in which the driver starts the firmware of every card.
_FIRST_OPEN_S = 180.0


class Nodes(Step):
    """``/dev/nvidiaN``: the driver does not make them itself, and those of cards that left stay."""

    id = "nodes"
    deadline = 120.0

    def __init__(self, request: RebindRequest) -> None:
        self._cards = request.addresses
        self._container = request.container
        self.words = f"make the device files of {len(request.moves)} cards, compare them with the container's"

    async def do(self, context: Context) -> None:
        for slot in await _slots(context, self._cards):
            await _modprobe(context, "-c", str(slot.minor))
        await _modprobe(context, "-u", "-c", "0")

    async def verify(self, context: Context) -> str:
        inventory = await look(context)
        slots = [slot_of(inventory, address) for address in self._cards]
        wrong = [
            f"/dev/nvidia{slot.minor} of {slot.address}"
            for slot in slots
            if not _is_node(context.host.root, slot.minor)
        ]
        if wrong:
            raise StepFailed(f"not there, or not the card's: {', '.join(wrong)}")
        guest = inventory.container(self._container) if self._container is not None else None
        needed = guest.required if guest is not None else ()
        missing = [path for path in needed if not (context.host.root / path.removeprefix("/")).exists()]
        if missing:
            raise StepFailed(f"CT {self._container} cannot start without {', '.join(missing)}")
        told = ", ".join(f"{slot.address} is /dev/nvidia{slot.minor}" for slot in slots)
        return told if guest is None else f"{told}; CT {self._container} has all that it names"


class Answer(Step):
    """The first open starts a card's firmware: only then it is known to be well."""

    id = "driver-answers"
    deadline = _FIRST_OPEN_S + 30.0

    def __init__(self, request: RebindRequest) -> None:
        self._cards = request.addresses
        self.words = f"ask the driver for {len(request.moves)} cards (nvidia-smi -L)"

    async def do(self, context: Context) -> None:
        """Nothing is changed."""

    async def verify(self, context: Context) -> str:
        slots = await _slots(context, self._cards)
        result = await context.host.run(("nvidia-smi", "-L"), deadline=_FIRST_OPEN_S)
        text = result.stdout.decode("utf-8", "replace")
        silent = [slot.address for slot in slots if slot.uuid is None or slot.uuid not in text]
        if not result.ok or silent:
            which = ", ".join(silent) or "a card"
            raise StepFailed(f"the driver does not start {which}: {clean(result.reason)}", said(result))
        context.monitor.sources.nvml.resume()
        return f"the driver has {len(slots)} cards"


class PersistenceOn(Step):
    """As it was before the cards left."""

    id = "persistence-on"

    def __init__(self, request: RebindRequest) -> None:
        self._cards = request.addresses
        self._daemon = request.persistence == "daemon"
        self.deadline = 30.0 + COMMAND_S * len(request.moves)
        # The daemon gives up on cards that come back one by one after all had left
        # (kubernetes-sigs/dra-driver-nvidia-gpu#1037).
        how = f"restart {_DAEMON}" if self._daemon else f"switch it on for {len(request.moves)} cards"
        self.words = f"persistence mode: {how}"
        self.undo_words = f"switch persistence mode off again for {len(request.moves)} cards"
        self.undo_deadline = self.deadline

    async def do(self, context: Context) -> None:
        if self._daemon:
            result = await context.host.run(("systemctl", "restart", "--", _DAEMON), deadline=COMMAND_S)
            if not result.ok:
                raise StepFailed(f"systemctl restart {_DAEMON}: {clean(result.reason)}", said(result))
            return
        for slot in await _slots(context, self._cards):
            if slot.uuid is None:
                raise StepFailed(f"the driver does not tell the UUID of {slot.address}")
            await set_persistence(context, slot.uuid, on=True)

    async def verify(self, context: Context) -> str:
        return f"{_DAEMON} restarted" if self._daemon else f"on for {len(self._cards)} cards"

    async def undo(self, context: Context) -> str:
        for slot in await _slots(context, self._cards):
            if slot.uuid is not None:
                await set_persistence(context, slot.uuid, on=False)
        return f"off for {len(self._cards)} cards"


async def _slots(context: Context, cards: tuple[Address, ...]) -> list[Slot]:
    """The cards; StepFailed while the driver does not tell the minor of one."""
    inventory = await look(context)
    slots = [slot_of(inventory, address) for address in cards]
    unknown = [slot.address for slot in slots if slot.minor is None]
    if unknown:
        raise StepFailed(f"the driver does not tell the minor of {', '.join(unknown)}")
    return slots


async def _modprobe(context: Context, *words: str) -> None:
    result = await context.host.run(("nvidia-modprobe", *words), deadline=COMMAND_S)
    if not result.ok:
        raise StepFailed(f"nvidia-modprobe {' '.join(words)}: {clean(result.reason)}", said(result))


def _is_node(root: Path, minor: int | None) -> bool:
    """A tree that stands in for a host holds no device files: there the name has to do."""
    try:
        found = (root / f"dev/nvidia{minor}").stat()
    except OSError:
        return False
    return root != Path("/") or (stat.S_ISCHR(found.st_mode) and os.minor(found.st_rdev) == minor)
