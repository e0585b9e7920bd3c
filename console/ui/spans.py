"""A compositor that sends only the cells that changed.

Textual's own partial update repaints each touched line from the edge of its
widget up to the change (textual 8.2, ``ChopsUpdate``); over a slow SSH link that
is most of the traffic of a table in which a few numbers move.
"""

from __future__ import annotations

from typing import cast

from rich.console import Console
from rich.control import Control
from textual._compositor import ChopsUpdate, Compositor
from textual.screen import Screen


class SpanUpdate(ChopsUpdate):
    """The changed spans of a screen, cut at both ends."""

    def render_segments(self, console: Console) -> str:
        sent: list[str] = []
        for y, left, right in self.spans:
            for end, (x, strip) in zip(self.chop_ends[y], self.chops[y].items(), strict=False):
                start, stop = max(x, left), min(end, right)
                if strip is None or start >= stop:
                    continue
                sent.append(Control.move_to(start, y).segment.text)
                sent.append(strip.crop(start - x, stop - x).render(console))
        return "".join(sent)


class SpanCompositor(Compositor):
    """Textual's compositor with the economical partial update."""

    def render_partial_update(self) -> ChopsUpdate | None:
        update = super().render_partial_update()
        if update is None:
            return None
        return SpanUpdate(update.chops, update.spans, update.chop_ends)


class SpanScreen(Screen[None]):
    """A screen that is composed by ``SpanCompositor``."""

    def __init__(self) -> None:
        super().__init__()
        self._compositor = cast("Compositor", SpanCompositor())
