"""A job as it goes, or as it went: every step with its time and what was seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar, Literal

from textual.binding import Binding, BindingType

from console.model import words
from console.model.operation import JobState, JobView, StepState, StepView
from console.model.snapshot import Snapshot
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.header import Header
from console.ui.rows import Row, Span, bar, clip, heading, spread
from console.ui.screens.page import Page, Scrolled
from console.ui.screens.plan import change_rows, finding_rows, paragraph
from console.ui.service import phase_rows

#: What a job that is not at work can be told.
Order = Literal["resume", "rollback"]

BLOCKS: dict[JobState, str] = {
    "running": "block-warn",
    "done": "block-good",
    "rolled-back": "block-warn",
    "failed": "block-bad",
    "interrupted": "block-bad",
}

_ROLES: dict[StepState, str] = {
    "waiting": "dim",
    "doing": "warn",
    "done": "good",
    "skipped": "good",
    "failed": "bad",
    "undoing": "warn",
    "undone": "warn",
    "undo-failed": "bad",
    "nothing-to-undo": "dim",
}


def step_mark(state: StepState, glyphs: Glyphs) -> Span:
    """The sign of a step, in its colour."""
    sign = {
        "waiting": glyphs.idle,
        "doing": glyphs.work,
        "undoing": glyphs.work,
        "failed": glyphs.bad,
        "undo-failed": glyphs.bad,
        "undone": glyphs.back,
    }.get(state, glyphs.dot)
    return Span(sign, _ROLES[state])


def short_words(view: JobView) -> str:
    """For the header: ``switch 4/9``; what it does now is the job's own page to tell."""
    place = next((n for n, step in enumerate(view.steps, 1) if step.state in ("doing", "undoing")), None)
    if view.state == "interrupted":
        return f"{view.plan.action} interrupted"
    if view.state != "running":
        return f"{view.plan.action} {view.state}"
    back = " back" if any(step.state == "undoing" for step in view.steps) else ""
    return f"{view.plan.action}{back}" + (f" {place}/{len(view.steps)}" if place is not None else "")


def moving_slots(view: JobView) -> frozenset[str]:
    """The slots of cards that the job moves at this moment."""
    if view.state != "running":
        return frozenset()
    now = [step for step in view.steps if step.state in ("doing", "undoing")]
    return frozenset(slot for step in now if (slot := slot_of(view, step)) is not None)


def slot_of(view: JobView, step: StepView) -> str | None:
    """The slot of the card that a step is about: ``to-vfio-0000:41:00``, ``mend-0000:41:00``."""
    id = step.planned.id
    if id.startswith(("to-vfio-", "to-host-", "mend-")):
        return id.rpartition("-")[2]
    return view.plan.target if id.startswith("rescue-") else None  # a recovery is of one card


class JobPanel(Scrolled):
    """Drawn from the job's journal; the job itself is another process."""

    TITLE = "JOB"
    HELP: ClassVar[str] = (
        "The job is a process of its own: it goes on when this console or the connection ends.\n"
        "Interrupted means that its process died. R goes on where it stopped; B takes back what was done."
    )

    def __init__(self, view: JobView, glyphs: Glyphs = UNICODE, *, id: str | None = None) -> None:
        super().__init__(glyphs, id=id)
        self.view = view

    def show(self, view: JobView) -> None:
        self.view = view
        self.redraw()

    def all_rows(self, snapshot: Snapshot, width: int) -> list[Row]:
        view, glyphs = self.view, self.glyphs
        state = view.state.replace("-", " ").upper()
        head: Row = [
            Span(f"{self.TITLE} {view.plan.title} ", "title"),
            Span(f" {state} ", BLOCKS[view.state]),
        ]
        began = view.created_at
        ended = view.ended_at if view.ended_at is not None else snapshot.wall
        if view.state != "interrupted":
            head.append(Span(f" {words.span(max(0.0, ended - began))}", "text"))
        rows: list[Row] = [spread(head, self._keys(), width), self._who()]
        for place, reason in enumerate(view.reasons):
            role = "bad" if view.state == "failed" or place == 0 else "warn"
            rows += paragraph(f"{glyphs.bad} {reason}", role, width, " ")
        rows.append([])
        for step in view.steps:
            rows += self._step(step, snapshot, width)
        if view.kernel:
            rows += [[], heading("KERNEL", [], width, glyphs, "part")]
            rows += [
                [Span(f" {_clock(line.at)} ", "dim"), Span(line.words, "warn")] for line in view.kernel[-20:]
            ]
        if view.plan.findings:
            rows += [[], heading("CHECKS BEFORE IT", [], width, glyphs, "part")]
            rows += finding_rows(view.plan.findings, width, glyphs)
        for change in view.plan.changes:
            rows += [[], *change_rows(change, glyphs, width)]
        return rows

    def _keys(self) -> Row:
        row: Row = []
        if self.view.state == "interrupted":
            row += [Span(" R", "key"), Span(" resume", "dim"), Span("  B", "key"), Span(" roll back", "dim")]
        back = "back, the job goes on" if self.view.state == "running" else "back"
        return [*row, Span("  esc", "key"), Span(f" {back} ", "dim")]

    def _who(self) -> Row:
        view = self.view
        told = f" {view.id}  {view.actor.user}"
        if view.actor.connection:
            told += f" from {view.actor.connection.split()[0]}"
        told += f", {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(view.created_at))}"
        row: Row = [Span(told, "dim")]
        if view.note:
            row.append(Span(f"  {view.note}", "text"))
        return row

    def _step(self, step: StepView, snapshot: Snapshot, width: int) -> list[Row]:
        glyphs = self.glyphs
        active = step.state in ("doing", "undoing")
        role = "text" if step.state != "waiting" else "dim"
        took = None
        if step.began is not None:
            took = (step.ended if step.ended is not None else snapshot.wall) - step.began
        planned = step.planned
        told = (
            planned.undo or planned.words
            if step.state in ("undoing", "undone", "undo-failed")
            else planned.words
        )
        row: Row = [
            Span(" "),
            step_mark(step.state, glyphs),
            Span(f"{'' if took is None else words.span(took):>7}  ", "text" if active else "dim"),
            Span(clip(told, max(0, width - 12), glyphs), role),
        ]
        rows = [row]
        indent = " " * 11
        if active:
            rows += self._progress(snapshot, width, indent)
        elif step.words:
            bad = step.state in ("failed", "undo-failed")
            if bad:
                rows += paragraph(step.words, "bad", width, indent)
            elif width - 13 - len(told) > 20:
                row.append(Span(f"  {clip(step.words, width - 14 - len(told), glyphs)}", "dim"))
        if step.state in ("failed", "undo-failed"):
            rows += [[Span(indent), Span(line, "dim")] for line in step.lines]
        return rows

    def _progress(self, snapshot: Snapshot, width: int, indent: str) -> list[Row]:
        progress = self.view.progress
        if progress is None or self.view.state != "running":
            return []
        row: Row = [Span(indent), Span(progress.words, "warn")]
        if progress.percent is not None:
            row += [Span("  "), *bar(progress.percent / 100, min(30, max(0, width // 4)), self.glyphs)]
            row.append(Span(f" {progress.percent:.0f} %", "text"))
        if progress.eta_s is not None:
            row.append(Span(f"  about {words.span(progress.eta_s)} left", "dim"))
        rows = [row]
        if snapshot.load.phases and snapshot.state.name in ("starting", "warming-up"):
            rows += [[Span(" " * 9), *phase] for phase in phase_rows(snapshot, width - 9, self.glyphs)]
        return rows


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


class JobPage(Page):
    """Follows one job; an interrupted one can be resumed or rolled back from here."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("R", "order('resume')", "resume", id="job.resume"),
        Binding("B", "order('rollback')", "roll back", id="job.rollback"),
        Binding("escape,q", "dismiss", "back", id="job.back"),
    ]

    def __init__(
        self, view: JobView, header: Header, ordered: Callable[[str, Order], None] | None, glyphs: Glyphs
    ) -> None:
        self._job = JobPanel(view, glyphs)
        super().__init__(self._job, header)
        self._ordered = ordered

    @property
    def job(self) -> str:
        return self._job.view.id

    def show(self, view: JobView) -> None:
        """Draw the job as it stands now."""
        if self.is_mounted:
            self._job.show(view)

    def action_order(self, order: Order) -> None:
        if self._ordered is not None and self._job.view.state == "interrupted":
            self._ordered(self.job, order)
