"""Two charts over the same window: tokens a second, and accept length or, without speculation, prefill."""

from __future__ import annotations

from typing import ClassVar

from console.model import words
from console.model.snapshot import Snapshot
from console.ui.panel import Panel
from console.ui.plot import bucketed, ceiling, plot, window_for
from console.ui.rows import Row, Span, fit, heading

_AXIS = 6
_GAP = 2


class Charts(Panel):
    """Side by side from 56 cells on; below that, tokens a second alone."""

    TITLE = "TOKENS/S"
    HELP: ClassVar[str] = (
        "Left: generated tokens a second. Right: tokens per verify step of speculative decoding;\n"
        "1 gains nothing, the top is the draft's steps plus one. Without speculation the right one\n"
        "shows the prompt tokens computed a second instead. Both over the window on the axis,\n"
        "as means of full buckets of 5 s or more. A gap is time without a reading, not a zero."
    )

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._drawn: tuple[object, ...] = ()
        self._lines: tuple[list[str], list[str]] = ([], [])
        #: The first frame is painted before plotext is imported.
        self.ready = False

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        two = width >= 56
        left = (width - _GAP) // 2 if two else width
        right = width - _GAP - left
        first = heading(self.TITLE, self._rate_note(snapshot), left, self.glyphs)
        if two:
            second = heading(*_second(snapshot), right, self.glyphs)
            first = [*fit(first, left), Span(" " * _GAP), *second]
        rows = [first]
        if height < 4 or not self.ready:
            return rows
        rates, accepts = self._plots(snapshot, left, right, height - 1, two)
        for index in range(height - 1):
            row: Row = [Span(f"{rates[index] if index < len(rates) else '':<{left}}", "bar")]
            if two:
                row += [
                    Span(" " * _GAP),
                    Span(f"{accepts[index] if index < len(accepts) else '':<{right}}", "bar-second"),
                ]
            rows.append([span for part in row for span in _axis(part, self.glyphs.plot)])
        return rows

    def _plots(
        self, snapshot: Snapshot, left: int, right: int, height: int, two: bool
    ) -> tuple[list[str], list[str]]:
        """Drawn anew only when a bucket has filled or the room has changed."""
        window, bucket = window_for(left - _AXIS)
        steps = snapshot.identity.speculative_steps if snapshot.identity is not None else None
        # The journal's past may be put before what is there already.
        begins = int(snapshot.history[0].at // bucket) if snapshot.history else None
        prefill = not _speculates(snapshot)
        drawn = (int(snapshot.now // bucket), begins, steps, prefill, left, right, height)
        if drawn == self._drawn:
            return self._lines
        columns = window // bucket

        def drawing(
            values: list[tuple[float, float | None]], across: int, low: float, high: float
        ) -> list[str]:
            means = bucketed(values, bucket, columns, snapshot.now)
            if all(mean is None for mean in means):
                return []  # a scale without a curve would be made up
            top = high if low else ceiling(means, high)
            return plot(
                means, width=across, height=height, low=low, high=top, bucket=bucket, glyphs=self.glyphs
            )

        points = snapshot.history
        rates = drawing([(point.at, point.decode_tokens_per_s) for point in points], left, 0.0, 10.0)
        second: list[str] = []
        if two and prefill:
            second = drawing([(point.at, point.prefill_tokens_per_s) for point in points], right, 0.0, 10.0)
        elif two:
            accepts = [(point.at, point.accept_length) for point in points]
            second = drawing(accepts, right, 1.0, _most_accepted(snapshot))
        self._lines = (rates, second)
        self._drawn = drawn
        return self._lines

    def _rate_note(self, snapshot: Snapshot) -> Row:
        rates = snapshot.rates.current(snapshot.now)
        return [Span(words.rate(None if rates is None else rates.decode_tokens_per_s), "bar")]


def _speculates(snapshot: Snapshot) -> bool:
    """True unless the engine says that it does not."""
    rates = snapshot.rates.value
    return rates is None or "off" not in rates.missing.get("accept_length", "")


def _most_accepted(snapshot: Snapshot) -> float:
    """Tokens per verify step when every draft is right: the steps and the one the model adds."""
    steps = snapshot.identity.speculative_steps if snapshot.identity is not None else None
    if steps is not None:
        return float(steps + 1)
    return ceiling([point.accept_length for point in snapshot.history], 2.0)


def _second(snapshot: Snapshot) -> tuple[str, Row]:
    """Name and newest value of the right chart."""
    rates = snapshot.rates.current(snapshot.now)
    if not _speculates(snapshot):
        value = words.rate(None if rates is None else rates.prefill_tokens_per_s)
        return "PREFILL TOKENS/S", [Span(value, "bar-second")]
    if rates is None or rates.accept_length is None:
        return "ACCEPT LENGTH", [Span(words.UNKNOWN, "dim")]
    return "ACCEPT LENGTH", [Span(f"{rates.accept_length:.2f}", "bar-second")]


def _axis(span: Span, marker: str) -> list[Span]:
    """The axis in a quiet colour, the curve in its own."""
    for sign in ("┤", "│"):
        start = span.text.find(sign, 0, _AXIS + 2)
        if start >= 0:
            return [Span(span.text[: start + 1], "dim"), Span(span.text[start + 1 :].rstrip("│"), span.role)]
    return [Span(span.text, "dim" if "now" in span.text else span.role)]
