"""Unit files as systemd reads them: what a service's command and environment are, and which file says so.

After systemd.unit(5), systemd.exec(5), systemd.service(5) and systemd.syntax(7). Never fails:
what systemd would ignore with a warning is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " ",
    "\\": "\\", '"': '"', "'": "'",
}  # fmt: skip
_NUMERIC = {"x": (2, 16), "u": (4, 16), "U": (8, 16)}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACED = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_WHOLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")

#: What may stand before the program of ExecStart: "-", "@", ":", "+", "!", "!!", "|".
_PREFIXES = "-@:+!|"


class Assignment(msgspec.Struct, frozen=True):
    """One variable as one file sets it."""

    where: str
    name: str
    value: str


class UnitDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a unit, read in systemd's order, make of the service.

    ``command`` is the last ExecStart's words with ``$VARIABLES`` filled in from the files' own settings.
    ``assignments`` are in the order they apply: of one name the last counts. ``environment_files`` are
    paths with where each is named, a leading ``-`` meaning that it may be missing.
    """

    command: tuple[str, ...] = ()
    command_where: str | None = None
    assignments: tuple[Assignment, ...] = ()
    environment_files: tuple[tuple[str, str], ...] = ()
    unset: frozenset[str] = frozenset()


def split_cat(text: str, known: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """``systemctl cat`` as pairs of a path and the file's text; ``known`` are paths of the unit."""
    files: list[tuple[str, list[str]]] = []
    blank = True
    for line in text.splitlines():
        path = line[2:].strip() if line.startswith("# /") else ""
        if path and (path in known or (blank and _looks_like_one(path))):
            files.append((path, []))
        elif files:
            files[-1][1].append(line)
        blank = not line.strip()
    return tuple((path, "\n".join(lines) + "\n") for path, lines in files)


def _looks_like_one(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return name.endswith(".service") or (name.endswith(".conf") and folder.endswith(".d"))


def read_unit(files: tuple[tuple[str, str], ...], environment_files: Mapping[str, str]) -> UnitDefinition:
    """The unit of these files, each a path and its text; ``environment_files``: those it names, by path."""
    commands: list[tuple[str, str]] = []
    assignments: list[Assignment] = []
    named: list[tuple[str, str]] = []
    unset: set[str] = set()
    for path, text in files:
        for key, value in settings(text, "Service"):
            match key:
                case "ExecStart":
                    commands = [*commands, (path, value)] if value else []
                case "Environment":
                    found = [Assignment(path, *pair) for pair in environment_words(value)]
                    assignments = [*assignments, *found] if value else []
                case "EnvironmentFile":
                    named = [*named, (value, path)] if value else []
                case "UnsetEnvironment":
                    unset = unset | set(split_words(value)) if value else set()
    # Settings of files come over those of Environment=, whatever their order (systemd.exec(5)).
    for name, _ in named:
        text_of_file = environment_files.get(name.lstrip("-"), "")
        assignments += [Assignment(name.lstrip("-"), *pair) for pair in environment_file(text_of_file)]
    assignments = [one for one in assignments if one.name not in unset]
    where, command = commands[-1] if commands else (None, "")
    return UnitDefinition(
        command=expanded(command, {one.name: one.value for one in assignments}),
        command_where=where,
        assignments=tuple(assignments),
        environment_files=tuple(named),
        unset=frozenset(unset),
    )


def settings(text: str, section: str) -> Iterator[tuple[str, str]]:
    """``Key=value`` of one section, continued lines joined, comments left out."""
    inside = False
    for line in _logical_lines(text):
        if line.startswith("["):
            inside = line == f"[{section}]"
            continue
        key, equals, value = line.partition("=")
        if inside and equals:
            yield key.strip(), value.strip()


def _logical_lines(text: str) -> Iterator[str]:
    """A line that ends in a backslash goes on in the next; comments between are skipped."""
    held = ""
    for raw in text.split("\n"):
        line = raw.strip(" \t\r")
        if line[:1] in ("#", ";"):
            continue
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        whole = (held + line).strip()
        held = ""
        if whole:
            yield whole
    if held.strip():
        yield held.strip()


def split_words(text: str) -> tuple[str, ...]:
    """Words with systemd's quotes and C escapes; a quote that is not closed ends with the text."""
    words: list[str] = []
    word: list[str] | None = None
    quote = ""
    at = 0
    while at < len(text):
        letter = text[at]
        if letter == "\\" and at + 1 < len(text):
            piece, at = _escape(text, at + 1)
            word = [*(word or []), piece]
            continue
        if quote and letter == quote:
            quote = ""
        elif not quote and letter in "\"'" and word is None:
            quote, word = letter, []
        elif not quote and letter in " \t\n":
            if word is not None:
                words.append("".join(word))
                word = None
        else:
            if word is None:
                word = []
            word.append(letter)
        at += 1
    if word is not None:
        words.append("".join(word))
    return tuple(words)


def _escape(text: str, at: int) -> tuple[str, int]:
    """The character of the escape whose letter is at ``at``, and where it ends; an unknown one stays."""
    letter = text[at]
    if letter in _NUMERIC:
        width, base = _NUMERIC[letter]
        digits = text[at + 1 : at + 1 + width]
        if len(digits) == width and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            number = int(digits, base)
            return (chr(number) if 0 < number < 0x110000 else ""), at + 1 + width
    if letter in "01234567":
        digits = text[at : at + 3]
        if re.fullmatch(r"[0-7]{3}", digits):
            return (chr(int(digits, 8)) if int(digits, 8) else ""), at + 3
    return _ESCAPES.get(letter, "\\" + letter), at + 1


def environment_words(value: str) -> tuple[tuple[str, str], ...]:
    """``A=1 "B=two words"`` as pairs; a word that is no assignment is left out, as systemd does."""
    found = []
    for word in split_words(value):
        name, equals, rest = word.partition("=")
        if equals and _NAME.fullmatch(name):
            found.append((name, rest))
    return tuple(found)


def environment_file(text: str) -> tuple[tuple[str, str], ...]:
    """A file of ``NAME=value`` lines (systemd.exec(5), EnvironmentFile=)."""
    found = []
    held = ""
    for raw in text.split("\n"):
        if not held and raw.lstrip()[:1] in ("#", ";"):
            continue
        if raw.endswith("\\") and not raw.endswith("\\\\"):
            held += raw[:-1]
            continue
        line, held = held + raw, ""
        name, equals, value = line.strip().partition("=")
        if equals and _NAME.fullmatch(name.strip()):
            found.append((name.strip(), _file_value(value.strip())))
    return tuple(found)


def _file_value(value: str) -> str:
    """Within double quotes a backslash escapes only ``"``, ``\\``, ````` and ``$``; single ones keep all."""
    if len(value) > 1 and value[0] == value[-1] == "'":
        return value[1:-1]
    if len(value) > 1 and value[0] == value[-1] == '"':
        return re.sub(r'\\(["\\`$])', r"\1", value[1:-1])
    return re.sub(r"\\(.)", r"\1", value)


def expanded(command: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The words of an ExecStart: prefixes off, ``${NAME}`` filled in, a word ``$NAME`` split into words."""
    words: list[str] = []
    stripped = command.lstrip(_PREFIXES)
    literal = ":" in command[: len(command) - len(stripped)]  # ":" asks for no substitution
    for word in split_words(stripped):
        whole = None if literal else _WHOLE.fullmatch(word)
        if whole is not None:
            words += environment.get(whole[1], "").split()
        elif literal:
            words.append(word)
        else:
            words.append(_BRACED.sub(lambda found: _filled(found, environment), word))
    return tuple(words)


def _filled(found: re.Match[str], environment: Mapping[str, str]) -> str:
    return "$" if found[0] == "$$" else environment.get(found[1], "")
