"""What would be changed, before it is: the plan with its costs, checks, steps and differences."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from console.model.finding import Finding, Verdict
from console.model.operation import FileChange, Plan
from console.model.snapshot import Snapshot
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.header import Header
from console.ui.rows import Row, Span, clip, fit, heading, spread, width_of
from console.ui.screens.page import Page, Scrolled

_WORST_FIRST: tuple[Verdict, ...] = ("fail", "unknown", "warn", "pass", "skipped")
_ROLES: dict[Verdict, str] = {
    "fail": "bad",
    "unknown": "warn",
    "warn": "warn",
    "pass": "good",
    "skipped": "dim",
}

#: Cells for the titles of findings; a longer one moves its own evidence.
_TITLE = 28

#: Cells of a step's words; what rolling back would do stands beside them where there is room.
_BESIDE = 110


def mark(verdict: Verdict, glyphs: Glyphs) -> Span:
    """The sign of a verdict, in its colour."""
    sign = {"fail": glyphs.bad, "unknown": glyphs.warn, "warn": glyphs.warn, "pass": glyphs.dot}
    return Span(sign.get(verdict, glyphs.idle), _ROLES[verdict])


def finding_rows(findings: tuple[Finding, ...], width: int, glyphs: Glyphs) -> list[Row]:
    """One row a finding, worst first; evidence and remedy of those that did not pass are read whole."""
    rows: list[Row] = []
    column = min(_TITLE, max((len(finding.title) for finding in findings), default=0))
    for finding in sorted(findings, key=lambda finding: _WORST_FIRST.index(finding.verdict)):
        role = _ROLES[finding.verdict] if finding.verdict in ("fail", "unknown", "warn") else "text"
        head: Row = [Span(" "), mark(finding.verdict, glyphs), Span(f" {finding.title:<{column}}", role)]
        if finding.verdict in ("pass", "skipped"):
            evidence = clip(finding.evidence, max(0, width - width_of(head) - 3), glyphs)
            rows.append([*head, Span(f"  {evidence}", "dim")])
            continue
        rows.append(head)
        rows += paragraph(finding.evidence, "text", width, "   ")
        if finding.remedy:
            rows += paragraph(f"{glyphs.remedy} {finding.remedy}", "accent", width, "   ")
    return rows


def change_rows(change: FileChange, glyphs: Glyphs, width: int) -> list[Row]:
    """The difference of one file, with how many lines come and go."""
    lines = change.diff()
    body = lines[2:]
    more = sum(line.startswith("+") for line in body)
    fewer = sum(line.startswith("-") for line in body)
    note: Row = [Span(f"+{more}", "good"), Span(" "), Span(f"-{fewer}", "bad")]
    rows: list[Row] = [heading(f"CHANGES {change.path} in {change.machine}", note, width, glyphs, "part")]
    for line in body:
        role = {"+": "good", "-": "bad", "@": "dim"}.get(line[:1], "text")
        rows.append([Span(f" {line}", role)])
    return rows


class PlanView(Scrolled):
    """The very plan that the job would carry out."""

    TITLE = "PLAN"
    HELP: ClassVar[str] = (
        "Nothing has been changed yet. The checks were made just now; one that failed forbids the plan.\n"
        "The job that carries it out goes on when this console or the connection ends.\n"
        "When a step fails, the steps before it are taken back, the last one first."
    )

    def __init__(self, plan: Plan, glyphs: Glyphs = UNICODE, *, id: str | None = None) -> None:
        super().__init__(glyphs, id=id)
        self._plan = plan

    def all_rows(self, snapshot: Snapshot, width: int) -> list[Row]:
        plan, glyphs = self._plan, self.glyphs
        if plan.blocked:
            note: Row = [Span(" refused ", "block-bad"), Span(" nothing was changed", "text")]
            keys: Row = [Span(" esc", "key"), Span(" back ", "dim")]
        elif plan.typed:
            note = [Span(" not begun ", "block-idle")]
            keys = [
                Span(f" type {plan.target} and enter", "key"),
                Span("  esc", "key"),
                Span(" cancel ", "dim"),
            ]
        else:
            note = [Span(" not begun ", "block-idle")]
            keys = [Span(" y", "key"), Span(" do it  ", "text"), Span("esc", "key"), Span(" cancel ", "dim")]
        rows: list[Row] = [spread([Span(f"{self.TITLE} {plan.title} ", "title"), *note], keys, width), []]
        for cost in plan.costs:
            rows += paragraph(f"{glyphs.warn} {cost}", "warn", width, " ")
        if plan.costs:
            rows.append([])
        rows += self._findings(width)
        rows += self._steps(width)
        for change in plan.changes:
            rows += [[], *change_rows(change, glyphs, width)]
        return rows

    def _findings(self, width: int) -> list[Row]:
        found = self._plan.findings
        if not found:
            return []
        passed = sum(finding.verdict in ("pass", "skipped") for finding in found)
        told: Row = [Span(f"{passed} of {len(found)} pass", "good" if passed == len(found) else "text")]
        return [
            heading("CHECKS", told, width, self.glyphs, "part"),
            *finding_rows(found, width, self.glyphs),
            [],
        ]

    def _steps(self, width: int) -> list[Row]:
        beside = width >= _BESIDE
        rows = [heading("STEPS", [Span("and how each is taken back", "dim")], width, self.glyphs, "part")]
        digits = len(str(len(self._plan.steps)))
        for number, step in enumerate(self._plan.steps, 1):
            undo = step.undo or "nothing to take back"
            if beside:
                half = width * 6 // 10
                lines = textwrap.wrap(step.words, half - digits - 3, break_on_hyphens=False) or [""]
                backs = textwrap.wrap(undo, width - half - 4, break_on_hyphens=False) or [""]
                for place in range(max(len(lines), len(backs))):
                    left = f" {number:>{digits}} " if place == 0 else " " * (digits + 2)
                    text = lines[place] if place < len(lines) else ""
                    back = backs[place] if place < len(backs) else ""
                    sign = f"{self.glyphs.separator} " if place == 0 else "  "
                    rows.append(
                        [*fit([Span(left, "dim"), Span(text, "text")], half), Span(sign + back, "dim")]
                    )
                continue
            rows += paragraph(step.words, "text", width, f" {number:>{digits}} ")
            if step.undo:
                rows += paragraph(f"back: {step.undo}", "dim", width, " " * (digits + 2))
        return rows


def paragraph(text: str, role: str, width: int, indent: str) -> list[Row]:
    """Wrapped; the rows after the first stand below its text."""
    below = " " * len(indent)
    lines = textwrap.wrap(text, max(20, width - len(indent) - 1), break_on_hyphens=False) or [""]
    return [
        [Span(indent if place == 0 else below, "dim"), Span(line, role)] for place, line in enumerate(lines)
    ]


class PlanPage(Page):
    """Confirmed by ``y``, or by typing the plan's target; a blocked plan can only be left."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "confirm", "do it", id="plan.confirm"),
        Binding("escape,q,n", "dismiss", "cancel", id="plan.cancel"),
    ]

    def __init__(self, plan: Plan, header: Header, confirmed: Callable[[Plan], None], glyphs: Glyphs) -> None:
        super().__init__(PlanView(plan, glyphs), header)
        self.plan = plan
        self._confirmed = confirmed

    def compose(self) -> ComposeResult:
        yield from super().compose()
        if self.plan.typed and not self.plan.blocked:
            yield Input(placeholder=f"type {self.plan.target} to confirm", id="target")

    def focus_first(self) -> None:
        """Give the keys to the field, where there is one."""
        super().focus_first()
        for field in self.query(Input):
            field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip() == self.plan.target:
            self._go()
        else:
            self.notify(f"that is not {self.plan.target}; nothing was changed", severity="warning")

    def action_confirm(self) -> None:
        if not self.plan.typed:
            self._go()

    def _go(self) -> None:
        if not self.plan.blocked:
            self.dismiss()
            self._confirmed(self.plan)
