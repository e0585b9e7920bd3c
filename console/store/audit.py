"""The audit trail: who asked for what and why, when it ran and how it ended."""

from __future__ import annotations

import sqlite3

import msgspec

from console.model.operation import (
    Actor,
    Direction,
    Event,
    JobEnd,
    JobStart,
    JobView,
    Outcome,
    Plan,
    job_view,
)
from console.store.database import looked_into, opened
from console.store.job_directory import JobFile
from console.store.state import State, StateProblem


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One process that carried a job on: who asked for it, which way, and how it ended. Unix seconds."""

    direction: Direction
    actor: Actor
    asked_at: float
    began_at: float | None = None
    pid: int | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None
    reasons: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        if self.began_at is None or self.ended_at is None:
            return None
        return max(0.0, self.ended_at - self.began_at)


def asked(state: State, file: JobFile, direction: Direction, actor: Actor, at: float) -> None:
    """Somebody asked for a job, or that one goes on. StateProblem when it cannot be recorded."""
    with opened(state) as database:
        _add_job(database, file)
        database.execute(
            "insert into runs (job, direction, user, connection, asked_at) values (?, ?, ?, ?, ?)",
            (file.id, direction, actor.user, actor.connection, at),
        )


def began(state: State, file: JobFile, start: JobStart) -> None:
    """Its process began. StateProblem when it cannot be recorded."""
    with opened(state) as database:
        _add_job(database, file)
        run = _latest(database, file.id, "began_at is null")
        if run is None:  # it could not be recorded when it was asked for
            database.execute(
                "insert into runs (job, direction, user, connection, asked_at) values (?, ?, ?, ?, ?)",
                (file.id, start.direction, file.actor.user, file.actor.connection, start.at),
            )
            run = _latest(database, file.id)
        database.execute("update runs set began_at = ?, pid = ? where id = ?", (start.at, start.pid, run))


def ended(state: State, job: str, end: JobEnd) -> None:
    """It ended. StateProblem when it cannot be recorded."""
    with opened(state) as database:
        database.execute(
            "update runs set ended_at = ?, outcome = ?, reasons = ? where id = ?",
            (end.at, end.outcome, msgspec.json.encode(end.reasons).decode(), _latest(database, job)),
        )


def runs_of(state: State, job: str) -> tuple[Run, ...]:
    """All runs of a job, oldest first. StateProblem when the database cannot be read."""
    with looked_into(state) as database:
        return () if database is None else _runs(database, job)


def find(state: State, job: str) -> JobView | None:
    return next((view for view in all_jobs(state) if view.id == job), None)


def all_jobs(state: State) -> tuple[JobView, ...]:
    """Every job recorded, as far as the trail knows it: without its steps' evidence. StateProblem."""
    with looked_into(state) as database:
        if database is None:
            return ()
        rows = database.execute("select id, created_at, user, connection, note, plan from jobs").fetchall()
        try:
            return tuple(_view(database, *row) for row in rows)
        except (msgspec.DecodeError, TypeError) as problem:
            raise StateProblem(f"{state.database}: not as gpuops writes it: {problem}") from None


def _add_job(database: sqlite3.Connection, file: JobFile) -> None:
    database.execute(
        "insert or ignore into jobs (id, action, created_at, user, connection, note, plan)"
        " values (?, ?, ?, ?, ?, ?, ?)",
        (
            file.id,
            file.plan.action,
            file.created_at,
            file.actor.user,
            file.actor.connection,
            file.note,
            msgspec.json.encode(file.plan),
        ),
    )


def _latest(database: sqlite3.Connection, job: str, condition: str = "true") -> int | None:
    row = database.execute(f"select max(id) from runs where job = ? and {condition}", (job,)).fetchone()
    return None if row is None else row[0]


def _runs(database: sqlite3.Connection, job: str) -> tuple[Run, ...]:
    rows = database.execute(
        "select direction, user, connection, asked_at, began_at, pid, ended_at, outcome, reasons"
        " from runs where job = ? order by id",
        (job,),
    )
    return tuple(
        msgspec.convert(
            {
                "direction": direction,
                "actor": {"user": user, "connection": connection},
                "asked_at": asked_at,
                "began_at": began_at,
                "pid": pid,
                "ended_at": ended_at,
                "outcome": outcome,
                "reasons": msgspec.json.decode(reasons or "[]"),
            },
            Run,
        )
        for direction, user, connection, asked_at, began_at, pid, ended_at, outcome, reasons in rows
    )


def _view(
    database: sqlite3.Connection,
    job: str,
    created_at: float,
    user: str,
    connection: str | None,
    note: str | None,
    plan: bytes,
) -> JobView:
    runs = _runs(database, job)
    events: list[Event] = []
    for run in runs[-1:]:
        began_at = run.began_at if run.began_at is not None else run.asked_at
        events.append(
            JobStart(at=began_at, direction=run.direction, pid=run.pid or 0, start_ticks=0, boot_id="")
        )
        if run.ended_at is not None and run.outcome is not None:
            events.append(JobEnd(at=run.ended_at, outcome=run.outcome, reasons=run.reasons))
    decoded = msgspec.json.decode(plan, type=Plan)
    return job_view(job, decoded, Actor(user, connection), note, created_at, events, alive=False)
