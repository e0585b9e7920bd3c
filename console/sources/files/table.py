"""Reads one mapping of a file key by key; what does not fit is gathered, with its place."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from console.sources.files.content import INVISIBLE
from console.sources.files.nodes import Entry, Mapping, Node, Refused, Scalar, describe
from console.sources.files.problems import Problems, shown

T = TypeVar("T")

#: A rule says what it expected instead, in words, or None when the text will do.
Rule = Callable[[str], str | None]

_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?")

#: What YAML 1.1 reads as true or false besides the two words meant here.
AMBIGUOUS = frozenset(
    case(word)
    for word in ("y", "n", "yes", "no", "on", "off", "true", "false")
    for case in (str.lower, str.upper, str.capitalize)
) - {"true", "false"}


def one_line(text: str) -> str | None:
    """The rule for a text that will stand on a command line or in a unit file."""
    if "\n" in text:
        return "one line of text"
    return "text without tabs or invisible characters" if "\t" in text or INVISIBLE.search(text) else None


def nearest(word: str, known: Collection[str]) -> str:
    """Advice for an unknown word: the known one it resembles, or all of them."""
    if close := difflib.get_close_matches(word[:100], list(known), n=1):
        return f"did you mean {close[0]}?"
    return f"known here: {', '.join(known)}"


class Table:
    """One mapping. ``where`` is its dotted name in messages, "" for the root."""

    def __init__(self, mapping: Mapping, problems: Problems, where: str = "") -> None:
        self.mapping = mapping
        self.problems = problems
        self._where = where

    def name(self, key: str) -> str:
        return f"{self._where}.{shown(key)}" if self._where else shown(key)

    def add(self, at: Node | None, message: str) -> None:
        """A problem at a node, or at the beginning of this mapping."""
        place = at or self.mapping
        self.problems.add(place.line, place.column, message)

    def tell(self, key: str, node: Node | None, message: str) -> None:
        """A problem of a key, at its value's place."""
        self.add(node, f"{self.name(key)}: {message}")

    def expected(self, key: str, node: Node, what: str) -> None:
        self.tell(key, node, f"expected {what}, found {describe(node)}")

    def only(self, *known: str) -> None:
        """Every other key is a problem, with the nearest known one named."""
        for entry in self.entries():
            key = entry.key
            if key.text not in known:
                self.add(key, f"unknown key {self.name(key.text)}; {nearest(key.text, known)}")

    def entries(self) -> Iterator[Entry]:
        return iter(self.mapping.entries.values())

    def node(self, key: str) -> Node | None:
        """The value of a key; None when it is not there, or was refused already."""
        entry = self.mapping.entries.get(key)
        return None if entry is None or isinstance(entry.value, Refused) else entry.value

    def require(self, *keys: str) -> None:
        for key in keys:
            if key not in self.mapping.entries:
                self.add(None, f"{self.name(key)} is missing; add {key}: …")

    def text(self, key: str, rule: Rule | None = None) -> str | None:
        """A text of one line that fits the rule; None when it is not there or does not fit."""
        node = self.node(key)
        return None if node is None else self.text_of(key, node, rule)

    def optional_text(self, key: str, rule: Rule | None = None) -> str | None:
        """As ``text``, but the file may say null."""
        return None if _null(self.node(key)) else self.text(key, rule)

    def text_of(self, key: str, node: Node, rule: Rule | None = None) -> str | None:
        if isinstance(node, Refused):
            return None
        if not isinstance(node, Scalar):
            self.expected(key, node, "text")
        elif node.null:
            remedy = 'write "" for an empty text' if rule is None else "write one or remove the line"
            self.tell(key, node, f"expected text, found nothing; {remedy}")
        elif wanted := one_line(node.text) or (rule and rule(node.text)):
            self.expected(key, node, wanted)
        else:
            return node.text
        return None

    def choice(self, key: str, options: tuple[str, ...]) -> str | None:
        def rule(text: str) -> str | None:
            return None if text in options else " or ".join(options)

        return self.text(key, rule)

    def flag(self, key: str) -> bool | None:
        """true or false and nothing else: not yes, not "true"."""
        node = self.node(key)
        if node is None:
            return None
        if isinstance(node, Scalar) and node.plain and node.text in ("true", "false"):
            return node.text == "true"
        self.expected(key, node, "true or false")
        return None

    def whole(self, key: str, low: int, high: int) -> int | None:
        """A whole number within bounds, both included."""
        digits = self._digits(key, _WHOLE, f"a whole number from {low} to {high}")
        if digits is None:
            return None
        node, number = digits[0], int(digits[1])
        if low <= number <= high:
            return number
        self.expected(key, node, f"a whole number from {low} to {high}")
        return None

    def number(self, key: str, low: float | None = None, high: float = math.inf) -> float | None:
        """A number within bounds, both included, written out in digits."""
        what = "a number" if low is None else f"a number from {low:g} to {high:g}"
        digits = self._digits(key, _NUMBER, what)
        if digits is None:
            return None
        node, number = digits[0], float(digits[1])
        if low is None or low <= number <= high:
            return number
        self.expected(key, node, what)
        return None

    def paragraphs(self, key: str) -> str | None:
        """A text of any number of lines; None when it is not there or null."""
        node = self.node(key)
        if node is None or _null(node):
            return None
        if not isinstance(node, Scalar):
            self.expected(key, node, "text")
            return None
        if wanted := next(filter(None, map(one_line, node.text.split("\n"))), None):
            self.tell(key, node, f"expected {wanted}")
            return None
        return node.text.strip()

    def table(self, key: str, *known: str) -> Table | None:
        """A mapping below this one; None when it is not there or null. Without ``known`` any key will do."""
        node = self.node(key)
        if node is None or _null(node):
            return None
        if not isinstance(node, Mapping):
            self.expected(key, node, "a mapping")
            return None
        below = Table(node, self.problems, self.name(key))
        if known:
            below.only(*known)
        return below

    def gather(self, read: Callable[[Table, str, Node], T | None]) -> dict[str, T]:
        """All entries whose value could be read, in the file's order."""
        values = ((entry.key.text, read(self, entry.key.text, entry.value)) for entry in self.entries())
        return {key: value for key, value in values if value is not None}

    def check_keys(self, rule: Rule) -> None:
        """Every key of this mapping must fit the rule."""
        for entry in self.entries():
            if wanted := one_line(entry.key.text) or rule(entry.key.text):
                self.add(entry.key, f"{self.name(entry.key.text)}: expected {wanted}")

    def _digits(self, key: str, form: re.Pattern[str], what: str) -> tuple[Scalar, str] | None:
        node = self.node(key)
        if node is None:
            return None
        if isinstance(node, Scalar) and form.fullmatch(node.text):
            if node.plain:
                return node, node.text
            self.tell(key, node, f"expected {what}, found {describe(node)}; remove the quotes")
        elif isinstance(node, Scalar) and not node.null:
            remedy = f"; write {plain}" if (plain := _written_out(node.text)) else ""
            self.tell(key, node, f"expected {what}, found {describe(node)}{remedy}")
        else:
            self.expected(key, node, what)
        return None


def _null(node: Node | None) -> bool:
    return isinstance(node, Scalar) and node.null


def _written_out(text: str) -> str | None:
    """A number in another notation (1e3, 1_000, 0129), in plain digits; None when it is none."""
    if not re.fullmatch(r"[-+0-9._eE]{1,40}", text):
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number) or abs(number) >= 1e15:
        return None
    return f"{number:.0f}" if number == int(number) else f"{number:.6f}".rstrip("0")
