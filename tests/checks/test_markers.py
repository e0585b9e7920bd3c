"""The search for leaked parser markers: every marker is found, and ordinary text has none."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.checks.markers import CHAT_MARKERS, REASONING_PARSERS, TOOL_PARSERS, ParserMarkers, leaked
from console.model.text import clean

PARSERS = [*TOOL_PARSERS.values(), *REASONING_PARSERS.values()]

KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
)
CODER_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
)
MINICPM_CALL = '<function name="get_weather"><param name="city">Paris</param></function>'

#: What an assistant writes on a good day, with every kind of bracket in it.
ORDINARY = {
    "prose": "I think [1] that it is 5 < 7 and 9 > 3; see (a) to (c). The tool call was answered.",
    "other writing": "巴黎今天的天气很好｜东京在下雨▁吗？ ◁ 参见下文 ▷ «Привет» [OK]",
    "markdown": "# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n- [x] done\n- [ ] open\n\n> quote <|> end",
    "mail": "From: Ann <ann@example.org>\nTo: Bob <bob@example.org>\n\n<https://example.org/?a=1|b>",
    "html": '<object data="a.swf"><param name="movie" value="a.swf"></param></object><s>old</s><br/>',
    "xml": '<beans><parameter name="size">3</parameter><function>f</function><tool id="1"/></beans>',
    "c++": "template <typename T, int N> std::function<void(std::vector<T>&)> f = [&](auto v) { v << N; };",
    "rust": "fn think<'a, T: Into<Option<&'a str>>>(x: T) -> Result<(), Box<dyn Error>> { Ok(()) }",
    "haskell": "parser = (Left <$> number) <|> (Right <$> word) <|> empty -- end",
    "f#": 'let print = printfn "%d" <| List.sum [1; 2] |> ignore',
    "elixir": "list |> Enum.map(&(&1 * 2)) |> Enum.filter(fn x -> x <> nil end)",
    "shell": "usage: prog [OPTIONS] [ARGS]...  # [TOOLS] cmd <<EOF | sort > out 2>&1\nEOF",
    "json": '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "python": 'calls = [get_weather(city="Paris"), get_time(zone="CET")]',
    "xml about calls": '<call><name>get_weather</name><argument key="city">Paris</argument></call>',
    "log": "[2026-01-02 03:04:05 TP0] Decode batch, #running-req: 1, token usage: 0.00 <end>",
}


#: The letters of all that, and the words of markers, without the signs that open one.
PIECES = sorted({*"".join(ORDINARY.values()), "tool_call", "think", "EOS", "im_end"} - set("<[｜◁"))

#: Markers that say nothing by themselves: they are looked for only where their parser runs.
AMBIGUOUS = {
    ("the end is written [EOS] in that corpus", "kimi_k2"): "[EOS]",
    ("usage: prog [ARGS]", "mistral"): "[ARGS]",
    ("<function>f</function>", "qwen3_coder"): "</function>",
    ('<parameter name="size">3', "minimax-m2"): "<parameter name=",
    ('<param name="movie">', "minicpm5"): "<param name=",
}


@pytest.mark.parametrize("text", ORDINARY.values(), ids=ORDINARY.keys())
@pytest.mark.parametrize("tool_parser", [None, "kimi_k2", "qwen25", "glm47", "gpt-oss", "pythonic", "llama3"])
def test_ordinary_text_has_no_marker(text: str, tool_parser: str | None) -> None:
    assert leaked(text, tool_parser=tool_parser, reasoning_parser="qwen3") == ()


@given(st.lists(st.sampled_from(PIECES)))
def test_text_without_an_opening_sign_has_no_marker(pieces: list[str]) -> None:
    """Every marker has one of the signs ``<``, ``[``, ``｜`` and ``◁``: words alone never make one."""
    assert leaked("".join(pieces), tool_parser="kimi_k2", reasoning_parser="kimi_k2") == ()


@pytest.mark.parametrize(("text", "tool_parser"), AMBIGUOUS)
def test_a_string_that_ordinary_text_has_too_counts_only_where_its_parser_runs(
    text: str, tool_parser: str
) -> None:
    assert leaked(text, tool_parser=tool_parser, reasoning_parser=None) == (AMBIGUOUS[text, tool_parser],)
    assert leaked(text, tool_parser="qwen25", reasoning_parser="qwen3") == ()


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: f"{parser.kind}-{parser.name}")
def test_each_marker_of_the_configured_parser_is_found_alone(parser: ParserMarkers) -> None:
    names = {"tool_parser": None, "reasoning_parser": None, f"{parser.kind}_parser": parser.name}
    for marker in parser.markers:
        found = leaked(f"Sure, one moment. {marker}", **names)
        assert found[0] in marker
        assert marker in found


@pytest.mark.parametrize("marker", CHAT_MARKERS)
def test_the_tokens_of_a_chat_template_are_found(marker: str) -> None:
    assert marker in leaked(f"Hello!{marker}", tool_parser=None, reasoning_parser=None)


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        (KIMI_CALL, "<|tool_calls_section_begin|>"),
        (CODER_CALL, "<function="),
        (MINICPM_CALL, "<function name="),
    ],
    ids=["kimi", "coder", "minicpm"],
)
@pytest.mark.parametrize("wrong", ["hermes", "llama3", "pythonic", "no-such-parser", None])
def test_the_call_of_a_model_is_found_whatever_parser_is_configured(
    text: str, marker: str, wrong: str | None
) -> None:
    assert marker in leaked(f"I look it up. {text}", tool_parser=wrong, reasoning_parser=wrong)


def test_the_configured_parsers_markers_come_first_and_each_marker_once() -> None:
    text = f"<|im_end|><think>{CODER_CALL}{KIMI_CALL}</think>"
    found = leaked(text, tool_parser="kimi_k2", reasoning_parser="kimi_k2")
    assert found[:2] == ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    assert set(found[5:7]) == {"<think>", "</think>"}
    assert found[-1] == "<|im_end|>"
    assert len(set(found)) == len(found)
    assert leaked(text, tool_parser="qwen3_coder", reasoning_parser="qwen3")[0] == "<tool_call>"


@given(st.sampled_from(PARSERS), st.text(), st.text(), st.data())
def test_a_marker_is_found_between_any_words_and_after_cleaning(
    parser: ParserMarkers, before: str, after: str, data: st.DataObject
) -> None:
    """The screen shows cleaned text; cleaning must hide no marker."""
    marker = data.draw(st.sampled_from(parser.markers or ("<think>",)))
    names = {"tool_parser": None, "reasoning_parser": None, f"{parser.kind}_parser": parser.name}
    text = f"{before}{marker}{after}"
    assert marker in leaked(text, **names)
    assert clean(marker) == marker


@pytest.mark.parametrize(
    ("parser", "good", "bad"),
    [
        ("kimi_k2", "functions.get_weather:0", "call_0123456789abcdef01234567"),
        ("kimi_k3", "get-weather.v2:11", "functions.get_weather"),
        ("qwen3_coder", "call_0123456789abcdef01234567", "functions.get_weather:0"),
        ("hermes", "call_0123456789abcdef01234567", "call_0"),
        ("auto", "functions.get_weather:3", "weather"),
    ],
)
def test_a_calls_id_is_told_from_another_parsers(parser: str, good: str, bad: str) -> None:
    assert re.fullmatch(TOOL_PARSERS[parser].call_id, good)
    assert not re.fullmatch(TOOL_PARSERS[parser].call_id, bad)


def test_every_entry_says_what_it_is() -> None:
    for table, kind in ((TOOL_PARSERS, "tool"), (REASONING_PARSERS, "reasoning")):
        for name, parser in table.items():
            assert (parser.name, parser.kind) == (name, kind)
            assert bool(parser.call_id) == (kind == "tool")
            assert len(set(parser.markers)) == len(parser.markers)
    unmarked = {parser.name for parser in PARSERS if not parser.markers}
    assert unmarked == {"auto", "response_template"}
