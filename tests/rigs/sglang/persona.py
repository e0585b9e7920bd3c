"""What the scripted model answers to the prompts of the smoke tests, in the format of one model family.

An answer is found by a part of the prompt. ``persona("kimi_k2")`` is a healthy model; the keyword
arguments put something else in the place of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from console.checks.smoke import prompts

Family = Literal["kimi_k2", "qwen3_coder", "qwen25"]

THOUGHT = "<think>The user asks a short question. I know what to say.</think>"

SUM, CAPITAL, PROSE, COUNTING = "17 * 23", "capital of France", prompts.PROSE, prompts.COUNTING
CITY, TWO_CALLS, ONE_CALL = prompts.CITY, prompts.TWO_CALLS, prompts.ONE_CALL
FORCED, RECORD = "Good morning!", "save_record"

_CITY = {
    "name": "Paris",
    "country": "France",
    "population_millions": 2.1,
    "landmarks": ["Louvre", "Eiffel Tower"],
}


def call(family: Family, name: str, arguments: Mapping[str, Any], number: int = 0) -> str:
    """One call, without what stands around all calls of an answer."""
    text = json.dumps(arguments, ensure_ascii=False)
    if family == "kimi_k2":
        return (
            f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
        )
    if family == "qwen25":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n"
        "</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def calls(family: Family, *named: tuple[str, Mapping[str, Any]]) -> str:
    """A whole answer that calls tools."""
    made = [call(family, name, arguments, number) for number, (name, arguments) in enumerate(named)]
    if family == "kimi_k2":
        return "<|tool_calls_section_begin|>" + "".join(made) + "<|tool_calls_section_end|>"
    return "\n".join(made)


def persona(family: Family, **instead: str) -> dict[str, str]:
    """Prompt part to reply. ``instead`` takes the names above in lower case: ``sum="391 or so"``."""
    weather = ("get_weather", {"city": "Paris", "unit": "celsius"})
    tokyo = ("get_weather", {"city": "Tokyo", "unit": "celsius"})
    answers = {
        "two_calls": calls(family, weather, tokyo),
        "one_call": calls(family, weather),
        "forced": calls(family, ("get_time", {"zone": "Berlin"})),
        "record": calls(family, ("save_record", prompts.RECORD)),
        "sum": "391",
        "capital": "Paris",
        "prose": (
            "A graphics card turns numbers into pictures. It works on many of them at once. "
            "Other programs compute with it as well."
        ),
        "counting": ", ".join(map(str, range(1, 21))),
        "city": json.dumps(_CITY),
    }
    unknown = instead.keys() - answers.keys()
    if unknown:
        raise ValueError(f"no such answers: {', '.join(sorted(unknown))}")
    return {globals()[name.upper()]: THOUGHT + text for name, text in (answers | instead).items()}
