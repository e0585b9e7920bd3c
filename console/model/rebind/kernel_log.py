"""What the kernel says about cards: which of its log lines and events matter, and to which card.

Texts: drivers/pci/pci.c, drivers/pci/pcie/aer.c, drivers/vfio/vfio_main.c and the IOMMU drivers of
Linux 6.1 to 6.17; kernel-open/nvidia of NVIDIA's open kernel modules 595; NVIDIA's Xid catalogue.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from console.model.card import Address
from console.model.operation import KernelLine
from console.model.rebind.inventory import Slot
from console.model.snapshot import APPLICATION_XIDS
from console.model.text import clean

EventKind = Literal[
    "bind",
    "unbind",
    "add",
    "remove",
    "xid",
    "busy",
    "reset",
    "power",
    "lost",
    "bus-error",
    "dma-fault",
    "init",
    "firmware",
    "module",
    "in-use",
    "source",
]

#: Characters of one line that are kept.
LONGEST = 300


class CardEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to a card. ``at`` is Unix seconds; ``grave``: it may not work after it."""

    at: float
    card: Address | None  # None: the line names no card
    kind: EventKind
    words: str
    grave: bool = False

    @property
    def line(self) -> KernelLine:
        """As a job's journal keeps it."""
        return KernelLine(at=self.at, words=self.words)


#: In order: the first that fits tells the kind. The flag says whether it is grave.
_WORDS: tuple[tuple[str, EventKind, bool], ...] = (
    (r"with non-zero usage count", "busy", True),
    (r"fallen off the bus|GPU is lost", "lost", True),
    (r"\bXid\b", "xid", True),
    (r"not ready \d+ms after .*giving up|not ready \d+ms after .*; (?:giving|failed)", "reset", True),
    (r"not ready \d+ms after|ready \d+ms after (?:FLR|bus reset|resume|D3)", "reset", False),
    (r"device inaccessible|stuck in D3|from D3cold to D0", "power", True),
    (r"timed out waiting for pending transaction|Failed to reset|reset failed", "reset", True),
    (r"\bafter (?:FLR|bus reset)\b", "reset", False),
    (r"\bD3cold\b", "power", False),
    (r"header type (?:7f|127)|unknown header type|Invalid PCI ROM header signature", "lost", True),
    (r"severity=(?:Uncorrect\w*|Fatal)|Uncorrectable|Uncorrected \(|link down|pciehp", "bus-error", True),
    (r"\bAER:|PCIe Bus Error", "bus-error", False),
    (r"IO_PAGE_FAULT|DMAR:.*fault|DMAR: \[DMA|arm-smmu.*fault", "dma-fault", True),
    (r"requires? use of the NVIDIA open kernel modules", "module", True),
    (r"unexpected WPR2 already up|WPR2", "firmware", True),
    (r"RmInitAdapter|rm_init_adapter|probe with driver nvidia failed|probe routine failed", "init", True),
    (r"blocked until device is released", "in-use", True),
)
_SIGNS = tuple((re.compile(pattern, re.IGNORECASE), kind, grave) for pattern, kind, grave in _WORDS)

_ADDRESS = re.compile(r"\b(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?\b", re.IGNORECASE)
_XID = re.compile(r"Xid \([^)]*\): (\d+)")
_MINOR = re.compile(r"device minor number (\d{1,4})")

#: Lines that name no card matter all the same when they are of these kinds: they come with NVRM alone.
_NAMELESS: frozenset[EventKind] = frozenset({"module", "firmware", "busy", "init"})


def read_kernel_line(text: str, at: float, slots: Iterable[Slot]) -> CardEvent | None:
    """What a line of the kernel's log says about one of the cards; None when it says nothing.

    A line about the port above a card counts as the card's.
    """
    sign = next(((kind, grave) for pattern, kind, grave in _SIGNS if pattern.search(text)), None)
    if sign is None:
        return None
    kind, grave = sign
    cards = tuple(slots)
    named = [match for match in _ADDRESS.finditer(text) if match[1] is not None or match[4] is not None]
    card = _card_of(named, cards)
    if card is None:
        minor = _MINOR.search(text)
        if minor is not None:
            card = next((slot.address for slot in cards if slot.minor == int(minor[1])), None)
    if card is None and (named or kind not in _NAMELESS):
        return None
    if kind == "xid":
        code = _XID.search(text)
        grave = code is None or int(code[1][:6]) not in APPLICATION_XIDS
    words = clean(text).strip()
    return CardEvent(
        at=at,
        card=card,
        kind=kind,
        words=words if len(words) <= LONGEST else f"{words[:LONGEST]} … (cut)",
        grave=grave,
    )


def _card_of(named: Iterable[re.Match[str]], slots: tuple[Slot, ...]) -> Address | None:
    """The first address that is a card's, the port's only when no card itself is named."""
    places = [f"{int(one[1] or '0', 16):04x}:{one[2]}:{one[3]}".lower() for one in named]
    for place in places:
        for slot in slots:
            if slot.name == place:
                return slot.address
    for place in places:
        for slot in slots:
            if slot.upstream is not None and slot.upstream.rpartition(".")[0] == place:
                return slot.address
    return None


# Events of the kernel's device model --------------------------------------------------------------


def uevent_fields(message: bytes) -> dict[str, str]:
    """``ACTION@DEVPATH`` and ``KEY=value`` parts, each ended by a zero byte (lib/kobject_uevent.c).

    Empty for anything else, such as what udev itself sends, which begins with ``libudev``.
    """
    head, _, rest = message.partition(b"\0")
    if b"@" not in head or head.startswith(b"libudev"):
        return {}
    fields: dict[str, str] = {}
    for part in rest.split(b"\0"):
        key, equals, value = part.decode("utf-8", "replace").partition("=")
        if equals:
            fields[key] = clean(value)
    return fields


_VERBS: Mapping[str, EventKind] = {"bind": "bind", "unbind": "unbind", "add": "add", "remove": "remove"}


def read_uevent(message: bytes, at: float, slots: Iterable[Slot]) -> CardEvent | None:
    """A function of one of the cards got or lost its driver, came or went; None for anything else."""
    fields = uevent_fields(message)
    kind = _VERBS.get(fields.get("ACTION", ""))
    if kind is None or fields.get("SUBSYSTEM") != "pci":
        return None
    address = fields.get("PCI_SLOT_NAME", "").lower()
    place = address.rpartition(".")[0]
    card = next((slot.address for slot in slots if slot.name == place), None)
    if card is None:
        return None
    words = {
        "bind": f"{address} bound to {fields.get('DRIVER', 'a driver')[:64]}",
        "unbind": f"{address} unbound from its driver",
        "add": f"{address} found on the bus",
        "remove": f"{address} taken off the bus",
    }[kind]
    return CardEvent(at=at, card=card, kind=kind, words=words)


class Flood:
    """Lets at most ``most`` events through in any ``within`` seconds: a broken link writes thousands."""

    def __init__(self, most: int = 40, within: float = 10.0) -> None:
        self._most = most
        self._within = within
        self._times: deque[float] = deque()
        self._dropped = 0

    def let(self, event: CardEvent, now: float) -> tuple[CardEvent, ...]:
        """What goes through, now in monotonic seconds: the event, before it a word on those that did not."""
        while self._times and now - self._times[0] >= self._within:
            self._times.popleft()
        if len(self._times) >= self._most:
            self._dropped += 1
            return ()
        self._times.append(now)
        if not self._dropped:
            return (event,)
        told = CardEvent(
            at=event.at,
            card=None,
            kind="source",
            words=f"{self._dropped} more kernel lines about cards are left out here",
        )
        self._dropped = 0
        return told, event
