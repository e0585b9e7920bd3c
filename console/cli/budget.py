"""``gpuops budget``: where the memory went, and what a profile would need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from console.cli.shared import (
    EXIT_GOOD,
    EXIT_UNHEALTHY,
    Failed,
    Given,
    everywhere,
    find_here,
    find_profiles,
    json_option,
    wait_for,
)
from console.output import print_json, print_lines, warn

if TYPE_CHECKING:
    from console.model.profile import Profile
    from console.sources.files import ProfileSet


@click.command()
@everywhere
@click.argument("name", metavar="[PROFILE]", required=False)
@json_option
@click.pass_obj
def budget(given: Given, name: str | None, as_json: bool) -> int:
    """Where GPU and host memory goes: of the running service, or as PROFILE would need it.

    Exit 1 when something does not fit.
    """
    here = find_here(given)
    profiles = find_profiles(given, here.site)
    notices = (*here.notices, *(str(problem) for problem in profiles.problems))
    for notice in notices:
        warn(notice)
    profile = None if name is None else _named(profiles, name)
    from console.checks.budget import examine
    from console.model.budget import Budget, budget_document
    from console.model.budget_report import budget_lines
    from console.sources.monitor import Monitor
    from console.sources.once import observe_once

    async def look() -> Budget:
        monitor = Monitor(here.site, profiles=profiles.profiles, notices=notices)
        try:
            return await examine(monitor.sources, await observe_once(monitor, processes=True), profile)
        finally:
            await monitor.close()

    found = wait_for(look())
    if as_json:
        print_json(budget_document(found))
    else:
        print_lines(budget_lines(found))
    return EXIT_UNHEALTHY if found.verdict == "fail" else EXIT_GOOD


def _named(profiles: ProfileSet, name: str) -> Profile:
    found = profiles.named(name)
    if found is None:
        from console.sources.files.table import nearest

        known = [one.name for one in profiles.profiles]
        raise Failed(f"no profile is named {name}; {nearest(name, known)}")
    return found
