"""A model profile: the flags and environment one model is served with, and what to expect of it."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

PROFILE_SCHEMA = 1

#: What stands after a flag: True for a bare flag, one text, or several in order.
#: Texts are as written in the file, so ``0.880`` stays ``0.880``.
FlagValue = bool | str | tuple[str, ...]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_FLAG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_SECRET_FLAG = re.compile(r"(.*-)?(api-key|password)")
_SECRET_VARIABLE = re.compile(
    r"(.*_)?(API_?KEY|ACCESS_KEY|PASSWORD|SECRET|(HF|HUB|API|AUTH|ACCESS)_TOKEN)", re.IGNORECASE
)


class Load(msgspec.Struct, frozen=True):
    """How long this model takes, in seconds.

    ``expect_s`` from start to ready, as measured (None: never measured);
    past ``timeout_s`` a load counts as failed; past ``stop_s`` a stop does.
    """

    expect_s: float | None = None
    timeout_s: float = 900.0
    stop_s: float = 90.0


class Reference(msgspec.Struct, frozen=True):
    """The command that won the benchmark, and its figures by name (each in the unit its name says)."""

    args: dict[str, FlagValue] = msgspec.field(default_factory=dict)
    env: dict[str, str] = msgspec.field(default_factory=dict)
    results: dict[str, float] = msgspec.field(default_factory=dict)

    def argv(self) -> tuple[str, ...]:
        """The flags as a command line, in the file's order; ValueError for a flag set to False."""
        return argv_of(self.args)


class Expect(msgspec.Struct, frozen=True):
    """What the smoke tests must see. ``accept_length_min`` is in tokens per verify step, 1.0 = no gain."""

    tool_calls: bool = False
    reasoning: bool = False
    accept_length_min: float | None = None
    served_name: str | None = None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One profile file.

    ``key`` is the digit that chooses it on the screen, 1 to 9; None: it has none.
    ``python`` is the interpreter of the service; None: that of the unit's present command.
    ``sglang`` is the range of versions the flags fit (PEP 440, ``>=0.5.9,<0.5.20``); None: any.
    ``args`` are flags without their dashes, in the order they are passed.
    """

    schema: Literal[1] = 1
    name: str
    title: str
    key: int | None = None
    python: str | None = None
    sglang: str | None = None
    args: dict[str, FlagValue]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    load: Load = Load()
    reference: Reference | None = None
    expect: Expect = Expect()
    notes: str | None = None

    def argv(self) -> tuple[str, ...]:
        """The flags as a command line, in the file's order; ValueError for a flag set to False."""
        return argv_of(self.args)

    def text(self, flag: str) -> str | None:
        """The value of a flag that takes one text; None when it is absent, bare or a list."""
        value = self.args.get(flag)
        return value if isinstance(value, str) else None

    @property
    def served_name(self) -> str | None:
        """The name the engine will serve: the one expected, the one it is given, or its model path."""
        return self.expect.served_name or self.text("served-model-name") or self.text("model-path")

    def fits(self, version: str) -> bool | None:
        """Whether the flags are written for this SGLang version; None when the version cannot be read."""
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        try:
            installed = Version(version)
        except InvalidVersion:
            return None
        return SpecifierSet(self.sglang or "").contains(installed, prereleases=True)


def argv_of(args: dict[str, FlagValue]) -> tuple[str, ...]:
    """Flags as a command line: ``--flag``, ``--flag value`` or ``--flag first second``.

    A list follows its flag once, as argparse's ``nargs`` wants it. Raises
    ValueError for a flag set to False: a flag is left out by not naming it.
    """
    argv: list[str] = []
    for flag, value in args.items():
        if value is False:
            raise ValueError(f"{flag}: false; leave the flag out instead")
        argv.append(f"--{flag}")
        if isinstance(value, str):
            argv.append(value)
        elif isinstance(value, tuple):
            argv.extend(value)
    return tuple(argv)


# Rules: each says in words what was expected, or None when the text will do.


def name_rule(text: str) -> str | None:
    if _NAME.fullmatch(text) and ".." not in text:
        return None
    return "a name of lower-case letters, digits, '.', '-' and '_', such as kimi-k2.5-int4"


def flag_rule(text: str) -> str | None:
    if _FLAG.fullmatch(text):
        return None
    suggestion = text.lstrip("-").replace("_", "-").lower()
    if _FLAG.fullmatch(suggestion):
        return f"a flag without its dashes in front: {suggestion}"
    return "a flag such as tp-size"


def variable_rule(text: str) -> str | None:
    return None if _VARIABLE.fullmatch(text) else "the name of an environment variable such as NCCL_PROTO"


def served_name_rule(text: str) -> str | None:
    """SGLang keeps ``:`` for the name of an adapter behind a model's name."""
    return None if text and not re.search(r"[\s:]", text) else "a served name without ':' or spaces"


def versions_rule(text: str) -> str | None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        written = SpecifierSet(text)
    except InvalidSpecifier:
        return 'a range of versions such as ">=0.5.9,<0.5.20"'
    return None if len(written) else 'a range of versions such as ">=0.5.9,<0.5.20"'


def holds_secret(name: str) -> bool:
    """Whether a flag or variable of this name carries a key or password, which no file of ours may hold."""
    return bool(_SECRET_FLAG.fullmatch(name) or _SECRET_VARIABLE.fullmatch(name))
