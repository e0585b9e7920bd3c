"""What an operator types: the console, and the same without a screen. Never imports Textual itself.

Exit: 0 good, 1 a check failed or the service is not healthy, 2 bad usage or a bad file,
3 refused and nothing changed, 4 failed and rolled back, 5 failed and not rolled back,
75 another operation holds the host.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import NoReturn

import click

from console import __version__
from console.cli import audit, budget, change, files, jobs, look, profile, rebind, smoke
from console.cli.shared import (
    EXIT_GOOD,
    FILE,
    Failed,
    Given,
    ended_by_signals,
    everywhere,
    find_here,
    find_profiles,
    need_terminal,
)
from console.output import flush, forgive_characters


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(__version__, message="gpuops %(version)s")
@everywhere
@click.pass_context
def gpuops(ctx: click.Context) -> None:
    """An operations console for large models served by SGLang. Without a command: the screen."""
    given = ctx.ensure_object(Given)
    if ctx.invoked_subcommand is None:
        ctx.exit(_screen(given))


@gpuops.command()
@everywhere
@click.option("--headless", is_flag=True, help="The box alone; prints its site file's path once ready.")
@click.option(
    "--dir", "directory", type=FILE, metavar="DIR", help="Where the box lives. Default: a temporary one."
)
@click.option("--speed", metavar="N", help="How many times as fast a load runs.")
@click.option("--fault", "faults", metavar="NAME", multiple=True, help="What goes wrong; may be repeated.")
@click.option("--seed", metavar="N", help="Another run of chance.")
@click.pass_obj
def demo(
    given: Given,
    headless: bool,
    directory: Path | None,
    speed: str | None,
    faults: tuple[str, ...],
    seed: str | None,
) -> int:
    """The console on an embedded simulated box: nothing here is real."""
    from console.transport.demo import DemoError, box_command, box_environment, running_box

    if given.site is not None:
        raise click.UsageError("demo brings a site of its own; leave --site out")
    options = [f"--fault={name}" for name in faults]
    options += [f"--speed={speed}"] if speed is not None else []
    options += [f"--seed={seed}"] if seed is not None else []
    if headless and directory is not None:
        command = box_command(directory, options)
        flush()
        os.execve(command[0], command, box_environment())
    if not headless:
        need_terminal()
    try:
        with ended_by_signals(), running_box(directory, options) as box:
            if headless:
                click.echo(box.site)
                return box.wait()
            given.site = box.site
            return _screen(given)
    except DemoError as problem:
        raise Failed(str(problem)) from None


def _screen(given: Given) -> int:
    need_terminal()
    here = find_here(given)
    profiles = find_profiles(given, here.site)
    from console.ui.app import run

    gc.freeze()  # what was imported stays, and need not be looked at again
    gc.enable()
    notices = (*here.notices, *(str(problem) for problem in profiles.problems))
    return run(here.site, profiles, given.read_only or here.site.read_only, here.path, notices)


for command in (
    look.status,
    look.doctor,
    audit.audit,
    files.config,
    profile.profile,
    budget.budget,
    smoke.smoke,
    jobs.jobs,
    change.switch,
    change.restart,
    change.stop,
    change.start,
    rebind.rebind,
):
    gpuops.add_command(command)


def run(arguments: list[str] | None = None) -> int:
    """The command line as a function: its exit status."""
    try:
        code = gpuops.main(arguments, prog_name="gpuops", standalone_mode=False)
    except click.ClickException as problem:
        problem.show()
        code = problem.exit_code
    except click.Abort:
        code = 128 + signal.SIGINT
    except SystemExit as leaving:
        code = leaving.code
    return code if isinstance(code, int) else EXIT_GOOD


def main() -> NoReturn:
    """``gpuops``. Leaves at once: a thread that waits in the kernel for a card must not keep us."""
    gc.disable()  # most commands are over before a collection pays, which is 15 ms of 200
    forgive_characters()
    code = run()
    flush()
    os._exit(code)
