"""A compositor that sends only the cells that changed, in as few bytes as a terminal needs.

Textual's own partial update (textual 8.2, ``ChopsUpdate``) repaints each touched
line from the edge of its widget up to the change, and gives every run of cells its
whole style and a reset. Over a slow SSH link that is most of the traffic of a
table in which a few numbers move.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, cast

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, Compositor
from textual.screen import Screen
from textual.strip import Strip

#: Levels of the 6x6x6 cube of the 256-colour palette (xterm, ctlseqs "Indexed colours").
_CUBE = (0, 95, 135, 175, 215, 255)

RESET = "\x1b[0m"


class Look(NamedTuple):
    """A style as SGR parameters, by what they set."""

    attributes: str
    foreground: str
    background: str


PLAIN = Look("", "", "")


@lru_cache(1024)
def look_of(style: Style | None, system: ColorSystem | None) -> Look:
    """The parameters that Rich gives a style, sorted by what they set."""
    if style is None or system is None:
        return PLAIN
    words = style._make_ansi_codes(system).split(";")
    attributes: list[str] = []
    foreground = background = ""
    while words and words[0]:
        word = words.pop(0)
        if word in ("38", "48"):
            wide = 1 if words[0] == "5" else 3
            rest, words = words[: wide + 1], words[wide + 1 :]
            colour = f"{word};{_indexed(rest)}"
            if word == "38":
                foreground = colour
            else:
                background = colour
        elif len(word) == 2 and word[0] in "39" and word[1] in "012345679":
            foreground = word
        elif word[:-1] in ("4", "10") and len(word) > 1:
            background = word
        else:
            attributes.append(word)
    # 39 and 49 ask for the terminal's own colours, as no colour at all does.
    return Look(
        ";".join(attributes),
        "" if foreground == "39" else foreground,
        "" if background == "49" else background,
    )


def _indexed(words: list[str]) -> str:
    """``2;r;g;b`` as the shorter ``5;n`` where the 256-colour palette holds that very colour."""
    if words[0] != "2":
        return ";".join(words)
    red, green, blue = map(int, words[1:])
    if red in _CUBE and green in _CUBE and blue in _CUBE:
        return f"5;{16 + 36 * _CUBE.index(red) + 6 * _CUBE.index(green) + _CUBE.index(blue)}"
    if red == green == blue and 8 <= red <= 238 and (red - 8) % 10 == 0:
        return f"5;{232 + (red - 8) // 10}"
    return ";".join(words)


def change(old: Look, new: Look) -> str:
    """The shortest sequence that turns one look into the other."""
    if old == new:
        return ""
    if (
        old.attributes != new.attributes
        or (old.foreground and not new.foreground)
        or (old.background and not new.background)
    ):
        return f"\x1b[{';'.join(['0', *filter(None, new)])}m"
    words = []
    if old.foreground != new.foreground:
        words.append(new.foreground)
    if old.background != new.background:
        words.append(new.background)
    return f"\x1b[{';'.join(words)}m"


def cut(strip: Strip, start: int, stop: int) -> Iterator[tuple[str, Style | None]]:
    """Cells ``start`` to ``stop`` of a strip, without a new Strip: its caches cost more than its text."""
    at = 0
    for text, style, _ in strip:
        cells = cell_len(text)
        left, right = max(0, start - at), min(cells, stop - at)
        at += cells
        if left >= right:
            continue
        if (left, right) == (0, cells):
            yield text, style
        elif cells == len(text):
            yield text[left:right], style
        else:  # wide characters: only Rich knows where they may be cut
            piece = Segment(text, style).split_cells(left)[1] if left else Segment(text, style)
            yield piece.split_cells(right - left)[0].text, style


class SpanUpdate(ChopsUpdate):
    """The changed spans of a screen, cut at both ends."""

    def render_segments(self, console: Console) -> str:
        system = console._color_system
        sent: list[str] = []
        look = PLAIN
        for y, left, right in self.spans:
            for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                start, stop = max(x, left), min(end, right)
                if strip is None or start >= stop:
                    continue
                sent.append(f"\x1b[{y + 1};{start + 1}H")
                for text, style in cut(strip, start - x, stop - x):
                    wanted = look_of(style, system)
                    sent.append(change(look, wanted))
                    sent.append(text)
                    look = wanted
        if look != PLAIN:
            sent.append(RESET)
        return "".join(sent)


class SpanCompositor(Compositor):
    """Textual's compositor with the economical partial update."""

    def render_partial_update(self) -> ChopsUpdate | None:
        update = super().render_partial_update()
        if update is None:
            return None
        return SpanUpdate(update.chops, update.spans, update.chop_ends)


class SpanScreen(Screen[None]):
    """A screen that is composed by ``SpanCompositor``."""

    def __init__(self) -> None:
        super().__init__()
        self._compositor = cast("Compositor", SpanCompositor())
