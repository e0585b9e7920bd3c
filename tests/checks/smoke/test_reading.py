"""Reading answers: the same whatever the network cuts, recorded ones included; rubbish; schemas."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.checks.smoke.answer import Answer, ChatStream, Refused, parse_chat, parse_generated
from console.checks.smoke.events import Events, Malformed
from console.checks.smoke.prompts import CITY_SCHEMA, COUNTING, PROSE, RECORD, RECORD_SCHEMA, SCHEMAS
from console.checks.smoke.rubbish import rubbish
from console.checks.smoke.schema import violations
from tests.checks.smoke.engine_double import FIXTURES
from tests.checks.smoke.engine_double import PROSE as GOOD


def read(data: bytes, cuts: list[int]) -> Answer:
    stream = ChatStream()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        if not stream.done:
            stream.feed(data[start:end])
    return stream.answer()


RECORDED = (FIXTURES / "chat/kimi-stream.txt").read_bytes()


def test_a_recorded_stream_is_put_together() -> None:
    answer = read(RECORDED, [])
    assert answer.reasoning == "The user wants the weather in Paris. I should call get_weather."
    assert answer.content == "I will look that up."
    assert [(call.id, call.name, json.loads(call.arguments)) for call in answer.calls] == [
        ("functions.get_weather:0", "get_weather", {"location": "Paris", "unit": "celsius"})
    ]
    assert answer.finish_reason == "tool_calls"


def test_a_recorded_whole_answer_says_the_same() -> None:
    answer = parse_chat((FIXTURES / "chat/kimi.json").read_bytes())
    streamed = read(RECORDED, [])
    assert (answer.content, answer.reasoning, answer.calls, answer.finish_reason) == (
        streamed.content,
        streamed.reasoning,
        streamed.calls,
        streamed.finish_reason,
    )
    assert answer.usage is not None
    assert (answer.usage.prompt, answer.usage.completion, answer.usage.cached) == (190, 67, 189)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(min_value=0, max_value=len(RECORDED)), max_size=30))
def test_it_does_not_matter_where_the_network_cuts(cuts: list[int]) -> None:
    whole, cut = read(RECORDED, []), read(RECORDED, cuts)
    assert whole == cut


@given(st.binary(max_size=400), st.integers(min_value=1, max_value=50))
def test_no_bytes_do_more_than_be_malformed(data: bytes, size: int) -> None:
    stream = ChatStream()
    try:
        for start in range(0, len(data), size):
            stream.feed(data[start : start + size])
        stream.answer()
    except (Malformed, Refused):
        pass
    for parse in (parse_chat, parse_generated):
        try:
            parse(data)
        except (Malformed, Refused):
            pass


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
KEYS = ("choices", "message", "delta", "tool_calls", "function", "usage", "logprobs", "content", "text")


@given(
    st.recursive(
        json_values,
        lambda inner: (
            st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
            | st.lists(inner, min_size=1, max_size=2)
        ),
        max_leaves=20,
    )
)
def test_no_json_does_more_than_be_malformed(value: Any) -> None:
    data = json.dumps({"choices": [value], "usage": value, "text": value, "meta_info": value}).encode()
    stream = ChatStream()
    for parse in (parse_chat, parse_generated, lambda body: stream.feed(b"data: " + body + b"\n\n")):
        try:
            parse(data)
        except (Malformed, Refused):
            pass


def test_events_with_comments_carriage_returns_and_several_lines() -> None:
    events = Events()
    data = b": hello\r\n\r\nevent: x\r\ndata: one\r\ndata: two\r\n\r\ndata:three\n\nda"
    assert events.feed(data) == [b"one\ntwo", b"three"]
    assert events.pending
    with pytest.raises(Malformed):
        events.feed(b"\n\n")


def test_an_error_inside_a_stream_is_a_refusal_with_its_code() -> None:
    stream = ChatStream()
    with pytest.raises(Refused, match="queue is full") as caught:
        stream.feed(b'data: {"error": {"message": "The request queue is full.", "code": 503}}\n\n')
    assert caught.value.code == 503


# Rubbish -----------------------------------------------------------------------------------------


@given(st.characters(codec="utf-8", exclude_categories=["Z", "C", "N"]), st.integers(16, 200))
def test_one_sign_over_and_over_is_rubbish(sign: str, times: int) -> None:
    assert rubbish(sign * times) is not None
    assert rubbish(" ".join(sign * times)) is not None


@given(st.text(alphabet="abcdefgh ,.", min_size=2, max_size=20).filter(lambda text: text.strip()))
def test_a_pattern_over_and_over_is_rubbish(pattern: str) -> None:
    assert rubbish(pattern * 40) is not None


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "391",
        "Paris",
        ", ".join(str(number) for number in range(1, 21)),
        ", ".join(str(number) for number in range(100, 160)),
        "1111",
        "| a | b |\n|---|---|\n| 1 | 2 |\n" + "-" * 60 + "\nThat is the table.",
        json.dumps(RECORD, ensure_ascii=False),
        "Ja, ja, ja! " + GOOD,
        PROSE + COUNTING,
    ],
)
def test_what_people_and_good_models_write_is_not_rubbish(text: str) -> None:
    assert rubbish(text) is None


def test_what_was_asked_in_english_comes_in_latin_letters() -> None:
    assert rubbish("Мы видим, что видеокарта рисует картинки на экране.", latin=True) is not None
    assert rubbish("Мы видим, что видеокарта рисует картинки на экране.") is None
    assert rubbish(GOOD + " Café, naïve, Øresund.", latin=True) is None
    assert rubbish("4#9(2)7;1]8[3}6{5" * 3, latin=True) is not None


# Schemas -----------------------------------------------------------------------------------------


def test_a_record_fits_its_schema_and_every_change_is_named() -> None:
    assert list(violations(RECORD, RECORD_SCHEMA)) == []
    for name in RECORD:
        less = {key: value for key, value in RECORD.items() if key != name}
        assert list(violations(less, RECORD_SCHEMA)) == [f"{name} is missing"]
        wrong = {**RECORD, name: None}
        assert next(violations(wrong, RECORD_SCHEMA)).startswith(f"{name} is not of type")
    assert list(violations({**RECORD, "x": 1}, RECORD_SCHEMA)) == ["x is not in the schema"]
    nested = {**RECORD, "owner": {"name": "Zoë", "tags": ["a", 2]}}
    assert list(violations(nested, RECORD_SCHEMA)) == ["owner.tags[1] is not of type string"]


def test_true_is_no_number_and_one_point_zero_is_an_integer() -> None:
    assert list(violations({**RECORD, "count": True}, RECORD_SCHEMA))
    assert not list(violations({**RECORD, "count": 42.0}, RECORD_SCHEMA))
    city = {"name": "Paris", "country": "France", "population_millions": 2, "landmarks": []}
    assert list(violations(city, CITY_SCHEMA)) == ["landmarks has 0 items, fewer than 1"]


def test_a_schema_beyond_the_checker_is_refused_and_not_passed() -> None:
    with pytest.raises(ValueError, match="pattern"):
        list(violations("x", {"type": "string", "pattern": "y"}))
    for schema in (*SCHEMAS.values(), CITY_SCHEMA):
        list(violations({}, schema))  # ours are all within it


def test_a_letter_that_the_limit_of_tokens_cut_was_not_lost() -> None:
    assert rubbish("It is sunny in 東\ufffd", cut=True) is None
    assert rubbish("It is sunny in 東\ufffd") is not None
    assert rubbish("It is \ufffd sunny in 東\ufffd", cut=True) is not None
