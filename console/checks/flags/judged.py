"""One thing said of a profile, before it has its place in the file; and lines of YAML that mend it."""

from __future__ import annotations

import json
import re
from typing import Literal

import msgspec

from console.model.command_line import hidden
from console.model.finding import Verdict
from console.model.profile import FlagValue

Section = Literal["args", "env", "sglang"]

#: Texts that YAML reads as they stand; others get quotes.
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@%+=-]*(:[A-Za-z0-9_./@%+=-]+)*")
_NOT_TEXT = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})

#: A value is quoted in a message up to this many characters.
_QUOTED = 60


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """``section`` and ``name`` are where in the profile it stands; ``name`` None: nowhere yet."""

    id: str
    title: str
    verdict: Verdict
    evidence: str
    remedy: str | None = None
    section: Section = "args"
    name: str | None = None


def argument_line(flag: str, value: FlagValue) -> str:
    """``tp-size: 8``, as it stands below ``args:`` in a profile."""
    value = hidden(flag, value)
    if isinstance(value, bool):
        return f"{flag}: {'true' if value else 'false'}"
    if isinstance(value, tuple):
        return f"{flag}: [{', '.join(map(_scalar, value))}]"
    return f"{flag}: {_scalar(value)}"


def variable_line(name: str, value: str) -> str:
    """``NCCL_PROTO: LL``, as it stands below ``env:`` in a profile."""
    return f"{name}: {_scalar(str(hidden(name, value)))}"


def quoted(flag: str, value: FlagValue) -> str:
    """A value as a message shows it: no key, not too long, on one line."""
    value = hidden(flag, value)
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    text = text if len(text) <= _QUOTED else text[: _QUOTED - 1] + "…"
    return json.dumps(text, ensure_ascii=False) if not _PLAIN.fullmatch(text) else text


def _scalar(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return json.dumps(text, ensure_ascii=False)
