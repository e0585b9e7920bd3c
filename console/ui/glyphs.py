"""The characters that draw bars, marks and rules, for a UTF-8 terminal and for any other."""

from __future__ import annotations

import msgspec
from rich.cells import cell_len


class Glyphs(msgspec.Struct, frozen=True):
    """One set. Every state has its own mark, so that colour is never the only sign."""

    bar: str
    bar_half: str
    bar_rest: str
    rule: str
    dot: str
    warn: str
    bad: str
    idle: str
    work: str
    ellipsis: str
    separator: str
    remedy: str
    back: str  # a step that was taken back
    more: str  # there is more below
    plot: str  # plotext's marker
    home: str  # the way opposite to remedy's


UNICODE = Glyphs("━", "╸", "─", "─", "●", "▲", "✖", "○", "◐", "…", "·", "→", "↶", "▾", "braille", "←")
ASCII = Glyphs("=", "-", ".", "-", "*", "!", "X", "o", "~", "~", "|", ">", "<", "v", "*", "<")

_PLAIN = {
    "·": "|",
    "…": "~",
    "×": "x",
    "–": "-",
    "—": "-",
    "’": "'",
    "°": " ",
    "→": ">",
    "←": "<",
    "↶": "<",
    "▾": "v",
    "“": '"',
    "”": '"',
    "●": "*",
    "╭": "+",
    "╮": "+",
    "╯": "+",
    "╰": "+",
    "━": "=",
    "▔": "-",
    "▁": "_",
    "█": "#",
    "▌": "|",
    "▐": "|",
    "▎": "|",
    "▊": "|",
    "─": "-",
    "┤": "|",
    "│": "|",
    "└": "+",
    "┬": "+",
    "┴": "+",
    "├": "|",
    "┌": "+",
    "┐": "+",
    "┘": "+",
    "✓": "v",
    "σ": "s",
}


def choose(encoding: str | None) -> Glyphs:
    """By the encoding of the terminal's output."""
    return UNICODE if (encoding or "").lower().replace("-", "") == "utf8" else ASCII


def plain(text: str) -> str:
    """The text in ASCII and in as many cells: known signs by their likeness, any other by ``?``."""
    if text.isascii():
        return text
    return "".join(one if one.isascii() else _PLAIN.get(one) or "?" * cell_len(one) for one in text)
