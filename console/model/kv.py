"""The KV cache in bytes: what a token costs on each rank, from a model's config.json. Pure arithmetic.

The rules are SGLang's own: DefaultPoolConfigurator._compute_cell_size and
KVCacheConfigurator._handle_max_mamba_cache of 0.5.23, get_cell_size_per_token of 0.5.8 to 0.5.10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Attention = Literal["mla", "gqa"]

#: Bytes of one element of the cache, by the names of ``--kv-cache-dtype`` and of torch.
ITEM_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}

#: Half a byte an element, and one byte of scale for sixteen.
FOUR_BITS = frozenset({"fp4_e2m1", "nvfp4", "fp4_mx_block16"})

#: One byte an element, and one byte of scale for thirty-two.
MX_EIGHT_BITS = "mxfp8"

#: From this version on the draft model's cache is charged to the budget, and its weights are loaded before.
DRAFT_CHARGED_SINCE = (0, 5, 14)

#: No model is near these; a number past them is a damaged file.
_MOST_LAYERS = 10_000
_MOST = 10_000_000

#: Where a model of several parts keeps its language model.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")

_FLOATS = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


class ConfigProblem(ValueError):
    """A config.json that tells too little: which key, what was expected, what is there."""


class Range(msgspec.Struct, frozen=True, order=True):
    """A whole number that is known to lie between two others, both included."""

    low: int
    high: int

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def times(self, factor: int) -> Range:
        return Range(self.low * factor, self.high * factor)


def exactly(number: int) -> Range:
    return Range(number, number)


class StateGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """The linear-attention layers (Gated DeltaNet) of a hybrid model, which keep a state a request."""

    layers: int
    value_heads: int
    key_heads: int
    value_dim: int  # of one head
    key_dim: int
    convolution: int  # width of the kernel
    item_bytes: int  # of the recurrent state; the convolution's is always two


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """What of a model decides the size of its cache."""

    architecture: str | None
    attention: Attention
    layers: int
    attention_layers: int  # those that keep keys and values of every token
    context_length: int | None
    dtype: str  # of the model: bfloat16, float16, float32
    checkpoint_kv_dtype: str | None = None  # what the checkpoint asks for where --kv-cache-dtype is auto
    kv_lora_rank: int = 0  # MLA
    rope_dim: int = 0
    kv_heads: int = 0  # GQA, of the whole model
    head_dim: int = 0
    v_head_dim: int = 0
    state: StateGeometry | None = None
    draft_layers: int | None = None  # of a draft that the checkpoint carries itself (NEXTN, MTP)
    multimodal: bool = False
    #: What the file shows and this arithmetic leaves out, in words.
    uncounted: tuple[str, ...] = ()


def read_geometry(config: object) -> KvGeometry:
    """The geometry that a parsed config.json describes. Raises ConfigProblem, never anything else."""
    if not isinstance(config, Mapping):
        raise ConfigProblem(f"expected an object, found {_kind(config)}")
    where, text = _text_part(config)
    read = _Keys(where, text)
    layers = read.whole("num_hidden_layers", most=_MOST_LAYERS)
    kinds, uncounted = _layer_kinds(read, text, layers)
    attention_layers = sum(1 for kind in kinds if kind != "linear_attention")
    mla = text.get("kv_lora_rank") is not None and text.get("use_mla") is not False
    state = None
    if attention_layers < layers:
        state = _state(read, layers - attention_layers)
        if state is None:
            uncounted = (*uncounted, "the state of its linear-attention layers, of a kind not known here")
    if text.get("index_topk") is not None:
        uncounted = (*uncounted, "the sparse-attention index (index_topk)")
    shape: dict[str, int] = {}
    if mla:
        shape["kv_lora_rank"] = read.whole("kv_lora_rank")
        shape["rope_dim"] = read.whole("qk_rope_head_dim")
    else:
        heads = read.whole("num_attention_heads")
        shape["kv_heads"] = read.whole("num_key_value_heads", default=heads)
        head_dim = read.whole("head_dim", default=0)
        if not head_dim:
            head_dim = read.whole("hidden_size") // heads
        shape["head_dim"] = head_dim
        shape["v_head_dim"] = read.whole("v_head_dim", default=0) or head_dim
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return KvGeometry(
        architecture=first if isinstance(first, str) else None,
        attention="mla" if mla else "gqa",
        layers=layers,
        attention_layers=attention_layers,
        context_length=read.whole("max_position_embeddings", default=0, most=10**9) or None,
        dtype=_model_dtype(text) or _model_dtype(config) or "bfloat16",
        checkpoint_kv_dtype=_checkpoint_kv_dtype(config),
        state=state,
        draft_layers=read.whole("num_nextn_predict_layers", default=0, most=_MOST_LAYERS)
        or read.whole("mtp_num_hidden_layers", default=0, most=_MOST_LAYERS)
        or None,
        multimodal=isinstance(config.get("vision_config"), Mapping),
        uncounted=uncounted,
        **shape,
    )


class _Keys:
    """Numbers of one part of the file, with words for what is wrong with them."""

    def __init__(self, where: str, part: Mapping[str, Any]) -> None:
        self._where = where
        self._part = part

    def whole(self, key: str, *, default: int | None = None, most: int = _MOST) -> int:
        """A whole number; ``default`` where the key is absent or null. ConfigProblem for anything else."""
        value = self._part.get(key)
        if value is None:
            if default is not None:
                return default
            raise ConfigProblem(f"{self._where}{key}: expected a whole number, found no such key")
        least = 0 if default == 0 else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            expected = f"a whole number from {least} to {most:,}"
            raise ConfigProblem(f"{self._where}{key}: expected {expected}, found {_kind(value)}")
        return value


def _kind(value: object) -> str:
    """A value of the file in few words, safe to show in a message."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) < 1e12 else "a number out of all proportion"
    return "a list" if isinstance(value, list) else "an object"


def _text_part(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Where the language model's numbers are, and those numbers."""
    for name in _TEXT_PARTS:
        part = config.get(name)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise ConfigProblem(f"{name}: expected an object, found {_kind(part)}")
        return f"{name}.", part
    return "", config


def _layer_kinds(read: _Keys, text: Mapping[str, Any], layers: int) -> tuple[list[str], tuple[str, ...]]:
    """The kind of every layer, and what of it is left out of the arithmetic."""
    listed = text.get("layer_types", text.get("layers_block_type"))
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
            raise ConfigProblem(f"layer_types: expected a list of names, found {_kind(listed)}")
        if len(listed) != layers:
            raise ConfigProblem(f"layer_types: expected {layers} names, one a layer, found {len(listed)}")
        kinds = ["full_attention" if kind == "attention" else kind for kind in listed]
        others = sorted(set(kinds) - {"full_attention", "linear_attention"})
        if not others:
            return kinds, ()
        named = ", ".join(others)[:80]
        return kinds, (f"that layers of kind {named} may keep less than every token",)
    interval = read.whole("full_attention_interval", default=0, most=_MOST_LAYERS)
    if interval:
        return [
            "full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)
        ], ()
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        full = min(layers, len(linear["full_attn_layers"]))
        return ["full_attention"] * full + ["linear_attention"] * (layers - full), ()
    return ["full_attention"] * layers, ()


def _state(read: _Keys, layers: int) -> StateGeometry | None:
    """The Gated DeltaNet layers; None when they are of another kind."""
    value_heads = read.whole("linear_num_value_heads", default=0)
    if not value_heads:
        return None
    return StateGeometry(
        layers=layers,
        value_heads=value_heads,
        key_heads=read.whole("linear_num_key_heads"),
        value_dim=read.whole("linear_value_head_dim"),
        key_dim=read.whole("linear_key_head_dim"),
        convolution=read.whole("linear_conv_kernel_dim"),
        item_bytes=2 if read._part.get("mamba_ssm_dtype") in ("bfloat16", "float16") else 4,
    )


def _model_dtype(part: Mapping[str, Any]) -> str | None:
    found = part.get("dtype", part.get("torch_dtype"))
    return found if isinstance(found, str) and found in _FLOATS else None


def _checkpoint_kv_dtype(config: Mapping[str, Any]) -> str | None:
    """``fp8_e4m3`` where ModelOpt quantised the cache too; SGLang follows it when the flag is ``auto``."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or "modelopt" not in str(quantization.get("quant_method")):
        return None
    scheme = quantization.get("kv_cache_scheme")
    eight_bits = isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    named = str(quantization.get("kv_cache_quant_algo")).upper() == "FP8"
    return "fp8_e4m3" if eight_bits or named else None


# Bytes -----------------------------------------------------------------------------------------


def cache_dtype(geometry: KvGeometry, kv_flag: str = "auto", model_flag: str = "auto") -> str:
    """What the cache is made of: ``--kv-cache-dtype``, or where that is ``auto`` the model's own kind.

    A model of 32 bits is run in 16 unless ``--dtype`` says otherwise.
    """
    if kv_flag != "auto":
        return kv_flag
    if geometry.checkpoint_kv_dtype is not None:
        return geometry.checkpoint_kv_dtype
    if model_flag in _FLOATS:
        return {"half": "float16", "float": "float32"}.get(model_flag, model_flag)
    return "float16" if geometry.dtype in ("float32", "float", "half") else geometry.dtype


def bytes_per_token(geometry: KvGeometry, dtype: str, attention_tp: int) -> int:
    """Bytes that one token costs on each rank. ValueError for a kind of cache that is not known here.

    MLA keeps the whole latent on every rank: it is not divided by ``attention_tp``. A rank keeps
    at least one KV head.
    """
    if geometry.attention == "mla":
        elements = (geometry.kv_lora_rank + geometry.rope_dim) * geometry.attention_layers
        scales = (geometry.kv_lora_rank + geometry.rope_dim) // 16 * geometry.attention_layers
    else:
        heads = max(1, geometry.kv_heads // max(1, attention_tp))
        elements = heads * (geometry.head_dim + geometry.v_head_dim) * geometry.attention_layers
        scales = elements // 16
    if dtype in FOUR_BITS:
        return elements // 2 + scales
    if dtype == MX_EIGHT_BITS:
        return elements + elements // 32
    if dtype not in ITEM_BYTES:
        known = ", ".join(sorted({*ITEM_BYTES, *FOUR_BITS, MX_EIGHT_BITS}))
        raise ValueError(f"kv-cache-dtype: expected one of {known}, found {dtype[:40]!r}")
    return elements * ITEM_BYTES[dtype]


def draft_bytes_per_token(cell: int, draft_layers: int, target_layers: int) -> int:
    """What the engine adds to ``cell`` for its draft model: as much a layer as the target's."""
    return cell * draft_layers // max(1, target_layers)


def draft_is_charged(version: str | None) -> bool | None:
    """Whether this SGLang charges the draft to the KV budget; None when the version is not known."""
    found = release(version)
    return None if found is None else found >= DRAFT_CHARGED_SINCE


def state_bytes(state: StateGeometry, attention_tp: int, item_bytes: int | None = None) -> int:
    """Bytes of one slot on each rank: the recurrent state and the convolution's window.

    ``item_bytes`` is that of ``--mamba-ssm-dtype``, where it is given.
    """
    tp = max(1, attention_tp)
    recurrent = -(-state.value_heads // tp) * state.value_dim * state.key_dim
    # Key heads that do not divide are repeated, so that a rank has all that its value heads need.
    key_heads = -(-state.key_heads // tp)
    window = -(-state.value_heads // tp) * state.value_dim + 2 * key_heads * state.key_dim
    per_layer = recurrent * (item_bytes or state.item_bytes) + window * (state.convolution - 1) * 2
    return per_layer * state.layers


def tokens_for(rest_bytes: int, cell: int, *, page_size: int = 1, most: int | None = None) -> int:
    """Tokens that fit in ``rest_bytes``: whole pages, at most ``most`` (``--max-total-tokens``)."""
    tokens = max(0, rest_bytes) // cell
    if most is not None:
        tokens = min(tokens, most)
    return tokens // page_size * page_size


def release(version: str | None) -> tuple[int, int, int] | None:
    """``0.5.18`` or ``0.5.18.post1+cu130`` as three numbers; None when it is no such thing."""
    found = re.match(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", version or "")
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))
