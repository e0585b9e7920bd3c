"""A full screen of one panel under the header: log, processes, sources."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from console.model.snapshot import Snapshot
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.header import Header
from console.ui.panel import Panel
from console.ui.rows import Row, Span
from console.ui.spans import SpanCompositor


class Scrolled(Panel):
    """A panel that may have more rows than its room: the heading stays, the rest moves."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "up", show=False),
        Binding("down", "move(1)", "down", show=False),
        Binding("pageup", "move(-10)", "page up", show=False),
        Binding("pagedown,space", "move(10)", "page down", show=False),
        Binding("home,g", "move(-10000)", "start", show=False),
        Binding("end,G", "move(10000)", "end", show=False),
    ]

    def __init__(self, glyphs: Glyphs = UNICODE, *, id: str | None = None) -> None:
        super().__init__(glyphs, id=id)
        self._top = 0

    def all_rows(self, snapshot: Snapshot, width: int) -> list[Row]:
        """Everything there is to say, its heading first."""
        raise NotImplementedError

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        first, *rest = self.all_rows(snapshot, width)
        room = max(0, height - 1)
        self._top = max(0, min(self._top, len(rest) - room))
        shown = rest[self._top : self._top + room]
        below = len(rest) - self._top - room
        if below > 0 and shown:
            # The last row gives way: what the heading says of keys must stay readable.
            more: Row = [Span(f" {self.glyphs.more} {below + 1} more rows ", "accent")]
            shown[-1] = [*more, Span("(down, page down)", "dim")]
        return [first, *shown]

    def action_move(self, by: int) -> None:
        self._top = max(0, self._top + by)
        self.redraw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_move(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_move(3)


class Page(Screen[None]):
    """Header, one panel that fills the rest, and escape to go back."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "back", id="page.back")]

    def __init__(self, panel: Panel, header: Header) -> None:
        super().__init__()
        self._compositor = SpanCompositor()
        self._panel = panel
        self._header = header

    def compose(self) -> ComposeResult:
        yield self._header
        self._panel.styles.height = "1fr"
        yield self._panel

    def on_mount(self) -> None:
        self.focus_first()

    def focus_first(self) -> None:
        """Give the keys to the panel."""
        self._panel.focus()

    def draw(self, snapshot: Snapshot) -> None:
        self._header.draw(snapshot)
        self._panel.draw(snapshot)
