"""A job's directory: its plan, its site and its journal."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import msgspec

from console.model.operation import (
    OPERATION_SCHEMA,
    Actor,
    Event,
    JobStart,
    JobView,
    Plan,
    job_view,
)
from console.model.profile import Profile
from console.model.site import Site
from console.store.disk import decode, read_whole, sync_directory, write_new
from console.store.journal import Journal
from console.store.process import ProcessId, alive
from console.store.state import State, StateProblem

_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[a-z][a-z-]{0,30}(-[0-9]{1,4})?")
_UNFINISHED = ".new"


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """``plan.json``: what the job is to do, who asked for it and why. It never changes."""

    schema: int = OPERATION_SCHEMA
    id: str
    created_at: float  # Unix seconds
    actor: Actor
    note: str | None
    plan: Plan


class SiteFile(msgspec.Struct, frozen=True, kw_only=True):
    """``site.json``: the site and the profiles as they were when the job was made."""

    schema: int = OPERATION_SCHEMA
    site: Site
    profiles: tuple[Profile, ...]


class NoSuchJob(StateProblem):
    """There is no job with this id."""


def is_id(text: str) -> bool:
    """Whether a job can be named so; nothing else is ever looked up as a path."""
    return _ID.fullmatch(text) is not None


def plan_path(state: State, job: str) -> Path:
    return state.jobs / job / "plan.json"


def journal_path(state: State, job: str) -> Path:
    return state.jobs / job / "journal.jsonl"


def output_path(state: State, job: str) -> Path:
    """What the job's process itself said: nothing, unless it broke."""
    return state.jobs / job / "output"


def new_id(state: State, action: str, now: float) -> str:
    """An id that sorts by time and is easily typed, in local time: ``20261130-101502-switch``."""
    base = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{action}"
    names = [base, *(f"{base}-{number}" for number in range(2, 10000))]
    return next(name for name in names if not (state.jobs / name).exists())


def create_job(state: State, file: JobFile, site: SiteFile, begun: JobStart) -> None:
    """Put a job's directory on the disk, whole or not at all. StateProblem when it cannot be.

    Only who holds the host's lock may: what an earlier one left unfinished is removed.
    """
    try:
        for left in state.jobs.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(left)
        unfinished = state.jobs / f"{file.id}{_UNFINISHED}"
        unfinished.mkdir(mode=0o700)
        write_new(unfinished / "plan.json", msgspec.json.encode(file))
        write_new(unfinished / "site.json", msgspec.json.encode(site))
        Journal.create(unfinished / "journal.jsonl", file.id, (begun,))
        sync_directory(unfinished)
        unfinished.rename(state.jobs / file.id)
        sync_directory(state.jobs)
    except OSError as problem:
        raise StateProblem(
            f"{problem.filename or state.jobs}: {problem.strerror}; no job was begun and nothing was changed"
        ) from None


def read_job(state: State, job: str) -> JobFile:
    """What a job is to do. NoSuchJob, or StateProblem when its file cannot be used."""
    path = _existing(state, job) / "plan.json"
    return decode(read_whole(path), JobFile, path, OPERATION_SCHEMA)


def read_site(state: State, job: str) -> SiteFile:
    path = _existing(state, job) / "site.json"
    return decode(read_whole(path), SiteFile, path, OPERATION_SCHEMA)


def view_of(file: JobFile, events: list[Event]) -> JobView:
    """The job as its journal has it by now."""
    start = last_start(events)
    return job_view(
        file.id,
        file.plan,
        file.actor,
        file.note,
        file.created_at,
        events,
        start is not None and alive(process_of(start)),
    )


def last_start(events: list[Event]) -> JobStart | None:
    return next((event for event in reversed(events) if isinstance(event, JobStart)), None)


def process_of(start: JobStart) -> ProcessId:
    return ProcessId(start.pid, start.start_ticks, start.boot_id)


def _existing(state: State, job: str) -> Path:
    if not _ID.fullmatch(job) or not (state.jobs / job).is_dir():
        raise NoSuchJob(f"there is no job {job}; gpuops jobs list shows those there are")
    return state.jobs / job
