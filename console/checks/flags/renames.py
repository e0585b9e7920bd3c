"""Flags that have another name now: what SGLang says of it itself, and what it does not.

Most renames stand in the tables, where a deprecated flag names the one ``instead``. RENAMES is the rest, from
the sources of 0.5.8 to 0.5.23.
"""

from __future__ import annotations

import re

import msgspec

from console.checks.flags.judged import Judged, argument_line
from console.checks.flags.table import FlagTable
from console.model.profile import FlagValue


class Rename(msgspec.Struct, frozen=True):
    """``new`` is the line that takes the place of ``old``, VALUE being its value."""

    old: str
    new: str
    why: str


RENAMES = (
    Rename(
        "fp4-gemm-runner-backend",
        "fp4-gemm-backend: VALUE",
        "the field is called fp4_gemm_runner_backend, the flag is not",
    ),
    Rename(
        "fp8-gemm-runner-backend",
        "fp8-gemm-backend: VALUE",
        "the field is called fp8_gemm_runner_backend, the flag is not",
    ),
    Rename(
        "enable-flashinfer-allreduce-fusion",
        "flashinfer-allreduce-fusion-backend: auto",
        "the backend is chosen by a flag of its own since 0.5.14",
    ),
    Rename("disable-piecewise-cuda-graph", "disable-prefill-cuda-graph: true", "renamed by 0.5.20"),
)

_BY_OLD = {rename.old: rename for rename in RENAMES}


def moved(name: str, table: FlagTable, args: dict[str, FlagValue]) -> Judged | None:
    """What is known of a flag that this version has not, or has only for a while; None: nothing here.

    Says nothing while the flag stands in the table as any other, or its successor does not yet.
    """
    rename = _BY_OLD.get(name)
    flag = table.by_name.get(name)
    if rename is None or (flag is not None and not flag.deprecated):
        return None
    successor, _, value = rename.new.partition(": ")
    if successor not in table.by_name:
        return None
    line = argument_line(successor, args.get(name, True) if value == "VALUE" else value == "true" or value)
    return Judged(
        id=f"flag.{name}",
        title=f"--{name}",
        verdict="fail" if flag is None else "warn",
        evidence=(f"unknown to SGLang {table.version}" if flag is None else "deprecated; it still works")
        + f": {rename.why}",
        remedy=f"replace it with: {line}",
        name=name,
    )


_BRACES = re.compile(r"\{([^}]+)\}")


def instead_lines(
    instead: str | None, value: FlagValue, args: dict[str, FlagValue], table: FlagTable
) -> str | None:
    """The lines that take the place of a deprecated flag, from SGLang's own hint; None: none that it has.

    Hints look like ``--new-flag``, ``--new-flag=value``, ``--new-{one,other}=value`` or
    ``--new-flag <other-flag>``, which stands for that one's value.
    """
    if instead is None or not instead.startswith("--"):
        return None
    head, equals, fixed = instead.partition("=")
    head, _, other = head.partition(" ")
    braces = _BRACES.search(head)
    names = [head] if braces is None else [_BRACES.sub(part, head) for part in braces[1].split(",")]
    taken: FlagValue = value
    if equals:
        taken = fixed
    elif other:
        taken = args.get(other.strip("<>"), "N")
    lines = []
    for successor in (name.lstrip("-") for name in names):
        flag = table.by_name.get(successor)
        if flag is None or (flag.choices is not None and taken not in flag.choices):
            return None
        if flag.arity == "1" and taken is True:
            return None
        lines.append(argument_line(successor, True if flag.arity == "0" else taken))
    return ", ".join(lines)
