"""``gpuops status`` and ``gpuops doctor``: looking, without a screen."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import TYPE_CHECKING

import click

from console.cli.shared import (
    ENDING,
    EXIT_GOOD,
    EXIT_UNHEALTHY,
    Given,
    everywhere,
    find_here,
    find_profiles,
    from_file,
    from_host,
    json_option,
    wait_for,
)
from console.output import print_json, print_lines, warn

if TYPE_CHECKING:
    from console.model.snapshot import Snapshot
    from console.sources.monitor import Monitor
    from console.store.load_memory import LoadMemory


@click.command()
@everywhere
@json_option
@click.option("--watch", is_flag=True, help="Again every second, until interrupted.")
@click.pass_obj
def status(given: Given, as_json: bool, watch: bool) -> int:
    """The service, its cards and the engine's numbers. Exit 0 when it is ready or busy."""
    here = find_here(given)
    profiles = find_profiles(given, here.site)
    notices = (*here.notices, *(str(problem) for problem in profiles.problems))
    for notice in notices:
        warn(notice)
    from console.sources.monitor import Monitor
    from console.store.load_memory import LoadMemory
    from console.store.state import state_of

    state = state_of(here.site, os.environ, os.geteuid())
    memory = LoadMemory(state, keep=not (given.read_only or here.site.read_only))

    async def look() -> int:
        monitor = Monitor(here.site, profiles=profiles.profiles, notices=notices, expected=memory.expected)
        try:
            if watch:
                return await _watch(monitor, memory, as_json)
            return await _once(monitor, memory, as_json)
        finally:
            await monitor.close()

    return wait_for(look())


async def _once(monitor: Monitor, memory: LoadMemory, as_json: bool) -> int:
    from console.model.report import healthy
    from console.sources.once import observe_once

    snapshot = await observe_once(monitor)
    if (problem := memory.problem()) is not None:
        warn(problem)
    _print_status(snapshot, as_json)
    return EXIT_GOOD if healthy(snapshot) else EXIT_UNHEALTHY


async def _watch(monitor: Monitor, memory: LoadMemory, as_json: bool) -> int:
    """Print the status once a second until a signal, or until nobody reads it.

    A load that comes to its end meanwhile is remembered.
    """
    gc.enable()
    import asyncio

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in ENDING:
        loop.add_signal_handler(number, ended.set)
    redraw = not as_json and sys.stdout.isatty()
    follower = asyncio.create_task(monitor.run())
    follower.add_done_callback(lambda task: ended.set())
    beat, problem = loop.time(), None
    try:
        while not ended.is_set():
            beat = max(beat + 1.0, loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(beat):
                    await ended.wait()
                    break
            if redraw:
                sys.stdout.write("\x1b[H\x1b[2J")
            snapshot = monitor.snapshot()
            _print_status(snapshot, as_json)
            if memory.new_load(snapshot):
                await asyncio.to_thread(memory.record, snapshot)
            news = memory.problem()
            problem = news or problem
            if problem is not None and (news or redraw):  # a redrawn screen must say it again
                warn(problem)
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


@click.command()
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
        here = from_file(given) or from_host()
    except FileError as error:
        problems = tuple(map(str, error.problems))
        here = Here(Site(), given.site, ())
    profiles = find_profiles(given, here.site)
    found = wait_for(
        examine(look_around(here.site, here.path, profiles, site_problems=problems, notices=here.notices))
    )
    if as_json:
        print_json(findings_document(found))
    else:
        print_lines(finding_lines(found))
    return EXIT_UNHEALTHY if overall(found) == "fail" else EXIT_GOOD
