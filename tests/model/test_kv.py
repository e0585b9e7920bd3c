"""The arithmetic of the KV cache and of the host cache, against published logs and the engine's own rules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.model.host_cache import (
    HostMemory,
    MemoryLimit,
    host_cache,
    room,
    shrinks,
)
from console.model.kv import (
    ConfigProblem,
    KvGeometry,
    Range,
    bytes_per_token,
    cache_dtype,
    draft_bytes_per_token,
    draft_is_charged,
    exactly,
    read_geometry,
    release,
    state_bytes,
    tokens_for,
)
from console.model.kv_arguments import KvArguments, read_arguments
from console.model.kv_plan import GIB, MIB, CardRoom, Weights, fraction, plan, spread

KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "v_head_dim": 128,
        "dtype": "bfloat16",
        "max_position_embeddings": 262_144,
    },
    "vision_config": {},
}
QWEN: dict[str, Any] = {
    "text_config": {
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_value_heads": 64,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
        "dtype": "bfloat16",
        "max_position_embeddings": 262_144,
    },
}
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131_072,
}
CARD = CardRoom(97_887 * MIB, 638 * MIB)
#: What eight cards were seen to hold: 11.18 GB of KV on each.
SEEN = int(11.18e9) // 70_272


def geometry(config: dict[str, Any], **text: object) -> KvGeometry:
    changed = copy.deepcopy(config)
    (changed.get("text_config") or changed).update(text)
    return read_geometry(changed)


def arguments(**flags: object) -> KvArguments:
    found, problems = read_arguments(flags)
    assert problems == ()
    return found


# A token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "dtype", "tp", "expected"),
    [
        (KIMI, "bf16", 8, 70_272),
        (KIMI, "bf16", 1, 70_272),  # the latent is whole on every rank
        (KIMI, "fp8_e4m3", 8, 35_136),
        (QWEN, "bfloat16", 8, 15_360),  # two heads on eight ranks: one on each
        (QWEN, "fp8_e5m2", 8, 7_680),
        (QWEN, "bf16", 1, 30_720),
        (LLAMA, "bf16", 8, 40_960),
        (LLAMA, "float32", 4, 163_840),
        (KIMI, "nvfp4", 8, 576 * 61 // 2 + 36 * 61),
        (LLAMA, "mxfp8", 8, 20_480 + 640),
    ],
)
def test_bytes_of_a_token_on_each_rank(config: dict[str, Any], dtype: str, tp: int, expected: int) -> None:
    assert bytes_per_token(read_geometry(config), dtype, tp) == expected


def test_a_published_pool_of_260000_tokens_is_as_large_as_its_log_says() -> None:
    size = 260_000 * bytes_per_token(read_geometry(KIMI), "bf16", 8)
    assert f"{size / GIB:.2f}" == "17.02"


def test_an_unknown_kind_of_cache_is_refused_with_the_kinds_there_are() -> None:
    with pytest.raises(ValueError, match=r"kv-cache-dtype: expected one of .*fp8_e4m3.*found 'int3'"):
        bytes_per_token(read_geometry(KIMI), "int3", 8)


def test_only_full_attention_layers_keep_tokens_and_the_others_a_state() -> None:
    found = read_geometry(QWEN)
    assert (found.layers, found.attention_layers) == (60, 15)
    assert found.state is not None
    listed = ["linear_attention"] * 3 + ["full_attention"]
    assert geometry(QWEN, layer_types=listed * 15, full_attention_interval=None) == found
    recurrent = 45 * 8 * 128 * 128 * 4
    assert state_bytes(found.state, 8) == recurrent + 414_720
    assert state_bytes(found.state, 8, item_bytes=2) == recurrent // 2 + 414_720


@pytest.mark.parametrize(
    ("dtype", "kv_flag", "model_flag", "expected"),
    [
        ("bfloat16", "auto", "auto", "bfloat16"),
        ("float32", "auto", "auto", "float16"),  # as the engine runs such a model
        ("float32", "auto", "float32", "float32"),
        ("bfloat16", "fp8_e5m2", "auto", "fp8_e5m2"),
        ("bfloat16", "auto", "half", "float16"),
    ],
)
def test_what_the_cache_is_made_of(dtype: str, kv_flag: str, model_flag: str, expected: str) -> None:
    assert cache_dtype(geometry(LLAMA, torch_dtype=dtype), kv_flag, model_flag) == expected


@pytest.mark.parametrize(
    "scheme",
    [
        {"kv_cache_scheme": {"type": "float", "num_bits": 8}},
        {"kv_cache_quant_algo": "FP8"},
    ],
)
def test_a_checkpoint_of_modelopt_may_ask_for_eight_bits(scheme: dict[str, object]) -> None:
    asked = {"quantization_config": {"quant_method": "modelopt", **scheme}}
    assert cache_dtype(read_geometry({**KIMI, **asked})) == "fp8_e4m3"
    assert cache_dtype(read_geometry({**KIMI, **asked}), "bf16") == "bf16"
    other = {"quantization_config": {"quant_method": "compressed-tensors", **scheme}}
    assert cache_dtype(read_geometry({**KIMI, **other})) == "bfloat16"


def test_a_draft_is_charged_from_0_5_14_on() -> None:
    assert 70_272 + draft_bytes_per_token(70_272, 1, 61) == 71_424
    versions = [None, "0.5.9", "0.5.13", "0.5.14", "0.5.14.post1", "0.6.0", "nightly"]
    assert list(map(draft_is_charged, versions)) == [None, False, False, True, True, True, None]
    assert release("0.5.18.post1+cu130") == (0, 5, 18)


def test_tokens_come_in_whole_pages_and_never_more_than_was_asked() -> None:
    assert tokens_for(10 * 70_272 + 70_271, 70_272) == 10
    assert tokens_for(10 * 70_272, 70_272, page_size=4) == 8
    assert tokens_for(10 * 70_272, 70_272, most=7) == 7
    assert tokens_for(-5, 70_272) == 0


def test_what_is_left_out_is_said() -> None:
    assert geometry(KIMI, index_topk=2048).uncounted == ("the sparse-attention index (index_topk)",)
    sliding = ["sliding_attention", "full_attention"] * 40
    assert "sliding_attention" in geometry(LLAMA, layer_types=sliding).uncounted[0]
    linear = geometry(KIMI, linear_attn_config={"full_attn_layers": list(range(15))})
    assert linear.attention_layers == 15
    assert "the state of its linear-attention layers" in linear.uncounted[0]


# Any config.json -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"num_hidden_layers": "61"},
            "text_config.num_hidden_layers: expected a whole number.*the text '61'",
        ),
        (
            {"num_hidden_layers": None},
            "text_config.num_hidden_layers: expected a whole number, found no such",
        ),
        ({"num_hidden_layers": 0}, "expected a whole number from 1 to 10,000, found 0"),
        ({"num_hidden_layers": 10**30}, "found a number out of all proportion"),
        ({"num_hidden_layers": True}, "found true"),
        ({"kv_lora_rank": 512.0}, "text_config.kv_lora_rank: .*found 512"),
        ({"qk_rope_head_dim": [64]}, "text_config.qk_rope_head_dim: .*found a list"),
        ({"layer_types": "full"}, "layer_types: expected a list of names, found the text 'full'"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 61 names, one a layer, found 1"),
    ],
)
def test_a_config_that_tells_too_little_is_refused_by_its_key(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigProblem, match=words):
        geometry(KIMI, **change)


@pytest.mark.parametrize("config", [None, [], "text", 7, {}, {"text_config": 5}])
def test_what_is_no_model_is_refused(config: object) -> None:
    with pytest.raises(ConfigProblem):
        read_geometry(config)


_KEYS = sorted({*KIMI["text_config"], *QWEN["text_config"], *LLAMA, "layer_types", "index_topk"})
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    st.sampled_from([KIMI, QWEN, LLAMA]),
    st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=4),
    st.dictionaries(
        st.sampled_from(["text_config", "quantization_config", "vision_config", "architectures", "dtype"]),
        _VALUES,
        max_size=2,
    ),
)
def test_any_config_gives_a_geometry_that_can_be_reckoned_with_or_says_what_is_wrong(
    config: dict[str, Any], text: dict[str, Any], top: dict[str, Any]
) -> None:
    changed = copy.deepcopy(config)
    (changed.get("text_config") or changed).update(text)
    changed.update(top)
    try:
        found = read_geometry(changed)
    except ConfigProblem as problem:
        assert str(problem)
        assert "\n" not in str(problem)
        return
    assert bytes_per_token(found, "bf16", 8) >= 0
    assert 0 <= found.attention_layers <= found.layers
    if found.state is not None:
        assert state_bytes(found.state, 8) > 0


# The host --------------------------------------------------------------------------------------


def test_every_rank_keeps_its_own_copy_of_the_latent_in_host_ram() -> None:
    flags = {"tp-size": "8", "enable-hierarchical-cache": True, "hicache-ratio": "4.0"}
    found = host_cache(arguments(**flags), 70_272, exactly(SEEN), version="0.5.9")
    assert found is not None
    assert f"{found.total.low / 1e9:.0f}" == "358"
    assert f"{found.per_rank.low / 1e9:.1f}" == "44.7"
    assert (found.ranks, found.total.exact) == (8, True)


def test_half_a_million_tokens_twice_over_take_562_gb() -> None:
    flags = {"tp-size": "8", "enable-hierarchical-cache": True, "hicache-ratio": "2"}
    found = host_cache(arguments(**flags), 70_272, exactly(500_000), version="0.5.9")
    assert found is not None
    assert f"{found.total.low / 1e9:.0f}" == "562"


def test_a_size_is_decimal_gigabytes_of_each_rank_and_beats_the_ratio() -> None:
    flags = {"tp-size": "8", "enable-hierarchical-cache": True, "hicache-ratio": "4", "hicache-size": "40"}
    found = host_cache(arguments(**flags), 70_272, exactly(SEEN), version="0.5.9")
    assert found is not None
    assert found.per_rank.low == pytest.approx(40e9, abs=2 * 70_272)
    assert found.total.low == pytest.approx(320e9, rel=1e-5)
    assert found.set_by == "size 40 GB on each rank"


def test_newer_versions_may_copy_the_draft_and_the_states_too() -> None:
    flags = {"tp-size": "8", "enable-hierarchical-cache": True}
    more = {"draft_cell": 1_152, "state": 10**9}
    old = host_cache(arguments(**flags), 70_272, exactly(SEEN), version="0.5.13", **more)
    new = host_cache(arguments(**flags), 70_272, exactly(SEEN), version="0.5.23", **more)
    assert old is not None
    assert new is not None
    assert (old.set_by, old.total.exact) == ("ratio 2", True)
    assert new.per_rank.low == old.per_rank.low
    assert new.per_rank.high - old.per_rank.high == pytest.approx(2 * SEEN * 1_152 + 2 * 10**9, rel=1e-4)


def test_without_the_flag_there_is_no_host_cache() -> None:
    assert host_cache(arguments(**{"hicache-ratio": "4"}), 70_272, exactly(SEEN)) is None


def test_only_a_cache_that_nobody_sized_shrinks_by_itself() -> None:
    asked = arguments(**{"enable-hierarchical-cache": True, "hicache-ratio": "2"})
    left = arguments(**{"enable-hierarchical-cache": True})
    assert [shrinks(left, version) for version in ("0.5.20", "0.5.22", None)] == [False, True, False]
    assert not shrinks(asked, "0.5.23")


def test_the_tightest_bound_counts() -> None:
    gb = 10**9
    limits = (MemoryLimit("lxc/129", 500 * gb, 200 * gb), MemoryLimit("unit", 400 * gb, None))
    memory = HostMemory(total=800 * gb, available=310 * gb, limits=limits)
    found = room(memory)
    assert (found.free, found.bound_by) == (300 * gb, "the memory limit of lxc/129")
    assert found.unread == ("unit",)
    # What the running service gives back is free for the next, but there is never more than there is.
    freed = room(HostMemory(total=800 * gb, available=310 * gb, returned=600 * gb))
    assert (freed.free, freed.bound_by) == (800 * gb, "the host's free memory")


# Arguments -------------------------------------------------------------------------------------


def test_a_profile_and_the_engine_are_read_alike() -> None:
    profile = {"tp": "8", "kv-cache-dtype": "fp8_e4m3", "mem-fraction-static": "0.88"}
    profile |= {"speculative-algorithm": "EAGLE3", "speculative-num-steps": "2"}
    server = {"tp_size": 8, "kv_cache_dtype": "fp8_e4m3", "mem_fraction_static": 0.88}
    server |= {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 2, "hicache_size": 0}
    server |= {"max_total_tokens": None, "context_length": -1, "dp_size": 1}
    assert read_arguments(profile) == read_arguments(server)
    assert read_arguments(profile)[0].draft_tokens == 3


def test_attention_that_is_data_parallel_has_fewer_ranks_a_token_and_as_many_copies() -> None:
    found = arguments(**{"tp-size": "8", "dp-size": "4", "enable-dp-attention": True})
    assert (found.attention_tp, found.ranks) == (2, 8)
    plain = arguments(**{"tp-size": "4", "dp-size": "2"})
    assert (plain.attention_tp, plain.ranks) == (4, 8)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("tp-size", "eight", "tp-size: expected a number that is not negative, found 'eight'"),
        ("tp-size", "1.5", "tp-size: expected a whole number, found '1.5'"),
        ("mem-fraction-static", "88", "mem-fraction-static: expected a share between 0 and 1, found '88'"),
        ("hicache-ratio", "nan", "hicache-ratio: expected a number that is not negative, found 'nan'"),
        ("kv-cache-dtype", True, "kv-cache-dtype: expected a text, found 'True'"),
    ],
)
def test_an_argument_that_cannot_be_read_is_told_and_counts_as_not_given(
    flag: str, value: object, words: str
) -> None:
    found, problems = read_arguments({flag: value})
    assert problems == (words,)
    assert found == KvArguments()


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["tp-size", "dp-size", "hicache-ratio", "page-size"]), _VALUES))
def test_any_arguments_are_survived(flags: dict[str, object]) -> None:
    found, _ = read_arguments(flags)
    assert found.ranks >= 1
    assert found.page_size >= 1


# A plan ----------------------------------------------------------------------------------------

KIMI_FLAGS = {"tp-size": "8", "mem-fraction-static": "0.88"}


def test_tokens_that_fit_lie_around_what_a_known_card_holds() -> None:
    """93.63 GiB free, 63.91 of weights: rest = 93.63 × 0.88 − 63.91 GiB."""
    weights = Weights(exactly(int(63.91 * GIB)), None, "measured")
    found = plan(geometry({**KIMI, "vision_config": None}), arguments(**KIMI_FLAGS), CARD, weights)
    seen = int((93.63 * 0.88 - 63.91) * GIB / 70_272)
    assert found.tokens.low < seen < found.tokens.high
    measured = exactly(int(93.63 * GIB))
    found = plan(
        geometry({**KIMI, "vision_config": None}), arguments(**KIMI_FLAGS), CARD, weights, free=measured
    )
    assert found.tokens.low == found.tokens.high == pytest.approx(seen, abs=1)
    assert found.slack == exactly(int(measured.low * (1 - 0.88)))


def test_a_draft_takes_tokens_only_where_it_is_charged() -> None:
    flags = arguments(**KIMI_FLAGS, **{"speculative-algorithm": "EAGLE3"})
    weights, draft = spread(547 * 10**9, 8, "index"), spread(6 * 10**9, 8, "files")
    before = plan(read_geometry(KIMI), flags, CARD, weights, version="0.5.13", draft_weights=draft)
    after = plan(read_geometry(KIMI), flags, CARD, weights, version="0.5.14", draft_weights=draft)
    unknown = plan(read_geometry(KIMI), flags, CARD, weights, draft_weights=draft)
    assert (before.cell, after.cell) == (exactly(70_272), exactly(71_424))
    assert (before.charged, after.charged, unknown.charged) == (False, True, None)
    assert unknown.cell == Range(70_272, 71_424)
    assert after.tokens.low < before.tokens.low
    assert (unknown.tokens.low, unknown.tokens.high) == (after.tokens.low, before.tokens.high)


def test_a_draft_of_another_kind_shows_both_its_shares() -> None:
    flags = arguments(**KIMI_FLAGS, **{"speculative-algorithm": "EAGLE3"})
    draft = geometry(LLAMA, num_hidden_layers=1, num_key_value_heads=64, head_dim=128)
    found = plan(
        read_geometry(KIMI), flags, CARD, spread(547 * 10**9, 8, "index"), version="0.5.18", draft=draft
    )
    assert (found.draft_cell, found.draft_own_cell) == (1_152, 8 * 256 * 2)


def test_a_hybrid_model_gives_its_states_their_part() -> None:
    flags = arguments(**{"tp-size": "8", "mem-fraction-static": "0.84"})
    weights = Weights(exactly(28 * GIB), None, "measured")
    free = exactly(94 * GIB)
    found = plan(geometry(QWEN), flags, CARD, weights, free=free)
    rest = int(94 * GIB * 0.84) - 28 * GIB
    assert found.state_slot == 24_007_680
    assert found.state is not None
    assert found.state.low == pytest.approx(rest * 0.9 / 1.9, rel=0.001)
    assert found.tokens.low * 15_360 == pytest.approx(rest / 1.9, rel=0.002)
    fixed = arguments(**{"tp-size": "8", "mem-fraction-static": "0.84", "max-mamba-cache-size": "99"})
    assert plan(geometry(QWEN), fixed, CARD, weights, free=free).state == exactly(100 * 24_007_680)


def test_states_of_speculation_lie_between_the_strategies() -> None:
    flags = {"tp-size": "8", "mem-fraction-static": "0.84", "speculative-algorithm": "NEXTN"}
    flags |= {"speculative-num-draft-tokens": "4", "max-running-requests": "48"}
    found = plan(
        geometry(QWEN), arguments(**flags), CARD, Weights(exactly(28 * GIB), None, ""), free=exactly(94 * GIB)
    )
    assert found.state is not None
    assert 0 < found.state.low < found.state.high
    assert found.tokens.low < found.tokens.high


def test_without_a_share_the_engine_chooses_within_its_rule() -> None:
    given_ = fraction(arguments(**KIMI_FLAGS), CARD, multimodal=True)
    assert (given_.low, given_.high, given_.given) == (0.88, 0.88, True)
    chosen = fraction(arguments(**{"tp-size": "8"}), CARD, multimodal=False)
    assert chosen.low == chosen.high == pytest.approx(0.848)
    seeing = fraction(arguments(**{"tp-size": "8"}), CARD, multimodal=True)
    assert (seeing.low, seeing.high, seeing.given) == (pytest.approx(0.644), pytest.approx(0.848), False)


def test_weights_that_leave_no_room_leave_no_token() -> None:
    found = plan(
        read_geometry(KIMI),
        arguments(**{"tp-size": "4", "mem-fraction-static": "0.88"}),
        CARD,
        spread(547 * 10**9, 4, ""),
    )
    assert found.tokens == exactly(0)


@settings(deadline=None)
@given(
    st.sampled_from([KIMI, QWEN, LLAMA]),
    st.integers(0, 200 * GIB),
    st.integers(0, 2 * 10**12),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, "0.5.9", "0.5.14", "0.5.23"]),
    st.sampled_from([None, "EAGLE3", "NGRAM"]),
    st.floats(0.05, 0.95),
)
def test_bounds_are_never_crossed(
    config: dict[str, Any],
    total: int,
    weights: int,
    tp: int,
    version: str | None,
    algorithm: str | None,
    share: float,
) -> None:
    flags = arguments(
        **{"tp-size": tp, "mem-fraction-static": share, "speculative-algorithm": algorithm},
        **{"enable-hierarchical-cache": True},
    )
    found = plan(read_geometry(config), flags, CardRoom(total), spread(weights, tp, ""), version=version)
    cache = host_cache(flags, found.target_cell, found.tokens, version=version, draft_cell=found.draft_cell)
    assert cache is not None
    for bounds in (found.free, found.caches, found.cell, found.tokens, found.kv, found.slack, cache.total):
        assert 0 <= bounds.low <= bounds.high
    assert found.kv.high <= found.caches.high
