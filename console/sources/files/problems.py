"""What is wrong with a file, and exactly where."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

#: More problems than this in one file are counted, not listed.
LISTED = 50

#: Text of a file is quoted in a message up to this many characters.
SHOWN = 60

_USER_IN_URL = re.compile(r"(?<=://)[^/\s]*@")


class FileProblem(msgspec.Struct, frozen=True):
    """One thing wrong. Lines and columns count from 1, columns in characters.

    A problem of the file as a whole (missing, binary, too large) stands at 1:1.
    """

    path: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{shown(self.path, 4096)}:{self.line}:{self.column}: {self.message}"


class FileError(Exception):
    """A file that cannot be used, with everything that is wrong with it in the order of its lines."""

    def __init__(self, problems: tuple[FileProblem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class Problems:
    """Gathers the problems of one file, so that they are reported together."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self._found: list[FileProblem] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, line: int, column: int, message: str) -> None:
        self._found.append(FileProblem(self.path, line, column, message))

    def error(self) -> FileError:
        ordered = sorted(self._found, key=lambda problem: (problem.line, problem.column))
        listed = ordered[:LISTED]
        if len(ordered) > LISTED:
            first = ordered[LISTED]
            more = "and more problems from here on; mend those above first"
            listed.append(FileProblem(self.path, first.line, first.column, more))
        return FileError(tuple(listed))

    def raise_if_any(self) -> None:
        """Raises FileError when there was any."""
        if self._found:
            raise self.error()


def shown(text: str, limit: int = SHOWN) -> str:
    """Text from a file as a message may show it.

    It is cut, invisible characters are written out, and a password in a URL is left out.
    """
    text = _USER_IN_URL.sub("…@", text)
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in cut
    )
