"""What the engine on the box serves, from the command line of its unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")

#: The engine's version: its log, endpoints and metrics are those of this one.
VERSION = "0.5.18"


class Model(msgspec.Struct, frozen=True):
    """What one model weighs on eight cards. Memory in GiB per rank, ``cell`` in bytes per token and rank.

    ``slot`` is the bytes of a hybrid model's state for one request, on a rank.
    """

    architecture: str
    model_type: str
    weights_gb: float
    shards: int
    load_s: float
    cell: int
    context_length: int
    multimodal: bool
    slot: int = 0


_KIMI = Model("KimiK25ForConditionalGeneration", "kimi_k25", 63.91, 64, 398.0, 70_272, 262_144, True)
_QWEN = Model(
    "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", 28.74, 46, 171.0, 15_360, 262_144, True, 24_007_680
)
_OTHER = Model("LlamaForCausalLM", "llama", 17.62, 30, 96.0, 40_960, 131_072, False)

#: GiB of a card as CUDA sees it, what its context and NCCL's buffers take of it, and what is then free.
CARD_GB = 94.97
CONTEXT_GB = 1.34
FREE_GB = CARD_GB - CONTEXT_GB

#: GiB of activations and buffers that come once graphs are captured.
WORKSPACE_GB = 1.12

#: GiB of the draft model on each rank; bytes a token that its cache is reckoned to take, and takes.
DRAFT_GB = 0.78
_DRAFT_CELL = 1_152
_DRAFT_POOL_CELL = 1_024

#: --mamba-full-memory-ratio's default.
_STATE_RATIO = 0.9


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
    def weights_gb(self) -> float:
        """GiB of target and draft on each rank."""
        return self.model.weights_gb + (DRAFT_GB if self.speculates else 0.0)

    @property
    def static_gb(self) -> float:
        """GiB for KV cache and states: what the static share leaves after the weights."""
        return FREE_GB * self.mem_fraction - self.weights_gb

    @property
    def state_slots(self) -> int:
        """Slots of a hybrid model's state; the pool has one more, for padding."""
        if not self.model.slot:
            return 0
        budget = self.static_gb * _STATE_RATIO / (1 + _STATE_RATIO) * 2**30
        return max(1, int(budget / self.model.slot) - 1)

    @property
    def state_gb(self) -> float:
        return (self.state_slots + 1) * self.model.slot / 2**30 if self.model.slot else 0.0

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit: what is left after the weights and the states, divided by the cell."""
        return max(4096, int((self.static_gb - self.state_gb) * 2**30 / self.cell))

    @property
    def target_kv_gb(self) -> float:
        return self.kv_tokens * self.model.cell / 2**30

    @property
    def draft_kv_gb(self) -> float:
        return self.kv_tokens * _DRAFT_POOL_CELL / 2**30 if self.speculates else 0.0

    @property
    def kv_gb(self) -> float:
        """GiB of the target's cache and the draft's."""
        return self.target_kv_gb + self.draft_kv_gb

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
    def available_gb(self) -> float:
        """GiB that are free once the graphs are captured."""
        return FREE_GB - self.weights_gb - self.state_gb - self.kv_gb - self.graph_gb

    @property
    def used_gb(self) -> float:
        """GiB in use on each card once the engine is ready, with its context and NCCL's buffers."""
        return CARD_GB - self.available_gb + WORKSPACE_GB


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
