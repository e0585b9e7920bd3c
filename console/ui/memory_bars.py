"""Bars of a card's memory: one colour and one letter a kind. Pure rows."""

from __future__ import annotations

from collections.abc import Sequence

from console.model.card_memory import KINDS, CardMemory, Kind
from console.model.kv_plan import KvPlan
from console.model.words import gib
from console.ui.glyphs import Glyphs
from console.ui.rows import Row, Span, clip, width_of

#: Letter, role and name of each kind. The letter stands where its colour begins: colour is not the only sign.
LOOKS: dict[Kind, tuple[str, str, str]] = {
    "weights": ("w", "bar", "weights"),
    "draft": ("d", "accent", "draft"),
    "kv": ("k", "bar-second", "KV cache"),
    "state": ("s", "bar-second", "state"),
    "graphs": ("g", "text", "graphs"),
    "workspace": ("a", "dim", "activations, buffers"),
    "others": ("o", "warn", "others"),
    "unaccounted": ("u", "warn", "unaccounted"),
}

#: A part smaller than this share of the card is not worth a cell of its own.
_LEAST = 0.002


def legend(cards: Sequence[CardMemory], width: int) -> list[Row]:
    """What the letters mean, with the GiB of each kind on a card; as many rows as it takes."""
    entries: list[Row] = []
    for kind in KINDS:
        letter, role, name = LOOKS[kind]
        sizes = [size for card in cards if (size := card.size(kind)) is not None]
        unknown = any(kind in card.unknown and card.used is not None for card in cards)
        if not unknown and not any(abs(size) >= 1024**2 for size in sizes):
            continue
        entry: Row = [Span(letter, role), Span(f" {name} ", "dim")]
        if sizes:
            low, high = gib(min(sizes)), gib(max(sizes))
            entry.append(Span(low if low == high else f"{low} to {high}", "text"))
        else:
            entry.append(Span("not known", "warn"))
        entries.append(entry)
    rows: list[Row] = [[Span(" ")]]
    for entry in entries:
        if width_of(rows[-1]) + width_of(entry) + 2 > width and len(rows[-1]) > 1:
            rows.append([Span(" ")])
        rows[-1] = [*rows[-1], *entry, Span("   ")]
    return rows


def card_bar(card: CardMemory, width: int, glyphs: Glyphs, name: str | None = None) -> Row:
    """One card: its number (or ``name``), its parts, and what is in use of what CUDA sees."""
    label = f" {card.index if name is None else name} "
    if card.used is None or card.total is None:
        why = next(iter(card.unknown.values()), "not known")
        return [Span(label, "text"), Span(clip(f"not known: {why}", width - len(label), glyphs), "warn")]
    whole = card.total - (card.reserved or 0)
    told = f" {gib(card.used):>5} of {gib(whole)}"
    parts: list[tuple[Kind, int]] = [(part.kind, part.size) for part in card.parts]
    room = max(8, width - len(label) - len(told))
    return [Span(label, "text"), *stacked(parts, whole, room, glyphs), Span(told, "text")]


def alike(cards: Sequence[CardMemory]) -> list[tuple[str, CardMemory]]:
    """Neighbours that look the same as one: ``0-7`` and the first of them."""
    runs: list[tuple[int, int, CardMemory]] = []
    for card in cards:
        if runs and _look(runs[-1][2]) == _look(card):
            runs[-1] = (runs[-1][0], card.index, runs[-1][2])
        else:
            runs.append((card.index, card.index, card))
    return [(str(first) if first == last else f"{first}-{last}", card) for first, last, card in runs]


def _look(card: CardMemory) -> object:
    return gib(card.used), [(part.kind, gib(part.size)) for part in card.parts], card.unknown


def plan_bar(plan: KvPlan, whole: int, width: int, glyphs: Glyphs, name: str = "=") -> Row:
    """The middle of an estimate, as one more card."""

    def middle(low: int, high: int) -> int:
        return (low + high) // 2

    parts: list[tuple[Kind, int]] = [("weights", middle(plan.weights.each.low, plan.weights.each.high))]
    if plan.draft_weights is not None:
        parts.append(("draft", middle(plan.draft_weights.each.low, plan.draft_weights.each.high)))
    parts.append(("kv", middle(plan.kv.low, plan.kv.high)))
    if plan.state is not None:
        parts.append(("state", middle(plan.state.low, plan.state.high)))
    taken = sum(size for _, size in parts)
    told = f" {gib(taken):>5} of {gib(whole)}"
    label = f" {name} "
    room = max(8, width - len(label) - len(told))
    return [Span(label, "text"), *stacked(parts, whole, room, glyphs), Span(told, "text")]


def stacked(parts: Sequence[tuple[Kind, int]], whole: int, width: int, glyphs: Glyphs) -> Row:
    """Parts of ``whole`` in ``width`` cells; each that counts has at least one, the rest is empty."""
    row: Row = []
    left = width
    filled = 0
    done = 0
    for kind, size in parts:
        if size <= 0 or size < _LEAST * whole or left <= 0:
            done += max(0, size)
            continue
        done += size
        end = min(width, round(width * min(done, whole) / max(1, whole)))
        cells = min(left, max(1, end - filled))
        letter, role, _ = LOOKS[kind]
        row.append(Span(letter + glyphs.bar * (cells - 1), role))
        filled += cells
        left -= cells
    if left > 0:
        row.append(Span(glyphs.bar_rest * left, "rest"))
    return row
