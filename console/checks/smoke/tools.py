"""Smoke tests of tool calls: they come back parsed, complete, with ids and valid arguments, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from console.checks.smoke import prompts
from console.checks.smoke.answer import Answer, Call
from console.checks.smoke.schema import violations
from console.checks.smoke.session import Session
from console.checks.smoke.verdict import (
    Problem,
    Result,
    call_id_problem,
    cut_short,
    differing,
    quoted,
    settle,
)
from console.checks.smoke.wire import Exchange

#: Tokens for a call with long arguments.
_LONG = 320
_CALL = 128


async def one_call(session: Session) -> Result:
    """One tool, one question that needs it."""
    exchanges = await session.in_each_mode(prompts.ONE_CALL, tools=[prompts.WEATHER], max_tokens=_CALL)

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        yield from _called(session, answer, 1)
        for call in answer.calls[:1]:
            if "paris" not in str(_arguments(call).get("city", "")).casefold():
                yield Problem(f"asked for Paris, called with {quoted(call.arguments)}")

    return _settle(session, exchanges, "parsed, whole and streamed", judge)


async def parallel(session: Session) -> Result:
    """Two calls in one answer, each with an id and an index of its own."""
    exchanges = await session.in_each_mode(prompts.TWO_CALLS, tools=[prompts.WEATHER], max_tokens=2 * _CALL)

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        yield from _called(session, answer, 2)
        cities = " ".join(str(_arguments(call).get("city", "")) for call in answer.calls).casefold()
        missing = [city for city in ("Paris", "Tokyo") if city.casefold() not in cities]
        if len(answer.calls) == 2 and missing:
            yield Problem(f"no call for {' and '.join(missing)}")
        if len({call.id for call in answer.calls}) < len(answer.calls):
            yield Problem("two calls with one id")

    return _settle(session, exchanges, "two calls in one answer", judge)


async def unneeded(session: Session) -> Result:
    """No call where none is needed, though tools are at hand."""
    question, wanted = prompts.KNOWN[0]
    exchanges = await session.in_each_mode(question, tools=[prompts.WEATHER])

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        yield from cut_short(answer)
        if answer.calls:
            yield Problem(f"called {answer.calls[0].name} without need")
        elif answer.finish_reason == "stop" and wanted not in answer.content:
            yield Problem(f"expected {wanted}, said {quoted(answer.content)}")

    return settle(session, exchanges, "answers without a call", judge, together=differing(exchanges))


async def forced(session: Session) -> Result:
    """``tool_choice`` names the tool; the question would not call for it."""
    exchanges = await session.in_each_mode(
        "Good morning! I am in Berlin.",
        tools=[prompts.WEATHER, prompts.TIME],
        tool_choice={"type": "function", "function": {"name": "get_time"}},
        max_tokens=_CALL,
    )

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        # OpenAI itself says "stop" for a call that was forced; SGLang says "tool_calls".
        yield from _called(session, answer, 1, ends=("tool_calls", "stop"))
        if answer.calls and answer.calls[0].name != "get_time":
            yield Problem(f"get_time was forced, {quoted(answer.calls[0].name, 30)} was called")

    return _settle(session, exchanges, "the named tool is called", judge)


async def arguments(session: Session) -> Result:
    """Unicode, quotes, nesting, numbers and a long string survive the parser unchanged."""
    wanted = json.dumps(prompts.RECORD, ensure_ascii=False)
    exchanges = await session.in_each_mode(
        f"Call the tool save_record with exactly these arguments: {wanted}",
        tools=[prompts.SAVE],
        max_tokens=_LONG,
    )

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        yield from _called(session, answer, 1)
        if len(answer.calls) == 1:
            given = _arguments(answer.calls[0])
            changed = [
                name for name, value in prompts.RECORD.items() if name in given and given[name] != value
            ]
            if changed:
                shown = "; ".join(f"{name} is {quoted(str(given[name]), 30)}" for name in changed[:2])
                yield Problem(f"arguments were changed: {shown}")

    return _settle(session, exchanges, "unicode, nesting, numbers and a long text arrive unchanged", judge)


async def result(session: Session) -> Result:
    """The round trip: a call, the tool's answer, and words that contain it."""
    asked = await session.chat(prompts.ONE_CALL, tools=[prompts.WEATHER], max_tokens=_CALL)
    if asked.answer is None or not asked.answer.calls:
        return _settle(session, [asked], "", lambda exchange, answer: _called(session, answer, 1))
    call = asked.answer.calls[0]
    function = {"name": call.name, "arguments": call.arguments}
    messages: list[Mapping[str, Any]] = [
        {"role": "user", "content": prompts.ONE_CALL},
        {
            "role": "assistant",
            "content": asked.answer.content or "",
            "tool_calls": [{"id": call.id or "call_0", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id or "call_0", "content": prompts.RESULT},
    ]
    exchanges = await session.in_each_mode(messages, tools=[prompts.WEATHER])

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        yield from cut_short(answer)
        if answer.calls:
            yield Problem(f"calls {quoted(answer.calls[0].name, 30)} again instead of using the result")
        elif answer.finish_reason == "stop" and prompts.RESULT_SHOWS not in answer.content.replace(",", "."):
            yield Problem(f"the tool said {prompts.RESULT_SHOWS}, the answer is {quoted(answer.content)}")

    return settle(
        session, exchanges, "the tool's result is in the answer", judge, together=differing(exchanges)
    )


def _settle(session: Session, exchanges: list[Exchange], good: str, judge: Any) -> Result:
    return settle(session, exchanges, good, judge, together=differing(exchanges), call_expected=True)


def _called(
    session: Session, answer: Answer, count: int, ends: tuple[str, ...] = ("tool_calls",)
) -> Iterator[Problem]:
    """Whether there are so many calls, each with a good id and arguments that fit the tool's schema."""
    if len(answer.calls) < count:
        yield from cut_short(answer)
        if answer.finish_reason != "length":
            remedy = f"check --tool-call-parser ({session.tool_parser or 'none runs'}) against the model"
            found = f"{len(answer.calls)} of {count} calls" if answer.calls else "no tool call"
            yield Problem(f"{found}; content is {quoted(answer.content)}", remedy=remedy)
        return
    if len(answer.calls) > count:
        yield Problem(f"{len(answer.calls)} calls where {count} was asked for")
    if answer.finish_reason not in ends:
        yield Problem(f"finish_reason is {answer.finish_reason}, not tool_calls")
    for call in answer.calls:
        problem = call_id_problem(session, call.id, call.name)
        if problem is not None:
            yield problem
        yield from _valid(call)


def _valid(call: Call) -> Iterator[Problem]:
    schema = prompts.SCHEMAS.get(call.name)
    if schema is None:
        yield Problem(f"there is no tool {quoted(call.name, 40)}")
        return
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        yield Problem(f"the arguments of {call.name} are not JSON: {quoted(call.arguments)}")
        return
    wrong = list(violations(value, schema))
    if wrong:
        yield Problem(f"the arguments of {call.name} do not fit: {'; '.join(wrong[:3])}")


def _arguments(call: Call) -> dict[str, Any]:
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
