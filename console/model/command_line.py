"""An SGLang command line as argparse understands it: one name a flag, its value, what is given twice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from console.model.engine_facts import ALIASES
from console.model.profile import FlagValue, holds_secret
from console.model.text import clean

#: What stands in place of a key or password, everywhere.
HIDDEN = "(hidden)"

_SECRET_END = re.compile(
    r"(.*[_-])?(token|secret|passwd|password|passphrase|credentials?|key)", re.IGNORECASE
)
_URL_USER = re.compile(r"(?<=://)[^/@\s]+@")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_TRUE, _FALSE = (
    frozenset({"true", "1", "yes", "on", "y", "t"}),
    frozenset({"false", "0", "no", "off", "n", "f"}),
)

#: Options of the interpreter that decide what it imports at its start (python --help).
_INTERPRETER_OPTION = re.compile(r"-[bBdEIOPqsSuv]+")


class CommandLine(msgspec.Struct, frozen=True, kw_only=True):
    """A process's arguments, read as SGLang reads them.

    ``flags`` are by their canonical names, without dashes, in the order given; of a flag that is given
    more than once the last value counts, and ``repeated`` has all of them in order. ``written`` holds the
    names that were not canonical, as typed. Keys and passwords are hidden in all of it.
    """

    program: str | None = None
    interpreter_options: tuple[str, ...] = ()
    flags: dict[str, FlagValue] = msgspec.field(default_factory=dict)
    repeated: dict[str, tuple[FlagValue, ...]] = msgspec.field(default_factory=dict)
    written: dict[str, str] = msgspec.field(default_factory=dict)


#: From a flag as typed to its one name, without dashes.
Naming = Callable[[str], str]


def canonical(name: str) -> str:
    """The one name of a flag, as far as it is the same in all versions: aliases, no abbreviations."""
    return ALIASES.get(name, name)


def parse_command_line(argv: Sequence[str], naming: Naming = canonical) -> CommandLine:
    """The command line of a process. Never fails: what is no flag and follows none is left out."""
    flags: dict[str, FlagValue] = {}
    every: dict[str, list[FlagValue]] = {}
    written: dict[str, str] = {}
    for name, value in _pairs(argv):
        flag = naming(name)
        if flag != name:
            written[flag] = name
        shown = hidden(flag, value)
        flags[flag] = shown
        every.setdefault(flag, []).append(shown)
    return CommandLine(
        program=argv[0] if argv else None,
        interpreter_options=interpreter_options(argv),
        flags=flags,
        repeated={flag: tuple(values) for flag, values in every.items() if len(values) > 1},
        written=written,
    )


def _pairs(argv: Sequence[str]) -> Iterable[tuple[str, FlagValue]]:
    """Each flag with what follows it: nothing is True, one word a text, several a tuple."""
    name: str | None = None
    words: list[str] = []

    def value() -> FlagValue:
        return True if not words else words[0] if len(words) == 1 else tuple(words)

    for word in argv:
        if word.startswith("--") and len(word) > 2:
            if name is not None:
                yield name, value()
            name, equals, rest = word[2:].partition("=")
            words = [rest] if equals else []
        elif name is not None:
            words.append(word)
    if name is not None:
        yield name, value()


def interpreter_options(argv: Sequence[str]) -> tuple[str, ...]:
    """What stands between the interpreter and its program and decides how it starts: ``-E``, ``-X utf8``."""
    found: list[str] = []
    words = iter(argv[1:])
    for word in words:
        if word in ("-X", "-W"):
            found += [word, next(words, "")]
        elif _INTERPRETER_OPTION.fullmatch(word) or (len(word) > 2 and word[:2] in ("-X", "-W")):
            found.append(word)
        else:
            break
    return tuple(found)


def starts_engine(argv: Sequence[str]) -> bool:
    """Whether this is the command of an SGLang server: ``-m sglang.launch_server`` or ``sglang serve``."""
    words = [word.rpartition("/")[2] for word in argv[:8]]
    if any(word in ("sglang.launch_server", "launch_server.py") for word in words):
        return True
    return "sglang" in words and "serve" in words


# Values ----------------------------------------------------------------------------------------


def is_secret(name: str) -> bool:
    """Whether the value of a flag or variable is never shown. Rather too often than once too seldom."""
    return holds_secret(name) or bool(_SECRET_END.fullmatch(name))


def hidden(name: str, value: FlagValue) -> FlagValue:
    """The value, or HIDDEN for a key; a user and password within a URL are hidden, too."""
    if isinstance(value, bool):
        return value
    if is_secret(name):
        return HIDDEN
    if isinstance(value, tuple):
        return tuple(_URL_USER.sub(f"{HIDDEN}@", word) for word in value)
    return _URL_USER.sub(f"{HIDDEN}@", value)


def hidden_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without its keys and passwords."""
    return {name: str(hidden(name, value)) for name, value in environment.items()}


def same_value(kind: str, name: str, one: FlagValue, other: FlagValue) -> bool:
    """Whether two values mean the same: ``0.880`` and ``0.88``, ``True`` and ``1`` of SGLang's own."""
    if one == other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(same_value(kind, name, a, b) for a, b in zip(one, other, strict=True))
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    if _NUMBER.fullmatch(one) and _NUMBER.fullmatch(other):
        return float(one) == float(other)
    if kind == "variable":
        return _same_variable(name, one, other)
    if one[:1] in "{[" and other[:1] in "{[":
        return _same_json(one, other)
    return False


def _same_variable(name: str, one: str, other: str) -> bool:
    lower = one.lower(), other.lower()
    if name.startswith("NCCL_"):  # NCCL reads its words without regard to case (nccl, src/misc/param.cc)
        return lower[0] == lower[1]
    if name.startswith(("SGLANG_", "SGL_")):  # EnvBool of sglang/srt/environ.py
        return any(lower[0] in words and lower[1] in words for words in (_TRUE, _FALSE))
    return False


def _same_json(one: str, other: str) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def shown(value: FlagValue | None) -> str | None:
    """A value as text that is safe to print; one with invisible characters has them as escapes.

    Hidden characters make two values differ that look alike, so they are not just dropped.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return "set" if value else "not set"
    text = " ".join(value) if isinstance(value, tuple) else value
    if clean(text) == text:
        return text
    return text.encode("unicode_escape").decode("ascii")
