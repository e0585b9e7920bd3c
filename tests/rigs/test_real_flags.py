"""The installed SGLang 0.5.23, asked for its flags, and its own argparse as the judge of our verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from console.checks.flags import ask, judge, shipped, validate_profile
from console.checks.flags.arguments import judge_arguments
from console.checks.flags.table import Flag
from console.model.profile import FlagValue, argv_of
from console.sources.files import load_profile, shipped_profiles_directory
from console.store.state import State
from console.transport.local import LocalRunner
from tests.checks.flags.flag_lab import EIGHT, installed, profile
from tests.rigs.sglang.install import VERSION, Installation

pytestmark = pytest.mark.rig

#: Parses command lines (JSON on standard input) as SGLang does; for each what it was refused with, or null.
PARSE = """
import argparse, contextlib, io, json, sys
from sglang.srt.server_args import ServerArgs

lines = json.load(sys.stdin)
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
said = []
for line in lines:
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):
            parser.parse_args(line)
        said.append(None)
    except SystemExit:
        said.append(words.getvalue().rpartition("error: ")[2].strip())
    except Exception as problem:
        said.append(f"{type(problem).__name__}: {problem}")
print("\\nSAID" + json.dumps(said))
"""


class Judge:
    """SGLang's own argparse, asked about all command lines at once: importing it is what takes time."""

    def __init__(self, python: Path, lines: list[dict[str, FlagValue]]) -> None:
        argvs = [_argv(line) for line in lines]
        ran = subprocess.run(
            [python, "-I", "-c", PARSE],
            input=json.dumps(argvs),
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        said = next(line for line in ran.stdout.splitlines() if line.startswith("SAID"))
        answers: list[str | None] = json.loads(said.removeprefix("SAID"))
        self._said = dict(zip(map(tuple, argvs), answers, strict=True))

    def refusal(self, line: dict[str, FlagValue]) -> str | None:
        """argparse's own words on a command line; None when it takes it."""
        return self._said[tuple(_argv(line))]


def _argv(line: dict[str, FlagValue]) -> list[str]:
    return list(argv_of({"model-path": "/m", **line}))


def good_value(flag: Flag) -> FlagValue:
    if flag.arity == "0":
        return True
    sample = {"int": "1", "float": "0.5", "count": "8Ki", "json": "[]"}.get(flag.type, "abc")
    return flag.choices[-1] if flag.choices else sample


def lines_about(flag: Flag) -> list[dict[str, FlagValue]]:
    """A good line and some that are not, for one flag."""
    name, good = flag.name, good_value(flag)
    lines: list[dict[str, FlagValue]] = [{name: good}, {name: ("x y", "z")}, {name: "-5"}, {name[:-1]: good}]
    lines += [{f"{name}q": good}, {name: True}, {name: "--tp-size"}]
    if flag.type in ("int", "float", "count", "json"):
        lines += [{name: "12x"}, {name: "1.5"}, {name: "1k"}, {name: "{"}]
    if flag.choices:
        lines += [{name: f"{flag.choices[0]}x"}, {name: flag.choices[0].upper()}]
    return lines


TABLE = shipped(VERSION)
EVERY_FLAG = [line for flag in TABLE.flags if flag.name != "help" for line in lines_about(flag)]
SPOKEN: list[dict[str, FlagValue]] = [
    {"cuda-graph-max-bs": "128"}, {"tp": "8"}, {"speculative-algo": "EAGLE3"}, {"mem-frac": "0.8"},
    {"tool-call-parser": "kimi"}, {"tool-call-parser": "kimi_k2"}, {"reasoning-parser": "glm47"},
    {"cuda-graph-bs-decode": ("1", "2", "4")}, {"cuda-graph-bs-decode": ("1", "x")}, {"port": "x"},
    {"fp4-gemm-runner-backend": "auto"}, {"host": True}, {"enable-metrics": "yes"},
]  # fmt: skip
PROFILES = {path: load_profile(path) for path in sorted(shipped_profiles_directory().glob("*.yaml"))}
KIMI = next(one for one in PROFILES.values() if "kimi" in one.name)


def mended(args: dict[str, FlagValue]) -> dict[str, FlagValue]:
    """The flags with the lines of their own findings in place of those that are found fault with."""
    better = dict(args)
    for finding in judge(profile(args), installed(VERSION), EIGHT):
        if finding.id.startswith("flag."):
            del better[finding.id.removeprefix("flag.")]
            name, _, value = (finding.remedy or "").removeprefix("replace it with: ").partition(": ")
            better[name] = value
    return better


@pytest.fixture(scope="module")
def real(sglang_installation: Installation) -> Judge:
    lines = [*EVERY_FLAG, *SPOKEN, *(one.args for one in PROFILES.values()), mended(KIMI.args)]
    return Judge(sglang_installation.python, lines)


async def test_the_shipped_table_is_what_the_installed_one_says(
    sglang_installation: Installation, tmp_path: Path
) -> None:
    state, python = State(tmp_path / "state"), str(sglang_installation.python)
    began = time.monotonic()
    asked = await ask(LocalRunner(), state, python)
    first = time.monotonic() - began
    assert (asked.version, asked.reason, asked.note) == (VERSION, None, None)
    assert asked.table == shipped(VERSION)
    began = time.monotonic()
    again = await ask(LocalRunner(), state, python)
    assert again.remembered and again.table == asked.table
    assert time.monotonic() - began < min(first / 2, 3)


def test_every_verdict_agrees_with_sglangs_own_argparse(real: Judge) -> None:
    assert len(EVERY_FLAG) > 4000
    disagreements = []
    for line in (*EVERY_FLAG, *SPOKEN):
        ours = [one.evidence for one in judge_arguments(line, TABLE) if one.verdict == "fail"]
        said = real.refusal(line)
        if bool(ours) != (said is not None):
            disagreements.append((line, said, ours))
    assert disagreements == []


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("cuda-graph-max-bs", "128", "ambiguous option: --cuda-graph-max-bs could match"),
        ("reasoning-parser", "glm47", "invalid choice: 'glm47'"),
        ("port", "x", "invalid int value: 'x'"),
        ("host", True, "expected one argument"),
        ("enable-metrics", "yes", "unrecognized arguments: yes"),
        ("fp4-gemm-runner-backend", "auto", "unrecognized arguments: --fp4-gemm-runner-backend"),
    ],
)
def test_it_refuses_for_the_reason_that_we_tell(real: Judge, flag: str, value: FlagValue, words: str) -> None:
    assert words in (real.refusal({flag: value}) or "")


async def test_the_shipped_profiles_against_the_installed_one(
    real: Judge, sglang_installation: Installation, tmp_path: Path
) -> None:
    state, python = State(tmp_path / "state"), str(sglang_installation.python)
    for path, one in PROFILES.items():
        findings = await validate_profile(one, LocalRunner(), state, python=python, path=path)
        assert f"the installed SGLang {VERSION}" in findings[0].evidence
        refused = [found.id for found in findings if found.verdict == "fail" and found.id.startswith("flag.")]
        assert bool(refused) == (real.refusal(one.args) is not None)
        assert refused == (["flag.cuda-graph-max-bs"] if one is KIMI else [])


def test_what_we_propose_the_real_one_takes(real: Judge) -> None:
    """The Kimi profile, mended by the lines of its own findings, parses."""
    better = mended(KIMI.args)
    assert real.refusal(KIMI.args) is not None
    assert real.refusal(better) is None
    assert not [one for one in judge(profile(better), installed(VERSION), EIGHT) if one.verdict == "fail"]


# Together --------------------------------------------------------------------------------------

#: Resolves command lines as the engine does before it starts: what it ends with, or its resolved values.
RESOLVE = """
import json, sys
from sglang.srt.server_args import prepare_server_args

said = []
for line in json.load(sys.stdin):
    try:
        arguments = prepare_server_args(line)
        arguments.resolve_once()
        arguments.check_server_args()
        said.append({name: str(value) for name, value in arguments.resolved_dict().items()})
    except Exception as problem:
        said.append(f"{type(problem).__name__}: {problem}")
print("\\nSAID" + json.dumps(said))
"""

EAGLE: dict[str, FlagValue] = {"speculative-algorithm": "EAGLE3", "max-running-requests": "48"}
TREE: dict[str, FlagValue] = {
    **EAGLE,
    "speculative-num-steps": "2",
    "speculative-eagle-topk": "4",
    "speculative-num-draft-tokens": "8",
}
CHAIN: dict[str, FlagValue] = {**EAGLE, "speculative-num-steps": "2", "speculative-eagle-topk": "1"}
CACHE: dict[str, FlagValue] = {"enable-hierarchical-cache": True}

#: A line, our finding on it (None: nothing), and the engine's words or what it resolves to.
TOGETHER: list[tuple[dict[str, FlagValue], str | None, str | dict[str, str]]] = [
    (CHAIN, None, {"speculative_num_draft_tokens": "3"}),
    ({"speculative-algorithm": "NGRAM"}, "running-requests", {"max_running_requests": "48"}),
    ({**CHAIN, "speculative-num-draft-tokens": "8"}, "draft-tokens", {"speculative_num_draft_tokens": "3"}),
    ({**EAGLE, "speculative-num-steps": "2"}, "steps", "TypeError: '>' not supported"),
    ({**EAGLE, "speculative-eagle-topk": "1"}, "steps", "AssertionError"),
    ({**EAGLE, "speculative-algorithm": "FOO"}, "algorithm", "ValueError: Unknown speculative algorithm"),
    ({**CHAIN, "enable-mixed-chunk": True}, None, {"enable_mixed_chunk": "True"}),
    (
        {"speculative-algorithm": "NGRAM", "max-running-requests": "8", "enable-mixed-chunk": True},
        "mixed-chunk",
        {"enable_mixed_chunk": "False"},
    ),
    (
        {**TREE, "page-size": "16", "attention-backend": "torch_native"},
        "topk-page-size",
        "ValueError: speculative_eagle_topk > 1 with page_size > 1",
    ),
    ({**TREE, "page-size": "16", "attention-backend": "triton"}, None, {"page_size": "16"}),
    ({**CACHE, "disable-radix-cache": True}, "hicache-radix", "are mutually exclusive"),
    (
        {**CACHE, "hicache-mem-layout": "page_first", "hicache-io-backend": "direct"},
        "hicache-layout",
        {"hicache_mem_layout": "page_first_direct"},
    ),
    ({**CACHE, "hicache-ratio": "0.5"}, None, {"hicache_ratio": "0.5"}),
    ({"chunked-prefill-size": "8100", "page-size": "64"}, "chunk-pages", "must be divisible by page_size"),
    ({"chunked-prefill-size": "8064", "page-size": "64"}, None, {"chunked_prefill_size": "8064"}),
    ({"speculative-num-steps": "2"}, "speculation-off", {"speculative_num_draft_tokens": "None"}),
]


@pytest.fixture(scope="module")
def resolved(sglang_installation: Installation) -> list[str | dict[str, str]]:
    """What the engine makes of each line of TOGETHER, on a machine where it believes in a card."""
    lines = []
    for line, _, _ in TOGETHER:
        draft = str(sglang_installation.draft)
        drafted = {"speculative-draft-model-path": draft} if line.items() >= EAGLE.items() else {}
        model: dict[str, FlagValue] = {"model-path": str(sglang_installation.model), "device": "cuda"}
        lines.append(argv_of({**model, **drafted, **line}))
    shims = Path(__file__).parent / "sglang/shims"
    ran = subprocess.run(
        [sglang_installation.python, "-c", RESOLVE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        cwd=shims,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(shims)},
    )
    said = next(line for line in ran.stdout.splitlines() if line.startswith("SAID"))
    found: list[str | dict[str, str]] = json.loads(said.removeprefix("SAID"))
    return found


@pytest.mark.parametrize("place", range(len(TOGETHER)), ids=lambda place: f"{place}-{TOGETHER[place][1]}")
def test_what_we_say_of_flags_together_is_what_the_engine_does(
    resolved: list[str | dict[str, str]], place: int
) -> None:
    line, finding, engine = TOGETHER[place]
    said = resolved[place]
    findings = [one.id for one in judge(profile(line), installed(VERSION), None) if "together." in one.id]
    assert findings == ([] if finding is None else [f"together.{finding}"])
    if isinstance(engine, str):
        assert isinstance(said, str) and engine in said
    else:
        assert isinstance(said, dict), said
        assert {name: said[name] for name in engine} == engine
