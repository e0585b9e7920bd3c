"""Keeps everything that is drawn within ASCII, whoever draws it: borders, the palette, input lines."""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from console.ui.glyphs import plain


class AsciiOnly(LineFilter):
    """The last step before the terminal, for one that is not UTF-8."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.text.isascii() else Segment(_plain(segment.text), segment.style)
            for segment in segments
        ]


_plain = lru_cache(1024)(plain)
