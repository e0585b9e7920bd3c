"""The service panel: what the engine does right now, or how far its load is."""

from __future__ import annotations

import textwrap
from typing import ClassVar, NamedTuple

from console.model import words
from console.model.engine import EngineRates, Quantiles
from console.model.log import PHASES, PhaseTime
from console.model.snapshot import Snapshot
from console.model.state import HEALTHY
from console.ui.glyphs import Glyphs
from console.ui.layout import USUAL
from console.ui.log import without_stamp
from console.ui.panel import Panel
from console.ui.rows import Row, Span, bar, clip, fit, heading

_CELL = 26
_LABEL = 9
_NAMED = 15  # cells from which a p99 is called so

_PHASE_WORDS = {
    "starting": "start",
    "distributed": "init",
    "weights": "weights",
    "kv-cache": "KV cache",
    "graphs": "graphs",
    "host-cache": "host KV",
    "warm-up": "warm-up",
}


_DEAD = ("crashed", "crash-looping", "stopped", "unreachable")
_LOADING = ("starting", "warming-up")

#: States whose reasons are news, not trouble.
_REASON_ROWS = 3
_CALM = ("ready", "busy", "starting", "warming-up", "stopping", "stopped")


class Fact(NamedTuple):
    """A labelled value; the order in which facts are listed is their importance."""

    label: str
    value: str
    role: str = "text"


def facts(snapshot: Snapshot, room: int) -> list[Fact]:
    """What the engine does, most important first; a value has ``room`` cells."""
    rates = snapshot.rates.value or EngineRates()
    stale = snapshot.rates.stale(snapshot.now)
    role = "dim" if stale else "text"
    strong = "dim" if stale else "accent"
    speculation = _acceptance(rates)
    return [
        Fact("decode", _with(words.rate(rates.decode_tokens_per_s), " tok/s"), strong),
        Fact("accept", speculation, "dim" if rates.accept_length is None else strong),
        Fact("prefill", _with(words.rate(rates.prefill_tokens_per_s), " tok/s"), role),
        Fact("running", _requests(rates), "warn" if rates.requests_queued else role),
        Fact("KV", _kv(rates), "warn" if (rates.kv_usage_ratio or 0) > 0.95 else role),
        Fact("TTFT", _quantiles(rates.ttft, room), role),
        Fact("ITL", _quantiles(rates.itl, room), role),
        Fact("cache hit", words.percent(rates.cache_hit_ratio), role),
        Fact("e2e", _quantiles(rates.e2e, room), role),
        Fact("requests", _with(words.rate(rates.requests_per_s), "/s"), role),
        Fact("retracted", _with(words.rate(rates.retractions_per_min), "/min"), role),
        Fact("host KV", _host_cache(rates), role),
        Fact("aborted", _with(words.rate(rates.aborted_per_min), "/min"), role),
        Fact("accept %", _accept_rate(rates), role),
        *_circumstances(snapshot),
    ]


def _circumstances(snapshot: Snapshot) -> list[Fact]:
    """What does not change while the engine runs; shown where there is room for it."""
    identity = snapshot.identity
    if identity is None:
        return []
    health = snapshot.health.value
    unit = snapshot.unit.value
    drafts = identity.speculative_algorithm
    if drafts is not None and identity.speculative_steps is not None:
        drafts += f", {identity.speculative_steps} steps"
    told = {
        "health": None if health is None else words.latency(health.seconds),
        "context": None if identity.context_length is None else words.count(identity.context_length),
        "TP x DP": None if identity.tp_size is None else f"{identity.tp_size} x {identity.dp_size or 1}",
        "drafts": drafts or "off",
        "tools": identity.tool_call_parser or "no parser",
        "reasoning": identity.reasoning_parser or "no parser",
        "weights": _gib_each(identity.weight_gb),
        "KV memory": _gib_each(identity.kv_cache_gb),
        "graphs": _gib_each(identity.graph_gb),
        "at most": None
        if identity.max_running_requests is None
        else f"{identity.max_running_requests} requests",
        "driver": snapshot.driver_version,
        "at boot": None if unit is None else unit.unit_file_state,
        "profile": None if snapshot.profile is None else snapshot.profile.name,
    }
    return [Fact(label, value, "text") for label, value in told.items() if value is not None]


def _gib_each(size: float | None) -> str | None:
    return None if size is None else f"{size:.1f} GiB a card"


def _with(text: str, unit: str) -> str:
    return text if text == words.UNKNOWN else text + unit


def _acceptance(rates: EngineRates) -> str:
    if rates.accept_length is not None:
        return f"{rates.accept_length:.2f} tok/step"
    return "n/a" if "off" in rates.missing.get("accept_length", "") else words.UNKNOWN


def _accept_rate(rates: EngineRates) -> str:
    return "n/a" if rates.accept_rate is None else words.percent(rates.accept_rate)


def _requests(rates: EngineRates) -> str:
    if rates.requests_running is None:
        return words.UNKNOWN
    queued = f", {rates.requests_queued} queued" if rates.requests_queued is not None else ""
    return f"{rates.requests_running}{queued}"


def _kv(rates: EngineRates) -> str:
    if rates.kv_usage_ratio is None:
        return words.UNKNOWN
    total = f" of {words.count(rates.kv_total_tokens)}" if rates.kv_total_tokens else ""
    return words.percent(rates.kv_usage_ratio) + total


def _quantiles(found: Quantiles, room: int) -> str:
    """p50 and p99, named where there is room for it."""
    if found.p50 is None:
        return words.UNKNOWN
    half, most = words.latency(found.p50), words.latency(found.p99)
    return f"{half} p99 {most}" if room >= _NAMED else f"{half} {most}"


def _host_cache(rates: EngineRates) -> str:
    if not rates.hicache_total_tokens:
        return "n/a"
    used = rates.hicache_used_tokens
    return f"{words.count(used)} of {words.count(rates.hicache_total_tokens)}"


def phase_rows(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Row]:
    """The phases of the load, each with its time; the one under way with a bar."""
    rows: list[Row] = []
    forecast = snapshot.state.forecast
    slow = forecast.slow if forecast is not None else ()
    for phase in snapshot.load.phases:
        current = phase is snapshot.load.phases[-1] and phase.ended is None
        took = (phase.ended if phase.ended is not None else snapshot.wall) - phase.began
        mark = Span(f" {glyphs.work} ", "warn") if current else Span(f" {glyphs.dot} ", "good")
        name = Span(f"{_PHASE_WORDS[phase.phase]:<9}", "text" if current else "dim")
        time = Span(f"{words.span(took):>6} ", "text" if current else "dim")
        row: Row = [mark, name, time]
        if current and phase.percent is not None:
            room = min(40, max(0, width - 40))
            row += [*bar(phase.percent / 100, room, glyphs), Span(f" {phase.percent:.0f} %", "text")]
        if current and phase.detail:
            row.append(Span(f"  {phase.detail}", "dim"))
        if phase.phase in slow:
            row.append(Span(f"  {glyphs.warn} slower than ever", "warn"))
        rows.append(row)
    return rows


def forecast_row(snapshot: Snapshot, width: int, glyphs: Glyphs) -> Row | None:
    """When it will be ready, and what that is judged from; None when nobody can say, or it is late."""
    forecast = snapshot.state.forecast
    if forecast is None or forecast.eta_s is None:
        return None
    so_far = "" if snapshot.state.elapsed_s is None else f"{words.span(snapshot.state.elapsed_s)} so far, "
    told = f"{so_far}ready in ~{words.about(forecast.eta_s)} "
    return [
        Span(f" {glyphs.separator} ", "dim"),
        Span(clip(told, max(0, width - 4), glyphs), "text"),
        Span(clip(f"({forecast.basis})", max(0, width - 4 - len(told)), glyphs), "dim"),
    ]


def coming_rows(snapshot: Snapshot, glyphs: Glyphs) -> list[Row]:
    """The phases that a load has still before it; a host cache only shows once it is there."""
    last = max(PHASES.index(phase.phase) for phase in snapshot.load.phases)
    return [
        [Span(f" {glyphs.idle} {_PHASE_WORDS[phase]}", "dim")]
        for phase in PHASES[last + 1 :]
        if phase != "host-cache"
    ]


def phase_line(phases: tuple[PhaseTime, ...], wall: float, glyphs: Glyphs) -> Row:
    """All phases on one row, for a low panel: ``init 12s · weights 45 %``."""
    row: Row = [Span(" ")]
    for phase in phases:
        took = (phase.ended if phase.ended is not None else wall) - phase.began
        row += [Span(f" {glyphs.separator} ", "dim")] if len(row) > 1 else []
        row.append(Span(f"{_PHASE_WORDS[phase.phase]} ", "dim" if phase.ended else "warn"))
        row.append(Span(words.span(took), "dim" if phase.ended else "text"))
    return row


class Service(Panel):
    """Numbers while it serves, phases while it loads, the cause when it died."""

    TITLE = "SERVICE"
    HELP: ClassVar[str] = (
        "decode   generated tokens a second, from the engine's counters over 3 s.\n"
        "accept   tokens per verify step of speculative decoding: 1.00 gains nothing. n/a: it is off.\n"
        "prefill  prompt tokens computed a second; cached ones do not count.\n"
        "KV       the fullest cache pool, of all its tokens. Retractions begin when it is full.\n"
        "TTFT, ITL, e2e  p50 and p99 over the last minute: time to first token, between tokens, whole.\n"
        "cache hit  share of prompt tokens found in the prefix cache over the last minute."
    )

    def wanted(self, snapshot: Snapshot, width: int) -> int:
        """Rows in which there is something to say: a load has its phases, a death its evidence."""
        if not (_loading(snapshot) or snapshot.state.name in _DEAD):
            return USUAL
        said = 1 + len(_reasons(snapshot, width, self.glyphs))
        if _loading(snapshot):
            told = forecast_row(snapshot, width, self.glyphs) is not None
            return said + told + len(PHASES)
        return max(USUAL, said + len(_evidence(snapshot, width, self.glyphs)))

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        rows = [heading(self.TITLE, self._note(snapshot), width, self.glyphs)]
        left = height - 1
        reasons = _reasons(snapshot, width, self.glyphs)
        if _loading(snapshot) and snapshot.load.phases:
            rows += _as_many(reasons, max(0, left - 1))
            return [*rows, *_phases(snapshot, width, height - len(rows), self.glyphs)]
        if snapshot.state.name in _DEAD:
            known = reasons or [[Span(" no more is known", "dim")]]
            return [*rows, *known, *_evidence(snapshot, width, self.glyphs)][:height]
        rows += _as_many(reasons, max(1, left - 2))
        return rows + self._grid(snapshot, width, height - len(rows))

    def _note(self, snapshot: Snapshot) -> Row:
        unit = snapshot.unit.value
        row: Row = [Span(snapshot.site.service.unit, "text")]
        if unit is not None:
            parts = [f"pid {unit.main_pid}" if unit.main_pid else f"{unit.active_state}/{unit.sub_state}"]
            if unit.restarts:
                parts.append(f"{unit.restarts} restarts")
            if unit.memory_bytes:
                parts.append(f"RAM {words.size(unit.memory_bytes)}")
            row.append(Span(f" {self.glyphs.separator} ".join(["", *parts]), "dim"))
        identity = snapshot.identity
        if identity is not None and identity.version:
            row.append(Span(f" {self.glyphs.separator} SGLang {identity.version}", "dim"))
        age = snapshot.rates.age(snapshot.now)
        serving = snapshot.state.name in (*HEALTHY, "degraded", "hung")
        if serving and snapshot.rates.stale(snapshot.now) and age is not None:
            row.append(Span(f" {self.glyphs.separator} {words.span(age)} old", "warn"))
        return row

    def _grid(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        """Facts in columns, read downwards in order of importance within the rows there are."""
        columns = max(1, width // _CELL)
        across = width // columns
        room = across - _LABEL - 3
        shown = facts(snapshot, room)[: columns * max(0, height)]
        rows: list[Row] = []
        for start in range(0, len(shown), columns):
            row: Row = []
            for fact in shown[start : start + columns]:
                value = clip(fact.value, room, self.glyphs)
                cell = [Span(f" {fact.label:<{_LABEL}} ", "dim"), Span(value, fact.role)]
                row += fit(cell, across)
            rows.append(row)
        return rows


def _loading(snapshot: Snapshot) -> bool:
    state = snapshot.state
    return state.name in _LOADING or (state.name == "crash-looping" and state.phase is not None)


def _phases(snapshot: Snapshot, width: int, room: int, glyphs: Glyphs) -> list[Row]:
    """A row a phase, those to come as well; with less room what is past is one row."""
    begun = phase_rows(snapshot, width, glyphs)
    to_come = coming_rows(snapshot, glyphs)
    told = forecast_row(snapshot, width, glyphs)
    if told is not None and len(begun) < room:
        return [told, *begun, *to_come][:room]
    if len(begun) <= room:
        return [*begun, *to_come][:room]
    if room < 2:
        return begun[-1:] if room else []
    return [phase_line(snapshot.load.phases, snapshot.wall, glyphs), *begun[-(room - 1) :]]


def _evidence(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Row]:
    crash = snapshot.load.crash
    if crash is None:
        return []
    lines = map(without_stamp, crash.lines)
    return [[Span("   " + clip(line, max(0, width - 4), glyphs), "dim")] for line in lines]


def _as_many(reasons: list[Row], room: int) -> list[Row]:
    """The first reasons, and how many more there are."""
    hidden = len(reasons) - room
    if hidden <= 0 or room <= 0:
        return reasons[: max(0, room)]
    *shown, last = reasons[:room]
    return [*shown, [last[0], Span(f"(+{hidden} more) ", "dim"), *last[1:]]]


def _reasons(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Row]:
    severe = snapshot.state.name in ("crashed", "crash-looping", "hung", "unreachable")
    mark, role = (glyphs.bad, "bad") if severe else (glyphs.warn, "warn")
    if snapshot.state.looking or snapshot.state.name in _CALM:
        mark, role = glyphs.separator, "dim"
    remedy = snapshot.load.crash.remedy if snapshot.load.crash is not None else None
    rows: list[Row] = []
    for reason in snapshot.state.reasons:
        sign, colour = (glyphs.remedy, "accent") if severe and reason == remedy else (mark, role)
        # What killed the engine, and what to do, are read whole; anything else is one row.
        parts = textwrap.wrap(reason, max(20, width - 4), break_on_hyphens=False) if severe else [reason]
        for part in parts[:_REASON_ROWS]:
            rows.append([Span(f" {sign} ", colour), Span(clip(part, max(0, width - 4), glyphs), colour)])
            sign = " "
    return rows
