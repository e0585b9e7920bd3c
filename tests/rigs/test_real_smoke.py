"""The smoke tests against a real SGLang: each passes on a healthy model, and names what a sick one does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from console.checks.markers import leaked
from console.checks.smoke import CHECKS, Target, run_smoke
from console.model.finding import Finding
from console.model.profile import Expect, FlagValue, Profile, Reference
from tests.rigs.sglang.install import Installation
from tests.rigs.sglang.persona import ONE_CALL, THOUGHT, Family, calls, persona
from tests.rigs.sglang.server import SERVED_NAME, EngineServer
from tests.rigs.sglang.spoken import ANSWER, ARGUMENTS, CALLS, NAME, THOUGHTS

pytestmark = pytest.mark.rig

#: Seconds that a run on a ready server may take.
RUN_S = 60.0

#: What the endpoints of a server refuse unless they serve that very model: the deepseeks answer 400 and
#: ask for its tokenizer, the others 500. ``test_real_parsers.py`` has them.
NOT_HERE = frozenset(
    {"deepseekv4", "deepseekv41", "deepseek-v4", "deepseek-v41", "beam", "glm47", "iquest_q1"}
)

WEATHER: tuple[str, Mapping[str, Any]] = ("get_weather", {"city": "Paris", "unit": "celsius"})


class Lab:
    """A server with a scripted model that can be given other answers while it runs."""

    def __init__(
        self, installation: Installation, folder: Path, family: Family, reasoning: str, **launch: Any
    ) -> None:
        self.family = family
        self._answers = folder / "answers.json"
        self.speaks(persona(family))
        self.server = EngineServer(
            installation,
            folder / "server.log",
            flags=("--tool-call-parser", family, "--reasoning-parser", reasoning),
            env={"SCRIPTED_ANSWERS": str(self._answers), "SCRIPTED_DRAFT_ERR": "0.1"},
            **launch,
        )
        self.flags: dict[str, FlagValue] = {"tool-call-parser": family, "reasoning-parser": reasoning}

    def speaks(self, answers: Mapping[str, str]) -> None:
        self._answers.write_text(json.dumps(answers))

    def profile(self, **expect: Any) -> Profile:
        """The profile that this server runs with."""
        expected = {"tool_calls": True, "reasoning": True, "served_name": SERVED_NAME, **expect}
        return Profile(name="scripted", title="Scripted", args=self.flags, expect=Expect(**expected))

    async def run(self, *only: str, profile: Profile | None = None) -> dict[str, Finding]:
        target = Target(self.server.url, None, profile or self.profile())
        return {finding.id: finding for finding in await run_smoke(target, only=only)}

    async def running(self) -> int:
        """Requests that the engine works on now."""
        loads = json.loads(await self.server.get("/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] for load in loads)


FAMILIES: dict[str, tuple[Family, str]] = {
    "kimi": ("kimi_k2", "kimi_k2"),
    "coder": ("qwen3_coder", "qwen3"),
    "drafting": ("qwen25", "qwen3"),
}

#: For what is the same whichever model answers: one server is enough.
one_server = pytest.mark.parametrize("made", ["kimi"], indirect=True)


@pytest.fixture(scope="module", params=["kimi", "coder"])
def made(
    request: pytest.FixtureRequest,
    sglang_installation: Installation,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lab]:
    """One server after the other: pytest runs all tests of one before it starts the next."""
    family, reasoning = FAMILIES[request.param]
    drafts = request.param == "drafting"
    lab = Lab(sglang_installation, tmp_path_factory.mktemp(family), family, reasoning, speculative=drafts)
    try:
        lab.server.start()
        yield lab
    finally:
        lab.server.stop(grace=0)


@pytest.fixture
async def healthy(made: Lab) -> Lab:
    """The server, ready, with a healthy model whatever the test before made it say."""
    await made.server.wait_ready()
    made.speaks(persona(made.family))
    return made


def verdicts(findings: Mapping[str, Finding]) -> dict[str, str]:
    return {name: finding.verdict for name, finding in findings.items()}


async def test_a_healthy_model_passes_every_check_well_within_a_minute(healthy: Lab) -> None:
    for _ in range(2):  # the second time from the prefix cache
        began = time.monotonic()
        findings = await healthy.run()
        assert time.monotonic() - began < RUN_S / 2
        wanted = {check.id: "pass" for check in CHECKS} | {"speculation": "skipped"}
        assert verdicts(findings) == wanted, [f.evidence for f in findings.values() if f.verdict != "pass"]
        assert await healthy.running() == 0


#: What is wrong with the model: the answers that differ, and of each check that fails what it says.
SICK: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "one sign only": (
        {"prose": "!" * 120, "sum": "!!!!!!!!", "capital": "!!!!!!!!"},
        dict.fromkeys(
            ("sanity", "degenerate", "logprobs", "reasoning", "tools-unneeded", "usage", "burst"),
            "nothing but '!'",
        ),
    ),
    "wrong answers": (
        {"sum": "392", "capital": "Lyon"},
        {
            "sanity": "expected paris, said “Lyon”",
            "tools-unneeded": "expected 391",
            "reasoning": "expected 391",
        },
    ),
    "another script": (
        {
            "prose": (
                "图形卡把数字变成图片。它一次处理许多数字。其他程序也用它计算。"
                "显卡非常快,并且很热,需要良好的冷却。"
            )
        },
        {"degenerate": "letters are not Latin"},
    ),
    "markers in the text": (
        {"sum": "391<|tool_call_end|>", "prose": "A card draws.</tool_call> It is fast."},
        {
            "sanity": "leaked into content: <|tool_call_end|>",
            "degenerate": "leaked into content: </tool_call>",
            "reasoning": "leaked into content: <|tool_call_end|>",
            "tools-unneeded": "leaked",
            "usage": "leaked",
            "burst": "leaked",
        },
    ),
    "no call": (
        {"one_call": "It is sunny.", "two_calls": "Sunny.", "record": "Saved."},
        dict.fromkeys(("tools-call", "tools-parallel", "tools-arguments", "tools-result"), "no tool call"),
    ),
    "cannot count": ({"counting": "One, two."}, {"stop": "stopped before the stop string"}),
}


@pytest.mark.parametrize("name", SICK)
async def test_a_sick_model_fails_the_checks_that_look_for_it_and_no_others(healthy: Lab, name: str) -> None:
    answers, wanted = SICK[name]
    healthy.speaks(persona(healthy.family, **answers))
    failed = {f.id: f.evidence for f in (await healthy.run()).values() if f.verdict == "fail"}
    for check, words in wanted.items():
        assert words in failed[check].partition("\n")[0]
    assert failed.keys() == wanted.keys()


async def test_one_call_where_two_were_asked_for_fails(healthy: Lab) -> None:
    healthy.speaks(persona(healthy.family, two_calls=calls(healthy.family, WEATHER)))
    found = await healthy.run("tools")
    assert [f.id for f in found.values() if f.verdict == "fail"] == ["tools-parallel"]
    assert "1 of 2 calls" in found["tools-parallel"].evidence


async def test_a_call_without_need_fails(healthy: Lab) -> None:
    healthy.speaks(persona(healthy.family, sum=calls(healthy.family, WEATHER)))
    found = await healthy.run("tools-unneeded", "sanity")
    assert "called get_weather without need" in found["tools-unneeded"].evidence
    assert "leaked into content" in found["sanity"].evidence  # no tools were offered: nothing parses it


@one_server
async def test_logits_that_are_nan_are_named(healthy: Lab) -> None:
    healthy.speaks(dict.fromkeys(persona(healthy.family), "[[nan]]"))
    found = await healthy.run("logprobs", "sanity")
    assert "are no numbers (NaN)" in found["logprobs"].evidence
    assert found["sanity"].verdict == "fail"


async def test_arguments_that_are_broken_json_fail(healthy: Lab) -> None:
    call = calls(healthy.family, WEATHER)
    cut = call.replace('"celsius"}', '"cels').replace("celsius\n</parameter>\n", "cels")
    assert cut != call
    healthy.speaks(persona(healthy.family, one_call=cut))
    assert (await healthy.run("tools-call"))["tools-call"].verdict == "fail"


async def test_a_call_that_opens_inside_the_thought_is_parsed(healthy: Lab) -> None:
    """Both reasoning parsers end the thought at their family's call: what 0.5.9 did not do."""
    opened = THOUGHT.replace("</think>", "\n") + calls(healthy.family, WEATHER)
    healthy.speaks(persona(healthy.family) | {ONE_CALL: opened})
    assert verdicts(await healthy.run("tools-call")) == {"tools-call": "pass"}


async def test_a_call_that_stays_inside_the_thought_fails(healthy: Lab) -> None:
    closed = THOUGHT.replace("</think>", calls(healthy.family, WEATHER) + "</think>")
    healthy.speaks(persona(healthy.family) | {ONE_CALL: closed})
    assert (await healthy.run("tools-call"))["tools-call"].verdict == "fail"


async def test_a_model_that_never_thinks_fails_where_thinking_is_expected(healthy: Lab) -> None:
    silent = {part: text.removeprefix(THOUGHT) for part, text in persona(healthy.family).items()}
    healthy.speaks(silent)
    found = await healthy.run("reasoning", "sanity")
    assert verdicts(found) == {"sanity": "pass", "reasoning": "fail"}


@pytest.mark.parametrize("spoken", ["kimi_k2", "qwen3_coder", "qwen25"])
async def test_a_model_of_another_family_fails_every_check_of_calls(healthy: Lab, spoken: Family) -> None:
    """What the service looks like with the wrong --tool-call-parser: 200, and no call."""
    if spoken == healthy.family:
        return
    healthy.speaks(persona(spoken))
    found = await healthy.run("tools", "sanity", "reasoning")
    calls_of = {"tools-call", "tools-parallel", "tools-arguments", "tools-result"}
    assert {name for name in calls_of if found[name].verdict == "fail"} == calls_of
    assert verdicts(found)["sanity"] == "pass"
    words = found["tools-call"].evidence.partition("\n")[0]
    assert "leaked" in words or "empty content and no tool call" in words


@one_server
async def test_what_the_profile_says_and_what_runs_are_compared(healthy: Lab) -> None:
    wrong = Profile(
        name="other",
        title="Other",
        args={"tool-call-parser": "hermes", "reasoning-parser": "deepseek-r1"},
        reference=Reference(results={"burst_tokens_per_s": 1e6}),
        expect=Expect(tool_calls=False, reasoning=False, served_name="another"),
    )
    found = await healthy.run("served-name", "parsers", "burst", "tools", "reasoning", profile=wrong)
    assert "serves scripted, not another" in found["served-name"].evidence
    assert f"the profile has hermes, {healthy.family} runs" in found["parsers"].evidence
    assert found["burst"].verdict == "warn"
    assert {found[name].verdict for name in found if name.startswith(("tools", "reasoning"))} == {"skipped"}


@one_server
async def test_a_run_that_is_given_up_leaves_no_request_with_the_engine(healthy: Lab) -> None:
    slow = "[[sleep 150]] " + "word " * 200
    healthy.speaks(persona(healthy.family, prose=slow))
    run = asyncio.create_task(healthy.run("degenerate"))
    await until(healthy, lambda running: running == 2, 20)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(healthy, lambda running: running == 0, 5)  # the answer itself would take over twenty


async def until(lab: Lab, enough: Callable[[int], bool], within: float) -> None:
    """Wait until the engine works on so many requests. TimeoutError after ``within`` seconds."""
    async with asyncio.timeout(within):
        while True:
            if enough(await lab.running()):
                return
            await asyncio.sleep(0.1)


@one_server
async def test_the_server_parses_the_text_of_every_tool_parser(healthy: Lab) -> None:
    """Through its own endpoint; a parser that does not fit leaves markers, or nothing at all."""
    tool = {
        "type": "function",
        "function": {
            "name": NAME,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    async with httpx.AsyncClient(base_url=healthy.server.url, trust_env=False, timeout=30) as http:
        for parser, text in CALLS.items():
            if parser in NOT_HERE:
                continue
            body = {"text": text, "tool_call_parser": parser, "tools": [tool]}
            parsed = (await http.post("/parse_function_call", json=body)).json()
            made = [(call["name"], json.loads(call["parameters"])) for call in parsed["calls"]]
            assert made == [(NAME, ARGUMENTS)], parser
            assert leaked(parsed["normal_text"], tool_parser=parser, reasoning_parser=None) == ()


@one_server
async def test_the_server_parts_the_text_of_every_reasoning_parser(healthy: Lab) -> None:
    async with httpx.AsyncClient(base_url=healthy.server.url, trust_env=False, timeout=30) as http:
        for parser, text in THOUGHTS.items():
            if parser in NOT_HERE:
                continue
            body = {"text": text, "reasoning_parser": parser}
            parsed = (await http.post("/separate_reasoning", json=body)).json()
            assert parsed["text"].strip() == ANSWER, parser
            assert (
                leaked(json.dumps(parsed, ensure_ascii=False), tool_parser=None, reasoning_parser=parser)
                == ()
            )


@pytest.mark.parametrize("made", ["drafting"], indirect=True)
async def test_speculation_is_measured_against_what_the_profile_expects(healthy: Lab) -> None:
    good = await healthy.run("speculation", "tools-call", profile=healthy.profile(accept_length_min=2.5))
    assert verdicts(good) == {"speculation": "pass", "tools-call": "pass"}
    poor = await healthy.run("speculation", profile=healthy.profile(accept_length_min=3.9))
    assert poor["speculation"].verdict == "fail"
    assert "less than the 3.9 expected" in poor["speculation"].evidence
