"""The first row: where, what is served, its state, and the clock."""

from __future__ import annotations

import time
from collections import Counter

from console.model import words
from console.model.snapshot import Snapshot
from console.model.state import HEALTHY, StateName
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.panel import Panel
from console.ui.rows import Row, Span, clip, fit, width_of

_BLOCKS: dict[StateName, str] = {
    "ready": "block-good",
    "busy": "block-good",
    "starting": "block-warn",
    "warming-up": "block-warn",
    "stopping": "block-warn",
    "degraded": "block-warn",
    "stopped": "block-idle",
    "unreachable": "block-bad",
    "hung": "block-bad",
    "crashed": "block-bad",
    "crash-looping": "block-bad",
}


def mark_of(name: StateName, glyphs: Glyphs) -> str:
    """A sign for the state, besides its word and colour."""
    if name in HEALTHY:
        return glyphs.dot
    if name in ("starting", "warming-up", "stopping"):
        return glyphs.work
    return {"stopped": glyphs.idle, "degraded": glyphs.warn}.get(name, glyphs.bad)


def state_block(snapshot: Snapshot, glyphs: Glyphs, width: int) -> Row:
    """The state as a coloured block, with phase and per cent while it loads; as much as fits."""
    state = snapshot.state
    mark = glyphs.idle if state.looking else mark_of(state.name, glyphs)
    role = "block-idle" if state.looking else _BLOCKS[state.name]
    text = state.words
    if len(text) + 4 > width and state.percent is not None:
        text = f"{state.name.upper()} {state.percent:.0f} %"
    return fit([Span(f" {mark} {text} ", role)], min(width, len(text) + 4))


def _time_of(snapshot: Snapshot) -> Row:
    """What belongs to the state: the time left, or for how long."""
    state = snapshot.state
    row: Row = []
    if state.eta_s is not None:
        row.append(Span(f" ready in ~{words.about(state.eta_s)}", "text"))
    elif state.elapsed_s is not None:
        row.append(Span(f" {words.span(state.elapsed_s)}", "text"))
        if state.forecast is not None and state.forecast.over_s is not None:
            row.append(Span(f", {words.span(state.forecast.over_s)} over", "warn"))
    elif state.name in (*HEALTHY, "degraded"):
        unit = snapshot.unit.value
        since = unit.started_at if unit is not None else None
        if since is not None:
            row.append(Span(f" up {words.span(snapshot.wall - since)}", "text"))
    return row


class Header(Panel, can_focus=False):
    """One row. The state comes first; where room is short the clock goes, then the cards, then the model."""

    def __init__(self, glyphs: Glyphs = UNICODE, *, id: str | None = None) -> None:
        super().__init__(glyphs, id=id)
        self.job: str | None = None  # what the job of this host is at, in a few words

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        glyphs = self.glyphs
        name: Row = [Span(" "), Span(snapshot.host, "title"), Span(" ")]
        state = state_block(snapshot, glyphs, width)
        model = self._model(snapshot)
        cards = _cards(snapshot)
        clock: Row = [Span(time.strftime("%H:%M:%S", time.localtime(snapshot.wall)), "dim"), Span(" ")]
        job: Row = [] if self.job is None else [Span(f" {glyphs.work} {self.job} ", "block-warn")]
        badges: Row = []
        for word, holds in (("simulated", snapshot.site.simulated), ("read-only", snapshot.site.read_only)):
            if holds:
                badges += [Span(f" {word} ", "block-idle"), Span(" ")]
        left: Row = [*name, *state] if width_of(name) + width_of(state) <= width else state
        right: Row = []
        room = width - width_of(left)
        since = _time_of(snapshot)
        if since and width_of(since) <= room:
            left = [*left, *since]
            room -= width_of(since)
        for part, optional in ((job, False), (model, False), (badges, False), (cards, True), (clock, True)):
            wide = width_of(part) + 2
            if part and wide <= room:
                room -= wide
                (right if optional else left).extend([Span("  "), *part])
        gap = width - width_of(left) - width_of(right)
        return [[*left, Span(" " * max(0, gap)), *right]]

    def _model(self, snapshot: Snapshot) -> Row:
        served = snapshot.served_names[0] if snapshot.served_names else None
        if served is None and snapshot.profile is not None:
            served = snapshot.profile.served_name
        return [] if served is None else [Span(clip(served, 32, self.glyphs), "accent")]


def _cards(snapshot: Snapshot) -> Row:
    """``8 CT 129`` or ``6 CT 129 · 2 VM 100``: how many cards are on which side."""
    sides = Counter(card.owner.words for card in snapshot.cards)
    row: Row = []
    for side, many in sides.most_common():
        bad = side == "lost"
        row += [Span(" · ", "dim")] if row else []
        row.append(Span(f"{many} {side}", "bad" if bad else "text"))
    return row
