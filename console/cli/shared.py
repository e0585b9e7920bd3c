"""What every command shares: the options that go everywhere, the site and profiles, errors, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from console.output import safe

if TYPE_CHECKING:
    from types import FrameType

    from console.model.site import Site
    from console.sources.files import FileError, ProfileSet
    from console.sources.here import Here

EXIT_GOOD = 0
EXIT_UNHEALTHY = 1
EXIT_BAD = 2
EXIT_REFUSED = 3
EXIT_ROLLED_BACK = 4
EXIT_FAILED = 5
EXIT_LOCKED = 75

#: What ends a command that would go on.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

FILE = click.Path(path_type=Path)

Value = TypeVar("Value")


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


class Failed(click.ClickException):
    """What was asked cannot be done, in one line; nothing was changed."""

    exit_code = EXIT_BAD

    def __init__(self, message: str) -> None:
        super().__init__(safe(message))


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


def need_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("the console needs a terminal; gpuops status answers without one")


def checked(read: Callable[[], Value]) -> Value:
    """What ``read`` gives; a bad file ends the command with its problems and exit status 2."""
    from console.sources.files import FileError

    try:
        return read()
    except FileError as error:
        raise BadFile(error) from None


def find_here(given: Given) -> Here:
    """The site of the file, or without one of what is found on this host."""
    return checked(lambda: from_file(given)) or from_host()


def from_file(given: Given) -> Here | None:
    from console.sources.here import site_from_file

    return site_from_file(given.site, os.environ)


def from_host() -> Here:
    from console.sources.here import site_from_host

    return wait_for(site_from_host())


def find_profiles(given: Given, site: Site) -> ProfileSet:
    from console.sources.here import profiles_of

    return profiles_of(site, given.profiles)


def all_profiles(given: Given) -> ProfileSet:
    """Without looking at the host: a site file is read only for where its profiles are."""
    from console.model.site import Site

    loaded = checked(lambda: from_file(given))
    return find_profiles(given, loaded.site if loaded is not None else Site())


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
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


def wait_for(work: Coroutine[Any, Any, Value]) -> Value:
    from console.transport.loop import run

    return run(work)
