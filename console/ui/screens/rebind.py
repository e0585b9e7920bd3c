"""``b``: the cards between the container and the VM: where each is, what would move, what moves now."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

from textual.binding import Binding, BindingType

from console.model import words
from console.model.card import Address
from console.model.operation import JobView, StepView
from console.model.rebind.inventory import Inventory, Slot, Target, is_vfio
from console.model.rebind.kernel_log import CardEvent
from console.model.rebind.stranded import Stranded, reconcile
from console.model.site import Site
from console.model.snapshot import Snapshot
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.rows import Row, Span, clip, spread, width_of
from console.ui.screens.job import slot_of
from console.ui.screens.page import Scrolled
from console.ui.screens.plan import paragraph
from console.ui.screens.rebind_rows import job_rows, kernel_rows, left_rows, side_rows, step_words, track_of

if TYPE_CHECKING:
    from console.model.operation import Plan
    from console.operations.step import Context

    Propose = Callable[[Callable[[Context], Awaitable[Plan]]], None]

#: Seconds between two readings while the page is open, and after which one counts as old.
AGAIN_S = 2.0
MOVING_S = 0.5  # while cards move
OLD_S = 10.0

#: Of the kernel's words so many are kept.
_KEPT = 200


class Host(Protocol):
    """Where the page reads from."""

    @property
    def current(self) -> JobView | None:
        """The job that runs, or was interrupted."""

    @property
    def latest(self) -> JobView | None:
        """The last job that was followed, also after its end."""

    async def inventory(self) -> Inventory:
        """Cards and guests as they are. Unavailable with the reason."""

    def card_events(self, inventory: Callable[[], Inventory | None]) -> AsyncIterator[CardEvent]:
        """What the kernel says about the cards, from now on."""


class RebindPanel(Scrolled):
    """Two sides and a row for each card; below it what was left half way, the job, and the kernel."""

    TITLE = "CARDS"
    HELP: ClassVar[str] = (
        "Each card stands on its side: the nvidia driver, for the host and its container, or vfio-pci, for\n"
        "the VM. In the middle is a card that moves, or was left half way. space chooses a card, A all;\n"
        "v plans their move to the VM, c to the container, f repairs what was left half way: each shows a\n"
        "plan that is confirmed by typing where the cards go. None chosen stands for all."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "point(-1)", "up", show=False),
        Binding("down", "point(1)", "down", show=False),
        Binding("space", "choose", "choose", id="rebind.choose"),
        Binding("A", "choose_all", "choose all", id="rebind.all"),
        Binding("v", "plan('vm')", "to the VM", id="rebind.vm"),
        Binding("c", "plan('container')", "to the container", id="rebind.container"),
        Binding("f", "repair", "repair", id="rebind.repair"),
        Binding("enter", "open_job", "the job", id="rebind.job"),
    ]

    def __init__(
        self,
        host: Host | None,
        site: Site,
        propose: Propose | None,
        open_job: Callable[[JobView], None],
        glyphs: Glyphs = UNICODE,
        *,
        id: str | None = None,
    ) -> None:
        super().__init__(glyphs, id=id)
        self._host = host
        self._site = site
        self._propose = propose
        self._open = open_job
        self._inventory: Inventory | None = None
        self._stranded: tuple[Stranded, ...] = ()
        self._read_at: float | None = None
        self._problem: str | None = None if host is not None else "cards are not read from here"
        self._reading = False
        self._at = 0
        self._room = 0  # rows there are below the heading
        self._chosen: set[Address] = set()
        self._events: deque[CardEvent] = deque(maxlen=_KEPT)

    def on_mount(self) -> None:
        if self._host is not None:
            self._read()
            self.set_interval(AGAIN_S, self._read)
            self.set_interval(MOVING_S, self._read_moving)
            self.run_worker(self._listen(self._host), name="kernel")

    def _read_moving(self) -> None:
        if self._job is not None and self._job.state == "running":
            self._read()

    def _read(self) -> None:
        if self._host is not None and not self._reading:
            self._reading = True
            self.run_worker(self._look(self._host), name="cards")

    async def _look(self, host: Host) -> None:
        from console.sources.source import Unavailable

        try:
            found = await host.inventory()
        except Unavailable as problem:
            self._problem = str(problem)
        else:
            self._inventory, self._problem, self._read_at = found, None, time.monotonic()
            self._stranded = reconcile(found, container=self._site.container.id, in_flight=self._in_flight())
            self._chosen &= {slot.address for slot in self._cards()}
        self._reading = False
        self.redraw()

    async def _listen(self, host: Host) -> None:
        async for event in host.card_events(lambda: self._inventory):
            self._events.append(event)
            self.redraw()

    # Keys --------------------------------------------------------------------------------------

    def action_point(self, by: int) -> None:
        self._at = max(0, min(len(self._cards()) - 1, self._at + by))
        self.redraw()

    def action_choose(self) -> None:
        cards = self._cards()
        if self._at < len(cards):
            self._chosen ^= {cards[self._at].address}
            self.action_point(1)

    def action_choose_all(self) -> None:
        """All, or none when all are chosen already."""
        every = {slot.address for slot in self._cards()}
        self._chosen = set() if self._chosen == every else every
        self.redraw()

    def action_plan(self, target: Target) -> None:
        from console.operations.rebind import plan_rebind

        asked = tuple(slot.address for slot in self._cards() if slot.address in self._chosen)
        self._ask(partial(plan_rebind, target=target, asked=asked))

    def action_repair(self) -> None:
        from console.operations.rebind import plan_repair

        self._ask(plan_repair)

    def _ask(self, make: Callable[[Context], Awaitable[Plan]]) -> None:
        if self._propose is None:
            self.notify("read only: nothing is changed from here", severity="warning")
        else:
            self._propose(make)

    def action_open_job(self) -> None:
        job = self._told_job
        if job is not None:
            self._open(job)

    # Rows --------------------------------------------------------------------------------------

    @property
    def _job(self) -> JobView | None:
        """The job that moves cards, while it does or waits for a word."""
        return _of_cards(self._host.current) if self._host is not None else None

    @property
    def _told_job(self) -> JobView | None:
        """That job, or the last one when it ended otherwise than meant: its reason is still of use."""
        if self._job is not None or self._host is None:
            return self._job
        last = _of_cards(self._host.latest)
        return last if last is not None and last.state in ("failed", "rolled-back") else None

    def _in_flight(self) -> frozenset[Address]:
        job = self._job
        return (
            frozenset()
            if job is None
            else frozenset(slot.address for slot in self._cards() if _step_of(job, slot) is not None)
        )

    def _cards(self) -> tuple[Slot, ...]:
        """The site's cards, by address."""
        if self._inventory is None:
            return ()
        named = self._site.gpus
        return tuple(slot for slot in self._inventory.slots if named == "auto" or slot.address in named)

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        self._room = max(0, height - 1)
        return super().rows(snapshot, width, height)

    def all_rows(self, snapshot: Snapshot, width: int) -> list[Row]:
        rows = [spread([Span(f"{self.TITLE} ", "title"), self._age()], self._keys(width), width)]
        if self._problem is not None:
            rows += paragraph(f"{self.glyphs.warn} {self._problem}", "warn", width, " ")
        inventory = self._inventory
        if inventory is None:
            told = "" if self._problem is not None else " reading cards and guests"
            return [*rows, [Span(told, "dim")]]
        rows += side_rows(inventory, self._site, width, self.glyphs)
        for number, slot in enumerate(self._cards()):
            rows.append(self._card(number, slot, width))
        if not self._cards():
            rows.append([Span(" no NVIDIA card on the PCI bus", "warn")])
        rows += left_rows(self._stranded, width, self.glyphs)
        rows += job_rows(self._told_job, width, self.glyphs)
        rows += kernel_rows(self._events, width, self._room + 1 - len(rows), self.glyphs)
        return rows

    def _age(self) -> Span:
        if self._read_at is None:
            return Span("not read yet", "warn")
        age = time.monotonic() - self._read_at
        return Span(f"read {words.span(age)} ago", "warn" if age > OLD_S else "dim")

    def _keys(self, width: int) -> Row:
        pairs = [("space", "choose"), ("v", "to VM"), ("c", "to container"), ("esc", "back")]
        if any(not one.harmless and one.repair is not None for one in self._stranded):
            pairs.insert(3, ("f", "repair"))
        if self._job is not None:
            pairs = [("enter", "the job"), ("esc", "back")]
        elif self._told_job is not None:
            pairs.insert(-1, ("enter", "job"))
        row: Row = []
        for key, told in pairs:
            row += [Span(f" {key}", "key"), Span(f" {told} ", "dim")]
        return row

    def _card(self, number: int, slot: Slot, width: int) -> Row:
        glyphs = self.glyphs
        at, chosen = number == self._at, slot.address in self._chosen
        name = slot.name.removeprefix("0000:")
        node = f"nvidia{slot.minor}" if slot.minor is not None else ""
        row: Row = [
            Span(f" {glyphs.remedy if at else ' '}", "accent"),
            Span(f"{glyphs.dot if chosen else glyphs.idle} ", "accent" if chosen else "dim"),
            Span(f"{number} {name:<9}{node:<9}", "text" if at or chosen else "dim"),
        ]
        row += self._lane(slot, track_of(width), chosen)
        told, role = self._told(slot)
        room = max(0, width - width_of(row) - 2)
        return [*row, Span(f" {clip(told, room, glyphs)}", role)]

    def _lane(self, slot: Slot, track: int, chosen: bool) -> Row:
        """The track with the card on it: at its side, or in between."""
        glyphs = self.glyphs
        place = 0.5
        if slot.on_vfio:
            place = 1.0
        elif slot.on_nvidia and not any(is_vfio(one.driver) for one in slot.functions):
            place = 0.0
        moving = self._step_now(slot) is not None
        role = "warn" if moving or place == 0.5 else "accent" if chosen else "text"
        cell = round(place * (track - 1))
        rail = glyphs.rule * track
        if chosen and self._job is None and place != 0.5:  # where its move would take it
            rail = rail[:-1] + glyphs.remedy if place == 0.0 else glyphs.home + rail[1:]
            way = "accent"
        else:
            way = "rule"
        knob = glyphs.work if moving else glyphs.dot
        return [Span(rail[:cell], way), Span(knob, role), Span(rail[cell + 1 :], way)]

    def _told(self, slot: Slot) -> tuple[str, str]:
        """What there is to say of a card: its step of the job, its trouble, or its group."""
        job = self._job
        step = _step_of(job, slot) if job is not None else None
        if step is not None:
            return step_words(step)
        trouble = next((one for one in self._stranded if one.card == slot.address), None)
        if trouble is not None:
            return trouble.words, "dim" if trouble.harmless else "bad"
        kinds = ", ".join(dict.fromkeys(one.kind for one in slot.functions))
        group = f"group {slot.group.id}" if slot.group is not None else "no IOMMU group"
        return f"{group}, {kinds}", "dim"

    def _step_now(self, slot: Slot) -> StepView | None:
        job = self._job
        step = _step_of(job, slot) if job is not None and job.state == "running" else None
        return step if step is not None and step.state in ("doing", "undoing") else None


def _of_cards(job: JobView | None) -> JobView | None:
    return job if job is not None and job.plan.action in ("rebind", "repair", "recover") else None


def _step_of(job: JobView, slot: Slot) -> StepView | None:
    """The step that moves this card."""
    return next((step for step in job.steps if slot_of(job, step) == slot.name), None)
