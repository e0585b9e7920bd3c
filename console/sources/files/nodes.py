"""The tree of a file: mappings, lists and texts as written, each knowing its place."""

from __future__ import annotations

import msgspec

from console.sources.files.problems import shown


class Scalar(msgspec.Struct, frozen=True):
    """A text as written. ``plain``: it stood without quotes; a plain "" is nothing at all."""

    text: str
    plain: bool
    line: int
    column: int

    @property
    def null(self) -> bool:
        return self.plain and self.text in ("", "~", "null", "Null", "NULL")


class Refused(msgspec.Struct, frozen=True):
    """A value whose problem has been told already."""

    line: int
    column: int


class Sequence(msgspec.Struct):
    """A list."""

    line: int
    column: int
    items: list[Node]


class Mapping(msgspec.Struct):
    """A mapping; its entries in order, each key once."""

    line: int
    column: int
    entries: dict[str, Entry]


Node = Scalar | Sequence | Mapping | Refused


class Entry(msgspec.Struct, frozen=True):
    """A key, with its place, and its value."""

    key: Scalar
    value: Node


def describe(node: Node) -> str:
    """What was found, in words."""
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    if isinstance(node, Refused):
        return "something refused"
    if node.null:
        return "nothing"
    return shown(node.text) if node.plain else f'the text "{shown(node.text)}"'
