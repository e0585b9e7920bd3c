"""``t``: prompts are fired at the engine; the table fills as their answers come."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual import events
from textual.binding import Binding, BindingType
from textual.worker import Worker

from console.checks.smoke import CHECKS, Started, run_smoke, summary, target_of
from console.model import words
from console.model.finding import Finding, Verdict, overall
from console.model.profile import Profile
from console.model.site import Site
from console.model.snapshot import Snapshot
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.header import Header
from console.ui.panel import Panel
from console.ui.rows import Row, Span, clip, fit, heading, spread, width_of
from console.ui.screens.page import Page

if TYPE_CHECKING:
    from console.checks.smoke import Check

Report = Callable[[Finding | Started], None]

#: Starts a run for a profile and reports what it finds.
Fire = Callable[[Site, Profile | None, Report], Awaitable[object]]

_ROLES: dict[Verdict, str] = {
    "pass": "good",
    "fail": "bad",
    "warn": "warn",
    "unknown": "warn",
    "skipped": "dim",
}

_TITLE = 22
#: Rows that the evidence keeps on a small terminal, its heading included.
_EVIDENCE = 7


async def fire(site: Site, profile: Profile | None, report: Report) -> object:
    """One run of all smoke tests against the site's engine."""
    return await run_smoke(target_of(site, profile), report=report)


class Entry(msgspec.Struct):
    """One row: when its check began and ended (monotonic seconds), and what it found."""

    title: str
    began: float | None = None
    ended: float | None = None
    finding: Finding | None = None


class SmokePanel(Panel):
    """Verdict, table, and the evidence of the row under the bar."""

    TITLE = "SMOKE TESTS"
    HELP: ClassVar[str] = (
        "Short prompts that show whether a ready engine is any good: known answers, sound text, tool calls\n"
        "and reasoning that come back parsed. up and down choose a check, page up and page down move its\n"
        "evidence, r runs all again, escape stops a run and aborts its requests, then goes back."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("home,g", "move(-1000)", "start", show=False),
        Binding("end,G", "move(1000)", "end", show=False),
        Binding("pageup", "scroll(-5)", "evidence up", show=False),
        Binding("pagedown,space", "scroll(5)", "evidence down", show=False),
    ]

    def __init__(self, glyphs: Glyphs = UNICODE, *, id: str | None = None) -> None:
        super().__init__(glyphs, id=id)
        self.begin(CHECKS)

    def begin(self, checks: tuple[Check, ...]) -> None:
        """Forget the last run."""
        self.entries = {check.id: Entry(check.title) for check in checks}
        self.running = True
        self.stopped = False
        self._place: int | None = None  # None: the operator has not chosen, the worst is shown
        self._top = 0
        self._began = time.monotonic()
        self._took = 0.0
        self._ended_at: float | None = None  # on the snapshot's clock

    def take(self, event: Finding | Started) -> None:
        entry = self.entries[event.id]
        if isinstance(event, Started):
            entry.began = time.monotonic()
        else:
            entry.finding, entry.ended = event, time.monotonic()
        self.redraw()

    def end(self, stopped: bool) -> None:
        """The run is over, by itself or because it was stopped."""
        self.running, self.stopped = False, stopped
        self._took = time.monotonic() - self._began
        self._ended_at = None if self.snapshot is None else self.snapshot.now
        self.redraw()

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(entry.finding for entry in self.entries.values() if entry.finding is not None)

    @property
    def place(self) -> int:
        """The row under the bar: the operator's, else the first of the worst verdict."""
        if self._place is not None:
            return self._place
        worst = overall(self.findings)
        verdicts = [entry.finding and entry.finding.verdict for entry in self.entries.values()]
        return verdicts.index(worst) if worst in ("fail", "unknown", "warn") else 0

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        glyphs = self.glyphs
        keys = "esc stop" if self.running else f"r again {glyphs.separator} esc back"
        place = self.place
        room = max(1, min(len(self.entries), height - 2 - _EVIDENCE))
        top = max(0, min(place - room // 2, len(self.entries) - room))
        beyond = len(self.entries) - room
        note = [Span(f"{beyond} more checks, up and down ", "warn")] if beyond else []
        rows = [heading(self.TITLE, [*note, Span(keys, "dim")], width, glyphs)]
        rows.append(self._verdict(snapshot, width))
        shown = list(self.entries.values())[top : top + room]
        rows += [self._row(entry, width, number == place) for number, entry in enumerate(shown, top)]
        rows += self._evidence(width, height - len(rows))
        return rows[:height]

    def _verdict(self, snapshot: Snapshot, width: int) -> Row:
        found = self.findings
        failed = [one.title for one in found if one.verdict == "fail"]
        doubtful = [one.title for one in found if one.verdict in ("unknown", "warn")]
        glyphs = self.glyphs
        asked = sum(one.verdict != "skipped" for one in found)
        if failed:
            block = Span(f" {glyphs.bad} {len(failed)} FAILED ", "block-bad")
        elif self.running:
            block = Span(f" {glyphs.work} {len(found)} of {len(self.entries)} ", "block-warn")
        elif self.stopped:
            block = Span(f" {glyphs.idle} STOPPED after {len(found)} of {len(self.entries)} ", "block-idle")
        elif doubtful:
            block = Span(f" {glyphs.warn} {len(doubtful)} NOT KNOWN ", "block-warn")
        else:
            block = Span(f" {glyphs.dot} ALL {asked} PASSED ", "block-good")
        if self.running:
            told = (
                f"{len(found)} of {len(self.entries)}, {time.monotonic() - self._began:.0f} s "
                if failed
                else ""
            )
            right = told or f"{time.monotonic() - self._began:.0f} s "
        else:
            age = None if self._ended_at is None else max(0.0, snapshot.now - self._ended_at)
            right = f"took {self._took:.0f} s, {words.span(age)} ago "
        names = ", ".join(failed or doubtful)
        left: Row = [Span("  "), block, Span(" ")]
        tail: Row = [Span(right, "dim")]
        names = clip(names, max(0, width - width_of(left) - width_of(tail) - 1), glyphs)
        return spread([*left, Span(names, "bad" if failed else "warn")], tail, width)

    def _row(self, entry: Entry, width: int, here: bool) -> Row:
        glyphs, finding = self.glyphs, entry.finding
        marks: dict[Verdict, str] = {
            "pass": glyphs.dot,
            "fail": glyphs.bad,
            "warn": glyphs.warn,
            "unknown": glyphs.warn,
            "skipped": glyphs.idle,
        }
        if finding is not None:
            role = _ROLES[finding.verdict]
            mark, told = marks[finding.verdict], summary(finding)
            telling = "dim" if finding.verdict == "skipped" else "text" if finding.verdict == "pass" else role
        else:
            waits = self.running and entry.began is not None
            mark, told, role = (glyphs.work, "asking", "dim") if waits else (" ", "", "dim")
            told = "not run" if not self.running else told
            telling = "dim"
        took = "" if entry.began is None or entry.ended is None else words.latency(entry.ended - entry.began)
        row: Row = [
            Span(f" {glyphs.remedy if here else ' '} ", "accent"),
            Span(f"{mark} ", role),
            *fit([Span(entry.title, "accent" if here else "text")], _TITLE),
            Span(f"{took if finding is not None and finding.verdict != 'skipped' else '':>6}  ", "dim"),
        ]
        return [*row, Span(clip(told, max(0, width - width_of(row) - 1), glyphs), telling)]

    def _evidence(self, width: int, height: int) -> list[Row]:
        """The whole evidence of the chosen row, as much as fits from where the operator scrolled to."""
        entry = list(self.entries.values())[self.place]
        finding = entry.finding
        if height < 3:
            return []
        lines: list[Row] = []
        if finding is None:
            lines.append([Span(" no answer yet" if self.running else " not run", "dim")])
        else:
            told, *details = finding.evidence.split("\n")
            lines += _wrapped(told, "text" if finding.verdict == "pass" else _ROLES[finding.verdict], width)
            if finding.remedy is not None and finding.verdict != "pass":
                lines += _wrapped(f"{self.glyphs.remedy} {finding.remedy}", "accent", width)
            for detail in details:
                lines += _wrapped(detail, "dim", width)
        room = height - 2
        self._top = max(0, min(self._top, len(lines) - room))
        below = len(lines) - room - self._top
        note: Row = [Span(f"{below} more rows, page down", "dim")] if below > 0 else []
        title = heading(entry.title.upper(), note, width, self.glyphs, "part")
        return [[], title, *lines[self._top : self._top + room]]

    def action_move(self, by: int) -> None:
        self._place = max(0, min(self.place + by, len(self.entries) - 1))
        self._top = 0
        self.redraw()

    def action_scroll(self, by: int) -> None:
        self._top = max(0, self._top + by)
        self.redraw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_move(-1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_move(1)


def _wrapped(text: str, role: str, width: int) -> list[Row]:
    lines = textwrap.wrap(
        text, max(20, width - 2), initial_indent=" ", subsequent_indent="   ", break_on_hyphens=False
    )
    return [[Span(line, role)] for line in lines]


class SmokePage(Page):
    """Runs the smoke tests as it opens. Only ``fire`` speaks to the engine, in a worker."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("r", "again", "again", id="smoke.again")]

    def __init__(self, site: Site, glyphs: Glyphs, header: Header, fire: Fire = fire) -> None:
        self._smoke = SmokePanel(glyphs)
        super().__init__(self._smoke, header)
        self._site = site
        self._fire = fire
        self._worker: Worker[None] | None = None

    def on_mount(self) -> None:
        super().on_mount()
        # After the frame that tells the panel which profile runs.
        self.call_after_refresh(self.action_again)

    def action_again(self) -> None:
        """A run of all checks, unless one is under way."""
        if self._worker is None or self._worker.is_finished:
            self._smoke.begin(CHECKS)
            self._smoke.redraw()
            self._worker = self.run_worker(self._run(), name="smoke", group="smoke")

    async def action_dismiss(self, result: None = None) -> None:
        """Stop the run; when none is under way, go back."""
        if self._worker is not None and not self._worker.is_finished:
            self._worker.cancel()  # the requests that are with the engine are aborted there
        else:
            await super().action_dismiss(result)

    async def _run(self) -> None:
        snapshot = self._smoke.snapshot
        stopped = True
        try:
            await self._fire(self._site, None if snapshot is None else snapshot.profile, self._smoke.take)
            stopped = False
        finally:
            self._smoke.end(stopped)
