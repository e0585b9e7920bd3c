"""``j``: what was changed on this host, by whom, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from console.model import words
from console.model.operation import JobState, JobView
from console.model.snapshot import Snapshot
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.header import Header
from console.ui.panel import Panel
from console.ui.rows import Row, Span, clip, fit, heading, width_of
from console.ui.screens.page import Page

_ROLES: dict[JobState, str] = {
    "running": "warn",
    "done": "good",
    "rolled-back": "warn",
    "failed": "bad",
    "interrupted": "bad",
}


class JobsPanel(Panel):
    """Newest first; enter opens the one under the bar."""

    TITLE = "JOBS"
    HELP: ClassVar[str] = (
        "Every change that was made through gpuops: when, what, how it ended, who asked for it and why.\n"
        "up and down move, enter opens a job with its steps."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "move(-10)", "page up", show=False),
        Binding("pagedown,space", "move(10)", "page down", show=False),
        Binding("home,g", "move(-10000)", "start", show=False),
        Binding("end,G", "move(10000)", "end", show=False),
        Binding("enter", "choose", "open", show=False),
    ]

    class Chosen(Message):
        """The operator wants to see this job."""

        def __init__(self, view: JobView) -> None:
            super().__init__()
            self.view = view

    def __init__(self, glyphs: Glyphs = UNICODE, *, id: str | None = None) -> None:
        super().__init__(glyphs, id=id)
        self.jobs: tuple[JobView, ...] | None = None
        self.problem: str | None = None
        self.place = 0

    def show(self, jobs: tuple[JobView, ...] | None, problem: str | None) -> None:
        self.jobs, self.problem = jobs, problem
        self.redraw()

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        glyphs = self.glyphs
        note: Row = [Span(f"enter opens {glyphs.separator} esc back", "dim")]
        rows = [heading(self.TITLE, note, width, glyphs)]
        if self.problem is not None:
            return [*rows, [], [Span(f" {glyphs.bad} {self.problem}", "bad")]]
        if self.jobs is None:
            return [*rows, [], [Span(" reading", "dim")]]
        if not self.jobs:
            return [*rows, [], [Span(" nothing was changed through gpuops yet", "dim")]]
        room = max(1, height - 2)
        self.place = max(0, min(self.place, len(self.jobs) - 1))
        top = max(0, min(self.place - room // 2, len(self.jobs) - room))
        head = f"   {'began':<20}{'took':>7}  {'how it ended':<13}{'by':<12} what"
        rows.append([Span(head, "dim")])
        for place, job in enumerate(self.jobs[top : top + room], top):
            rows.append(self._row(job, snapshot, width, place == self.place))
        return rows

    def _row(self, job: JobView, snapshot: Snapshot, width: int, here: bool) -> Row:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.created_at))
        ended = job.ended_at if job.ended_at is not None else snapshot.wall
        took = words.UNKNOWN if job.state == "interrupted" else words.span(max(0.0, ended - job.created_at))
        who = clip(job.actor.user, 11, self.glyphs)
        row: Row = [
            Span(f" {self.glyphs.remedy if here else ' '} ", "accent"),
            Span(f"{began:<20}{took:>7}  ", "accent" if here else "text"),
            *fit([Span(job.state.replace("-", " "), _ROLES[job.state])], 13),
            *fit([Span(who, "dim")], 13),
        ]
        told = job.plan.title + (f"  ({job.note})" if job.note else "")
        row.append(Span(clip(told, max(0, width - width_of(row)), self.glyphs), "accent" if here else "text"))
        why = job.reasons[0] if job.reasons else ""
        left = width - width_of(row) - 2
        if why and left > 12:
            row.append(Span(f"  {clip(why, left, self.glyphs)}", "dim"))
        return row

    def action_move(self, by: int) -> None:
        self.place = max(0, self.place + by)
        self.redraw()

    def action_choose(self) -> None:
        if self.jobs:
            self.post_message(self.Chosen(self.jobs[min(self.place, len(self.jobs) - 1)]))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_move(-1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_move(1)


class JobsPage(Page):
    """The audit trail; ``opened`` is told which job the operator chose."""

    def __init__(self, header: Header, opened: Callable[[JobView], None], glyphs: Glyphs) -> None:
        self._jobs = JobsPanel(glyphs)
        super().__init__(self._jobs, header)
        self._opened = opened

    def show(self, jobs: tuple[JobView, ...] | None, problem: str | None = None) -> None:
        if self.is_mounted:
            self._jobs.show(jobs, problem)

    def on_jobs_panel_chosen(self, event: JobsPanel.Chosen) -> None:
        self._opened(event.view)
