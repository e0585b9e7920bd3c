"""When a load will be ready, by earlier loads: of any pace, late, and what is worth keeping."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.load import LoadWatch
from console.model.load_times import (
    Expected,
    Forecast,
    PhaseExpected,
    by_profile,
    forecast,
    phase_seconds,
    seen_whole,
)
from console.model.log import Crash, LoadProgress, LogLine, PhaseTime
from console.model.unit import UnitStatus
from console.model.words import about
from console.sources.engine_log import read_line

RUN = "a" * 32
STARTED = 1_796_000_000.0

#: Seconds of the phases of an ordinary load of this host, 600 in all.
USUAL = {"starting": 30, "distributed": 10, "weights": 470, "kv-cache": 5, "graphs": 60, "warm-up": 25}
WHOLE = float(sum(USUAL.values()))


def known(loads: int = 6, slower: float = 1.1, **phases: float) -> Expected:
    usual = USUAL | phases
    whole = float(sum(usual.values()))
    return Expected(
        loads,
        whole,
        whole * (0.9 if loads > 1 else 1),
        whole * (slower if loads > 1 else 1),
        {
            name: PhaseExpected(float(taken), taken * (slower if loads > 1 else 1))
            for name, taken in usual.items()
        },
    )


class Run:
    """A load that takes ``took`` seconds a phase, as it is seen at any moment; its bar moves by shards."""

    def __init__(self, shards: int = 64, **took: float) -> None:
        self.took = USUAL | took
        self.shards = shards

    @property
    def whole(self) -> float:
        return float(sum(self.took.values()))

    def at(self, elapsed: float) -> LoadProgress:
        phases: list[PhaseTime] = []
        began = 0.0
        for name, taken in self.took.items():
            if began > elapsed:
                break
            ended = began + taken
            over = ended <= elapsed
            phase = PhaseTime(name, STARTED + began, STARTED + ended if over else None)  # type: ignore[arg-type]
            if name == "weights" and not over:
                done = int((elapsed - began) / taken * self.shards)
                read_at = STARTED + began + done * taken / self.shards
                phase = msgspec.structs.replace(
                    phase, percent=float(round(100 * done / self.shards)), percent_at=read_at
                )
            phases.append(phase)
            began = ended
        return LoadProgress(RUN, tuple(phases))

    def told(self, elapsed: float, of: Expected) -> Forecast:
        return forecast(of, self.at(elapsed), elapsed, STARTED)


# What is left -----------------------------------------------------------------------------------


@pytest.mark.parametrize("elapsed", [0, 15, 35, 60, 200, 400, 505, 520, 570, 580])
def test_an_ordinary_load_is_foretold_to_the_second_in_every_phase(elapsed: float):
    told = Run().told(elapsed, known())
    assert told.eta_s == pytest.approx(WHOLE - elapsed, abs=10)
    assert told.over_s is None and told.slow == ()


def test_what_is_over_no_longer_counts_whatever_it_took():
    """The imports took 200 s longer: all that follows is as ever."""
    assert Run(starting=230).told(235, known()).eta_s == pytest.approx(WHOLE - 30 - 5, abs=1)


@pytest.mark.parametrize("weights", [100, 250, 900, 1500])
def test_the_bar_of_the_weights_tells_how_fast_the_disk_is_today(weights: float):
    run = Run(weights=weights)
    for share in (0.4, 0.6, 0.8, 0.95):
        elapsed = 40 + weights * share
        told = run.told(elapsed, known())
        # What may follow a full bar, a draft model, is left room for.
        assert told.eta_s == pytest.approx(run.whole - elapsed, abs=0.05 * 470 + 0.02 * weights + 2)


def test_the_first_per_cent_of_a_bar_are_not_believed():
    slow_beginning = PhaseTime("weights", STARTED + 40, None, 1.0, None, STARTED + 70)
    load = LoadProgress(RUN, (PhaseTime("starting", STARTED, STARTED + 40), slow_beginning))
    told = forecast(known(), load, 71, STARTED)
    assert told.eta_s is not None and told.eta_s < 700, "30 s for one per cent would make 3000"


def test_a_draft_model_after_a_full_bar_makes_no_jump():
    lines = [
        (0, "server_args={'model_path': '/m'}"),
        (40, "[2026-11-30 12:00:00 TP0] Load weight begin. avail mem=94 GB"),
        (130, "Loading safetensors checkpoint shards:  90% Completed | 58/64 [01:21<00:09]"),
        (140, "[2026-11-30 12:00:00 TP0] Load weight end. elapsed=100 s, avail mem=20 GB, mem usage=74 GB."),
        (141, "[2026-11-30 12:00:00 TP0] Load weight begin. avail mem=20 GB"),
        (141, "Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?]"),
    ]  # fmt: skip
    watch, etas = LoadWatch(), []
    for after, text in lines:
        meaning = read_line(text)
        watch.feed(
            LogLine(
                at=STARTED + after,
                text=text,
                invocation=RUN,
                **{
                    name: getattr(meaning, name)
                    for name in ("kind", "rank", "fields", "phase", "percent", "ends")
                },
            )
        )
        etas.append(forecast(known(), watch.progress, after, STARTED).eta_s)
    nine_tenths, full, draft, bar = etas[2:]
    assert nine_tenths == pytest.approx(90 + 10, abs=25), "the page cache had it all: 470 s are not to come"
    assert full == pytest.approx(90 + 23.5)
    assert draft == bar == pytest.approx(90 + 22.5)


def test_without_a_load_of_this_host_the_profile_has_the_word():
    told = Run().told(250, by_profile(585))
    assert (told.eta_s, told.spread_s, told.loads, told.basis) == (335, None, 0, "of 9m45 by the profile")
    late = Run().told(685, by_profile(585))
    assert (late.eta_s, late.over_s, late.late) == (None, 100, "100 s longer than the profile expects")


def test_a_load_whose_beginning_was_not_seen_is_judged_by_the_time_since_the_start():
    load = LoadProgress(
        RUN, (PhaseTime("starting", STARTED + 200, STARTED + 200), PhaseTime("weights", STARTED + 200))
    )
    told = forecast(known(), load, 300, STARTED)
    assert told.eta_s == pytest.approx(300)
    assert told.slow == ()


def test_the_wall_clock_may_jump():
    for jump in (-3600, 3600):
        told = forecast(known(), Run().at(200), 200, STARTED + jump)
        assert told.eta_s == pytest.approx(400, abs=6)


def test_a_phase_that_never_was_is_not_awaited_and_does_not_break_the_rest():
    old = known(**{"host-cache": 50})
    assert Run().told(520, old).eta_s == pytest.approx(WHOLE + 50 - 520, abs=6)  # it may come
    assert Run().told(590, old).eta_s == pytest.approx(10, abs=6)  # it did not
    new = Run()
    new.took = {**USUAL, "host-cache": 40}
    assert new.told(605, known()).over_s is None


# How sure that is -------------------------------------------------------------------------------


def test_the_spread_is_of_what_is_left_and_told_only_when_there_is_one():
    early, late = Run().told(0, known()), Run().told(300, known())
    assert early.spread_s == pytest.approx(60) and late.spread_s == pytest.approx(30, abs=1)
    assert late.basis == "±30s, 6 loads"
    one = Run().told(300, known(loads=1))
    assert (one.spread_s, one.basis) == (None, "1 load known")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "5s"), (3, "5s"), (22, "20s"), (47, "50s"), (64, "1m"), (118, "2m"), (151, "2m30"),
     (335, "5m30"), (580, "9m30"), (641, "11m"), (3599, "1h00"), (5000, "1h23")],
)  # fmt: skip
def test_a_time_that_is_judged_is_told_no_more_exactly_than_it_is_known(seconds: float, told: str):
    assert about(seconds) == told


# What is late -----------------------------------------------------------------------------------


def test_a_phase_slower_than_ever_is_named_and_noise_is_not():
    assert Run(distributed=40).told(200, known()).slow == ("distributed",)
    assert Run(distributed=12).told(200, known()).slow == ()
    assert Run(distributed=40).told(200, known(loads=1)).slow == (), "one load is no measure"


def test_a_load_that_hangs_is_late_and_says_by_how_much_and_than_what():
    stuck = Run(graphs=10_000)
    assert stuck.told(515 + 62, known()).eta_s is not None
    usual = stuck.told(515 + 71, known(slower=1.5))
    assert usual.eta_s is not None
    usual = stuck.told(515 + 80, known(slower=1.5))
    assert (usual.eta_s, usual.over_s) == (None, 20)
    assert usual.complaints == ("later than usual: graphs 20s over 1m00",)
    ever = stuck.told(515 + 60 * 1.1 + 120, known())
    assert ever.over_s == pytest.approx(120)
    assert ever.slow == ("graphs",)
    assert ever.complaints == ("later than ever: graphs 2m00 over the slowest of 6 loads (1m06)",)
    once = stuck.told(515 + 100, known(loads=1))
    assert once.complaints == ("graphs 40s over the one load known (1m00)",)


def test_a_phase_that_was_slow_is_told_while_the_next_is_on_time():
    told = Run(distributed=60).told(200, known())
    assert told.eta_s is not None
    assert told.complaints == ("slower than ever: distributed",)


# Any load ---------------------------------------------------------------------------------------

PACES = st.floats(min_value=0.05, max_value=20)
RUNS = st.builds(
    lambda paces, shards: Run(
        shards, **{name: USUAL[name] * pace for name, pace in zip(USUAL, paces, strict=True)}
    ),
    st.tuples(*[PACES] * len(USUAL)),
    st.integers(min_value=1, max_value=200),
)
MEMORIES = st.builds(
    known, loads=st.sampled_from([1, 2, 20]), slower=st.floats(min_value=1.0, max_value=4.0)
) | st.just(by_profile(585.0))


@given(RUNS, MEMORIES, st.floats(min_value=0, max_value=1.2))
def test_no_time_is_negative_and_a_late_load_says_why(run: Run, of: Expected, share: float):
    told = run.told(run.whole * share, of)
    assert (told.eta_s is None) == (told.over_s is not None) == (told.late is not None)
    assert told.eta_s is None or told.eta_s >= 0
    assert told.over_s is None or told.over_s > 0
    assert told.spread_s is None or told.spread_s >= 0
    assert all(told.complaints)


@given(RUNS, MEMORIES, st.floats(min_value=0, max_value=1), st.floats(min_value=0.01, max_value=600))
def test_while_nothing_new_is_said_the_time_left_only_shrinks(
    run: Run, of: Expected, share: float, later: float
):
    """No reading, no reason: the same lines of the log, some seconds later."""
    elapsed = run.whole * share
    load = run.at(elapsed)
    before = forecast(of, load, elapsed, STARTED)
    after = forecast(of, load, elapsed + later, STARTED)
    if before.eta_s is None:
        assert after.eta_s is None, "late once, late until something happens"
        assert after.over_s is not None and before.over_s is not None and after.late and before.late
        # Past the slowest load the overrun is counted from that one, and says so.
        if after.late.partition(":")[0] == before.late.partition(":")[0]:
            assert after.over_s > before.over_s - 1e-6
    elif after.eta_s is not None:
        assert before.eta_s - later - 1e-6 <= after.eta_s < before.eta_s
        assert after.slow[: len(before.slow)] == before.slow or set(before.slow) <= set(after.slow)


@given(st.floats(min_value=0.97, max_value=1.03), st.integers(min_value=4, max_value=200))
def test_a_load_at_the_usual_pace_counts_down_without_a_jump(pace: float, shards: int):
    run = Run(shards, **{name: taken * pace for name, taken in USUAL.items()})
    of = known()
    last: float | None = None
    for second in range(0, int(run.whole), 5):
        eta = run.told(float(second), of).eta_s
        assert eta is not None
        # A phase that ends some seconds early takes what was left of it along, and no more.
        assert last is None or abs(eta - (last - 5)) <= 0.05 * WHOLE
        last = eta


# What is worth keeping --------------------------------------------------------------------------


def unit(**changed: object) -> UnitStatus:
    values: dict[str, object] = {
        "id": "sglang.service", "load_state": "loaded", "active_state": "active", "sub_state": "running",
        "invocation_id": RUN, "started_at": STARTED,
    }  # fmt: skip
    return UnitStatus(**{**values, **changed})  # type: ignore[arg-type]


WELL = msgspec.structs.replace(Run().at(WHOLE), fired_up_at=STARTED + WHOLE)


def test_a_load_is_worth_keeping_when_it_was_seen_from_its_start_until_it_was_up():
    assert seen_whole(WELL, unit())
    assert seen_whole(WELL, unit(started_at=STARTED + 40)), (
        "what systemd ran before the process is part of it"
    )


@pytest.mark.parametrize(
    ("load", "status"),
    [
        (WELL, unit(started_at=STARTED - 60)),
        (WELL, unit(invocation_id="b" * 32)),
        (WELL, unit(started_at=None)),
        (WELL, None),
        (msgspec.structs.replace(WELL, fired_up_at=None), unit()),
        (msgspec.structs.replace(WELL, crash=Crash("oom", "out of memory", STARTED + 650)), unit()),
        (msgspec.structs.replace(WELL, phases=WELL.phases[1:]), unit()),
        (msgspec.structs.replace(WELL, phases=()), unit()),
        (msgspec.structs.replace(WELL, invocation=None), unit()),
    ],
    ids=[
        "joined late",
        "another run",
        "start unknown",
        "no unit",
        "not up",
        "crash",
        "cut",
        "none",
        "no run",
    ],
)
def test_what_was_not_seen_whole_is_not(load: LoadProgress, status: UnitStatus | None):
    assert not seen_whole(load, status)


def test_the_phases_of_a_load_add_up_to_the_whole():
    gaps = (
        PhaseTime("starting", 0.0, 10.0),
        PhaseTime("weights", 12.0, 40.0),
        PhaseTime("kv-cache", 45.0, 50.0),
        PhaseTime("weights", 51.0, 60.0),
        PhaseTime("warm-up", 61.0),
    )
    seconds = phase_seconds(LoadProgress(RUN, gaps, fired_up_at=70.0))
    assert seconds == {"starting": 12.0, "weights": 43.0, "kv-cache": 6.0, "warm-up": 9.0}
    assert sum(seconds.values()) == 70.0
