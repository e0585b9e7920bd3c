"""What the model on the box says: short known answers, tool calls that fit their schema, and prose."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_TOKEN = re.compile(r"\s?\w{1,6}|\s?[^\w\s]|\s+")

_CAPITALS = {
    "france": "Paris",
    "germany": "Berlin",
    "japan": "Tokyo",
    "italy": "Rome",
    "spain": "Madrid",
    "austria": "Vienna",
    "poland": "Warsaw",
    "china": "Beijing",
    "canada": "Ottawa",
    "australia": "Canberra",
    "brazil": "Brasília",
    "india": "New Delhi",
    "the united kingdom": "London",
    "england": "London",
    "the united states": "Washington, D.C.",
}

_OPERATORS = {
    "+": "+", "plus": "+", "-": "-", "minus": "-", "*": "*", "x": "*", "×": "*", "times": "*",
    "multiplied by": "*",
}  # fmt: skip
_SUM = re.compile(r"(-?\d+)\s*(\+|-|\*|×|x|plus|minus|times|multiplied by)\s*(-?\d+)", re.IGNORECASE)
_EXACTLY = re.compile(
    r"(?:say|reply|answer|respond|repeat|write|output|print)\b[^.:\"'\n]*?"
    r"(?:exactly|only|just|with)?[^\"':\n]*?(?::\s*|\s*)[\"'“]([^\"'”]{1,200})[\"'”]",
    re.IGNORECASE,
)
_EXACT_WORD = re.compile(
    r"(?:say|reply|answer|respond|repeat|write)\b[^:\n]{0,60}?(?:exactly|only|word)[^:\n]{0,30}?:?\s+([A-Za-z0-9_-]+)\W*$",
    re.IGNORECASE,
)
_COUNT = re.compile(r"count\b.*?\bfrom\s+(\d+)\s+to\s+(\d+)", re.IGNORECASE)
_CAPITAL = re.compile(r"capital(?: city)? of ((?:the )?[A-Za-z ]+)", re.IGNORECASE)

_PROSE = (
    "A mixture-of-experts layer keeps many small feed-forward networks and sends each token to a few. "
    "The router scores the experts for every token, and only the best scored ones do work. "
    "That is why a model can hold a trillion weights and still read a small share of them per token. "
    "What limits the speed is then memory bandwidth, since each step has to read the chosen weights once. "
    "Speculative decoding helps here: a small draft model proposes a few tokens, and the large one checks "
    "them in a single pass. When the proposals are good, several tokens come out of one read of the weights. "
    "Across eight cards without a direct link the partial sums travel over PCI Express, "
    "so small messages and a steady protocol matter more than raw throughput. "
    "In practice one watches three things: how many tokens a step accepts, how full the cache of keys and "
    "values is, and how long requests wait before their first token. "
)

TOOLS_BEGIN = "<|tool_calls_section_begin|>"
TOOLS_END = "<|tool_calls_section_end|>"


class ToolCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON


class Said(msgspec.Struct, frozen=True):
    """What the model has to say, before any limit is applied."""

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()


def tokens(text: str) -> list[str]:
    """Text in pieces of about a token's size; joined they give the text."""
    return _TOKEN.findall(text)


def text_of(content: object) -> str:
    """A message's content: text, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text", "") for part in content if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def answer(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    thinking: bool,
    choice: object = "auto",
) -> Said:
    """The model's answer to a chat. ``choice`` is the request's ``tool_choice``: a name in it is obeyed."""
    question = next((text_of(m.get("content")) for m in reversed(messages) if m.get("role") == "user"), "")
    last = messages[-1] if messages else {}
    if last.get("role") == "tool":
        result = text_of(last.get("content"))
        return Said(f"The tool answered: {result}", _thought("I have the tool's result.", thinking))
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    named = _named(choice)
    if named is not None:
        functions = [function for function in functions if function.get("name") == named] or functions
    must = named is not None or choice == "required" or "tool" in question.lower()
    if functions and (must or _known(question) is None):
        calls = _calls(question, functions)
        names = " and ".join(sorted({call.name for call in calls}))
        thought = f"The user asks: {_short(question)} I should call {names}."
        return Said("", _thought(thought, thinking), calls)
    said = _known(question)
    if said is None:
        return Said(
            _prose(question),
            _thought(f"The user asks: {_short(question)} A short overview will do.", thinking),
        )
    thought = f"The user asks: {_short(question)} That is simple. The answer is {_short(said)}"
    return Said(said, _thought(thought, thinking))


def fill(schema: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """JSON that fits a schema, about the first place that the question names."""
    question = next((text_of(m.get("content")) for m in reversed(messages) if m.get("role") == "user"), "")
    place = next(iter(_places(question)), "")
    return json.dumps(_arguments(schema, question, place), ensure_ascii=False)


def complete(text: str) -> str:
    """The continuation of a raw prompt."""
    said = _known(text)
    return f" {said}" if said is not None else f" {_prose(text)}"


def raw_calls(calls: Sequence[ToolCall], kimi: bool = True) -> str:
    """Tool calls in the model's own markers, as they look when nobody parses them: Kimi's, or Qwen's."""
    if not kimi:
        return "".join(_qwen_call(call) for call in calls)
    body = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{index}<|tool_call_argument_begin|>{call.arguments}<|tool_call_end|>"
        for index, call in enumerate(calls)
    )
    return f"{TOOLS_BEGIN}{body}{TOOLS_END}"


def _qwen_call(call: ToolCall) -> str:
    inside = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in json.loads(call.arguments).items()
    )
    return f"<tool_call>\n<function={call.name}>\n{inside}</function>\n</tool_call>"


def _named(choice: object) -> str | None:
    """The tool that a request's ``tool_choice`` names."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _thought(text: str, thinking: bool) -> str | None:
    return text if thinking else None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else line[:87] + "..."


def _known(question: str) -> str | None:
    count = _COUNT.search(question)
    if count is not None:
        first, last = int(count[1]), int(count[2])
        if 0 <= last - first <= 2000:
            return ", ".join(str(number) for number in range(first, last + 1))
    calculation = _SUM.search(question)
    if calculation is not None:
        left, right = int(calculation[1]), int(calculation[3])
        match _OPERATORS[calculation[2].lower()]:
            case "+":
                return str(left + right)
            case "-":
                return str(left - right)
            case _:
                return str(left * right)
    capital = _CAPITAL.search(question)
    if capital is not None:
        country = capital[1].strip().lower()
        city = next((city for name, city in _CAPITALS.items() if country.startswith(name)), None)
        if city is not None:
            return city
    exact = _EXACTLY.search(question) or _EXACT_WORD.search(question)
    return exact[1] if exact is not None else None


def _prose(question: str) -> str:
    """Endless enough for any limit in use, and never the same sentence twice in a row."""
    start = sum(map(ord, question)) % 5
    sentences = re.findall(r"[^.]+\. ", _PROSE)
    turned = sentences[start:] + sentences[:start]
    chapters = [f"{number}. " + "".join(turned[number % 3 :]) for number in range(1, 4)]
    return "".join(turned) + "\n\n" + "\n\n".join(chapters)


def _calls(question: str, functions: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    """A call of the function that fits best; one for each place that is named."""
    words = set(re.findall(r"[a-z]+", question.lower()))

    def fit(function: Mapping[str, Any]) -> int:
        text = f"{function.get('name', '')} {function.get('description', '')}".lower()
        return len(words & set(re.findall(r"[a-z]+", text)))

    function = max(functions, key=fit)
    name = str(function.get("name", "tool"))
    parameters = function.get("parameters")
    schema = parameters if isinstance(parameters, Mapping) else {}
    dictated = question.partition("exactly these arguments: ")[2]
    if dictated:
        with contextlib.suppress(ValueError):  # else they are made up like any others
            return (ToolCall(name, json.dumps(json.loads(dictated), ensure_ascii=False)),)
    places = _places(question)
    several = " and " in question or "," in question
    return tuple(
        ToolCall(name, json.dumps(_arguments(schema, question, place), ensure_ascii=False))
        for place in (places if several and len(places) > 1 else places[:1] or [""])
    )


def _places(question: str) -> list[str]:
    """Capitalised names, but not the word a sentence begins with."""
    return re.findall(r"(?<![.!?] )(?<!^)\b([A-Z][\w'-]+(?: [A-Z][\w'-]+)*)", question)


def _arguments(schema: Mapping[str, Any], question: str, place: str) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    required = schema.get("required")
    wanted = required if isinstance(required, list) and required else list(properties)
    return {
        name: _value(properties[name], question, place)
        for name in wanted
        if isinstance(properties.get(name), Mapping)
    }


def _value(schema: Mapping[str, Any], question: str, place: str) -> Any:
    options = schema.get("enum")
    if isinstance(options, list) and options:
        return next((option for option in options if str(option).lower() in question.lower()), options[0])
    number = re.search(r"-?\d+(?:\.\d+)?", question)
    match schema.get("type"):
        case "integer":
            return int(float(number[0])) if number else 1
        case "number":
            return float(number[0]) if number else 1.0
        case "boolean":
            return True
        case "array":
            inner = schema.get("items")
            return [_value(inner if isinstance(inner, Mapping) else {}, question, place)]
        case "object":
            return _arguments(schema, question, place)
    return place or _short(question)
