"""Flags one by one: what argparse would refuse, in an operator's words and with the line that mends it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.checks.flags import shipped
from console.checks.flags.arguments import judge_arguments
from console.model.profile import FlagValue, argv_of
from tests.checks.flags.flag_lab import parser_of, refusal, told

NEWEST, BOX, OLDEST = "0.5.23", "0.5.18", "0.5.9"


@pytest.mark.parametrize(
    ("version", "flag", "value", "said", "remedy"),
    [
        # Names.
        (NEWEST, "attention-backned", "triton", "unknown", "attention-backend: triton"),
        (NEWEST, "xyzzy", True, "unknown", "remove the line"),
        (NEWEST, "cuda-graph-max-bs", "128", "renamed", "cuda-graph-max-bs-decode: 128"),
        (NEWEST, "cuda-graph-bs", ("1", "2"), "renamed", "cuda-graph-bs-decode: [1, 2]"),
        (NEWEST, "nsa-prefill-backend", "fa3", "0.5.8 to 0.5.18 had it", "dsa-prefill-backend: fa3"),
        (
            NEWEST,
            "mamba-scheduler-strategy",
            "extra_buffer",
            "renamed",
            "mamba-radix-cache-strategy: extra_buffer",
        ),
        (NEWEST, "stream-output", True, "renamed", "incremental-streaming-output: true"),
        (NEWEST, "disable-piecewise-cuda-graph", True, "renamed", "disable-prefill-cuda-graph: true"),
        (NEWEST, "enable-nan-detection", True, "0.5.8 to 0.5.11 had it", "remove the line"),
        (NEWEST, "fp4-gemm-runner-backend", "auto", "the flag is not", "fp4-gemm-backend: auto"),
        (OLDEST, "cuda-graph-max-bs-decode", "8", "0.5.14 to 0.5.23 had it", "use a version that has it"),
        (NEWEST, "speculative-draft", "/m", "ambiguous", "speculative-draft-model-path: /m"),
        (NEWEST, "help", True, "ends at once", "remove the line"),
        (BOX, "enable-expert-distribution-metrics", True, "refuses it", "remove the line"),
        # How many values.
        (NEWEST, "host", True, "a value is missing", "host: 127.0.0.1"),
        (NEWEST, "host", ("a", "b"), "takes one value, found 2", "keep one: host: a"),
        (NEWEST, "enable-metrics", "yes", "takes no value, found yes", "enable-metrics: true"),
        (NEWEST, "enable-metrics", "off", "takes no value, found off", "remove the line"),
        (NEWEST, "cuda-graph-bs-decode", True, "a value is missing", "cuda-graph-bs-decode: 1"),
        (NEWEST, "host", "--port", "would be read as a flag", "host: 127.0.0.1"),
        (NEWEST, "tp-size", False, "false would pass nothing", "remove the line"),
        # What they are.
        (NEWEST, "port", "x", "expected a whole number, found x", "port: 30000"),
        (NEWEST, "chunked-prefill-size", "8k", "expected a whole number", "chunked-prefill-size: 8000"),
        (NEWEST, "tp-size", "8.0", "expected a whole number", "tp-size: 8"),
        (NEWEST, "context-length", "1.5Ki", "8k or 8Ki", "context-length: 8192"),
        (NEWEST, "mem-fraction-static", "88%", "expected a number", "mem-fraction-static: 0.5"),
        (NEWEST, "preferred-sampling-params", "{a", "expected JSON", 'preferred-sampling-params: "{}"'),
        (NEWEST, "attention-backend", "flashinfr", "none of its choices", "attention-backend: flashinfer"),
        (NEWEST, "kv-cache-dtype", "fp8", "none of its choices", "kv-cache-dtype: fp8_e4m3"),
        (NEWEST, "reasoning-parser", "glm47", "one of --tool-call-parser", "reasoning-parser: glm45"),
        (NEWEST, "tool-call-parser", "kimi", "one of --reasoning-parser", "tool-call-parser: kimi_k2"),
        (NEWEST, "tool-call-parser", "kimi_k25", "none of its choices", "tool-call-parser: kimi_k2"),
        (NEWEST, "tool-call-parser", "qwen3", "one of --reasoning-parser", "tool-call-parser: qwen3_coder"),
        (OLDEST, "tool-call-parser", "auto", "none of its choices", "tool-call-parser:"),
        (
            OLDEST,
            "fp4-gemm-backend",
            "cutlass",
            "none of its choices",
            "fp4-gemm-backend: flashinfer_cutlass",
        ),
    ],
)
def test_what_the_engine_would_refuse(
    version: str, flag: str, value: FlagValue, said: str, remedy: str
) -> None:
    found = [one for id, one in told(version, {flag: value}).items() if id.startswith(f"flag.{flag}")]
    assert [one.verdict for one in found] == ["fail"]
    assert found[0].title == f"--{flag}"
    assert said in found[0].evidence
    assert remedy in (found[0].remedy or "")


@pytest.mark.parametrize(
    ("version", "flag", "value", "said", "remedy"),
    [
        (BOX, "cuda-graph-max-bs", "128", "it still works", "cuda-graph-max-bs-decode: 128"),
        (
            NEWEST,
            "disable-cuda-graph",
            True,
            "it still works",
            "cuda-graph-backend-decode: disabled, cuda-graph-backend-prefill: disabled",
        ),
        (
            NEWEST,
            "enable-flashinfer-allreduce-fusion",
            True,
            "it still works",
            "flashinfer-allreduce-fusion-backend: auto",
        ),
        (NEWEST, "monokernel-backend", "amd", "it still works", "enable-amd-monokernel: true"),
        (
            BOX,
            "enforce-piecewise-cuda-graph",
            True,
            "it still works",
            "cuda-graph-backend-prefill: tc_piecewise",
        ),
        (BOX, "grpc-mode", True, "it still works", "remove the line"),
        (NEWEST, "tp", "8", "abbreviation of --tp-size", "tp-size: 8"),
        (NEWEST, "speculative-algo", "EAGLE3", "abbreviation", "speculative-algorithm: EAGLE3"),
    ],
)
def test_what_still_works_is_a_warning(
    version: str, flag: str, value: FlagValue, said: str, remedy: str
) -> None:
    found = told(version, {flag: value})[f"flag.{flag}"]
    assert found.verdict == "warn"
    assert said in found.evidence
    assert remedy in (found.remedy or "")


def test_dp_attention_hints_at_the_size_that_the_profile_has() -> None:
    found = told(NEWEST, {"enable-dp-attention": True, "dp-size": "4"})["flag.enable-dp-attention"]
    assert found.remedy == "replace it with: attn-dp-size: 4"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("tp-size", "8"),
        ("host", "0.0.0.0"),
        ("enable-metrics", True),
        ("cuda-graph-bs-decode", ("1", "2", "4")),
        ("context-length", "128k"),
        ("chunked-prefill-size", "-1"),
        ("lora-paths", True),
        ("model-checksum", True),
        ("attention-backend", "flashinfer"),
        ("no-lora-strict-loading", True),
        ("custom-weight-loader", ("a.b", "c.d")),
    ],
)
def test_of_what_is_well_nothing_is_said(flag: str, value: FlagValue) -> None:
    assert told(NEWEST, {flag: value}) == {}


def test_one_setting_under_two_names_is_refused() -> None:
    found = told(NEWEST, {"tp-size": "8", "tensor-parallel-size": "4"})
    assert found["flag.tensor-parallel-size.twice"].verdict == "fail"
    assert "--tp-size" in found["flag.tensor-parallel-size.twice"].evidence
    both = told(NEWEST, {"lora-strict-loading": True, "no-lora-strict-loading": True})
    assert both["flag.no-lora-strict-loading.twice"].verdict == "fail"


def test_a_key_is_never_shown() -> None:
    found = told(NEWEST, {"api-key": ("hunter2", "more")})["flag.api-key.value"]
    assert "hunter2" not in found.evidence + (found.remedy or "")


def test_more_flags_than_there_are_cost_no_time() -> None:
    many: dict[str, FlagValue] = {f"flag-{number}": "x" for number in range(20_000)}
    (judged,) = judge_arguments(many, shipped(NEWEST))
    assert judged.verdict == "fail"
    assert "20000 flags" in judged.evidence


# Against argparse itself -----------------------------------------------------------------------

PARSERS = {version: parser_of(shipped(version)) for version in (NEWEST, BOX, OLDEST)}

_WORDS = st.one_of(
    st.sampled_from(
        [
            "1",
            "8",
            "-1",
            "0.5",
            "-0.5",
            "1k",
            "1.5Ki",
            "auto",
            "triton",
            "{}",
            "[1]",
            "nan",
            "",
            " ",
            "--x",
            "-y",
        ]
    ),
    st.text(alphabet="abc1-._ ", max_size=6).filter(lambda word: word not in ("--", "-h")),
)
_VALUES = st.one_of(st.just(True), _WORDS, st.lists(_WORDS, min_size=1, max_size=3).map(tuple))


@st.composite
def _lines(draw: st.DrawFn, version: str) -> dict[str, FlagValue]:
    names = sorted(shipped(version).by_name)
    args: dict[str, FlagValue] = {}
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(names))
        cut = draw(st.one_of(st.just(len(name)), st.integers(min(3, len(name)), len(name))))
        flag = shipped(version).find(name)
        good = [] if flag is None or not flag.choices else [st.sampled_from(flag.choices)]
        args[name[:cut].rstrip("-")] = draw(st.one_of(_VALUES, *good))
    args.pop("help", None)
    args.pop("h", None)
    return args


@pytest.mark.parametrize("version", PARSERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_verdict_agrees_with_argparse(version: str, data: st.DataObject) -> None:
    args = data.draw(_lines(version))
    if any(name.startswith("he") for name in args):  # --he is --help, which ends well and starts nothing
        return
    judged = judge_arguments(args, shipped(version))
    refused = [one.evidence for one in judged if one.verdict == "fail" and not one.id.endswith(".twice")]
    words = refusal(PARSERS[version], argv_of(args))
    assert bool(refused) == (words is not None), (words, refused)
