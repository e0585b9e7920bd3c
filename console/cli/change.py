"""``gpuops switch``, ``restart``, ``stop``, ``start``: the plan, its confirmation, its job."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from console.cli.following import Refusal, follow_job, telling_refusals
from console.cli.shared import (
    EXIT_GOOD,
    EXIT_REFUSED,
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
    from console.model.operation import Plan
    from console.model.site import Site
    from console.operations.step import Context
    from console.sources.files import ProfileSet
    from console.store.state import State

Command = TypeVar("Command", bound=Callable[..., object])
Maker = Callable[["Context"], Awaitable["Plan"]]

#: A note longer than this, in characters, is no note.
_NOTE_LIMIT = 500


class How:
    """How a change is asked for."""

    def __init__(self, dry_run: bool, yes: bool, no_wait: bool, as_json: bool, note: str | None) -> None:
        if note is not None and len(note) > _NOTE_LIMIT:
            raise click.UsageError(f"--note: expected at most {_NOTE_LIMIT} characters, found {len(note)}")
        self.dry_run = dry_run
        self.yes = yes
        self.no_wait = no_wait
        self.as_json = as_json
        self.note = note


def changing(command: Command) -> Command:
    """The options of every command that changes the host."""
    option = click.option
    command = option("--note", metavar="TEXT", help="Why; kept with the job.")(command)
    command = json_option(command)
    command = option("--no-wait", is_flag=True, help="Print the job's id and return; it goes on.")(command)
    command = option("--yes", is_flag=True, help="Do not ask for confirmation.")(command)
    command = option("--dry-run", is_flag=True, help="Print the very plan that would run; change nothing.")(
        command
    )
    return everywhere(command)


@click.command()
@changing
@click.argument("profile")
@click.pass_obj
def switch(
    given: Given, profile: str, dry_run: bool, yes: bool, no_wait: bool, as_json: bool, note: str | None
) -> int:
    """Serve another profile; back to the present one when the new one fails.

    Exit 0 done, 3 refused and nothing changed, 4 failed and rolled back, 5 failed and not
    rolled back, 75 another operation holds the host.
    """
    from console.operations.service import plan_switch

    def known(profiles: ProfileSet) -> Maker:
        names = [one.name for one in profiles.profiles]
        if profile not in names:
            near = difflib.get_close_matches(profile, names, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(names) or 'none'}"
            raise click.UsageError(f"there is no profile {safe(profile)}{hint}")
        return partial(plan_switch, name=profile)

    return change(given, How(dry_run, yes, no_wait, as_json, note), known)


@click.command()
@changing
@click.pass_obj
def restart(given: Given, dry_run: bool, yes: bool, no_wait: bool, as_json: bool, note: str | None) -> int:
    """Restart the service as it is. Exit as for switch; there is no way back."""
    from console.operations.service import plan_restart

    return change(given, How(dry_run, yes, no_wait, as_json, note), lambda profiles: plan_restart)


@click.command()
@changing
@click.pass_obj
def stop(given: Given, dry_run: bool, yes: bool, no_wait: bool, as_json: bool, note: str | None) -> int:
    """Stop the service and wait until its cards are free. Exit as for switch."""
    from console.operations.service import plan_stop

    return change(given, How(dry_run, yes, no_wait, as_json, note), lambda profiles: plan_stop)


@click.command()
@changing
@click.pass_obj
def start(given: Given, dry_run: bool, yes: bool, no_wait: bool, as_json: bool, note: str | None) -> int:
    """Start the service as it is and wait until it is ready. Exit as for switch."""
    from console.operations.service import plan_start

    return change(given, How(dry_run, yes, no_wait, as_json, note), lambda profiles: plan_start)


def change(given: Given, how: How, maker: Callable[[ProfileSet], Maker]) -> int:
    """Make the plan, show it, have it confirmed and carried out: the exit status."""
    from console.store.state import state_of

    here = find_here(given)
    profiles = find_profiles(given, here.site)
    make = maker(profiles)
    for notice in (*here.notices, *(str(problem) for problem in profiles.problems)):
        warn(notice)
    state = state_of(here.site, os.environ, os.geteuid())
    if not how.dry_run:
        _may_change(given, here.site, how)
    from console.operations.launch import need_free

    with telling_refusals():
        if not how.dry_run:
            need_free(state)  # said at once, not after the pre-flight
        plan = wait_for(_plan(here.site, profiles, state, make))
        if how.dry_run or plan.blocked:
            _show(plan, how.as_json)
            return EXIT_REFUSED if plan.blocked else EXIT_GOOD
        if not how.yes:
            _show(plan, False)
            _confirm(plan)
        return _carry_out(here.site, profiles, state, plan, how)


def _may_change(given: Given, site: Site, how: How) -> None:
    """Failed or UsageError when nothing may be changed from here."""
    if given.read_only or site.read_only:
        raise Failed("read only: nothing is changed; --dry-run shows the plan")
    if site.simulated is None and os.geteuid() != 0:
        raise Failed("changing the host needs root; --dry-run shows the plan")
    if how.yes:
        return
    if how.as_json:
        raise click.UsageError("--json asks nothing: add --yes, or --dry-run")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("without a terminal nobody can confirm: add --yes, or --dry-run")


async def _plan(site: Site, profiles: ProfileSet, state: State, make: Maker) -> Plan:
    from console.operations.context import opened

    async with opened(site, profiles.profiles, state=state) as context:
        return await make(context)


def _show(plan: Plan, as_json: bool) -> None:
    from console.model.plan_report import plan_document, plan_lines

    if as_json:
        print_json(plan_document(plan))
    else:
        print_lines(plan_lines(plan))


def _confirm(plan: Plan) -> None:
    """Refusal unless the operator says yes."""
    if plan.typed:
        given = click.prompt(f"\nType {safe(plan.target)} to go on", default="", show_default=False)
        sure = given == plan.target
    else:
        sure = click.confirm(f"\n{safe(plan.title)}?", default=False)
    if not sure:
        raise Refusal("not confirmed: nothing was changed")


def _carry_out(site: Site, profiles: ProfileSet, state: State, plan: Plan, how: How) -> int:
    from console.operations.launch import actor_here, submit

    job = submit(state, site, profiles.profiles, plan, actor_here(), how.note)
    if how.no_wait:
        if how.as_json:
            print_json({"schema": 1, "job": job})
        else:
            click.echo(safe(job))
        return EXIT_GOOD
    return follow_job(state, job, as_json=how.as_json)
