"""A profile from a unit that somebody else wrote, and what of it a profile cannot hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from console.model.command_line import canonical, hidden
from console.model.managed_unit import LAUNCH, UnitText, dropped
from console.model.profile import Expect, FlagValue, Load, Profile, flag_rule, name_rule
from console.model.text import clean
from console.model.unit_syntax import UnitProblem, without_specifiers

_PYTHON = re.compile(r"/(.*/)?python[0-9.]*")
_SGLANG = re.compile(r"/(.*/)?sglang")
_NUMBER = re.compile(r"-[0-9]+(\.[0-9]+)?")

#: Programs that only start another one. Their words are another language than systemd's.
_WRAPPERS = frozenset({"sh", "bash", "dash", "zsh", "env", "numactl", "taskset", "nice", "docker", "podman"})

#: Seconds that a profile may give a stop (sources/files/profiles.py).
_STOPS_S = (1.0, 86_400.0)


class Adoption(msgspec.Struct, frozen=True):
    """The profile of a unit. ``notes`` say what changes with it; ``python`` is as its command names it.

    ``python_assumed``: the command names ``sglang`` itself, and the interpreter beside it is meant.
    """

    profile: Profile
    python: str
    python_assumed: bool
    notes: tuple[str, ...]


def profile_of(
    unit: UnitText, *, name: str | None = None, key: int | None = None, stop_s: float | None = None
) -> Adoption:
    """The profile that serves what ``unit`` serves; ``stop_s`` is its time to stop in seconds.

    UnitProblem when it cannot be said in a profile: a wrapper, a secret, a value only systemd knows.
    """
    if unit.managed and not unit.edited:
        raise UnitProblem(f"it is managed by gpuops already, from the profile {unit.profile}")
    if unit.commands != 1:
        raise UnitProblem(f"it has {unit.commands} commands in ExecStart=; a service to adopt has one")
    if set(unit.prefix) & set("@+!|"):
        raise UnitProblem(f"its ExecStart= begins with {unit.prefix}, which gpuops does not write; remove it")
    if unit.unknown:
        raise UnitProblem(
            f"{', '.join(unit.unknown[:5])} in it gets its value only when systemd starts it; "
            "write the value itself, or leave a secret to the engine's own environment"
        )
    notes = [f"systemd ignores a part of it: {words}" for words in unit.ignored]
    python, assumed, arguments = _program(unit.argv, notes)
    args = _flags(arguments, notes)
    for variable, value in unit.environment.items():
        if hidden(variable, value) != value:
            raise UnitProblem(f"its variable {variable} {_SECRET}")
    if unit.prefix == "-":
        notes.append("a failure of the engine is not ignored any more: ExecStart=- becomes ExecStart=")
    notes += [f"not kept: {words}" for words in dropped(unit)]
    notes += [f"kept: EnvironmentFile={file}; what it sets wins over env" for file in unit.environment_files]
    served = args.get("served-model-name")
    profile = Profile(
        name=_name(name, served, args["model-path"]),
        title=_title(unit) or str(served or args["model-path"]),
        key=key,
        python=python,
        args=args,
        env=unit.environment,
        load=_load(stop_s),
        expect=Expect(
            tool_calls="tool-call-parser" in args,
            reasoning="reasoning-parser" in args,
            served_name=served if isinstance(served, str) else None,
        ),
    )
    return Adoption(profile, python, assumed, tuple(notes))


def _title(unit: UnitText) -> str:
    return clean(without_specifiers(unit.value("Unit", "Description") or "")[0]).removeprefix("SGLang: ")


_SECRET = (
    "is a secret, which no profile may hold; put it into a file only root can read, name that file with "
    "EnvironmentFile= in the unit, and adopt it again"
)


def _program(argv: Sequence[str], notes: list[str]) -> tuple[str, bool, Sequence[str]]:
    """The interpreter, whether it is only assumed, and the engine's own arguments."""
    program = argv[0] if argv else ""
    if _SGLANG.fullmatch(program) and argv[1:2] == ("serve",):
        notes.append(
            f"{clean(program)} serve becomes python {' '.join(LAUNCH)}, which starts the same server"
        )
        arguments = argv[2:]
        if arguments and not arguments[0].startswith("-"):
            arguments = ("--model-path", *arguments)
        return program.removesuffix("sglang") + "python", True, arguments
    if not _PYTHON.fullmatch(program):
        name = program.rpartition("/")[2]
        kind = "starts another program" if name in _WRAPPERS else "is not a Python with an absolute path"
        raise UnitProblem(
            f"its command {clean(program)} {kind}, and what that does cannot be read from the unit; "
            f"write ExecStart=/path/to/python {' '.join(LAUNCH)} --model-path … and Environment= in its place"
        )
    rest = list(argv[1:])
    while rest and rest[0] in ("-u", "-O", "-OO", "-P", "-B"):
        notes.append(f"not kept: python's own option {rest.pop(0)}")
    if tuple(rest[:2]) != LAUNCH:
        runs = clean(" ".join(rest[:2])) or "nothing"
        raise UnitProblem(f"its command runs {runs}, not {' '.join(LAUNCH)} or sglang serve")
    return program, False, rest[2:]


def _flags(arguments: Sequence[str], notes: list[str]) -> dict[str, FlagValue]:
    flags: dict[str, FlagValue] = {}
    for written, value in _pairs(arguments):
        flag = canonical(written)
        if hidden(flag, value) != value:
            raise UnitProblem(f"its flag --{flag} {_SECRET}")
        if (expected := flag_rule(flag)) is not None:
            raise UnitProblem(f"its flag --{clean(flag)}: expected {expected}")
        if flag != written:
            notes.append(f"--{written} is written --{flag}")
        if flag in flags:
            notes.append(f"--{flag} is given twice; the last one counts")
            del flags[flag]
        flags[flag] = value
    if not isinstance(flags.get("model-path"), str):
        raise UnitProblem("its command names no --model-path; a profile must")
    return flags


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, FlagValue]]:
    """Each flag with its values as argparse takes them: ``--flag``, ``--flag=value``, ``--flag a b``."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        at += 1
        if not word.startswith("--") or len(word) < 3:
            raise UnitProblem(f"expected a flag such as --tp-size, found {clean(word)!r}")
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while at < len(arguments) and (not arguments[at].startswith("-") or _NUMBER.fullmatch(arguments[at])):
            values.append(arguments[at])
            at += 1
        yield name, True if not values else values[0] if len(values) == 1 else tuple(values)


def _name(given: str | None, served: FlagValue | None, model_path: FlagValue) -> str:
    if given is not None:
        if (expected := name_rule(given)) is not None:
            raise UnitProblem(f"--name {clean(given)}: expected {expected}")
        return given
    last = str(served if isinstance(served, str) else model_path).rstrip("/").rpartition("/")[2].lower()
    name = re.sub(r"[^a-z0-9._-]+|\.{2,}", "-", last).strip("-._")[:64]
    if name_rule(name) is not None:
        raise UnitProblem("no name for the profile can be made of the served name; give one with --name")
    return name


def _load(stop_s: float | None) -> Load:
    if stop_s is None or not _STOPS_S[0] <= stop_s <= _STOPS_S[1]:
        return Load()
    return Load(stop_s=stop_s)
