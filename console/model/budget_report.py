"""The memory budget in lines of text, for a terminal without a screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from console.model import words
from console.model.budget import Budget
from console.model.card_memory import CardMemory, Kind
from console.model.kv import FOUR_BITS, ITEM_BYTES, KvGeometry
from console.model.report import WIDTH, Line, finding_lines
from console.model.words import gib

_COLUMNS: tuple[tuple[str, Kind], ...] = (
    ("weights", "weights"),
    ("draft", "draft"),
    ("KV", "kv"),
    ("state", "state"),
    ("graphs", "graphs"),
    ("work", "workspace"),
    ("others", "others"),
    ("rest", "unaccounted"),
)


def budget_lines(budget: Budget) -> tuple[Line, ...]:
    """The answer first, then the cards, the arithmetic, and what was found."""
    return tuple(
        line
        for part in (
            _wrapped(budget.answer),
            _about(budget),
            _cards(budget.cards),
            _arithmetic(budget),
            [Line("")],
            finding_lines(budget.findings),
        )
        for line in part
    )


def formula(geometry: KvGeometry, dtype: str) -> str:
    """How the bytes of a token come about, in the model's own numbers."""
    item = "½ B and its scale" if dtype in FOUR_BITS else f"{ITEM_BYTES.get(dtype, 1)} B"
    layers = f"{geometry.attention_layers} layers"
    if geometry.attention_layers < geometry.layers:
        layers = f"{geometry.attention_layers} full-attention layers of {geometry.layers}"
    if geometry.attention == "mla":
        return (
            f"MLA: ({geometry.kv_lora_rank} + {geometry.rope_dim}) × {layers} × {item}; "
            "whole on every rank, not divided by TP"
        )
    return (
        f"GQA: {geometry.kv_heads} KV heads over the ranks, at least one on each, "
        f"× ({geometry.head_dim} + {geometry.v_head_dim}) × {layers} × {item}"
    )


def _about(budget: Budget) -> Iterator[Line]:
    told = []
    if budget.name is not None:
        told.append(f"profile {budget.name}")
    if budget.model_path is not None:
        told.append(budget.model_path)
    if budget.version is not None:
        told.append(f"SGLang {budget.version}")
    if told:
        yield from _wrapped(", ".join(told), "dim")


def _cards(cards: tuple[CardMemory, ...]) -> Iterator[Line]:
    if not cards:
        return
    shown = [(name, kind) for name, kind in _COLUMNS if any(present(card, kind) for card in cards)]
    names = "".join(f"{name:>8}" for name, _ in shown)
    yield Line("")
    yield Line("GiB on each card now; work: CUDA, NCCL, activations; rest: named by nobody", "dim")
    yield Line(f"{'#':>2}{'in use':>7}{names}{'free':>7}", "dim")
    for card in cards:
        cells = "".join(f"{gib(card.size(kind), 2):>8}" for _, kind in shown)
        warned = bool(card.size("others")) or card.used is None
        row = f"{card.index:>2}{gib(card.used, 1):>7}{cells}{gib(card.free, 1):>7}"
        yield Line(row, "warn" if warned else "plain")


def present(card: CardMemory, kind: Kind) -> bool:
    """Whether there is anything to say of this kind: a size, or that it is not known."""
    return kind in card.unknown or bool(card.size(kind))


def _arithmetic(budget: Budget) -> Iterator[Line]:
    if budget.geometry is None or budget.dtype is None or budget.token_bytes is None:
        return
    yield Line("")
    yield from _wrapped(f"{cell_words(budget)} a token on each card, {budget.dtype}")
    yield from _wrapped(formula(budget.geometry, budget.dtype), "dim")


def cell_words(budget: Budget) -> str:
    """``70,272 B``, or ``70,272 + 1,152 B (draft)`` where a draft is charged with it."""
    cell, plan = budget.token_bytes, budget.plan
    if cell is None:
        return words.UNKNOWN
    if plan is not None and plan.draft_cell and plan.charged is not False:
        may = "" if plan.charged else "perhaps "
        return f"{plan.target_cell:,} + {may}{plan.draft_cell:,} B (draft)"
    return f"{cell.low:,} B"


def _wrapped(text: str, tone: str = "plain") -> Iterator[Line]:
    for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False):
        yield Line(line, "dim" if tone == "dim" else "plain")
