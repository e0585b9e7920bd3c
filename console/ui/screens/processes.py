"""``p``: who is on the cards."""

from __future__ import annotations

from typing import ClassVar

from console.model import words
from console.model.card import Holder
from console.model.snapshot import Snapshot
from console.ui.rows import Row, Span, clip, fit, heading, width_of
from console.ui.screens.page import Scrolled


class Processes(Scrolled):
    """One row a process: pid here and inside, container, unit, cards, memory, command."""

    TITLE = "PROCESSES ON THE CARDS"
    HELP: ClassVar[str] = (
        "Every process that NVML names, attributed by its cgroup. pid is this host's, inside is the\n"
        "container's own. A marked row holds a card and does not belong to the service's unit:\n"
        "its memory is what the next start will lack."
    )

    def all_rows(self, snapshot: Snapshot, width: int) -> list[Row]:
        glyphs = self.glyphs
        age = None if snapshot.holders_at is None else snapshot.now - snapshot.holders_at
        note = "not read yet" if age is None else f"read {words.span(age)} ago"
        note += f" {glyphs.separator} esc back"
        rows = [heading(self.TITLE, [Span(note, "dim")], width, glyphs), []]
        if not snapshot.holders:
            rows.append([Span(" no process holds a card" if age is not None else " reading", "dim")])
            return rows
        index_of = {card.pci.address: card.index for card in snapshot.cards}
        rows.append(
            [
                Span(
                    f"   {'pid':>8} {'inside':>8}  {'owner':<8}{'unit':<24}{'cards':<10}{'GiB':>7}  command",
                    "dim",
                )
            ]
        )
        for holder in snapshot.holders:
            rows.append(self._row(holder, index_of, width))
        if any(holder.orphan for holder in snapshot.holders):
            told = "not of the service's unit: ends only by its own unit or by hand"
            rows += [[], [Span(f" {glyphs.warn} ", "warn"), Span(told, "dim")]]
        return rows

    def _row(self, holder: Holder, index_of: dict[str, int], width: int) -> Row:
        glyphs = self.glyphs
        role = "warn" if holder.orphan else "text"
        owner = "host" if holder.container is None else f"CT {holder.container}"
        held = sorted(index_of[address] for address in holder.memory_bytes if address in index_of)
        total = sum(size or 0 for size in holder.memory_bytes.values())
        known = any(size is not None for size in holder.memory_bytes.values())
        inside = words.UNKNOWN if holder.inner_pid is None else str(holder.inner_pid)
        row: Row = [
            Span(f" {glyphs.warn if holder.orphan else ' '} ", role),
            Span(f"{holder.pid:>8} ", role),
            Span(f"{inside:>8}  ", "dim"),
            Span(f"{owner:<8}", role),
            *fit([Span(clip(holder.unit or "no unit", 23, glyphs), role)], 24),
            Span(f"{clip(','.join(map(str, held)), 9, glyphs):<10}", role),
            Span(f"{words.gib(total) if known else words.UNKNOWN:>7}  ", role),
        ]
        room = max(0, width - width_of(row))
        return [*row, Span(clip(holder.name, room, glyphs), "text")]
