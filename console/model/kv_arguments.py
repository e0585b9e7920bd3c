"""The arguments of SGLang that decide its caches, from a profile's flags or from ``/server_info``."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

#: Speculation that has a draft model with a cache of its own.
_WITH_DRAFT = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")

_OTHER_NAMES = {
    "tp-size": ("tensor-parallel-size", "tp"),
    "dp-size": ("data-parallel-size", "dp"),
    "pp-size": ("pipeline-parallel-size", "pp"),
    "speculative-algorithm": ("speculative-algo",),
    "speculative-draft-model-path": ("speculative-draft-model",),
    "enable-hierarchical-cache": ("enable-hicache",),
    "model-path": ("model",),
}


class KvArguments(msgspec.Struct, frozen=True, kw_only=True):
    """None: the flag is not given, and the engine chooses by itself."""

    model_path: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    dp_attention: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    mem_fraction: float | None = None
    max_total_tokens: int | None = None
    page_size: int = 1
    context_length: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    speculative_algorithm: str | None = None
    draft_path: str | None = None
    draft_tokens: int | None = None
    hierarchical: bool = False
    hicache_ratio: float | None = None
    hicache_size: float | None = None  # decimal GB, of each rank
    radix_cache: bool = True
    mamba_ratio: float = 0.9
    mamba_slots: int | None = None  # --max-mamba-cache-size
    mamba_item_bytes: int | None = None

    @property
    def attention_tp(self) -> int:
        """Ranks that share the attention heads of one token."""
        return max(1, self.tp_size // self.dp_size) if self.dp_attention else self.tp_size

    @property
    def ranks(self) -> int:
        """Processes with a card each; every one keeps a host cache of its own."""
        return self.tp_size * self.pp_size * (1 if self.dp_attention else self.dp_size)

    @property
    def replicas(self) -> int:
        """Schedulers with a cache of their own contents."""
        return self.dp_size

    @property
    def drafts(self) -> bool:
        """Whether a draft model with a cache of its own is loaded."""
        return self.speculative_algorithm in _WITH_DRAFT


def read_arguments(flags: Mapping[str, object]) -> tuple[KvArguments, tuple[str, ...]]:
    """The arguments, and what is wrong with those that cannot be read; these count as not given.

    ``flags`` are a profile's (``tp-size: "8"``) or resolved ones as JSON has them (``tp_size: 8``).
    """
    reader = _Flags(flags)
    algorithm = reader.text("speculative-algorithm")
    steps = reader.whole("speculative-num-steps")
    size = reader.number("hicache-size")
    ssm = reader.text("mamba-ssm-dtype")
    dp_attention = reader.switch("enable-dp-attention")
    arguments = KvArguments(
        model_path=reader.text("model-path"),
        tp_size=reader.whole("tp-size") or 1,
        pp_size=reader.whole("pp-size") or 1,
        dp_size=reader.whole("dp-size") or 1,
        dp_attention=dp_attention,
        dtype=reader.text("dtype") or "auto",
        kv_cache_dtype=reader.text("kv-cache-dtype") or "auto",
        mem_fraction=reader.share("mem-fraction-static"),
        max_total_tokens=reader.whole("max-total-tokens"),
        page_size=reader.whole("page-size") or 1,
        context_length=reader.whole("context-length"),
        max_running_requests=reader.whole("max-running-requests"),
        chunked_prefill_size=reader.whole("chunked-prefill-size"),
        speculative_algorithm=None if algorithm is None or algorithm.upper() == "NONE" else algorithm.upper(),
        draft_path=reader.text("speculative-draft-model-path"),
        draft_tokens=reader.whole("speculative-num-draft-tokens") or (None if steps is None else steps + 1),
        hierarchical=reader.switch("enable-hierarchical-cache"),
        hicache_ratio=reader.number("hicache-ratio"),
        hicache_size=size or None,
        radix_cache=not reader.switch("disable-radix-cache"),
        mamba_ratio=reader.number("mamba-full-memory-ratio") or 0.9,
        mamba_slots=reader.whole("max-mamba-cache-size"),
        mamba_item_bytes=None if ssm is None else 2 if ssm in ("bfloat16", "float16") else 4,
    )
    return arguments, tuple(reader.problems)


class _Flags:
    """Values by flag, whichever of its names is used; what cannot be read is noted."""

    def __init__(self, flags: Mapping[str, object]) -> None:
        self._flags = {name.replace("_", "-"): value for name, value in flags.items()}
        self.problems: list[str] = []

    def _value(self, flag: str) -> object:
        for name in (flag, *_OTHER_NAMES.get(flag, ())):
            value = self._flags.get(name)
            if value is not None:
                return value
        return None

    def text(self, flag: str) -> str | None:
        value = self._value(flag)
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        if isinstance(value, str):
            return value
        self._complain(flag, "a text")
        return None

    def switch(self, flag: str) -> bool:
        value = self._value(flag)
        if value is None or isinstance(value, bool):
            return bool(value)
        if isinstance(value, str) and value.lower() in ("true", "false", ""):
            return value.lower() != "false"
        self._complain(flag, "a bare flag")
        return False

    def number(self, flag: str) -> float | None:
        value = self._value(flag)
        if value is None:
            return None
        try:
            found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if math.isfinite(found) and 0 <= found <= 1e12:
            return found
        self._complain(flag, "a number that is not negative")
        return None

    def whole(self, flag: str) -> int | None:
        """A whole number above zero; zero and less stand for "not given", as SGLang's own -1 does."""
        value = self._value(flag)
        if isinstance(value, int) and not isinstance(value, bool) and value <= 0:
            return None
        found = self.number(flag)
        if found is None:
            return None
        if found != int(found):
            self._complain(flag, "a whole number")
            return None
        return int(found) or None

    def share(self, flag: str) -> float | None:
        found = self.number(flag)
        if found is None or 0 < found < 1:
            return found
        self._complain(flag, "a share between 0 and 1")
        return None

    def _complain(self, flag: str, expected: str) -> None:
        found = str(self._value(flag))[:40]
        self.problems.append(f"{flag}: expected {expected}, found {found!r}")
