"""The one shape in which every check answers: verdict, evidence, remedy."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["pass", "fail", "warn", "unknown", "skipped"]

_WORST: tuple[Verdict, ...] = ("fail", "unknown", "warn", "pass", "skipped")


class Finding(msgspec.Struct, frozen=True):
    """One answer. ``id`` is stable; ``evidence`` is what was seen; ``remedy`` is what to do about it."""

    id: str
    title: str
    verdict: Verdict
    evidence: str = ""
    remedy: str | None = None


def overall(findings: tuple[Finding, ...] | list[Finding]) -> Verdict:
    """The worst verdict present: fail, then unknown, warn, pass; skipped when there is nothing else."""
    present = {finding.verdict for finding in findings}
    return next((verdict for verdict in _WORST if verdict in present), "skipped")
