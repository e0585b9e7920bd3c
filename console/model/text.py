"""Makes text from outside safe to print: no escape, control or bidi characters.

Everything that reaches the terminal from a log, a process name, a unit or an
HTTP answer passes through here first.
"""

from __future__ import annotations

import re

# CSI, OSC (ended by BEL or ST), and the two-character escapes (ECMA-48 §5.3, §8.3).
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?|\x1b[ -/]*[0-~]?"
)

# C0, DEL, C1; bidi marks, embeddings, overrides and isolates; zero-width and line separators; BOM.
# Lone surrogates cannot be encoded to the terminal at all.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def clean(text: str) -> str:
    """The text on one line, without anything a terminal would act upon.

    Newlines and tabs become a space; other unsafe characters are dropped.
    """
    if text.isascii() and text.isprintable():
        return text
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    return _UNSAFE.sub(lambda found: " " if found[0] in "\n\t" else "", text)
