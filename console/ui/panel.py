"""The widget that every panel is: rows of text, of which only the cells that changed are repainted."""

from __future__ import annotations

from itertools import groupby
from typing import ClassVar
from unicodedata import category

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from console.model.snapshot import Snapshot
from console.model.text import clean
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.rows import Row, Span, fit, width_of

#: Cells that did not change, but cost less to repaint than to jump over.
_JUMP = 6

_ROLES = (
    "text",
    "dim",
    "title",
    "part",
    "rule",
    "good",
    "warn",
    "bad",
    "accent",
    "bar",
    "bar-second",
    "rest",
    "key",
    "block-good",
    "block-warn",
    "block-bad",
    "block-idle",
)


class Panel(Widget, can_focus=True):
    """Rows in, strips out. Subclasses say what their rows are in ``rows``."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"panel--{role}" for role in _ROLES}
    #: What ``?`` says while the panel has the focus.
    HELP: ClassVar[str] = ""
    TITLE: ClassVar[str] = ""

    def __init__(self, glyphs: Glyphs = UNICODE, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.glyphs = glyphs
        self.snapshot: Snapshot | None = None
        self._rows: list[Row] = []
        self._strips: list[Strip] = []
        self._drawn_for = Size(0, 0)
        self._role_styles: dict[str, Style] = {}

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        """What to show in ``width`` by ``height`` cells; at most ``height`` rows."""
        raise NotImplementedError

    def draw(self, snapshot: Snapshot) -> None:
        """Show this snapshot, repainting what differs from the one before."""
        self.snapshot = snapshot
        if self.size.width and self.size.height:
            self._show(self.rows(snapshot, self.size.width, self.size.height))

    def redraw(self) -> None:
        """Show the snapshot at hand again, after something else changed."""
        if self.snapshot is not None:
            self.draw(self.snapshot)

    def on_resize(self) -> None:
        self._rows, self._strips = [], []
        self.redraw()
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._role_styles.clear()
        self._strips = [self._strip(row) for row in self._rows]

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.size.width, self._style("text"))

    def _show(self, rows: list[Row]) -> None:
        width, height = self.size
        fitted = [fit(printable(row), width) for row in rows[:height]]
        fitted += [[Span(" " * width)] for _ in range(height - len(fitted))]
        if self._drawn_for != self.size or len(self._rows) != len(fitted):
            self._drawn_for = self.size
            self._rows = fitted
            self._strips = [self._strip(row) for row in fitted]
            self.refresh()
            return
        changed: list[Region] = []
        for y, (old, new) in enumerate(zip(self._rows, fitted, strict=True)):
            if old != new:
                changed += [Region(start, y, end - start, 1) for start, end in differences(old, new, width)]
                self._strips[y] = self._strip(new)
        self._rows = fitted
        if changed:
            self.refresh(*changed)

    def _strip(self, row: Row) -> Strip:
        # Neighbours in one role become one run: each run costs an escape sequence.
        runs = (
            ("".join(span.text for span in spans), role)
            for role, spans in groupby(row, key=lambda span: span.role)
        )
        return Strip([Segment(text, self._style(role)) for text, role in runs], self.size.width)

    def _style(self, role: str) -> Style:
        found = self._role_styles.get(role)
        if found is None:
            found = self._role_styles[role] = self.get_component_rich_style(f"panel--{role}")
        return found


def printable(row: Row) -> Row:
    """The row without anything a terminal would act upon, wherever its text came from."""
    if all(span.text.isprintable() for span in row):
        return row
    return [span if span.text.isprintable() else Span(_safe(span.text), span.role) for span in row]


def _safe(text: str) -> str:
    """Also without format characters (soft hyphens, tags): terminals do not agree on their width."""
    return "".join(one for one in clean(text) if category(one) != "Cf")


def differences(old: Row, new: Row, width: int) -> list[tuple[int, int]]:
    """Half-open runs of cells in which two rows of ``width`` cells differ, near ones joined."""
    # Most of a row stays: what is the same at both ends is not looked at cell by cell.
    head = 0
    for one, other in zip(old, new, strict=False):
        if one != other:
            break
        head += 1
    tail = 0
    for one, other in zip(reversed(old[head:]), reversed(new[head:]), strict=False):
        if one != other:
            break
        tail += 1
    left, right = width_of(old[:head]), width_of(old[len(old) - tail :])
    before, after = _cells(old[head : len(old) - tail]), _cells(new[head : len(new) - tail])
    if len(before) != width - left - right or len(after) != len(before):
        return [(0, width)]  # wide characters: cells and characters do not line up
    found: list[tuple[int, int]] = []
    for x, (was, now) in enumerate(zip(before, after, strict=True), left):
        if was == now:
            continue
        if found and x - found[-1][1] <= _JUMP:
            found[-1] = (found[-1][0], x + 1)
        else:
            found.append((x, x + 1))
    return found


def _cells(row: Row) -> list[tuple[str, str]]:
    if any(len(span.text) != cell_len(span.text) for span in row):
        return []
    return [(character, span.role) for span in row for character in span.text]
