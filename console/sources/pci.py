"""The cards as PCI sysfs shows them, whoever drives them.

Layout: Documentation/ABI/testing/sysfs-bus-pci in the kernel's tree; minors and
UUIDs from the NVIDIA driver's /proc/driver/nvidia/gpus/*/information.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from console.model.card import CLASS_DISPLAY, VENDOR_NVIDIA, Address, PciCard, PciFunction, PciLink
from console.model.reading import Reading
from console.model.text import clean
from console.sources.source import Apart, Unavailable, poll

DEVICES = Path("sys/bus/pci/devices")
DRIVER_CARDS = Path("proc/driver/nvidia/gpus")

NO_LINK = PciLink(None, None, None, None)

_SPEED = re.compile(r"\s*([0-9.]+)")
_VALUE_LIMIT = 4096

#: What a register can say. One that reads all ones gives 63, and a capability that does 255.
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})


class PciSource:
    """Every NVIDIA card of the machine whose /sys is under ``root``; a card once seen keeps its row."""

    name = "pci"
    period = 5.0
    deadline = 4.0

    def __init__(self, root: Path, only: tuple[Address, ...] | None = None) -> None:
        self._root = root
        self._only = only
        self._seen: dict[Address, PciCard] = {}
        # A card that is being reset can make a sysfs read wait in the kernel.
        self._apart: Apart[tuple[PciCard, ...]] = Apart(self.name)

    def watch(self) -> AsyncIterator[Reading[tuple[PciCard, ...]]]:
        return poll(self.name, self.period, self.deadline, self.read)

    async def read(self) -> tuple[PciCard, ...]:
        found = await self._apart(self.scan)
        if not found:
            raise Unavailable("no NVIDIA card on the PCI bus")
        return found

    def scan(self) -> tuple[PciCard, ...]:
        """One pass over sysfs. OSError never escapes: what cannot be read is None."""
        devices = self._root / DEVICES
        try:
            names = sorted(entry.name for entry in devices.iterdir())
        except OSError as problem:
            raise Unavailable(f"{devices}: {problem.strerror}") from None
        driver_words = _driver_words(self._root / DRIVER_CARDS)
        cards: dict[Address, PciCard] = {}
        for name in names:
            if self._only is not None and name not in self._only:
                continue
            card = _card(devices, name, names, driver_words.get(name, {}))
            if card is not None:
                cards[name] = card
        for address, card in self._seen.items():
            if address not in cards:
                cards[address] = msgspec.structs.replace(card, present=False, link=NO_LINK)
        for address in self._only or ():
            if address not in cards:
                cards[address] = PciCard(address, (), None, NO_LINK, None, present=False)
        self._seen.update(cards)
        return tuple(cards[address] for address in sorted(cards))


def _card(devices: Path, name: Address, names: list[str], words: dict[str, str]) -> PciCard | None:
    folder = devices / name
    if _hex(folder, "vendor") != VENDOR_NVIDIA or (_hex(folder, "class") or 0) >> 16 != CLASS_DISPLAY:
        return None
    slot = name.rpartition(".")[0] + "."
    functions = tuple(_function(devices / other, other) for other in names if other.startswith(slot))
    minor = words.get("Device Minor", "")
    present = _answers(folder)
    return PciCard(
        address=name,
        functions=functions,
        iommu_group=_group(folder),
        link=_link(folder) if present else NO_LINK,
        numa_node=_node(folder),
        present=present,
        minor=int(minor) if minor.isdecimal() else None,
        uuid=words.get("GPU UUID"),
    )


def _link(folder: Path) -> PciLink:
    """The link as it is, and the best that the card and its slot can do."""
    best = [_width(folder, "max_link_width")]
    try:
        best.append(_width(folder.resolve().parent, "max_link_width"))  # the port it is plugged into
    except (OSError, RuntimeError):
        pass  # a link that leads nowhere; then the card's own word has to do
    return PciLink(
        _speed(folder, "current_link_speed"),
        _width(folder, "current_link_width"),
        _speed(folder, "max_link_speed"),
        min((width for width in best if width is not None), default=None),
    )


def _width(folder: Path, name: str) -> int | None:
    lanes = _number(folder, name)
    return lanes if lanes in _WIDTHS else None


def _function(folder: Path, address: Address) -> PciFunction:
    override = _text(folder, "driver_override")
    return PciFunction(
        address=address,
        vendor=_hex(folder, "vendor") or 0,
        device=_hex(folder, "device") or 0,
        class_code=_hex(folder, "class") or 0,
        driver=_link_name(folder, "driver"),
        driver_override=None if override in (None, "", "(null)") else override,
        power_state=_text(folder, "power_state"),
    )


def _answers(folder: Path) -> bool:
    """False when the first word of config space is all ones: the card is off the bus.

    The kernel wakes a sleeping card to read it, so only an awake one is asked.
    """
    if _text(folder, "power_state") not in (None, "D0", "unknown"):
        return True
    try:
        with (folder / "config").open("rb") as config:
            return config.read(4) != b"\xff\xff\xff\xff"
    except OSError:
        # No permission or no file: sysfs still lists the card, so it is there as far as we can tell.
        return True


def _group(folder: Path) -> int | None:
    name = _link_name(folder, "iommu_group")
    return int(name) if name is not None and name.isdecimal() else None


def _node(folder: Path) -> int | None:
    """The kernel writes -1 when the firmware names no node."""
    node = _number(folder, "numa_node")
    return None if node is None or node < 0 else node


def _text(folder: Path, name: str) -> str | None:
    try:
        with (folder / name).open("rb") as file:
            return clean(file.read(_VALUE_LIMIT).decode("utf-8", "replace").strip())
    except OSError:
        return None


def _number(folder: Path, name: str) -> int | None:
    text = _text(folder, name)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _hex(folder: Path, name: str) -> int | None:
    text = _text(folder, name)
    try:
        return None if text is None else int(text, 16)
    except ValueError:
        return None


def _speed(folder: Path, name: str) -> float | None:
    """GT/s; the kernel writes "32.0 GT/s PCIe", or "Unknown speed"."""
    found = _SPEED.match(_text(folder, name) or "")
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None


def _link_name(folder: Path, name: str) -> str | None:
    try:
        return clean((folder / name).readlink().name)
    except OSError:
        return None


def _driver_words(folder: Path) -> dict[Address, dict[str, str]]:
    """By address, what the NVIDIA driver says of each card it drives."""
    found: dict[Address, dict[str, str]] = {}
    try:
        entries = list(folder.iterdir())
    except OSError:
        return found
    for entry in entries:
        text = _lines(entry / "information")
        pairs = (line.partition(":") for line in text)
        found[entry.name.lower()] = {key.strip(): clean(value.strip()) for key, _, value in pairs}
    return found


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            return file.read(_VALUE_LIMIT).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
