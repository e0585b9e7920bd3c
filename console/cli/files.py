"""``gpuops config`` and ``gpuops profile``: the files."""

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
    all_profiles,
    checked,
    everywhere,
    find_profiles,
    from_file,
    json_option,
    wait_for,
)
from console.output import print_json, safe, warn


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


@click.group()
@everywhere
def profile() -> None:
    """Model profiles: shipped ones and your own."""


@profile.command("list")
@everywhere
@json_option
@click.pass_obj
def profile_list(given: Given, as_json: bool) -> int:
    """All profiles, those with a key first. Exit 2 when a file has problems; the others are listed."""
    profiles = all_profiles(given)
    if as_json:
        rows = [
            {"name": one.name, "title": one.title, "key": one.key, "served_name": one.served_name}
            for one in profiles.profiles
        ]
        print_json({"schema": 1, "profiles": rows})
    else:
        width = max((len(one.name) for one in profiles.profiles), default=0)
        for one in profiles.profiles:
            click.echo(safe(f"{one.key or '-'}  {one.name:<{width}}  {one.title}"))
    for problem in profiles.problems:
        warn(str(problem))
    return EXIT_BAD if profiles.problems else EXIT_GOOD


@profile.command()
@everywhere
@json_option
@click.argument("name")
@click.pass_obj
def show(given: Given, name: str, as_json: bool) -> int:
    """One profile: its file as written, or with --json as it was read."""
    from console.sources.files import parse_profile
    from console.sources.files.content import read_bytes

    profiles = all_profiles(given)
    found = profiles.named(name)
    if found is None:
        from console.sources.files.table import nearest

        known = [one.name for one in profiles.profiles]
        raise Failed(f"no profile is named {safe(name)}; {nearest(name, known)}")
    if as_json:
        print_json(found)
        return EXIT_GOOD
    path = Path(profiles.paths[name])
    content = checked(lambda: read_bytes(path))
    # Read strictly once more: what has invisible characters in it does not reach the terminal.
    checked(lambda: parse_profile(content, path))
    click.echo(content.decode("utf-8"), nl=not content.endswith(b"\n"))
    return EXIT_GOOD
