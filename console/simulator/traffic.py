"""The requests that the engine on the box serves: a scheduler in small, with traffic of its own.

Every quantity an operator watches follows from the requests: running and queued, KV in use,
tokens per second, acceptance, latencies, log lines. Times are passed in; nothing here sleeps.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

from console.simulator.counters import E2E_BUCKETS, ITL_BUCKETS, QUEUE_BUCKETS, TTFT_BUCKETS, Counters
from console.simulator.spec import EngineSpec

#: Decode steps between two log lines; gauges move with them.
LOG_INTERVAL = 40

#: Seconds of idleness after which the scheduler writes its gauges once more.
IDLE_S = 30.0

CHUNK = 8192

#: How much of its allowed output the scheduler expects a request to need.
NEW_TOKEN_RATIO = 0.6204

PREFILL_TOKENS_PER_S = 7400.0

#: Tokens per second of one request alone, and how the sum grows with more of them.
SINGLE_TOKENS_PER_S = 92.0
SCALING = 0.63


class Request:
    """One request on its way through the engine. Times are Unix seconds."""

    def __init__(
        self,
        rid: str,
        arrived: float,
        prompt: int,
        cached: int,
        output: int,
        streaming: bool = True,
        served: bool = False,
    ) -> None:
        self.rid = rid
        self.arrived = arrived
        self.prompt = prompt
        self.cached = cached
        self.output = output  # tokens it will produce
        self.streaming = streaming
        self.served = served  # a client over HTTP waits for it and paces it
        self.to_prefill = prompt - cached
        self.produced = 0.0

    @property
    def length(self) -> int:
        return self.prompt - self.to_prefill + int(self.produced)


Say = Callable[[str, float], None]


class Traffic:
    """The scheduler of rank 0.

    ``say`` writes a log line of rank 0, ``access`` one of the main process, at a time in Unix seconds.
    """

    def __init__(
        self, spec: EngineSpec, counters: Counters, rng: random.Random, say: Say, access: Say, now: float
    ) -> None:
        self.spec = spec
        self.counters = counters
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.frozen = False
        self._rng = rng
        self._say = say
        self._write_access = access
        self._now = now
        self._count = 0
        self._next_arrival = now + 0.6
        self._next_burst = now + rng.uniform(25, 60)
        self._steps = 0.0
        self._since_log = 0.0
        self._log_at = now
        self._log_tokens = 0.0
        self._idle_since: float | None = None
        self._accept = 2.58 if spec.speculates else 1.0
        self._accepted_total = 0.0
        self._verify_total = 0.0
        self._recent_hits: deque[tuple[int, int]] = deque(maxlen=24)
        self._evictable = int(0.31 * spec.kv_tokens)
        self._host_used = float(int(0.74 * spec.host_tokens))
        self.last_throughput = 0.0
        self.decode_rate = 0.0  # tokens per second of the last tick
        self.prefill_share = 0.0  # of the last tick
        self._static_gauges()
        self._gauges()

    # What others ask ---------------------------------------------------------------------------

    @property
    def used_tokens(self) -> int:
        return sum(request.length for request in self.running)

    @property
    def usage(self) -> float:
        return self.used_tokens / self.spec.kv_tokens

    @property
    def cache_hit_rate(self) -> float:
        prompt = sum(prompt for prompt, _ in self._recent_hits)
        return sum(cached for _, cached in self._recent_hits) / prompt if prompt else 0.0

    @property
    def accept_length(self) -> float | None:
        """Mean since the engine started; None before the first verify step."""
        return self._accepted_total / self._verify_total if self._verify_total else None

    @property
    def accept_now(self) -> float:
        return self._accept

    @property
    def uncached_waiting(self) -> int:
        return sum(request.to_prefill for request in self.waiting)

    # Time passes -------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Everything that happens until ``now``."""
        elapsed = now - self._now
        if elapsed <= 0:
            return
        self._now = now
        if self.frozen:
            self.decode_rate = self.prefill_share = 0.0
            return
        self._arrivals(now)
        left = elapsed - self._prefill(now, elapsed)
        self.prefill_share = 1.0 - left / elapsed
        self._decode(now, left, elapsed)
        self._idle(now)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def burst(self, now: float) -> None:
        """Several requests at once, as an agent sends them."""
        for _ in range(self._rng.randint(4, 13)):
            self._arrive(now)

    def new_request(self, prompt: int, cached: int, output: int, streaming: bool) -> Request:
        """A request of a client over HTTP, which calls ``produce`` and ``finish`` itself."""
        self._count += 1
        return Request(
            f"{self._rng.getrandbits(128):032x}", self._now, prompt, cached, output, streaming, True
        )

    def produce(self, request: Request, tokens: float) -> None:
        """``tokens`` more of a request came out."""
        before = int(request.produced)
        request.produced += tokens
        whole = int(request.produced) - before
        self._log_tokens += whole
        self.counters.add_rank("realtime_tokens_total", whole, mode="decode")

    def finish(self, request: Request, aborted: bool = False) -> None:
        """The request has ended: the tokenizer process counts it."""
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        streaming = str(request.streaming).lower()
        count = self.counters.add
        if aborted:
            count("num_aborted_requests_total", 1)
        count("prompt_tokens_total", request.prompt, is_streaming=streaming)
        count("generation_tokens_total", int(request.produced), is_streaming=streaming)
        count("cached_tokens_total", request.cached)
        count("num_requests_total", 1, is_streaming=streaming)
        if self.spec.speculates:
            verify = request.produced / self._accept
            count("spec_verify_calls_total", round(verify))
            self._accepted_total += request.produced
            self._verify_total += verify
        self.counters.observe(
            "e2e_request_latency_seconds", self._now - request.arrived, E2E_BUCKETS, is_streaming=streaming
        )
        self._evictable = min(
            self._evictable + request.length - request.cached, self.spec.kv_tokens - self.used_tokens
        )
        if self.spec.host_tokens:
            grown = self._host_used + 0.35 * (request.length - request.cached)
            self._host_used = min(grown, 0.985 * self.spec.host_tokens)

    def _arrivals(self, now: float) -> None:
        while self._next_arrival <= now:
            self._arrive(self._next_arrival)
            self._next_arrival += self._rng.expovariate(demand(self._next_arrival))
        if self._next_burst <= now:
            self.burst(now)
            self._next_burst = now + self._rng.uniform(40, 150)

    def _arrive(self, at: float) -> None:
        rng = self._rng
        self._count += 1
        prompt = min(60_000, max(40, int(rng.lognormvariate(8.3, 0.9))))
        share = rng.betavariate(6, 2) if rng.random() < 0.82 else 0.0
        output = min(4_000, max(12, int(rng.lognormvariate(5.9, 0.8))))
        cached = min(prompt - 1, int(prompt * share))
        self.submit(Request(f"{rng.getrandbits(128):032x}", at, prompt, cached, output, rng.random() < 0.88))

    def _prefill(self, now: float, elapsed: float) -> float:
        """Take waiting requests in, a chunk at a time; seconds it took."""
        spent = 0.0
        while self.waiting and spent < elapsed and len(self.running) < self.spec.max_running_requests:
            batch = self._batch()
            if not batch:
                break
            new = sum(request.to_prefill for request in batch)
            cached = sum(request.cached for request in batch)
            took = 0.012 + new / PREFILL_TOKENS_PER_S
            spent += took
            pending = self.uncached_waiting
            self._say(
                f"Prefill batch, #new-seq: {len(batch)}, #new-token: {new}, #cached-token: {cached}, "
                f"token usage: {self.usage:.2f}, #running-req: {len(self.running)}, "
                f"#queue-req: {len(self.waiting)}, #pending-token: {pending}, cuda graph: False, "
                f"input throughput (token/s): {new / took:.2f}",
                now,
            )
            self.counters.add_rank("realtime_tokens_total", new, mode="prefill_compute")
            self.counters.add_rank("realtime_tokens_total", cached, mode="prefill_cache")
            self.counters.add_rank("cuda_graph_passes_total", 1, mode="prefill_none")
            for request in batch:
                request.to_prefill = 0
                self._recent_hits.append((request.prompt, request.cached))
                queued = max(0.0, now - request.arrived - elapsed) + self._rng.expovariate(180)
                self.counters.observe_rank("queue_time_seconds", queued, QUEUE_BUCKETS)
                if not request.produced:  # one that was retracted has had its first token
                    self.counters.observe(
                        "time_to_first_token_seconds",
                        queued + spent + 0.03,
                        TTFT_BUCKETS,
                        is_streaming=str(request.streaming).lower(),
                    )
                self.running.append(request)
            self._make_room()
            self._gauges()
        return min(spent, elapsed)

    def _batch(self) -> list[Request]:
        """The next requests that fit a chunk, the pool and the batch."""
        batch: list[Request] = []
        new = 0
        room = self.spec.kv_tokens - self.used_tokens
        while self.waiting and len(self.running) + len(batch) < self.spec.max_running_requests:
            request = self.waiting[0]
            need = request.prompt + max(int(request.produced), min(request.output, 512))
            if need > room or (batch and new + request.to_prefill > CHUNK):
                break
            batch.append(self.waiting.popleft())
            new += request.to_prefill
            room -= need
        return batch

    def _make_room(self) -> None:
        over = self._evictable + self.used_tokens - self.spec.kv_tokens
        if over > 0:
            self._evictable = max(0, self._evictable - over)
            self.counters.add_rank("evicted_tokens_total", over)

    def _decode(self, now: float, left: float, elapsed: float) -> None:
        own = [request for request in self.running if not request.served]
        count = len(self.running)
        if not count or left <= 0:
            self.decode_rate = 0.0
            return
        self._drift_acceptance()
        total_rate = SINGLE_TOKENS_PER_S * count**SCALING * self._accept / 2.55
        steps = total_rate / count / self._accept * left
        each = total_rate / count * left
        produced = 0.0
        for request in own:
            tokens = min(each * self._rng.uniform(0.93, 1.07), request.output - request.produced)
            self.produce(request, tokens)
            produced += tokens
            if request.streaming:
                self.counters.observe(
                    "inter_token_latency_seconds", left / max(each, 1e-6), ITL_BUCKETS, max(1, round(tokens))
                )
            if request.produced >= request.output:
                self.finish(request)
                self._access(now)
        self.decode_rate = produced / elapsed
        self._retract(now)
        self._since_log += steps
        self.counters.add_rank("cuda_graph_passes_total", round(steps), mode="decode_full")
        if self._since_log >= LOG_INTERVAL:
            self._since_log -= LOG_INTERVAL
            self._log_decode(now)

    def _retract(self, now: float) -> None:
        """The pool is full: the request that has come least far gives its room back and waits again."""
        while self.used_tokens > self.spec.kv_tokens:
            own = [request for request in self.running if not request.served]
            if len(own) < 2:
                return
            request = min(own, key=lambda each: each.produced)
            gained = request.length
            self.running.remove(request)
            request.to_prefill = request.prompt + int(request.produced) - request.cached
            self.waiting.appendleft(request)
            self._say(
                f"KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: {gained}, "
                f"#new_token_ratio: {NEW_TOKEN_RATIO:.4f} -> 0.9871",
                now,
            )
            self.counters.add_rank("num_retracted_requests_total", 1)
            self.counters.add_rank("num_retracted_input_tokens_total", request.prompt)
            self.counters.add_rank("num_retracted_output_tokens_total", int(request.produced))

    def _drift_acceptance(self) -> None:
        if self.spec.speculates:
            target = 2.58 + 0.13 * math.sin(self._now / 210.0)
            step = 0.02 * (target - self._accept) + self._rng.gauss(0.0, 0.012)
            self._accept = min(2.84, max(2.36, self._accept + step))

    def _log_decode(self, now: float) -> None:
        took = max(1e-3, now - self._log_at)
        self.last_throughput = self._log_tokens / took
        self._log_at, self._log_tokens = now, 0.0
        accept = ""
        if self.spec.speculates:
            rate = (self._accept - 1.0) / self.spec.steps
            accept = f"accept len: {self._accept:.2f}, accept rate: {rate:.2f}, "
        self._say(
            f"Decode batch, #running-req: {len(self.running)}, #token: {self.used_tokens}, "
            f"token usage: {self.usage:.2f}, {accept}cuda graph: True, "
            f"gen throughput (token/s): {self.last_throughput:.2f}, #queue-req: {len(self.waiting)}",
            now,
        )
        self._gauges(decode=True)

    def _access(self, now: float) -> None:
        client = self._rng.randint(33_000, 60_900)
        host = self._rng.choice(("10.20.0.41", "10.20.0.42", "10.20.0.57", "127.0.0.1"))
        self._write_access(f'INFO:     {host}:{client} - "POST /v1/chat/completions HTTP/1.1" 200 OK', now)

    def _idle(self, now: float) -> None:
        if self.running or self.waiting:
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = now
            self._log_at, self._log_tokens, self._since_log = now, 0.0, 0.0
        elif now - self._idle_since >= IDLE_S:
            self._idle_since = now
            self.last_throughput = 0.0
            self._gauges()

    # Gauges ------------------------------------------------------------------------------------

    def _static_gauges(self) -> None:
        spec, gauge = self.spec, self.counters.gauge
        gauge("max_total_num_tokens", spec.kv_tokens)
        gauge("weight_memory_usage_gb", spec.model.weights_gb)
        gauge("kv_cache_memory_usage_gb", spec.kv_gb)
        gauge("page_size", 1)
        gauge("num_pages", spec.kv_tokens)
        gauge("context_len", spec.model.context_length)
        gauge("startup_available_gpu_memory_gb", 6.4)
        gauge("num_retracted_reqs", 0)
        gauge("num_paused_reqs", 0)
        gauge("num_grammar_queue_reqs", 0)
        gauge("swa_token_usage", 0)
        gauge("mamba_usage", 0)
        gauge("utilization", 0)
        gauge("spec_accept_length", 0)
        gauge("spec_accept_rate", 0)
        gauge("is_cuda_graph", 0)
        gauge("spec_num_steps", spec.steps if spec.speculates else 0)
        gauge("spec_num_draft_tokens", spec.draft_tokens if spec.speculates else 0)
        for phase in ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend"):
            gauge("graph_memory_usage_gb", graph_memory(spec)[phase], phase=phase)

    def _gauges(self, decode: bool = False) -> None:
        """What the scheduler writes at a log interval, at a prefill, or once in a while when idle."""
        spec, gauge, used = self.spec, self.counters.gauge, self.used_tokens
        self._evictable = max(0, min(self._evictable, spec.kv_tokens - used))
        gauge("num_running_reqs", len(self.running))
        gauge("num_queue_reqs", len(self.waiting))
        gauge("gen_throughput", self.last_throughput)
        gauge("cache_hit_rate", self.cache_hit_rate)
        gauge("decode_sum_seq_lens", used)
        gauge("token_usage", round(self.usage, 2))
        gauge("full_token_usage", self.usage)
        gauge("num_used_tokens", used)
        gauge("kv_used_tokens", used)
        gauge("kv_evictable_tokens", self._evictable)
        gauge("kv_available_tokens", spec.kv_tokens - used - self._evictable)
        gauge("new_token_ratio", NEW_TOKEN_RATIO)
        if spec.host_tokens:
            gauge("hicache_host_used_tokens", int(self._host_used))
            gauge("hicache_host_total_tokens", spec.host_tokens)
        if decode:
            gauge("is_cuda_graph", 1)
            if spec.speculates:
                gauge("spec_accept_length", self._accept)
                gauge("spec_accept_rate", (self._accept - 1.0) / spec.steps)

    def age(self, seconds: float) -> None:
        """As if the engine had served for ``seconds`` before: counters and histograms of that time."""
        requests = int(seconds * 0.62)
        sample = 240
        weight = max(1, requests // sample)
        rng, observe = self._rng, self.counters.observe
        for _ in range(sample):
            prompt = min(60_000, max(40, int(rng.lognormvariate(8.3, 0.9))))
            cached = int(prompt * rng.betavariate(6, 2))
            output = min(4_000, max(12, int(rng.lognormvariate(5.9, 0.8))))
            streaming = "true" if rng.random() < 0.88 else "false"
            first = 0.06 + (prompt - cached) / PREFILL_TOKENS_PER_S
            pace = SINGLE_TOKENS_PER_S / rng.randint(2, 24) ** (1 - SCALING)
            self.counters.add("prompt_tokens_total", prompt * weight, is_streaming=streaming)
            self.counters.add("generation_tokens_total", output * weight, is_streaming=streaming)
            self.counters.add("num_requests_total", weight, is_streaming=streaming)
            self.counters.add("cached_tokens_total", cached * weight)
            count = self.counters.add_rank
            count("realtime_tokens_total", (prompt - cached) * weight, mode="prefill_compute")
            count("realtime_tokens_total", cached * weight, mode="prefill_cache")
            count("realtime_tokens_total", output * weight, mode="decode")
            observe("time_to_first_token_seconds", first, TTFT_BUCKETS, weight, is_streaming=streaming)
            observe(
                "e2e_request_latency_seconds",
                first + output / pace,
                E2E_BUCKETS,
                weight,
                is_streaming=streaming,
            )
            observe("inter_token_latency_seconds", 1 / pace, ITL_BUCKETS, output * weight)
            self.counters.observe_rank("queue_time_seconds", rng.expovariate(90), QUEUE_BUCKETS, weight)
            if self.spec.speculates:
                self.counters.add("spec_verify_calls_total", round(output * weight / 2.58))
                self._accepted_total += output * weight
                self._verify_total += output * weight / 2.58


def demand(at: float) -> float:
    """Requests per second: a day's wave, with swells of minutes on it, so that a chart has shape."""
    day = 0.5 - 0.5 * math.cos((at % 86_400) / 86_400 * 2 * math.pi - 1.1)
    swell = 0.5 + 0.5 * math.sin(at / 83.0) * math.sin(at / 31.0 + 1.3)
    return 0.12 + 0.55 * day + 0.75 * swell


def graph_memory(spec: EngineSpec) -> dict[str, float]:
    """GiB of captured graphs per rank, by phase."""
    phases = dict.fromkeys(
        ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend"), 0.0
    )
    if spec.speculates:
        return phases | {"target_verify": 1.34, "draft_decode": 0.34, "draft_extend": 0.25}
    return phases | {"decode": 1.27}
