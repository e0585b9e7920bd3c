"""What the files of a unit make of its service, and which file says what. The grammar is unit_syntax's.

Never fails: what systemd would ignore with a warning is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from console.model.unit_syntax import (
    UnitProblem,
    assignment,
    expanded,
    settings,
    split_command,
    split_words,
    without_specifiers,
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
        found, _ = settings(text)
        for one in found:
            if one.section != "Service":
                continue
            value = one.value  # nothing at all clears what was set before
            match one.key:
                case "ExecStart":
                    commands = [*commands, (path, value)] if value else []
                case "Environment":
                    more = [Assignment(path, *pair) for pair in _assigned(value)]
                    assignments = [*assignments, *more] if value else []
                case "EnvironmentFile":
                    named = [*named, (value, path)] if value else []
                case "UnsetEnvironment":
                    unset = unset | set(_words(value)) if value else set()
    # Settings of files come over those of Environment=, whatever their order (systemd.exec(5)).
    for name, _ in named:
        text_of_file = environment_files.get(name.lstrip("-"), "")
        assignments += [Assignment(name.lstrip("-"), *pair) for pair in environment_file(text_of_file)]
    assignments = [one for one in assignments if one.name not in unset]
    where, command = commands[-1] if commands else (None, "")
    return UnitDefinition(
        command=_command(command, {one.name: one.value for one in assignments}),
        command_where=where,
        assignments=tuple(assignments),
        environment_files=tuple(named),
    )


def _words(value: str) -> Iterator[str]:
    """The words as far as systemd can read them."""
    try:
        for word in split_words(value):
            yield without_specifiers(word)[0]
    except UnitProblem:
        return


def _assigned(value: str) -> Iterator[tuple[str, str]]:
    for word in _words(value):
        pair = assignment(word)
        if pair is not None:
            yield pair


def _command(value: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The words of the process; none when systemd cannot read them."""
    try:
        prefix, words, _ = split_command(value)
    except UnitProblem:
        return ()
    found: list[str] = []
    for place, word in enumerate(words):
        text, _ = without_specifiers(word)
        if place == 0 or ":" in prefix:
            found.append(text)
        else:
            found += expanded(text, environment)[0]
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
