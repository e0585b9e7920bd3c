"""What the commands print of jobs: documents for machines, dense lines for people."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from typing import Any

from console.model import words
from console.model.operation import JobState, JobView, Progress, StepState, StepView
from console.model.report import WIDTH, Line, Tone

JOBS_SCHEMA = 1

#: How each state of a job is marked and coloured.
STATES: dict[JobState, Tone] = {
    "running": "warn",
    "done": "good",
    "rolled-back": "warn",
    "failed": "bad",
    "interrupted": "bad",
}

#: How each state of a step is said in one word, and coloured.
STEPS: dict[StepState, tuple[str, Tone]] = {
    "waiting": ("-", "dim"),
    "doing": ("begin", "plain"),
    "done": ("done", "good"),
    "skipped": ("as is", "good"),
    "failed": ("FAILED", "bad"),
    "undoing": ("undo", "plain"),
    "undone": ("undone", "warn"),
    "undo-failed": ("FAILED", "bad"),
    "nothing-to-undo": ("undone", "dim"),
}

_INDENT = " " * 15


def job_document(view: JobView) -> dict[str, Any]:
    """One job of ``jobs list --json``. Times are ISO 8601 in UTC; what is not known is None.

    Names are stable while the document's ``schema`` is 1.
    """
    return {
        "id": view.id,
        "action": view.plan.action,
        "title": view.plan.title,
        "target": view.plan.target,
        "state": view.state,
        "pid": view.pid if view.state == "running" else None,
        "started_at": moment(view.created_at),
        "ended_at": None if view.ended_at is None else moment(view.ended_at),
        "outcome": view.outcome,
        "reasons": list(view.reasons),
        "direction": view.direction,
        "user": view.actor.user,
        "connection": view.actor.connection,
        "note": view.note,
    }


def full_job_document(view: JobView) -> dict[str, Any]:
    """One job of ``jobs show --json`` and ``jobs follow --json``: also its steps as they stand."""
    progress = view.progress
    return {
        "schema": JOBS_SCHEMA,
        **job_document(view),
        "progress": None
        if progress is None
        else {
            "step": progress.step,
            "words": progress.words,
            "percent": progress.percent,
            "eta_s": progress.eta_s,
        },
        "steps": [
            {
                "id": step.planned.id,
                "words": step.planned.words,
                "undo": step.planned.undo,
                "state": step.state,
                "evidence": step.words,
                "lines": list(step.lines),
                "began_at": None if step.began is None else moment(step.began),
                "ended_at": None if step.ended is None else moment(step.ended),
            }
            for step in view.steps
        ],
        "notices": [{"at": moment(notice.at), "words": notice.words} for notice in view.notices],
        "kernel": [{"at": moment(line.at), "words": line.words} for line in view.kernel],
        "changes": [
            {"machine": change.machine, "path": change.path, "diff": list(change.diff())}
            for change in view.plan.changes
        ],
    }


def moment(at: float) -> str:
    """Unix seconds as ISO 8601 in UTC, to the millisecond."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def local_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def job_rows(views: tuple[JobView, ...]) -> tuple[Line, ...]:
    """A line for each job, newest first: id, state, how long, what, by whom; below it why it failed."""
    wide = max((len(view.id) for view in views), default=0)
    return tuple(line for view in views for line in _rows(view, wide))


def _rows(view: JobView, wide: int) -> Iterator[Line]:
    state = view.state.replace("-", " ")
    took = words.span(None if view.ended_at is None else view.ended_at - view.created_at)
    tone = STATES[view.state]
    yield Line(_cut(f"{view.id:<{wide}}  {state:<11}  {took:>6}  {view.plan.title}, {view.actor.user}"), tone)
    for reason in view.reasons[:1]:
        yield Line(_cut(f"{'':<{wide}}  {reason}"), "dim")


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def job_lines(view: JobView) -> tuple[Line, ...]:
    """One job whole: who, what, why, its steps, and how it ended."""
    return tuple(_job_lines(view))


def _job_lines(view: JobView) -> Iterator[Line]:
    yield Line(f"{view.plan.title}: {view.state.replace('-', ' ')}", STATES[view.state])
    for reason in view.reasons:
        yield from wrapped(reason, "because ", STATES[view.state])
    yield Line(f"job      {view.id}")
    connection = f" from {view.actor.connection.split()[0]}" if view.actor.connection else ""
    yield Line(f"by       {view.actor.user}{connection}")
    if view.note:
        yield from wrapped(view.note, "why      ")
    ended = "" if view.ended_at is None else f", took {words.span(view.ended_at - view.created_at)}"
    yield Line(f"begun    {local_time(view.created_at)}{ended}")
    if view.state == "running":
        yield Line(f"process  {view.pid}")
    yield Line("")
    for number, step in enumerate(view.steps, 1):
        yield from step_lines(view, number, step)
    if view.progress is not None:
        yield from wrapped(progress_words(view.progress), _INDENT)
    for line in view.kernel:
        yield from wrapped(line.words, "kernel   ", "warn")
    for notice in view.notices:
        yield from wrapped(notice.words, "note     ", "warn")


def step_lines(view: JobView, number: int, step: StepView) -> Iterator[Line]:
    """A step as it stands, with what was seen of it, and when it failed the lines that show why."""
    mark, tone = STEPS[step.state]
    taken = None if step.began is None or step.ended is None else step.ended - step.began
    back = step.state in ("undoing", "undone", "undo-failed") and step.planned.undo
    text = step.planned.undo if back and step.planned.undo else step.planned.words
    evidence = f": {step.words}" if step.words and step.state not in ("doing", "undoing") else ""
    seconds = f" ({words.span(taken)})" if taken is not None and taken >= 1 else ""
    head = f"{number:>3}/{len(view.steps):<3} {mark:<7} "
    yield from wrapped(f"{text}{evidence}{seconds}", head, tone)
    if step.state in ("failed", "undo-failed"):
        for line in step.lines:
            yield from wrapped(line, f"{_INDENT}| ", "dim")


def progress_words(progress: Progress) -> str:
    """``weights, shard 31/64, 48 %, 2m10 left``."""
    percent = "" if progress.percent is None else f", {progress.percent:.0f} %"
    left = "" if progress.eta_s is None else f", {words.span(progress.eta_s)} left"
    return f"{progress.words}{percent}{left}"


def wrapped(text: str, head: str, tone: Tone = "plain") -> Iterator[Line]:
    indent = " " * len(head)
    for line in textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    ) or [head.rstrip()]:
        yield Line(line, tone)
