"""``/v1/loads`` and the older ``/get_load``: live load, without ``--enable-metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from console.model.engine import EngineIdentity, EngineRates
from console.model.text import clean
from console.sources.engine.fields import integer, items, mapping, number, parse_json, text
from console.sources.engine.rates import accept_rate_meaning

NO_METRICS = "the engine runs without --enable-metrics"


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas' loads folded together: requests and tokens summed, usage of the fullest."""

    version: str | None = None
    running: int | None = None
    queued: int | None = None
    used_tokens: int | None = None
    total_tokens: int | None = None
    usage: float | None = None  # 0..1
    gen_throughput: float | None = None  # tokens/s of the last decode interval; None when 0
    accept_length: float | None = None  # mean since the engine started
    accept_rate: float | None = None


def read_loads(body: bytes) -> Loads | None:
    """Either envelope of ``/v1/loads`` (0.5.8 to 0.5.12, and later), or the list of ``/get_load``.

    None when it is none of them.
    """
    answer = parse_json(body)
    listed = items(answer) or items(mapping(answer).get("loads"))
    replicas = [replica for replica in map(mapping, listed) if replica]
    if not replicas:
        return None
    speculative = [mapping(replica.get("speculative")) for replica in replicas]
    version = text(mapping(answer).get("version"))
    return Loads(
        version=clean(version) if version else None,
        running=_total([_running(replica) for replica in replicas]),
        queued=_total([integer(replica.get("num_waiting_reqs")) for replica in replicas]),
        used_tokens=_total([integer(replica.get("num_used_tokens")) for replica in replicas]),
        total_tokens=_total([integer(replica.get("max_total_num_tokens")) for replica in replicas]),
        usage=max(_numbers(replicas, "token_usage"), default=None),
        # Without --enable-metrics it stays 0.0 whatever the engine does, so 0 says nothing.
        gen_throughput=sum(_numbers(replicas, "gen_throughput")) or None,
        accept_length=_mean(_numbers(speculative, "accept_length")),
        accept_rate=_mean(_numbers(speculative, "accept_rate")),
    )


def rates_from_loads(loads: Loads, identity: EngineIdentity | None, reason: str = NO_METRICS) -> EngineRates:
    """What can be told from loads alone; ``reason`` says why there is no more."""
    speculation = identity is None or identity.speculative_algorithm is not None
    rate = loads.accept_rate if speculation else None
    version = loads.version or (identity.version if identity else None)
    values: dict[str, Any] = {
        "decode_tokens_per_s": loads.gen_throughput,
        "requests_running": loads.running,
        "requests_queued": loads.queued,
        "kv_usage_ratio": loads.usage,
        "kv_used_tokens": loads.used_tokens,
        "kv_total_tokens": loads.total_tokens or (identity.kv_token_capacity if identity else None),
        "accept_length": loads.accept_length if speculation else None,
        "accept_rate": rate,
        "accept_rate_meaning": accept_rate_meaning(version) if rate is not None else None,
    }
    if loads.running == 0 and loads.queued == 0:
        values["decode_tokens_per_s"] = 0.0
    present = {name: value for name, value in values.items() if value is not None}
    notes = {
        "decode_tokens_per_s": "as of the engine's last decode interval",
        "accept_length": "mean since the engine started",
        "accept_rate": "as of the engine's last decode interval",
    }
    missing = {name: reason for name in _FIELDS if name not in present}
    for name in ("accept_length", "accept_rate", "accept_rate_meaning"):
        if name in missing:
            missing[name] = "no acceptance reported" if speculation else "speculation is off"
    return EngineRates(
        **present,
        missing=missing,
        notes={name: note for name, note in notes.items() if present.get(name)},
    )


_FIELDS = [name for name in EngineRates.__struct_fields__ if name not in ("missing", "notes")]


def _running(replica: Mapping[str, Any]) -> int | None:
    """``/get_load`` counts running and waiting together."""
    running = integer(replica.get("num_running_reqs"))
    if running is not None:
        return running
    both, waiting = integer(replica.get("num_reqs")), integer(replica.get("num_waiting_reqs"))
    return None if both is None or waiting is None else max(0, both - waiting)


def _total(values: list[int | None]) -> int | None:
    """The sum over replicas; None when one of them did not say."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _numbers(replicas: list[Mapping[str, Any]], name: str) -> list[float]:
    return [value for replica in replicas if (value := number(replica.get(name))) is not None]


def _mean(values: list[float]) -> float | None:
    reported = [value for value in values if value > 0]
    return sum(reported) / len(reported) if reported else None
