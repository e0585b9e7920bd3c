"""What the lines of a load tell of each rank's memory, in the wordings of SGLang 0.5.5 to 0.5.23.

The engine writes "GB" for 2^30 bytes of card memory and for 10^9 bytes of host memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from console.model.card_memory import RankMemory, rank_key
from console.model.text import clean
from console.sources.engine_log import pairs, pairs_equal, split_prefix
from console.transport.runner import Runner

GIB = 1024**3

#: Seconds for reading the journal of a load.
DEADLINE = 6.0

#: A load that takes longer, in seconds, is read as far as this.
LONGEST_LOAD_S = 3600.0

SOURCE = "the load's log"

_SIZE = re.compile(r"(-?\d{1,9}(?:\.\d{1,6})?) ?GB")
_STATES = re.compile(r"(?:state|window|cache)[a-z_]* size: (\d{1,9}(?:\.\d{1,6})?) ?GB")
_HOST = re.compile(r"Allocating .{0,60}?(\d{1,9}(?:\.\d{1,6})?) ?GB host memory")


class _Rank(msgspec.Struct):
    """One rank's lines, as they come."""

    weights: list[int] = msgspec.field(default_factory=list)
    caches: list[int] = msgspec.field(default_factory=list)
    tokens: list[int] = msgspec.field(default_factory=list)
    dtype: str | None = None
    state: int | None = None
    graphs: int | None = None
    host: int | None = None
    before_weights: int | None = None
    after_graphs: int | None = None


async def read_load(
    runner: Runner, unit: str, started_at: float, ready_at: float | None
) -> tuple[dict[str, RankMemory], str | None]:
    """Memory by rank from the journal of the run that began at ``started_at`` (Unix seconds).

    With it the reason why there is none, in words.
    """
    until = started_at + LONGEST_LOAD_S if ready_at is None else ready_at + 5
    argv = ("journalctl", "-u", unit, "-o", "cat", "--all", "--no-pager")
    result = await runner.run(
        (*argv, f"--since=@{started_at:.0f}", f"--until=@{until:.0f}"), deadline=DEADLINE
    )
    if not result.ok:
        return {}, clean(result.reason)
    found = read_lines(result.stdout.decode("utf-8", "replace").splitlines())
    return found, None if found else "the journal no longer has the lines of the load"


def read_lines(lines: Iterable[str]) -> dict[str, RankMemory]:
    """Memory by rank (``rank_key``), of the last load among the lines. Any text is survived."""
    ranks: dict[str, _Rank] = {}
    for line in lines:
        if "GB" not in line and "server_args=" not in line:
            continue
        tags, message = split_prefix(line.strip()[:2000])
        if message.startswith("server_args="):
            ranks.clear()  # another start of the engine
            continue
        rank = ranks.setdefault(rank_key(tags), _Rank())
        _read(rank, message)
    return {name: told for name, rank in ranks.items() if (told := _told(rank)) is not None}


def _read(rank: _Rank, message: str) -> None:
    if message.startswith("Load weight begin"):
        if rank.before_weights is None:
            rank.before_weights = _gib(pairs_equal(message).get("avail mem"))
    elif message.startswith("Load weight end"):
        size = _gib(pairs_equal(message).get("mem usage"))
        if size is not None:
            rank.weights.append(size)
    elif "Mamba Cache is allocated" in message[:60]:
        sizes = [float(found) for found in _STATES.findall(message)]
        if sizes:
            rank.state = (rank.state or 0) + round(sum(sizes) * GIB)
    elif "Cache is allocated" in message[:60] or "KV cache allocated" in message[:60]:
        _read_cache(rank, message)
    elif message.startswith("Capture ") and " end" in message[:80]:
        size = _gib(pairs_equal(message).get("mem usage"))
        if size is not None:
            rank.graphs = (rank.graphs or 0) + size
    elif message.startswith("max_total_num_tokens="):
        rank.after_graphs = _gib(pairs_equal(message).get("available_gpu_mem"))
    elif (host := _HOST.match(message)) is not None:
        rank.host = (rank.host or 0) + round(float(host[1]) * 1e9)


def _read_cache(rank: _Rank, message: str) -> None:
    fields = pairs(re.split(r"allocated\. ", message, maxsplit=1)[-1])
    sizes = [_gib(fields.get(name)) for name in ("KV size", "K size", "V size")]
    known = [size for size in sizes if size is not None]
    tokens = fields.get("#tokens", "")
    if known and re.fullmatch(r"\d{1,12}", tokens, re.ASCII):
        rank.caches.append(sum(known))
        rank.tokens.append(int(tokens))
        dtype = fields.get("dtype")
        rank.dtype = rank.dtype or (None if dtype is None else clean(dtype).removeprefix("torch.")[:40])


def _gib(text: str | None) -> int | None:
    """``63.91 GB`` as bytes. A load may free memory, so it may be negative; nothing is less than nothing."""
    found = _SIZE.match(text or "")
    return None if found is None else max(0, round(float(found[1]) * GIB))


def _told(rank: _Rank) -> RankMemory | None:
    """The first weights are the target's; every later load is a draft's, and has a cache of its own."""
    if not rank.weights and not rank.caches:
        return None
    drafts = max(0, len(rank.weights) - 1)
    split = max(1, len(rank.caches) - drafts)
    own, drafted = rank.caches[:split], rank.caches[split:]
    return RankMemory(
        source=SOURCE,
        weights=rank.weights[0] if rank.weights else None,
        draft=sum(rank.weights[1:]) + sum(drafted) if drafts else None,
        kv=sum(own) if own else None,
        draft_kv=sum(drafted) if drafted else None,
        state=rank.state,
        graphs=rank.graphs,
        host=rank.host,
        tokens=rank.tokens[0] if rank.tokens else None,
        cache_dtype=rank.dtype,
        before_weights=rank.before_weights,
        after_graphs=rank.after_graphs,
    )
