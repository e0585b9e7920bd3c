"""``d``: every source, how old its last word is, and why there is no newer one."""

from __future__ import annotations

from typing import ClassVar

from console.model import words
from console.model.snapshot import Snapshot
from console.ui.rows import Row, Span, clip, heading
from console.ui.screens.page import Scrolled

_SAYS = {
    "pci": "cards on the PCI bus (sysfs)",
    "nvml": "memory, use and health of the cards",
    "unit": "the service's unit (systemctl)",
    "journal": "the service's journal (journalctl)",
    "health": "one token through the engine (/health)",
    "models": "the served name (/v1/models)",
    "identity": "version and arguments (/server_info)",
    "rates": "tokens, queue and cache (/metrics)",
}


class SourcesPanel(Scrolled):
    """One row a source, then what the values at hand are short of."""

    TITLE = "SOURCES"
    HELP: ClassVar[str] = (
        "A value older than three periods of its source is stale: it stays on the screen, greyed,\n"
        "with its age. Below the sources: every engine value that is missing, and why."
    )

    def all_rows(self, snapshot: Snapshot, width: int) -> list[Row]:
        glyphs = self.glyphs
        rows = [heading(self.TITLE, [Span("esc back", "dim")], width, glyphs), []]
        for word in snapshot.sources:
            bad = word.stale or word.error is not None
            age = "never" if word.age_s is None else f"{words.span(word.age_s)} ago"
            mark = Span(f" {glyphs.warn if bad else glyphs.dot} ", "warn" if bad else "good")
            row: Row = [
                mark,
                Span(f"{word.name:<10}", "text"),
                Span(f"{age:<12}", "warn" if word.stale else "dim"),
                Span(f"{_SAYS.get(word.name, ''):<40}", "dim"),
            ]
            rows.append(row)
            if word.error is not None:
                rows.append([Span(" " * 13), Span(clip(word.error, max(0, width - 14), glyphs), "warn")])
        rates = snapshot.rates.value
        if rates is not None and (rates.missing or rates.notes):
            rows += [[], heading("NOT AVAILABLE", [], width, glyphs, "part")]
            for name, why in {**rates.missing, **rates.notes}.items():
                label = name.replace("_", " ")
                rows.append(
                    [Span(f"   {label:<26}", "text"), Span(clip(why, max(0, width - 30), glyphs), "dim")]
                )
        for notice in snapshot.notices:
            rows.append(
                [Span(f" {glyphs.warn} ", "warn"), Span(clip(notice, max(0, width - 4), glyphs), "warn")]
            )
        return rows
