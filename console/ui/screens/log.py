"""``l``: the journal full screen, with a filter and following."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from console.model.log import LogLine
from console.model.snapshot import Snapshot
from console.ui.header import Header
from console.ui.log import line_row
from console.ui.panel import Panel
from console.ui.rows import Row, Span, heading
from console.ui.screens.page import Page


class LogView(Panel):
    """A window on the lines: at the end while it follows, else where the operator left it.

    The place is held by line, not by row, so new lines do not move the text under the eye.
    """

    TITLE = "LOG"
    HELP: ClassVar[str] = (
        "/ filters (plain text, case does not matter), n shows or folds health probes,\n"
        "f follows the end, up, down, page up, page down, home and end move, escape goes back."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "follow", "follow", id="log.follow"),
        Binding("n", "noise", "noise", id="log.noise"),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown,space", "page(1)", "page down", show=False),
        Binding("home,g", "start", "start", show=False),
        Binding("end,G", "follow", "end", show=False),
    ]

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.needle = ""
        self.noise = False
        self._bottom: int | None = None  # lines seen up to the last shown row; None: following

    @property
    def following(self) -> bool:
        return self._bottom is None

    def chosen(self, snapshot: Snapshot) -> list[tuple[int, LogLine]]:
        """The lines that pass the filter, each with its number since the console started."""
        first = snapshot.log_total - len(snapshot.log)
        needle = self.needle.casefold()
        return [
            (first + index, line) for index, line in enumerate(snapshot.log) if needle in line.text.casefold()
        ]

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        chosen = self.chosen(snapshot)
        lines = self._window(chosen, max(0, height - 1))
        note: Row = [Span("following" if self.following else "held", "good" if self.following else "warn")]
        if self.needle:
            note.append(Span(f" {self.glyphs.separator} {len(chosen)} lines with “{self.needle}”", "accent"))
        note.append(Span(f" {self.glyphs.separator} / filter  f follow  n noise  esc back", "dim"))
        return [
            heading(self.TITLE, note, width, self.glyphs),
            *(line_row(line, width, self.glyphs) for line in lines),
        ]

    def _window(self, chosen: list[tuple[int, LogLine]], room: int) -> list[LogLine]:
        """The lines that end where the operator left off; the oldest, once those have been dropped."""
        seen = [(number, line) for number, line in chosen if self.noise or line.kind != "noise"]
        if self._bottom is None:
            end = len(seen)
        else:
            end = max(room, sum(number < self._bottom for number, _ in seen))
        return [line for _, line in seen[max(0, end - room) : end]]

    def filter(self, needle: str) -> None:
        self.needle = needle
        self.redraw()

    def action_follow(self) -> None:
        self._bottom = None
        self.redraw()

    def action_noise(self) -> None:
        self.noise = not self.noise
        self.redraw()

    def action_start(self) -> None:
        self._go(0)

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - 2))

    def action_move(self, by: int) -> None:
        if self.snapshot is None:
            return
        chosen = self._numbers(self.snapshot)
        at = len(chosen) if self._bottom is None else sum(number < self._bottom for number in chosen)
        self._go(at + by, chosen)

    def _numbers(self, snapshot: Snapshot) -> list[int]:
        return [number for number, line in self.chosen(snapshot) if self.noise or line.kind != "noise"]

    def _go(self, index: int, chosen: list[int] | None = None) -> None:
        if self.snapshot is None:
            return
        if chosen is None:
            chosen = self._numbers(self.snapshot)
        index = max(min(len(chosen), self.size.height - 1), index)
        self._bottom = None if index >= len(chosen) else chosen[index]
        self.redraw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_move(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_move(3)


class LogPage(Page):
    """The log view and its filter line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("slash", "filter", "filter", id="log.filter")]

    def __init__(self, view: LogView, header: Header) -> None:
        super().__init__(view, header)
        self._view = view

    def compose(self) -> ComposeResult:
        yield from super().compose()
        line = Input(placeholder="filter", id="filter")
        line.cursor_blink = False  # each blink would repaint the line
        yield line

    def action_filter(self) -> None:
        line = self.query_one(Input)
        line.add_class("shown")
        line.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._view.filter(event.value)

    def on_input_submitted(self) -> None:
        self._leave_filter()

    def on_key(self, event: events.Key) -> None:
        line = self.query_one(Input)
        if event.key == "escape" and line.has_focus:
            event.stop()
            event.prevent_default()
            line.value = ""
            self._leave_filter()

    def _leave_filter(self) -> None:
        line = self.query_one(Input)
        if not line.value:
            line.remove_class("shown")
        self._view.focus()
