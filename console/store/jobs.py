"""The jobs of a host: those with a directory, and from the audit trail those whose directory is gone."""

from __future__ import annotations

import msgspec

from console.model.operation import JobView, Outcome
from console.store import audit
from console.store.job_directory import NoSuchJob, is_id, journal_path, read_job, view_of
from console.store.journal import read
from console.store.state import State, StateProblem


class Survey(msgspec.Struct, frozen=True):
    """All jobs, newest first, and in words what could not be read."""

    jobs: tuple[JobView, ...]
    problems: tuple[str, ...] = ()


def get_job(state: State, job: str) -> JobView:
    """One job. NoSuchJob; StateProblem when it cannot be read."""
    if not is_id(job) or not (state.jobs / job).is_dir():
        recorded = audit.find(state, job) if is_id(job) else None
        if recorded is None:
            raise NoSuchJob(f"there is no job {job}; gpuops jobs list shows those there are")
        return recorded
    return _current(state, job)


def survey(state: State) -> Survey:
    """Every job, newest first; one that cannot be read hides none of the others."""
    found: dict[str, JobView] = {}
    problems: list[str] = []
    try:
        names = sorted(path.name for path in state.jobs.iterdir()) if state.jobs.exists() else []
    except OSError as problem:
        return Survey((), (f"{state.jobs}: {problem.strerror}",))
    unreadable = set()
    for name in names:
        if not is_id(name):
            continue
        try:
            found[name] = _current(state, name)
        except StateProblem as problem:
            unreadable.add(name)
            problems.append(str(problem))
    try:
        for view in audit.all_jobs(state):
            if view.id not in unreadable:
                found.setdefault(view.id, view)
    except StateProblem as problem:
        problems.append(str(problem))
    ordered = sorted(found.values(), key=lambda view: (view.created_at, view.id), reverse=True)
    return Survey(tuple(ordered), tuple(problems))


def list_jobs(state: State) -> tuple[JobView, ...]:
    """Every job that can be read, newest first; ``survey`` also tells which cannot."""
    return survey(state).jobs


def unfinished_jobs(state: State) -> tuple[JobView, ...]:
    """Jobs that run or were interrupted, newest first. StateProblem when a job cannot be read.

    Unlike ``survey`` it looks only at jobs with a directory, and is sure: an unreadable job may be one.
    """
    try:
        names = sorted((path.name for path in state.jobs.iterdir()), reverse=True)
    except OSError as problem:
        raise StateProblem(f"{state.jobs}: {problem.strerror}") from None
    views = [_current(state, name) for name in names if is_id(name)]
    return tuple(view for view in views if view.state in ("running", "interrupted"))


def runs_of(state: State, view: JobView) -> tuple[audit.Run, ...]:
    """Every run of a job, oldest first. StateProblem when the database cannot be read.

    The journal has the last run's end first: the audit trail is written after it.
    """
    runs = audit.runs_of(state, view.id)
    if not runs or runs[-1].outcome is not None or view.ended_at is None:
        return runs
    outcome: Outcome | None = view.state if view.state in ("done", "failed", "rolled-back") else None
    last = msgspec.structs.replace(runs[-1], ended_at=view.ended_at, outcome=outcome, reasons=view.reasons)
    return (*runs[:-1], last)


def _current(state: State, job: str) -> JobView:
    file = read_job(state, job)
    path = journal_path(state, job)
    view = view_of(file, read(path))
    if view.state == "interrupted":
        # It may have written its end and left between the two looks.
        view = view_of(file, read(path))
    return view
