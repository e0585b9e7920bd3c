"""A plan as the commands print it: a document for machines, lines for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from console.model.finding import overall
from console.model.operation import FileChange, Plan
from console.model.report import WIDTH, Line, Tone, finding_lines

PLAN_SCHEMA = 1

_INDENT = " " * 5


def plan_document(plan: Plan) -> dict[str, Any]:
    """The document of ``--dry-run --json``. ``deadline_s`` in seconds; None: there is nothing to undo."""
    return {
        "schema": PLAN_SCHEMA,
        "made_at": datetime.fromtimestamp(plan.made_at, UTC).isoformat(timespec="seconds"),
        "action": plan.action,
        "title": plan.title,
        "target": plan.target,
        "blocked": plan.blocked,
        "verdict": overall(plan.findings),
        "costs": list(plan.costs),
        "findings": [
            {
                "id": finding.id,
                "title": finding.title,
                "verdict": finding.verdict,
                "evidence": finding.evidence,
                "remedy": finding.remedy,
            }
            for finding in plan.findings
        ],
        "steps": [
            {"id": step.id, "words": step.words, "undo": step.undo, "deadline_s": step.deadline_s}
            for step in plan.steps
        ],
        "changes": [
            {"machine": change.machine, "path": change.path, "diff": list(change.diff())}
            for change in plan.changes
        ],
    }


def plan_lines(plan: Plan) -> tuple[Line, ...]:
    """What it costs, what was found, what would be done and taken back, and what files become."""
    return tuple(_lines(plan))


def _lines(plan: Plan) -> Iterator[Line]:
    yield Line(plan.title, "bad" if plan.blocked else "good")
    for cost in plan.costs:
        yield from _wrapped(cost, "  ")
    yield from _heading("checks")
    yield from finding_lines(plan.findings)
    yield from _heading("steps")
    width = len(str(len(plan.steps)))
    for number, step in enumerate(plan.steps, 1):
        yield from _wrapped(step.words, f"  {number:>{width}}  ")
        if step.undo is not None:
            yield from _wrapped(f"back: {step.undo}", _INDENT + " " * width, "dim")
    for change in plan.changes:
        yield from _heading(f"changes on {change.machine}")
        yield from _diff(change)
    if plan.blocked:
        yield Line("")
        yield Line("The pre-flight forbids it: nothing is changed.", "bad")


def _heading(text: str) -> Iterator[Line]:
    yield Line("")
    yield Line(text.upper(), "dim")


def _wrapped(text: str, indent: str, tone: Tone = "plain") -> Iterator[Line]:
    for line in textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent), break_on_hyphens=False
    ):
        yield Line(line, tone)


def _diff(change: FileChange) -> Iterator[Line]:
    """Whole lines, however long: what is compared must not be cut."""
    lines = change.diff()
    if not lines:
        yield Line(f"  {change.path} stays as it is")
    for line in lines:
        tone: Tone = "plain"
        if line.startswith(("+++", "---", "@@")):
            tone = "dim"
        elif line.startswith("+"):
            tone = "good"
        elif line.startswith("-"):
            tone = "bad"
        yield Line(line, tone)
