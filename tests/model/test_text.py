"""Nothing that a terminal acts upon survives ``clean``."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.text import clean


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[1;33mdeprecated\x1b[0m", "deprecated"),
        ("\x1b]0;new title\x07after", "after"),
        ("\x1b]52;c;ZXZpbA==\x1b\\after", "after"),
        ("\x1bP+q544e\x1b\\after", "after"),
        ("one\ntwo\tthree", "one two three"),
        ("a\u202egnp.exe", "agnp.exe"),
        ("a\x9b31mred", "a31mred"),
        ("温度 ✓", "温度 ✓"),
        ("unfinished \x1b", "unfinished "),
        ("unfinished \x1b[12", "unfinished 12"),
        ("\ud800 lone", " lone"),
    ],
)
def test_known_tricks(raw: str, shown: str) -> None:
    assert clean(raw) == shown


@given(st.text())
def test_no_control_or_format_tricks_survive(text: str) -> None:
    shown = clean(text)
    assert not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in shown)
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
    assert clean(shown) == shown
    shown.encode()
