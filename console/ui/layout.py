"""How the rows of a terminal are shared out among the panels. Pure."""

from __future__ import annotations

import msgspec

#: From this width on, service and charts stand side by side.
WIDE = 150

#: Rows in which the service panel shows what matters of an engine at work.
USUAL = 4


class Heights(msgspec.Struct, frozen=True):
    """Rows per panel; 0 hides it."""

    cards: int
    service: int
    charts: int
    log: int
    side_by_side: bool = False


def heights(width: int, height: int, cards: int, service: int = USUAL, past: bool = True) -> Heights:
    """Shares for ``height`` rows, of which header and footer have taken theirs.

    State and cards come first, then tokens/s and accept length, then charts and log.
    ``service`` is how many rows the service panel has news for, a load or a death; beyond
    the usual four the charts give way to it, and go where they have no ``past`` to draw.
    """
    left = max(0, height)
    cards_rows = min(left, 1 + max(1, cards))
    if left - cards_rows < 4:
        cards_rows = max(0, min(cards_rows, left - 4))
    left -= cards_rows
    if width >= WIDE and left >= 14 and past:
        middle = min(16, max(9, left // 2))
        return Heights(cards_rows, middle, middle, left - middle, side_by_side=True)
    if service > USUAL:
        return _with_news(cards_rows, service, left, past)
    service = min(left, USUAL)
    left -= service
    if left < 5:
        return Heights(cards_rows, service, 0, left)
    extra = min(3, max(0, left - 16))
    service, left = service + extra, left - extra
    charts = min(12, max(5, left * 2 // 5))
    if left - charts < 3:
        charts = left - 3 if left - 3 >= 5 else 0 if left < 5 else left
    return Heights(cards_rows, service, charts, left - charts)


def _with_news(cards: int, wanted: int, left: int, past: bool) -> Heights:
    """The log keeps four rows; charts are drawn only where they cost neither of the others anything."""
    service = min(wanted, max(min(left, USUAL), left - 4))
    left -= service
    charts = 7 if past and left >= 7 + 10 else 0
    return Heights(cards, service, charts, left - charts)
