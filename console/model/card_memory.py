"""Where one card's memory went: what the engine reports, what NVML sees, and the rest. All in bytes.

The parts of a card always add up to what NVML says is in use: what nobody reports is a part of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from console.model.card import CardView, Holder
from console.model.words import gib

Kind = Literal["weights", "draft", "kv", "state", "graphs", "workspace", "others", "unaccounted"]

#: In the order in which a load takes them.
KINDS: tuple[Kind, ...] = (
    "weights",
    "draft",
    "kv",
    "state",
    "graphs",
    "workspace",
    "others",
    "unaccounted",
)

KIND_WORDS: dict[Kind, str] = {
    "weights": "weights",
    "draft": "draft model",
    "kv": "KV cache",
    "state": "state of hybrid layers",
    "graphs": "graphs",
    "workspace": "engine's workspace",
    "others": "other processes",
    "unaccounted": "unaccounted",
}

#: Only the engine can tell these.
_REPORTED: tuple[Kind, ...] = ("weights", "draft", "kv", "state", "graphs")


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of the engine says of itself; None: it does not say.

    ``kv`` is the target's cache, ``draft`` the draft's weights and cache together, ``host`` its
    copy in host RAM. The engine's figures are rounded to a hundredth or thousandth of a GiB.
    """

    source: str
    weights: int | None = None
    draft: int | None = None
    kv: int | None = None
    draft_kv: int | None = None  # the part of ``draft`` that is cache
    state: int | None = None
    graphs: int | None = None
    host: int | None = None
    tokens: int | None = None
    cache_dtype: str | None = None
    before_weights: int | None = None  # free on its card
    after_graphs: int | None = None


class Part(msgspec.Struct, frozen=True):
    """One kind's share of a card: how much, and who says so."""

    kind: Kind
    size: int
    source: str


class CardMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One card. ``used`` is None when NVML does not tell; ``unknown`` says by kind why there is no figure."""

    index: int
    address: str
    rank: str | None
    total: int | None
    used: int | None
    reserved: int | None  # the driver's own, not part of ``used``
    free: int | None
    parts: tuple[Part, ...] = ()
    unknown: dict[str, str] = msgspec.field(default_factory=dict)
    words: tuple[str, ...] = ()

    def size(self, kind: Kind) -> int | None:
        return next((part.size for part in self.parts if part.kind == kind), None)


def rank_key(tags: str | None) -> str:
    """``TP3``, ``DP0 TP3`` or the process title ``sglang::scheduler_DP0_TP3`` as one and the same name."""
    found = {name: int(number) for name, number in re.findall(r"(DP|PP|TP)(\d{1,5})", tags or "")}
    return " ".join(f"{name}{found.get(name, 0)}" for name in ("DP", "PP", "TP"))


def divide(
    card: CardView,
    holders: tuple[Holder, ...] | None,
    ranks: Mapping[str, RankMemory],
    *,
    drafts: bool = False,
    running: bool = True,
) -> CardMemory:
    """One card's memory by kind. ``holders`` is None when nobody could name the processes.

    ``drafts``: the engine has a draft model; ``running``: there is an engine at all.
    """
    address = card.pci.address
    seen = card.telemetry
    used = None if seen is None else seen.memory_used_bytes
    on_card = [holder for holder in holders or () if address in holder.memory_bytes]
    own = [holder for holder in on_card if not holder.orphan]
    name = _rank_of(own)
    told = ranks.get(name) if name is not None else None
    if told is None and own:
        told = next(iter(ranks.values()), None)
    memory = CardMemory(
        index=card.index,
        address=address,
        rank=name if told is not None else None,
        total=None if seen is None else seen.memory_total_bytes,
        used=used,
        reserved=None if seen is None else seen.memory_reserved_bytes,
        free=None if seen is None else seen.memory_free_bytes,
    )
    if used is None:
        why = "NVML does not list it" if seen is None else seen.missing.get("memory_used_bytes", "not told")
        return msgspec.structs.replace(memory, unknown=dict.fromkeys(KINDS, why))
    parts: list[Part] = []
    unknown: dict[str, str] = {}
    if holders is None:
        unknown["others"] = "the processes on the card are not read"
    elif any(holder.memory_bytes[address] is None for holder in on_card if holder.orphan):
        unknown["others"] = "NVML names a process but not its memory"
    else:
        taken = sum(holder.memory_bytes[address] or 0 for holder in on_card if holder.orphan)
        parts.append(Part("others", taken, "NVML, by process"))
    if running:
        _engine_parts(parts, unknown, told, drafts)
        _workspace(parts, unknown, own, holders is not None, address)
    rest = used - sum(part.size for part in parts)
    parts.append(Part("unaccounted", rest, "what is in use, less all of the above"))
    parts.sort(key=lambda part: KINDS.index(part.kind))
    return msgspec.structs.replace(
        memory, parts=tuple(parts), unknown=unknown, words=_rest_words(rest, unknown, running)
    )


def _rank_of(own: list[Holder]) -> str | None:
    """The rank by the title that SGLang gives its scheduler; None where no title tells."""
    for holder in own:
        if re.search(r"scheduler\w*TP\d", holder.name):
            return rank_key(holder.name)
    return rank_key(None) if len(own) == 1 and "scheduler" in own[0].name else None


def _engine_parts(parts: list[Part], unknown: dict[str, str], told: RankMemory | None, drafts: bool) -> None:
    for kind in _REPORTED:
        size = None if told is None else getattr(told, kind)
        if told is not None and size is not None:
            parts.append(Part(kind, size, told.source))
        elif kind in ("weights", "kv", "graphs") or (kind == "draft" and drafts):
            unknown[kind] = "the engine does not report it"


def _workspace(
    parts: list[Part], unknown: dict[str, str], own: list[Holder], named: bool, address: str
) -> None:
    """CUDA's context, NCCL's buffers and activations: nobody reports them, they are the process's rest."""
    held = [holder.memory_bytes[address] for holder in own]
    if not named or not held or any(size is None for size in held):
        unknown["workspace"] = "NVML does not tell what the engine's process holds"
        return
    reported = sum(part.size for part in parts if part.kind in _REPORTED)
    rest = sum(size or 0 for size in held) - reported
    if rest >= 0:
        parts.append(Part("workspace", rest, "the process's memory, less what the engine reports"))
    else:
        unknown["workspace"] = f"the engine reports {gib(-rest, 2)} GiB more than its process holds"


def _rest_words(rest: int, unknown: dict[str, str], running: bool) -> tuple[str, ...]:
    """What the unaccounted part may be, where that needs words."""
    if rest < 0:
        return (
            f"{gib(-rest, 2)} GiB less is in use than is reported: the engine's figures are from its start, "
            "and it has given memory back since, or they are another rank's",
        )
    hidden = [KIND_WORDS[kind] for kind in KINDS if kind in unknown]
    if hidden and running:
        return (f"the unaccounted part holds what nobody tells: {', '.join(hidden)}",)
    return ()
