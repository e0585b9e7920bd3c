"""Starts the process of a job: new, or to go on with one that was interrupted, or to take it back."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from console.model.operation import Actor, Direction, JobEnd, JobStart, JobView, Plan
from console.model.profile import Profile
from console.model.site import Site
from console.model.text import clean
from console.operations.step import Refused
from console.store import audit
from console.store.disk import read_whole
from console.store.job_directory import (
    JobFile,
    NoSuchJob,
    SiteFile,
    create_job,
    journal_path,
    last_start,
    new_id,
    output_path,
    process_of,
    read_job,
    read_site,
)
from console.store.jobs import get_job, list_jobs, unfinished_jobs
from console.store.journal import Journal, read
from console.store.lock import Holder, Locked, hold, holder
from console.store.process import ProcessId, this_process
from console.store.state import State, StateProblem
from console.transport.demo import box_environment

#: Seconds that a job whose end is in its journal has to close what it opened.
CLOSE_S = 10.0

#: The exit status of a job's process that found the host's lock taken.
EXIT_LOCKED = 75

#: Seconds within which the job's process must have said that it began.
BEGIN_S = 20.0

_LOOK_S = 0.02

#: There when systemd is the init of this machine (sd_booted(3)).
SYSTEMD = Path("/run/systemd/system")

#: Processes of jobs that we started and that are ours to ask for their exit status.
_children: list[subprocess.Popen[bytes]] = []

Starter = Callable[[State, str, Direction, Site], subprocess.Popen[bytes]]


def start_process(state: State, job: str, direction: Direction, site: Site) -> subprocess.Popen[bytes]:
    """Start it out of reach of this terminal: as a unit of its own, or in a session of its own."""
    argv = job_command(state, job, direction)
    if site.simulated is None and os.geteuid() == 0 and SYSTEMD.is_dir():
        argv = unit_command(argv, job, output_path(state, job), os.environ | box_environment())
    with output_path(state, job).open("ab") as output:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=box_environment(),
            cwd="/",
            start_new_session=True,
        )


def job_command(state: State, job: str, direction: Direction) -> list[str]:
    """``-P``: the working directory has no say in what is imported."""
    module = [sys.executable, "-P", "-m", "console.operations.job"]
    return [*module, "--state", str(state.directory.absolute()), "--job", job, "--direction", direction]


def unit_command(argv: list[str], job: str, output: Path, environment: dict[str, str]) -> list[str]:
    """The command as a transient unit, which ends neither with a session nor with whoever asked for it."""
    properties = [
        "KillMode=mixed",  # SIGTERM to the job alone: it ends its own commands
        f"StandardOutput=append:{output}",
        f"StandardError=append:{output}",
        "WorkingDirectory=/",
    ]
    # systemd replaces $NAME in a command's arguments (systemd.service(5)).
    command = [argument.replace("$", "$$") for argument in argv]
    kept = [f"--setenv={name}={environment[name]}" for name in ("PYTHONPATH", "PATH") if name in environment]
    return [
        *("systemd-run", f"--unit={unit_name(job)}", "--collect", "--quiet", "--no-block"),
        *(f"--property={one}" for one in properties),
        *kept,
        "--",
        *command,
    ]


def unit_name(job: str) -> str:
    return f"gpuops-job-{job}.service"


def submit(
    state: State,
    site: Site,
    profiles: tuple[Profile, ...],
    plan: Plan,
    actor: Actor,
    note: str | None = None,
    *,
    starter: Starter = start_process,
) -> str:
    """Put the job on the disk and start its process: the job's id, once the process has begun.

    Locked when another operation holds the host. Refused when the pre-flight forbids the plan, or
    an interrupted job comes first. StateProblem when the state directory cannot be used. Nothing
    was changed then. It takes about as long as Python takes to start: call it from a thread
    where nothing may wait.
    """
    if plan.blocked:
        failed = "; ".join(finding.evidence for finding in plan.findings if finding.verdict == "fail")
        raise Refused(f"the pre-flight forbids it: {failed}")
    state.create()
    now = time.time()
    file = JobFile(
        id=new_id(state, plan.action, now),
        created_at=now,
        actor=Actor(clean(actor.user), clean(actor.connection) if actor.connection else None),
        note=clean(note) if note else None,
        plan=plan,
    )
    process = this_process()
    mine = Holder(process=process, job=file.id, action=plan.action, user=file.actor.user, since=now)
    with _held(state, mine):
        _refuse_unfinished(state)
        # Until its own process has begun, the job is ours: it is "running" for as long as we live.
        begun = JobStart(
            at=now,
            direction="forward",
            pid=process.pid,
            start_ticks=process.start_ticks,
            boot_id=process.boot_id,
        )
        create_job(state, file, SiteFile(site=site, profiles=profiles), begun)
    _record(state, file, "forward", file.actor)
    try:
        _begin(state, file.id, "forward", site, starter)
    except StateProblem as problem:
        _give_up(state, file.id, str(problem))
        raise
    return file.id


def need_free(state: State) -> None:
    """Locked, or Refused for an interrupted job, when an operation that is asked for now could not begin."""
    if not state.jobs.exists():
        return
    ends = time.monotonic() + CLOSE_S
    while (other := holder(state)) is not None:
        if time.monotonic() >= ends or not _is_over(state, other):
            raise Locked(other)
        time.sleep(_LOOK_S)
    _refuse_unfinished(state)


def resume(state: State, job: str, actor: Actor | None = None, *, starter: Starter = start_process) -> None:
    """Let an interrupted job go on, or one that failed without taking anything back.

    Refused when it cannot go forward any more; otherwise as ``submit``.
    """
    _again(state, job, "resume", actor, starter)


def rollback(state: State, job: str, actor: Actor | None = None, *, starter: Starter = start_process) -> None:
    """Take back what an interrupted or failed job did. Refused when there is nothing to take back."""
    _again(state, job, "rollback", actor, starter)


def actor_here() -> Actor:
    """Who runs this process. The login name survives sudo; who sudo was called by is kept too."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = f"uid {os.getuid()}"
    caller = os.environ.get("SUDO_USER")
    return Actor(f"{name} (sudo by {caller})" if caller else name, os.environ.get("SSH_CONNECTION"))


def interrupted_words(job: JobView) -> str:
    """What to do about a job that was interrupted."""
    ways = "" if job.turned_back else f"gpuops jobs resume {job.id}, or "
    return f"job {job.id} ({job.plan.title}) was interrupted; first: {ways}gpuops jobs rollback {job.id}"


def _again(state: State, job: str, direction: Direction, actor: Actor | None, starter: Starter) -> None:
    file = read_job(state, job)
    actor = actor or actor_here()
    mine = Holder(
        process=this_process(), job=job, action=file.plan.action, user=actor.user, since=time.time()
    )
    with _held(state, mine):
        _refuse_again(state, get_job(state, job), direction)
        site = read_site(state, job).site
    _record(state, file, direction, actor)
    _begin(state, job, direction, site, starter)


@contextlib.contextmanager
def _held(state: State, mine: Holder) -> Iterator[None]:
    """Hold the host's lock. One whose job has ended only closes what it opened: that is waited for."""
    ends = time.monotonic() + CLOSE_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(hold(state, mine))
                break
            except Locked as locked:
                if time.monotonic() >= ends or not _is_over(state, locked.holder):
                    raise
            time.sleep(_LOOK_S)
        yield


def _is_over(state: State, holder: Holder | None) -> bool:
    """Whether the holder's job has ended; one that has not given its name yet does so in a moment."""
    if holder is None:
        return True
    try:
        return get_job(state, holder.job).ended_at is not None
    except NoSuchJob:
        return False  # it is being made


def _refuse_again(state: State, view: JobView, direction: Direction) -> None:
    """Refused when the job cannot go this way."""
    if view.state == "running":
        raise Locked(None)
    if view.state not in ("interrupted", "failed"):
        raise Refused(f"job {view.id} is over: {view.outcome}")
    if direction == "resume" and view.turned_back:
        raise Refused(
            f"job {view.id} has begun to take its steps back; go on with gpuops jobs rollback {view.id}"
        )
    if view.state == "failed" and not view.begun:
        raise Refused(f"job {view.id} changed nothing; ask for it anew")
    later = [
        other.id
        for other in list_jobs(state)
        if other.begun and (other.created_at, other.id) > (view.created_at, view.id)
    ]
    if later:
        raise Refused(f"job {later[0]} has changed this host after job {view.id}; ask for what you want anew")


def _refuse_unfinished(state: State) -> None:
    for view in unfinished_jobs(state):
        if view.state == "interrupted":
            raise Refused(interrupted_words(view))
        start = last_start(read(journal_path(state, view.id)))
        raise Locked(
            Holder(
                process=process_of(start) if start is not None else ProcessId(0, 0, ""),
                job=view.id,
                action=view.plan.action,
                user=view.actor.user,
                since=view.created_at,
            )
        )


def _record(state: State, file: JobFile, direction: Direction, actor: Actor) -> None:
    # The job's process meets the same trouble, notes it in the journal, and adds what is missing.
    with contextlib.suppress(StateProblem):
        audit.asked(state, file, direction, actor, time.time())


def _begin(state: State, job: str, direction: Direction, site: Site, starter: Starter) -> None:
    """Start the process and wait until it said that it began. StateProblem with its last word when not."""
    _children[:] = [child for child in _children if child.poll() is None]
    path = journal_path(state, job)
    before = len(read(path))
    try:
        child = starter(state, job, direction, site)
    except OSError as problem:
        raise StateProblem(f"job {job}: its process cannot be started: {problem}") from None
    _children.append(child)
    ends = time.monotonic() + BEGIN_S
    while True:
        over = child.poll()
        if any(isinstance(event, JobStart | JobEnd) for event in read(path)[before:]):
            return
        if over == EXIT_LOCKED:
            raise Locked(holder(state))
        if over or time.monotonic() >= ends:
            child.kill()
            why = f"exit status {over}" if over else f"no sign of it within {BEGIN_S:g} s"
            raise StateProblem(f"job {job}: its process did not begin: {_last_word(state, job) or why}")
        time.sleep(_LOOK_S)


def _last_word(state: State, job: str) -> str:
    said = read_whole(output_path(state, job)).decode("utf-8", "replace").strip().splitlines()
    return clean(said[-1]) if said else ""


def _give_up(state: State, job: str, reason: str) -> None:
    """A job whose process never began is over, and nothing was changed."""
    journal = Journal(journal_path(state, job))
    try:
        journal.append(JobEnd(at=time.time(), outcome="failed", reasons=(reason,)))
    finally:
        journal.close()
