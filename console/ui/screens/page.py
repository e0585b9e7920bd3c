"""A full screen of one panel with a footer of its own keys: log, processes, sources."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from console.model.snapshot import Snapshot
from console.ui.header import Header
from console.ui.panel import Panel
from console.ui.spans import SpanCompositor


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
        self._panel.focus()

    def draw(self, snapshot: Snapshot) -> None:
        self._header.draw(snapshot)
        self._panel.draw(snapshot)
