"""Charts as text, drawn by plotext. Pure: points in, lines out."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from console.ui.glyphs import Glyphs

#: Windows in seconds, each with its bucket: a chart moves only when a bucket is full.
WINDOWS = ((120, 5), (300, 5), (600, 5), (900, 10), (1800, 15))

_AXIS = 6  # cells for the numbers of the y axis


def window_for(columns: int) -> tuple[int, int]:
    """The longest window, and its bucket, of which ``columns`` cells can show every bucket.

    A braille cell is two points wide.
    """
    fitting = [one for one in WINDOWS if one[0] / one[1] <= 2 * columns]
    return max(fitting, default=WINDOWS[0])


def bucketed(
    points: Sequence[tuple[float, float | None]], bucket: int, columns: int, now: float
) -> list[float | None]:
    """Means per full bucket, oldest first; the bucket under way is left out, a gap stays None."""
    last = math.floor(now / bucket)
    sums: dict[int, list[float]] = {}
    for at, value in points:
        if value is not None:
            sums.setdefault(math.floor(at / bucket), []).append(value)
    wanted = range(last - columns, last)
    return [sum(sums[one]) / len(sums[one]) if one in sums else None for one in wanted]


def ceiling(values: Sequence[float | None], least: float) -> float:
    """A round number at or above every value, so that the scale rarely changes."""
    top: float = max([value for value in values if value is not None], default=0.0)
    top = max(top, least)
    step = 10 ** math.floor(math.log10(top))
    return float(next(step * factor for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * factor >= top))


def plot(
    values: Sequence[float | None],
    *,
    width: int,
    height: int,
    low: float,
    high: float,
    bucket: int,
    glyphs: Glyphs,
) -> list[str]:
    """Lines of exactly ``width`` cells: y axis with its numbers, the curve, the window below."""
    figure = _plotext().figure
    figure.clear.all()
    figure.theme("colorless")
    figure.plot_size(width, height)
    figure.axes(False, axis=0)
    xs = [index for index, value in enumerate(values) if value is not None]
    if xs:
        ys = [min(high, max(low, values[index] or 0.0)) for index in xs]
        for start, stop in _runs(xs):
            signal = figure.signal(xs[start:stop], ys[start:stop], marker=glyphs.plot)
            figure.draw(signal.lines() if stop - start > 1 else signal)
    else:
        figure.draw(figure.signal([0], [low], marker=" "))
    across, up = figure.ruler(0), figure.ruler(1)
    across.lim(0, max(1, len(values) - 1))
    up.lim(low, high)
    ticks = [low, (low + high) / 2, high] if height >= 5 else [low, high]
    up.ticks(ticks, [f"{_tick(tick):>{_AXIS - 2}}" for tick in ticks])
    last = max(1, len(values) - 1)
    whole = bucket * len(values)
    across.ticks([0, last / 2, last], [f"-{_span(whole)}", f"-{_span(whole / 2)}", "now"])
    text = figure.build().string()
    return [line.replace("\x1b[0m", "") for line in text.splitlines()]


def _runs(xs: Sequence[int]) -> list[tuple[int, int]]:
    """Slices of neighbours: a line is not drawn across a gap."""
    found, start = [], 0
    for index in range(1, len(xs) + 1):
        if index == len(xs) or xs[index] != xs[index - 1] + 1:
            found.append((start, index))
            start = index
    return found


def _tick(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}"


def _span(seconds: float) -> str:
    return f"{seconds / 60:.3g}m" if seconds >= 60 else f"{seconds:.3g}s"


def _plotext() -> Any:
    """plotext without its manual: building that takes half of its import and 3 MB (plotext 6.1)."""
    loaded = sys.modules.get("plotext")
    if loaded is None:
        manual = ModuleType("plotext._doc.doc")
        manual.docs = None  # type: ignore[attr-defined]
        sys.modules.setdefault("plotext._doc.doc", manual)
        import plotext

        loaded = plotext
    return loaded
