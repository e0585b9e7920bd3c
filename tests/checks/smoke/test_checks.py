"""Every smoke test passes on an engine that is well, and fails with the right words on one that is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from console.checks.smoke import (
    AFTER_START,
    CHECKS,
    Started,
    Target,
    UnknownCheck,
    chosen,
    prompts,
    run_smoke,
    summary,
)
from console.checks.smoke.session import AT_ONCE
from console.checks.smoke.wire import RID_PREFIX
from console.model.finding import Finding, overall
from console.model.profile import Expect
from tests.checks.smoke.engine_double import EngineDouble, Said, profile, serving

MARKERS = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"


async def findings(engine: EngineDouble, *only: str, **target: Any) -> dict[str, Finding]:
    async with serving(engine) as (_, healthy):
        found = await run_smoke(msgspec.structs.replace(healthy, **target), only=only)
    return {finding.id: finding for finding in found}


async def test_all_pass_on_a_healthy_engine_and_are_told_as_they_come() -> None:
    told: list[Finding | Started] = []
    async with serving() as (engine, target):
        found = await run_smoke(target, report=told.append)
    assert [(one.id, one.verdict, summary(one)) for one in found if one.verdict != "pass"] == []
    assert [one.id for one in found] == [check.id for check in CHECKS]
    for check in CHECKS:
        started = told.index(Started(check.id, check.title))
        assert any(isinstance(one, Finding) and one.id == check.id for one in told[started:])
    assert {body["rid"][: len(RID_PREFIX)] for body in engine.asked} == {RID_PREFIX}
    assert len({body["rid"] for body in engine.asked}) == len(engine.asked)
    assert all(body.get("max_tokens", 0) <= 1024 for body in engine.asked)
    assert engine.most_open <= AT_ONCE
    assert engine.aborted == []


async def test_the_evidence_has_the_request_the_answer_and_the_times() -> None:
    found = (await findings(EngineDouble(), "tools-call"))["tools-call"]
    first, times, request, answer, *_ = found.evidence.split("\n")
    assert first == "parsed, whole and streamed"
    assert len(re.findall(r"\d+(?:\.\d+)?m?s", times)) >= 6  # four exchanges, two with a first token
    assert '"get_weather"' in request and "/v1/chat/completions" in request
    assert '"finish_reason": "tool_calls"' in answer


async def test_both_modes_are_asked_with_thinking_and_without() -> None:
    async with serving() as (engine, target):
        await run_smoke(target, only=["tools-call"])
    modes = {(body["stream"], *body["chat_template_kwargs"].values()) for body in engine.asked}
    assert modes == {(one, both, both) for one in (False, True) for both in (False, True)}


# What each check fails on ------------------------------------------------------------------------


def says(**fields: Any) -> Callable[[dict[str, Any], Said], None]:
    return lambda body, said: said.update(fields)


def streamed_only(**fields: Any) -> Callable[[dict[str, Any], Said], None]:
    return lambda body, said: said.update(fields) if body["stream"] else None


def thinking_only(**fields: Any) -> Callable[[dict[str, Any], Said], None]:
    thinks = "chat_template_kwargs"
    return lambda body, said: said.update(fields) if body[thinks]["thinking"] else None


def call(**fields: Any) -> Callable[[dict[str, Any], Said], None]:
    def spoil(body: dict[str, Any], said: Said) -> None:
        for one in said["calls"]:
            one.update(fields)

    return spoil


def forget_a_call(body: dict[str, Any], said: Said) -> None:
    del said["calls"][1:]


def leak(body: dict[str, Any], said: Said) -> None:
    said.update(content=MARKERS, calls=[], finish="stop")


def leak_streamed(body: dict[str, Any], said: Said) -> None:
    if body["stream"]:
        leak(body, said)


def keep_no_cache(body: dict[str, Any], said: Said) -> None:
    said["meta"]["cached_tokens"] = 0


def think_anyway(body: dict[str, Any], said: Said) -> None:
    said["reasoning"] = "Hm, let me think about it."


def overspend(body: dict[str, Any], said: Said) -> None:
    said["usage"] = {"prompt_tokens": 30, "completion_tokens": 900, "total_tokens": 930}


def mangle(body: dict[str, Any], said: Said) -> None:
    arguments = json.loads(said["calls"][0]["arguments"])
    arguments["title"] = arguments["title"].encode("ascii", "replace").decode()
    said["calls"][0]["arguments"] = json.dumps(arguments)


def verify_each_token(body: dict[str, Any], said: Said) -> None:
    said["meta"]["spec_verify_ct"] = said["meta"]["completion_tokens"]


NOTHING = {"content": "", "calls": [], "finish": "stop"}
CASES = [
    ("sanity", says(content="I do not know"), "expected 391, said “I do not know”"),
    ("sanity", says(content=""), "empty content"),
    ("sanity", streamed_only(content="!" * 40), "nothing but '!' (streamed, not thinking)"),
    ("degenerate", says(content="+" * 120), "nothing but '+'"),
    ("degenerate", says(content="the the the the the the the the"), "'the' 8 times"),
    ("degenerate", says(content="A card " + "\ufffd" * 3), "3 replacement characters"),
    ("degenerate", says(content="显卡把数据变成屏幕上的图像。它有数千个小处理器同时工作。" * 2), "not Latin"),
    ("logprobs", says(logprobs=[-0.1, None]), "1 of 2 log probabilities are no numbers"),
    ("logprobs", streamed_only(logprobs=[float("nan")]), "1 of 1 log probabilities are no numbers"),
    ("reasoning", thinking_only(reasoning=""), "reasoning_content is empty"),
    ("reasoning", thinking_only(content="<think>Hm</think>391", reasoning=""), "<think>"),
    ("reasoning", says(content="", reasoning="The answer is 391."), "all text landed in reasoning_content"),
    ("reasoning", think_anyway, "thinks though thinking is switched off"),
    ("reasoning", thinking_only(reasoning=f"I call {MARKERS}"), "leaked into reasoning_content"),
    ("tools-call", leak, "leaked into content: <|tool_calls_section_begin|>"),
    ("tools-call", leak_streamed, "leaked into content"),
    ("tools-call", says(**NOTHING), "empty content and no tool call"),
    ("tools-call", says(content="It is sunny.", calls=[], finish="stop"), "no tool call; content is “It is"),
    ("tools-call", call(id="call_0123456789abcdef01234567"), "has not the form of functions.NAME:N"),
    ("tools-call", call(id=None), "without an id"),
    ("tools-call", call(arguments='{"city": "Paris"'), "are not JSON"),
    ("tools-call", call(arguments='{"city": "Paris", "unit": "kelvin"}'), "unit is none of celsius"),
    ("tools-call", call(arguments='{"city": "<|tool_call_end|>", "unit": "celsius"}'), "arguments of a call"),
    ("tools-call", call(name="get_wether"), "there is no tool"),
    ("tools-call", says(finish="stop"), "finish_reason is stop"),
    ("tools-call", streamed_only(reasoning="Hm."), "differ in reasoning_content"),
    ("tools-parallel", forget_a_call, "1 of 2 calls"),
    ("tools-parallel", call(id="functions.get_weather:0"), "two calls with one id"),
    ("tools-parallel", call(arguments='{"city": "Paris", "unit": "celsius"}'), "no call for Tokyo"),
    (
        "tools-unneeded",
        says(
            content="",
            finish="tool_calls",
            calls=[{"id": "functions.get_weather:0", "name": "get_weather", "arguments": "{}"}],
        ),
        "called get_weather without need",
    ),
    (
        "tools-forced",
        call(name="get_weather", arguments='{"city": "Berlin", "unit": "celsius"}'),
        "get_time was forced",
    ),
    ("tools-arguments", mangle, "arguments were changed: title"),
    ("tools-result", lambda body, said: said.update(content=said["content"][:20]), "the tool said 31.4"),
    ("structured", says(content="Paris is a city."), "not JSON"),
    ("structured", says(content='{"name": "Paris"}'), "country is missing"),
    ("structured", says(content=json.dumps({**json.loads('{"a": 1}')})), "does not fit the schema"),
    ("stop", says(content="1, 2, 3, 4, 5, 6, 7, 8"), "the stop string '7' is in the answer"),
    ("stop", says(content="1, 2, 3, 4, 5, 6", finish="length"), "went on past the stop string"),
    ("usage", says(usage=None), "no counts of tokens"),
    ("usage", overspend, "900 tokens written, the limit was 24"),
    ("prefix-cache", keep_no_cache, "no token of the same prompt came from the cache"),
    ("speculation", verify_each_token, "1.00 tokens per verify step"),
    ("burst", says(usage=None), "no counts of tokens"),
]


@pytest.mark.parametrize(
    ("check", "spoil", "words"), CASES, ids=[f"{one[0]}: {one[2][:40]}" for one in CASES]
)
async def test_a_check_fails_with_the_right_words(
    check: str, spoil: Callable[[dict[str, Any], Said], None], words: str
) -> None:
    engine = EngineDouble()
    engine.spoil = spoil
    found = (await findings(engine, check))[check]
    assert (found.verdict, found.id) == ("fail", check), found.evidence
    assert words in summary(found)
    assert "request (" in found.evidence


def test_every_check_that_asks_for_text_has_a_case_in_which_it_fails() -> None:
    assert {case[0] for case in CASES} | {"served-name", "parsers"} == {check.id for check in CHECKS}


async def test_the_served_name_is_what_models_lists_and_not_what_an_answer_echoes() -> None:
    engine = EngineDouble()
    engine.names = ["other"]
    found = (await findings(engine, "served-name"))["served-name"]
    assert (found.verdict, summary(found)) == ("fail", "serves other, not kimi-k2.5")
    known = (await findings(EngineDouble(), "served-name", profile=None))["served-name"]
    assert known.verdict == "pass" and "kimi-k2.5" in summary(known)


async def test_a_parser_that_is_not_the_profiles_is_named_with_both() -> None:
    engine = EngineDouble()
    engine.model["tool_call_parser"] = "hermes"
    found = (await findings(engine, "parsers"))["parsers"]
    assert summary(found) == "--tool-call-parser: the profile has kimi_k2, hermes runs"
    assert found.verdict == "fail"
    older = EngineDouble()
    older.model = {"model_path": "/models/k"}  # before 0.5.18 only /server_info tells
    older.info |= {"tool_call_parser": "kimi_k2", "reasoning_parser": "kimi_k2"}
    assert (await findings(older, "parsers"))["parsers"].verdict == "pass"


# What does not apply -----------------------------------------------------------------------------


async def test_what_the_profile_does_not_expect_is_skipped_with_the_reason() -> None:
    plain = profile(expect=Expect())
    found = await findings(EngineDouble(), "tools", "reasoning", profile=plain)
    assert {one.verdict for one in found.values()} == {"skipped"}
    assert all("the profile kimi expects no" in summary(one) for one in found.values())


async def test_without_a_profile_the_parsers_that_run_decide() -> None:
    engine = EngineDouble()
    engine.model["reasoning_parser"] = None
    found = await findings(engine, "tools-call", "reasoning", profile=None)
    assert found["tools-call"].verdict == "pass"
    assert summary(found["reasoning"]) == "the engine runs without a reasoning parser"


async def test_ids_of_other_parsers_have_another_form() -> None:
    engine = EngineDouble()
    engine.model["tool_call_parser"] = "qwen3_coder"
    engine.spoil = call(id="call_0123456789abcdef01234567")
    assert (await findings(engine, "tools-call", profile=None))["tools-call"].verdict == "pass"


async def test_what_the_engine_does_not_do_or_tell_is_skipped() -> None:
    engine = EngineDouble()
    engine.info |= {"speculative_algorithm": None, "disable_radix_cache": True}
    engine.spoil = lambda body, said: said.update(logprobs=None)
    found = await findings(engine, "speculation", "prefix-cache", "logprobs")
    assert {one.verdict for one in found.values()} == {"skipped"}
    assert summary(found["speculation"]) == "speculation is off"


async def test_a_cache_that_finds_only_a_longer_prompt_is_no_failure() -> None:
    def spoil(body: dict[str, Any], said: Said) -> None:
        said["meta"]["cached_tokens"] = 900 if body["text"].endswith(" And") else 0

    engine = EngineDouble()
    engine.spoil = spoil
    found = (await findings(engine, "prefix-cache"))["prefix-cache"]
    assert (found.verdict, summary(found)) == ("pass", "900 of 900 tokens from the cache")


async def test_a_model_that_thinks_past_its_limit_is_doubtful_and_not_broken() -> None:
    engine = EngineDouble()
    engine.spoil = thinking_only(content="", finish="length", calls=[])
    found = (await findings(engine, "reasoning"))["reasoning"]
    assert found.verdict == "warn"
    assert "reached its limit of tokens while it was still thinking" in summary(found)


async def test_a_burst_is_held_against_the_reference() -> None:
    slow = profile(results={"output_tokens_per_s": 1e9, "ttft_s": 1e-9})
    found = (await findings(EngineDouble(), "burst", profile=slow))["burst"]
    assert found.verdict == "warn"
    assert "output_tokens_per_s 1e+09" in summary(found) and "ttft_s" in summary(found)
    easy = profile(results={"output_tokens_per_s": 0.1, "ttft_s": 100.0})
    assert (await findings(EngineDouble(), "burst", profile=easy))["burst"].verdict == "pass"


async def test_one_failed_check_hides_no_other() -> None:
    engine = EngineDouble()
    engine.spoil = lambda body, said: leak(body, said) if "tools" in body else None
    found = await findings(engine)
    verdicts = {one.verdict for name, one in found.items() if name.startswith("tools-")}
    assert verdicts == {"fail"} and overall(tuple(found.values())) == "fail"
    rest = {one.verdict for name, one in found.items() if not name.startswith("tools-")}
    assert rest == {"pass"}


# Choosing ----------------------------------------------------------------------------------------


def test_only_takes_ids_and_groups_and_names_what_there_is() -> None:
    assert [check.id for check in chosen(["sanity"])] == ["sanity"]
    assert {check.id for check in chosen(["tools"])} == {one.id for one in CHECKS if one.id[:6] == "tools-"}
    assert chosen([]) == CHECKS
    assert {check.id for check in chosen(AFTER_START)} == set(AFTER_START)
    with pytest.raises(UnknownCheck, match="did you mean sanity"):
        chosen(["sanyt"])


def test_prompts_and_limits_are_small() -> None:
    assert len(prompts.long_text("x")) < 4000


# Secrets -----------------------------------------------------------------------------------------


async def test_the_key_is_sent_and_never_shown_even_when_the_engine_echoes_it() -> None:
    engine = EngineDouble()
    engine.spoil = says(content="Your key is s3cr3t-key, friend")
    async with serving(engine) as (_, target):
        keyed = Target(target.url, "s3cr3t-key", target.profile)
        found = await run_smoke(keyed, only=["sanity", "served-name"])
    sent = [headers.get("authorization") for headers in engine.headers]
    assert set(sent) == {"Bearer s3cr3t-key"}
    assert "s3cr3t-key" not in repr(found) and "(hidden)" in repr(found)
    assert "s3cr3t-key" not in repr(keyed)
