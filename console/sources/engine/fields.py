"""Reading JSON that another program wrote: a field of the wrong kind is a field that is not there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec


def parse_json(body: bytes) -> Any:
    """The value, or None when the bytes are no JSON (nested past any sense included)."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def text(value: Any) -> str | None:
    """A string with something in it."""
    return value if isinstance(value, str) and value.strip() else None


def number(value: Any) -> float | None:
    """A finite number that is not negative; nothing the engine counts is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found + 0.0 if math.isfinite(found) and found >= 0 else None  # the sum turns -0.0 into 0.0


def integer(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)
