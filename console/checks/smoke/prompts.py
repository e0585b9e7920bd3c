"""What is asked: short questions with known answers, tools with strict schemas, and a text to remember."""

from __future__ import annotations

from typing import Any

#: Question, and what the answer contains in any case of letters.
KNOWN = (
    ("What is 17 * 23? Answer with the number only.", "391"),
    ("What is the capital of France? Answer with one word.", "paris"),
)

PROSE = "Explain in three short sentences what a graphics card does."
COUNTING = "Count from 1 to 20, with a comma and a space between the numbers. Write nothing else."

CITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "country": {"type": "string"},
        "population_millions": {"type": "number"},
        "landmarks": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "required": ["name", "country", "population_millions", "landmarks"],
    "additionalProperties": False,
}
CITY = "Describe the city of Paris as JSON: name, country, population in millions, and two landmarks."

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name of one city"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TIME_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"type": "string", "description": "Name of a city or a time zone"}},
    "required": ["zone"],
    "additionalProperties": False,
}
RECORD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "urgent": {"type": "boolean"},
        "owner": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["name", "tags"],
            "additionalProperties": False,
        },
        "note": {"type": "string", "description": "A longer text"},
    },
    "required": ["title", "count", "ratio", "urgent", "owner", "note"],
    "additionalProperties": False,
}
#: Unicode, quotes, nesting, numbers and a string of some length, to be handed over unchanged.
RECORD: dict[str, Any] = {
    "title": "Café № 7 – 東京",
    "count": 42,
    "ratio": 0.25,
    "urgent": True,
    "owner": {"name": 'Zoë "Z" O\'Neill', "tags": ["größe", "naïve"]},
    "note": (
        "The fans of the first row turn at half their speed, and the cards behind them stay below "
        "seventy degrees. The second row gets warmer air; its cards reach seventy-eight degrees when all "
        "of them work. Nobody has seen a card throttle, but the filter should be cleaned before summer."
    ),
}


def tool(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A tool as the chat API takes it."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER_SCHEMA,
    "get_time": TIME_SCHEMA,
    "save_record": RECORD_SCHEMA,
}
WEATHER = tool("get_weather", "The present weather of one city", WEATHER_SCHEMA)
TIME = tool("get_time", "The present time in one zone", TIME_SCHEMA)
SAVE = tool("save_record", "Saves one record", RECORD_SCHEMA)

ONE_CALL = "What is the weather in Paris now, in celsius? Use the tool."
TWO_CALLS = (
    "What is the weather in Paris and in Tokyo now, in celsius? "
    "Call the tool once for each city, both calls in one answer."
)
#: What the tool answers in the round trip; no model would guess the number.
RESULT = '{"city": "Paris", "temperature_celsius": 31.4, "sky": "clear"}'
RESULT_SHOWS = "31.4"


def long_text(first: str) -> str:
    """Some nine hundred tokens that begin with ``first``, without anything that repeats itself exactly."""
    lines = [
        f"Line {number}: the sensor in slot {number * 7 % 61} reads {20 + number * 13 % 47} degrees "
        f"and {1000 + number * 37 % 911} turns a minute."
        for number in range(1, 33)
    ]
    return f"{first}\n" + "\n".join(lines) + "\nThe last line is number"
