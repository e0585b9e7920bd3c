"""Numbers as an operator reads them. Unknown is a dash, never a zero."""

from __future__ import annotations

GIB = 1024**3

UNKNOWN = "–"


def gib(size: int | None, digits: int = 1) -> str:
    """Bytes as GiB without the unit: ``88.1``."""
    return UNKNOWN if size is None else f"{size / GIB:.{digits}f}"


def size(count: int | None) -> str:
    """Bytes with their unit, three figures: ``358 GiB``."""
    if count is None:
        return UNKNOWN
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def count(amount: float | None) -> str:
    """A count in at most four characters and a letter: ``812``, ``12.4k``, ``1.02M``."""
    if amount is None:
        return UNKNOWN
    if amount < 1000:
        return f"{amount:.0f}"
    for letter in ("k", "M", "G"):
        amount /= 1000
        if amount < 999.5:
            return f"{amount:.3g}{letter}"
    return f"{amount:.3g}T"


def rate(amount: float | None) -> str:
    """Tokens per second: one decimal below ten."""
    if amount is None:
        return UNKNOWN
    return f"{amount:.1f}" if amount < 10 else count(amount)


def percent(ratio: float | None, digits: int = 0) -> str:
    """A ratio of 0..1 as ``43%``."""
    return UNKNOWN if ratio is None else f"{ratio * 100:.{digits}f}%"


def latency(seconds: float | None) -> str:
    """``21ms``, ``0.41s``, ``12s``, ``2m05``."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    return f"{seconds:.0f}s" if seconds < 99.5 else span(seconds)


def span(seconds: float | None) -> str:
    """A duration in two units: ``48s``, ``9m45``, ``3h12``, ``12d4h``."""
    if seconds is None:
        return UNKNOWN
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02}"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours}h"


def about(seconds: float) -> str:
    """A duration that is only judged, no more exact than it is known: ``45s``, ``4m30``, ``12m``."""
    for limit, step in ((30, 5), (120, 10), (600, 30)):
        if seconds < limit:
            return _short(max(5, step * round(seconds / step)))
    return _short(60 * round(seconds / 60))


def _short(seconds: int) -> str:
    told = span(seconds)
    return told.removesuffix("00") if seconds < 3600 and seconds >= 60 else told
