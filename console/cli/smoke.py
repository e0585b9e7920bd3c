"""``gpuops smoke``: prompts that show whether what is served is any good."""

from __future__ import annotations

import contextlib
import gc
import textwrap
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import click

from console.cli.shared import (
    ENDING,
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
    from console.checks.smoke import Started, Target
    from console.model.finding import Finding
    from console.model.profile import Profile
    from console.model.report import Line, Tone
    from console.model.site import Site

#: Columns of the text report, as in ``console.model.report``.
_WIDTH = 80
_TITLE = 23


@click.command()
@everywhere
@json_option
@click.option("--only", metavar="NAME", multiple=True, help="Only these: ids, or a group such as tools.")
@click.option("--profile", "name", metavar="NAME", help="What to expect. Default: the profile that runs.")
@click.argument("more", metavar="[NAME]...", nargs=-1)
@click.pass_obj
def smoke(given: Given, as_json: bool, only: tuple[str, ...], name: str | None, more: tuple[str, ...]) -> int:
    """Fire prompts at the engine and look at what comes back. Exit 0 when nothing is wrong.

    Ctrl-C aborts the requests that are still with the engine. NAME is the same as --only NAME.
    """
    from console.checks.smoke import UnknownCheck, chosen, target_of
    from console.model.finding import overall
    from console.model.report import findings_document

    names = tuple(word for text in (*only, *more) for word in text.split(",") if word)
    try:
        chosen(names)
    except UnknownCheck as problem:
        raise click.UsageError(str(problem)) from None
    here = find_here(given)
    profiles = find_profiles(given, here.site)
    for notice in (*here.notices, *map(str, profiles.problems)):
        warn(notice)
    wanted = _named(profiles.profiles, name)

    async def ask() -> tuple[Finding, ...] | int:
        profile = wanted or await _running(here.site, profiles.profiles)
        target = target_of(here.site, profile)
        if target.key_note is not None:
            warn(target.key_note)
        return await _fire(target, names, quiet=as_json)

    gc.enable()  # this command lives long enough for it to pay
    found = wait_for(ask())
    if isinstance(found, int):
        warn(f"interrupted by signal {found}; the requests that were under way have been aborted")
        return 128 + found
    if as_json:
        print_json(findings_document(found))
    else:
        print_lines(_sentence(found))
    return EXIT_UNHEALTHY if overall(found) in ("fail", "unknown") else EXIT_GOOD


def _named(profiles: tuple[Profile, ...], name: str | None) -> Profile | None:
    if name is None:
        return None
    for profile in profiles:
        if profile.name == name:
            return profile
    known = ", ".join(profile.name for profile in profiles)
    raise Failed(f"there is no profile {name}; there are {known or 'none'}")


async def _running(site: Site, profiles: tuple[Profile, ...]) -> Profile | None:
    """The profile that the engine says it runs, after one look at it."""
    from console.sources.monitor import Monitor
    from console.sources.once import observe_once

    monitor = Monitor(site, profiles=profiles)
    try:
        return (await observe_once(monitor)).profile
    finally:
        await monitor.close()


async def _fire(target: Target, names: Collection[str], quiet: bool) -> tuple[Finding, ...] | int:
    """The findings, or the number of the signal that ended the run before its end."""
    import asyncio

    from console.checks.smoke import Started, run_smoke

    began: dict[str, float] = {}
    ended: list[int] = []

    def report(event: Finding | Started) -> None:
        if isinstance(event, Started):
            began[event.id] = time.monotonic()
        elif not quiet:
            # Whoever read the lines is gone: the run goes on, its exit status still tells.
            with contextlib.suppress(BrokenPipeError):
                took = time.monotonic() - began.get(event.id, time.monotonic())
                print_lines(_finding_lines(event, took))

    loop = asyncio.get_running_loop()
    run = asyncio.create_task(run_smoke(target, only=names, report=report))

    def end(number: int) -> None:
        if not ended:  # a second one must not stop the abort of what is under way
            ended.append(number)
            run.cancel()

    for number in ENDING:
        loop.add_signal_handler(number, end, number)
    if not quiet:
        print_lines(_head(target))
    try:
        return await run
    except asyncio.CancelledError:
        if not ended:
            raise
        return ended[0]
    finally:
        for number in ENDING:
            loop.remove_signal_handler(number)


def _head(target: Target) -> tuple[Line, ...]:
    from console.model.report import Line

    profile = "no profile is known for it" if target.profile is None else f"profile {target.profile.name}"
    return (Line(f"{target.url}, {profile}", "dim"),)


def _finding_lines(finding: Finding, took: float) -> tuple[Line, ...]:
    """One check: mark, title, time and what was seen; for a failure also what to do, and the exchange."""
    from console.checks.smoke import summary
    from console.model.report import MARKS, Line
    from console.model.words import latency

    mark, tone = MARKS[finding.verdict]
    time_told = "" if finding.verdict == "skipped" else latency(took)
    head = f"{mark:<5}{finding.title:<{_TITLE}}{time_told:>6}  "
    indent = " " * len(head)
    wrapped = textwrap.wrap(
        summary(finding), _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )
    lines = [Line(line, "plain" if tone == "good" else tone) for line in wrapped or [head]]
    if finding.verdict in ("pass", "skipped"):
        return tuple(lines)
    if finding.remedy is not None:
        arrow = " " * (len(head) - 2) + "> "
        wrapped = textwrap.wrap(
            finding.remedy, _WIDTH, initial_indent=arrow, subsequent_indent=indent, break_on_hyphens=False
        )
        lines += [Line(line) for line in wrapped]
    for detail in finding.evidence.split("\n")[1:]:
        # The whole of it is in --json; here the lines of the checks must stay in sight.
        wrapped = textwrap.wrap(
            detail,
            _WIDTH,
            initial_indent=" " * 5,
            subsequent_indent=" " * 7,
            max_lines=3,
            placeholder=" …",
            break_on_hyphens=False,
        )
        lines += [Line(line, "dim") for line in wrapped]
    return tuple(lines)


def _sentence(found: tuple[Finding, ...]) -> tuple[Line, ...]:
    """The verdict in one sentence."""
    from console.model.report import Line

    titles = {
        verdict: [one.title for one in found if one.verdict == verdict]
        for verdict in ("fail", "unknown", "warn", "skipped")
    }
    asked = len(found) - len(titles["skipped"])
    told = []
    for verdict, words in (("fail", "failed"), ("unknown", "not known"), ("warn", "doubtful")):
        if titles[verdict]:
            told.append(f"{len(titles[verdict])} {words}: {', '.join(titles[verdict])}")
    tone: Tone = "bad" if titles["fail"] else "warn" if told else "good"
    text = f"{'; '.join(told)}." if told else f"All {asked} checks passed."
    if titles["skipped"]:
        text += f" Skipped: {', '.join(titles['skipped'])}."
    return (Line(""), *(Line(line, tone) for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False)))
