"""The database of what is remembered: audit trail and load times, in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from console.store.state import State, StateProblem

DATABASE_SCHEMA = 1

#: Seconds to wait for another process that writes.
BUSY_S = 2.0

_TABLES = """
create table jobs (
  id text primary key,
  action text not null,
  created_at real not null,
  user text not null,
  connection text,
  note text,
  plan blob not null
) strict;
create table runs (
  id integer primary key,
  job text not null references jobs (id),
  direction text not null,
  user text not null,
  connection text,
  asked_at real not null,
  began_at real,
  pid integer,
  ended_at real,
  outcome text,
  reasons text
) strict;
create index runs_of_job on runs (job, id);
create table loads (
  id integer primary key,
  profile text not null,
  run text not null,
  began_at real not null,
  seconds real not null,
  unique (profile, run)
) strict;
create table phases (
  load integer not null references loads (id) on delete cascade,
  phase text not null,
  seconds real not null,
  primary key (load, phase)
) strict;
"""


@contextmanager
def opened(state: State) -> Iterator[sqlite3.Connection]:
    """The database in one transaction, made when it is not there yet.

    StateProblem, in words, when it is of a newer gpuops, damaged, locked or full: nothing is changed then.
    """
    try:
        connection = sqlite3.connect(state.database, timeout=BUSY_S, isolation_level=None)
        try:
            connection.execute("pragma foreign_keys = on")
            _prepare(connection, state)
            connection.execute("begin immediate")
            yield connection
            connection.execute("commit")
        finally:
            connection.close()  # what was not committed is taken back
    except sqlite3.Error as problem:
        raise StateProblem(f"{state.database}: {_words(problem)}") from None


@contextmanager
def looked_into(state: State) -> Iterator[sqlite3.Connection | None]:
    """The database for reading only; None when there is none yet. StateProblem as in ``opened``."""
    try:
        if not state.database.exists():
            yield None
            return
    except OSError as problem:
        raise StateProblem(
            f"{state.database}: {problem.strerror}; the audit trail and the load times are kept there"
        ) from None
    try:
        address = f"{state.database.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(address, timeout=BUSY_S, isolation_level=None, uri=True)
        try:
            version = _version(connection)
            _check(version, state)
            # Version 0: another process has made the file a moment ago, and is about to fill it.
            yield connection if version else None
        finally:
            connection.close()
    except sqlite3.Error as problem:
        raise StateProblem(f"{state.database}: {_words(problem)}") from None


def _prepare(connection: sqlite3.Connection, state: State) -> None:
    version = _version(connection)
    _check(version, state)
    if version == DATABASE_SCHEMA:
        return
    state.database.chmod(0o600)
    connection.execute("pragma journal_mode = wal")  # readers and the one writer do not wait for each other
    connection.execute("begin immediate")
    if _version(connection) == 0:  # else another process was faster
        for statement in _TABLES.split(";"):
            connection.execute(statement)
        connection.execute(f"pragma user_version = {DATABASE_SCHEMA}")
    connection.execute("commit")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("pragma user_version").fetchone()[0])


def _check(version: int, state: State) -> None:
    if not 0 <= version <= DATABASE_SCHEMA:
        raise StateProblem(
            f"{state.database}: schema {version} is of a newer gpuops; this one knows {DATABASE_SCHEMA}: "
            "use the newer one, or move the file away"
        )


def _words(problem: sqlite3.Error) -> str:
    return f"{problem}; the audit trail and the load times are kept there"
