"""What the engine is, from ``/server_info``, ``/v1/models`` and ``/model_info``, as of 0.5.9 and later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from console.model.engine import EngineIdentity
from console.model.text import clean
from console.sources.engine.fields import integer, items, mapping, number, parse_json, text

_RUNNING = "effective_max_running_requests_per_dp"

_TEXT_LIMIT = 16 * 1024

# The engine redacts its launch command itself from 0.5.23; before that it does not.
# An option, an environment variable or a JSON key whose name ends like a secret's.
_SECRET_NAME = r"[\w.-]*(?:api[_-]?key|passw(?:or)?d|secret(?:[_-]?key)?|access[_-]?key|(?<!max-)token)"
_SECRETS = re.compile(
    rf"""(?ix)
    (?P<name> (?<![\w-]) (?:--)? {_SECRET_NAME} (?P<quote>\\?["']?) (?:\s*[:=]\s*|\s+) )
    (?P<value> \\?"(?:[^"\\]|\\[^"])*\\?" | '[^']*' | [^\s"',}}]+ )
    """
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)\S+")


def read_identity(
    server_info: bytes | None, models: bytes | None, model_info: bytes | None
) -> EngineIdentity:
    """Whatever the answers tell; None stands for an answer that did not come. Any bytes are survived."""
    server = mapping(parse_json(server_info or b""))
    model = mapping(parse_json(model_info or b""))
    listed = model_list(models or b"")
    replicas = [mapping(item) for item in items(server.get("internal_states"))]
    memory = [mapping(replica.get("memory_usage")) for replica in replicas]
    first = memory[0] if memory else {}
    return EngineIdentity(
        version=_words(server.get("version")),
        served_names=tuple(name for name, _ in listed) or _names(model, server),
        model_path=_words(server.get("model_path")) or _words(model.get("model_path")),
        context_length=integer(server.get("context_length")) or (listed[0][1] if listed else None),
        tp_size=integer(server.get("tp_size")),
        dp_size=integer(server.get("dp_size")),
        speculative_algorithm=_algorithm(server),
        speculative_steps=integer(server.get("speculative_num_steps")) if _algorithm(server) else None,
        # Resolved ones are in /model_info since 0.5.18; before, /server_info has the flags.
        tool_call_parser=_words(model.get("tool_call_parser")) or _words(server.get("tool_call_parser")),
        reasoning_parser=_words(model.get("reasoning_parser")) or _words(server.get("reasoning_parser")),
        max_running_requests=_sum([replica.get(_RUNNING) for replica in replicas])
        or integer(server.get("max_running_requests")),
        kv_token_capacity=_sum([part.get("token_capacity") for part in memory])
        or integer(server.get("max_total_num_tokens")),
        weight_gb=number(first.get("weight")),
        kv_cache_gb=number(first.get("kvcache")),
        graph_gb=_graph(first.get("graph")),
        launch_command=_launch_command(server.get("launch_command")),
    )


def model_list(body: bytes) -> list[tuple[str, int | None]]:
    """Names and context lengths that ``/v1/models`` lists; empty when it is no such list."""
    listed = []
    for item in items(mapping(parse_json(body)).get("data")):
        name = _words(mapping(item).get("id"))
        if name is not None:
            listed.append((name, integer(mapping(item).get("max_model_len"))))
    return listed


def redact(command: str) -> str:
    """A command line with the values of its secrets replaced."""
    return _BEARER.sub(r"\1(hidden)", _SECRETS.sub(r"\g<name>(hidden)", command))


def _launch_command(value: Any) -> str | None:
    command = _words(value)
    return redact(command) if command is not None else None


def _algorithm(server: Mapping[str, Any]) -> str | None:
    algorithm = _words(server.get("speculative_algorithm"))
    return None if algorithm is None or algorithm.upper() == "NONE" else algorithm


def _names(model: Mapping[str, Any], server: Mapping[str, Any]) -> tuple[str, ...]:
    name = _words(model.get("served_model_name")) or _words(server.get("served_model_name"))
    return (name,) if name is not None else ()


def _graph(value: Any) -> float | None:
    """GiB: one number up to 0.5.16, one by phase since 0.5.18."""
    if isinstance(value, dict):
        parts = [part for part in map(number, value.values()) if part is not None]
        return sum(parts) if parts else None
    return number(value)


def _sum(values: list[Any]) -> int | None:
    """The sum over DP replicas; None when one of them did not say."""
    known = [found for found in map(integer, values) if found is not None]
    return sum(known) if known and len(known) == len(values) else None


def _words(value: Any) -> str | None:
    found = text(value)
    return clean(found[:_TEXT_LIMIT]) or None if found is not None else None
