"""The service's state from recorded evidence, and which evidence wins when it contradicts itself."""

# ruff: noqa: E501  a row of the table is one line

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from console.model.engine import EngineRates, Probe
from console.model.load import LoadWatch
from console.model.log import PHASES, Crash, LoadProgress, LogLine, PhaseTime
from console.model.reading import Reading
from console.model.state import HEALTHY, Evidence, ServiceState, StateName, derive
from console.model.unit import UnitStatus
from console.sources.engine.identity import model_list
from console.sources.engine.metrics import parse
from console.sources.engine.rates import Window, advance
from console.sources.engine_log import read_line, read_manager_line
from console.sources.journal import message_text
from console.sources.unit import parse_show, unit_status

FIXTURES = Path(__file__).parents[1] / "fixtures"
STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")

#: The moment of every test, and a run of the unit that began 600 s before it.
NOW = 50_000.0
WALL = 1_796_000_600.0
RUN = "3f0d5b1f6f0f4bb1a4f9d5d0c2e4a6b8"

# What systemd 252 says --------------------------------------------------------------------------

SHOW = f"""\
Id=sglang.service
LoadState=loaded
ActiveState=active
SubState=running
Result=success
NRestarts=0
MainPID=4711
ExecMainCode=0
ExecMainStatus=0
ExecMainStartTimestamp=@1796000000
ActiveEnterTimestamp=@1796000000
StateChangeTimestamp=@1796000000
InvocationID={RUN}
MemoryCurrent=[not set]
NeedDaemonReload=no
Restart=on-failure
"""


def unit(**changed: str) -> UnitStatus:
    """``systemctl show`` of the running unit, with the properties named."""
    (properties,) = parse_show(SHOW).values()
    return unit_status(properties | changed)


def stopped(at: float = WALL - 300, **changed: str) -> UnitStatus:
    gone = {"ActiveState": "inactive", "SubState": "dead", "MainPID": "0", "InvocationID": ""}
    return unit(**gone, StateChangeTimestamp=f"@{at:.0f}", **changed)


def died(**changed: str) -> UnitStatus:
    ended = {"ExecMainCode": "1", "ExecMainStatus": "1", "Result": "exit-code", "MainPID": "0"}
    return unit(**{"ActiveState": "failed", "SubState": "failed", **ended, **changed})


def waits_for_restart(**changed: str) -> UnitStatus:
    return died(ActiveState="activating", SubState="auto-restart", **changed)


# What the engine's log says ---------------------------------------------------------------------


def line(text: str, at: float, *, run: str | None = RUN, manager: bool = False) -> LogLine:
    text = message_text(text)
    meaning = read_manager_line(text) if manager else read_line(text)
    return LogLine(at=at, text=text, invocation=run, pid=1 if manager else 4711, **{
        name: getattr(meaning, name) for name in ("kind", "rank", "fields", "phase", "percent", "ends")
    })  # fmt: skip


def followed(lines: list[LogLine]) -> LoadProgress:
    watch = LoadWatch()
    for each in lines:
        watch.feed(each)
    return watch.progress


def recorded(
    name: str, *, until: str | None = None, before: str | None = None, ago: float = 0.0
) -> LoadProgress:
    """A recorded log as far as the first line with ``until``, or to just before the one with ``before``.

    Its times are moved so that its last line was written ``ago`` seconds before this moment.
    """
    lines: list[tuple[float, str]] = []
    at = 0.0
    for text in (FIXTURES / "log" / name).read_bytes().decode("utf-8", "replace").split("\n"):
        if stamp := STAMP.match(text):
            at = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        if before is not None and before in text:
            break
        lines.append((at, text))
        if until is not None and until in text:
            break
    moved = WALL - ago - lines[-1][0]
    return followed([line(text, at + moved) for at, text in lines])


UP = recorded("startup.log", until="fired up and ready to roll", ago=60.0)
JOINED_LATE = followed(
    [line("Decode batch, #running-req: 1, #token: 63, gen throughput (token/s): 27", WALL - 9)]
)
NOTHING_LOGGED = LoadProgress(None)

# What the engine answers ------------------------------------------------------------------------


def probe(
    status: int | None, error: str | None = None, seconds: float = 0.01, path: str = "/health"
) -> Probe:
    return Probe(path, status, error, seconds)


OK = probe(200)
GENERATED = probe(200, seconds=1.2)
REFUSED = probe(None, "refused", 0.0)
TIMEOUT = probe(None, "timeout", 2.0)
STARTING = probe(503)
GAVE_UP = probe(503, seconds=20.2)
HEALTH_TIMEOUT = probe(None, "timeout", 25.0)
ABSENT = probe(404)


def rates(name: str, **changed: object) -> EngineRates:
    """What one recorded scrape gives."""
    body = (FIXTURES / "engine" / name).read_bytes()
    _, found = advance(Window(), parse(body), NOW)
    return msgspec.structs.replace(found, **changed)


IDLE = rates("metrics-0.5.23-idle.txt", decode_tokens_per_s=0.0)
LOADED = rates("metrics-0.5.23-load.txt", decode_tokens_per_s=155.0)


def reading(name: str, period: float, value: object, age: float = 0.5, error: str | None = None) -> Reading:
    return Reading(name, period, value, None if value is None else NOW - age, error)


def evidence(
    the_unit: UnitStatus | None = None,
    *,
    health: Probe | None = GENERATED,
    ready: Probe | None = OK,
    models: Probe | None = OK,
    figures: EngineRates | None = IDLE,
    load: LoadProgress = UP,
    ages: dict[str, float] | None = None,
    unit_error: str | None = None,
    **more: object,
) -> Evidence:
    """A service that runs, is idle and well; each test changes what it is about."""
    ages = ages or {}
    if the_unit is None and unit_error is None:
        the_unit = unit()
    return Evidence(**{
        "now": NOW,
        "wall": WALL,
        "unit": reading("unit", 2, the_unit, ages.get("unit", 0.4), unit_error),
        "health": reading("health", 5, health, ages.get("health", 2.0)),
        "ready": reading("ready", 2, ready, ages.get("ready", 0.6)),
        "models": reading("models", 2, models, ages.get("models", 0.6)),
        "rates": reading("rates", 1, figures, ages.get("rates", 0.5)),
        "served_at": NOW - 1 if OK in (health, ready) else None,
        "load": load,
        **more,
    })  # fmt: skip


SILENT = {"health": REFUSED, "ready": REFUSED, "models": REFUSED, "figures": None}
SAYS_NOTHING = {"health": HEALTH_TIMEOUT, "ready": TIMEOUT, "models": TIMEOUT, "figures": None}


def shown(**changes: object) -> ServiceState:
    return derive(evidence(**changes))  # type: ignore[arg-type]


def reasons(state: ServiceState) -> str:
    return "; ".join(state.reasons)


# One state after the other ----------------------------------------------------------------------

STATES: list[tuple[str, StateName, str, Callable[[], Evidence]]] = [
    ("stopped", "stopped", "^$", lambda: evidence(stopped(), **SILENT)),
    ("no such unit", "stopped", "no unit nothere", lambda: evidence(
        unit(Id="nothere.service", LoadState="not-found", ActiveState="inactive", SubState="dead"), **SILENT)),
    ("masked", "stopped", "is masked: systemctl status", lambda: evidence(stopped(LoadState="masked"), **SILENT)),
    ("imports", "starting", "^$", lambda: evidence(
        load=followed([line("Started sglang.service", WALL - 5, manager=True)]), **SILENT)),
    ("weights", "starting", "^$", lambda: evidence(load=recorded("tp2.log", until="Load weight begin"), **SILENT)),
    ("kv cache", "starting", "^$", lambda: evidence(load=recorded("tp2.log", until="KV Cache is allocated"), **SILENT)),
    ("bound", "warming-up", "^$", lambda: evidence(
        load=recorded("tp2.log", until='"GET /health HTTP/1.1" 503'), health=STARTING, ready=STARTING, figures=None)),
    ("bound, before 0.5.20", "warming-up", "^$", lambda: evidence(
        load=recorded("tp2.log", until='"GET /health HTTP/1.1" 503'), health=STARTING, ready=ABSENT, figures=None)),
    ("first generation on its way", "warming-up", "^$", lambda: evidence(
        load=recorded("tp2.log", until="Prefill batch"), health=STARTING, ready=STARTING, tokens_moved_at=NOW - 1)),
    ("ready", "ready", "^$", lambda: evidence(tokens_moved_at=NOW - 4000)),
    ("ready under load", "ready", "^$", lambda: evidence(figures=LOADED, tokens_moved_at=NOW - 0.5)),
    ("busy: health late", "busy", "200 after 9 s, but tokens move", lambda: evidence(
        health=probe(200, seconds=9), figures=LOADED, tokens_moved_at=NOW - 1)),
    ("hung: no token", "hung", "no token came for 31 s", lambda: evidence(
        figures=LOADED, health=GENERATED, ages={"health": 33}, tokens_moved_at=NOW - 31, waiting_since=NOW - 31)),
    ("hung: health in vain", "hung", "within 20 s of a health check", lambda: evidence(
        load=recorded("hang.log", before="watchdog timeout"), health=GAVE_UP, ready=STARTING, tokens_moved_at=NOW - 45)),
    ("hung: silent", "hung", "answers nothing", lambda: evidence(
        load=recorded("hang.log", before="watchdog timeout"), tokens_moved_at=NOW - 45, **SAYS_NOTHING)),
    ("degraded", "degraded", "Xid 79", lambda: evidence(complaints=("card 3 (0000:61:00.0): Xid 79",))),
    ("stopping", "stopping", "draining 2 requests", lambda: evidence(
        unit(ActiveState="deactivating", SubState="stop-sigterm"),
        figures=msgspec.structs.replace(LOADED, requests_running=2))),
    ("crashed", "crashed", "illegal memory access", lambda: evidence(died(), load=recorded("crash.log"), **SILENT)),
    ("crashed, not yet gone", "crashed", "illegal memory access", lambda: evidence(load=recorded("crash.log"))),
    ("ended by the watchdog", "crashed", "[Ww]atchdog", lambda: evidence(died(), load=recorded("hang.log"), **SILENT)),
    ("crashed without a word", "crashed", "result oom-kill, killed by signal 9", lambda: evidence(
        died(Result="oom-kill", ExecMainCode="2", ExecMainStatus="9"), load=NOTHING_LOGGED, **SILENT)),
    ("crashed once", "crashed", "illegal memory access", lambda: evidence(
        waits_for_restart(NRestarts="1"), load=recorded("crash.log"), **SILENT)),
    ("crashes in a loop", "crash-looping", "started again 2 times; systemd will", lambda: evidence(
        waits_for_restart(NRestarts="2"), load=recorded("crash.log", until="SIGQUIT"), **SILENT)),
    ("start limit", "crash-looping", "systemd gave up", lambda: evidence(
        died(NRestarts="2", InvocationID=""), load=NOTHING_LOGGED, **SILENT)),
    ("unreachable", "unreachable", "timeout", lambda: evidence(health=None, ready=TIMEOUT, models=TIMEOUT)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "said", "make"), [row[1:] for row in STATES], ids=[row[0] for row in STATES]
)
def test_each_state_from_what_was_recorded(name: StateName, said: str, make: Callable[[], Evidence]):
    state = derive(make())
    assert state.name == name
    assert re.search(said, reasons(state))


def test_a_load_says_its_phase_how_far_it_is_and_how_long_it_takes():
    texts = [
        "Load weight begin. avail mem=94 GB",
        "Loading safetensors checkpoint shards:  45% Completed | 29/64 [02:40<03:13]",
    ]
    load = followed([line(text, WALL - 10 + second) for second, text in enumerate(texts)])
    state = shown(load=load, expected_load_s=840.0, **SILENT)
    assert (state.name, state.phase, state.percent, state.detail) == (
        "starting",
        "weights",
        45,
        "shard 29/64",
    )
    assert (state.elapsed_s, state.eta_s) == (600, 240)
    assert state.words == "STARTING weights 45 %"


def test_a_load_that_takes_longer_than_expected_says_so_instead_of_a_time():
    state = shown(load=recorded("tp2.log", until="Load weight begin"), expected_load_s=500.0, **SILENT)
    assert state.eta_s is None
    assert "100 s longer than the profile expects" in reasons(state)


def test_the_time_of_a_load_does_not_follow_a_wall_clock_that_jumps():
    load = recorded("tp2.log", until="Load weight begin")
    for jump in (-3600, 3600):
        state = shown(load=load, expected_load_s=840.0, began=NOW - 600, wall=WALL + jump, **SILENT)
        assert (state.elapsed_s, state.eta_s) == (600, 240)


def test_a_crash_comes_with_what_to_do_about_it_and_with_the_card_that_caused_it():
    state = shown(the_unit=died(), load=recorded("crash.log"), complaints=("card 3: Xid 79",), **SILENT)
    crash = recorded("crash.log").crash
    assert crash is not None
    assert state.reasons == (crash.reason, crash.remedy, "card 3: Xid 79")


# Recorded probes --------------------------------------------------------------------------------


def probes(name: str, patience: float) -> list[tuple[Probe, bool]]:
    """What curl saw: each probe, and whether the main process lived after it."""
    found = []
    for row in (FIXTURES / "probes" / name).read_text().splitlines():
        path, status, seconds, *alive = row[row.index("/") :].split()
        error = None if status != "000" else "timeout" if float(seconds) >= patience else (
            "refused" if float(seconds) < 0.01 else "reset")  # fmt: skip
        found.append((Probe(path, int(status) or None, error, float(seconds)), alive != ["alive=n"]))
    return found


def test_a_recorded_crash_is_never_a_hang_nor_a_start():
    """The scheduler died: the port closes a second before the process does, and systemd hears of it last."""
    names = []
    for seen, alive in probes("crash.txt", 2.0):
        # systemd is asked after the port has refused for the first time, and learns of the end later.
        the_unit = unit() if alive else died()
        names.append(shown(
            the_unit=the_unit, health=GENERATED, ages={"health": 4, "unit": 0.1}, ready=seen, models=seen,
            figures=None, load=UP, refused_since=NOW - 0.6 if seen.error == "refused" else None,
        ).name)  # fmt: skip
    assert names == ["unreachable", "unreachable", *["crashed"] * 10]


def test_a_recorded_hang_is_hung_from_the_first_health_check_in_vain_to_its_end():
    """curl waited 3 s where the console waits 25; what it saw is the same."""
    health, metrics, info = (
        [seen for seen, _ in probes("hang.txt", 2.9) if seen.path == path]
        for path in ("/health", "/metrics", "/server_info")
    )
    names = []
    for tested, scraped, asked in zip(health, metrics, info, strict=True):
        waited = msgspec.structs.replace(tested, seconds=25.0) if tested.error == "timeout" else tested
        names.append(shown(
            load=recorded("hang.log", before="watchdog timeout"), health=waited, ready=asked, models=asked,
            figures=LOADED if scraped.ok else None, tokens_moved_at=NOW - 30, waiting_since=NOW - 30,
            refused_since=NOW - 1,
        ).name)  # fmt: skip
    assert names == [*["hung"] * 7, *["crashed"] * (len(names) - 7)]
    assert len(names) > 8


# Busy is not hung -------------------------------------------------------------------------------


@pytest.mark.parametrize("health", [HEALTH_TIMEOUT, GAVE_UP, probe(503, seconds=20), probe(None, "reset")])
def test_tokens_that_move_while_health_fails_are_busy(health: Probe):
    state = shown(
        health=health, ready=STARTING, figures=LOADED, tokens_moved_at=NOW - 7, waiting_since=NOW - 7
    )
    assert state.name == "busy"
    assert "but tokens move" in reasons(state)


def test_tokens_that_move_while_nothing_else_answers_are_busy():
    """The HTTP process is saturated; the log still shows decode batches."""
    state = shown(tokens_moved_at=NOW - 3, waiting_since=NOW - 3, **SAYS_NOTHING)
    assert state.name == "busy"


def prefill(tokens: int) -> LoadProgress:
    text = (
        f"Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0, #running-req: 0, #queue-req: 0"
    )
    return followed([
        line("Started sglang.service", WALL - 600, manager=True),
        line("The server is fired up and ready to roll!", WALL - 100), line(text, WALL - 35),
    ])  # fmt: skip


def test_a_chunk_of_a_long_prompt_is_given_the_time_it_takes():
    """100k tokens prefilled in chunks of 8192: no counter moves and /health waits while one is in work."""
    waits = {"figures": LOADED, "health": GAVE_UP, "tokens_moved_at": NOW - 35, "waiting_since": NOW - 35}
    assert shown(load=prefill(8192), **waits).name == "busy"
    assert shown(load=prefill(120), **waits).name == "hung"


@pytest.mark.parametrize("tokens", [8192, 102_400])
def test_a_prefill_is_not_believed_for_ever(tokens: int):
    late = {"tokens_moved_at": NOW - 140, "waiting_since": NOW - 140}
    assert shown(load=prefill(tokens), figures=LOADED, health=GAVE_UP, **late).name == "hung"


def test_an_engine_idle_for_hours_is_ready():
    state = shown(tokens_moved_at=NOW - 6 * 3600)
    assert (state.name, state.reasons) == ("ready", ())


def test_requests_seen_waiting_are_not_hung_when_health_just_generated():
    """The gauges lag: up to 30 s in some versions they show requests that have long ended."""
    state = shown(figures=LOADED, waiting_since=NOW - 60, tokens_moved_at=NOW - 60, ages={"health": 4})
    assert state.name == "ready"


def test_a_health_answer_without_a_generation_proves_nothing():
    """SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false: 200 at once, whatever the scheduler does."""
    state = shown(
        figures=LOADED, health=probe(200, seconds=0.002), waiting_since=NOW - 60, tokens_moved_at=NOW - 60
    )
    assert state.name == "hung"


def test_a_health_check_in_vain_is_forgotten_once_tokens_moved_after_it():
    """The hang has ended, the last health answer is still the old one, and the engine is idle again."""
    state = shown(health=GAVE_UP, ages={"health": 24}, tokens_moved_at=NOW - 15)
    assert state.name != "hung"


def test_the_end_of_a_warm_up_is_ready_at_once():
    """The last health answer is still one of the warm-up, and the tokens are its request's."""
    for health, moved in ((STARTING, NOW - 1), (STARTING, None), (REFUSED, NOW - 1), (REFUSED, None)):
        state = shown(health=health, tokens_moved_at=moved, ages={"health": 3})
        assert (state.name, state.reasons) == ("ready", ("/health has not answered yet",))
    assert shown(health=STARTING, ready=STARTING).name == "degraded", (
        "it turns requests away, and nobody asked"
    )


def test_the_warm_up_request_may_take_minutes():
    """Kernels are compiled in it: a request is in flight and no token comes."""
    load = recorded("tp2.log", until='"GET /health HTTP/1.1" 503')
    state = shown(load=load, health=STARTING, ready=STARTING, figures=LOADED, waiting_since=NOW - 200)
    assert state.name == "warming-up"
    state = shown(
        load=NOTHING_LOGGED, health=STARTING, ready=STARTING, figures=LOADED, waiting_since=NOW - 200
    )
    assert state.name == "warming-up", "nor without a log"
    locked = shown(
        load=NOTHING_LOGGED,
        models=probe(401),
        health=STARTING,
        ready=STARTING,
        figures=LOADED,
        waiting_since=NOW - 200,
    )
    assert locked.name == "degraded", "nor without the key"


def test_a_paused_engine_is_not_hung():
    """POST /pause_generation: /ready says 503 at once, /health after 20 s."""
    lines = [
        line("The server is fired up and ready to roll!", WALL - 500),
        line('INFO:     127.0.0.1:40000 - "POST /pause_generation HTTP/1.1" 200 OK', WALL - 100),
    ]
    waits = {
        "health": GAVE_UP,
        "ready": STARTING,
        "waiting_since": NOW - 60,
        "tokens_moved_at": NOW - 100,
        "figures": LOADED,
    }
    state = shown(load=followed(lines), **waits)
    assert (state.name, "continue_generation" in reasons(state)) == ("degraded", True)
    just_joined = shown(load=followed(lines[1:]), health=None, ready=STARTING, served_at=None)
    assert just_joined.name == "degraded"
    lines.append(line('INFO:     127.0.0.1:40000 - "POST /continue_generation HTTP/1.1" 200 OK', WALL - 50))
    assert shown(load=followed(lines), **waits).name == "hung"


@pytest.mark.parametrize("jump", [-3600.0, 3600.0, 86400.0])
@pytest.mark.parametrize(("moved", "name"), [(NOW - 2, "busy"), (NOW - 60, "hung")])
def test_a_wall_clock_that_jumps_changes_neither_busy_nor_hung(jump: float, moved: float, name: str):
    state = shown(
        figures=LOADED, health=GAVE_UP, tokens_moved_at=moved, waiting_since=moved, wall=WALL + jump
    )
    assert state.name == name


# Up, down, or in between ------------------------------------------------------------------------


def test_joining_an_engine_that_has_been_up_for_days_shows_it_ready():
    three_days_ago = f"@{WALL - 3 * 86400:.0f}"
    old = unit(ExecMainStartTimestamp=three_days_ago)
    for load in (
        NOTHING_LOGGED,
        JOINED_LATE,
        followed([line('INFO:  1.2.3.4:5 - "GET /metrics HTTP/1.1" 200 OK', WALL - 3)]),
    ):
        for ready, health in ((OK, GENERATED), (OK, None), (ABSENT, GENERATED), (ABSENT, None)):
            state = shown(the_unit=old, load=load, ready=ready, health=health, expected_load_s=600.0)
            assert state.name == "ready"


def test_joining_a_hung_engine_shows_it_hung():
    assert shown(load=NOTHING_LOGGED, health=GAVE_UP, ready=STARTING, served_at=None).name == "hung"


def test_an_engine_that_logs_only_warnings_becomes_ready():
    """``--log-level warning``: systemd's line is all there is of the load."""
    load = followed([line("Started sglang.service", WALL - 600, manager=True)])
    assert shown(load=load).name == "ready"
    assert shown(load=load, health=None, ready=ABSENT).name == "ready"
    assert shown(load=load, **SILENT).name == "starting"


def test_a_port_that_refuses_before_the_first_answer_is_a_load_and_after_it_a_crash():
    loading = recorded("startup.log", until="Load weight begin")
    assert shown(load=loading, **SILENT).name == "starting"
    assert shown(load=UP, refused_since=NOW - 3, **SILENT).name == "crashed"
    assert shown(load=NOTHING_LOGGED, refused_since=NOW - 3, served_at=NOW - 9, **SILENT).name == "crashed"


def test_a_refusal_from_before_the_load_came_to_its_end_is_no_crash():
    """The log tells that the engine is up before the port is asked again."""
    just_up = msgspec.structs.replace(UP, fired_up_at=WALL - 0.2)
    assert shown(load=just_up, refused_since=NOW - 400, ages={"models": 0.6}, **SILENT).name == "warming-up"
    asked_since = {"models": 0.1, "unit": 0.05}
    assert shown(load=just_up, refused_since=NOW - 400, ages=asked_since, **SILENT).name == "crashed"


def test_a_port_that_refused_before_tokens_moved_is_of_the_past():
    state = shown(models=REFUSED, ages={"models": 3.0}, refused_since=NOW - 3, tokens_moved_at=NOW - 1)
    assert state.name == "ready"
    warms_up = recorded("tp2.log", until="Prefill batch")
    state = shown(
        load=warms_up,
        health=REFUSED,
        ready=REFUSED,
        models=REFUSED,
        ages={"models": 3.0},
        tokens_moved_at=NOW - 1,
    )
    assert state.name == "warming-up", "the port was bound and the warm-up sent since"


def test_a_stop_or_restart_that_systemd_has_not_told_yet_is_no_crash():
    """The port closed after systemd was last asked."""
    state = shown(load=UP, refused_since=NOW - 0.6, ages={"unit": 1.5, "models": 0.6}, **SILENT)
    assert state.name == "unreachable"


def test_an_engine_that_was_told_to_end_is_stopping_before_systemd_says_so():
    load = recorded("startup.log", until="SIGTERM received")
    assert load.stop_asked
    assert shown(load=load, health=STARTING, ready=STARTING).name == "stopping"
    assert shown(load=load, **SILENT).name == "stopping"


def test_a_next_run_is_not_judged_by_the_log_of_the_one_before():
    """systemd has started it again; the journal has not said a word of it yet."""
    again = unit(InvocationID="f" * 32, NRestarts="1")
    state = shown(the_unit=again, load=recorded("crash.log"), **SILENT)
    assert (state.name, state.phase) == ("starting", "starting")
    assert "attempt 2 after a crash" in reasons(state)


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"Result": "signal", "ExecMainCode": "2", "ExecMainStatus": "9"}, "killed by signal 9"),
        ({"Result": "timeout", "ExecMainCode": "2", "ExecMainStatus": "9"}, "result timeout"),
    ],
)
def test_a_stop_that_was_asked_for_and_ended_badly_is_still_a_stop(properties: dict[str, str], words: str):
    """SGLang before 0.5.2x ends itself with SIGKILL; systemd one that takes longer than TimeoutStopSec."""
    load = recorded("startup.log", until="SIGTERM received")
    state = shown(the_unit=died(**properties), load=load, **SILENT)
    assert state.name == "stopped"
    assert words in reasons(state)
    ending = unit(**{"ActiveState": "deactivating", "SubState": "stop-sigkill", **properties})
    assert shown(the_unit=ending, load=load, **SILENT).name == "stopping"


def test_what_systemd_cleans_up_after_a_crash_is_not_called_stopping():
    ending = unit(
        ActiveState="deactivating",
        SubState="final-sigterm",
        Result="exit-code",
        ExecMainCode="1",
        ExecMainStatus="1",
    )
    state = shown(the_unit=ending, load=recorded("crash.log"), **SILENT)
    assert state.name == "crashed"
    assert "illegal memory access" in state.reasons[0]


def test_what_looked_like_a_crash_is_not_one_when_the_engine_lives_on():
    load = followed([
        line("The server is fired up and ready to roll!", WALL - 500),
        line("plugin: error: cannot send telemetry", WALL - 100),
    ])  # fmt: skip
    assert load.crash is not None
    assert shown(load=load, tokens_moved_at=NOW - 1).name == "ready"
    assert shown(load=load, tokens_moved_at=None, ages={"health": 3}).name == "ready"
    assert shown(load=load, tokens_moved_at=NOW - 101, health=None).name == "crashed"


def test_restarts_weeks_apart_are_no_loop():
    """NRestarts is set back only by a start by hand."""
    load = msgspec.structs.replace(
        UP, fired_up_at=WALL - 9 * 86400, crash=Crash("nccl", "NCCL error", WALL - 1)
    )
    assert shown(the_unit=waits_for_restart(NRestarts="4"), load=load, **SILENT).name == "crashed"
    loading = recorded("startup.log", until="Load weight begin")
    again = unit(NRestarts="5")
    assert shown(the_unit=again, load=loading, previous=load, **SILENT).name == "starting"
    assert (
        shown(the_unit=again, load=loading, previous=recorded("crash.log"), **SILENT).name == "crash-looping"
    )


def test_systemd_giving_up_is_told_from_the_journal():
    """Result keeps the reason of the last crash; with StartLimitBurst=1 there was but one restart."""
    load = followed([
        line("torch.OutOfMemoryError: CUDA out of memory.", WALL - 5),
        line("sglang.service: Main process exited, code=exited, status=1/FAILURE", WALL - 4, manager=True),
        line("sglang.service: Start request repeated too quickly.", WALL - 3, manager=True),
    ])  # fmt: skip
    state = shown(the_unit=died(NRestarts="1"), load=load, **SILENT)
    assert state.name == "crash-looping"
    assert "CUDA out of memory" in state.reasons[0]
    assert "systemd gave up" in reasons(state)


def test_an_engine_that_ended_by_itself_and_is_started_again_did_not_crash():
    again = waits_for_restart(Result="success", ExecMainStatus="0", Restart="always")
    state = shown(the_unit=again, load=UP, **SILENT)
    assert (state.name, state.reasons) == ("starting", ("ended without an error; systemd starts it again",))


# Who answers ------------------------------------------------------------------------------------


def test_what_answers_while_the_unit_is_stopped_is_something_else():
    state = shown(the_unit=stopped())
    assert state.name == "degraded"
    assert "something that is not the unit" in reasons(state)


def test_the_last_answer_before_a_stop_accuses_nobody():
    assert shown(the_unit=stopped(WALL - 1), ages={"models": 1.5}, load=UP).name == "stopped"


def test_a_port_that_answers_in_the_middle_of_a_load_is_somebody_elses():
    """SGLang binds its port after the load and fails only then: ten minutes that this saves."""
    state = shown(load=recorded("startup.log", until="Load weight begin"), tokens_moved_at=NOW - 1)
    assert state.name == "starting"
    assert "something else answers" in reasons(state)


def test_a_log_that_is_no_longer_followed_does_not_hold_a_load_back():
    """journalctl ended in the middle of the load, and the engine came up."""
    load = recorded("startup.log", until="Load weight begin")
    assert shown(load=load, log_current=False).name == "ready"


def test_a_service_that_wants_a_key_says_where_it_goes():
    for status in (401, 403):
        state = shown(models=probe(status), figures=LOADED)
        assert state.name == "degraded"
        assert "api_key_file" in reasons(state)


def test_an_answer_that_is_not_sglangs_is_not_ready():
    assert shown(models=Probe("/v1/models", 200, "malformed", 0.1, "no list of models")).name == "unreachable"


def test_a_wrong_served_name_is_told():
    names = tuple(name for name, _ in model_list((FIXTURES / "engine" / "models-0.5.23.json").read_bytes()))
    state = shown(served_names=names, expected_name="kimi-k2.5")
    assert state.name == "degraded"
    assert f"serves {names[0]}, not kimi-k2.5" in reasons(state)
    assert shown(served_names=names, expected_name=names[0]).name == "ready"
    assert shown(served_names=(), expected_name="kimi-k2.5").name == "ready", "not known yet"


def test_a_full_kv_cache_matters_when_requests_wait_for_it():
    full = msgspec.structs.replace(LOADED, kv_usage_ratio=0.97, requests_queued=3)
    state = shown(figures=full, tokens_moved_at=NOW - 1)
    assert state.name == "degraded"
    assert "KV cache 97% full with 3 requests queued" in reasons(state)
    alone = msgspec.structs.replace(full, requests_queued=0)
    assert shown(figures=alone, tokens_moved_at=NOW - 1).name == "ready"


def test_a_poor_acceptance_matters_while_tokens_are_decoded():
    poor = rates("metrics-0.5.23-speculation.txt", accept_length=1.04, decode_tokens_per_s=40.0)
    assert "accept length 1.04" in reasons(shown(figures=poor, tokens_moved_at=NOW - 1))
    hours_ago = msgspec.structs.replace(poor, decode_tokens_per_s=0.0)
    assert shown(figures=hours_ago).name == "ready", "an idle engine keeps its last gauge"


def test_systemd_out_of_reach_is_told_beside_what_the_engine_says():
    missing = {"unit_error": "systemctl: not found"}
    state = shown(**missing)
    assert (state.name, state.reasons) == ("degraded", ("unit unknown: systemctl: not found",))
    state = shown(load=recorded("startup.log", until="Load weight begin"), **missing, **SILENT)
    assert (state.name, state.phase) == ("starting", "weights")
    state = shown(load=NOTHING_LOGGED, **missing, **SILENT)
    assert state.name == "unreachable"
    assert state.reasons == ("unit: systemctl: not found", "engine: connection refused")
    assert not state.looking


# What is too old, and what is not there yet -----------------------------------------------------


def test_old_answers_make_nothing_ready():
    minutes = {"health": 300.0, "ready": 300.0, "models": 300.0, "rates": 300.0}
    state = shown(ages=minutes)
    assert state.name == "unreachable"
    assert "not read for 300 s" in reasons(state)


def test_old_rates_make_nothing_busy_nor_hung():
    full = msgspec.structs.replace(LOADED, kv_usage_ratio=1.0, requests_queued=9)
    state = shown(
        figures=full,
        ages={"rates": 240},
        tokens_moved_at=NOW - 240,
        waiting_since=NOW - 240,
        health=probe(200),
    )
    assert (state.name, state.reasons) == ("ready", ())


def test_an_old_word_of_systemd_is_no_word():
    state = shown(ages={"unit": 180})
    assert state.name == "degraded"
    assert "unit unknown: not read for 180 s" in reasons(state)
    assert shown(the_unit=stopped(), ages={"unit": 180}, **SILENT).name == "unreachable"
    assert shown(ages={"unit": 8}).name == "ready", "a host that loads a model may be slow for a moment"


def test_the_first_look_is_no_alarm():
    nothing = Evidence(
        now=NOW, wall=WALL, unit=Reading("unit", 2), health=Reading("health", 5), ready=Reading("ready", 2),
        models=Reading("models", 2), rates=Reading("rates", 1),
    )  # fmt: skip
    state = derive(nothing)
    assert (state.name, state.looking, state.words) == ("unreachable", True, "LOOKING")
    for heard in (
        msgspec.structs.replace(nothing, unit=reading("unit", 2, unit())),
        msgspec.structs.replace(nothing, models=reading("models", 2, REFUSED)),
    ):
        state = derive(heard)
        assert state.looking or state.name == "starting"
    both = msgspec.structs.replace(
        nothing, unit=reading("unit", 2, stopped()), models=reading("models", 2, REFUSED)
    )
    assert derive(both).name == "stopped"
    answered = msgspec.structs.replace(nothing, models=reading("models", 2, OK))
    assert derive(answered).name in HEALTHY


def test_ready_before_health_has_answered_says_that_it_has_not():
    state = shown(health=None)
    assert (state.name, state.reasons) == ("ready", ("/health has not answered yet",))


# Nothing raises ---------------------------------------------------------------------------------

TIMES = st.one_of(st.none(), st.sampled_from([NOW - 0.5, NOW - 15, NOW - 30, NOW - 4000, NOW + 3600]))
WALLS = st.one_of(st.none(), st.sampled_from([WALL - 0.5, WALL - 30, WALL - 4000, WALL + 3600, 0.0]))
AGES = st.sampled_from([0.0, 1.0, 12.0, 39.0, 600.0, -5.0])
PROBES = st.builds(
    Probe,
    path=st.just("/x"),
    status=st.sampled_from([None, 200, 401, 403, 404, 500, 503]),
    error=st.sampled_from([None, "refused", "timeout", "reset", "malformed", "unreachable"]),
    seconds=st.sampled_from([0.0, 0.01, 1.2, 20.0, 25.0]),
)
UNITS = st.builds(
    UnitStatus,
    id=st.just("sglang.service"),
    load_state=st.sampled_from(["loaded", "not-found", "bad-setting", "error", "masked", ""]),
    active_state=st.sampled_from(
        ["active", "activating", "deactivating", "inactive", "failed", "reloading", "?"]
    ),
    sub_state=st.sampled_from(["running", "dead", "auto-restart", "auto-restart-queued", "start", ""]),
    result=st.sampled_from(["success", "exit-code", "signal", "timeout", "oom-kill", "start-limit-hit"]),
    exit_status=st.sampled_from([None, 0, 1, 9]),
    exit_code=st.sampled_from([None, "exited", "killed", "dumped"]),
    restarts=st.sampled_from([None, 0, 1, 2, 9]),
    invocation_id=st.sampled_from([None, RUN, "f" * 32]),
    started_at=WALLS,
    changed_at=WALLS,
    need_daemon_reload=st.booleans(),
)
LOADS = st.builds(
    LoadProgress,
    invocation=st.sampled_from([None, RUN]),
    phases=st.lists(
        st.builds(PhaseTime, st.sampled_from(PHASES), st.just(WALL - 50), WALLS, st.sampled_from([None, 0.0, 45.0])),
        max_size=3,
    ).map(tuple),
    fired_up_at=WALLS,
    crash=st.one_of(st.none(), st.builds(Crash, st.just("x"), st.just("why"), st.just(WALL - 20), remedy=st.sampled_from([None, "do"]))),
    last_progress_at=WALLS,
    prefilling=st.sampled_from([None, 0, 8192, 10**9]),
    stop_asked=st.booleans(),
    paused=st.booleans(),
)  # fmt: skip
FIGURES = st.sampled_from([
    EngineRates(), IDLE, LOADED,
    EngineRates(kv_usage_ratio=float("nan"), requests_queued=1, accept_length=float("inf"), retractions_per_min=1e9),
])  # fmt: skip


def readings(values: st.SearchStrategy, period: float) -> st.SearchStrategy:
    return st.builds(
        lambda value, age, error: reading("x", period, value, age, error),
        st.one_of(st.none(), values), AGES, st.sampled_from([None, "no answer within 3 s"]),
    )  # fmt: skip


EVIDENCE = st.builds(
    Evidence,
    now=st.just(NOW),
    wall=st.sampled_from([WALL, WALL - 3600, WALL + 3600]),
    unit=readings(UNITS, 2),
    health=readings(PROBES, 5),
    ready=readings(PROBES, 2),
    models=readings(PROBES, 2),
    rates=readings(FIGURES, 1),
    served_names=st.sampled_from([(), ("a",), ("a", "b")]),
    load=LOADS,
    log_current=st.booleans(),
    previous=st.one_of(st.none(), LOADS),
    began=TIMES,
    served_at=TIMES,
    refused_since=TIMES,
    tokens_moved_at=TIMES,
    waiting_since=TIMES,
    expected_name=st.sampled_from([None, "a", "c"]),
    expected_load_s=st.sampled_from([None, 1.0, 900.0]),
    complaints=st.sampled_from([(), ("card 0: Xid 79",)]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVIDENCE)
def test_any_evidence_gives_a_state_that_holds_together(found: Evidence):
    state = derive(found)
    assert state.words
    assert all(reason for reason in state.reasons)
    assert state.elapsed_s is None or state.elapsed_s >= 0
    assert state.eta_s is None or state.eta_s >= 0
    if state.name in ("hung", "crashed", "degraded", "unreachable", "crash-looping"):
        assert state.reasons, "an alarm says why"
    if state.name in HEALTHY:
        assert found.models.value is not None or found.tokens_moved_at is not None
        assert not found.complaints
    if state.looking:
        assert state.name == "unreachable"
