"""``gpuops profile validate``: whether the installed SGLang takes the profiles."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from console.cli.shared import (
    EXIT_BAD,
    EXIT_GOOD,
    EXIT_UNHEALTHY,
    Failed,
    Given,
    all_profiles,
    everywhere,
    find_here,
    find_profiles,
    json_option,
    wait_for,
)
from console.output import print_json, print_lines, safe, warn

if TYPE_CHECKING:
    from console.model.finding import Finding
    from console.model.profile import Profile
    from console.model.site import Site
    from console.sources.files import ProfileSet

Validated = tuple["Profile", tuple["Finding", ...]]


@click.command()
@everywhere
@json_option
@click.option("--offline", is_flag=True, help="Ask nobody: use the shipped table of flags that fits.")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.pass_obj
def validate(given: Given, as_json: bool, offline: bool, names: tuple[str, ...]) -> int:
    """Does the installed SGLang take the profiles, or those named? Exit 1 when it refuses something.

    Asks the service's own Python for its flags, without a card; that takes seconds once per version.
    """
    from console.model.finding import overall

    site: Site | None = None
    if offline:
        profiles = all_profiles(given)
    else:
        here = find_here(given)
        site, profiles = here.site, find_profiles(given, here.site)
    for problem in profiles.problems:
        warn(str(problem))
    chosen = _chosen(profiles, names)
    keeps = site is not None and not (given.read_only or site.read_only)
    found = _offline(chosen, profiles) if site is None else wait_for(_ask(site, chosen, profiles, keeps))
    verdict = overall([finding for _, findings in found for finding in findings])
    if as_json:
        print_json(
            {
                "schema": 1,
                "verdict": verdict,
                "profiles": [
                    {
                        "name": profile.name,
                        "path": profiles.paths[profile.name],
                        "verdict": overall(findings),
                        "findings": findings,
                    }
                    for profile, findings in found
                ],
            }
        )
    else:
        _print(found)
    if profiles.problems:
        return EXIT_BAD
    return EXIT_UNHEALTHY if verdict == "fail" else EXIT_GOOD


def _chosen(profiles: ProfileSet, names: tuple[str, ...]) -> list[Profile]:
    """Those named, each once, in the order given; all of them without names."""
    if not names:
        return list(profiles.profiles)
    chosen = {}
    for name in names:
        found = profiles.named(name)
        if found is None:
            from console.sources.files.table import nearest

            known = [one.name for one in profiles.profiles]
            raise Failed(f"no profile is named {safe(name)}; {nearest(name, known)}")
        chosen[name] = found
    return list(chosen.values())


def _offline(chosen: list[Profile], profiles: ProfileSet) -> list[Validated]:
    from console.checks.flags import OFFLINE, judge

    return [(one, judge(one, OFFLINE, None, profiles.paths[one.name])) for one in chosen]


async def _ask(site: Site, chosen: list[Profile], profiles: ProfileSet, keeps: bool) -> list[Validated]:
    """Each of the Pythons that the profiles name is asked once."""
    from console.checks.flags import Asked, ask, judge, read_hardware, service_python
    from console.sources.connect import connect
    from console.store.state import state_of

    watched = connect(site)
    try:
        runner = watched.service
        state = state_of(site, os.environ, os.geteuid()) if keeps else None
        hardware = await read_hardware(runner.root, None if site.gpus == "auto" else site.gpus)
        present, reason = None, None
        if any(one.python is None for one in chosen):
            present, reason = await service_python(runner, site.service.unit)
        answers: dict[str | None, Asked] = {None: Asked(reason=reason)}
        for python in dict.fromkeys(one.python or present for one in chosen):
            if python is not None:
                answers[python] = await ask(runner, state, python)
        return [
            (one, judge(one, answers[one.python or present], hardware, profiles.paths[one.name]))
            for one in chosen
        ]
    finally:
        await watched.nvml.close()
        await watched.client.close()


def _print(found: list[Validated]) -> None:
    from console.model.report import Line, finding_lines

    for place, (profile, findings) in enumerate(found):
        blank = (Line(""),) if place else ()
        print_lines((*blank, Line(f"{profile.name}  {profile.title}", "good"), *finding_lines(findings)))
