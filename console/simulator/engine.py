"""The engine on the box: its state, its HTTP endpoints and its own traffic.

Answers have the shapes of SGLang 0.5.18 as far as a client of the console's kind reads them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from console.simulator.cards import Work
from console.simulator.chat import ChatDesk
from console.simulator.clock import Clock
from console.simulator.counters import Counters
from console.simulator.faults import Faults
from console.simulator.load import Source, duration, server_args
from console.simulator.spec import VERSION, EngineSpec
from console.simulator.traffic import Traffic, graph_memory
from console.simulator.web import REASONS, Call, Reply, WebServer

#: Seconds between two steps of the scheduler.
TICK_S = 0.25

#: The probe looks once a second whether its token came.
HEALTH_S = 1.0

#: SGLANG_HEALTH_CHECK_TIMEOUT's default.
HEALTH_TIMEOUT_S = 20.0

#: The first version seen with ``/ready``; the versions that Kimi-K2.5's flags fit have none.
READY_SINCE = "0.5.20"

State = Literal["down", "loading", "warming", "up", "draining"]

#: Text, who writes it, of which rank, and when (Unix seconds; None: now).
Log = Callable[[str, Source, int, float | None], None]


class Engine:
    """One engine at a time; ``start`` begins another run of it."""

    def __init__(self, faults: Faults, rng: random.Random, clock: Clock, log: Log) -> None:
        self.state: State = "down"
        self.memory_gb = 0.0
        self.spec: EngineSpec | None = None
        self.counters = Counters("")
        self.traffic: Traffic | None = None
        self._faults = faults
        self._rng = rng
        self._clock = clock
        self._log = log
        self._web = WebServer(self._handle)
        self._created = 0
        self._chat: ChatDesk | None = None
        self._memory_before = 0.0
        self._routes: dict[tuple[str, str], Callable[[Call, Reply], Awaitable[None]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/health_generate"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/v1/models"): self._models,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/get_model_info"): self._model_info,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/get_server_info"): self._server_info,
            ("GET", "/v1/loads"): self._loads,
            ("GET", "/get_load"): self._get_load,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/v1/chat/completions"): self._chat_completions,
            ("POST", "/generate"): self._generate,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/flush_cache"): self._flush_cache,
            ("GET", "/flush_cache"): self._flush_cache,
            ("GET", "/ping"): self._ping,
        }

    # A run's life ------------------------------------------------------------------------------

    def start(self, spec: EngineSpec, rank_pid: int, at: float) -> None:
        """Another run begins at ``at`` (Unix seconds); ``rank_pid`` is its first scheduler's."""
        self.spec = spec
        self.state = "loading"
        self.memory_gb = self._memory_before = 0.0
        self._created = int(at)
        self.counters = Counters(spec.served_name, rank_pid)
        self.traffic = None
        self._chat = None

    async def bind(self, port: int) -> int:
        """The HTTP server comes up, the warm-up begins. OSError when the port is taken."""
        bound = await self._web.open(port)
        self.state = "warming"
        return bound

    def up(self, at: float, aged_s: float = 0.0) -> None:
        """Ready at ``at``; ``aged_s`` seconds of service are already behind it."""
        assert self.spec is not None
        traffic = Traffic(self.spec, self.counters, self._rng, self._say_rank, self._say_main, at)
        if aged_s:
            traffic.age(aged_s)
        self.traffic = traffic
        self._chat = ChatDesk(self.spec, traffic, self._faults, self._rng, self._clock)
        self.state = "up"

    def drain(self) -> None:
        self.state = "draining"

    async def close(self) -> None:
        """The process is gone: the port is free, the memory too."""
        await self._web.close()
        self.state = "down"
        self.memory_gb = 0.0
        self.traffic = None
        self._chat = None

    def advance(self, now: float) -> None:
        """The scheduler's work until ``now``."""
        if self.traffic is not None:
            self.traffic.frozen = "hang" in self._faults
            self.traffic.advance(now)

    def work(self) -> Work:
        """What every card does now."""
        traffic, spec = self.traffic, self.spec
        if spec is None or self.state == "down":
            return Work()
        if traffic is None:
            moving = self.memory_gb - self._memory_before
            self._memory_before = self.memory_gb
            loading = 1.0 if moving > 0.05 else 0.0
            return Work(loading=loading, memory_gb=self.memory_gb, link_rx=1.4e9 * loading)
        running = len(traffic.running)
        decode = 0.0 if traffic.frozen or not traffic.decode_rate else min(0.97, 0.72 + 0.016 * running)
        prefill = traffic.prefill_share
        return Work(
            decode=decode * (1 - prefill),
            prefill=prefill,
            spinning=1.0 if traffic.frozen else 0.0,
            memory_gb=self.memory_gb,
            link_tx=traffic.decode_rate * 5.1e6 + prefill * 5.6e9,
            link_rx=traffic.decode_rate * 5.2e6 + prefill * 5.9e9,
        )

    def _say_rank(self, text: str, at: float) -> None:
        self._log(text, "rank", 0, at)

    def _say_main(self, text: str, at: float) -> None:
        self._log(text, "main", 0, at)

    # HTTP --------------------------------------------------------------------------------------

    async def _handle(self, call: Call, reply: Reply) -> None:
        route = self._routes.get((call.method, call.path))
        if route is None and call.method == "GET" and call.path.startswith("/v1/models/"):
            route = self._model
        self.counters.http_active(call.path, call.method, 1)
        try:
            if route is not None:
                await route(call, reply)
            elif any(path == call.path for _, path in self._routes):
                reply.send(405, b'{"detail":"Method Not Allowed"}')
            else:
                reply.send(404, b'{"detail":"Not Found"}')
        except (ConnectionError, asyncio.IncompleteReadError):
            raise  # the client has gone
        except Exception as defect:
            self._log(f"Exception in ASGI application: {type(defect).__name__}: {defect}", "main", 0, None)
            if reply.streaming:
                raise ConnectionAbortedError from defect
            reply.send(500, b"Internal Server Error", "text/plain; charset=utf-8")
        finally:
            self.counters.http_active(call.path, call.method, -1)
            if reply.status:
                self._access(call, reply.status)

    def _access(self, call: Call, status: int) -> None:
        self.counters.http(call.path, call.method, status)
        query = "?" + "&".join(f"{key}={value}" for key, value in call.query.items()) if call.query else ""
        request = f"{call.method} {call.path}{query} HTTP/1.1"
        text = f'INFO:     {call.client} - "{request}" {status} {REASONS.get(status, "")}'
        self._log(text.rstrip(), "main", 0, None)

    async def _health(self, call: Call, reply: Reply) -> None:
        if self.state != "up" or self.traffic is None:
            reply.send(503)
            return
        began = self._clock.wall()
        if "hang" in self._faults:
            await asyncio.sleep(HEALTH_TIMEOUT_S)
            self._health_failed(began)
            reply.send(503)
            return
        self._say_rank(
            "Prefill batch, #new-seq: 1, #new-token: 1, #cached-token: 0, "
            f"token usage: {self.traffic.usage:.2f}, "
            f"#running-req: {len(self.traffic.running)}, #queue-req: {len(self.traffic.waiting)}, "
            "#pending-token: 0, cuda graph: False, input throughput (token/s): 0.97",
            began,
        )
        slow = self._rng.uniform(15.2, 18.5) if "slow-health" in self._faults else HEALTH_S
        await asyncio.sleep(slow)
        reply.send(200 if self.state == "up" else 503)

    def _health_failed(self, began: float) -> None:
        def moment(at: float) -> str:
            return time.strftime("%H:%M:%S", time.gmtime(at))

        self._log(
            "Health check failed. Server couldn't get a response from detokenizer for last "
            f"{HEALTH_TIMEOUT_S:.0f} seconds. tic start time: {moment(began)}. "
            f"last_heartbeat time: {moment(began - 1)}",
            "main",
            0,
            None,
        )

    async def _ready(self, call: Call, reply: Reply) -> None:
        if not _since(READY_SINCE):
            reply.send(404, b'{"detail":"Not Found"}')
            return
        reply.send(200 if self.state == "up" else 503)

    async def _ping(self, call: Call, reply: Reply) -> None:
        reply.send(200)

    async def _models(self, call: Call, reply: Reply) -> None:
        reply.send(200, _json({"object": "list", "data": [self._model_card()]}))

    async def _model(self, call: Call, reply: Reply) -> None:
        name = call.path.removeprefix("/v1/models/")
        if self.spec is not None and name == self.spec.served_name:
            reply.send(200, _json(self._model_card()))
            return
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        reply.send(404, _json({"error": error}))

    def _model_card(self) -> dict[str, object]:
        spec = self._spec
        return {
            "id": spec.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "sglang",
            "root": spec.served_name,
            "parent": None,
            "max_model_len": spec.model.context_length,
        }

    async def _model_info(self, call: Call, reply: Reply) -> None:
        spec = self._spec
        reply.send(
            200,
            _json(
                {
                    "model_path": spec.model_path,
                    "tokenizer_path": spec.model_path,
                    "is_generation": True,
                    "preferred_sampling_params": None,
                    "weight_version": "default",
                    "reasoning_parser": spec.reasoning_parser,
                    "tool_call_parser": spec.tool_call_parser,
                    "has_image_understanding": spec.model.multimodal,
                    "has_audio_understanding": False,
                    "model_type": spec.model.model_type,
                    "architectures": [spec.model.architecture],
                }
            ),
        )

    async def _server_info(self, call: Call, reply: Reply) -> None:
        if "hang" in self._faults:
            await asyncio.sleep(3600)  # a round trip through the scheduler, which does not come back
        spec, traffic = self._spec, self.traffic
        arguments = server_args(spec)
        internal: dict[str, object] = {
            **arguments,
            "last_gen_throughput": traffic.last_throughput if traffic else 0.0,
            "memory_usage": {
                # Of the target alone; graphs are those of the draft too.
                "weight": round(spec.model.weights_gb, 3),
                "kvcache": round(spec.target_kv_gb, 3),
                "startup_available": round(spec.available_gb, 3),
                "token_capacity": spec.kv_tokens,
                "token_capacity_swa": None,
                "graph": graph_memory(spec),
            },
            "effective_max_running_requests_per_dp": spec.max_running_requests,
        }
        accept = traffic.accept_length if traffic else None
        if spec.speculates and accept is not None:
            internal["avg_spec_accept_length"] = accept
        whole = duration(spec)
        reply.send(
            200,
            _json(
                {
                    **arguments,
                    "status": "ready",
                    "max_total_num_tokens": spec.kv_tokens,
                    "max_req_input_len": spec.kv_tokens - 6,
                    "startup_time": {
                        "load_weight": spec.model.load_s,
                        "kv_cache_allocation": 4.0,
                        "scheduler_e2e": round(whole - 52.0, 2),
                        "cuda_graph": dict.fromkeys(graph_memory(spec), 0.0),
                        "tokenizer_e2e": 21.4,
                    },
                    "internal_states": [internal],
                    "version": VERSION,
                    "kv_events": None,
                }
            ),
        )

    async def _loads(self, call: Call, reply: Reply) -> None:
        spec, traffic, now = self._spec, self.traffic, self._clock.wall()
        used = traffic.used_tokens if traffic else 0
        item: dict[str, object] = {
            "timestamp": now,
            "dp_rank": 0,
            "num_running_reqs": len(traffic.running) if traffic else 0,
            "num_waiting_reqs": len(traffic.waiting) if traffic else 0,
            "num_waiting_uncached_tokens": traffic.uncached_waiting if traffic else 0,
            "num_used_tokens": used,
            "num_total_tokens": used + (traffic.uncached_waiting if traffic else 0),
            "max_total_num_tokens": spec.kv_tokens,
            "max_running_requests": spec.max_running_requests,
            "token_usage": round(used / spec.kv_tokens, 4),
            "gen_throughput": round(traffic.last_throughput, 2) if traffic else 0.0,
            "cache_hit_rate": round(traffic.cache_hit_rate, 4) if traffic else 0.0,
            "utilization": 0.0,
            "memory": {
                "weight_gb": round(spec.model.weights_gb, 3),
                "kv_cache_gb": round(spec.target_kv_gb, 3),
                "graph_gb": spec.graph_gb,
                "token_capacity": spec.kv_tokens,
            },
        }
        accept = traffic.accept_length if traffic else None
        if spec.speculates and accept is not None and traffic is not None:
            item["speculative"] = {
                "accept_length": round(accept, 3),
                "accept_rate": round((traffic.accept_now - 1) / spec.steps, 3),
            }
        item["queues"] = {
            "waiting": len(traffic.waiting) if traffic else 0,
            "grammar": 0,
            "paused": 0,
            "retracted": 0,
        }
        wanted = set(call.query.get("include", "all").replace("%2C", ",").split(","))
        if "all" not in wanted:
            for section, name in (("memory", "memory"), ("speculative", "spec"), ("queues", "queues")):
                if name not in wanted:
                    item.pop(section, None)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}+00:00"
        reply.send(
            200,
            _json(
                {
                    "timestamp": stamp,
                    "version": VERSION,
                    "accelerator": "cuda",
                    "num_accelerators": spec.tp_size,
                    "loads": [item],
                }
            ),
        )

    async def _get_load(self, call: Call, reply: Reply) -> None:
        traffic = self.traffic
        running = len(traffic.running) if traffic else 0
        waiting = len(traffic.waiting) if traffic else 0
        used = traffic.used_tokens if traffic else 0
        reply.send(
            200,
            _json(
                [
                    {
                        "dp_rank": 0,
                        "num_reqs": running + waiting,
                        "num_waiting_reqs": waiting,
                        "num_tokens": used,
                    }
                ]
            ),
        )

    async def _metrics(self, call: Call, reply: Reply) -> None:
        if not self._spec.metrics:
            reply.send(404, b'{"detail":"Not Found"}')
            return
        text = self.counters.text().encode()
        reply.send(200, text, "text/plain; version=0.0.4; charset=utf-8")

    async def _chat_completions(self, call: Call, reply: Reply) -> None:
        if self._chat is None:
            reply.send(503)
            return
        await self._chat.chat(call, reply)

    async def _generate(self, call: Call, reply: Reply) -> None:
        if self._chat is None:
            reply.send(503)
            return
        await self._chat.generate(call, reply)

    async def _abort(self, call: Call, reply: Reply) -> None:
        if self._chat is not None:
            self._chat.abort(call.body)
        reply.send(200)

    async def _flush_cache(self, call: Call, reply: Reply) -> None:
        busy = self.traffic is not None and (self.traffic.running or self.traffic.waiting)
        text = b"Flush cache failed.\n" if busy else b"Cache flushed.\n"
        text += b"Please check backend logs for more details. (When there are running or waiting requests, "
        text += b"the operation will not be performed.)\n"
        reply.send(400 if busy else 200, text, "text/plain; charset=utf-8")

    @property
    def _spec(self) -> EngineSpec:
        assert self.spec is not None  # the port is bound only while an engine runs
        return self.spec


def _since(version: str) -> bool:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    return numbers(VERSION) >= numbers(version)


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
