"""The cards panel: one row a card, whoever has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import msgspec

from console.model import words
from console.model.card import CardView, Owner
from console.model.snapshot import Snapshot
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.panel import Panel
from console.ui.rows import Row, Span, bar, clip, fit, width_of

#: From these on a value is coloured: degrees Celsius, and share of the power limit.
HOT_C, TOO_HOT_C = 80, 88
NEAR_LIMIT = 0.98


_MOVING = Owner("moving")


class Column(NamedTuple):
    """One column: its heading, its width in cells, how a card fills it, and whether it holds numbers.

    A heading stands over the end of its numbers, and over the beginning of anything else.
    """

    title: str
    width: int
    cell: Callable[[CardView, Glyphs, int], Row]
    numeric: bool = False

    @property
    def heading(self) -> str:
        return f"{self.title:>{self.width}}" if self.numeric else f"{self.title:<{self.width}}"


def _number(text: str, role: str = "text") -> Row:
    return [Span(text, role)]


def _memory_ratio(card: CardView) -> float | None:
    seen = card.telemetry
    if seen is None or seen.memory_used_bytes is None or not seen.memory_total_bytes:
        return None
    return seen.memory_used_bytes / seen.memory_total_bytes


def _index(card: CardView, glyphs: Glyphs, width: int) -> Row:
    return _number(f"{card.index:>{width}}", "bad" if card.owner.kind == "lost" else "text")


def _address(card: CardView, glyphs: Glyphs, width: int) -> Row:
    address = card.pci.address
    return _number(address.removeprefix("0000:").removesuffix(".0") if width < 12 else address, "dim")


def _owner(card: CardView, glyphs: Glyphs, width: int) -> Row:
    role = {"lost": "bad", "none": "dim", "vm": "accent", "moving": "warn"}.get(card.owner.kind, "text")
    return _number(clip(card.owner.words, width, glyphs), role)


def _memory_bar(card: CardView, glyphs: Glyphs, width: int) -> Row:
    return bar(_memory_ratio(card), width, glyphs)


def _memory(card: CardView, glyphs: Glyphs, width: int) -> Row:
    seen = card.telemetry
    if seen is None or seen.memory_used_bytes is None:
        return _number(f"{words.UNKNOWN:>{width}}", "dim")
    total = seen.memory_total_bytes
    digits = 0 if total is not None and total >= 100 * words.GIB else 1
    text = f"{words.gib(seen.memory_used_bytes, digits)}/{words.gib(total, digits)}G"
    return _number(f"{text:>{width}}")


def _memory_percent(card: CardView, glyphs: Glyphs, width: int) -> Row:
    ratio = _memory_ratio(card)
    return _number(f"{words.percent(ratio):>{width}}", "dim" if ratio is None else "text")


def _use_bar(card: CardView, glyphs: Glyphs, width: int) -> Row:
    seen = card.telemetry
    used = None if seen is None or seen.utilization_percent is None else seen.utilization_percent / 100
    return bar(used, width, glyphs, "bar-second")


def _use(card: CardView, glyphs: Glyphs, width: int) -> Row:
    seen = card.telemetry
    used = None if seen is None else seen.utilization_percent
    if used is None:
        return _number(f"{words.UNKNOWN:>{width}}", "dim")
    return _number(f"{f'{used}%':>{width}}")


def _temperature(card: CardView, glyphs: Glyphs, width: int) -> Row:
    degrees = None if card.telemetry is None else card.telemetry.temperature_c
    if degrees is None:
        return _number(f"{words.UNKNOWN:>{width}}", "dim")
    role = "bad" if degrees >= TOO_HOT_C else "warn" if degrees >= HOT_C else "text"
    return _number(f"{f'{degrees}°C':>{width}}", role)


def _power(card: CardView, glyphs: Glyphs, width: int) -> Row:
    seen = card.telemetry
    if seen is None or seen.power_w is None:
        return _number(f"{words.UNKNOWN:>{width}}", "dim")
    limit = seen.power_limit_w
    role = "warn" if limit and seen.power_w >= NEAR_LIMIT * limit else "text"
    text = f"{seen.power_w:.0f}" + (f"/{limit:.0f}" if width >= 8 and limit else "") + "W"
    return _number(f"{text:>{width}}", role)


def _clocks(card: CardView, glyphs: Glyphs, width: int) -> Row:
    seen = card.telemetry
    if seen is None or seen.sm_clock_mhz is None:
        return _number(f"{words.UNKNOWN:>{width}}", "dim")
    memory = words.UNKNOWN if seen.memory_clock_mhz is None else str(seen.memory_clock_mhz)
    return _number(f"{f'{seen.sm_clock_mhz}/{memory}':>{width}}", "dim")


def _link(card: CardView, glyphs: Glyphs, width: int) -> Row:
    link = card.pci.link
    if link.width is None:
        return _number(f"{words.UNKNOWN:>{width}}", "dim")
    speed = "" if link.speed is None else f" {link.speed:g}GT"
    return _number(f"{f'x{link.width}{speed}':>{width}}", "warn" if link.narrowed else "dim")


def _traffic(card: CardView, glyphs: Glyphs, width: int) -> Row:
    seen = card.telemetry
    if seen is None or seen.pcie_rx_bytes_per_s is None or seen.pcie_tx_bytes_per_s is None:
        return _number(f"{words.UNKNOWN:>{width}}", "dim")
    text = f"{seen.pcie_rx_bytes_per_s / 1e9:.1f}/{seen.pcie_tx_bytes_per_s / 1e9:.1f}"
    return _number(f"{text:>{width}}", "dim")


def _driver(card: CardView, glyphs: Glyphs, width: int) -> Row:
    return _number(clip(card.pci.driver or "none", width, glyphs), "dim")


def _place(card: CardView, glyphs: Glyphs, width: int) -> Row:
    node = words.UNKNOWN if card.pci.numa_node is None else str(card.pci.numa_node)
    group = words.UNKNOWN if card.pci.iommu_group is None else str(card.pci.iommu_group)
    return _number(f"{f'{node} / {group}':>{width}}", "dim")


_INDEX = Column("", 1, _index)
_ADDRESS = Column("bus", 5, _address)
_ADDRESS_LONG = Column("address", 12, _address)
_OWNER = Column("owner", 7, _owner)
_SHARE = Column("mem", 4, _memory_percent, numeric=True)
_USED = Column("", 10, _memory)
_USE = Column("util", 4, _use, numeric=True)
_USE_BESIDE_BAR = Column("", 4, _use)
_TEMPERATURE = Column("temp", 5, _temperature, numeric=True)
_POWER = Column("power", 5, _power, numeric=True)
_POWER_OF_LIMIT = Column("power", 8, _power, numeric=True)
_LINK = Column("link", 9, _link, numeric=True)
_CLOCKS = Column("SM/mem MHz", 10, _clocks, numeric=True)
_TRAFFIC = Column("rx/tx GB/s", 10, _traffic, numeric=True)
_DRIVER = Column("driver", 8, _driver)

#: Layouts from the narrowest: cells from which each fits, and its columns. What is left is for the marks.
_LAYOUTS: tuple[tuple[int, tuple[Column, ...]], ...] = (
    (0, (_INDEX, Column("owner", 6, _owner), _SHARE, _USE)),
    (28, (_INDEX, _OWNER, _SHARE, _USE, _TEMPERATURE)),
    (40, (_INDEX, _OWNER, Column("memory", 10, _memory, numeric=True), _USE, _TEMPERATURE, _POWER)),
    (
        64,
        (
            _INDEX,
            _ADDRESS,
            _OWNER,
            Column("memory", 8, _memory_bar),
            _USED,
            Column("util", 6, _use_bar),
            _USE_BESIDE_BAR,
            _TEMPERATURE,
            _POWER,
        ),
    ),
    (
        112,
        (
            _INDEX,
            _ADDRESS,
            _OWNER,
            Column("memory", 16, _memory_bar),
            _USED,
            Column("util", 14, _use_bar),
            _USE_BESIDE_BAR,
            _TEMPERATURE,
            _POWER_OF_LIMIT,
            _LINK,
        ),
    ),
    (
        150,
        (
            _INDEX,
            _ADDRESS_LONG,
            _OWNER,
            Column("memory", 20, _memory_bar),
            _USED,
            Column("util", 16, _use_bar),
            _USE_BESIDE_BAR,
            _TEMPERATURE,
            _POWER_OF_LIMIT,
            _CLOCKS,
            _LINK,
            _TRAFFIC,
            _DRIVER,
        ),
    ),
    (
        190,
        (
            _INDEX,
            _ADDRESS_LONG,
            _OWNER,
            Column("memory", 28, _memory_bar),
            _USED,
            Column("util", 24, _use_bar),
            _USE_BESIDE_BAR,
            _TEMPERATURE,
            _POWER_OF_LIMIT,
            _CLOCKS,
            _LINK,
            _TRAFFIC,
            _DRIVER,
            Column("NUMA/group", 10, _place, numeric=True),
        ),
    ),
)


def columns_for(width: int) -> tuple[Column, ...]:
    return next(columns for least, columns in reversed(_LAYOUTS) if width >= least)


class Cards(Panel):
    """Owner, memory, utilisation, temperature, power, and a mark for whatever is wrong."""

    TITLE = "CARDS"
    HELP: ClassVar[str] = (
        "One row a card, listed from PCI, so a card on vfio-pci or off the bus keeps its row.\n"
        "owner   CT or VM that has it; nobody: bound to no driver; lost: off the bus; moving: on its way.\n"
        "memory  used of total in GiB, without what the driver reserves.\n"
        "util    share of time a kernel ran, over the driver's own window of 1/6 to 1 s.\n"
        "A dash is a value the driver does not give; an age in brackets is a stale row."
    )

    def __init__(self, glyphs: Glyphs = UNICODE, *, id: str | None = None) -> None:
        super().__init__(glyphs, id=id)
        #: Slots that the host's job moves at this moment, such as 0000:41:00: nobody has them then.
        self.moving: frozenset[str] = frozenset()

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        glyphs = self.glyphs
        columns = columns_for(width)
        if len(snapshot.cards) > 10:
            columns = (_INDEX._replace(width=2), *columns[1:])
        rows = [self._heading(snapshot, columns, width)]
        if not snapshot.cards:
            rows.append([Span(" "), *_nothing(snapshot)])
            return rows
        used = sum(column.width + 1 for column in columns)
        shown = snapshot.cards[: max(0, height - 1)]
        if len(snapshot.cards) > len(shown) > 0:
            shown = shown[:-1]
        for card in shown:
            if card.pci.address.rpartition(".")[0] in self.moving:
                card = msgspec.structs.replace(card, owner=_MOVING)
            row: Row = []
            for column in columns:
                row += [*fit(column.cell(card, glyphs, column.width), column.width), Span(" ")]
            if card.stale_s is not None:
                row = [Span(span.text, "rest" if span.role == "rest" else "dim") for span in row]
            rows.append(row + _marks(card, max(0, width - used), glyphs))
        hidden = len(snapshot.cards) - len(shown)
        if hidden:
            rows.append([Span(f" and {hidden} more", "dim")])
        return rows

    def _heading(self, snapshot: Snapshot, columns: tuple[Column, ...], width: int) -> Row:
        # The panel's name stands over the first two columns, which need none.
        named = columns[0].width + columns[1].width + 2
        row: Row = [Span(f"{self.TITLE:<{named}}", "title")]
        row += [Span(column.heading + " ", "dim") for column in columns[2:]]
        room = width - width_of(row)
        return [*row, Span(self.glyphs.rule * max(0, room), "rule")]


def _marks(card: CardView, width: int, glyphs: Glyphs) -> Row:
    """What is wrong with the card, worst first, and the age of a row that is not fresh."""
    row: Row = []
    if card.stale_s is not None:
        row.append(Span(clip(f"({words.span(card.stale_s)} old) ", width, glyphs), "warn"))
    if card.problems:
        left = width - width_of(row)
        text = clip(", ".join(card.problems), left - 2, glyphs)
        text = f"{glyphs.warn} {text}" if left > 3 else glyphs.warn[: max(0, left)]
        role = "bad" if card.problems[0].startswith(("Xid", "ECC", "off", "lost", "row")) else "warn"
        row.append(Span(text, role))
    return row


def _nothing(snapshot: Snapshot) -> Row:
    told = [
        word.error for word in snapshot.sources if word.name in ("pci", "nvml") and word.error is not None
    ]
    return [Span("; ".join(told), "warn")] if told else [Span("reading the PCI bus", "dim")]
