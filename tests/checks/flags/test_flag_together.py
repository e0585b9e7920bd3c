"""Flags and variables together: what the engine refuses or replaces, and the neighbour that it takes."""

from __future__ import annotations

import pytest

from console.checks.flags import Hardware
from console.model.finding import Finding
from console.model.profile import FlagValue
from tests.checks.flags.flag_lab import EIGHT, told

NEWEST, BOX, OLDEST = "0.5.23", "0.5.18", "0.5.9"

Args = dict[str, FlagValue]

EAGLE: Args = {
    "speculative-algorithm": "EAGLE3",
    "speculative-num-steps": "2",
    "speculative-eagle-topk": "1",
    "max-running-requests": "48",
}
TREE: Args = {**EAGLE, "speculative-eagle-topk": "4", "speculative-num-draft-tokens": "8"}
HOST_CACHE: Args = {"enable-hierarchical-cache": True}
NVFP4: Args = {
    "quantization": "modelopt_fp4",
    "moe-runner-backend": "flashinfer_cutlass",
    "fp4-gemm-backend": "flashinfer_cudnn",
}
QWEN = {"model-path": "nvidia/Qwen3.5-397B-A17B-NVFP4"}
KIMI = {"model-path": "/shared/kimi-k2.5-int4"}


@pytest.mark.parametrize(
    ("id", "version", "args", "said", "remedy"),
    [
        (
            "algorithm",
            NEWEST,
            {**EAGLE, "speculative-algorithm": "FOO"},
            "knows no algorithm of this name",
            "speculative-algorithm: EAGLE3",
        ),
        (
            "steps",
            NEWEST,
            {**EAGLE, "speculative-eagle-topk": None},
            "TypeError",
            "speculative-eagle-topk: 1",
        ),
        (
            "steps",
            NEWEST,
            {**EAGLE, "speculative-num-steps": None},
            "AssertionError",
            "speculative-num-steps: 3",
        ),
        (
            "draft-tokens",
            BOX,
            {**EAGLE, "speculative-num-draft-tokens": "8"},
            "3 tokens, whatever it is told: here 8",
            "speculative-num-draft-tokens: 3",
        ),
        (
            "topk-page-size",
            BOX,
            {**TREE, "page-size": "16", "attention-backend": "trtllm_mla"},
            "flashinfer and fa3 and triton alone",
            "page-size: 1",
        ),
        (
            "topk-page-size",
            "0.5.11",
            {**TREE, "page-size": "16", "attention-backend": "triton"},
            "flashinfer and fa3 alone",
            "page-size: 1",
        ),
        (
            "topk-trtllm",
            NEWEST,
            {**TREE, "attention-backend": "trtllm_mha"},
            "topk 1 alone",
            "speculative-eagle-topk: 1",
        ),
        ("mixed-chunk", BOX, {**EAGLE, "enable-mixed-chunk": True}, "switches it off", "remove the line"),
        (
            "mixed-chunk",
            NEWEST,
            {"speculative-algorithm": "NGRAM", "enable-mixed-chunk": True},
            "switches it off",
            "remove the line",
        ),
        ("hybrid", "0.5.10", {**QWEN, **EAGLE}, "extra_buffer", "mamba-scheduler-strategy: extra_buffer"),
        (
            "hybrid",
            NEWEST,
            {**QWEN, **EAGLE, "mamba-radix-cache-strategy": "no_buffer"},
            "overlap scheduler",
            "mamba-radix-cache-strategy: extra_buffer",
        ),
        (
            "hicache-radix",
            NEWEST,
            {**HOST_CACHE, "disable-radix-cache": True},
            "exclude each other",
            "disable-radix-cache: true",
        ),
        (
            "hicache-layout",
            NEWEST,
            {**HOST_CACHE, "hicache-mem-layout": "page_first", "hicache-io-backend": "direct"},
            "page_first_direct instead",
            "hicache-mem-layout: page_first_direct",
        ),
        ("hicache-ratio", OLDEST, {**HOST_CACHE, "hicache-ratio": "0.5"}, "larger", "hicache-ratio: 2.0"),
        (
            "chunk-pages",
            NEWEST,
            {"chunked-prefill-size": "8100", "page-size": "64"},
            "8100 is no multiple of page-size 64",
            "chunked-prefill-size: 8064",
        ),
        ("cards", NEWEST, {"tp-size": "16"}, "16 ranks want a card each, this host has 8", "tp-size: 8"),
        ("cards", OLDEST, {"tensor-parallel-size": "4", "dp-size": "4"}, "16 ranks", "tp-size: 2"),
        (
            "sm120.attention-backend",
            BOX,
            {"attention-backend": "trtllm_mha"},
            "no kernels",
            "attention-backend: flashinfer",
        ),
        (
            "sm120.moe-runner-backend",
            NEWEST,
            {**NVFP4, "moe-runner-backend": "flashinfer_trtllm"},
            "compute capability 12.0",
            "moe-runner-backend: flashinfer_cutlass",
        ),
        (
            "sm120.fp4-gemm-backend",
            NEWEST,
            {**NVFP4, "fp4-gemm-backend": "flashinfer_trtllm"},
            "compute capability 12.0",
            "fp4-gemm-backend: flashinfer_cudnn",
        ),
        (
            "kimi-reasoning",
            NEWEST,
            {**KIMI, "reasoning-parser": "kimi"},
            "older ◁think▷ format",
            "reasoning-parser: kimi_k2",
        ),
    ],
)
def test_what_would_not_run_as_written_fails(
    id: str, version: str, args: dict[str, FlagValue | None], said: str, remedy: str
) -> None:
    given = {flag: value for flag, value in args.items() if value is not None}
    found = told(version, given)[f"together.{id}"]
    assert found.verdict == "fail"
    assert said in found.evidence
    assert remedy in (found.remedy or "")


@pytest.mark.parametrize(
    ("id", "version", "args", "said", "remedy"),
    [
        (
            "running-requests",
            BOX,
            {**EAGLE, "max-running-requests": None},
            "48 requests",
            "max-running-requests: 48",
        ),
        (
            "speculation-off",
            NEWEST,
            {"speculative-num-steps": "2"},
            "no effect",
            "speculative-algorithm: EAGLE3",
        ),
        ("hicache-off", NEWEST, {"hicache-ratio": "4.0"}, "no effect", "enable-hierarchical-cache: true"),
        (
            "nvfp4.moe-runner-backend",
            NEWEST,
            {**NVFP4, "moe-runner-backend": None},
            "NaN",
            "moe-runner-backend: flashinfer_cutlass",
        ),
        (
            "nvfp4.fp4-gemm-backend",
            NEWEST,
            {**NVFP4, "fp4-gemm-backend": "auto"},
            "NaN",
            "fp4-gemm-backend: flashinfer_cudnn",
        ),
        ("kimi-leak", OLDEST, {**KIMI, "tool-call-parser": "kimi_k2"}, "leaks", ">=0.5.10"),
    ],
)
def test_what_runs_but_surprises_is_a_warning(
    id: str, version: str, args: dict[str, FlagValue | None], said: str, remedy: str
) -> None:
    given = {flag: value for flag, value in args.items() if value is not None}
    found = told(version, given)[f"together.{id}"]
    assert found.verdict == "warn"
    assert said in found.evidence
    assert remedy in (found.remedy or "")


@pytest.mark.parametrize(
    ("version", "args", "hardware"),
    [
        (BOX, EAGLE, EIGHT),
        (BOX, {**EAGLE, "speculative-algorithm": "nextn"}, EIGHT),
        (BOX, {**EAGLE, "speculative-num-draft-tokens": "3"}, EIGHT),
        (BOX, {"speculative-algorithm": "EAGLE", "max-running-requests": "8"}, EIGHT),
        (BOX, {**TREE, "page-size": "16", "attention-backend": "triton"}, EIGHT),
        (BOX, {**TREE, "attention-backend": "trtllm_mla"}, Hardware(8, False)),
        (BOX, {**TREE, "page-size": "16"}, EIGHT),  # the engine chooses a backend that can
        (NEWEST, {**EAGLE, "enable-mixed-chunk": True}, EIGHT),
        (NEWEST, {**QWEN, **EAGLE}, EIGHT),
        ("0.5.10", {**QWEN, **EAGLE, "disable-radix-cache": True}, EIGHT),
        (NEWEST, {**HOST_CACHE, "hicache-ratio": "0.5"}, EIGHT),
        (OLDEST, {**HOST_CACHE, "hicache-ratio": "0.5", "hicache-size": "64"}, EIGHT),
        (OLDEST, {**HOST_CACHE, "hicache-mem-layout": "page_first", "hicache-io-backend": "direct"}, EIGHT),
        (NEWEST, {"chunked-prefill-size": "8192", "page-size": "64"}, EIGHT),
        (NEWEST, {"chunked-prefill-size": "-1", "page-size": "64"}, EIGHT),
        (NEWEST, {"tp-size": "8"}, EIGHT),
        (NEWEST, {"tp-size": "16", "nnodes": "2"}, EIGHT),
        (NEWEST, {"tp-size": "16"}, None),
        (BOX, {"tp-size": "8", "dp-size": "8", "enable-dp-attention": True}, EIGHT),
        (NEWEST, {"attention-backend": "trtllm_mha"}, EIGHT),  # with SM120 kernels from 0.5.20
        (BOX, {"attention-backend": "trtllm_mha"}, Hardware(8, False)),
        (NEWEST, NVFP4, EIGHT),
        (NEWEST, {"quantization": "modelopt_fp4"}, Hardware(8, False)),
        ("0.5.10", {**KIMI, "tool-call-parser": "kimi_k2", "reasoning-parser": "kimi_k2"}, EIGHT),
    ],
)
def test_of_what_goes_together_nothing_is_said(version: str, args: Args, hardware: Hardware | None) -> None:
    assert told(version, args, hardware=hardware) == {}


def test_a_configuration_file_hides_flags_from_us() -> None:
    found = told(NEWEST, {"config": "/etc/sglang.yaml"})["together.config"]
    assert found.verdict == "unknown"


# Variables -------------------------------------------------------------------------------------

V2 = "SGLANG_ENABLE_SPEC_V2"


def variable(version: str, name: str, value: str, args: Args | None = None) -> Finding | None:
    return told(version, args or {}, {name: value}).get(f"variable.{name}")


def test_spec_v2_matters_up_to_0_5_13_and_is_gone_later() -> None:
    for version in (OLDEST, "0.5.10", "0.5.11"):
        for value in ("True", "0"):
            assert variable(version, V2, value) is None
    for version in ("0.5.14", NEWEST):
        on, off = variable(version, V2, "True"), variable(version, V2, "False")
        assert on is not None and on.verdict == "warn" and on.remedy == "remove the line"
        assert off is not None and off.verdict == "fail" and 'sglang: "<0.5.14"' in (off.remedy or "")


def test_spec_v2_and_a_tree_of_drafts_exclude_each_other_up_to_0_5_10() -> None:
    found = told("0.5.10", TREE, {V2: "True"})["together.topk-spec-v2"]
    assert found.verdict == "fail"
    assert "speculative-eagle-topk: 1" in (found.remedy or "")
    assert told("0.5.10", TREE, {V2: "0"}) == {}
    assert told("0.5.11", TREE, {V2: "True"}) == {}


def test_a_hybrid_model_speculates_in_0_5_10_only_with_both_switches() -> None:
    args: Args = {**QWEN, **EAGLE, "mamba-scheduler-strategy": "extra_buffer"}
    assert told("0.5.10", args, {V2: "1"}) == {}
    assert "together.hybrid" in told("0.5.10", args)


def test_a_variable_that_nothing_reads_is_a_warning() -> None:
    typo = variable(NEWEST, "SGLANG_NUMA_BIND_V3", "1")
    assert typo is not None and typo.verdict == "warn"
    assert typo.remedy == "did you mean this: SGLANG_NUMA_BIND_V2: 1"
    gone = variable(NEWEST, "SGLANG_ENABLE_FLASHINFER_GEMM", "1")
    strange = variable(NEWEST, "SGL_XYZZY_QQQ", "1")
    assert strange is not None and strange.remedy == "remove the line"
    assert gone is not None and "of the versions known here 0.5.8" in gone.evidence
    for name in ("NCCL_PROTO", "SGLANG_NUMA_BIND_V2", "MY_OWN"):
        assert variable(NEWEST, name, "1") is None
