"""What the engine on the box serves, from the command line of its unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")

#: The engine's version: its log, endpoints and metrics are those of this one.
VERSION = "0.5.18"


class Model(msgspec.Struct, frozen=True):
    """What one model weighs on eight cards. Memory in GiB per rank, ``cell`` in bytes per token and rank."""

    architecture: str
    model_type: str
    weights_gb: float
    shards: int
    load_s: float
    cell: int
    context_length: int
    multimodal: bool


_KIMI = Model("KimiK25ForConditionalGeneration", "kimi_k25", 63.91, 64, 398.0, 70_272, 262_144, True)
_QWEN = Model("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", 28.74, 46, 171.0, 15_360, 262_144, True)
_OTHER = Model("LlamaForCausalLM", "llama", 17.62, 30, 96.0, 40_960, 131_072, False)

#: GiB that are free on a card before anything is loaded, and of the draft model.
FREE_GB = 94.11
DRAFT_GB = 0.78
_DRAFT_CELL = 1_152


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's resolved arguments, as far as the box plays them."""

    argv: tuple[str, ...]
    model: Model
    model_path: str
    served_name: str
    host: str
    port: int
    tp_size: int
    algorithm: str | None
    draft_path: str | None
    steps: int
    mem_fraction: float
    tool_call_parser: str | None
    reasoning_parser: str | None
    hicache_ratio: float | None
    metrics: bool
    max_running_requests: int
    cuda_graph_max_bs: int
    attention_backend: str
    quantization: str | None
    trust_remote_code: bool
    disable_custom_all_reduce: bool

    @property
    def speculates(self) -> bool:
        return self.algorithm is not None

    @property
    def draft_tokens(self) -> int:
        return self.steps + 1

    @property
    def cell(self) -> int:
        """KV bytes per token and rank, the draft model's pool included."""
        return self.model.cell + (_DRAFT_CELL if self.speculates else 0)

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit: what the static share leaves after the weights, divided by the cell."""
        after = FREE_GB - self.model.weights_gb - (DRAFT_GB if self.speculates else 0.0)
        rest = after - FREE_GB * (1 - self.mem_fraction)
        return max(4096, int(rest * 2**30 / self.cell))

    @property
    def kv_gb(self) -> float:
        return self.kv_tokens * self.cell / 2**30

    @property
    def host_tokens(self) -> int:
        return int(self.kv_tokens * self.hicache_ratio) if self.hicache_ratio else 0

    @property
    def host_gb(self) -> float:
        """Pinned host memory per rank, in the decimal gigabytes of the engine's log."""
        return self.host_tokens * self.model.cell / 1e9

    @property
    def graph_gb(self) -> float:
        return 1.93 if self.speculates else 1.27

    @property
    def used_gb(self) -> float:
        """GiB in use on each card once the engine is ready, with its context and NCCL's buffers."""
        draft = DRAFT_GB if self.speculates else 0.0
        return 1.34 + self.model.weights_gb + draft + self.kv_gb + self.graph_gb + 1.12


def spec_of(argv: Sequence[str], port: int) -> EngineSpec:
    """The engine that ``argv`` starts; the box serves it on ``port``, whatever the flag says.

    ValueError, in argparse's words, for a number that is none.
    """
    flags = _flags(argv)
    path = flags.get("model-path") or flags.get("model") or "/shared/model"
    lower = path.lower()
    model = _KIMI if "kimi" in lower else _QWEN if "qwen3.5" in lower else _OTHER
    algorithm = flags.get("speculative-algorithm") or flags.get("speculative-algo") or None
    hierarchical = "enable-hierarchical-cache" in flags
    return EngineSpec(
        argv=tuple(argv),
        model=model,
        model_path=path,
        served_name=flags.get("served-model-name") or path,
        host=flags.get("host") or "127.0.0.1",
        port=port,
        tp_size=_integer(flags, "tp-size", "tp") or 1,
        algorithm=algorithm,
        draft_path=flags.get("speculative-draft-model-path"),
        steps=_integer(flags, "speculative-num-steps") or 3,
        mem_fraction=_number(flags, "mem-fraction-static") or 0.84,
        tool_call_parser=flags.get("tool-call-parser"),
        reasoning_parser=flags.get("reasoning-parser"),
        hicache_ratio=(_number(flags, "hicache-ratio") or 2.0) if hierarchical else None,
        metrics="enable-metrics" in flags,
        max_running_requests=_integer(flags, "max-running-requests") or (48 if algorithm else 2048),
        cuda_graph_max_bs=_integer(flags, "cuda-graph-max-bs", "cuda-graph-max-bs-decode") or 512,
        attention_backend=flags.get("attention-backend") or "flashinfer",
        quantization=flags.get("quantization"),
        trust_remote_code="trust-remote-code" in flags,
        disable_custom_all_reduce="disable-custom-all-reduce" in flags,
    )


def _flags(argv: Sequence[str]) -> dict[str, str]:
    """``--flag value``, ``--flag=value`` and bare ``--flag`` (an empty text)."""
    flags: dict[str, str] = {}
    name: str | None = None
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = value
            if equals:
                name = None
        elif name is not None and not flags[name]:
            flags[name] = word
    return flags


def _integer(flags: dict[str, str], *names: str) -> int | None:
    return _value(flags, names, int, "int")


def _number(flags: dict[str, str], *names: str) -> float | None:
    return _value(flags, names, float, "float")


def _value(flags: dict[str, str], names: tuple[str, ...], kind: Callable[[str], T], word: str) -> T | None:
    for name in names:
        text = flags.get(name)
        if text:
            try:
                return kind(text)
            except ValueError:
                raise ValueError(f"argument --{name}: invalid {word} value: {text!r}") from None
    return None
