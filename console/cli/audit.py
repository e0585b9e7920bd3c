"""``gpuops audit``: the running configuration beside the profile and its benchmark, without a screen."""

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
from console.output import print_json, print_lines, safe, warn

if TYPE_CHECKING:
    from console.model.profile import Profile
    from console.sources.files import ProfileSet


@click.command()
@everywhere
@json_option
@click.argument("profile", metavar="[PROFILE]", required=False)
@click.pass_obj
def audit(given: Given, as_json: bool, profile: str | None) -> int:
    """Does production run what won the benchmark, and what does it add? Exit 1 when not.

    Compares with PROFILE, or with the one whose model runs.
    """
    from console.checks.audit import audit as examine
    from console.model.audit_report import audit_document, audit_lines

    here = find_here(given)
    profiles = find_profiles(given, here.site)
    for problem in profiles.problems:
        warn(str(problem))
    chosen = None if profile is None else _named(profiles, profile)
    found = wait_for(examine(here.site, profiles.profiles, chosen))
    if as_json:
        print_json(audit_document(found))
    else:
        print_lines(audit_lines(found))
    return EXIT_UNHEALTHY if found.verdict == "fail" else EXIT_GOOD


def _named(profiles: ProfileSet, name: str) -> Profile:
    found = profiles.named(name)
    if found is None:
        from console.sources.files.table import nearest

        known = [one.name for one in profiles.profiles]
        raise Failed(f"no profile is named {safe(name)}; {nearest(name, known)}")
    return found
