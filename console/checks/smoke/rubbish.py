"""Recognises text that no healthy model writes: one sign or word over and over, lost bytes, a wrong script.

Broken kernels show so while the server answers 200: ``!!!!`` comes from NaN logits (token 0 is ``!`` in
many vocabularies), ``++++`` was seen with NVFP4 on SM120 (sgl-project/sglang#24321).
"""

from __future__ import annotations

import re
from itertools import groupby

#: Signs that people put in a row: rules, dots, table borders.
_RULES = frozenset("-=_.*#~ \n")

_RUN = 16  # of one sign; words and numbers never have so many
_WORD_RUN = 6
_LONGEST_PERIOD = 24  # characters
_PERIODIC = 0.92  # of the text
_ENOUGH = 40  # characters, below which a period proves nothing
_WORDS_ENOUGH = 24
_DISTINCT = 0.2
_FOREIGN = 0.3  # of the letters


def rubbish(text: str, *, latin: bool = False, cut: bool = False) -> str | None:
    """Why the text is rubbish, in words; None when nothing is wrong with it. An empty text is not judged.

    ``latin``: it was asked in English for English, so most letters should be Latin ones. ``cut``: a limit of
    tokens ended it, which may fall between the bytes of the last letter; that one was not lost.
    """
    if cut:
        text = text.removesuffix("\ufffd")
    signs = "".join(text.split())
    if not signs:
        return None
    if "\ufffd" in text:
        return f"{text.count(chr(0xFFFD))} replacement characters: bytes of the text were lost"
    if len(signs) >= 4 and len(set(signs)) == 1 and not signs.isdigit():
        return f"nothing but {signs[0]!r}"
    sign, run = max(((one, len(list(same))) for one, same in groupby(signs)), key=lambda pair: pair[1])
    if run >= _RUN and sign not in _RULES:
        return f"{sign!r} {run} times in a row"
    words = text.split()
    word, run = max(((one, len(list(same))) for one, same in groupby(words)), key=lambda pair: pair[1])
    if run >= _WORD_RUN:
        return f"the word {word[:20]!r} {run} times in a row"
    period = _period(signs)
    if period is not None:
        return f"the same {period} characters over and over: {signs[:period]!r}"
    if len(words) >= _WORDS_ENOUGH and len(set(words)) / len(words) < _DISTINCT:
        return f"only {len(set(words))} different words among {len(words)}"
    return _script(text) if latin else None


def _period(signs: str) -> int | None:
    """The length of a pattern that nearly the whole text repeats."""
    if len(signs) < _ENOUGH:
        return None
    for period in range(1, min(_LONGEST_PERIOD, len(signs) // 3) + 1):
        same = sum(one == other for one, other in zip(signs, signs[period:], strict=False))
        if same >= _PERIODIC * (len(signs) - period):
            return period
    return None


def _script(text: str) -> str | None:
    letters = [one for one in text if one.isalpha()]
    foreign = [one for one in letters if not re.match(r"[A-Za-z\u00c0-\u024f]", one)]
    if letters and len(foreign) > _FOREIGN * len(letters):
        share = 100 * len(foreign) // len(letters)
        return f"{share} % of the letters are not Latin, though the question is English"
    if len(text) >= _ENOUGH and len(letters) < 0.3 * len("".join(text.split())):
        return "hardly any letters, though a sentence was asked for"
    return None
