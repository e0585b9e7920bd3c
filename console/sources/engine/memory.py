"""The engine's own account of its memory: ``/server_info``, with ``graph`` as a number or by phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from console.model.card_memory import RankMemory, rank_key
from console.model.text import clean
from console.sources.engine.fields import integer, items, mapping, number, parse_json, text

GIB = 1024**3

SOURCE = "/server_info"


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved arguments as JSON has them, and the memory of each replica's first rank (``rank_key``)."""

    version: str | None
    arguments: Mapping[str, Any]
    memory: dict[str, RankMemory]


def read_report(body: bytes) -> EngineReport | None:
    """None when the answer is no ``/server_info``. Any bytes are survived."""
    server = mapping(parse_json(body))
    if text(server.get("model_path")) is None and "internal_states" not in server:
        return None
    states = [mapping(state) for state in items(server.get("internal_states"))]
    memory = {}
    for replica, state in enumerate(states):
        told = _memory(mapping(state.get("memory_usage")), server)
        if told is not None:
            memory[rank_key(f"DP{replica}")] = told
    version = text(server.get("version"))
    return EngineReport(
        version=None if version is None else clean(version)[:40], arguments=server, memory=memory
    )


def _memory(usage: Mapping[str, Any], server: Mapping[str, Any]) -> RankMemory | None:
    if not usage:
        return None
    graph = usage.get("graph")
    phases = [number(size) for size in graph.values()] if isinstance(graph, dict) else [number(graph)]
    known = [size for size in phases if size is not None]
    return RankMemory(
        source=SOURCE,
        weights=_bytes(usage.get("weight")),
        kv=_bytes(usage.get("kvcache")),
        graphs=round(sum(known) * GIB) if known else None,
        tokens=integer(usage.get("token_capacity")) or integer(server.get("max_total_num_tokens")),
        after_graphs=_bytes(usage.get("startup_available")),
    )


def _bytes(value: Any) -> int | None:
    found = number(value)
    return None if found is None else round(found * GIB)
