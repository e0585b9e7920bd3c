"""SGLang's hierarchical cache in host RAM: what all ranks together take, and what the host has for it.

Every tensor-parallel rank keeps a pinned copy of its own (HostKVCache in SGLang's pool_host/base.py), so
one rank's figure, which is what the engine logs and checks, has to be multiplied.
"""

from __future__ import annotations

import math

import msgspec

from console.model.kv import Range, exactly, release
from console.model.kv_arguments import KvArguments

#: The engine leaves this much of the host's memory alone (HICACHE_HOST_MEMORY_RESERVE_BYTES).
RESERVE = 10 * 1024**3

#: ``--hicache-ratio`` where neither it nor a size is given.
DEFAULT_RATIO = 2.0

#: Before this version every rank compares its own share with all that is free, and all of them pass.
SHARED_CHECK_SINCE = (0, 5, 20)

#: From this version a cache whose size nobody gave is made smaller until it fits.
SHRINKS_SINCE = (0, 5, 22)

#: From here on a copy of the draft's cache, and of a hybrid model's states, may come on top.
_MORE_COPIES_SINCE = (0, 5, 14)


class HostCache(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one service. ``tokens`` and ``per_rank`` (bytes) are of each rank."""

    tokens: Range
    per_rank: Range
    ranks: int
    set_by: str  # "ratio 4", "size 80 GB on each rank", "the engine's log"

    @property
    def total(self) -> Range:
        """Bytes of host RAM that all ranks pin together."""
        return self.per_rank.times(self.ranks)


class MemoryLimit(msgspec.Struct, frozen=True):
    """A limit that a control group sets, bytes; ``used`` without page cache, None when it is not known."""

    where: str
    limit: int
    used: int | None


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The host's RAM at one moment, bytes. ``available`` is MemAvailable of /proc/meminfo.

    ``limits`` are those of the service's container and unit. ``returned`` is what the running
    service gives back when it stops.
    """

    total: int
    available: int
    limits: tuple[MemoryLimit, ...] = ()
    returned: int = 0


class Room(msgspec.Struct, frozen=True):
    """What there is for a new service: bytes, what sets the bound, and bounds that could not be read."""

    free: int
    bound_by: str
    unread: tuple[str, ...] = ()


def room(memory: HostMemory) -> Room:
    """The smallest of what the host has and what each limit leaves."""
    free, bound_by = memory.available + memory.returned, "the host's free memory"
    unread = []
    for limit in memory.limits:
        if limit.used is None:
            unread.append(limit.where)
            continue
        left = max(0, limit.limit - limit.used) + memory.returned
        if left < free:
            free, bound_by = left, f"the memory limit of {limit.where}"
    return Room(min(free, memory.total), bound_by, tuple(unread))


def host_cache(
    arguments: KvArguments,
    cell: int,
    tokens: Range,
    *,
    version: str | None = None,
    draft_cell: int = 0,
    state: int = 0,
) -> HostCache | None:
    """What the arguments ask for; None when the hierarchical cache is off.

    ``cell`` is the target model's bytes a token on a rank, without the draft's ``draft_cell``;
    ``tokens`` are what the card's own cache holds; ``state`` is the bytes of a hybrid model's
    slots on a card. The upper bound counts the copies that newer versions may make of these two.
    """
    if not arguments.hierarchical:
        return None
    page = arguments.page_size
    if arguments.hicache_size is not None:
        held = exactly(_padded(int(arguments.hicache_size * 1e9 // cell), page))
        set_by = f"size {arguments.hicache_size:g} GB on each rank"
    else:
        ratio = DEFAULT_RATIO if arguments.hicache_ratio is None else arguments.hicache_ratio
        held = Range(_padded(math.floor(tokens.low * ratio), page), _padded(int(tokens.high * ratio), page))
        set_by = f"ratio {ratio:g}"
    copies = 0
    known = release(version)
    if known is None or known >= _MORE_COPIES_SINCE:
        copies = held.high * draft_cell + math.ceil(state * held.high / max(1, tokens.high))
    return HostCache(
        tokens=held,
        per_rank=Range(held.low * cell, held.high * cell + copies),
        ranks=arguments.ranks,
        set_by=set_by,
    )


def shrinks(arguments: KvArguments, version: str | None) -> bool:
    """Whether the engine makes the cache smaller by itself until it fits."""
    known = release(version)
    asked = arguments.hicache_size is not None or arguments.hicache_ratio is not None
    return known is not None and known >= SHRINKS_SINCE and not asked


def _padded(tokens: int, page: int) -> int:
    """Whole pages, and one more that the engine keeps for padding."""
    return (tokens // page + 1) * page
