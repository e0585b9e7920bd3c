"""What the engine (SGLang) says of itself, as counters read and as rates derived."""

from __future__ import annotations

import msgspec


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds, interpolated in the histogram's buckets over the last minute; None: no request in it."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What changes only when the service restarts (``/server_info``, ``/v1/models``)."""

    version: str | None = None
    served_names: tuple[str, ...] = ()
    model_path: str | None = None
    context_length: int | None = None
    tp_size: int | None = None
    dp_size: int | None = None
    speculative_algorithm: str | None = None  # None when speculation is off
    speculative_steps: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_running_requests: int | None = None
    kv_token_capacity: int | None = None
    weight_gb: float | None = None  # GiB per rank
    kv_cache_gb: float | None = None
    graph_gb: float | None = None
    launch_command: str | None = None


class EngineRates(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's work right now. None: not available, with the reason in ``missing`` by field name."""

    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None  # computed, without cache hits
    requests_running: int | None = None
    requests_queued: int | None = None
    kv_usage_ratio: float | None = None  # 0..1, the fullest pool
    kv_used_tokens: int | None = None
    kv_total_tokens: int | None = None
    cache_hit_ratio: float | None = None  # over the last minute
    accept_length: float | None = None  # tokens per verify step, 1.0 = speculation gains nothing
    accept_rate: float | None = None  # meaning changed at 0.5.11; see accept_rate_meaning
    accept_rate_meaning: str | None = None
    ttft: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()
    retractions_per_min: float | None = None
    requests_per_s: float | None = None
    aborted_per_min: float | None = None
    hicache_used_tokens: int | None = None
    hicache_total_tokens: int | None = None
    generated_tokens_total: float | None = None  # the counter itself, since the engine started
    prompt_tokens_total: float | None = None
    missing: dict[str, str] = msgspec.field(default_factory=dict)
    #: How to take a value that is there ("as of …"), by field name; "scrape": of the reading as a whole.
    notes: dict[str, str] = msgspec.field(default_factory=dict)


class Probe(msgspec.Struct, frozen=True):
    """The outcome of one HTTP request to the engine.

    ``status`` is the HTTP status, or None when there was no whole answer; ``error``
    is then one of ``refused``, ``timeout``, ``reset``, ``malformed``, ``too large``,
    ``unreachable``. A redirect, never followed, has its status and ``redirect``.
    ``detail`` says it in words; ``seconds`` is how long it took.
    """

    path: str
    status: int | None
    error: str | None
    seconds: float
    detail: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200
