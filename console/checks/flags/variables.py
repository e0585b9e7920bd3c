"""A profile's environment: variables that its SGLang no longer reads, or never did."""

from __future__ import annotations

import difflib

from packaging.version import Version

from console.checks.flags.judged import Judged, quoted, variable_line
from console.checks.flags.table import FlagTable, shipped, shipped_versions

_SPEC_V2 = "SGLANG_ENABLE_SPEC_V2"

#: What SGLang's EnvBool reads as true (srt/environ.py).
_TRUE = frozenset({"true", "1", "yes", "y", "on", "t"})


def is_true(value: str | None) -> bool:
    return value is not None and value.lower() in _TRUE


def judge_variables(env: dict[str, str], table: FlagTable, version: Version) -> list[Judged]:
    """What to say of the variables, in their order. Only SGLang's own are judged."""
    found = []
    for name, value in env.items():
        if name == _SPEC_V2 and version >= Version("0.5.11"):
            judged = _spec_v2(value, version)
        elif name.startswith(("SGLANG_", "SGL_")) and table.variables and name not in table.variables:
            judged = _unknown(name, value, table)
        else:
            continue
        if judged is not None:
            found.append(judged)
    return found


def _spec_v2(value: str, version: Version) -> Judged | None:
    """Off by default up to 0.5.10, on from 0.5.11, gone from 0.5.14: speculation v2 is then all there is."""
    on = is_true(value)
    if version < Version("0.5.14"):
        return None
    told = f"gone from SGLang 0.5.14, where speculation v2 is always on; {version} ignores it"
    if on:
        return _judged(_SPEC_V2, "warn", f"{told}. What it asks for is what happens", "remove the line")
    remedy = 'remove the line, or use a version that has v1: sglang: "<0.5.14"'
    return _judged(_SPEC_V2, "fail", f"{told}, so it would not switch v2 off", remedy)


def _unknown(name: str, value: str, table: FlagTable) -> Judged:
    had = [version for version in shipped_versions() if name in shipped(version).variables]
    told = f"nothing in the source of SGLang {table.version} reads it"
    if had:
        span = had[0] if len(had) == 1 else f"{had[0]} to {had[-1]}"
        return _judged(name, "warn", f"{told}; of the versions known here {span} did", "remove the line")
    close = difflib.get_close_matches(name, table.variables, n=1, cutoff=0.8)
    if close:
        return _judged(name, "warn", told, f"did you mean this: {variable_line(close[0], value)}")
    return _judged(name, "warn", f"{told}, so {quoted(name, value)} has no effect", "remove the line")


def _judged(name: str, verdict: str, evidence: str, remedy: str) -> Judged:
    return Judged(
        id=f"variable.{name}",
        title=name,
        verdict="fail" if verdict == "fail" else "warn",
        evidence=evidence,
        remedy=remedy,
        section="env",
        name=name,
    )
