"""The engine's Prometheus families: counters, gauges, histograms, and their text.

Names, labels and buckets are those of SGLang 0.5.18's multiprocess registry; the gauges
that the scheduler writes move only when it writes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

TTFT_BUCKETS = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0,
)  # fmt: skip
E2E_BUCKETS = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0,
    600.0, 1200.0, 1800.0, 2400.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4,
    0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
)  # fmt: skip
QUEUE_BUCKETS = (
    0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
    50.0, 60.0, 70.0, 80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0,
    1200.0, 1400.0, 1600.0, 1800.0, 2000.0, 2500.0, 3000.0,
)  # fmt: skip

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts by upper bound, not cumulative; the last is above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: Labels) -> Iterator[str]:
        running = 0
        yield f"{name}_sum{_text(labels)} {self.total}"
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            yield f"{name}_bucket{_text((*labels, ('le', bound)))} {float(running)}"
        yield f"{name}_count{_text(labels)} {float(running)}"


class Family:
    """One metric family and its series."""

    def __init__(self, name: str, kind: str, help_text: str) -> None:
        self.name = f"sglang:{name}"
        self.kind = kind
        self.help = help_text
        self.values: dict[Labels, float] = {}
        self.histograms: dict[Labels, Histogram] = {}

    def lines(self) -> Iterator[str]:
        if not self.values and not self.histograms:
            return  # as in a multiprocess registry: a family is there once somebody wrote to it
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.values.items():
            yield f"{self.name}{_text(labels)} {float(value)}"
        for labels, histogram in self.histograms.items():
            yield from histogram.lines(self.name, labels)


def _text(labels: Labels) -> str:
    return (
        "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(labels)) + "}" if labels else ""
    )


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


#: Gauges of the scheduler, in the order of the exposition.
SCHEDULER_GAUGES: Mapping[str, str] = {
    "num_retracted_reqs": "The number of retracted requests.",
    "num_paused_reqs": "The number of paused requests by async weight sync.",
    "max_total_num_tokens": "Maximum total number of tokens in the KV cache pool.",
    "weight_memory_usage_gb": "Memory used by model weights in GB.",
    "kv_cache_memory_usage_gb": "Memory used by the KV cache pools in GB.",
    "page_size": "KV cache page size in tokens.",
    "num_pages": "Number of KV cache pages.",
    "context_len": "Maximum context length.",
    "startup_available_gpu_memory_gb": "Available GPU memory in GB at startup.",
    "num_running_reqs": "The number of running requests.",
    "num_queue_reqs": "The number of requests in the waiting queue.",
    "num_grammar_queue_reqs": "The number of requests in the grammar waiting queue.",
    "gen_throughput": "The generation throughput (token/s).",
    "cache_hit_rate": "The prefix cache hit rate.",
    "decode_sum_seq_lens": "The sum of all sequence lengths in decode.",
    "token_usage": "The token usage.",
    "full_token_usage": "The token usage for full attention layers.",
    "swa_token_usage": "The token usage for SWA layers.",
    "mamba_usage": "The token usage for Mamba layers.",
    "num_used_tokens": "The number of used tokens.",
    "kv_available_tokens": "Number of free token slots in the KV cache pool.",
    "kv_evictable_tokens": "Number of evictable (radix-cached) token slots in the KV cache pool.",
    "kv_used_tokens": "Number of actively used token slots in the KV cache pool.",
    "hicache_host_used_tokens": "Number of tokens currently used in the HiCache host pool.",
    "hicache_host_total_tokens": "Total capacity of the HiCache host pool in tokens.",
    "spec_accept_length": "Mean acceptance length of speculative decoding "
    "(accepted drafts + bonus token per forward).",
    "spec_accept_rate": "Speculative acceptance rate (`accepted drafts / proposed drafts` in batch).",
    "spec_num_steps": "Currently active speculative_num_steps.",
    "spec_num_draft_tokens": "Currently active speculative_num_draft_tokens "
    "(decouples from steps under topk>1).",
    "utilization": "The utilization.",
    "new_token_ratio": "The new token ratio.",
    "is_cuda_graph": "Whether the batch is using CUDA graph.",
}

#: Gauges that the registry keeps apart by process, with its pid for a label.
_PER_PROCESS = frozenset({"num_retracted_reqs", "num_paused_reqs"})

_SCHEDULER_COUNTERS: Mapping[str, str] = {
    "num_retracted_requests_total": "Total number of retracted requests.",
    "num_retracted_input_tokens_total": "Total number of retracted input tokens.",
    "num_retracted_output_tokens_total": "Total number of retracted output tokens.",
    "evicted_tokens_total": "The number of tokens evicted from GPU to CPU.",
    "load_back_tokens_total": "The number of tokens loaded back from CPU to GPU.",
}

_MODES: Mapping[str, str] = {
    "cuda_graph_passes_total": "Total number of forward passes categorized by CUDA graph.",
    "realtime_tokens_total": "Total number of tokens processed (updated on each log interval). "
    "mode: prefill_compute, prefill_cache, decode.",
}

_TOKENIZER_COUNTERS: Mapping[str, str] = {
    "prompt_tokens_total": "Number of prefill tokens processed.",
    "generation_tokens_total": "Number of generation tokens processed.",
    "num_requests_total": "Number of requests processed.",
}


class Counters:
    """All that ``/metrics`` tells of one run of the engine."""

    def __init__(self, served_name: str, rank_pid: int = 0) -> None:
        self._rank_pid = str(rank_pid)
        model = ("model_name", served_name)
        self._tokenizer: Labels = (("engine_type", "unified"), model)
        self._scheduler: Labels = (
            *self._tokenizer,
            ("moe_ep_rank", "0"),
            ("pp_rank", "0"),
            ("tp_rank", "0"),
        )
        self._families: dict[str, Family] = {}
        self._declare(
            "http_requests_total", "counter", "Total number of HTTP requests by endpoint and method"
        )
        self._declare(
            "http_responses_total", "counter", "Total number of HTTP responses by endpoint and status code"
        )
        for name, text in _TOKENIZER_COUNTERS.items():
            self._declare(name, "counter", text)
        self._declare(
            "spec_verify_calls_total", "counter", "Number of speculative decoding verification calls."
        )
        self._declare("num_aborted_requests_total", "counter", "Number of requests aborted.")
        self._declare("cached_tokens_total", "counter", "Number of cached prompt tokens.")
        for name, text in {**_SCHEDULER_COUNTERS, **_MODES}.items():
            self._declare(name, "counter", text)
        for name, text in SCHEDULER_GAUGES.items():
            self._declare(name, "gauge", text)
        self._declare("graph_memory_usage_gb", "gauge", "Memory used by captured device graphs in GB.")
        self._declare("queue_time_seconds", "histogram", "Histogram of queueing time in seconds.")
        self._declare(
            "time_to_first_token_seconds", "histogram", "Histogram of time to first token in seconds."
        )
        self._declare(
            "e2e_request_latency_seconds", "histogram", "Histogram of End-to-end request latency in seconds"
        )
        self._declare(
            "inter_token_latency_seconds", "histogram", "Histogram of inter-token latency in seconds."
        )
        self._declare("http_requests_active", "gauge", "Number of currently active HTTP requests")

    def _declare(self, name: str, kind: str, text: str) -> None:
        self._families[name] = Family(name, kind, text)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Count in the tokenizer's series (no ranks)."""
        self._add(name, amount, (*self._tokenizer, *labels.items()))

    def add_rank(self, name: str, amount: float, **labels: str) -> None:
        """Count in the series of the scheduler of rank 0."""
        self._add(name, amount, (*self._scheduler, *labels.items()))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge of the scheduler of rank 0."""
        if name in _PER_PROCESS:
            labels["pid"] = self._rank_pid
        self._families[name].values[(*self._scheduler, *labels.items())] = value

    def observe(
        self, name: str, value: float, bounds: Sequence[float], times: int = 1, **labels: str
    ) -> None:
        """Count in one of the tokenizer's histograms."""
        self._histogram(name, (*self._tokenizer, *labels.items()), bounds).observe(value, times)

    def observe_rank(self, name: str, value: float, bounds: Sequence[float], times: int = 1) -> None:
        self._histogram(name, self._scheduler, bounds).observe(value, times)

    def http(self, endpoint: str, method: str, status: int) -> None:
        labels = (("endpoint", endpoint), ("method", method))
        self._add("http_requests_total", 1, labels)
        self._add("http_responses_total", 1, (*labels, ("status_code", str(status))))

    def http_active(self, endpoint: str, method: str, change: int) -> None:
        self._add("http_requests_active", change, (("endpoint", endpoint), ("method", method)))

    def value(self, name: str, **labels: str) -> float:
        """Sum of the series that carry these labels; 0 when there is none."""
        wanted = set(labels.items())
        return sum(value for series, value in self._families[name].values.items() if wanted <= set(series))

    def text(self) -> str:
        """The exposition, Prometheus text format 0.0.4."""
        return "\n".join(line for family in self._families.values() for line in family.lines()) + "\n"

    def _add(self, name: str, amount: float, labels: Labels) -> None:
        values = self._families[name].values
        values[labels] = values.get(labels, 0.0) + amount

    def _histogram(self, name: str, labels: Labels, bounds: Sequence[float]) -> Histogram:
        histograms = self._families[name].histograms
        if labels not in histograms:
            histograms[labels] = Histogram(bounds)
        return histograms[labels]
