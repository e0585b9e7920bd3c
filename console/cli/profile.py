"""``gpuops profile``: the model profiles, and the unit that serves one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from console.cli.profile_validate import validate
from console.cli.shared import (
    EXIT_BAD,
    EXIT_GOOD,
    FILE,
    Failed,
    Given,
    all_profiles,
    checked,
    everywhere,
    find_here,
    find_profiles,
    json_option,
    wait_for,
)
from console.output import print_json, safe, warn

if TYPE_CHECKING:
    from console.model.profile import Profile
    from console.model.site import Site
    from console.sources.files import ProfileSet
    from console.sources.unit_file import UnitFiles


@click.group()
@everywhere
def profile() -> None:
    """Model profiles: shipped ones and your own."""


profile.add_command(validate)


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
    found = _named(profiles, name)
    if as_json:
        print_json(found)
        return EXIT_GOOD
    path = Path(profiles.paths[name])
    content = checked(lambda: read_bytes(path))
    # Read strictly once more: what has invisible characters in it does not reach the terminal.
    checked(lambda: parse_profile(content, path))
    click.echo(content.decode("utf-8"), nl=not content.endswith(b"\n"))
    return EXIT_GOOD


@profile.command()
@everywhere
@click.option("--diff", "as_diff", is_flag=True, help="What a switch would change in the present unit.")
@click.option("--python", metavar="PATH", help="The interpreter, instead of the profile's or the unit's.")
@click.argument("name")
@click.pass_obj
def render(given: Given, name: str, as_diff: bool, python: str | None) -> int:
    """The unit that a switch to NAME would write, with what it keeps of the present one."""
    from console.model.managed_unit import dropped, render
    from console.model.operation import FileChange
    from console.model.unit_syntax import UnitProblem
    from console.operations.service.preflight_unit import secret_finding

    here = find_here(given)
    chosen = _named(find_profiles(given, here.site), name)
    files = _present(here.site, here.site.service.unit, needed=as_diff)
    interpreter = python or chosen.python or (files.python if files is not None else None)
    if interpreter is None:
        raise Failed(f"neither {name} nor {here.site.service.unit} names the service's Python; give --python")
    try:
        text = render(chosen, python=interpreter, keep=files.own if files is not None else None)
    except UnitProblem as problem:
        raise Failed(f"{name}: {problem}") from None
    if files is not None:
        if files.need_daemon_reload:
            warn(f"the files of {files.unit} changed since systemd read them: systemctl daemon-reload")
        for setting in dropped(files.own):
            warn(f"not kept of {files.unit}: {setting}")
        for words in _in_the_way(files):
            warn(words)
    if as_diff and files is not None:
        if (secret := secret_finding(files)) is not None:
            raise Failed(f"{secret.evidence.removesuffix(', which a plan would copy')}; {secret.remedy}")
        lines = FileChange("", files.path, files.before, text).diff()
        click.echo("\n".join(map(safe, lines)) if lines else "nothing changes")
    else:
        click.echo("\n".join(map(safe, text.splitlines())))
    return EXIT_GOOD


@profile.command()
@everywhere
@click.option("--name", metavar="NAME", help="The profile's name. Default: made of the served name.")
@click.option("--key", type=click.IntRange(1, 9), metavar="N", help="The digit that chooses it.")
@click.option("--output", type=FILE, metavar="FILE", help="Where it goes. Default: the site's own profiles.")
@click.argument("unit")
@click.pass_obj
def adopt(given: Given, unit: str, name: str | None, key: int | None, output: Path | None) -> int:
    """Make a profile of a unit that is there, and let a switch overwrite that unit.

    Only the unit as it is now: one that is changed afterwards is foreign again.
    """
    from console.model.adoption import profile_of
    from console.model.unit_syntax import UnitProblem
    from console.sources.files import parse_profile
    from console.sources.files.profile_text import profile_text

    here = find_here(given)
    if given.read_only or here.site.read_only:
        raise Failed("adopting writes a profile and notes that the unit is gpuops's; this is read-only")
    unit = unit if unit.endswith(".service") else f"{unit}.service"
    files = _present(here.site, unit, needed=True)
    assert files is not None
    if files.text is None:
        raise Failed(f"there is no {unit}; systemctl list-units --type=service --all names those that are")
    if files.need_daemon_reload:
        raise Failed(
            f"the files of {unit} changed since systemd read them; run systemctl daemon-reload where it is, "
            "look whether the change is meant, and adopt it again"
        )
    try:
        adoption = profile_of(files.effective, name=name, key=key, stop_s=files.stop_timeout_s)
    except UnitProblem as problem:
        raise Failed(f"{unit}: {problem}") from None
    found = adoption.profile
    if adoption.python_assumed and not wait_for(_is_there(here.site, adoption.python)):
        raise Failed(
            f"{unit}: there is no {adoption.python} beside its sglang; write ExecStart= with its Python"
        )
    _refuse_rivals(find_profiles(given, here.site), found)
    path = output or _own_folder(given, here.site) / f"{found.name}.yaml"
    text = profile_text(found, f"Adopted from {unit}.")
    checked(lambda: parse_profile(text, path))
    _write_new(path, text)
    _note(here.site, files, found.name)
    click.echo(safe(str(path)))
    for note in (*adoption.notes, *_in_the_way(files), *_other_unit(here.site, unit)):
        warn(note)
    return EXIT_GOOD


# What they share -------------------------------------------------------------------------------


def _named(profiles: ProfileSet, name: str) -> Profile:
    found = profiles.named(name)
    if found is None:
        from console.sources.files.table import nearest

        known = [one.name for one in profiles.profiles]
        raise Failed(f"no profile is named {safe(name)}; {nearest(name, known)}")
    return found


def _present(site: Site, unit: str, *, needed: bool) -> UnitFiles | None:
    """The unit's files. When they cannot be read: the end if ``needed``, else None with a warning."""
    from console.sources.connect import connect
    from console.sources.source import Unavailable
    from console.sources.unit_file import read_unit_files

    async def read() -> UnitFiles:
        return await read_unit_files(connect(site).service, unit)

    try:
        return wait_for(read())
    except Unavailable as problem:
        if needed:
            raise Failed(f"{unit} cannot be read: {problem}") from None
        warn(f"{unit} cannot be read, so nothing of it is kept here: {problem}")
        return None


async def _is_there(site: Site, path: str) -> bool:
    from console.sources.connect import connect
    from console.transport.files import FileProblem, exists

    try:
        return await exists(connect(site).service, path)
    except FileProblem as problem:
        raise Failed(str(problem)) from None


def _in_the_way(files: UnitFiles) -> list[str]:
    """Drop-ins whose settings come over whatever a switch writes."""
    from console.model.managed_unit import parse

    found = []
    for path, text in files.drop_ins:
        unit = parse(text)
        if unit.values("Service", "ExecStart"):
            found.append(f"{path} sets ExecStart=, which would win over every switch; remove it from there")
        if unit.environment:
            names = ", ".join(unit.environment)
            found.append(f"{path} sets {names}, which wins over a profile's env")
    return found


def _other_unit(site: Site, unit: str) -> list[str]:
    if unit == site.service.unit:
        return []
    return [f"the site's unit is {site.service.unit}; a switch replaces that one, until service.unit: {unit}"]


def _refuse_rivals(profiles: ProfileSet, found: Profile) -> None:
    if profiles.named(found.name) is not None:
        raise Failed(
            f"{profiles.paths[found.name]} is a profile named {found.name} already; give another --name"
        )
    rival = profiles.keyed(found.key) if found.key is not None else None
    if rival is not None:
        raise Failed(f"{found.key} is the key of {rival.name} already; give another --key")


def _own_folder(given: Given, site: Site) -> Path:
    if given.profiles is not None:
        return given.profiles
    if site.profiles is None:
        raise Failed("the site file names no directory of your own profiles; add profiles:, or give --output")
    return Path(site.profiles)


def _write_new(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise Failed(f"{path} is there already; give another --name or --output") from None
    except OSError as problem:
        raise Failed(f"{path}: {problem.strerror}") from None


def _note(site: Site, files: UnitFiles, profile: str) -> None:
    import time

    from console.store.adopted import adopt
    from console.store.state import StateProblem, state_of

    state = state_of(site, os.environ, os.geteuid())
    try:
        adopt(state, files.unit, files.text or "", profile, time.time())
    except StateProblem as problem:
        raise Failed(f"{problem}; the profile is written, but a switch will not overwrite the unit") from None
