"""What an operator types: the console, and the same without a screen. Never imports Textual itself.

Exit: 0 good, 1 a check failed or the service is not healthy, 2 bad usage or a bad file.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from console import __version__
from console.output import flush, forgive_characters, print_json, print_lines, safe, warn

if TYPE_CHECKING:
    from types import FrameType

    from console.model.site import Site
    from console.model.snapshot import Snapshot
    from console.sources.files import FileError, ProfileSet
    from console.sources.here import Here
    from console.sources.monitor import Monitor

EXIT_GOOD = 0
EXIT_UNHEALTHY = 1
EXIT_BAD = 2

#: What ends a command that would go on.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

FILE = click.Path(path_type=Path)


class Given:
    """The options that every command takes, wherever they stand on the line."""

    def __init__(self) -> None:
        self.site: Path | None = None
        self.profiles: Path | None = None
        self.read_only = False


class BadFile(click.ClickException):
    """A file that cannot be used: every problem on a line of its own, ``file:line:column: what``."""

    exit_code = EXIT_BAD

    def __init__(self, error: FileError) -> None:
        super().__init__("\n".join(safe(str(problem)) for problem in error.problems))

    def show(self, file: Any = None) -> None:
        click.echo(self.message, file=file, err=True)


Command = TypeVar("Command", bound=Callable[..., Any])


def everywhere(command: Command) -> Command:
    """Give a command the options that stand before or after it; the last one counts."""

    def note(ctx: click.Context, option: click.Parameter, value: Any) -> None:
        if value and option.name is not None:
            setattr(ctx.ensure_object(Given), option.name, value)

    def option(*names: str, **attributes: Any) -> Callable[[Command], Command]:
        return click.option(*names, expose_value=False, callback=note, **attributes)

    command = option("--profiles", type=FILE, metavar="DIR", help="Profiles beside the shipped ones.")(
        command
    )
    command = option("--read-only", is_flag=True, help="Change nothing; beats the site file.")(command)
    return option("--site", type=FILE, metavar="FILE", help="The site file.")(command)


json_option = click.option("--json", "as_json", is_flag=True, help="For machines: one JSON document.")


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


# The screen ------------------------------------------------------------------------------------


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
        _need_terminal()
    try:
        with _ended_by_signals(), running_box(directory, options) as box:
            if headless:
                click.echo(box.site)
                return box.wait()
            given.site = box.site
            return _screen(given)
    except DemoError as problem:
        raise Failed(str(problem)) from None


def _screen(given: Given) -> int:
    _need_terminal()
    here = _here(given)
    profiles = _profiles(given, here.site)
    from console.ui.app import run

    gc.freeze()  # what was imported stays, and need not be looked at again
    gc.enable()
    notices = (*here.notices, *(str(problem) for problem in profiles.problems))
    return run(here.site, profiles, given.read_only or here.site.read_only, here.path, notices)


def _need_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("the console needs a terminal; gpuops status answers without one")


# Looking ---------------------------------------------------------------------------------------


@gpuops.command()
@everywhere
@json_option
@click.option("--watch", is_flag=True, help="Again every second, until interrupted.")
@click.pass_obj
def status(given: Given, as_json: bool, watch: bool) -> int:
    """The service, its cards and the engine's numbers. Exit 0 when it is ready or busy."""
    here = _here(given)
    profiles = _profiles(given, here.site)
    notices = (*here.notices, *(str(problem) for problem in profiles.problems))
    for notice in notices:
        warn(notice)
    from console.sources.monitor import Monitor

    async def look() -> int:
        monitor = Monitor(here.site, profiles=profiles.profiles, notices=notices)
        try:
            return await (_watch if watch else _once)(monitor, as_json)
        finally:
            await monitor.close()

    return _run(look())


async def _once(monitor: Monitor, as_json: bool) -> int:
    from console.model.report import healthy
    from console.sources.once import observe_once

    snapshot = await observe_once(monitor)
    _print_status(snapshot, as_json)
    return EXIT_GOOD if healthy(snapshot) else EXIT_UNHEALTHY


async def _watch(monitor: Monitor, as_json: bool) -> int:
    """Print the status once a second until a signal, or until nobody reads it."""
    gc.enable()
    import asyncio

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in ENDING:
        loop.add_signal_handler(number, ended.set)
    redraw = not as_json and sys.stdout.isatty()
    follower = asyncio.create_task(monitor.run())
    follower.add_done_callback(lambda task: ended.set())
    beat = loop.time()
    try:
        while not ended.is_set():
            beat = max(beat + 1.0, loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(beat):
                    await ended.wait()
                    break
            if redraw:
                sys.stdout.write("\x1b[H\x1b[2J")
            _print_status(monitor.snapshot(), as_json)
            if not as_json and not redraw:
                click.echo()
    except BrokenPipeError:
        pass
    follower.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await follower
    return EXIT_GOOD


def _print_status(snapshot: Snapshot, as_json: bool) -> None:
    from console.model.report import status_document, status_lines

    if as_json:
        print_json(status_document(snapshot))
    else:
        print_lines(status_lines(snapshot))


@gpuops.command()
@everywhere
@json_option
@click.pass_obj
def doctor(given: Given, as_json: bool) -> int:
    """What is here, what is missing, and what to do about it. Exit 1 when something is broken."""
    from console.checks.doctor import examine, look_around
    from console.model.finding import overall
    from console.model.report import finding_lines, findings_document
    from console.model.site import Site
    from console.sources.files import FileError
    from console.sources.here import Here

    problems: tuple[str, ...] = ()
    try:
        here = _from_file(given) or _from_host()
    except FileError as error:
        problems = tuple(map(str, error.problems))
        here = Here(Site(), given.site, ())
    profiles = _profiles(given, here.site)
    found = _run(
        examine(look_around(here.site, here.path, profiles, site_problems=problems, notices=here.notices))
    )
    if as_json:
        print_json(findings_document(found))
    else:
        print_lines(finding_lines(found))
    return EXIT_UNHEALTHY if overall(found) == "fail" else EXIT_GOOD


# Files -----------------------------------------------------------------------------------------


@gpuops.group()
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
    found = _run(discover(LocalRunner()))
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
    here = _checked(lambda: _from_file(given))
    if here is None:
        raise Failed("there is no site file; gpuops config init writes one")
    profiles = _profiles(given, here.site)
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


@gpuops.group()
@everywhere
def profile() -> None:
    """Model profiles: shipped ones and your own."""


@profile.command("list")
@everywhere
@json_option
@click.pass_obj
def profile_list(given: Given, as_json: bool) -> int:
    """All profiles, those with a key first. Exit 2 when a file has problems; the others are listed."""
    profiles = _all_profiles(given)
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

    profiles = _all_profiles(given)
    found = profiles.named(name)
    if found is None:
        from console.sources.files.table import nearest

        known = [one.name for one in profiles.profiles]
        raise Failed(f"no profile is named {safe(name)}; {nearest(name, known)}")
    if as_json:
        print_json(found)
        return EXIT_GOOD
    path = Path(profiles.paths[name])
    content = _checked(lambda: read_bytes(path))
    # Read strictly once more: what has invisible characters in it does not reach the terminal.
    _checked(lambda: parse_profile(content, path))
    click.echo(content.decode("utf-8"), nl=not content.endswith(b"\n"))
    return EXIT_GOOD


# What the commands share -----------------------------------------------------------------------

Value = TypeVar("Value")


def _checked(read: Callable[[], Value]) -> Value:
    """What ``read`` gives; a bad file ends the command with its problems and exit status 2."""
    from console.sources.files import FileError

    try:
        return read()
    except FileError as error:
        raise BadFile(error) from None


def _here(given: Given) -> Here:
    """The site of the file, or without one of what is found on this host."""
    return _checked(lambda: _from_file(given)) or _from_host()


def _from_file(given: Given) -> Here | None:
    from console.sources.here import site_from_file

    return site_from_file(given.site, os.environ)


def _from_host() -> Here:
    from console.sources.here import site_from_host

    return _run(site_from_host())


def _profiles(given: Given, site: Site) -> ProfileSet:
    from console.sources.here import profiles_of

    return profiles_of(site, given.profiles)


def _all_profiles(given: Given) -> ProfileSet:
    """Without looking at the host: a site file is read only for where its profiles are."""
    from console.model.site import Site

    loaded = _checked(lambda: _from_file(given))
    return _profiles(given, loaded.site if loaded is not None else Site())


class Failed(click.ClickException):
    """What was asked cannot be done, in one line; nothing was changed."""

    exit_code = EXIT_BAD

    def __init__(self, message: str) -> None:
        super().__init__(safe(message))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM, SIGHUP and SIGINT leave the block as an exit, so that what it opened is closed."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for other in ENDING:  # the closing itself is not to be interrupted
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(work: Coroutine[Any, Any, Value]) -> Value:
    from console.transport.loop import run

    return run(work)


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
