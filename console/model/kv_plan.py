"""How many tokens would fit: a profile that is not running yet, on cards of a known size.

SGLang sizes its caches by what is free after the weights, less the share that
``--mem-fraction-static`` leaves alone (KVCacheConfigurator._profile_available_bytes). What is known
only between two bounds is carried between two bounds.
"""

from __future__ import annotations

import msgspec

from console.model.kv import (
    KvGeometry,
    Range,
    bytes_per_token,
    cache_dtype,
    draft_bytes_per_token,
    draft_is_charged,
    exactly,
    state_bytes,
    tokens_for,
)
from console.model.kv_arguments import KvArguments

GIB = 1024**3
MIB = 1024**2

#: What CUDA's context and NCCL's buffers take of a card before the first weight: measured 0.4 to 1.4 GiB.
OVERHEAD = Range(GIB // 2, 2 * GIB)

#: A rank's share of the weights: an even part, and up to a twentieth more that every rank keeps whole.
_WHOLE_ON_EACH_RANK = 20

#: What newer versions set aside for images, 0.1 GiB, or 1.1 GiB with a CUDA transport.
_IMAGES = Range(0, 1124 * MIB)

#: How many slots a request of a hybrid model takes, between the oldest and the newest strategy.
_SLOTS_A_REQUEST = (3, 5)


class Share(msgspec.Struct, frozen=True):
    """``--mem-fraction-static`` between two bounds, and whether the profile sets it."""

    low: float
    high: float
    given: bool


class Weights(msgspec.Struct, frozen=True):
    """Bytes on each card; ``total`` of all cards, None when it was measured on one; ``source`` in words."""

    each: Range
    total: int | None
    source: str


class CardRoom(msgspec.Struct, frozen=True):
    """The smallest of the cards, bytes: what CUDA sees of it, less what other processes hold."""

    total: int
    reserved: int = 0
    others: int = 0

    @property
    def usable(self) -> int:
        return max(0, self.total - self.reserved - self.others)


class KvPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of each card, bytes. ``cell`` is what the engine divides by, ``kv`` what it then takes."""

    dtype: str
    target_cell: int
    draft_cell: int  # of the target's kind; 0 without a draft
    draft_own_cell: int | None  # what the draft's own config.json makes of it
    charged: bool | None  # whether the draft is charged to the budget
    cell: Range
    free: Range  # before any weight is loaded
    share: Share
    weights: Weights
    draft_weights: Weights | None
    caches: Range  # left for KV and state
    state_slot: int | None
    state: Range | None
    tokens: Range
    kv: Range
    slack: Range  # for graphs, activations and what was not charged


def spread(total: int, ranks: int, source: str) -> Weights:
    """Weights of ``total`` bytes over so many ranks."""
    even = total // max(1, ranks)
    return Weights(Range(even, even + even // _WHOLE_ON_EACH_RANK), total, source)


def fraction(arguments: KvArguments, card: CardRoom, multimodal: bool) -> Share:
    """The share given, or the bounds of what SGLang would choose for a card of this size.

    Its rule (memory_hook.handle_gpu_memory_settings): the card less a reserve for activations and
    graphs, and for a model that sees images less a further part that depends on its vision tower.
    """
    if arguments.mem_fraction is not None:
        return Share(arguments.mem_fraction, arguments.mem_fraction, True)
    size = card.total / MIB
    if size <= 0:
        return Share(0.5, 0.9, False)
    chunk = arguments.chunked_prefill_size or (8192 if size >= 60 * 1024 else 4096)
    reserve = 512 + max(chunk, 2048) * 1.5 + arguments.tp_size * arguments.pp_size / 8 * 1024 + 512 * 2
    if size > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    high = round(max(0.1, (size - reserve) / size), 3)
    return Share(round(high * 0.95 * 0.8, 3) if multimodal else high, high, False)


def plan(
    geometry: KvGeometry,
    arguments: KvArguments,
    card: CardRoom,
    weights: Weights,
    *,
    version: str | None = None,
    draft: KvGeometry | None = None,
    draft_weights: Weights | None = None,
    free: Range | None = None,
) -> KvPlan:
    """What would fit on each card. ValueError for a kind of cache that is not known.

    ``free`` is what was measured before the first weight, with as many ranks; None: reckoned.
    """
    dtype = cache_dtype(geometry, arguments.kv_cache_dtype, arguments.dtype)
    target = bytes_per_token(geometry, dtype, arguments.attention_tp)
    extra, own = _draft_cells(geometry, arguments, target, draft, dtype)
    charged = draft_is_charged(version) if extra else None
    cell = Range(target + (extra if charged else 0), target + (0 if charged is False else extra))
    if free is None:
        free = Range(max(0, card.usable - OVERHEAD.high), max(0, card.usable - OVERHEAD.low))
    share = fraction(arguments, card, geometry.multimodal)
    loaded = weights.each
    if draft_weights is not None:
        loaded += Range(
            draft_weights.each.low if charged else 0, 0 if charged is False else draft_weights.each.high
        )
    images = _IMAGES if geometry.multimodal else exactly(0)
    caches = Range(
        max(0, int(free.low * share.low) - loaded.high - images.high),
        max(0, int(free.high * share.high) - loaded.low - images.low),
    )
    slot = state = None
    left = caches
    if geometry.state is not None:
        slot = state_bytes(geometry.state, arguments.attention_tp, arguments.mamba_item_bytes)
        left, state = _after_state(caches, slot, arguments)
    page, most = arguments.page_size, arguments.max_total_tokens
    tokens = Range(
        tokens_for(left.low, cell.high, page_size=page, most=most),
        tokens_for(left.high, cell.low, page_size=page, most=most),
    )
    return KvPlan(
        dtype=dtype,
        target_cell=target,
        draft_cell=extra,
        draft_own_cell=own,
        charged=charged,
        cell=cell,
        free=free,
        share=share,
        weights=weights,
        draft_weights=draft_weights,
        caches=caches,
        state_slot=slot,
        state=state,
        tokens=tokens,
        kv=Range(tokens.low * cell.low, tokens.high * cell.high)
        if cell.exact
        else Range(min(tokens.low * cell.high, left.low), min(tokens.high * cell.low, left.high)),
        slack=Range(int(free.low * (1 - share.high)), int(free.high * (1 - share.low))),
    )


def _draft_cells(
    geometry: KvGeometry, arguments: KvArguments, target: int, draft: KvGeometry | None, dtype: str
) -> tuple[int, int | None]:
    """What the engine reckons for the draft a token, and what the draft's own config.json makes of it."""
    if not arguments.drafts:
        return 0, None
    layers = draft.layers if draft is not None else geometry.draft_layers or 1
    extra = draft_bytes_per_token(target, layers, geometry.attention_layers)
    own = None if draft is None else bytes_per_token(draft, dtype, arguments.attention_tp)
    return extra, own


def _after_state(caches: Range, slot: int, arguments: KvArguments) -> tuple[Range, Range]:
    """What a hybrid model's states leave for KV, and their bytes (KVCacheConfigurator's rule)."""
    ratios = _SLOTS_A_REQUEST if arguments.speculative_algorithm else _SLOTS_A_REQUEST[:1]
    small = [_state_at(caches.low, slot, arguments, ratio) for ratio in ratios]
    large = [_state_at(caches.high, slot, arguments, ratio) for ratio in ratios]
    left = Range(caches.low - max(small), caches.high - min(large))
    return left, Range(min(*small, *large), max(*small, *large))


def _state_at(rest: int, slot: int, arguments: KvArguments, slots_a_request: int) -> int:
    replicas = arguments.dp_size if arguments.dp_attention else 1
    steps = (arguments.draft_tokens or 4) if arguments.speculative_algorithm else 0
    wanted = None if arguments.max_running_requests is None else arguments.max_running_requests // replicas
    if arguments.speculative_algorithm and wanted is None:
        wanted = 48  # what the engine then takes
    budget = int(rest * arguments.mamba_ratio / (1 + arguments.mamba_ratio))
    if arguments.mamba_slots is not None:
        slots = arguments.mamba_slots // replicas
    elif not arguments.radix_cache and wanted is not None:
        slots = max(1, wanted)
    else:
        slots = int((budget - slot * (1 + steps)) / (slot * (1 + steps / slots_a_request)))
    slots = max(0, slots)
    requests = 0 if not steps else min(wanted or slots, slots // slots_a_request) + 1
    return min(rest, (slots + 1) * slot + requests * steps * slot)
