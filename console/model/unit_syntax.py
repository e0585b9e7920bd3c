"""systemd's grammar of unit files: lines, words with quotes and escapes, ``%`` and ``$``.

After systemd.syntax(7), systemd.exec(5), systemd.service(5) and systemd's own conf-parser.c, extract-word.c,
escape.c and env-util.c, of which the manual pages leave out a part. Held against a real systemd by
tests/rigs/test_real_units.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

_WHITESPACE = " \t\n\r"
# systemd's read_line() ends a line at each of these; two different ones in a row are one end.
_LINE_END = re.compile(r"\r\n|\n\r|[\n\r\0]")
_SIMPLE = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " ",
    "\\": "\\", '"': '"', "'": "'",
}  # fmt: skip
_HEX = {"x": re.compile(r"x([0-9a-fA-F]{2})"), "u": re.compile(r"u([0-9a-fA-F]{4})")}
_HEX["U"] = re.compile(r"U([0-9a-fA-F]{8})")
_OCTAL = re.compile(r"[0-7]{3}")
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_PERCENT = re.compile(r"%(.?)", re.DOTALL)
_WHOLE_VARIABLE = re.compile(r"\$(?![{$])", re.DOTALL)
_DOLLAR = re.compile(r"\$\$|\$\{([^}]*)\}")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_SPECIFIERS = frozenset("aAbBCdDEfFgGhHiIjJlLmMnNopPqsStTuUvVwWyY")

#: What may stand before the program of ExecStart (systemd.service(5), "Command lines").
PREFIXES = "-@:+!|"


class UnitProblem(ValueError):
    """A unit cannot be written or understood; the message names the flag, variable or setting, and why."""


class Setting(msgspec.Struct, frozen=True):
    """One ``Key=value`` line: continued lines joined, the value neither unquoted nor expanded."""

    section: str
    key: str
    value: str


def settings(text: str) -> tuple[tuple[Setting, ...], str | None]:
    """Every assignment of a unit file, in its order, and why systemd refuses the file, if it does."""
    found: list[Setting] = []
    section = ""
    for line in _logical_lines(text):
        if (letter := unwritable(line)) is not None:
            return tuple(found), f"systemd refuses the whole file for its character U+{ord(letter):04X}"
        if line.startswith("["):
            section = line[1:-1] if line.endswith("]") else section
            continue
        key, equals, value = line.partition("=")
        if equals and section:
            found.append(Setting(section, key.strip(_WHITESPACE), value.strip(_WHITESPACE)))
    return tuple(found), None


def _logical_lines(text: str) -> Iterator[str]:
    """A line that ends in an odd number of backslashes goes on in the next; comments between are left out."""
    held = ""
    for raw in _LINE_END.split(text.removeprefix("\ufeff")):
        line = raw.lstrip(_WHITESPACE)
        if line[:1] in ("#", ";"):
            continue
        line = held + line
        if (len(line) - len(line.rstrip("\\"))) % 2:
            held = line[:-1] + " "
            continue
        held = ""
        if whole := line.strip(_WHITESPACE):
            yield whole
    if whole := held.strip(_WHITESPACE):
        yield whole


def unwritable(text: str) -> str | None:
    """The first character for which systemd refuses a whole file (utf8.c, unichar_is_valid), else None."""
    if text.isascii():
        return None
    for letter in text:
        code = ord(letter)
        if 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE:
            return letter
    return None


# Words -----------------------------------------------------------------------------------------


def split_words(text: str) -> Iterator[str]:
    """Words with systemd's quotes and C escapes, as in Environment=, one after the other.

    UnitProblem for a quote that is not closed and for an unknown escape: systemd keeps the words before it.
    """
    at = 0
    while (at := _skipped(text, at)) < len(text):
        word, at = _word(text, at, False)
        yield word


def _skipped(text: str, at: int) -> int:
    while at < len(text) and text[at] in _WHITESPACE:
        at += 1
    return at


def _word(text: str, at: int, relaxed: bool) -> tuple[str, int]:
    """The word that begins at ``at``, and where it ends. Quotes may stand anywhere in it.

    ``relaxed``: an unknown escape stays as it is, as in ExecStart.
    """
    word = bytearray()  # \xNN is a byte, not a character
    quote = ""
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            piece, at = _escape(text, at + 1, relaxed)
            word += piece
            continue
        if letter == quote:
            quote = ""
        elif not quote and letter in "\"'":
            quote = letter
        elif not quote and letter in _WHITESPACE:
            break
        else:
            word += letter.encode("utf-8", "surrogatepass")
        at += 1
    if quote:
        raise UnitProblem(f"a quote {quote} that is not closed")
    return word.decode("utf-8", "surrogateescape"), at


def _escape(text: str, at: int, relaxed: bool) -> tuple[bytes, int]:
    """What the escape with its letter at ``at`` stands for, and where it ends."""
    letter = text[at : at + 1]
    if letter in _SIMPLE:
        return _SIMPLE[letter].encode(), at + 1
    if letter in _HEX and (found := _HEX[letter].match(text, at)):
        code = int(found[1], 16)
        if letter == "x" and code:
            return bytes((code,)), found.end()
        if 0 < code < 0x110000 and unwritable(chr(code)) is None:
            return chr(code).encode(), found.end()
    elif (found := _OCTAL.match(text, at)) and 0 < int(found[0], 8) < 256:
        return bytes((int(found[0], 8),)), found.end()
    if not relaxed:
        raise UnitProblem(f"an escape that systemd does not know: \\{letter}")
    return ("\\" + letter).encode("utf-8", "surrogatepass"), at + len(letter)


def split_command(value: str) -> tuple[str, tuple[str, ...], bool]:
    """An ExecStart as its prefixes, its words, and whether more commands follow after a ``;``."""
    at = _skipped(value, 0)
    if at == len(value):
        return "", (), False
    first, at = _word(value, at, True)
    program = first.lstrip(PREFIXES)
    words = [program]
    while (at := _skipped(value, at)) < len(value):
        rest = value[at : at + 3]
        if rest[:1] == ";" and rest[1:2].strip(_WHITESPACE) == "":
            return first[: len(first) - len(program)], tuple(words), True
        if rest[:2] == "\\;" and rest[2:].strip(_WHITESPACE) == "":
            words.append(";")
            at += 2
            continue
        word, at = _word(value, at, True)
        words.append(word)
    return first[: len(first) - len(program)], tuple(words), False


# Percent and dollar ----------------------------------------------------------------------------


def without_specifiers(text: str) -> tuple[str, tuple[str, ...]]:
    """``%%`` as ``%``, and the specifiers such as ``%n`` that only systemd can fill in, left as they are."""
    found: list[str] = []

    def one(match: re.Match[str]) -> str:
        if match[1] == "%":
            return "%"
        if match[1] in _SPECIFIERS and match[1]:
            found.append(match[0])
        return match[0]

    return _PERCENT.sub(one, text), tuple(found)


def expanded(word: str, environment: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """An argument of ExecStart with its variables filled in, and the names of those that are not known.

    ``$NAME`` alone becomes as many words as its value has, ``${NAME}`` stays within its word, ``$$`` is
    ``$``; a ``$`` elsewhere is itself. An unknown variable is empty.
    """
    if _WHOLE_VARIABLE.match(word):
        name = word[1:]
        if name not in environment:
            return (), (name,)
        return tuple(_words_of_variable(environment[name])), ()
    unknown: list[str] = []

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if match[1] not in environment:
            unknown.append(match[1])
        return environment.get(match[1], "")

    return (_DOLLAR.sub(one, word),), tuple(unknown)


def _words_of_variable(value: str) -> Iterator[str]:
    """The value of a ``$NAME`` as words: quotes hold one together, a backslash keeps what follows it."""
    word: list[str] | None = None
    quote = ""
    letters = iter(value)
    for letter in letters:
        if letter in _WHITESPACE and not quote:
            if word is not None:
                yield "".join(word)
            word = None
            continue
        word = [] if word is None else word
        if letter == quote:
            quote = ""
        elif not quote and letter in "\"'":
            quote = letter
        else:
            word.append(next(letters, "") if letter == "\\" else letter)
    if word is not None:
        yield "".join(word)


def assignment(word: str) -> tuple[str, str] | None:
    """A word of Environment= as name and value; None for what systemd ignores."""
    found = _ASSIGNMENT.fullmatch(word)
    return (found[1], found[2]) if found else None


# Writing ---------------------------------------------------------------------------------------


def check_text(what: str, text: str) -> None:
    """UnitProblem, naming ``what``, when systemd could not be given this text on one line."""
    if found := _CONTROL.search(text):
        code = ord(found[0])
        name = {0: "a NUL character", 9: "a tab", 10: "a line break", 13: "a line break"}.get(
            code, f"the control character U+{code:04X}"
        )
        raise UnitProblem(f"{what}: contains {name}, which a unit file cannot hold; remove it")
    if (letter := unwritable(text)) is not None:
        raise UnitProblem(f"{what}: contains U+{ord(letter):04X}, which systemd refuses; remove it")


def quote(word: str) -> str:
    """A word for a unit file that systemd reads back as it is here, ``%`` included.

    Characters that cannot be seen are written as escapes, so that none hides in a unit file.
    UnitProblem for control characters.
    """
    check_text("a word", word)
    if _PLAIN_WORD.fullmatch(word):
        return word
    escaped = word.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    shown = (letter if letter.isprintable() else _escaped(letter) for letter in escaped)
    return f'"{"".join(shown)}"'


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def quote_argument(word: str) -> str:
    """An argument of ExecStart, in which ``$`` names variables as well."""
    return quote(word.replace("$", "$$"))


def line(key: str, value: str) -> str:
    """``Key=value`` with the value as it is. A space after a last backslash keeps the next line apart."""
    odd = (len(value) - len(value.rstrip("\\"))) % 2
    return f"{key}={value}{' ' if odd else ''}"
