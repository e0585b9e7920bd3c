"""Rows of text with roles, and how a row is fitted to its width. Pure: no screen is needed to test it."""

from __future__ import annotations

from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from console.ui.glyphs import Glyphs


class Span(NamedTuple):
    """Text in one role. Roles are the component classes of ``Panel`` and get their colour in styles/."""

    text: str
    role: str = "text"


Row = list[Span]


def width_of(row: Row) -> int:
    return sum(cell_len(span.text) for span in row)


def fit(row: Row, width: int) -> Row:
    """The row in exactly ``width`` cells: cut at the end, or filled with blanks."""
    fitted: Row = []
    left = width
    for span in row:
        if left <= 0:
            break
        cells = cell_len(span.text)
        if cells > left:
            fitted.append(Span(set_cell_size(span.text, left), span.role))
            left = 0
        elif cells:
            fitted.append(span)
            left -= cells
    if left > 0:
        fitted.append(Span(" " * left, "text"))
    return fitted


def spread(left: Row, right: Row, width: int) -> Row:
    """``left`` at the left edge and ``right`` at the right one; the left gives way."""
    room = max(0, width - width_of(right))
    return [*fit(left, room), *right]


def clip(text: str, width: int, glyphs: Glyphs) -> str:
    """At most ``width`` cells; a cut is marked."""
    if cell_len(text) <= width:
        return text
    return "" if width <= 0 else set_cell_size(text, width - 1) + glyphs.ellipsis


def bar(ratio: float | None, width: int, glyphs: Glyphs, role: str = "bar") -> Row:
    """A bar of ``width`` cells, drawn in half cells. Unknown is an empty bar in its own role."""
    if ratio is None or width <= 0:
        return [Span(" " * width, "dim")]
    halves = round(min(1.0, max(0.0, ratio)) * width * 2)
    if ratio > 0 and halves == 0:
        halves = 1
    full, half = divmod(halves, 2)
    filled = glyphs.bar * full + glyphs.bar_half * half
    return [Span(filled, role), Span(glyphs.bar_rest * (width - full - half), "rest")]


def heading(title: str, note: Row, width: int, glyphs: Glyphs, role: str = "title") -> Row:
    """A panel's first row, or that of a ``part`` of it: its name, a note, and a rule to the edge."""
    row: Row = [Span(title, role), Span(" ", "text"), *note]
    room = width - width_of(row) - 1
    if room > 0:
        row += [Span(" ", "text"), Span(glyphs.rule * room, "rule")]
    return row
