"""The table of markers, and what a client sees of a wrong parser, against an installed SGLang's parsers."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from console.checks.markers import REASONING_PARSERS, TOOL_PARSERS, leaked
from tests.rigs.sglang.install import HERE, Installation
from tests.rigs.sglang.spoken import (
    ANSWER,
    APPENDS_THINK,
    ARGUMENTS,
    CALLS,
    NAME,
    THOUGHT,
    THOUGHTS,
    tokens,
)

pytestmark = pytest.mark.rig

TABLES = {"tool": TOOL_PARSERS, "reasoning": REASONING_PARSERS}
#: Their formats come from the model's tokenizer, or from the parser that the chat template asks for.
FROM_THE_MODEL = {"auto", "response_template"}
#: Markers that models are known to write and this version's detectors do not: another spelling, a suffix.
NOT_IN_DETECTORS = {"<|tool_call_section_begin|>", "<|tool_call_section_end|>"}

#: Where no marker is left, no call is made, and the text is not empty: (what the model writes, the parser).
#: ``pythonic`` has no marker; Harmony's parser drops the tokens of formats that use the same ones.
QUIET = {("beam", "gpt-oss"), ("muse", "gpt-oss")}
QUIET |= {("pythonic", name) for name in CALLS if name != "pythonic"}

#: A reasoning and a tool parser that serve together.
PAIRS = (
    ("kimi_k2", "kimi_k2"),
    ("qwen3", "qwen25"),
    ("qwen3", "qwen3_coder"),
    ("qwen3-thinking", "hermes"),
    ("glm45", "glm45"),
    ("glm45", "glm47"),
    ("ling3", "ling3"),
    ("hunyuan", "hunyuan"),
    ("mimo", "mimo"),
    ("poolside_v1", "poolside_v1"),
    ("k2_horizon", "k2_horizon"),
    ("nemotron_3", "qwen3_coder"),
    ("deepseek-r1", "deepseekv3"),
    ("deepseek-v3", "deepseekv31"),
    ("deepseek-v4", "deepseekv4"),
    ("step3", "step3"),
    ("step3p5", "step3p5"),
    ("minimax", "minimax-m2"),
    ("minimax-m3", "minimax-m3"),
    ("mistral", "mistral"),
    ("interns1", "interns1"),
    ("iquest_q1", "iquest_q1"),
    ("gigachat35", "gigachat35"),
    ("cohere_command4", "cohere_command4"),
)
#: The reasoning parsers that end a thought where their own family's call begins.
ENDS_AT_A_CALL = {
    "kimi_k2",
    "qwen3",
    "qwen3-thinking",
    "glm45",
    "ling3",
    "hunyuan",
    "mimo",
    "poolside_v1",
    "k2_horizon",
    "nemotron_3",
    "cohere_command4",
}

Outcome = Mapping[str, Any]
Ask = Callable[..., Outcome]


def job(
    text: str, *, tool: str | None = None, reasoning: str | None = None, splits: bool = False
) -> dict[str, Any]:
    return {"tool": tool, "reasoning": reasoning, "pieces": tokens(text), "splits": splits}


def broken(text: str) -> str:
    """The call with its JSON cut in the middle of a string, and all that stands behind it."""
    return text.replace('"Paris", "days": 3}', '"Par', 1)


def in_thought(reasoning: str, tool: str) -> str:
    """A thought that never closes, with a call inside."""
    opening = THOUGHTS[reasoning].partition(THOUGHT)[0]
    return f"{opening}{THOUGHT}\n{CALLS[tool]}"


def jobs() -> Iterable[dict[str, Any]]:
    for spoken, text in CALLS.items():
        yield from (job(text, tool=parser, splits=CALLS[parser] == text) for parser in CALLS)
        if broken(text) != text:
            yield job(broken(text), tool=spoken)
    for text in THOUGHTS.values():
        yield from (job(text, reasoning=parser, splits=True) for parser in (*THOUGHTS, APPENDS_THINK))
    for reasoning, tool in PAIRS:
        yield job(in_thought(reasoning, tool), tool=tool, reasoning=reasoning)
        yield job(THOUGHTS[reasoning].replace(ANSWER, CALLS[tool]), tool=tool, reasoning=reasoning)


@pytest.fixture(scope="module")
def answers(sglang_installation: Installation) -> dict[str, Any]:
    """One process for everything: most of its time goes into importing SGLang."""
    asked = [{"list": True}, *jobs()]
    done = subprocess.run(
        [sglang_installation.python, HERE / "parse.py"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE / "shims")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(map(key, asked), json.loads(done.stdout), strict=True))


def key(asked: Mapping[str, Any]) -> str:
    return "list" if "list" in asked else f"{asked['tool']} {asked['reasoning']} {''.join(asked['pieces'])}"


@pytest.fixture(scope="module")
def ask(answers: dict[str, Any]) -> Ask:
    return lambda text, **parsers: answers[key(job(text, **parsers))]


def called(outcome: Outcome) -> list[tuple[str, object]]:
    """The calls, with their arguments as a client reads them; None for arguments that are no JSON."""
    calls: list[tuple[str, object]] = []
    for name, arguments in outcome["calls"]:
        try:
            calls.append((name, json.loads(arguments)))
        except ValueError:
            calls.append((name, None))
    return calls


RIGHT = [(NAME, ARGUMENTS)]


def both(outcome: Outcome) -> tuple[Outcome, Outcome]:
    return outcome["whole"], outcome["stream"]


@pytest.mark.parametrize("kind", ["tool", "reasoning"])
def test_the_table_has_every_parser_of_the_installed_sglang(answers: dict[str, Any], kind: str) -> None:
    assert set(TABLES[kind]) == {"auto", *answers["list"][kind]}
    spoken = {"tool": set(CALLS), "reasoning": {*THOUGHTS, APPENDS_THINK}}[kind]
    assert spoken == set(TABLES[kind]) - FROM_THE_MODEL


@pytest.mark.parametrize("kind", ["tool", "reasoning"])
def test_every_marker_of_the_table_stands_in_its_detector(answers: dict[str, Any], kind: str) -> None:
    for name, detector in answers["list"][kind].items():
        for marker in () if detector is None else TABLES[kind][name].markers:
            if marker not in NOT_IN_DETECTORS and not marker.endswith(":"):
                assert any(marker in text for text in detector["written"] + detector["kept"]), (name, marker)


def test_every_marker_of_the_detectors_stands_in_the_table(answers: dict[str, Any]) -> None:
    signs = re.compile(r"\s*\S*[<\[◁].*[>\]▷\[]\s*", re.S)
    for kind, parsers in answers["list"].items():
        for name, detector in parsers.items():
            if detector is None:
                continue
            configured = {"tool_parser": None, "reasoning_parser": None, f"{kind}_parser": name}
            for text in filter(signs.fullmatch, detector["kept"]):
                assert leaked(text, **configured), (name, text)
            for tag in detector.get("tags", ()):
                assert any(marker in tag for marker in TABLES[kind][name].markers), (name, tag)


@pytest.mark.parametrize("parser", CALLS)
def test_the_right_tool_parser_makes_the_call_and_leaves_no_marker(ask: Ask, parser: str) -> None:
    outcome = ask(CALLS[parser], tool=parser)
    for shown in both(outcome):
        assert called(shown) == RIGHT
        assert shown["text"].strip() == ""
    for shown in outcome["splits"]:  # two chunks: arguments may come late or never, but nothing leaks
        assert leaked(shown["text"], tool_parser=parser, reasoning_parser=None) == ()


@pytest.mark.parametrize("parser", THOUGHTS)
def test_the_right_reasoning_parser_parts_thought_and_answer(ask: Ask, parser: str) -> None:
    outcome = ask(THOUGHTS[parser], reasoning=parser)
    for shown in both(outcome):
        assert (shown["reasoning"].strip(), shown["text"].strip()) == (THOUGHT, ANSWER)
    for shown in outcome["splits"]:
        assert leaked(shown["reasoning"] + shown["text"], tool_parser=None, reasoning_parser=parser) == ()


def test_the_parser_that_gives_the_tag_back_is_seen_to_do_so(ask: Ask) -> None:
    for shown in both(ask(THOUGHTS["minimax"], reasoning=APPENDS_THINK)):
        assert leaked(shown["text"], tool_parser=None, reasoning_parser=APPENDS_THINK) == (
            "<think>",
            "</think>",
        )


@pytest.mark.parametrize("spoken", CALLS)
def test_a_wrong_tool_parser_never_looks_right(ask: Ask, spoken: str) -> None:
    """Either it reads the format as well, or a marker is left, or nothing is, or the call is another one."""
    quiet = set()
    for parser in CALLS:
        for shown in both(ask(CALLS[spoken], tool=parser)):
            found = leaked(shown["text"], tool_parser=parser, reasoning_parser=None)
            if not called(shown) and not found and shown["text"].strip():
                quiet.add((spoken, parser))
    assert quiet == {pair for pair in QUIET if pair[0] == spoken}


@pytest.mark.parametrize("spoken", THOUGHTS)
def test_a_wrong_reasoning_parser_never_looks_right(ask: Ask, spoken: str) -> None:
    """Either it reads the format as well, or a tag is left, or the whole answer went into the thought."""
    for parser in THOUGHTS:
        for shown in both(ask(THOUGHTS[spoken], reasoning=parser)):
            right = (shown["reasoning"].strip(), shown["text"].strip()) == (THOUGHT, ANSWER)
            everything = shown["reasoning"] + shown["text"]
            found = leaked(everything, tool_parser=None, reasoning_parser=parser)
            assert not found if right else found or not shown["text"].strip(), (parser, shown)


@pytest.mark.parametrize("parser", [name for name, text in CALLS.items() if broken(text) != text])
def test_broken_arguments_never_look_right(ask: Ask, parser: str) -> None:
    for shown in both(ask(broken(CALLS[parser]), tool=parser)):
        assert called(shown) != RIGHT


@pytest.mark.parametrize(("reasoning", "tool"), PAIRS)
def test_a_call_inside_a_thought_is_made_or_seen(ask: Ask, reasoning: str, tool: str) -> None:
    for shown in both(ask(in_thought(reasoning, tool), tool=tool, reasoning=reasoning)):
        found = leaked(shown["reasoning"] + shown["text"], tool_parser=tool, reasoning_parser=reasoning)
        if reasoning in ENDS_AT_A_CALL:
            assert called(shown) == RIGHT
            assert found == ()
        else:
            assert called(shown) == []
            assert found


@pytest.mark.parametrize(("reasoning", "tool"), PAIRS)
def test_a_thought_and_then_a_call_are_parted(ask: Ask, reasoning: str, tool: str) -> None:
    text = THOUGHTS[reasoning].replace(ANSWER, CALLS[tool])
    for shown in both(ask(text, tool=tool, reasoning=reasoning)):
        assert shown["reasoning"].strip() == THOUGHT
        assert called(shown) == RIGHT
