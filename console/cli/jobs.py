"""``gpuops jobs``: what was changed on this host, by whom and why, and what was left in the middle."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from console.cli.following import Refusal, follow_job, telling_refusals
from console.cli.shared import (
    EXIT_BAD,
    EXIT_GOOD,
    Failed,
    Given,
    checked,
    everywhere,
    from_file,
    json_option,
)
from console.output import print_json, print_lines, safe, warn

if TYPE_CHECKING:
    from console.store.state import State


@click.group(invoke_without_command=True)
@everywhere
@json_option
@click.pass_context
def jobs(ctx: click.Context, as_json: bool) -> int | None:
    """What was changed on this host: list, show, follow, resume, rollback. Alone: the list."""
    if ctx.invoked_subcommand is None:
        ctx.exit(_list(ctx.ensure_object(Given), as_json))
    return None


@jobs.command("list")
@everywhere
@json_option
@click.pass_obj
def jobs_list(given: Given, as_json: bool) -> int:
    """Every job, newest first. Exit 2 when one cannot be read; the others are listed."""
    return _list(given, as_json)


@jobs.command()
@everywhere
@json_option
@click.argument("job", metavar="[ID]", required=False)
@click.pass_obj
def show(given: Given, job: str | None, as_json: bool) -> int:
    """One job with its steps; without ID the newest."""
    from console.model.job_report import full_job_document, job_lines, moment
    from console.store.jobs import get_job, runs_of
    from console.store.state import StateProblem

    with telling_refusals():
        state = _state(given)
        view = get_job(state, job or _newest(state))
    try:
        runs = runs_of(state, view)
    except StateProblem as problem:  # the job itself is told all the same
        warn(str(problem))
        runs = ()
    if as_json:
        document = full_job_document(view)
        document["runs"] = [
            {
                "direction": run.direction,
                "user": run.actor.user,
                "connection": run.actor.connection,
                "asked_at": moment(run.asked_at),
                "outcome": run.outcome,
                "duration_s": run.seconds,
            }
            for run in runs
        ]
        print_json(document)
    else:
        print_lines(job_lines(view))
    return EXIT_GOOD


@jobs.command()
@everywhere
@json_option
@click.argument("job", metavar="[ID]", required=False)
@click.pass_obj
def follow(given: Given, job: str | None, as_json: bool) -> int:
    """Print how a job goes until it is over; without ID the newest. Ctrl-C leaves the job running.

    Exit 0 done, 4 rolled back, 5 failed and not rolled back, 3 when it changed nothing.
    """
    with telling_refusals():
        state = _state(given)
        return follow_job(state, job or _newest(state), as_json=as_json)


@jobs.command()
@everywhere
@json_option
@click.option("--no-wait", is_flag=True, help="Return once it goes on.")
@click.argument("job", metavar="[ID]", required=False)
@click.pass_obj
def resume(given: Given, job: str | None, as_json: bool, no_wait: bool) -> int:
    """Let an interrupted job go on; without ID the newest. Exit as for follow."""
    from console.operations.launch import resume as go_on

    return _again(given, job, go_on, as_json=as_json, no_wait=no_wait)


@jobs.command()
@everywhere
@json_option
@click.option("--no-wait", is_flag=True, help="Return once it goes back.")
@click.argument("job", metavar="[ID]", required=False)
@click.pass_obj
def rollback(given: Given, job: str | None, as_json: bool, no_wait: bool) -> int:
    """Take back what an interrupted or failed job did; without ID the newest. Exit 0 once it is."""
    from console.operations.launch import rollback as go_back

    return _again(given, job, go_back, as_json=as_json, no_wait=no_wait, asked_back=True)


def _again(
    given: Given,
    job: str | None,
    order: Callable[[State, str], None],
    *,
    as_json: bool,
    no_wait: bool,
    asked_back: bool = False,
) -> int:
    with telling_refusals():
        state = _state(given, changes=True)
        chosen = job or _newest(state)
        order(state, chosen)
        if no_wait:
            if as_json:
                print_json({"schema": 1, "job": chosen})
            else:
                click.echo(safe(chosen))
            return EXIT_GOOD
        return follow_job(state, chosen, as_json=as_json, asked_back=asked_back)


def _list(given: Given, as_json: bool) -> int:
    from console.model.job_report import JOBS_SCHEMA, job_document, job_rows
    from console.store.jobs import survey

    with telling_refusals():
        found = survey(_state(given))
    if as_json:
        print_json({"schema": JOBS_SCHEMA, "jobs": [job_document(view) for view in found.jobs]})
    elif found.jobs:
        print_lines(job_rows(found.jobs))
    elif not found.problems:
        click.echo("nothing was changed on this host yet")
    for problem in found.problems:
        warn(problem)
    return EXIT_BAD if found.problems else EXIT_GOOD


def _state(given: Given, *, changes: bool = False) -> State:
    """Where this site's jobs are kept. Without a site file those of a site that names nothing."""
    from console.model.site import Site
    from console.store.state import state_of

    here = checked(lambda: from_file(given))
    site = here.site if here is not None else Site()
    if changes and (given.read_only or site.read_only):
        raise Refusal("read only: nothing is changed")
    return state_of(site, os.environ, os.geteuid())


def _newest(state: State) -> str:
    from console.store.jobs import list_jobs

    found = list_jobs(state)
    if not found:
        raise Failed("nothing was changed on this host yet: there is no job")
    return found[0].id
