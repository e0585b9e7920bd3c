"""The service's state, derived by one pure function from everything that was read.

Busy is not hung: token counters that move mean alive, whatever ``/health`` says.
"Active (running)" is not ready, and neither is "fired up" in a log nor a lone 200.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from console.model.engine import EngineIdentity, EngineRates, Probe
from console.model.load_times import Expected, Forecast, by_profile, forecast
from console.model.log import Crash, LoadProgress, Phase
from console.model.reading import Reading
from console.model.unit import UnitStatus

T = TypeVar("T")

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

#: Prompt tokens a second that even a slow engine prefills. A chunk in work moves no counter until
#: it is through: it has the seconds that this rate gives it, and at most PREFILL_PATIENCE_S of them.
SLOW_PREFILL = 200.0
PREFILL_PATIENCE_S = 120.0

#: A health answer slower than this, in seconds, is worth telling. A healthy one takes about 1 s.
SLOW_HEALTH_S = 5.0

#: ``/health`` generates a token and polls for it once a second: a 200 that took this long, in
#: seconds, had one. With SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false it comes at once, without.
GENERATED_S = 0.9

#: A health answer counts this long, in seconds: the next one of a hung engine takes 25 s to fail.
HEALTH_COUNTS_S = 40.0

#: The same of systemd's word, which a host that loads a model may be slow to give.
UNIT_COUNTS_S = 10.0

#: systemd starts the service again this often before we call it a loop.
LOOP_RESTARTS = 2

#: An engine that served this long, in seconds, before it died is not in a loop: systemd's counter
#: of restarts is set back only by a start by hand.
LONG_SERVICE_S = 1800.0

#: Below this accept length speculation costs more than it gains.
POOR_ACCEPT_LENGTH = 1.2

_KV_FULL = 0.95
_RETRACTIONS_PER_MIN = 6.0

#: Unit results that say that its process ended badly; "timeout" says that of a stop as well.
_BAD_ENDS = frozenset({"exit-code", "signal", "core-dump", "oom-kill", "watchdog"})


class ServiceState(msgspec.Struct, frozen=True, kw_only=True):
    """What the service is doing, with everything that was held against it."""

    name: StateName
    phase: Phase | None = None  # while starting
    percent: float | None = None  # 0..100 within the phase
    detail: str | None = None  # "shard 31/64"
    elapsed_s: float | None = None  # since the unit's main process was executed
    forecast: Forecast | None = None  # while starting: when it will be ready, by earlier loads
    reasons: tuple[str, ...] = ()
    looking: bool = False  # "unreachable" only because not everything has been read once: no alarm

    @property
    def eta_s(self) -> float | None:
        """Seconds to ready; None when nobody can say, or when it is late."""
        return None if self.forecast is None else self.forecast.eta_s

    @property
    def words(self) -> str:
        """As it is written on the screen: ``STARTING weights 45 %``."""
        if self.looking:
            return "LOOKING"
        text = self.name.replace("-", " ").upper()
        if self.name == "starting" and self.phase is not None:
            text += f" {self.phase}"
            if self.percent is not None:
                text += f" {self.percent:.0f} %"
        return text


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that the state is derived from. Times are monotonic seconds unless they say Unix.

    "This run" is the one that the unit is in: what was known of the run before is not evidence.
    """

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
    log_current: bool = True  # the log is being followed: what it does not say has not happened
    previous: LoadProgress | None = None  # of the run before
    began: float | None = None  # when this run's main process was executed
    served_at: float | None = None  # when ``/ready`` or ``/health`` last said 200 in this run
    refused_since: float | None = None  # since when the port refuses, without a break
    tokens_moved_at: float | None = None  # when a token counter was last seen to move in this run
    waiting_since: float | None = None  # since when requests are in flight without a token
    expected_name: str | None = None
    expected_load_s: float | None = None  # what the profile says, where this host has seen no load of it
    expected: Expected | None = None  # what this host's earlier loads of the profile took
    complaints: tuple[str, ...] = ()  # what cards, holders and files have to say


def derive(evidence: Evidence) -> ServiceState:
    """The one state that fits the evidence; the rules are tried from the most certain down."""
    seen = _see(evidence)
    unit = seen.unit
    if unit is None:
        return _without_unit(seen)
    if unit.load_state == "not-found":
        return _not_the_unit(seen, f"there is no unit {unit.id}")
    if unit.load_state in ("bad-setting", "error", "masked"):
        return _not_the_unit(seen, f"unit {unit.id} is {unit.load_state}: systemctl status {unit.id}")
    if unit.active_state == "failed" or unit.sub_state.startswith("auto-restart"):
        return _ended(seen, unit)
    if unit.active_state == "inactive":
        return _not_the_unit(seen, None)
    if unit.active_state == "deactivating":
        if unit.result in _BAD_ENDS and not seen.load.stop_asked:
            return _crashed(seen, seen.load.crash or _end_of(unit), "systemd ends what is left of it")
        return _stopping(seen)
    return _running(seen)


class _Seen(msgspec.Struct, frozen=True):
    """The evidence that counts at this moment: what is too old or of another run is None."""

    evidence: Evidence
    unit: UnitStatus | None
    load: LoadProgress
    health: Probe | None
    ready: Probe | None
    models: Probe | None
    rates: EngineRates | None

    @property
    def moving(self) -> bool:
        """Tokens move, or a chunk of a long prompt may still be in work."""
        moved = self.evidence.tokens_moved_at
        if moved is None:
            return False
        chunk = (self.load.prefilling or 0) / SLOW_PREFILL if self.evidence.log_current else 0.0
        return self.evidence.now - moved <= ALIVE_S + min(chunk, PREFILL_PATIENCE_S)

    @property
    def loading(self) -> bool:
        """The log shows a load that has not come to its end.

        Its first phase alone says little: with ``--log-level warning`` systemd's own line is all there is.
        """
        load, evidence = self.load, self.evidence
        if not evidence.log_current or load.fired_up_at is not None or load.phase is None:
            return False
        return load.phase.phase != "starting" or evidence.served_at is None

    @property
    def was_up(self) -> bool:
        """The engine served in this run."""
        evidence = self.evidence
        if self.load.fired_up_at is not None or evidence.served_at is not None:
            return True
        return evidence.tokens_moved_at is not None and not self.loading

    @property
    def generated_at(self) -> float | None:
        """When ``/health`` last proved that the engine generates."""
        if self.health is None or not self.health.ok or self.health.seconds < GENERATED_S:
            return None
        return self.evidence.health.taken_at

    @property
    def turned_away(self) -> bool:
        """``/health`` refused or said 503 at once: until the engine is up, and once it is told to end."""
        if self.health is None or self.health_gave_up:
            return False
        return self.health.status == 503 or self.health.error == "refused"

    @property
    def health_gave_up(self) -> bool:
        """``/health`` waited in vain for a token. An engine that warms up says 503 at once."""
        health = self.health
        if health is None:
            return False
        return health.error == "timeout" or (health.status == 503 and health.seconds >= HUNG_S - 1)


def _see(evidence: Evidence) -> _Seen:
    now = evidence.now
    load = evidence.load
    unit = evidence.unit.current(now) or _newer_than(evidence.unit, now, UNIT_COUNTS_S)
    if unit is not None and unit.invocation_id and load.invocation not in (None, unit.invocation_id):
        load = LoadProgress(unit.invocation_id)
    return _Seen(
        evidence=evidence,
        unit=unit,
        load=load,
        health=_newer_than(evidence.health, now, HEALTH_COUNTS_S),
        ready=evidence.ready.current(now),
        models=evidence.models.current(now),
        rates=evidence.rates.current(now),
    )


def _newer_than(reading: Reading[T], now: float, seconds: float) -> T | None:
    age = reading.age(now)
    return None if age is None or age > seconds else reading.value


# By the unit -------------------------------------------------------------------------------------


def _without_unit(seen: _Seen) -> ServiceState:
    """systemd did not answer: the engine's own words have to do."""
    reason = _why_none(seen.evidence, seen.evidence.unit)
    answered = seen.models is not None and seen.models.status is not None
    if answered or seen.load.phases or seen.load.crash:
        state = _running(seen)
        if reason is None or state.name in ("crashed", "hung"):
            return state
        name: StateName = "degraded" if state.name in HEALTHY else state.name
        return msgspec.structs.replace(state, name=name, reasons=(*state.reasons, f"unit unknown: {reason}"))
    said = (
        f"unit: {reason}" if reason else None,
        f"engine: {_why_silent(seen.models)}" if seen.models is not None else None,
    )
    reasons = tuple(text for text in said if text)
    if not reasons:
        return ServiceState(name="unreachable", reasons=("nothing has answered yet",), looking=True)
    return ServiceState(name="unreachable", reasons=reasons, looking=_first_look(seen))


def _not_the_unit(seen: _Seen, reason: str | None) -> ServiceState:
    """The unit does not run. Whatever answers on the port then is not it."""
    reasons = () if reason is None else (reason,)
    if seen.models is not None and seen.models.ok and _answered_since_stop(seen):
        foreign = "something that is not the unit answers at the service's address"
        return ServiceState(name="degraded", reasons=(*reasons, foreign, *seen.evidence.complaints))
    return ServiceState(name="stopped", reasons=(*reasons, *seen.evidence.complaints))


def _answered_since_stop(seen: _Seen) -> bool:
    """The answer is not one that the unit itself gave just before it ended."""
    evidence, unit = seen.evidence, seen.unit
    changed = unit.changed_at if unit is not None else None
    if changed is None or evidence.models.taken_at is None:
        return True
    ended = evidence.now - max(0.0, evidence.wall - changed)
    return evidence.models.taken_at > ended + 1  # systemd gives whole seconds


def _ended(seen: _Seen, unit: UnitStatus) -> ServiceState:
    """The main process has ended by itself; systemd may start it again."""
    crash = seen.load.crash
    failed = unit.active_state == "failed"
    if crash is None and failed and seen.load.stop_asked:
        # Older versions end a stop that was asked for with SIGKILL, and so does systemd one that takes long.
        return ServiceState(
            name="stopped", reasons=(f"its stop ended with {_end_of(unit)}", *seen.evidence.complaints)
        )
    if crash is None and not failed and unit.result == "success":
        clean_end = "ended without an error; systemd starts it again"
        return ServiceState(name="starting", phase="starting", reasons=(clean_end, *seen.evidence.complaints))
    restarts = unit.restarts or 0
    if not _loops(seen, unit):
        return _crashed(seen, crash or _end_of(unit))
    tail = "systemd gave up" if failed else "systemd will start it again"
    state = _crashed(seen, crash or _end_of(unit), f"started again {restarts} times; {tail}")
    return msgspec.structs.replace(state, name="crash-looping")


def _loops(seen: _Seen, unit: UnitStatus) -> bool:
    """It dies again and again, rather than once in a long while."""
    crash = seen.load.crash
    if unit.result == "start-limit-hit":
        return True
    # What the journal says of it, since Result keeps the reason of the last crash.
    if crash is not None and any("Start request repeated too quickly" in line for line in crash.lines):
        return True
    return (unit.restarts or 0) >= LOOP_RESTARTS and not _served_long(seen.load)


def _served_long(load: LoadProgress | None) -> bool:
    if load is None or load.fired_up_at is None or load.crash is None:
        return False
    return load.crash.at - load.fired_up_at >= LONG_SERVICE_S


def _crashed(seen: _Seen, cause: Crash | str, *more: str) -> ServiceState:
    if isinstance(cause, Crash):
        reasons = (cause.reason, cause.remedy) if cause.remedy else (cause.reason,)
    else:
        reasons = (cause,)
    return ServiceState(name="crashed", reasons=(*reasons, *more, *seen.evidence.complaints))


def _end_of(unit: UnitStatus) -> str:
    how = {"killed": "killed by signal", "dumped": "dumped core on signal"}.get(
        unit.exit_code or "", "exit status"
    )
    status = "unknown" if unit.exit_status is None else str(unit.exit_status)
    return f"result {unit.result}, {how} {status}"


def _stopping(seen: _Seen) -> ServiceState:
    running = seen.rates.requests_running if seen.rates is not None else None
    return ServiceState(name="stopping", reasons=(f"draining {running} requests",) if running else ())


# By the engine -----------------------------------------------------------------------------------


def _running(seen: _Seen) -> ServiceState:
    """The unit's process is there; how far is it, and does it work?"""
    evidence, load, models = seen.evidence, seen.load, seen.models
    if load.crash is not None and not _outlived(seen, load.crash):
        return _crashed(seen, load.crash)
    if load.stop_asked and _turns_away(seen):
        return _stopping(seen)
    if models is not None and models.error == "refused" and not _came_back(seen):
        return _closed(seen)
    answers = models is not None and models.ok and models.error is None
    if answers and seen.loading and not _bound(load):
        return _starting(seen, "something else answers at the service's address: the load will fail on it")
    if answers and _warming(seen):
        return _starting(seen, warming=True)
    if seen.loading and evidence.served_at is None and seen.moving:
        return _starting(seen)  # the tokens are those of the warm-up's own request
    if seen.moving:
        return _serving(seen)
    silence = _silent_for_good(seen)
    if silence is not None:
        return ServiceState(name="hung", reasons=(silence, *evidence.complaints))
    if not answers and not (models is not None and models.status in (401, 403)):
        return _starting(seen) if seen.loading else _no_answer(seen)
    if load.paused and not (seen.ready is not None and seen.ready.ok):
        reason = "generation is paused: POST /continue_generation"
        return ServiceState(name="degraded", reasons=(reason, *evidence.complaints))
    return _serving(seen)


def _bound(load: LoadProgress) -> bool:
    """The load may have come to where SGLang binds its port, which is when the model is there."""
    return any(passed.phase == "warm-up" for passed in load.phases) or all(
        passed.phase == "starting" for passed in load.phases
    )


def _outlived(seen: _Seen, crash: Crash) -> bool:
    """A token came well after what looked like the end: the line meant something else."""
    evidence = seen.evidence
    lives = [at for at in (evidence.tokens_moved_at, seen.generated_at) if at is not None]
    return bool(lives) and evidence.now - max(lives) < evidence.wall - crash.at - 5


def _turns_away(seen: _Seen) -> bool:
    """The engine takes no requests: what it does once it was told to end."""
    if seen.models is not None and seen.models.error == "refused":
        return True
    return any(probe is not None and probe.status == 503 for probe in (seen.ready, seen.health))


def _came_back(seen: _Seen) -> bool:
    """Tokens moved after the port refused."""
    moved, refused = seen.evidence.tokens_moved_at, seen.evidence.models.taken_at
    return moved is not None and refused is not None and moved > refused


def _closed(seen: _Seen) -> ServiceState:
    """The port refuses: it does so during a load, and once the engine is dead."""
    evidence = seen.evidence
    if not seen.was_up or _refused_before_up(seen):
        return _starting(seen)
    since = evidence.refused_since if evidence.refused_since is not None else evidence.models.taken_at
    asked = evidence.unit.taken_at
    if seen.unit is not None and since is not None and asked is not None and asked > since:
        return _crashed(seen, "the engine no longer listens, though it was up and its unit is active")
    # Until systemd was asked again this may be a stop or a restart.
    return ServiceState(name="unreachable", reasons=("the engine no longer listens, though it was up",))


def _refused_before_up(seen: _Seen) -> bool:
    """The refusal is of the load itself, which has just come to its end in the log."""
    evidence, up = seen.evidence, seen.load.fired_up_at
    if up is None or evidence.served_at is not None or evidence.tokens_moved_at is not None:
        return False
    asked = evidence.models.taken_at
    return asked is not None and evidence.wall - (evidence.now - asked) < up


def _silent_for_good(seen: _Seen) -> str | None:
    """Why the engine is hung, or None when that is not certain."""
    evidence = seen.evidence
    if seen.loading or seen.load.paused:
        return None
    if evidence.waiting_since is not None and seen.rates is not None and not _warming(seen):
        waited = evidence.now - max(evidence.waiting_since, seen.generated_at or evidence.waiting_since)
        if waited >= HUNG_S:
            return f"requests are in flight and no token came for {waited:.0f} s"
    if seen.health is None or not seen.health_gave_up:
        return None
    moved, asked = evidence.tokens_moved_at, evidence.health.taken_at
    if moved is not None and asked is not None and moved > asked:
        return None
    if seen.models is not None and seen.models.error == "timeout":
        return "the engine accepts connections and answers nothing"
    return f"no token came back within {seen.health.seconds:.0f} s of a health check"


def _no_answer(seen: _Seen) -> ServiceState:
    why = _why_none(seen.evidence, seen.evidence.models) if seen.models is None else _why_silent(seen.models)
    return ServiceState(
        name="unreachable",
        reasons=(why or "the engine has not been asked yet", *seen.evidence.complaints),
        looking=_first_look(seen),
    )


def _first_look(seen: _Seen) -> bool:
    """Unit or engine have not been read even once."""
    readings: tuple[Reading[UnitStatus] | Reading[Probe], ...] = (seen.evidence.unit, seen.evidence.models)
    return any(reading.taken_at is None and reading.error is None for reading in readings)


def _warming(seen: _Seen) -> bool:
    """Bound and answering, but its first generation has not come back, though it may be on its way."""
    load = seen.load
    if load.fired_up_at is not None or seen.evidence.served_at is not None:
        return False
    if load.paused or seen.health_gave_up:  # /ready says 503 for that, too
        return False
    if seen.ready is not None and seen.ready.status in (200, 503):
        return seen.ready.status == 503
    if seen.health is not None and seen.health.status is not None:
        return seen.turned_away
    # The port is bound, so a log that shows no more than the beginning does not show the load.
    return seen.loading and load.phase is not None and load.phase.phase != "starting"


def _starting(seen: _Seen, *more: str, warming: bool = False) -> ServiceState:
    evidence, load, unit = seen.evidence, seen.load, seen.unit
    elapsed = _elapsed(seen)
    told = _forecast(seen, elapsed)
    reasons: tuple[str, ...] = more if told is None else (*more, *told.complaints)
    restarts = 0 if unit is None else unit.restarts or 0
    if restarts:
        reasons = (*reasons, f"attempt {restarts + 1} after a crash")
    current = load.phase
    name: StateName = "warming-up" if warming or (current and current.phase == "warm-up") else "starting"
    if restarts > LOOP_RESTARTS and not _served_long(evidence.previous):
        name = "crash-looping"
    return ServiceState(
        name=name,
        phase="warm-up" if name == "warming-up" else (current.phase if current else "starting"),
        percent=current.percent if current else None,
        detail=current.detail if current else None,
        elapsed_s=elapsed,
        forecast=told,
        reasons=(*reasons, *evidence.complaints),
    )


def _forecast(seen: _Seen, elapsed: float | None) -> Forecast | None:
    evidence = seen.evidence
    known = evidence.expected
    if known is None and evidence.expected_load_s is not None:
        known = by_profile(evidence.expected_load_s)
    if known is None or elapsed is None:
        return None
    unit = seen.unit
    started = unit.started_at if unit is not None else None
    return forecast(known, seen.load, elapsed, evidence.wall - elapsed if started is None else started)


def _elapsed(seen: _Seen) -> float | None:
    """Seconds since the main process was executed."""
    evidence = seen.evidence
    if evidence.began is not None:
        return max(0.0, evidence.now - evidence.began)
    began = seen.unit.started_at if seen.unit is not None else None
    if began is None and seen.load.phases:
        began = seen.load.phases[0].began
    return None if began is None else max(0.0, evidence.wall - began)


def _serving(seen: _Seen) -> ServiceState:
    """It answers: ready, busy, or something is wrong all the same."""
    reasons = (*_engine_complaints(seen), *seen.evidence.complaints)
    if reasons:
        return ServiceState(name="degraded", reasons=reasons)
    if seen.turned_away and (seen.moving or (seen.ready is not None and seen.ready.ok)):
        return _ready(seen)  # that was before it was up; the next answer is not here yet
    slow = _slow(seen)
    if seen.moving:
        return ServiceState(name="busy", reasons=(f"{slow}, but tokens move",)) if slow else _ready(seen)
    if seen.health is not None and not seen.health.ok:
        return ServiceState(name="degraded", reasons=(slow or "/health does not answer",))
    return _ready(seen, slow)


def _ready(seen: _Seen, slow: str | None = None) -> ServiceState:
    if seen.health is None or seen.turned_away:
        return ServiceState(name="ready", reasons=("/health has not answered yet",))
    return ServiceState(name="ready", reasons=(slow,) if slow else ())


def _slow(seen: _Seen) -> str | None:
    """What answers late or not at all, in words."""
    health, models = seen.health, seen.models
    if health is not None and (not health.ok or health.seconds > SLOW_HEALTH_S):
        return f"/health {health.error or health.status} after {health.seconds:.0f} s"
    if models is not None and models.status is None and models.error != "refused":  # tokens moved since
        return f"/v1/models {models.error or 'no answer'} after {models.seconds:.0f} s"
    return None


def _engine_complaints(seen: _Seen) -> tuple[str, ...]:
    found: list[str] = []
    evidence = seen.evidence
    if seen.models is not None and seen.models.status in (401, 403):
        found.append("the engine wants an API key: service.api_key_file in the site file")
    expected = evidence.expected_name
    if expected and evidence.served_names and expected not in evidence.served_names:
        found.append(f"serves {', '.join(evidence.served_names)}, not {expected}")
    if seen.rates is not None:
        found.extend(_rate_complaints(seen.rates))
    if seen.unit is not None and seen.unit.need_daemon_reload:
        found.append("the unit file changed since it was loaded: systemctl daemon-reload")
    return tuple(found)


def _rate_complaints(rates: EngineRates) -> list[str]:
    found = []
    if rates.kv_usage_ratio is not None and rates.kv_usage_ratio >= _KV_FULL and rates.requests_queued:
        found.append(f"KV cache {rates.kv_usage_ratio:.0%} full with {rates.requests_queued} requests queued")
    if rates.retractions_per_min is not None and rates.retractions_per_min >= _RETRACTIONS_PER_MIN:
        found.append(f"{rates.retractions_per_min:.0f} retractions a minute: the KV cache is too small")
    # An idle engine's acceptance is that of its last requests, which may be hours ago.
    accepted = rates.accept_length if rates.decode_tokens_per_s else None
    if accepted is not None and 0 < accepted < POOR_ACCEPT_LENGTH:
        found.append(f"accept length {accepted:.2f}: speculation costs more than it gains")
    return found


def _why_none(evidence: Evidence, reading: Reading[UnitStatus] | Reading[Probe]) -> str | None:
    """Why a reading has no value that counts; None when it was just never read."""
    if reading.error:
        return reading.error
    age = reading.age(evidence.now)
    return None if age is None else f"not read for {age:.0f} s"


def _why_silent(probe: Probe) -> str:
    if probe.error == "refused":
        return "connection refused"
    said = probe.error or f"HTTP {probe.status}"
    return f"{said}: {probe.detail}" if probe.detail else said
