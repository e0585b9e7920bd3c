"""Following a job on the command line: each step as it goes, and the exit status it comes to."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from console.cli.shared import (
    EXIT_FAILED,
    EXIT_GOOD,
    EXIT_LOCKED,
    EXIT_REFUSED,
    EXIT_ROLLED_BACK,
    Failed,
    wait_for,
)
from console.output import print_json, print_lines, safe, warn

if TYPE_CHECKING:
    from console.model.operation import JobView
    from console.model.report import Line
    from console.store.state import State

#: Seconds between two lines of progress where they cannot replace each other.
_PROGRESS_S = 10.0


class Refusal(Failed):
    """What was asked is refused; nothing was changed."""

    exit_code = EXIT_REFUSED


class HostLocked(Failed):
    """Another operation holds the host; nothing was changed."""

    exit_code = EXIT_LOCKED


@contextlib.contextmanager
def telling_refusals() -> Iterator[None]:
    """Locked, Refused and StateProblem end the command in one line, each with its exit status."""
    from console.store.lock import Locked
    from console.store.state import StateProblem

    try:
        yield
    except StateProblem as problem:
        raise Failed(str(problem)) from None
    except Locked as locked:
        raise HostLocked(str(locked)) from None
    except Exception as problem:
        from console.operations.step import Refused  # not before: it imports what acts on the host

        if isinstance(problem, Refused):
            raise Refusal(str(problem)) from None
        raise


def exit_status(view: JobView) -> int:
    """By how the job ended. One that was interrupted has failed and is not rolled back yet."""
    from console.store.lock import LOCKED_WORDS

    if view.state == "done":
        return EXIT_GOOD
    if view.state == "rolled-back":
        return EXIT_ROLLED_BACK
    if any(reason.startswith(LOCKED_WORDS) for reason in view.reasons):
        return EXIT_LOCKED
    return EXIT_FAILED if view.begun else EXIT_REFUSED


def follow_job(state: State, job: str, *, as_json: bool, asked_back: bool = False) -> int:
    """Print how the job goes until it is over: the exit status.

    Ctrl-C ends only the following. ``asked_back``: that it ends rolled back is what was asked for.
    With ``as_json`` a document on a line of its own for each change.
    """
    gc.enable()
    printer = _Printer(as_json)
    try:
        view = wait_for(_follow(state, job, printer))
    except (KeyboardInterrupt, BrokenPipeError):
        printer.close()
        warn(f"job {job} goes on without us; gpuops jobs follow {job}")
        return 128 + signal.SIGINT
    printer.end(view)
    if asked_back and view.state == "rolled-back":
        return EXIT_GOOD
    return exit_status(view)


async def _follow(state: State, job: str, printer: _Printer) -> JobView:
    import asyncio

    from console.operations.journal import follow

    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    ended_by: list[int] = []

    def leave(number: int) -> None:
        ended_by.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, leave, number)
    try:
        async for view in follow(state, job):
            printer.show(view)
    except asyncio.CancelledError:
        if ended_by:
            raise KeyboardInterrupt from None
        raise
    return view


class _Printer:
    """Prints what changed from one view of a job to the next."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._terminal = (
            not as_json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "")
        )
        self._before: JobView | None = None
        self._open = False
        self._told_at = 0.0

    def show(self, view: JobView) -> None:
        from console.model import job_report

        before, self._before = self._before, view
        if self._json:
            print_json(job_report.full_job_document(view))
            return
        if before is None:
            self._lines(tuple(job_report.wrapped(f"{view.plan.title}, job {view.id}", "")))
        known = before.steps if before is not None else (None,) * len(view.steps)
        for number, (step, earlier) in enumerate(zip(view.steps, known, strict=True), 1):
            told = earlier.state if earlier is not None else "waiting"
            changed = step.state != told or (earlier is not None and step.began != earlier.began)
            if changed and not (self._terminal and step.state in ("doing", "undoing")):
                self._lines(tuple(job_report.step_lines(view, number, step)))
        for line in view.kernel[len(before.kernel) if before is not None else 0 :]:
            self._lines(tuple(job_report.wrapped(line.words, "kernel: ", "warn")))
        for notice in view.notices[len(before.notices) if before is not None else 0 :]:
            self._lines(tuple(job_report.wrapped(notice.words, "note: ", "warn")))
        self._now(view)

    def end(self, view: JobView) -> None:
        """How it ended, and a word to a terminal whose window is hidden."""
        from console.model import job_report
        from console.operations.launch import interrupted_words

        self.close()
        if view.state == "interrupted":
            warn(interrupted_words(view))
        if self._json:
            return
        tone = job_report.STATES[view.state]
        ended = f"{view.plan.title}: {view.state.replace('-', ' ')}"
        self._lines(tuple(job_report.wrapped(ended, "", tone)))
        for reason in view.reasons:
            self._lines(tuple(job_report.wrapped(reason, "because ", tone)))
        if self._terminal and os.environ.get("TERM") != "linux":
            sys.stdout.write(f"\a\x1b]9;{safe(ended)}\a")  # OSC 9: a notification of the desktop
            sys.stdout.flush()

    def close(self) -> None:
        if self._open:
            with contextlib.suppress(OSError):
                sys.stdout.write("\r\x1b[K")
                sys.stdout.flush()
        self._open = False

    def _lines(self, lines: tuple[Line, ...]) -> None:
        self.close()
        print_lines(lines)

    def _now(self, view: JobView) -> None:
        """What it does at this moment: on a terminal a line that replaces itself."""
        from console.model import job_report, words

        at_work = [
            (number, step) for number, step in enumerate(view.steps, 1) if step.state in ("doing", "undoing")
        ]
        if not at_work or view.state != "running":
            return
        number, step = at_work[-1]
        told = job_report.progress_words(view.progress) if view.progress is not None else ""
        if not self._terminal:
            if told and time.monotonic() - self._told_at >= _PROGRESS_S:
                self._told_at = time.monotonic()
                self._lines(tuple(job_report.wrapped(told, " " * 16)))
            return
        text = (step.planned.undo if step.state == "undoing" else None) or step.planned.words
        since = f" {words.span(time.time() - step.began)}" if step.began is not None else ""
        line = f"{number:>3}/{len(view.steps)}{since} {text}" + (f": {told}" if told else "")
        columns = shutil.get_terminal_size().columns
        sys.stdout.write("\r\x1b[K" + safe(line)[: max(1, columns - 1)])
        sys.stdout.flush()
        self._open = True
