"""What is known of SGLang's flags and variables, as data: other names, what may be added, changed defaults.

From the flag tables of the released packages 0.5.8 to 0.5.23 (``ServerArgs.add_cli_args``) and
``sglang/srt/environ.py`` of each.
"""

from __future__ import annotations

from typing import Literal

import msgspec

#: Other names of one flag, by argparse itself or as abbreviations in common use.
ALIASES: dict[str, str] = {
    "model": "model-path",
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "ep": "ep-size",
    "expert-parallel-size": "ep-size",
    "attention-data-parallel-size": "attn-dp-size",
    "attention-context-parallel-size": "attn-cp-size",
    "decode-context-parallel-size": "dcp-size",
    "moe-data-parallel-size": "moe-dp-size",
    "nccl-init-addr": "dist-init-addr",
    "speculative-algo": "speculative-algorithm",
    "speculative-draft-model": "speculative-draft-model-path",
    "enable-hicache": "enable-hierarchical-cache",
}

#: Fields of ``/server_info`` that are not named as their flag is.
FIELDS: dict[str, str] = {
    "fp4-gemm-backend": "fp4_gemm_runner_backend",
    "fp8-gemm-backend": "fp8_gemm_runner_backend",
    "stream-output": "incremental_streaming_output",
}

#: Values that the engine takes under another name: no difference between asked and in force.
RENAMED_VALUES: dict[tuple[str, str], str] = {("tool-call-parser", "qwen25"): "qwen"}

Effect = Literal["none", "memory", "numbers"]


class Allowance(msgspec.Struct, frozen=True):
    """What a flag or variable does when a benchmark did not have it, and in a few words why that is so.

    ``none``: the numbers stay. ``memory``: it takes memory or caches, so the numbers may
    move; allowed, and said. ``numbers``: it changes speed or answers.
    """

    effect: Effect
    why: str

    @property
    def allowed(self) -> bool:
        return self.effect != "numbers"


_ADDRESS = "address, not speed"
_NAME = "name, not speed"
_PARSE = "parsing, not speed"
_OBSERVE = "observing, not speed"
_LOG = "logging, not speed"
_ACCESS = "access, not speed"
_CACHE = "a cache in host RAM: helps repeats"
_WATCH = "time limits, not speed"
_FILES = "paths, not speed"

_FLAGS_BY_REASON: tuple[tuple[Effect, str, tuple[str, ...]], ...] = (
    ("none", _ADDRESS, ("host", "port", "fastapi-root-path", "nccl-port", "dist-init-addr", "grpc-mode")),
    ("none", _NAME, ("served-model-name", "weight-version")),
    (
        "none",
        _PARSE,
        (
            "tool-call-parser",
            "reasoning-parser",
            "tool-server",
            "chat-template",
            "hf-chat-template-name",
            "completion-template",
        ),
    ),
    (
        "none",
        _OBSERVE,
        (
            "enable-metrics",
            "enable-metrics-for-all-schedulers",
            "enable-cache-report",
            "collect-tokens-histogram",
            "bucket-time-to-first-token",
            "bucket-inter-token-latency",
            "bucket-e2e-request-latency",
            "prompt-tokens-buckets",
            "generation-tokens-buckets",
            "decode-log-interval",
            "enable-trace",
            "otlp-traces-endpoint",
            "crash-dump-folder",
            "export-metrics-to-file",
            "export-metrics-to-file-dir",
        ),
    ),
    (
        "none",
        _LOG,
        (
            "log-level",
            "log-level-http",
            "log-requests",
            "log-requests-level",
            "log-requests-format",
            "log-requests-target",
            "show-time-cost",
            "uvicorn-access-log-exclude-prefixes",
            "enable-request-time-stats-logging",
        ),
    ),
    (
        "none",
        _ACCESS,
        (
            "api-key",
            "api-key-file",
            "admin-api-key",
            "ssl-keyfile",
            "ssl-certfile",
            "ssl-ca-certs",
            "ssl-keyfile-password",
        ),
    ),
    ("none", _WATCH, ("watchdog-timeout", "soft-watchdog-timeout", "dist-timeout")),
    ("none", _FILES, ("download-dir", "file-storage-path", "config")),
    (
        "memory",
        _CACHE,
        (
            "enable-hierarchical-cache",
            "hicache-ratio",
            "hicache-size",
            "hicache-write-policy",
            "hicache-io-backend",
            "hicache-mem-layout",
            "hicache-host-memory-fraction",
            "hicache-storage-backend",
            "hicache-storage-backend-extra-config",
            "hicache-storage-prefetch-policy",
        ),
    ),
)

_VARIABLES_BY_REASON: tuple[tuple[Effect, str, tuple[str, ...]], ...] = (
    ("none", _LOG, ("NCCL_DEBUG_FILE", "SGLANG_LOG_MS", "SGLANG_LOGGING_CONFIG_PATH", "PYTHONUNBUFFERED")),
    ("none", "prints more at start-up; TRACE would slow it down", ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS")),
    ("none", _OBSERVE, ("PROMETHEUS_MULTIPROC_DIR",)),
    (
        "none",
        _FILES,
        (
            "HF_HOME",
            "HF_HUB_CACHE",
            "HUGGINGFACE_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "TRANSFORMERS_OFFLINE",
            "HF_HUB_DISABLE_TELEMETRY",
            "HF_HUB_ENABLE_HF_TRANSFER",
            "HF_HUB_DISABLE_PROGRESS_BARS",
            "TRITON_CACHE_DIR",
            "TORCHINDUCTOR_CACHE_DIR",
            "FLASHINFER_WORKSPACE_BASE",
            "CUDA_HOME",
            "CUDA_CACHE_PATH",
        ),
    ),
    ("none", _ACCESS, ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "SGLANG_API_KEY")),
    ("none", _WATCH, ("SGLANG_HEALTH_CHECK_TIMEOUT", "SGLANG_WARMUP_TIMEOUT")),
    ("none", "the tokenizer's threads at start-up", ("TOKENIZERS_PARALLELISM",)),
    ("none", "how the cards are numbered, not which", ("CUDA_DEVICE_ORDER",)),
)

#: Beginnings of names that change speed, memory or answers whenever they are set.
_NUMBERS_FLAGS = (
    "attention-backend",
    "chunked-prefill-size",
    "context-length",
    "cpu-offload",
    "cuda-graph",
    "decode-attention-backend",
    "disable-",
    "dp-size",
    "attn-dp-size",
    "dtype",
    "enable-dp-",
    "enable-flashinfer-allreduce-fusion",
    "enable-mixed-chunk",
    "enable-torch-compile",
    "ep-size",
    "flashinfer-allreduce-fusion",
    "fp4-gemm-backend",
    "fp8-gemm-backend",
    "json-model-override-args",
    "kv-cache-dtype",
    "load-format",
    "mamba-",
    "max-prefill-tokens",
    "max-running-requests",
    "max-total-tokens",
    "mem-fraction-static",
    "moe-",
    "page-size",
    "pp-size",
    "prefill-attention-backend",
    "quantization",
    "sampling-backend",
    "schedule-",
    "speculative-",
    "stream-interval",
    "tp-size",
)
_NUMBERS_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "NCCL_")


def _by_name(rows: tuple[tuple[Effect, str, tuple[str, ...]], ...]) -> dict[str, Allowance]:
    return {name: Allowance(effect, why) for effect, why, names in rows for name in names}


_FLAGS = _by_name(_FLAGS_BY_REASON)
_VARIABLES = _by_name(_VARIABLES_BY_REASON)


def allowance(kind: str, name: str) -> Allowance | None:
    """What an added flag or variable does to the numbers; None: nobody has said."""
    known, beginnings = (_FLAGS, _NUMBERS_FLAGS) if kind == "flag" else (_VARIABLES, _NUMBERS_VARIABLES)
    if name in known:
        return known[name]
    if name.startswith(beginnings):
        return Allowance("numbers", "changes speed, memory or answers")
    return None


#: Beginnings of the variables that the engine and what it stands on read; others are not compared.
ENGINE_VARIABLES = (
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "FLASHINFER_",
    "GLOO_",
    "HF_",
    "HUGGING",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "MALLOC_",
    "MKL_",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "NVSHMEM_",
    "OMP_",
    "OPENBLAS_",
    "PROMETHEUS_MULTIPROC_DIR",
    "PYTORCH_",
    "SGLANG_",
    "SGL_",
    "TOKENIZERS_PARALLELISM",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "TVM_",
    "UCX_",
    "VLLM_",
)


def read_by_engine(name: str) -> bool:
    """Whether a variable is one that the engine, or a library below it, goes by."""
    return name.startswith(ENGINE_VARIABLES)


class DefaultChange(msgspec.Struct, frozen=True):
    """A default that is not the same in all versions.

    ``since`` are pairs of a version and the default from there on, oldest first; None: there is no
    such flag or variable any more, and ``gone`` says what holds instead. ``only_with`` names a flag
    without which it does not matter.
    """

    kind: Literal["flag", "variable"]
    name: str
    since: tuple[tuple[str, str | None], ...]
    gone: str = ""
    only_with: str | None = None

    def at(self, version: str) -> str | None:
        """The default in this version, None when it is gone there. KeyError before the first known."""
        from packaging.version import Version

        asked = Version(version)
        found = [default for since, default in self.since if Version(since) <= asked]
        if not found:
            raise KeyError(version)
        return found[-1]


DEFAULT_CHANGES: tuple[DefaultChange, ...] = (
    DefaultChange(
        "variable",
        "SGLANG_ENABLE_SPEC_V2",
        (("0.5.5", "False"), ("0.5.11", "True"), ("0.5.14", None)),
        gone="speculation always runs overlapped",
        only_with="speculative-algorithm",
    ),
    DefaultChange(
        "flag",
        "fp4-gemm-backend",
        (("0.5.8", "auto"), ("0.5.9", "flashinfer_cutlass"), ("0.5.10", "auto")),
        only_with="quantization",
    ),
    DefaultChange(
        "flag",
        "hicache-ratio",
        (("0.5.5", "2.0"), ("0.5.20", "not given: 2.0, and from 0.5.22 less when memory is short")),
        only_with="enable-hierarchical-cache",
    ),
    DefaultChange(
        "flag",
        "hicache-mem-layout",
        (("0.5.8", "layer_first"), ("0.5.20", "page_first")),
        only_with="enable-hierarchical-cache",
    ),
    DefaultChange(
        "flag",
        "hicache-storage-prefetch-policy",
        (("0.5.8", "best_effort"), ("0.5.20", "timeout")),
        only_with="hicache-storage-backend",
    ),
)

#: With speculation and no --max-running-requests SGLang takes this many (server_args.py, all versions).
SPECULATION_MAX_RUNNING = 48
