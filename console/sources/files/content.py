"""The bytes of a file, and the text in them: small, UTF-8, and with nothing invisible in it."""

from __future__ import annotations

import os
import re
import stat
from itertools import islice
from pathlib import Path

from console.sources.files.problems import LISTED, FileError, FileProblem, Problems

#: The largest file read, in bytes. A real one has a few KiB.
SIZE_LIMIT = 256 * 1024

#: Control, line-separator, bidi-control, byte-order and surrogate characters: none of them is visible.
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
_TAB_INDENT = re.compile(r"^ *\t", re.MULTILINE)
TAB = "a tab; YAML wants spaces"


def read_bytes(path: Path) -> bytes:
    """The content of a regular file of at most SIZE_LIMIT bytes.

    Raises FileError for one that is missing, unreadable, too large, or no
    file at all; a pipe or device is not waited for.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            content = _read_regular(path, descriptor)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise _whole(path, f"cannot read this file: {reason or problem}") from problem
    if len(content) > SIZE_LIMIT:
        raise _whole(path, _too_large(len(content)))
    return content


def _read_regular(path: Path, descriptor: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _whole(path, "expected a file, found a directory, pipe or device")
    if status.st_size > SIZE_LIMIT:
        raise _whole(path, _too_large(status.st_size))
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read(SIZE_LIMIT + 1)


def checked_text(content: str | bytes, problems: Problems) -> str:
    """The file's text, its lines ended by ``\\n``.

    Raises FileError for content that is binary, too large, or has invisible
    characters or tabs for indentation.
    """
    text = _text(content, problems)
    _check_characters(text, problems)
    problems.raise_if_any()
    return text


def _whole(path: Path, message: str) -> FileError:
    return FileError((FileProblem(str(path), 1, 1, message),))


def _too_large(size: int) -> str:
    return f"expected at most {SIZE_LIMIT // 1024} KiB, found {-(-size // 1024)} KiB; is this the right file?"


def _text(content: str | bytes, problems: Problems) -> str:
    if len(content) > SIZE_LIMIT:
        problems.add(1, 1, _too_large(len(content)))
        raise problems.error()
    if isinstance(content, bytes):
        content = _decode(content, problems)
    return content.removeprefix("\ufeff").replace("\r\n", "\n")


def _decode(content: bytes, problems: Problems) -> str:
    if b"\0" in content:
        problems.add(1, 1, "expected text in UTF-8, found NUL bytes: a binary file, or text saved as UTF-16")
        raise problems.error()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        before = content[: problem.start].decode("utf-8").removeprefix("\ufeff")
        line, column = _place(before, len(before))
        byte = content[problem.start]
        problems.add(line, column, f"expected text in UTF-8, found the byte 0x{byte:02x}; save it as UTF-8")
        raise problems.error() from problem


def _check_characters(text: str, problems: Problems) -> None:
    if "\0" in text:
        problems.add(1, 1, "expected text, found NUL characters: a binary file")
        raise problems.error()
    # Past what will be listed there is nothing to gain, and much time to lose in a binary file.
    for match in islice(INVISIBLE.finditer(text), LISTED + 1):
        line, column = _place(text, match.start())
        problems.add(line, column, f"an invisible character, {code_point(match[0])}; remove it")
    for match in islice(_TAB_INDENT.finditer(text), LISTED + 1):
        line, column = _place(text, match.end() - 1)
        problems.add(line, column, TAB)


def code_point(character: str) -> str:
    return f"U+{ord(character):04X}"


def _place(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
