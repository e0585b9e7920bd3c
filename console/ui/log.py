"""The log panel: the newest lines, phases marked, health probes folded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from console.model.log import LineKind, LogLine
from console.model.snapshot import Snapshot
from console.ui.glyphs import UNICODE, Glyphs
from console.ui.panel import Panel
from console.ui.rows import Row, Span, clip, heading

_ROLES: dict[LineKind, str] = {
    "plain": "text",
    "phase": "accent",
    "prefill": "dim",
    "decode": "text",
    "warning": "warn",
    "error": "bad",
    "crash": "bad",
    "noise": "dim",
    "ready": "good",
}


#: Seconds that routine lines may wait for each other.
ROUTINE_S = 5.0

_ROUTINE: frozenset[LineKind] = frozenset({"plain", "prefill", "decode", "noise"})


def line_row(line: LogLine, width: int, glyphs: Glyphs) -> Row:
    """One line with the time journald gave it; the engine's own copy of the time is left out."""
    clock = time.strftime("%H:%M:%S ", time.localtime(line.at)) if width >= 40 else ""
    text = without_stamp(line.text)
    return [Span(clock, "dim"), Span(clip(text, max(0, width - len(clock)), glyphs), _ROLES[line.kind])]


def without_stamp(text: str) -> str:
    """``[2026-11-30 00:12:40 TP0] Load…`` as ``TP0 Load…``."""
    if text.startswith("[20"):
        stamp, closed, rest = text[1:].partition("] ")
        if closed and len(stamp) >= 19 and stamp[4] == "-" and stamp[13] == ":":
            rank = stamp[19:].lstrip(".0123456789,").strip()
            return f"{rank} {rest}" if rank else rest
    return text


def folded(lines: Sequence[LogLine], wanted: int) -> tuple[list[LogLine], int]:
    """The newest ``wanted`` lines that are not noise, oldest first, and how much noise lay among them."""
    found: list[LogLine] = []
    noise = 0
    for line in reversed(lines):
        if line.kind == "noise":
            noise += 1
        elif found and line.percent is not None and _same_progress(line, found[-1]):
            continue  # a progress bar that moved: its newest line says it all
        elif len(found) < wanted:
            found.append(line)
        else:
            break
    return found[::-1], noise


def _same_progress(line: LogLine, newer: LogLine) -> bool:
    return newer.percent is not None and line.phase == newer.phase and line.rank == newer.rank


class Log(Panel):
    """The last lines of the service's journal."""

    TITLE = "LOG"
    HELP: ClassVar[str] = (
        "The service's journal, newest at the bottom, with the time journald gave each line.\n"
        "Load phases stand out; health probes and their access lines are folded into a count.\n"
        "l opens it full screen, with a filter."
    )

    def __init__(self, glyphs: Glyphs = UNICODE, *, id: str | None = None) -> None:
        super().__init__(glyphs, id=id)
        self._shown: tuple[list[LogLine], int] = ([], 0)
        self._shown_at = 0.0
        self._seen = 0
        self._room: tuple[int, int] = (0, 0)

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        lines, noise = self._held(snapshot, width, height - 1)
        note: Row = [Span(snapshot.site.service.unit, "dim")]
        if noise:
            probes = "health probe" if noise == 1 else "health probes"
            note.append(Span(f" {self.glyphs.separator} {noise} {probes} folded", "dim"))
        trouble = next(
            (word.error for word in snapshot.sources if word.name == "journal" and word.error), None
        )
        if trouble is not None:
            note = [Span(clip(trouble, max(0, width - 8), self.glyphs), "warn")]
        rows = [heading(self.TITLE, note, width, self.glyphs)]
        return rows + [line_row(line, width, self.glyphs) for line in lines]

    def _held(self, snapshot: Snapshot, width: int, wanted: int) -> tuple[list[LogLine], int]:
        """What to show: at once when something happened, else at most every ROUTINE_S.

        A log that scrolls repaints every row of its panel; batch and access lines, which
        tell what the numbers above tell, are not worth that once a second over SSH.
        """
        room = (wanted, width)
        fresh = snapshot.log_total - self._seen
        news = snapshot.log[len(snapshot.log) - min(fresh, len(snapshot.log)) :] if fresh > 0 else ()
        waited = snapshot.now - self._shown_at
        if room == self._room and waited < ROUTINE_S and all(line.kind in _ROUTINE for line in news):
            return self._shown
        self._seen, self._shown_at, self._room = snapshot.log_total, snapshot.now, room
        self._shown = folded(snapshot.log, wanted)
        return self._shown

    async def on_click(self) -> None:
        await self.app.run_action("app.do('log')")
