"""Whether the installed SGLang takes a profile: its flags, their values, and what does not go together.

The installed SGLang is asked itself, by its own Python, without a card; where that is not possible a shipped
table of the nearest version stands in, and the first finding says so.
"""

from __future__ import annotations

from pathlib import Path

from packaging.version import InvalidVersion, Version

from console.checks.flags.arguments import judge_arguments
from console.checks.flags.asked import Asked, ask, service_python
from console.checks.flags.hardware import Hardware, hardware_of, read_hardware
from console.checks.flags.judged import Judged
from console.checks.flags.places import Places, places_of
from console.checks.flags.table import (
    Flag,
    FlagTable,
    canonical,
    nearest_version,
    shipped,
    shipped_versions,
)
from console.checks.flags.together import judge_together
from console.checks.flags.variables import judge_variables
from console.model.finding import Finding, Verdict
from console.model.profile import Profile
from console.model.text import clean
from console.store.state import State
from console.transport.runner import Runner

__all__ = [
    "OFFLINE",
    "Asked",
    "Flag",
    "FlagTable",
    "Hardware",
    "ask",
    "canonical",
    "hardware_of",
    "judge",
    "read_hardware",
    "service_python",
    "shipped",
    "shipped_versions",
    "validate_profile",
]

#: What stands for an answer when nobody was to be asked.
OFFLINE = Asked()


async def validate_profile(
    profile: Profile,
    runner: Runner,
    state: State | None,
    *,
    python: str | None,
    deadline: float = 60.0,
    offline: bool = False,
    path: str | Path | None = None,
) -> tuple[Finding, ...]:
    """All findings on a profile's flags, variables and combinations, for the SGLang of ``python``.

    ``python`` is a path where ``runner`` runs (``service_python`` finds that of a unit); None: not known.
    ``offline`` asks nobody. ``path`` is the profile's file, for the places in it. Never raises.
    """
    asked = OFFLINE if offline else await ask(runner, state, python, deadline=deadline)
    return judge(profile, asked, await read_hardware(runner.root), path)


def judge(
    profile: Profile, asked: Asked, hardware: Hardware | None = None, path: str | Path | None = None
) -> tuple[Finding, ...]:
    """The findings, once it is known what was answered. Reads shipped tables and the profile's file."""
    table = asked.table or shipped(nearest_version(asked.version, profile.sglang))
    version = _version(asked.version or table.version) or Version(shipped_versions()[-1])
    told = [
        *judge_arguments(profile.args, table),
        *judge_together(profile, table, version, hardware),
        *judge_variables(profile.env, table, version),
    ]
    places = places_of(path)
    findings = [_finding(judged, places) for judged in told]
    return (
        _source(asked, table),
        _range(profile, asked, places),
        *_all_known(profile, told, table),
        *findings,
    )


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _source(asked: Asked, table: FlagTable) -> Finding:
    title = "Flag table"
    if asked.table is not None:
        told = f"asked the installed SGLang {asked.version}: {len(table.flags)} flags"
        if asked.remembered:
            told = f"the installed SGLang {asked.version}, asked earlier: {len(table.flags)} flags"
        return _plain("flags.source", title, "pass", told if asked.note is None else f"{told}; {asked.note}")
    used = f"used the shipped table of {table.version}"
    if asked.reason is None:
        return _plain("flags.source", title, "skipped", f"nobody was asked; {used}")
    installed = f"; SGLang {asked.version} is installed" if asked.version else ""
    remedy = (
        "name the service's Python in the profile, python: /path/bin/python, and look whether it has sglang"
    )
    return _plain("flags.source", title, "warn", f"could not ask: {asked.reason}{installed}; {used}", remedy)


def _range(profile: Profile, asked: Asked, places: Places) -> Finding:
    id, title = "flags.range", "SGLang version"
    if profile.sglang is None:
        return _plain(id, title, "skipped", "the profile names none")
    if asked.version is None:
        return _plain(id, title, "skipped", f"{profile.sglang}; the installed version is not known")
    fits = profile.fits(asked.version)
    told = f"{profile.sglang}; installed is {asked.version}"
    if fits:
        return _plain(id, title, "pass", told)
    place = places.get(("sglang", ""))
    told = told if place is None else f"{place}: {told}"
    if fits is None:
        return _plain(id, title, "unknown", f"{told}, which is no version", "check the installation")
    remedy = (
        f'install a version of this range; or, once all below is well: sglang: "{_widened(asked.version)}"'
    )
    return _plain(id, title, "fail", told, remedy)


def _widened(version: str) -> str:
    """A range that begins with the installed version."""
    return f">={Version(version).base_version}"


def _all_known(profile: Profile, told: list[Judged], table: FlagTable) -> list[Finding]:
    """The good news in one line: how many flags there is nothing to say of."""
    named = {judged.name for judged in told if judged.section == "args"}
    well = sum(1 for name in profile.args if name not in named)
    evidence = f"{well} of {len(profile.args)} are as SGLang {table.version} wants them"
    return [_plain("flags.well", "Flags", "pass", evidence)] if well else []


def _finding(judged: Judged, places: Places) -> Finding:
    place = None if judged.name is None else places.get((judged.section, judged.name))
    evidence = judged.evidence if place is None else f"{place}: {judged.evidence}"
    return _plain(judged.id, judged.title, judged.verdict, evidence, judged.remedy)


def _plain(id: str, title: str, verdict: Verdict, evidence: str, remedy: str | None = None) -> Finding:
    """Flags, values and answers come from files and other programs: all is cleaned here, at the door."""
    return Finding(
        clean(id),
        clean(title),
        verdict,
        clean(evidence),
        None if remedy is None else clean(remedy),
    )
