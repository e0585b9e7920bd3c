"""Following a job: its view now, and again at each change, until it is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from console.model.operation import JobView
from console.store.job_directory import journal_path, read_job, view_of
from console.store.journal import Journal, JournalProblem, Tail, read
from console.store.state import State

__all__ = ["Journal", "JournalProblem", "follow", "read"]

#: Seconds between two looks at the journal.
LOOK_S = 0.1


async def follow(state: State, job: str) -> AsyncIterator[JobView]:
    """The job as it stands, then at each change, until it ended or its process died.

    Any number may follow. NoSuchJob, or StateProblem when it cannot be read.
    """
    file = read_job(state, job)
    tail = Tail(journal_path(state, job))
    shown: JobView | None = None
    while True:
        tail.update()
        view = view_of(file, tail.events)
        if view.state == "interrupted" and tail.update():
            view = view_of(file, tail.events)  # it wrote its end and left between the two looks
        if view != shown:
            yield view
            shown = view
        if view.state != "running":
            return
        await asyncio.sleep(LOOK_S)
