"""What the commands print: a snapshot or findings as one JSON document, or as a few dense lines of text."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from console.model import words
from console.model.card import CardView
from console.model.engine import EngineRates
from console.model.finding import Finding, Verdict, overall
from console.model.load_times import phase_seconds
from console.model.snapshot import Snapshot, SourceWord
from console.model.state import HEALTHY, StateName

STATUS_SCHEMA = 1
FINDINGS_SCHEMA = 1

#: Columns of the text report: the narrowest terminal that people still use.
WIDTH = 80

Tone = Literal["plain", "good", "warn", "bad", "dim"]

_UNKNOWN = "-"
_BAD: frozenset[StateName] = frozenset({"hung", "crashed", "crash-looping", "unreachable"})


class Line(NamedTuple):
    """One line of the text report, and what it is: the terminal gives it a colour or does not."""

    text: str
    tone: Tone = "plain"


def status_document(snapshot: Snapshot) -> dict[str, Any]:
    """The document of ``gpuops status --json``. What is not available is None, never 0.

    Names are stable: none is taken away or changes its unit while ``schema`` is 1.
    Units are in the names; ratios are 0..1; ``stale_s`` is an age in seconds, None while
    the value is fresh.
    """
    from datetime import UTC, datetime

    state = snapshot.state
    taken_at = datetime.fromtimestamp(snapshot.wall, UTC).isoformat(timespec="milliseconds")
    return {
        "schema": STATUS_SCHEMA,
        "taken_at": taken_at.replace("+00:00", "Z"),
        "host": snapshot.host,
        "state": {
            "name": state.name,
            "phase": state.phase,
            "percent": _number(state.percent),
            "detail": state.detail,
            "elapsed_s": _number(state.elapsed_s),
            "eta_s": _number(state.eta_s),
            "reasons": list(state.reasons),
        },
        "load": _load(snapshot),
        "profile": snapshot.profile.name if snapshot.profile is not None else None,
        "served_name": next(iter(snapshot.served_names), None),
        "cards": [_card(card) for card in snapshot.cards],
        "engine": _engine(snapshot),
        "unit": _unit(snapshot),
        "driver_version": snapshot.driver_version,
        "holders": None
        if snapshot.holders_at is None
        else [
            {
                "pid": holder.pid,
                "name": holder.name,
                "container": holder.container,
                "unit": holder.unit,
                "memory_bytes": dict(holder.memory_bytes),
                "orphan": holder.orphan,
            }
            for holder in snapshot.holders
        ],
        "sources": [
            {"name": word.name, "age_s": _number(word.age_s), "stale": word.stale, "error": word.error}
            for word in snapshot.sources
        ],
        "notices": list(snapshot.notices),
    }


def healthy(snapshot: Snapshot) -> bool:
    """Whether an operator may rely on the service: exit status 0."""
    return snapshot.state.name in HEALTHY


def _card(card: CardView) -> dict[str, Any]:
    seen = card.telemetry
    return {
        "address": card.pci.address,
        "index": card.index,
        "name": seen.name if seen is not None else None,
        "owner": str(card.owner),
        "driver": card.pci.driver,
        "memory_used_bytes": seen.memory_used_bytes if seen is not None else None,
        "memory_total_bytes": seen.memory_total_bytes if seen is not None else None,
        "utilization_percent": seen.utilization_percent if seen is not None else None,
        "temperature_c": seen.temperature_c if seen is not None else None,
        "power_w": _number(seen.power_w) if seen is not None else None,
        "stale_s": _number(card.stale_s),
        "problems": list(card.problems),
    }


def _engine(snapshot: Snapshot) -> dict[str, Any]:
    rates = snapshot.rates.value or EngineRates()
    return {
        "version": snapshot.identity.version if snapshot.identity is not None else None,
        "decode_tokens_per_s": _number(rates.decode_tokens_per_s),
        "prefill_tokens_per_s": _number(rates.prefill_tokens_per_s),
        "accept_length": _number(rates.accept_length),
        "requests_running": rates.requests_running,
        "requests_queued": rates.requests_queued,
        "kv_usage_ratio": _number(rates.kv_usage_ratio, 4),
        "stale_s": _number(_stale_s(snapshot)),
        "missing": dict(rates.missing),
        "notes": dict(rates.notes),
    }


def _stale_s(snapshot: Snapshot) -> float | None:
    """The age of the engine's numbers once they are stale."""
    return snapshot.rates.age(snapshot.now) if snapshot.rates.stale(snapshot.now) else None


def _unit(snapshot: Snapshot) -> dict[str, Any] | None:
    unit = snapshot.unit.value
    if unit is None:
        return None
    return {
        "id": unit.id,
        "load_state": unit.load_state,
        "active_state": unit.active_state,
        "sub_state": unit.sub_state,
        "main_pid": unit.main_pid,
        "invocation_id": unit.invocation_id,
        "restarts": unit.restarts,
        "started_at": _number(unit.started_at),
    }


def _number(value: float | None, digits: int = 3) -> float | None:
    """Rounded; JSON knows no infinity, so what is not finite is not available."""
    return round(value, digits) if value is not None and math.isfinite(value) else None


def status_lines(snapshot: Snapshot) -> tuple[Line, ...]:
    """The report for a person, in at most WIDTH columns of plain ASCII where the words allow it.

    The state and what is held against it come first, then the cards, the engine's
    numbers, and the sources that have nothing new to say.
    """
    return tuple(
        Line(line.text[:WIDTH].rstrip(), line.tone)
        for part in (
            _head(snapshot),
            _forecast(snapshot),
            _reasons(snapshot),
            _cards(snapshot),
            _numbers(snapshot),
            _late(snapshot),
        )
        for line in part
    )


def _head(snapshot: Snapshot) -> Iterator[Line]:
    state = snapshot.state
    tone: Tone = "good" if state.name in HEALTHY else "bad" if state.name in _BAD else "warn"
    told = [state.words]
    if state.detail is not None:
        told.append(state.detail)
    if state.elapsed_s is not None:
        told.append(f"{words.span(state.elapsed_s)} so far")
    if state.eta_s is not None:
        told.append(f"~{words.about(state.eta_s)} to go")
    yield Line(f"{snapshot.host}  {', '.join(told)}", tone)
    yield from _wrapped(", ".join(_serving(snapshot)), "  ", "dim")


def _forecast(snapshot: Snapshot) -> Iterator[Line]:
    """What the time to ready is judged from."""
    forecast = snapshot.state.forecast
    if forecast is not None and forecast.eta_s is not None:
        basis = forecast.basis.replace("±", "+-")
        yield Line(f"  ready in ~{words.about(forecast.eta_s)} ({basis})", "dim")


def _load(snapshot: Snapshot) -> dict[str, Any] | None:
    """The load under way; None when there is none. ``expected_s`` is of the whole load."""
    state, forecast = snapshot.state, snapshot.state.forecast
    if state.phase is None:
        return None
    slow = () if forecast is None else forecast.slow
    seconds = phase_seconds(snapshot.load, snapshot.wall)
    return {
        "expected_s": None if forecast is None else _number(forecast.expected_s),
        "loads": None if forecast is None else forecast.loads,
        "spread_s": None if forecast is None else _number(forecast.spread_s),
        "over_s": None if forecast is None else _number(forecast.over_s),
        "phases": [
            {
                "name": phase,
                "seconds": _number(taken),
                "slower_than_ever": None if forecast is None else phase in slow,
            }
            for phase, taken in seconds.items()
        ],
    }


def _serving(snapshot: Snapshot) -> Iterator[str]:
    unit = snapshot.unit.value
    if unit is None:
        yield f"{snapshot.site.service.unit} unknown"
    elif unit.load_state != "loaded":
        yield f"{unit.id} {unit.load_state}"
    else:
        since = unit.active_since if unit.active_state == "active" else unit.changed_at
        age = "" if since is None else f" for {words.span(snapshot.wall - since)}"
        yield f"{unit.id} {unit.active_state} ({unit.sub_state}){age}"
    if snapshot.profile is not None:
        yield f"profile {snapshot.profile.name}"
    if snapshot.served_names:
        yield f"serves {' '.join(snapshot.served_names)}"
    if snapshot.identity is not None and snapshot.identity.version is not None:
        yield f"SGLang {snapshot.identity.version}"


def _reasons(snapshot: Snapshot) -> Iterator[Line]:
    for reason in snapshot.state.reasons:
        yield from _wrapped(reason, "- ", "plain" if healthy(snapshot) else "warn")


def _cards(snapshot: Snapshot) -> Iterator[Line]:
    if not snapshot.cards:
        return
    yield Line("")
    yield Line(_COLUMNS.format("#", "card", "owner", "driver", "memory GiB", "util", "temp", "power"), "dim")
    for card in snapshot.cards:
        grave = card.owner.kind == "lost"
        yield Line(_card_row(card), "bad" if grave else "dim" if card.stale_s is not None else "plain")
        marks = list(card.problems)
        if card.stale_s is not None and not grave:
            marks.append(f"as of {words.span(card.stale_s)} ago")
        if marks:
            yield from _wrapped("; ".join(marks), "    ", "bad" if grave else "warn")


_COLUMNS = "{:>2}  {:<13} {:<9} {:<9} {:>14} {:>6} {:>5} {:>6}"


def _card_row(card: CardView) -> str:
    seen = card.telemetry
    owner, driver = card.owner.words[:9], (card.pci.driver or "none")[:9]
    cells = [_UNKNOWN] * 4
    if seen is not None:
        used, total = _gib(seen.memory_used_bytes), _gib(seen.memory_total_bytes)
        cells = [
            f"{used} / {total}",
            _with_unit(seen.utilization_percent, " %"),
            _with_unit(seen.temperature_c, " C"),
            _with_unit(seen.power_w, " W"),
        ]
    return _COLUMNS.format(card.index, card.pci.address, owner, driver, *cells)


def _numbers(snapshot: Snapshot) -> Iterator[Line]:
    rates = snapshot.rates.value
    if rates is None:
        return
    usage = None if rates.kv_usage_ratio is None else rates.kv_usage_ratio * 100
    accept = _UNKNOWN if rates.accept_length is None else f"{rates.accept_length:.2f}"
    yield Line("")
    yield Line(
        f"decode {_with_unit(rates.decode_tokens_per_s, ' tok/s')}   "
        f"prefill {_with_unit(rates.prefill_tokens_per_s, ' tok/s')}   accept {accept}"
    )
    yield Line(
        f"running {_with_unit(rates.requests_running, '')}   "
        f"queued {_with_unit(rates.requests_queued, '')}   KV {_with_unit(usage, ' %')}"
    )
    age = _stale_s(snapshot)
    if age is not None:
        yield Line(f"as of {words.span(age)} ago", "warn")


def _late(snapshot: Snapshot) -> Iterator[Line]:
    """Sources that failed, or whose last value is old. One that was not asked is no news."""
    late = [word for word in snapshot.sources if word.error is not None or _old(word)]
    if late:
        yield Line("")
    for word in late:
        age = "no value" if word.age_s is None else f"{words.span(word.age_s)} old"
        error = "" if word.error is None else f": {word.error}"
        yield from _wrapped(f"{word.name} {age}{error}", "! ", "warn")


def _old(word: SourceWord) -> bool:
    return word.stale and word.age_s is not None


def _wrapped(text: str, mark: str, tone: Tone) -> Iterator[Line]:
    indent = " " * len(mark)
    for line in textwrap.wrap(
        text, WIDTH, initial_indent=mark, subsequent_indent=indent, break_on_hyphens=False
    ):
        yield Line(line, tone)


def findings_document(findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The document of ``--json`` that every check shares."""
    return {"schema": FINDINGS_SCHEMA, "verdict": overall(findings), "findings": list(findings)}


#: How each verdict is marked and coloured where findings are listed.
MARKS: dict[Verdict, tuple[str, Tone]] = {
    "pass": ("ok", "good"),
    "fail": ("FAIL", "bad"),
    "warn": ("warn", "warn"),
    "unknown": ("?", "warn"),
    "skipped": ("-", "dim"),
}


def finding_lines(findings: tuple[Finding, ...]) -> tuple[Line, ...]:
    """For a person: a line a finding, and the remedy below it."""
    lines: list[Line] = []
    for finding in findings:
        mark, tone = MARKS[finding.verdict]
        head = f"{mark:<5}{finding.title}"
        text = f"{head}: {finding.evidence}" if finding.evidence else head
        wrapped = textwrap.wrap(text, WIDTH, subsequent_indent=" " * 7, break_on_hyphens=False)
        lines += [Line(line, "plain" if tone == "good" else tone) for line in wrapped]
        if finding.remedy is not None and finding.verdict != "pass":
            wrapped = textwrap.wrap(
                finding.remedy,
                WIDTH,
                initial_indent="     > ",
                subsequent_indent=" " * 7,
                break_on_hyphens=False,
            )
            lines += [Line(line) for line in wrapped]
    counts = Counter(finding.verdict for finding in findings)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in MARKS if counts[verdict])
    return (*lines, Line(""), Line(told, MARKS[overall(findings)][1]))


def _gib(size: int | None) -> str:
    return _UNKNOWN if size is None else words.gib(size)


def _with_unit(value: float | None, unit: str) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:.1f}{unit}" if isinstance(value, float) and 0 < value < 10 else f"{value:.0f}{unit}"
