"""The process that carries a job out. It outlives whoever asked for it, and is alone on its host."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from console.model.load_times import seen_whole
from console.model.operation import Direction, JobEnd, JobStart, Notice, Plan, Progress, StepEvent
from console.model.profile import Profile
from console.model.site import Site
from console.operations.context import opened
from console.operations.engine import carry_out
from console.operations.kernel_lines import kept
from console.operations.registry import steps_of
from console.operations.step import Context, Refused, Step
from console.store import audit, loads
from console.store.job_directory import JobFile, journal_path, read_job, read_site
from console.store.journal import Journal, JournalProblem
from console.store.lock import Holder, Locked, hold
from console.store.process import ProcessId, this_process
from console.store.state import State, StateProblem
from console.transport.loop import run

EXIT_DONE = 0
EXIT_REFUSED = 3
EXIT_ROLLED_BACK = 4
EXIT_FAILED = 5
EXIT_LOCKED = 75

#: Seconds to wait for the lock: whoever only asks for a job holds it for a moment.
LOCK_WAIT_S = 5.0


class Opened(Protocol):
    """How a context is opened; a test brings one without sources."""

    def __call__(
        self, site: Site, profiles: tuple[Profile, ...], *, state: State
    ) -> AbstractAsyncContextManager[Context]: ...


StepsOf = Callable[[Plan], tuple[Step, ...]]

#: What goes on beside a job's steps and writes to its journal, too.
Beside = Callable[[Context, Journal], AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def _alone(context: Context, journal: Journal) -> AsyncIterator[None]:
    yield


async def run_job(
    state: State,
    job: str,
    direction: Direction,
    *,
    steps_of: StepsOf,
    opened: Opened,
    journal: Journal,
    beside: Beside = _alone,
) -> JobEnd:
    """Carry the job on under the host's lock, which the caller holds, and record it.

    JournalProblem when what comes next cannot be announced: the job then stands as it is.
    """
    file = read_job(state, job)
    start = _start(this_process(), direction)
    journal.append(start)
    with _noting(journal, "the audit trail does not have this run"):
        audit.began(state, file, start)
    end = await _carried_out(state, file, direction, steps_of, opened, journal, beside)
    with _noting(journal, "the audit trail does not have how this run ended"):
        audit.ended(state, job, end)
    return end


async def _carried_out(
    state: State,
    file: JobFile,
    direction: Direction,
    steps_of: StepsOf,
    opened: Opened,
    journal: Journal,
    beside: Beside,
) -> JobEnd:
    try:
        site = read_site(state, file.id)
        steps = steps_of(file.plan)
    except (Refused, StateProblem) as problem:
        return _refused(journal, str(problem))
    except Exception as defect:  # noqa: BLE001  told to whoever follows, who would else only see it vanish
        return _refused(journal, f"defect: the steps cannot be built: {type(defect).__name__}: {defect}")
    async with opened(site.site, site.profiles, state=state) as context:
        async with beside(context, journal):
            end = await carry_out(context, steps, journal, direction)
        if end.outcome == "done":
            _record_load(context, journal)
        return end


def _refused(journal: Journal, reason: str) -> JobEnd:
    end = JobEnd(at=time.time(), outcome="failed", reasons=(reason,))
    journal.append(end)
    return end


def _record_load(context: Context, journal: Journal) -> None:
    """Remember how long the model took; a load that was seen before is not counted twice."""
    snapshot = context.monitor.snapshot()
    if snapshot.profile is None or not seen_whole(snapshot.load, snapshot.unit.value):
        return
    with _noting(journal, "the times of this load are not remembered"):
        loads.record(context.state, snapshot.profile.name, snapshot.load)


@contextlib.contextmanager
def _noting(journal: Journal, words: str) -> Iterator[None]:
    """Trouble with the database never stops a job: it is noted in the journal."""
    try:
        yield
    except StateProblem as problem:
        with contextlib.suppress(JournalProblem):  # the disk is full: the next intent will say so
            journal.append(Notice(at=time.time(), words=f"{words}: {problem}"), sync=False)


def _start(process: ProcessId, direction: Direction) -> JobStart:
    return JobStart(
        at=time.time(),
        direction=direction,
        pid=process.pid,
        start_ticks=process.start_ticks,
        boot_id=process.boot_id,
    )


def carry_on(
    state: State,
    job: str,
    direction: Direction,
    *,
    steps_of: StepsOf,
    opened: Opened,
    open_journal: Callable[[Path], Journal] = Journal,
    beside: Beside = _alone,
) -> int:
    """The whole life of a job's process: its exit status. It has said in the journal how it ended."""
    file = read_job(state, job)
    holder = Holder(
        process=this_process(), job=job, action=file.plan.action, user=file.actor.user, since=time.time()
    )
    try:
        with hold(state, holder, wait_s=LOCK_WAIT_S):
            journal = open_journal(journal_path(state, job))
            try:
                return _run(state, job, direction, steps_of, opened, journal, beside)
            finally:
                journal.close()
    except Locked as locked:
        if direction == "forward":  # else whoever holds the lock may be writing this very journal
            _refused(open_journal(journal_path(state, job)), str(locked))
        print(f"gpuops: {locked}", file=sys.stderr)
        return EXIT_LOCKED


def _run(
    state: State,
    job: str,
    direction: Direction,
    steps_of: StepsOf,
    opened: Opened,
    journal: Journal,
    beside: Beside,
) -> int:
    async def work() -> JobEnd:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):  # the job stays as it stands, and can go on later
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await run_job(
            state, job, direction, steps_of=steps_of, opened=opened, journal=journal, beside=beside
        )

    try:
        end = run(work())
    except JournalProblem as problem:
        print(f"gpuops: job {job}: {problem}", file=sys.stderr)
        return EXIT_FAILED if _has_begun(journal) else EXIT_REFUSED
    except asyncio.CancelledError:
        _say_interrupted(journal)
        return 128 + signal.SIGTERM
    failed = EXIT_FAILED if _has_begun(journal) else EXIT_REFUSED
    return {"done": EXIT_DONE, "rolled-back": EXIT_ROLLED_BACK, "failed": failed}[end.outcome]


def _has_begun(journal: Journal) -> bool:
    return any(isinstance(event, StepEvent) and event.state == "doing" for event in journal.events)


def _say_interrupted(journal: Journal) -> None:
    step = next((event.step for event in reversed(journal.events) if isinstance(event, StepEvent)), "")
    words = "the job's process was told to end (SIGTERM)"
    with contextlib.suppress(JournalProblem):  # that it has no end says the same, with fewer words
        journal.append(Progress(at=time.time(), step=step, words=words))


def main(
    arguments: list[str] | None = None,
    *,
    steps_of: StepsOf = steps_of,
    opened: Opened = opened,
    beside: Beside = _alone,
) -> int:
    """``python -P -m console.operations.job --state DIR --job ID --direction forward|resume|rollback``."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="gpuops-job", description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--direction", choices=("forward", "resume", "rollback"), required=True)
    given = parser.parse_args(arguments)
    try:
        return carry_on(
            State(given.state), given.job, given.direction, steps_of=steps_of, opened=opened, beside=beside
        )
    except StateProblem as problem:
        print(f"gpuops: {problem}", file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    code = main(beside=kept)
    sys.stderr.flush()
    os._exit(code)  # a thread that waits in the kernel for a card must not keep us
