"""From counters to what the engine does now: a window of scrapes, and the rates over it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from console.model.engine import EngineIdentity, EngineRates, Quantiles
from console.sources.engine.metrics import Buckets, Scrape

#: Tokens per second are taken over at least this long, seconds. Decode steps come every
#: 20 to 200 ms, several tokens at once: less would show the steps, more would lag.
RATE_SPAN = 3.0

#: Quantiles, shares and counts are those of the last minute.
MINUTE = 60.0

#: After a gap this long there is no "now" to compare with: the window starts anew.
GAP_LIMIT = 15.0

#: Scrapes closer than this to the one before are used but not kept; it bounds the window.
_SPACING = 0.25

#: Prompt tokens a minute that the health probes of this console and others make by themselves.
_PROBE_TOKENS = 64.0

TTFT = "time_to_first_token_seconds"
ITL = "inter_token_latency_seconds"
E2E = "e2e_request_latency_seconds"

_DECODE = "realtime_tokens_total.decode"
_COMPUTED = "realtime_tokens_total.prefill_compute"
_CACHED = "realtime_tokens_total.prefill_cache"

_NO_SPECULATION = "speculation is off"
_CUT_OFF = "/metrics was cut off"
_LAST_INTERVAL = "as of the engine's last decode interval"


class Sample(msgspec.Struct, frozen=True):
    """The counters of one scrape; a counter that never moved is not written, and is 0."""

    at: float  # monotonic seconds
    counters: dict[str, float]
    histograms: dict[str, Buckets]
    bad_lines: int = 0

    def count(self, name: str) -> float:
        return self.counters.get(name, 0.0)

    def observations(self, name: str) -> float:
        buckets = self.histograms.get(name)
        return buckets[-1][1] if buckets else 0.0

    @property
    def by_step(self) -> bool:
        """Tokens are counted at every step, not only when a request ends (>= 0.5.8)."""
        return any(name in self.counters for name in (_DECODE, _COMPUTED, _CACHED))

    @property
    def generated(self) -> float:
        """Tokens generated.

        A request's first token comes out of its prefill and is not in the decode counter:
        ten requests of 1624 tokens in all moved it by 1614. The first-token histogram has it.
        """
        if not self.by_step:
            return self.count("generation_tokens_total")
        return self.count(_DECODE) + self.observations(TTFT)

    @property
    def prefilled(self) -> float:
        """Prompt tokens computed, without those found in the cache."""
        if not self.by_step:
            return self.count("prompt_tokens_total") - self.count("cached_tokens_total")
        return self.count(_COMPUTED)

    @property
    def reused(self) -> float:
        """Prompt tokens found in the cache."""
        return self.count(_CACHED if self.by_step else "cached_tokens_total")


class Window(msgspec.Struct, frozen=True):
    """The scrapes of the last minute, oldest first, of one run of the engine."""

    samples: tuple[Sample, ...] = ()
    restarts: int = 0  # times a counter went down
    speculated: bool = False  # an acceptance was seen since the engine started

    @property
    def newest(self) -> Sample | None:
        return self.samples[-1] if self.samples else None


def advance(
    window: Window, scrape: Scrape, now: float, identity: EngineIdentity | None = None
) -> tuple[Window, EngineRates]:
    """The window with this scrape in it, and the rates over it. ``now`` is monotonic seconds.

    A counter that went down means that the engine restarted: the window starts anew, so no
    rate is negative and none is a spike. A scrape that was cut off, or lost lines which the one
    before it had, moves no counter: what is lost would look like a restart, and then like a spike.
    """
    last = window.newest
    if last is not None and not 0 <= now - last.at <= GAP_LIMIT:
        window, last = msgspec.structs.replace(window, samples=()), None
    damaged = scrape.truncated or (last is not None and scrape.bad_lines > last.bad_lines)
    if not damaged:
        sample = _sample(scrape, now)
        window = _extend(window, sample)
    else:
        sample = last or Sample(now, {}, {})
    speculated = window.speculated or scrape.values.get("spec_accept_length", 0.0) > 0
    window = msgspec.structs.replace(window, speculated=speculated)
    return window, _rates(window, sample, scrape, identity)


def moving(window: Window) -> bool:
    """The engine generated tokens between the last two scrapes."""
    if len(window.samples) < 2:
        return False
    return window.samples[-1].generated > window.samples[-2].generated


def accept_rate_meaning(version: str | None) -> str:
    """What ``spec_accept_rate`` says in this version of SGLang."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    if numbers is None:
        return "meaning unknown: it changed at 0.5.11, and the engine's version is not known"
    if tuple(map(int, numbers.groups())) < (0, 5, 11):
        return "tokens per verify step / draft tokens (before 0.5.11)"
    return "drafts that were right / drafts proposed (from 0.5.11)"


def quantiles(before: Buckets | None, after: Buckets | None) -> Quantiles:
    """Quantiles of what came between two cumulative histograms, in seconds.

    Linear within a bucket, as Prometheus does; past the last finite bound, that bound.
    """
    if not after:
        return Quantiles()
    earlier = dict(before or ())
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]
    return Quantiles(*(_quantile(counts, share) for share in (0.50, 0.90, 0.99)))


def _quantile(counts: list[tuple[float, float]], share: float) -> float | None:
    total = counts[-1][1]
    if total <= 0:
        return None
    wanted = share * total
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if math.isinf(bound):
                return lower
            inside = count - below
            return lower + (bound - lower) * ((wanted - below) / inside if inside > 0 else 1.0)
        lower, below = bound, max(below, count)
    return lower


def _sample(scrape: Scrape, now: float) -> Sample:
    counters = {
        name: value for name, value in scrape.values.items() if name.partition(".")[0].endswith("_total")
    }
    return Sample(now, counters, scrape.histograms, scrape.bad_lines)


def _extend(window: Window, sample: Sample) -> Window:
    last = window.newest
    if last is None or sample.bad_lines < last.bad_lines:  # what was lost before is back
        return msgspec.structs.replace(window, samples=(sample,))
    if any(sample.count(name) < value for name, value in last.counters.items()):
        return Window((sample,), window.restarts + 1)
    kept = window.samples
    if len(kept) > 1 and last.at - kept[-2].at < _SPACING:
        kept = kept[:-1]
    # One sample older than a minute stays, to measure the whole minute from.
    while len(kept) > 1 and kept[1].at <= sample.at - MINUTE:
        kept = kept[1:]
    return msgspec.structs.replace(window, samples=(*kept, sample))


def _baseline(window: Window, now: float, span: float) -> Sample | None:
    """The newest kept sample at least ``span`` seconds old, else the oldest before this one."""
    earlier = [sample for sample in window.samples if sample.at < now]
    old = [sample for sample in earlier if sample.at <= now - span + _SPACING]
    if old:
        return old[-1]
    return earlier[0] if earlier else None


class _Draft:
    """Values on their way into EngineRates, each either there or with its reason."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def put(self, name: str, value: Any, reason: str, note: str | None = None) -> None:
        if value is None:
            self.missing[name] = reason
            return
        self.values[name] = value
        if note is not None:
            self.notes[name] = note

    def finish(self) -> EngineRates:
        return EngineRates(**self.values, missing=self.missing, notes=self.notes)


def _rates(window: Window, sample: Sample, scrape: Scrape, identity: EngineIdentity | None) -> EngineRates:
    draft = _Draft()
    _put_speeds(draft, window, sample)
    _put_minute(draft, window, sample)
    _put_gauges(draft, scrape, identity)
    _put_acceptance(draft, window, sample, scrape, identity)
    whole = window.newest is not None
    draft.put("generated_tokens_total", sample.generated if whole else None, _CUT_OFF)
    prompts = sample.count("prompt_tokens_total")
    draft.put("prompt_tokens_total", prompts if whole else None, _CUT_OFF)
    if scrape.note is not None:
        draft.notes["scrape"] = scrape.note
    return draft.finish()


def _put_speeds(draft: _Draft, window: Window, sample: Sample) -> None:
    note = None if sample.by_step else "this version counts tokens when a request ends, not as they come"
    for name, count in _SPEEDS.items():
        draft.put(name, _speed(window, sample, count), "a rate needs a second reading", note)


def _speed(window: Window, sample: Sample, count: Callable[[Sample], float]) -> float | None:
    """Tokens per second over exactly RATE_SPAN, the counter at its begin interpolated.

    Spans of whole ticks would be now three, now four long, and what came in one tick would
    count more or less than once in the sum of all rates shown. A younger window is taken whole.
    """
    begin = sample.at - RATE_SPAN
    earlier = [one for one in window.samples if one.at < sample.at]
    if not earlier:
        return None
    after = next((one for one in (*earlier, sample) if one.at >= begin), sample)
    before = next((one for one in reversed(earlier) if one.at <= begin), earlier[0])
    at, value = max(begin, before.at), count(before)
    if after.at > before.at and at > before.at:
        value += (count(after) - value) * (at - before.at) / (after.at - before.at)
    # Before 0.5.8 cached tokens may run ahead of the prompts they are subtracted from.
    return max(0.0, count(sample) - value) / (sample.at - at)


_SPEEDS: dict[str, Callable[[Sample], float]] = {
    "decode_tokens_per_s": lambda sample: sample.generated,
    "prefill_tokens_per_s": lambda sample: sample.prefilled,
}


def _put_minute(draft: _Draft, window: Window, sample: Sample) -> None:
    """What is counted over the last minute, or since the console began to watch, if that is less."""
    before = _baseline(window, sample.at, MINUTE)
    if before is None:
        for name in ("cache_hit_ratio", "retractions_per_min", "requests_per_s", "aborted_per_min",
                     "ttft", "itl", "e2e"):  # fmt: skip
            draft.missing[name] = "it needs a second reading"
        return
    span = sample.at - before.at

    def moved(name: str) -> float:
        return sample.count(name) - before.count(name)

    reused, computed = sample.reused - before.reused, sample.prefilled - before.prefilled
    started = sample.observations(TTFT) > before.observations(TTFT)
    asked = reused + computed > (0 if started else _PROBE_TOKENS)
    ratio = min(1.0, max(0.0, reused / (reused + computed))) if asked else None
    draft.put("cache_hit_ratio", ratio, "no prompt came in the last minute")
    # In a young window they are counts so far: one retraction in two seconds is not thirty a minute.
    per_minute = MINUTE / max(span, MINUTE)
    draft.put("retractions_per_min", moved("num_retracted_requests_total") * per_minute, "")
    draft.put("aborted_per_min", moved("num_aborted_requests_total") * per_minute, "")
    draft.put("requests_per_s", moved("num_requests_total") / span, "")
    for name, histogram, reason in _LATENCIES:
        found = quantiles(before.histograms.get(histogram), sample.histograms.get(histogram))
        draft.put(name, found if found.p50 is not None else None, reason)


_LATENCIES = (
    ("ttft", TTFT, "no request had its first token in the last minute"),
    ("itl", ITL, "no request streamed in the last minute"),
    ("e2e", E2E, "no request ended in the last minute"),
)


def _put_gauges(draft: _Draft, scrape: Scrape, identity: EngineIdentity | None) -> None:
    values = scrape.values
    version = f" in {identity.version}" if identity and identity.version else ""

    def absent(name: str) -> str:
        return f"metric {name} is absent{version}"

    draft.put("requests_running", _whole(values.get("num_running_reqs")), absent("num_running_reqs"))
    draft.put("requests_queued", _whole(values.get("num_queue_reqs")), absent("num_queue_reqs"))
    draft.put("kv_usage_ratio", _usage(values), absent("token_usage"))
    used = values.get("kv_used_tokens", values.get("num_used_tokens"))
    draft.put("kv_used_tokens", _whole(used), absent("num_used_tokens"))
    total = _whole(values.get("max_total_num_tokens"))
    if total is None and identity is not None:
        total = identity.kv_token_capacity
    draft.put("kv_total_tokens", total, absent("max_total_num_tokens"))
    hicache = "hierarchical cache is off, or its metrics are absent" + version
    draft.put("hicache_used_tokens", _whole(values.get("hicache_host_used_tokens")), hicache)
    draft.put("hicache_total_tokens", _whole(values.get("hicache_host_total_tokens")), hicache)


def _usage(values: dict[str, float]) -> float | None:
    """0..1 of the fullest pool. ``token_usage`` is the same rounded to 0.01, so the exact ones go first."""
    exact = [
        values[name] for name in ("full_token_usage", "swa_token_usage", "mamba_usage") if name in values
    ]
    if "full_token_usage" in values:
        return max(exact)
    return values.get("token_usage", max(exact, default=None))


def _put_acceptance(
    draft: _Draft, window: Window, sample: Sample, scrape: Scrape, identity: EngineIdentity | None
) -> None:
    off = _speculation_off(window, sample, identity)
    if off is not None:
        for name in ("accept_length", "accept_rate", "accept_rate_meaning"):
            draft.missing[name] = off
        return
    waiting = "no acceptance measured since the engine started"
    counted = _counted_accept_length(window, sample)
    gauge = scrape.values.get("spec_accept_length") or None
    if counted is not None:
        draft.put("accept_length", counted, "", "of the requests that ended in the last minute")
    else:
        draft.put("accept_length", gauge, waiting, _LAST_INTERVAL)
    version = identity.version if identity is not None else None
    rate = (scrape.values.get("spec_accept_rate") if gauge else None) or None
    draft.put("accept_rate", rate, waiting, _LAST_INTERVAL)
    draft.put("accept_rate_meaning", accept_rate_meaning(version) if rate else None, waiting)


def _speculation_off(window: Window, sample: Sample, identity: EngineIdentity | None) -> str | None:
    """Why there is no acceptance; None when there is speculation.

    The gauges are there, at 0.0, without speculation too: they say nothing until they move.
    """
    if identity is not None:
        return None if identity.speculative_algorithm is not None else _NO_SPECULATION
    if window.speculated or sample.count("spec_verify_calls_total") > 0:
        return None
    return "speculation is off, or has verified nothing yet"


def _counted_accept_length(window: Window, sample: Sample) -> float | None:
    """Tokens per verify step of the requests that ended in the last minute (>= 0.5.13).

    All three counters move together, when a request ends. Its first token is the prefill's.
    """
    before = _baseline(window, sample.at, MINUTE)
    if before is None:
        return None
    names = ("spec_verify_calls_total", "generation_tokens_total", "num_requests_total")
    verified, generated, ended = (sample.count(name) - before.count(name) for name in names)
    return (generated - ended) / verified if verified > 0 and generated > ended else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
