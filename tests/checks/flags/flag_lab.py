"""Profiles in one line, what is said of them, and a real argparse parser made from a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from console.checks.flags import Asked, Hardware, judge, shipped
from console.checks.flags.arguments import convert
from console.checks.flags.table import Flag, FlagTable
from console.model.finding import Finding
from console.model.profile import FlagValue, Profile

#: Eight RTX PRO 6000, as on the host that this console is for.
EIGHT = Hardware(8, True)


def profile(args: dict[str, FlagValue], env: dict[str, str] | None = None, **more: Any) -> Profile:
    return Profile(name="p", title="p", args={"model-path": "/m", **args}, env=env or {}, **more)


def installed(version: str) -> Asked:
    """As if that version had been asked."""
    return Asked(table=shipped(version), version=version)


def told(
    version: str,
    args: dict[str, FlagValue],
    env: dict[str, str] | None = None,
    hardware: Hardware | None = EIGHT,
) -> dict[str, Finding]:
    """What is said of a profile's flags and variables, by id; the general findings are left out."""
    findings = judge(profile(args, env), installed(version), hardware)
    ids = [finding.id for finding in findings]
    assert len(ids) == len(set(ids))
    return {finding.id: finding for finding in findings if not finding.id.startswith("flags.")}


class Refused(Exception):
    """argparse ended with this message."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def parser_of(table: FlagTable) -> argparse.ArgumentParser:
    """An argparse parser with the flags of a table."""
    parser = _Parser(add_help=False)
    for flag in table.flags:
        if flag.name != "help":
            _add(parser, flag)
    return parser


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    if flag.refused is not None:
        message = flag.refused

        class Refusing(argparse.Action):
            def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
                parser.error(message)

        parser.add_argument(*flag.names, dest=flag.dest, nargs=0, action=Refusing)
    elif flag.arity == "0":
        parser.add_argument(*flag.names, dest=flag.dest, action="store_true")
    else:
        parser.add_argument(
            *flag.names,
            dest=flag.dest,
            nargs=None if flag.arity == "1" else flag.arity,
            type=_CONVERTERS.get(flag.type, str),
            choices=None if flag.choices is None else [_typed(flag, one) for one in flag.choices],
        )


def _count(word: str) -> str:
    read = convert("count", word)
    if read is None:
        raise ValueError(word)
    return read


def _object(word: str) -> dict[str, Any]:
    read = json.loads(word)
    if not isinstance(read, dict):
        raise ValueError(word)
    return read


_CONVERTERS: dict[str, Any] = {
    "int": int,
    "float": float,
    "json": json.loads,
    "object": _object,
    "count": _count,
}


def _typed(flag: Flag, choice: str) -> Any:
    return int(choice) if flag.type == "int" else choice


def refusal(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str | None:
    """argparse's own words on a command line; None when it takes it."""
    try:
        parser.parse_args(list(argv))
    except Refused as problem:
        return str(problem)
    return None
