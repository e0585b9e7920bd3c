"""An audit as it is told: one JSON document, or dense lines of text; the screen uses the same words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from console.model.configuration import Item, Sameness
from console.model.finding import Finding, Verdict
from console.model.report import WIDTH, Line, Tone, finding_lines

AUDIT_SCHEMA = 1

MARKS: dict[Sameness, str] = {"missing": "x", "different": "!", "unknown": "?", "added": "+", "same": "="}

_TONES: dict[Verdict, Tone] = {
    "pass": "good",
    "fail": "bad",
    "warn": "warn",
    "unknown": "warn",
    "skipped": "dim",
}


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """One audit. ``answer`` says it in a sentence; ``profile`` is the name compared with, if there is one.

    ``findings`` are the worst first; ``items`` what is wrong first.
    """

    answer: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    items: tuple[Item, ...] = ()
    profile: str | None = None


def audit_document(found: Audit) -> dict[str, Any]:
    """The document of ``gpuops audit --json``. Names are stable while ``schema`` is 1."""
    names = ("kind", "name", "profile", "reference", "effective", "verdict", "allowed", "where")
    return {
        "schema": AUDIT_SCHEMA,
        "answer": found.answer,
        "verdict": found.verdict,
        "profile": found.profile,
        "findings": list(found.findings),
        "items": [{name: getattr(item, name) for name in names} for item in found.items],
    }


def audit_lines(found: Audit) -> tuple[Line, ...]:
    """For a person: the answer, the findings, then every flag and variable."""
    head = [
        Line(text, _TONES[found.verdict])
        for text in textwrap.wrap(found.answer, WIDTH, break_on_hyphens=False)
    ]
    lines = [*head, Line(""), *finding_lines(found.findings)]
    if found.items:
        lines += [Line(""), *_table(found.items)]
    return tuple(lines)


def _table(items: tuple[Item, ...]) -> Iterator[Line]:
    width = max(len(item.label) for item in items)
    for item in items:
        head = f"{MARKS[item.verdict]} {item.label:<{width}}  {item.effective or '-'}"
        remark = remark_of(item)
        tone = tone_of(item)
        if len(head) + len(remark) + 2 <= WIDTH or not remark:
            yield Line(f"{head}  {remark}".rstrip(), tone)
        else:
            yield Line(head, tone)
            yield from (
                Line(text, tone)
                for text in textwrap.wrap(
                    remark, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
                )
            )


def tone_of(item: Item) -> Tone:
    """How much it matters: what is wrong is bad, what nobody allowed is a warning."""
    if item.verdict == "same":
        return "plain"
    if item.allowed is not None:
        return "dim"
    return "bad" if item.verdict in ("missing", "different") else "warn"


def remark_of(item: Item, *, short: bool = False) -> str:
    """What is to be said of an item beside its value; ``short``: its tone says that it is allowed."""
    parts = []
    if item.verdict in ("missing", "different", "unknown"):
        base, expected = ("benchmark", item.reference) if item.reference else ("profile", item.profile)
        parts.append(f"{base} {expected}")
    if item.verdict == "unknown":
        parts.append("could not be seen")
    if item.allowed is not None:
        parts.append(item.allowed if short else f"allowed: {item.allowed}")
    elif item.verdict == "added":
        parts.append("may change the numbers")
    return "; ".join(parts)
