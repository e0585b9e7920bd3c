"""``a``: does production run what won the benchmark, and what does it add?"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from textwrap import wrap
from typing import ClassVar

from textual.binding import Binding, BindingType

from console.model import words
from console.model.audit_report import Audit, remark_of, tone_of
from console.model.configuration import Item, Sameness
from console.model.finding import Finding, Verdict
from console.model.snapshot import Snapshot
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.rows import Row, Span, clip, fit, heading, width_of
from console.ui.screens.page import Scrolled

#: From this width on the reason of an item stands beside its value.
_WIDE = 120

_ROLES: dict[Verdict, str] = {
    "pass": "good",
    "fail": "bad",
    "warn": "warn",
    "unknown": "warn",
    "skipped": "dim",
}

_SIGNS: dict[Sameness, str] = {"missing": "-", "different": "≠", "unknown": "?", "added": "+", "same": "="}
_ASCII_SIGNS: dict[Sameness, str] = {**_SIGNS, "different": "!"}

Read = Callable[[], Awaitable[Audit]]


class AuditPanel(Scrolled):
    """The answer, what was found, then every flag and variable: what is wrong first."""

    TITLE = "AUDIT"
    HELP: ClassVar[str] = (
        "Flags and variables of the running process, those of sitecustomize.py included, beside the\n"
        "profile and the command that won its benchmark. - missing, ≠ different, + added, = the same,\n"
        "? could not be seen. r reads all of it again."
    )
    BINDINGS: ClassVar[list[BindingType]] = [Binding("r", "read", "read again", id="audit.read")]

    def __init__(self, read: Read, glyphs: Glyphs = UNICODE, *, id: str | None = None) -> None:
        super().__init__(glyphs, id=id)
        self._read = read
        self._reading = False
        self.found: Audit | None = None
        self._read_at: float | None = None
        self._defect: str | None = None

    def on_mount(self) -> None:
        self.action_read()

    def action_read(self) -> None:
        """Read the service again; what was read before stays until then."""
        if not self._reading:
            self._reading = True
            self.run_worker(self._work(), name="audit", exclusive=True)
            self.redraw()

    async def _work(self) -> None:
        try:
            self.found = await self._read()
            self._read_at, self._defect = time.monotonic(), None
        except Exception as defect:  # noqa: BLE001  it is shown, with the age of what was read before
            self._defect = f"defect in the audit: {type(defect).__name__}: {defect}"
        finally:
            self._reading = False
            self.redraw()

    def all_rows(self, snapshot: Snapshot, width: int) -> list[Row]:
        rows = [heading(self.TITLE, self._note(), width, self.glyphs)]
        if self._defect is not None:
            rows.append([Span(f" {self.glyphs.bad} {self._defect}", "bad")])
        found = self.found
        if found is None:
            told = (
                ""
                if self._defect is not None
                else " reading the process, its unit, its Python and the engine"
            )
            return [*rows, [Span(told, "dim")]]
        role = _ROLES[found.verdict]
        mark = self._mark(found.verdict)
        answer = wrap(found.answer, max(20, width - 4))
        rows += [
            [Span(f" {mark if number == 0 else ' '} ", role), Span(line, role)]
            for number, line in enumerate(answer)
        ]
        rows.append([])
        for finding in found.findings:
            rows += self._finding(finding, width)
        if found.items:
            rows += [[], *self._table(found.items, width)]
        return rows

    def _note(self) -> Row:
        separator = f" {self.glyphs.separator} "
        if self._reading:
            told = "reading"
        elif self._read_at is None:
            told = "not read"
        else:
            told = f"read {words.span(time.monotonic() - self._read_at)} ago"
        note: Row = [Span(told, "warn" if self._reading else "dim")]
        if self.found is not None and self.found.profile is not None:
            note.append(Span(f"{separator}{self.found.profile}", "dim"))
        return [*note, Span(f"{separator}r read again{separator}esc back", "dim")]

    def _mark(self, verdict: Verdict) -> str:
        glyphs = self.glyphs
        marks = {"pass": glyphs.dot, "fail": glyphs.bad, "skipped": glyphs.idle}
        return marks.get(verdict, glyphs.warn)

    def _finding(self, finding: Finding, width: int) -> list[Row]:
        """What is well takes one line; what is not is told in full, with what to do about it."""
        role = _ROLES[finding.verdict]
        head: Row = [Span(f" {self._mark(finding.verdict)} ", role)]
        well = finding.verdict in ("pass", "skipped")
        title = Span(f"{clip(finding.title, 21, self.glyphs):<22}", "dim" if well else "text")
        room = max(20, width - 26)
        if well:
            return [[*head, title, Span(clip(finding.evidence, room, self.glyphs), "dim")]]
        lines = wrap(finding.evidence, room) or [""]
        rows = [[*head, title, Span(lines[0], role)]]
        rows += [[Span(" " * 25), Span(line, role)] for line in lines[1:]]
        if finding.remedy is not None:
            for number, line in enumerate(wrap(finding.remedy, max(20, room - 2))):
                arrow = self.glyphs.remedy if number == 0 else " "
                rows.append([Span(" " * 25), Span(f"{arrow} {line}", "text")])
        return rows

    def _table(self, items: tuple[Item, ...], width: int) -> Iterator[Row]:
        signs = _SIGNS if self.glyphs is UNICODE else _ASCII_SIGNS
        names = max(len(item.label) for item in items)
        values = min(34, max(len(item.effective or "") for item in items))
        # Names of a flag are long: a narrow screen gives them what they need and the reason the rest.
        name_width = min(names, max(20, width - 30))
        for item in items:
            tone = tone_of(item)
            role = {"plain": "text", "dim": "text"}.get(tone, tone)
            row: Row = [
                Span(f" {signs[item.verdict]} ", "dim" if tone in ("plain", "dim") else role),
                *fit([Span(clip(item.label, name_width, self.glyphs), role)], name_width + 2),
            ]
            value = item.effective or words.UNKNOWN
            remark = remark_of(item, short=width < _WIDE)
            if width >= _WIDE:
                row += fit([Span(clip(value, values, self.glyphs), role)], values + 2)
            else:
                room = width - width_of(row)
                row.append(Span(clip(value, room, self.glyphs) + ("  " if remark else ""), role))
            room = max(0, width - width_of(row) - 1)
            yield [*row, Span(clip(remark, room, self.glyphs), "dim" if tone in ("plain", "dim") else role)]
