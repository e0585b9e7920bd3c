"""The service's state, derived by one pure function from everything that was read.

Busy is not hung: token counters that move mean alive, whatever ``/health`` says.
"Active (running)" is not ready, and neither is "fired up" in a log nor a lone 200.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from console.model.engine import EngineIdentity, EngineRates, Probe
from console.model.log import LoadProgress, Phase
from console.model.reading import Reading
from console.model.unit import UnitStatus

StateName = Literal[
    "stopped",
    "starting",
    "warming-up",
    "ready",
    "busy",
    "hung",
    "degraded",
    "stopping",
    "crashed",
    "crash-looping",
    "unreachable",
]

#: States in which an operator may rely on the service.
HEALTHY: frozenset[StateName] = frozenset({"ready", "busy"})

#: Token counters that moved within this many seconds prove a living scheduler.
ALIVE_S = 10.0

#: Requests in flight and no token for this long: the scheduler hangs. SGLang's own health
#: check gives up after 20 s (SGLANG_HEALTH_CHECK_TIMEOUT).
HUNG_S = 20.0

#: A health answer slower than this, in seconds, is worth telling. A healthy one takes about 1 s.
SLOW_HEALTH_S = 5.0

#: systemd starts the service again this often before we call it a loop.
LOOP_RESTARTS = 2

#: Below this accept length speculation costs more than it gains.
POOR_ACCEPT_LENGTH = 1.2

_KV_FULL = 0.95
_RETRACTIONS_PER_MIN = 6.0


class ServiceState(msgspec.Struct, frozen=True, kw_only=True):
    """What the service is doing, with everything that was held against it."""

    name: StateName
    phase: Phase | None = None  # while starting
    percent: float | None = None  # 0..100 within the phase
    detail: str | None = None  # "shard 31/64"
    elapsed_s: float | None = None  # since the unit's main process was executed
    eta_s: float | None = None  # seconds to ready, by what the profile expects
    reasons: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """As it is written on the screen: ``STARTING weights 45 %``."""
        text = self.name.replace("-", " ").upper()
        if self.name == "starting" and self.phase is not None:
            text += f" {self.phase}"
            if self.percent is not None:
                text += f" {self.percent:.0f} %"
        return text


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that the state is derived from. Times are monotonic seconds unless they say Unix."""

    now: float
    wall: float  # Unix seconds at ``now``
    unit: Reading[UnitStatus]
    health: Reading[Probe]
    ready: Reading[Probe]
    models: Reading[Probe]
    rates: Reading[EngineRates]
    identity: EngineIdentity | None = None
    served_names: tuple[str, ...] = ()
    load: LoadProgress = LoadProgress(None)
    tokens_moved_at: float | None = None  # when a token counter was last seen to move
    waiting_since: float | None = None  # since when requests are in flight without a token
    expected_name: str | None = None
    expected_load_s: float | None = None
    complaints: tuple[str, ...] = ()  # what cards, holders and files have to say


def derive(evidence: Evidence) -> ServiceState:
    """The one state that fits the evidence; the rules are tried from the most certain down."""
    unit = evidence.unit.value
    if unit is None:
        return _without_unit(evidence)
    if unit.load_state == "not-found":
        return _not_the_unit(evidence, f"there is no unit {unit.id}")
    if unit.load_state in ("bad-setting", "error", "masked"):
        return _not_the_unit(evidence, f"unit {unit.id} is {unit.load_state}: systemctl status {unit.id}")
    if unit.active_state == "failed" or unit.sub_state.startswith("auto-restart"):
        return _dead(evidence, unit)
    if unit.active_state == "inactive":
        return _not_the_unit(evidence, None)
    if unit.active_state == "deactivating":
        return ServiceState(name="stopping", reasons=_draining(evidence))
    return _running(evidence, unit)


def _without_unit(evidence: Evidence) -> ServiceState:
    """systemd did not answer: the engine's own words have to do."""
    reason = evidence.unit.error
    answered = evidence.models.value is not None and evidence.models.value.status is not None
    if answered or evidence.load.phases or evidence.load.crash:
        state = _running(evidence, None)
        if reason is None or state.name in ("crashed", "hung"):
            return state
        name: StateName = "degraded" if state.name in HEALTHY else state.name
        return msgspec.structs.replace(state, name=name, reasons=(*state.reasons, f"unit unknown: {reason}"))
    engine = evidence.models.value
    reasons = tuple(
        text
        for text in (
            f"unit: {reason}" if reason else None,
            f"engine: {_why_silent(engine)}" if engine is not None else None,
        )
        if text
    )
    return ServiceState(name="unreachable", reasons=reasons or ("nothing has answered yet",))


def _not_the_unit(evidence: Evidence, reason: str | None) -> ServiceState:
    """The unit does not run. Whatever answers on the port then is not it."""
    models = evidence.models.value
    reasons = () if reason is None else (reason,)
    if models is not None and models.ok:
        return ServiceState(
            name="degraded",
            reasons=(*reasons, "something that is not the unit answers at the service's address"),
        )
    return ServiceState(name="stopped", reasons=reasons)


def _dead(evidence: Evidence, unit: UnitStatus) -> ServiceState:
    crash = evidence.load.crash
    reason = crash.reason if crash is not None else _ended(unit)
    reasons = [reason]
    if crash is not None and crash.remedy:
        reasons.append(crash.remedy)
    restarts = unit.restarts or 0
    looping = unit.result == "start-limit-hit" or restarts >= LOOP_RESTARTS
    if looping:
        tail = "systemd gave up" if unit.active_state == "failed" else "systemd will start it again"
        reasons.append(f"started again {restarts} times; {tail}")
    return ServiceState(name="crash-looping" if looping else "crashed", reasons=tuple(reasons))


def _ended(unit: UnitStatus) -> str:
    how = {"killed": "killed by signal", "dumped": "dumped core on signal"}.get(
        unit.exit_code or "", "exit status"
    )
    status = "unknown" if unit.exit_status is None else str(unit.exit_status)
    return f"result {unit.result}, {how} {status}"


def _draining(evidence: Evidence) -> tuple[str, ...]:
    rates = evidence.rates.current(evidence.now)
    running = None if rates is None else rates.requests_running
    return () if not running else (f"draining {running} requests",)


def _running(evidence: Evidence, unit: UnitStatus | None) -> ServiceState:
    """The unit's process is there; how far is it, and does it work?"""
    crash = evidence.load.crash
    if crash is not None:
        remedy = (crash.remedy,) if crash.remedy else ()
        return ServiceState(name="crashed", reasons=(crash.reason, *remedy))
    if _moving(evidence):
        return _serving(evidence, unit)
    silence = _silent_for_good(evidence)
    if silence is not None:
        return ServiceState(name="hung", reasons=(silence,))
    models = evidence.models.value
    if models is None:
        if evidence.load.fired_up_at is None and evidence.load.phases:
            return _starting(evidence, unit)
        return ServiceState(name="unreachable", reasons=(evidence.models.error or "no answer yet",))
    if models.error == "refused":
        if evidence.load.fired_up_at is not None:
            return ServiceState(name="crashed", reasons=("the engine no longer listens, though it was up",))
        return _starting(evidence, unit)
    if models.status in (401, 403):
        return _serving(evidence, unit)
    if not models.ok:
        return ServiceState(name="unreachable", reasons=(_why_silent(models),))
    if _warming(evidence):
        return _starting(evidence, unit, warming=True)
    return _serving(evidence, unit)


def _moving(evidence: Evidence) -> bool:
    moved = evidence.tokens_moved_at
    return moved is not None and evidence.now - moved <= ALIVE_S


def _silent_for_good(evidence: Evidence) -> str | None:
    """Why the engine is hung, or None when that is not certain."""
    waiting = evidence.waiting_since
    if waiting is not None and evidence.now - waiting >= HUNG_S:
        return f"requests are in flight and no token came for {evidence.now - waiting:.0f} s"
    if evidence.load.fired_up_at is None and evidence.tokens_moved_at is None:
        return None
    health, models = evidence.health.value, evidence.models.value
    if health is None or health.ok or health.error == "refused":
        return None
    if models is not None and models.error == "timeout":
        return "the engine accepts connections and answers nothing"
    if health.error == "timeout" or (health.status == 503 and health.seconds >= HUNG_S - 1):
        return f"no token came back within {health.seconds:.0f} s of a health check"
    return None


def _warming(evidence: Evidence) -> bool:
    """Bound and answering, but its first generation has not come back."""
    ready, health = evidence.ready.value, evidence.health.value
    if ready is not None and ready.status in (200, 503):
        return ready.status == 503
    if health is not None and health.status is not None:
        return health.status == 503 and health.seconds < HUNG_S - 1
    return bool(evidence.load.phases) and evidence.load.fired_up_at is None


def _starting(evidence: Evidence, unit: UnitStatus | None, *, warming: bool = False) -> ServiceState:
    began = unit.started_at if unit is not None else None
    if began is None and evidence.load.phases:
        began = evidence.load.phases[0].began
    elapsed = None if began is None else max(0.0, evidence.wall - began)
    eta = None
    reasons: tuple[str, ...] = ()
    if elapsed is not None and evidence.expected_load_s is not None:
        eta = evidence.expected_load_s - elapsed
        if eta < 0:
            reasons = (f"{-eta:.0f} s longer than the profile expects",)
            eta = None
    restarts = 0 if unit is None else unit.restarts or 0
    if restarts:
        reasons = (*reasons, f"attempt {restarts + 1} after a crash")
    current = evidence.load.phase
    name: StateName = "warming-up" if warming or (current and current.phase == "warm-up") else "starting"
    if restarts > LOOP_RESTARTS:
        name = "crash-looping"
    return ServiceState(
        name=name,
        phase="warm-up" if name == "warming-up" else (current.phase if current else "starting"),
        percent=current.percent if current else None,
        detail=current.detail if current else None,
        elapsed_s=elapsed,
        eta_s=eta,
        reasons=reasons,
    )


def _serving(evidence: Evidence, unit: UnitStatus | None) -> ServiceState:
    """It answers: ready, busy, or something is wrong all the same."""
    reasons = (*_engine_complaints(evidence, unit), *evidence.complaints)
    if reasons:
        return ServiceState(name="degraded", reasons=reasons)
    health = evidence.health.value
    if health is not None and (not health.ok or health.seconds > SLOW_HEALTH_S):
        said = f"{health.status}" if health.status is not None else f"{health.error}"
        return ServiceState(
            name="busy", reasons=(f"/health {said} after {health.seconds:.0f} s, but tokens move",)
        )
    if health is None:
        return ServiceState(name="ready", reasons=("/health has not answered yet",))
    return ServiceState(name="ready")


def _engine_complaints(evidence: Evidence, unit: UnitStatus | None) -> tuple[str, ...]:
    found: list[str] = []
    models = evidence.models.value
    if models is not None and models.status in (401, 403):
        found.append("the engine wants an API key: service.api_key_file in the site file")
    expected = evidence.expected_name
    if expected and evidence.served_names and expected not in evidence.served_names:
        found.append(f"serves {', '.join(evidence.served_names)}, not {expected}")
    rates = evidence.rates.current(evidence.now)
    if rates is not None:
        found.extend(_rate_complaints(rates))
    if unit is not None and unit.need_daemon_reload:
        found.append("the unit file changed since it was loaded: systemctl daemon-reload")
    return tuple(found)


def _rate_complaints(rates: EngineRates) -> list[str]:
    found = []
    if rates.kv_usage_ratio is not None and rates.kv_usage_ratio >= _KV_FULL and rates.requests_queued:
        found.append(f"KV cache {rates.kv_usage_ratio:.0%} full with {rates.requests_queued} requests queued")
    if rates.retractions_per_min is not None and rates.retractions_per_min >= _RETRACTIONS_PER_MIN:
        found.append(f"{rates.retractions_per_min:.0f} retractions a minute: the KV cache is too small")
    if rates.accept_length is not None and 0 < rates.accept_length < POOR_ACCEPT_LENGTH:
        found.append(f"accept length {rates.accept_length:.2f}: speculation costs more than it gains")
    return found


def _why_silent(probe: Probe) -> str:
    if probe.error == "refused":
        return "connection refused"
    said = probe.error or f"HTTP {probe.status}"
    return f"{said}: {probe.detail}" if probe.detail else said
