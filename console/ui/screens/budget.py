"""``k``: where the memory went, how many tokens fit, and what another profile would need."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from textwrap import wrap
from typing import ClassVar

from textual.binding import Binding, BindingType

from console.model import words
from console.model.budget import Budget
from console.model.budget_report import cell_words, formula
from console.model.finding import Finding, Verdict
from console.model.profile import Profile
from console.model.snapshot import Snapshot
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.memory_bars import alike, card_bar, legend, plan_bar
from console.ui.rows import Row, Span, clip, heading
from console.ui.screens.page import Scrolled

#: Seconds after which all of it is read again while the page is open.
AGAIN_S = 15.0

_ROLES: dict[Verdict, str] = {
    "pass": "good",
    "fail": "bad",
    "warn": "warn",
    "unknown": "warn",
    "skipped": "dim",
}

Read = Callable[[Snapshot, Profile | None], Awaitable[Budget]]


class BudgetPanel(Scrolled):
    """The answer, a bar a card, the arithmetic, and what follows from it."""

    TITLE = "MEMORY BUDGET"
    HELP: ClassVar[str] = (
        "Of each card: what the engine reports (weights, draft model, KV cache, state, graphs), what NVML\n"
        "sees beyond that in its process (activations, buffers), and what is left unaccounted. Sizes of\n"
        "cards are GiB, of host RAM decimal GB, as the engine logs them. left and right choose a profile:\n"
        "its budget is an estimate between two bounds, for when what runs now has stopped. r reads again."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right", "choose(1)", "next profile", id="budget.next"),
        Binding("left", "choose(-1)", "previous profile", id="budget.previous"),
        Binding("r", "read", "read again", id="budget.read"),
    ]

    def __init__(
        self,
        read: Read,
        profiles: tuple[Profile, ...] = (),
        glyphs: Glyphs = UNICODE,
        *,
        id: str | None = None,
    ) -> None:
        super().__init__(glyphs, id=id)
        self._read = read
        self._choices: tuple[Profile | None, ...] = (None, *profiles)
        self._chosen = 0
        self._reading = False
        self.found: Budget | None = None
        self._read_at: float | None = None
        self._defect: str | None = None

    def on_mount(self) -> None:
        self.action_read()
        self.set_interval(AGAIN_S, self.action_read)

    def draw(self, snapshot: Snapshot) -> None:
        first = self.snapshot is None
        super().draw(snapshot)
        if first:
            self.action_read()

    def action_choose(self, by: int) -> None:
        """Another profile; what was read belongs to the one before."""
        if len(self._choices) == 1:
            return
        self._chosen = (self._chosen + by) % len(self._choices)
        self.found, self._read_at, self._top = None, None, 0
        self._reading = False
        self.action_read()

    def action_read(self) -> None:
        """Read again; what was read before stays until then."""
        if self.snapshot is not None and not self._reading:
            self._reading = True
            self.run_worker(self._work(self.snapshot, self._choices[self._chosen]), exclusive=True)
            self.redraw()

    async def _work(self, snapshot: Snapshot, profile: Profile | None) -> None:
        try:
            self.found = await self._read(snapshot, profile)
            self._read_at, self._defect = time.monotonic(), None
        except Exception as defect:  # noqa: BLE001  it is shown, with the age of what was read before
            self._defect = f"defect in the budget: {type(defect).__name__}: {defect}"
        self._reading = False
        self.redraw()

    # Rows --------------------------------------------------------------------------------------

    def all_rows(self, snapshot: Snapshot, width: int) -> list[Row]:
        rows = [heading(self.TITLE, self._note(), width, self.glyphs), self._tabs()]
        if self._defect is not None:
            rows.append([Span(f" {self.glyphs.bad} {self._defect}", "bad")])
        found = self.found
        if found is None:
            told = "" if self._defect is not None else " reading the engine, its log, its model and the host"
            return [*rows, [Span(told, "dim")]]
        rows += self._answer(found, width)
        rows += self._cards(found, width)
        rows += self._arithmetic(found, width)
        for finding in found.findings:
            rows += self._finding(finding, width)
        return rows

    def _note(self) -> Row:
        separator = f" {self.glyphs.separator} "
        age = None if self._read_at is None else time.monotonic() - self._read_at
        if age is not None:
            told = f"read {words.span(age)} ago"
        else:
            told = "reading" if self._reading else "not read"
        late = age is None or age > 3 * AGAIN_S
        return [Span(told, "warn" if late else "dim"), Span(f"{separator}r again{separator}esc back", "dim")]

    def _tabs(self) -> Row:
        """What runs, and every profile to compare with."""
        row: Row = [Span(" ")]
        for place, profile in enumerate(self._choices):
            name = "running" if profile is None else profile.name
            row += [Span(f" {name} ", "block-idle" if place == self._chosen else "dim"), Span(" ")]
        return [*row, Span("left/right", "dim")] if len(self._choices) > 1 else row

    def _answer(self, found: Budget, width: int) -> Iterator[Row]:
        role = _ROLES[found.verdict]
        for number, line in enumerate(wrap(found.answer, max(20, width - 4))):
            mark = self._mark(found.verdict) if number == 0 else " "
            yield [Span(f" {mark} ", role), Span(line, "text" if found.verdict == "pass" else role)]

    def _cards(self, found: Budget, width: int) -> Iterator[Row]:
        if not found.cards:
            return
        plan = found.plan
        yield heading(
            "CARDS" if plan is None else "CARDS NOW", [Span("GiB", "dim")], width, self.glyphs, "part"
        )
        if plan is None:
            for card in found.cards:
                yield card_bar(card, width, self.glyphs)
            yield from legend(found.cards, width)
            return
        shown = alike(found.cards)
        longest = max(len(name) for name, _ in shown)
        for name, card in shown:
            yield card_bar(card, width, self.glyphs, name.rjust(longest))
        yield from legend(found.cards, width)
        whole = max((card.total or 0) - (card.reserved or 0) for card in found.cards)
        low, high = words.gib(plan.slack.low), words.gib(plan.slack.high)
        left = low if low == high else f"{low} to {high}"
        told = f"{left} GiB stay for graphs and activations"
        yield heading("THEN, EACH CARD", [Span(told, "dim")], width, self.glyphs, "part")
        yield plan_bar(plan, whole, width, self.glyphs, "=".rjust(longest))

    def _arithmetic(self, found: Budget, width: int) -> Iterator[Row]:
        if found.geometry is None or found.dtype is None or found.token_bytes is None:
            return
        told = Span(f"{cell_words(found)} a token on each card, {found.dtype}", "text")
        yield heading("KV CACHE", [told], width, self.glyphs, "part")
        for line in wrap(formula(found.geometry, found.dtype), max(20, width - 2)):
            yield [Span(f" {line}", "dim")]

    def _mark(self, verdict: Verdict) -> str:
        glyphs = self.glyphs
        marks = {"pass": glyphs.dot, "fail": glyphs.bad, "skipped": glyphs.idle}
        return marks.get(verdict, glyphs.warn)

    def _finding(self, finding: Finding, width: int) -> Iterator[Row]:
        """What is well is told in dim; what is not is told in its colour, with what to do about it."""
        role = _ROLES[finding.verdict]
        body = "dim" if finding.verdict in ("pass", "skipped") else role
        title = clip(finding.title, 24, self.glyphs)
        room = max(20, width - 29)
        for number, line in enumerate(wrap(finding.evidence, room) or [""]):
            mark, name = (self._mark(finding.verdict), title) if number == 0 else (" ", "")
            yield [Span(f" {mark} ", role), Span(f"{name:<25}", "text"), Span(line, body)]
        if finding.remedy is not None and finding.verdict != "pass":
            for number, line in enumerate(wrap(finding.remedy, max(20, room - 2))):
                arrow = self.glyphs.remedy if number == 0 else " "
                yield [Span(" " * 28), Span(f"{arrow} {line}", "text")]
