"""Checks a value against the few words of JSON Schema that our own prompts use.

Not the ``jsonschema`` library: with what it needs it takes longer to import than the rest of a command,
and none of its generality is used, since every schema that is checked here stands in ``prompts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_WORDS = {
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "additionalProperties",
    "minItems",
    "description",
}


def violations(value: Any, schema: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """What is wrong, in words, each with its place. Raises ValueError for a schema beyond this checker."""
    if not _WORDS.issuperset(schema):
        raise ValueError(f"a schema with {', '.join(sorted(set(schema) - _WORDS))} cannot be checked")
    place = at or "the value"
    kind = schema.get("type")
    if kind is not None and not _is(value, kind):
        yield f"{place} is not of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} is none of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{_inside(at, name)} is missing"
        for name, inner in value.items():
            if name in properties:
                yield from violations(inner, properties[name], _inside(at, name))
            elif schema.get("additionalProperties") is False:
                yield f"{_inside(at, name)} is not in the schema"
    elif isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{place} has {len(value)} items, fewer than {schema['minItems']}"
        for number, inner in enumerate(value):
            yield from violations(inner, schema.get("items", {}), f"{at}[{number}]")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False  # in Python True is an int; in JSON it is not
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()  # JSON Schema counts 1.0 as an integer
    return isinstance(value, _KINDS[kind])


def _inside(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
