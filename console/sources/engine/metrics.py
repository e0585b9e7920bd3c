"""The engine's ``/metrics``, reduced to the families the console uses, ranks folded together."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

#: More matching lines than any engine writes (four ranks have about 500); the rest is not parsed.
LINE_LIMIT = 5000

_LINE_LENGTH_LIMIT = 4096


class Fold(Enum):
    """How the series of one family become one number."""

    ALL = "sum of all series"
    RANKS = "first rank of each DP replica, summed"
    FULLEST = "first rank of each DP replica, the largest"
    REPORTING = "first rank of each DP replica, mean of those above zero"


class Family(NamedTuple):
    """One row of the table below. ``split`` names a label that is kept apart, not folded."""

    name: str
    fold: Fold
    split: str | None = None


# The tokenizer process writes token and request counters and the latency histograms, once
# for the whole engine. Their labels (is_streaming from 0.5.18, priority, cache_source from
# 0.5.23) divide one total, so all series are summed.
#
# Each scheduler writes gauges and step counters for its own rank. All TP and PP ranks of a
# DP replica do the same work on the same requests and have the same pool size; with
# --enable-metrics-for-all-schedulers each writes it down again. So one rank speaks for its
# replica, the one with the lowest (pp_rank, tp_rank), and replicas, whose requests and pools
# differ, are added up.
#
# With priority scheduling a queue gauge has its total under priority="" and its parts under
# priority="1", …: the parts are left out (observability/metrics_collector.py, 0.5.23).
TABLE: tuple[Family, ...] = (
    Family("generation_tokens_total", Fold.ALL),  # moves when a request ends
    Family("prompt_tokens_total", Fold.ALL),  # moves when a request ends
    Family("cached_tokens_total", Fold.ALL),  # moves when a request ends
    Family("num_requests_total", Fold.ALL),  # requests ended
    Family("num_aborted_requests_total", Fold.ALL),
    Family("spec_verify_calls_total", Fold.ALL),  # >= 0.5.13, moves when a request ends
    Family("realtime_tokens_total", Fold.RANKS, split="mode"),  # >= 0.5.8, moves at every step
    Family("num_retracted_requests_total", Fold.RANKS),  # >= 0.5.8
    Family("num_running_reqs", Fold.RANKS),
    Family("num_queue_reqs", Fold.RANKS),
    Family("num_used_tokens", Fold.RANKS),
    Family("kv_used_tokens", Fold.RANKS),  # >= 0.5.11
    Family("max_total_num_tokens", Fold.RANKS),  # >= 0.5.8
    Family("gen_throughput", Fold.RANKS),  # tokens/s of one replica
    Family("hicache_host_used_tokens", Fold.RANKS),  # >= 0.5.10
    Family("hicache_host_total_tokens", Fold.RANKS),  # >= 0.5.10
    # The replica that is full is the one that retracts; a mean would hide it.
    Family("token_usage", Fold.FULLEST),  # rounded to 0.01, the fullest pool
    Family("full_token_usage", Fold.FULLEST),  # >= 0.5.10, exact
    Family("swa_token_usage", Fold.FULLEST),
    Family("mamba_usage", Fold.FULLEST),
    # 0.0 is what a replica shows before its first interval, not an acceptance.
    Family("spec_accept_length", Fold.REPORTING),
    Family("spec_accept_rate", Fold.REPORTING),
)

#: Seconds. Written by the tokenizer process: all series are summed, bucket by bucket.
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
)

#: Cumulative counts by upper bound in seconds, ascending, the last bound infinite.
Buckets = tuple[tuple[float, float], ...]


class Scrape(msgspec.Struct, frozen=True):
    """One reading of ``/metrics``.

    ``values`` is keyed by family name without prefix (``realtime_tokens_total.decode``
    for a split one); a family without a sample is not in it. ``histograms`` likewise.
    """

    values: dict[str, float] = {}
    histograms: dict[str, Buckets] = {}
    bad_lines: int = 0  # lines of these families that could not be used
    truncated: bool = False  # the last line was not whole: families may be missing

    @property
    def empty(self) -> bool:
        """Nothing of an engine in it."""
        return not self.values and not self.histograms

    @property
    def note(self) -> str | None:
        """What was wrong with this scrape, in words."""
        parts = []
        if self.truncated:
            parts.append("it was cut off")
        if self.bad_lines:
            parts.append(f"{self.bad_lines} of its lines could not be read")
        return "/metrics: " + " and ".join(parts) if parts else None


Labels = Mapping[str, str]
Key = tuple[tuple[str, str], ...]
Series = dict[Key, float]

_FAMILIES = {family.name: family for family in TABLE}

# One pass at the speed of C over all 650 lines leaves about 100 to read.
_WANTED = re.compile(
    rb"^sglang[:_]((?:%s|(?:%s)_bucket)(?:\{[^\n]*|[ \t][^\n]*|))$"
    % (
        b"|".join(name.encode() for name in _FAMILIES),
        b"|".join(name.encode() for name in HISTOGRAMS),
    ),
    re.MULTILINE,
)


def parse(body: bytes) -> Scrape:
    """Read an exposition text. Any bytes give a Scrape: what cannot be read costs its own line.

    Prefixes ``sglang:`` and ``sglang_`` are the same (a newer prometheus_client escapes the colon).
    """
    truncated = bool(body) and not body.endswith(b"\n")
    if truncated:
        body = body[: body.rfind(b"\n") + 1]  # half a number is a wrong number
    lines = [match.decode("utf-8", "replace") for match in _WANTED.findall(body)]
    bad = max(0, len(lines) - LINE_LIMIT)
    series: dict[str, Series] = {}
    for line in lines[:LINE_LIMIT]:
        sample = _sample(line)
        if sample is None or math.isinf(sample[2]) or sample[2] < 0:
            bad += 1
            continue
        name, key, value = sample
        if math.isnan(value):  # how a gauge says that it has no value yet
            continue
        known = series.setdefault(name, {})
        bad += key in known
        known[key] = value
    values: dict[str, float] = {}
    histograms: dict[str, Buckets] = {}
    for name, found in series.items():
        if name in _FAMILIES:
            values.update(_fold(_FAMILIES[name], found))
            continue
        buckets = _buckets(found)
        if buckets is None or not name.endswith("_bucket"):
            bad += len(found)
        else:
            histograms[name.removesuffix("_bucket")] = buckets
    return Scrape(values, histograms, bad, truncated)


def _sample(line: str) -> tuple[str, Key, float] | None:
    """Name, labels and value of one line; None when it is no sample."""
    if len(line) > _LINE_LENGTH_LIMIT:
        return None
    head, brace, tail = line.rpartition("}")
    if not brace:
        head, _, tail = line.partition(" ")
    series = _series(head + brace)
    words = tail.split()  # a timestamp may follow the value
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        return None
    return None if series is None else (*series, value)


@functools.lru_cache(maxsize=2048)
def _series(head: str) -> tuple[str, Key] | None:
    """Name and labels as written before the value.

    They are the same in every scrape, and reading them is the dear part: 20 µs a line.
    """
    from prometheus_client.parser import text_string_to_metric_families as read

    try:
        [family] = read(head + " 0\n")
        [sample] = family.samples
    except (ValueError, IndexError):
        return None
    return sample.name, tuple(sorted(sample.labels.items()))


def _fold(family: Family, series: Series) -> dict[str, float]:
    """The number (or one for each value of the split label) that a family's series come to."""
    groups: dict[str, list[tuple[Labels, float]]] = {}
    for key, value in series.items():
        labels = dict(key)
        name = f"{family.name}.{labels.get(family.split)}" if family.split else family.name
        groups.setdefault(name, []).append((labels, value))
    return {name: _FOLDS[family.fold](group) for name, group in groups.items()}


def _replicas(series: list[tuple[Labels, float]]) -> list[float]:
    """One value for each DP replica: that of its lowest rank, of all priorities together."""
    totals = [item for item in series if not item[0].get("priority")] or series
    chosen: dict[str, tuple[tuple[int, int], float]] = {}
    for labels, value in totals:
        rank = (_rank(labels, "pp_rank"), _rank(labels, "tp_rank"))
        replica = labels.get("dp_rank", "")
        known = chosen.get(replica)
        if known is None or rank < known[0]:
            chosen[replica] = (rank, value)
        elif rank == known[0]:  # parts with no total of their own
            chosen[replica] = (rank, known[1] + value)
    return [value for _, value in chosen.values()]


def _rank(labels: Labels, name: str) -> int:
    text = labels.get(name, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0


def _sum_all(series: list[tuple[Labels, float]]) -> float:
    return sum(value for _, value in series)


def _sum_replicas(series: list[tuple[Labels, float]]) -> float:
    return sum(_replicas(series))


def _fullest(series: list[tuple[Labels, float]]) -> float:
    return max(_replicas(series))


def _reporting(series: list[tuple[Labels, float]]) -> float:
    reporting = [value for value in _replicas(series) if value > 0]
    return sum(reporting) / len(reporting) if reporting else 0.0


_FOLDS: dict[Fold, Callable[[list[tuple[Labels, float]]], float]] = {
    Fold.ALL: _sum_all,
    Fold.RANKS: _sum_replicas,
    Fold.FULLEST: _fullest,
    Fold.REPORTING: _reporting,
}


def _buckets(series: Series) -> Buckets | None:
    """Cumulative counts of all series, bound by bound; None when the bounds are no histogram's."""
    counts: dict[float, float] = {}
    for key, value in series.items():
        try:
            bound = float(dict(key).get("le", "nan"))
        except ValueError:
            return None
        counts[bound] = counts.get(bound, 0.0) + value
    if any(math.isnan(bound) for bound in counts) or math.inf not in counts:
        return None
    return tuple(sorted(counts.items()))
