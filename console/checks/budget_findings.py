"""What the figures of a budget mean: each finding from values alone, so that pre-flight can ask the same."""

from __future__ import annotations

from console.model.budget import gigabytes, in_gigabytes, in_tokens, margin_words
from console.model.card_memory import CardMemory, RankMemory
from console.model.finding import Finding, Verdict
from console.model.host_cache import RESERVE, SHARED_CHECK_SINCE, HostCache, HostMemory, room
from console.model.kv import KvGeometry, Range, release
from console.model.kv_arguments import KvArguments
from console.model.kv_plan import KvPlan
from console.model.words import gib

#: What may be in use on a card beyond all that is named, before it is worth a warning: bytes.
_SILENT = 1024**3

#: How far a figure that the engine rounds to a hundredth of a GiB may be from the truth.
_ROUNDING = 0.006 * 1024**3


def host_cache_finding(
    cache: HostCache,
    memory: HostMemory | None,
    *,
    version: str | None = None,
    running: bool = False,
    shrinks: bool = False,
) -> Finding:
    """Whether the host has the RAM. ``running``: it is allocated already, and ``memory`` is what is left."""
    id, title = "host-cache", "Hierarchical cache"
    needs = (
        f"{in_gigabytes(cache.total)}: {cache.ranks} ranks × {in_gigabytes(cache.per_rank)} ({cache.set_by})"
    )
    if memory is None:
        return Finding(id, title, "unknown", f"{needs}; the host's free memory could not be read")
    found = room(memory)
    free = f"{gigabytes(found.free)} GB free ({found.bound_by})"
    if running:
        low = found.free < RESERVE
        remedy = "lower hicache-ratio: the host is about to run out of memory" if low else None
        return Finding(id, title, "warn" if low else "pass", f"{needs}, allocated; {free}", remedy)
    if memory.returned:
        free += f", {gigabytes(memory.returned)} GB of it once the running service has stopped"
    text = f"{needs}; {free}; {margin_words(cache.total, found.free)}"
    if found.unread:
        text += f"; what {', '.join(found.unread)} uses could not be read"
    verdict: Verdict = "pass"
    remedy = None
    known = release(version)
    shared = known is not None and known >= SHARED_CHECK_SINCE
    if shrinks and cache.total.high > found.free - RESERVE:
        return Finding(
            id, title, "warn", f"{text}; the engine makes it smaller until it fits", "set hicache-ratio"
        )
    if cache.total.low > found.free or (shared and cache.total.low > found.free - RESERVE):
        verdict, remedy = "fail", _fitting(cache, found.free)
        if not shared:
            text += "; before 0.5.20 every rank checks only its own share, all pass, and the host runs out"
    elif cache.total.high > found.free - RESERVE:
        verdict, remedy = "warn", _fitting(cache, found.free)
        text += f"; the engine leaves {gigabytes(RESERVE)} GB alone"
    elif found.unread:
        verdict = "unknown"
    return Finding(id, title, verdict, text, remedy)


def _fitting(cache: HostCache, free: int) -> str:
    """The size that would fit, as a flag."""
    each = (free - RESERVE) / cache.ranks / 1e9
    if each < 1:
        return "leave enable-hierarchical-cache out, or free host memory"
    return f"set hicache-size to at most {int(each)} (GB on each rank), or free host memory"


def cards_finding(cards: tuple[CardMemory, ...]) -> Finding:
    """Whether the memory of every card is accounted for."""
    id, title = "cards", "Memory of the cards"
    if not cards:
        return Finding(id, title, "unknown", "no card is listed", "gpuops doctor tells what is missing")
    silent = [card for card in cards if card.used is None]
    rests = [(card.index, card.size("unaccounted") or 0) for card in cards if card.used is not None]
    told = sorted({note for card in cards for note in card.words})
    hidden = sorted({f"{kind}: {why}" for card in cards for kind, why in card.unknown.items()})
    if silent:
        names = ", ".join(f"card {card.index}" for card in silent)
        why = next(iter(silent[0].unknown.values()), "not told")
        return Finding(id, title, "unknown", f"{names}: {why}", "gpuops doctor tells what is missing")
    worst = max(rests, key=lambda rest: abs(rest[1]))
    evidence = "; ".join(told or ["the parts add up to what NVML sees"])
    if abs(worst[1]) >= _SILENT:
        evidence = f"card {worst[0]}: {gib(worst[1], 2)} GiB unaccounted; {evidence}"
        remedy = "see p for the processes; what NVML hides from a container is told on the host"
        return Finding(id, title, "warn", evidence, remedy)
    if hidden:
        return Finding(id, title, "unknown", "; ".join((*told, *hidden)))
    return Finding(id, title, "pass", evidence)


def others_finding(cards: tuple[CardMemory, ...]) -> Finding | None:
    """Memory that processes hold which are not the service's; None when nobody does."""
    held = [(card.index, size) for card in cards if (size := card.size("others"))]
    if not held:
        return None
    text = ", ".join(f"{gib(size, 1)} GiB on card {index}" for index, size in held)
    return Finding(
        "other-processes",
        "Other processes",
        "warn",
        text,
        "see p: the next start lacks this memory",
    )


def arithmetic_finding(told: RankMemory, cell: int, page: int) -> Finding | None:
    """Whether the cache is as large as its geometry says; None when the engine tells too little."""
    if told.kv is None or not told.tokens:
        return None
    expected = (told.tokens + page) * cell
    off = abs(told.kv - expected)
    good = off <= max(_ROUNDING, 0.005 * expected)
    text = (
        f"{told.tokens:,} tokens × {cell:,} B = {gib(told.tokens * cell, 2)} GiB; "
        f"the engine reports {gib(told.kv, 2)} GiB"
    )
    remedy = None if good else "this model keeps more or less than config.json tells: trust the engine"
    return Finding("kv-size", "KV cache size", "pass" if good else "warn", text, remedy)


def context_finding(tokens: Range, context: int | None, running: int | None) -> Finding:
    """How much context times concurrency the cache carries."""
    title = "Context, concurrency"
    if not tokens.high:
        return Finding("context", title, "fail", "not one token fits")
    ways = []
    short = ""
    if context is not None:
        low, high = tokens.low / context, tokens.high / context
        digits = 2 if low < 2 else 1
        counts = f"{low:.{digits}f}"
        if f"{high:.{digits}f}" != counts:
            counts += f" to {high:.{digits}f}"
        ways.append(f"{counts} requests of {context:,} tokens")
        if low < 1:
            cannot = "cannot" if high < 1 else "may not be able to"
            short = f"; a single request {cannot} use its whole context"
    if running:
        each = Range(tokens.low // running, tokens.high // running)
        ways.append(f"{running} requests of {in_tokens(each)} tokens")
    evidence = (" or ".join(ways) or f"{in_tokens(tokens)} tokens in all") + short
    if short:
        return Finding("context", title, "warn", evidence, "lower context-length to what fits")
    return Finding("context", title, "pass", evidence)


def plan_findings(plan: KvPlan, arguments: KvArguments) -> list[Finding]:
    """Whether the weights leave room, and what the estimate hangs on."""
    found = []
    share = f"{plan.share.low:g}" if plan.share.given else f"{plan.share.low:g} to {plan.share.high:g}"
    text = (
        f"weights {_gib_range(plan.weights.each)} ({plan.weights.source}) of {_gib_range(plan.free)} free; "
        f"mem-fraction-static {share} leaves {_gib_range(plan.caches)} for caches"
    )
    verdict: Verdict = "pass" if plan.tokens.low else "warn" if plan.tokens.high else "fail"
    remedy = None if verdict == "pass" else "raise mem-fraction-static, or use more cards"
    found.append(Finding("weights", "Room for caches", verdict, text, remedy))
    if not plan.share.given:
        found.append(
            Finding(
                "mem-fraction",
                "Static share of the card",
                "warn",
                f"mem-fraction-static is not set: the engine chooses between about {share}",
                "set mem-fraction-static, and the estimate gets narrow",
            )
        )
    if plan.draft_cell:
        found.append(_draft_finding(plan))
    if plan.state is not None and plan.state_slot is not None:
        text = f"{plan.state_slot:,} B a slot, {_gib_range(plan.state)} on each card"
        found.append(Finding("state", "State of hybrid layers", "pass", text))
    return found


def _draft_finding(plan: KvPlan) -> Finding:
    charged = {
        True: "charged to the budget (0.5.14 and later)",
        False: "not charged before 0.5.14: it comes out of what is left for graphs and activations",
        None: "charged to the budget only from 0.5.14 on, and the version is not known",
    }[plan.charged]
    text = f"{plan.draft_cell:,} B a token beside {plan.target_cell:,}, {charged}"
    own = plan.draft_own_cell
    if own is not None and own != plan.draft_cell:
        text += f"; its own config.json makes {own:,} B"
    remedy = "a draft that keeps more than is reckoned takes it from what is left for graphs"
    larger = own is not None and own > plan.draft_cell
    verdict: Verdict = "warn" if larger or plan.charged is False else "pass"
    return Finding("draft", "Draft model's cache", verdict, text, remedy if larger else None)


def geometry_findings(geometry: KvGeometry) -> list[Finding]:
    """What config.json shows and the arithmetic leaves out."""
    if not geometry.uncounted:
        return []
    text = "not counted: " + "; ".join(geometry.uncounted)
    return [Finding("uncounted", "Parts of the cache", "warn", text, "trust what the engine reports")]


def _gib_range(size: Range) -> str:
    low, high = gib(size.low), gib(size.high)
    return f"{low} GiB" if low == high else f"{low} to {high} GiB"
