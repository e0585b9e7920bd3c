"""``gpuops config``: the site file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from console.cli.shared import (
    EXIT_BAD,
    EXIT_GOOD,
    EXIT_UNHEALTHY,
    FILE,
    Failed,
    Given,
    checked,
    everywhere,
    find_profiles,
    from_file,
    wait_for,
)
from console.output import safe, warn


@click.group()
@everywhere
def config() -> None:
    """The site file."""


@config.command()
@everywhere
@click.option("--force", is_flag=True, help="Overwrite the file that is there.")
@click.pass_obj
def init(given: Given, force: bool) -> int:
    """Write a site file from what is found on this host, and print its path."""
    from console.sources.discovery import discover
    from console.sources.files import find_site, site_candidates, site_template
    from console.sources.files.sites import SYSTEM_SITE
    from console.transport.local import LocalRunner

    own = next(iter(site_candidates(os.environ)))
    path = given.site or (SYSTEM_SITE if os.geteuid() == 0 else own)
    found = wait_for(discover(LocalRunner()))
    warn(f"found here: {found.words}")
    content = site_template(found.site)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError:
        raise Failed(f"{path} is there already; --force overwrites it") from None
    except OSError as problem:
        raise Failed(f"{path}: {problem.strerror}") from None
    used = find_site(None, os.environ)
    if given.site is None and used != path:
        warn(f"{used} is read before it")
    click.echo(safe(str(path)))
    return EXIT_GOOD


@config.command()
@everywhere
@click.argument("file", type=FILE, required=False)
@click.pass_obj
def validate(given: Given, file: Path | None) -> int:
    """Check the site file, or FILE: every problem with its line and column."""
    if file is not None:
        given.site = file
    here = checked(lambda: from_file(given))
    if here is None:
        raise Failed("there is no site file; gpuops config init writes one")
    profiles = find_profiles(given, here.site)
    for problem in profiles.problems:
        warn(str(problem))
    if profiles.problems:
        return EXIT_BAD
    click.echo(f"{safe(str(here.path))}: valid")
    return EXIT_GOOD


@config.command("path")
@everywhere
@click.pass_obj
def config_path(given: Given) -> int:
    """The site file in use on the first line, and where it was looked for. Exit 1 when there is none."""
    from console.sources.files import find_site, site_candidates

    used = find_site(given.site, os.environ)
    looked = (given.site,) if given.site is not None else site_candidates(os.environ)
    if used is not None:
        click.echo(safe(str(used)))
    for path in looked:
        there = "not there" if not os.path.lexists(path) else "in use" if path == used else "not used"
        click.echo(f"looked for {safe(str(path))}: {there}", err=True)
    return EXIT_GOOD if used is not None and os.path.lexists(used) else EXIT_UNHEALTHY
