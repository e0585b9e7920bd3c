"""The memory budget as an answer: what fits, what it costs, and what is to be done about it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from console.model.card_memory import KINDS, CardMemory
from console.model.finding import Finding, Verdict, overall
from console.model.host_cache import HostCache, HostMemory, room
from console.model.kv import KvGeometry, Range
from console.model.kv_plan import KvPlan

BUDGET_SCHEMA = 1

#: ``running``: as the engine reports it. ``profile``: as reckoned for one that is not running.
Subject = Literal["running", "profile", "nothing"]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """One budget. ``kv`` and ``tokens`` are of each card; None: not known, and a finding says why."""

    subject: Subject
    wall: float  # Unix seconds at which it was read
    name: str | None = None  # the profile's
    model_path: str | None = None
    version: str | None = None
    cards: tuple[CardMemory, ...] = ()
    geometry: KvGeometry | None = None
    dtype: str | None = None
    token_bytes: Range | None = None
    tokens: Range | None = None
    kv: Range | None = None
    context_length: int | None = None
    max_running_requests: int | None = None
    plan: KvPlan | None = None
    host_cache: HostCache | None = None
    host_memory: HostMemory | None = None
    findings: tuple[Finding, ...] = ()
    answer: str = ""

    @property
    def verdict(self) -> Verdict:
        return overall(self.findings)


# Words -----------------------------------------------------------------------------------------


def gigabytes(size: int) -> str:
    """Decimal gigabytes, as SGLang counts host memory: ``11.18``, ``44.7``, ``358``."""
    amount = size / 1e9
    return f"{amount:.2f}" if amount < 19.995 else f"{amount:.1f}" if amount < 99.95 else f"{amount:,.0f}"


def in_gigabytes(size: Range) -> str:
    """``11.18 GB`` or ``14.09 to 20.1 GB``."""
    low, high = gigabytes(size.low), gigabytes(size.high)
    return f"{low} GB" if low == high else f"{low} to {high} GB"


def about(tokens: int) -> str:
    """A count to three figures: ``159,000``."""
    digits = len(str(tokens)) - 3
    return f"{round(tokens, -digits) if digits > 0 else tokens:,}"


def in_tokens(tokens: Range) -> str:
    low, high = about(tokens.low), about(tokens.high)
    return low if low == high else f"{low} to {high}"


def kv_words(budget: Budget) -> str:
    """``KV cache holds 159,000 tokens on each card (11.18 GB)``."""
    if budget.tokens is None:
        return "how many tokens fit is not known"
    verb = "holds" if budget.subject == "running" else "would hold"
    size = f" ({in_gigabytes(budget.kv)})" if budget.kv is not None else ""
    return f"KV cache {verb} {in_tokens(budget.tokens)} tokens on each card{size}"


def host_words(budget: Budget) -> str:
    """``hierarchical cache takes 358 GB of host RAM: 8 ranks × 44.7 GB, 62 GB more than is free``."""
    cache = budget.host_cache
    if cache is None:
        return "no hierarchical cache in host RAM"
    verb = "takes" if budget.subject == "running" else "would take"
    text = f"hierarchical cache {verb} {in_gigabytes(cache.total)} of host RAM"
    text += f": {cache.ranks} ranks × {in_gigabytes(cache.per_rank)}" if cache.ranks > 1 else ""
    if budget.host_memory is None:
        return f"{text}; what the host has free is not known"
    if budget.subject == "running":
        return f"{text}; {gigabytes(room(budget.host_memory).free)} GB are still free"
    return f"{text}, {margin_words(cache.total, room(budget.host_memory).free)}"


def margin_words(needed: Range, free: int) -> str:
    """How much more or less than is free. Between two bounds both are told."""
    low, high = free - needed.low, free - needed.high
    if high >= 0:
        return f"{_whole(high)} GB less than is free"
    if low < 0:
        more = _whole(-low) if _whole(-low) == _whole(-high) else f"{_whole(-low)} to {_whole(-high)}"
        return f"{more} GB more than is free"
    return f"between {_whole(low)} GB less and {_whole(-high)} GB more than is free"


def _whole(size: int) -> str:
    return f"{size / 1e9:,.0f}" if size >= 9.95e9 else f"{size / 1e9:.1f}"


# JSON ------------------------------------------------------------------------------------------


def budget_document(budget: Budget) -> dict[str, Any]:
    """The document of ``gpuops budget --json``. Sizes are bytes; what is not known is None, never 0."""
    from datetime import UTC, datetime

    taken_at = datetime.fromtimestamp(budget.wall, UTC).isoformat(timespec="seconds")
    geometry, plan = budget.geometry, budget.plan
    return {
        "schema": BUDGET_SCHEMA,
        "taken_at": taken_at.replace("+00:00", "Z"),
        "subject": budget.subject,
        "profile": budget.name,
        "model_path": budget.model_path,
        "version": budget.version,
        "verdict": budget.verdict,
        "answer": budget.answer,
        "cards": [_card(card) for card in budget.cards],
        "kv": {
            "dtype": budget.dtype,
            "attention": None if geometry is None else geometry.attention,
            "layers": None if geometry is None else geometry.attention_layers,
            "bytes_per_token": budget.token_bytes,
            "tokens": budget.tokens,
            "bytes": budget.kv,
            "context_length": budget.context_length,
            "max_running_requests": budget.max_running_requests,
            "state_slot_bytes": None if plan is None else plan.state_slot,
        },
        "plan": None
        if plan is None
        else {
            "free_bytes": plan.free,
            "mem_fraction_static": {
                "low": plan.share.low,
                "high": plan.share.high,
                "given": plan.share.given,
            },
            "weights_bytes": plan.weights.each,
            "weights_source": plan.weights.source,
            "draft_weights_bytes": None if plan.draft_weights is None else plan.draft_weights.each,
            "draft_bytes_per_token": plan.draft_cell,
            "draft_charged": plan.charged,
            "state_bytes": plan.state,
            "slack_bytes": plan.slack,
        },
        "host_cache": _host_cache(budget.host_cache),
        "host_memory": _host_memory(budget.host_memory),
        "findings": list(budget.findings),
    }


def _card(card: CardMemory) -> dict[str, Any]:
    return {
        "index": card.index,
        "address": card.address,
        "rank": card.rank,
        "total_bytes": card.total,
        "used_bytes": card.used,
        "reserved_bytes": card.reserved,
        "free_bytes": card.free,
        "parts": {kind: card.size(kind) for kind in KINDS},
        "sources": {part.kind: part.source for part in card.parts},
        "unknown": dict(card.unknown),
        "notes": list(card.words),
    }


def _host_cache(cache: HostCache | None) -> dict[str, Any] | None:
    if cache is None:
        return None
    return {
        "ranks": cache.ranks,
        "tokens_per_rank": cache.tokens,
        "bytes_per_rank": cache.per_rank,
        "bytes": cache.total,
        "set_by": cache.set_by,
    }


def _host_memory(memory: HostMemory | None) -> dict[str, Any] | None:
    if memory is None:
        return None
    found = room(memory)
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "returned_bytes": memory.returned,
        "free_bytes": found.free,
        "bound_by": found.bound_by,
        "limits": list(memory.limits),
    }
