"""The monitor against scripted sources and clocks: what it folds, what it forgets, and one quick look."""

# ruff: noqa: E501  log lines are as long as they are

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from console.model.card import CardProcess, CardTelemetry, NvmlSample, PciCard, PciFunction, PciLink, Xid
from console.model.engine import EngineIdentity, EngineRates, Probe
from console.model.log import LogLine
from console.model.profile import Expect, Load, Profile
from console.model.reading import Reading
from console.model.site import Container, Site
from console.model.snapshot import Snapshot
from console.model.unit import UnitStatus
from console.sources import monitor as module
from console.sources.connect import Sources
from console.sources.engine.client import Answer
from console.sources.engine.sources import Models
from console.sources.engine_log import read_line
from console.sources.monitor import LOG_LINES, Monitor, profile_of
from console.sources.once import observe_once

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engine"
CARD = "0000:41:00.0"
RUN, NEXT_RUN = "a" * 32, "b" * 32
WALL = 1_796_000_000.0


class Clock:
    """Monotonic and wall clock of a test."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.jumped = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return WALL + self.now + self.jumped


class Scripted:
    """A source that gives the readings of a script, and then waits, ends or fails."""

    def __init__(
        self, name: str, period: float, *script: Reading | Exception | float, ends: bool = False
    ) -> None:
        self.name, self.period, self.deadline = name, period, period
        self.script, self.ends = script, ends
        self.watched = self.closed = 0

    async def watch(self) -> AsyncIterator[Reading]:
        self.watched += 1
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield step
            if not self.ends:
                await asyncio.Event().wait()
        finally:
            self.closed += 1

    async def close(self) -> None:
        pass


class Client:
    """Answers by path; a path that is not there refuses the connection."""

    def __init__(self, answers: dict[str, tuple[int, bytes]] | None = None) -> None:
        self.answers, self.asked = answers or {}, []

    async def get(self, path: str, deadline: float, *, limit: int = 0) -> Answer:
        path = path.partition("?")[0]
        self.asked.append(path)
        status, body = self.answers.get(path, (None, b""))
        if status == 0:
            await asyncio.sleep(deadline)
            return Answer(Probe(path, None, "timeout", deadline))
        return Answer(
            Probe(path, status, "refused" if status is None else None, 0.001), body, time.monotonic()
        )

    async def close(self) -> None:
        pass


def silent(name: str, period: float = 1.0) -> Scripted:
    return Scripted(name, period)


def sources(root: Path = Path("/nowhere"), client: Client | None = None, **scripted: Scripted) -> Sources:
    host = SimpleNamespace(name="host", root=root)
    names = ("pci", "nvml", "unit", "journal", "health", "ready", "models", "identity", "rates")
    watched: dict[str, Any] = {name: scripted.get(name, silent(name)) for name in names}
    return Sources(host=host, service=host, client=client or Client(), **watched)  # type: ignore[arg-type]


SITE = Site(host="pve1", container=Container("lxc", 129))


class Watched:
    """A monitor whose clock a test moves, and shorthands for what sources say."""

    def __init__(self, clock: Clock, root: Path = Path("/nowhere"), *profiles: Profile) -> None:
        self.clock = clock
        self.monitor = Monitor(
            SITE, sources(root), profiles, clock=clock.monotonic, wall_clock=clock.wall
        )  # fmt: skip

    def fresh(self, name: str, period: float, value: object) -> Reading:
        return Reading(name, period, value, self.clock.now)

    def unit(self, run: str | None = RUN, **changed: object) -> None:
        values: dict[str, Any] = {
            "id": "sglang.service", "load_state": "loaded", "active_state": "active", "sub_state": "running",
            "invocation_id": run, "started_at": WALL + 400, "restarts": 0,
        }  # fmt: skip
        self.monitor.take_unit(self.fresh("unit", 2.0, UnitStatus(**{**values, **changed})))

    def rates(self, tokens: float | None = None, running: int | None = 0, **more: object) -> None:
        figures = EngineRates(
            generated_tokens_total=tokens, requests_running=running, requests_queued=0, **more
        )  # type: ignore[arg-type]
        self.monitor.take_rates(self.fresh("rates", 1.0, figures))

    def models(self, status: int | None = 200, error: str | None = None, *names: str) -> None:
        self.monitor.take_models(
            self.fresh("models", 2.0, Models(Probe("/v1/models", status, error, 0.01), names))
        )

    def well(self) -> None:
        self.unit()
        self.models()
        for take in (self.monitor.take_ready, self.monitor.take_health):
            take(self.fresh("x", 5.0, Probe("/x", 200, None, 1.1)))

    def log(self, *texts: str, age: float = 0.0, run: str | None = RUN) -> None:
        lines = []
        for text in texts:
            found = read_line(text)
            lines.append(LogLine(at=self.clock.wall() - age, text=text, invocation=run, kind=found.kind, rank=found.rank,
                                 fields=found.fields, phase=found.phase, percent=found.percent, ends=found.ends))  # fmt: skip
        self.monitor.take_journal(self.fresh("journal", 2.0, tuple(lines)))

    def shown(self) -> Snapshot:
        return self.monitor.snapshot()

    def later(self, seconds: float) -> None:
        self.clock.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watched(clock: Clock) -> Watched:
    return Watched(clock)


def pci_card(driver: str = "nvidia", *, present: bool = True, link: PciLink | None = None) -> PciCard:
    function = PciFunction(CARD, 0x10DE, 0x2BB1, 0x030000, driver, None, "D0")
    return PciCard(CARD, (function,), 7, link or PciLink(32.0, 16, 32.0, 16), 0, present=present)


def sample(at: float, used: int = 5, *pids: int) -> NvmlSample:
    processes = {CARD: tuple(CardProcess(pid, 1 << 30) for pid in pids)}
    card = CardTelemetry(address=CARD, memory_used_bytes=used)
    return NvmlSample(driver_version="595.45", cards=(card,), processes=processes, processes_at=at)


# Folding ----------------------------------------------------------------------------------------


def test_before_anything_was_read_nothing_is_known_and_nothing_is_wrong(watched: Watched):
    shown = watched.shown()
    assert shown.state.looking
    assert (shown.cards, shown.holders_at, shown.unit.value, shown.rates.value) == ((), None, None, None)
    assert all(word.age_s is None and word.stale for word in shown.sources)
    assert shown.host == "pve1"


def test_a_failed_reading_keeps_the_last_value_with_its_age_and_says_why(watched: Watched):
    watched.unit()
    watched.later(5)
    watched.monitor.take_unit(watched.monitor.unit.failed("systemctl: deadline passed"))
    shown = watched.shown()
    assert shown.unit.value is not None
    assert shown.unit.age(shown.now) == 5
    (word,) = [word for word in shown.sources if word.name == "unit"]
    assert (word.age_s, word.stale, word.error) == (5, False, "systemctl: deadline passed")
    watched.later(2)
    assert [word.stale for word in watched.shown().sources if word.name == "unit"] == [True]


def test_a_note_of_trouble_beside_a_new_sample_does_not_void_it(watched: Watched):
    watched.monitor.take_pci(watched.fresh("pci", 5.0, (pci_card(),)))
    watched.monitor.take_nvml(watched.fresh("nvml", 1.0, sample(1000.0, 5)))
    watched.later(1)
    note = "2 malformed lines from the NVML process"
    watched.monitor.take_nvml(Reading("nvml", 1.0, sample(1001.0, 6), watched.clock.now, note))
    shown = watched.shown()
    (card,) = shown.cards
    assert card.telemetry is not None
    assert (card.telemetry.memory_used_bytes, card.stale_s, shown.cards_at) == (6, None, 1001.0)
    assert [word.error for word in shown.sources if word.name == "nvml"] == [note]


def test_a_sample_that_is_no_longer_renewed_says_how_old_it_is(watched: Watched):
    watched.monitor.take_pci(watched.fresh("pci", 5.0, (pci_card(),)))
    watched.monitor.take_nvml(watched.fresh("nvml", 1.0, sample(1000.0)))
    watched.later(9)
    (card,) = watched.shown().cards
    assert card.stale_s == 9


def test_a_card_that_another_driver_took_shows_none_of_its_past(watched: Watched):
    """NVML is ended for a rebind and keeps its last value; the card is a VM's by then."""
    watched.monitor.take_nvml(watched.fresh("nvml", 1.0, sample(1000.0)))
    watched.monitor.take_pci(watched.fresh("pci", 5.0, (pci_card("vfio-pci"),)))
    (card,) = watched.shown().cards
    assert (card.telemetry, card.stale_s) == (None, None)


def test_without_sysfs_the_cards_that_nvml_names_are_shown(watched: Watched):
    watched.monitor.take_pci(Reading("pci", 5.0).failed("no such folder"))
    watched.monitor.take_nvml(watched.fresh("nvml", 1.0, sample(1000.0)))
    (card,) = watched.shown().cards
    assert (card.pci.address, str(card.owner)) == (CARD, "ct:129")


@pytest.mark.parametrize(
    ("card", "problem"),
    [
        (pci_card(present=False), "off the bus"),
        (pci_card(link=PciLink(32.0, 8, 32.0, 16)), "link x8 of x16"),
    ],
)
def test_a_card_in_trouble_degrades_the_service(watched: Watched, card: PciCard, problem: str):
    watched.well()
    watched.monitor.take_pci(watched.fresh("pci", 5.0, (card,)))
    shown = watched.shown()
    assert shown.cards[0].problems == (problem,)
    assert shown.state.name == "degraded"
    assert shown.state.reasons == (f"card 0 ({CARD}): {problem}",)


def test_the_fault_of_a_program_is_marked_on_the_card_and_does_not_degrade_the_next_run(watched: Watched):
    watched.well()
    watched.monitor.take_pci(watched.fresh("pci", 5.0, (pci_card(),)))
    faults = tuple(Xid(CARD, code, 900.0) for code in (31, 45))
    watched.monitor.take_nvml(
        watched.fresh("nvml", 1.0, msgspec.structs.replace(sample(1000.0), xids=faults))
    )
    shown = watched.shown()
    assert (shown.cards[0].problems, shown.state.name) == (("program Xid 45",), "ready")
    worse = (Xid(CARD, 79, 950.0), *faults)
    watched.monitor.take_nvml(watched.fresh("nvml", 1.0, msgspec.structs.replace(sample(1000.0), xids=worse)))
    shown = watched.shown()
    assert (shown.cards[0].problems, shown.state.name) == (("Xid 79",), "degraded")


# Proofs of life ---------------------------------------------------------------------------------


def stuck(watched: Watched, tokens: float | None, running: int | None = 1, **more: object) -> str:
    """The state while the figures stay the same and ``/health`` waits in vain."""
    for _ in range(40):
        watched.later(1)
        watched.unit()
        watched.models()
        watched.rates(tokens, running, **more)
    return watched.shown().state.name


def test_requests_in_flight_without_a_token_are_hung_after_a_while(watched: Watched):
    watched.well()
    watched.rates(100, 1)
    assert watched.shown().state.name == "ready"
    assert stuck(watched, 100) == "hung"
    watched.later(1)
    watched.unit()
    watched.models()
    watched.rates(101, 1)
    assert watched.shown().state.name in ("ready", "busy")


def test_no_requests_no_hang(watched: Watched):
    watched.well()
    watched.rates(100, 0)
    assert stuck(watched, 100, 0) == "ready"
    assert stuck(watched, 100, None) == "ready"


def test_a_prompt_that_is_prefilled_for_a_minute_is_life(watched: Watched):
    """Its tokens are counted when the request ends; only the rate of its chunks moves."""
    watched.well()
    watched.rates(100, 1)
    assert stuck(watched, 100, 1, prefill_tokens_per_s=4100.0) in ("ready", "busy")


def test_without_token_counters_nobody_says_that_requests_wait(watched: Watched):
    """The engine runs without --enable-metrics: what runs is known, what it produces is not."""
    watched.well()
    assert stuck(watched, None, 3) == "ready"


def test_a_counter_that_is_not_there_for_a_moment_is_no_life(watched: Watched):
    """A scrape was cut off."""
    watched.well()
    watched.rates(100, 1)
    for second in range(40):
        watched.later(1)
        watched.unit()
        watched.models()
        watched.rates(None if second == 30 else 100, 1)
    assert watched.monitor._tokens_moved_at is None


def test_counters_that_fell_are_a_restart_and_no_life(watched: Watched):
    watched.well()
    watched.rates(5000, 0)
    watched.later(1)
    watched.rates(3, 0)
    assert watched.monitor._tokens_moved_at is None
    watched.later(1)
    watched.rates(4, 0)
    assert watched.monitor._tokens_moved_at == watched.clock.now


DECODE = "Decode batch, #running-req: 1, #token: 63, token usage: 0.02, gen throughput (token/s): 27.9, #queue-req: 0"


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_wall_clock_that_jumps_neither_hides_a_hang_nor_makes_one(watched: Watched, jump: float):
    """Without /metrics the log's batch lines are the only sign of life."""
    waits = Probe("/health", 503, None, 20.0)
    watched.well()
    watched.log(DECODE)
    watched.clock.jumped = jump
    for seconds, name in ((5, "busy"), (35, "hung")):
        watched.later(seconds)
        watched.unit()
        watched.models()
        watched.monitor.take_health(watched.fresh("health", 5.0, waits))
        watched.log()
        assert watched.shown().state.name == name


def test_lines_of_the_past_are_no_sign_of_life_now(watched: Watched):
    watched.well()
    watched.log(DECODE, age=500)
    evidence = watched.monitor.evidence(watched.clock.now, watched.clock.wall(), ())
    assert evidence.tokens_moved_at == pytest.approx(watched.clock.now - 500)


# The next run -----------------------------------------------------------------------------------


def test_another_run_starts_with_nothing_counted_and_nothing_known(watched: Watched):
    watched.well()
    watched.rates(100, 1)
    watched.later(1)
    watched.rates(120, 1)
    watched.monitor.take_identity(watched.fresh("identity", 30.0, EngineIdentity(model_path="/models/old")))
    watched.later(20)
    watched.unit(NEXT_RUN, started_at=watched.clock.wall() - 1)
    watched.models(None, "refused")
    shown = watched.shown()
    assert shown.state.name == "starting"
    assert shown.state.elapsed_s == pytest.approx(1)
    assert shown.identity is None, "it was the old engine's"
    evidence = watched.monitor.evidence(shown.now, shown.wall, ())
    assert (evidence.tokens_moved_at, evidence.waiting_since, evidence.served_at) == (None, None, None)
    watched.later(60)
    watched.unit(NEXT_RUN, started_at=WALL + 1021)
    watched.models(None, "refused")
    watched.clock.jumped = 3600
    assert watched.shown().state.elapsed_s == pytest.approx(61), "whatever the wall clock does meanwhile"


def test_the_same_run_read_again_forgets_nothing(watched: Watched):
    watched.well()
    watched.rates(100)
    watched.later(1)
    watched.rates(120)
    watched.unit()
    assert watched.monitor._tokens_moved_at == watched.clock.now


def test_a_state_is_said_to_hold_since_it_changed(watched: Watched):
    watched.well()
    began = watched.shown().state_since
    watched.later(3)
    watched.well()
    assert watched.shown().state_since == began
    watched.unit(active_state="deactivating", sub_state="stop-sigterm")
    assert watched.shown().state_since == watched.clock.now


def test_a_restart_is_never_shown_as_a_crash(watched: Watched):
    """What each source says while an operator restarts the service, in the order it is heard."""
    names = []

    def step(seconds: float, *heard: Callable[[], None]) -> None:
        watched.later(seconds)
        for one in heard:
            one()
        names.append(watched.shown().state.name)

    def refused() -> None:
        watched.models(None, "refused")

    watched.well()
    watched.log("The server is fired up and ready to roll!", age=100)
    step(0.1)
    step(0.3, refused)
    step(1.2, lambda: watched.unit(active_state="deactivating", sub_state="stop-sigterm"))
    step(1, refused)
    step(1, lambda: watched.unit(NEXT_RUN, started_at=watched.clock.wall() - 1), refused)
    step(1, lambda: watched.log("server_args={'model_path': '/models/m'}", run=NEXT_RUN))
    step(2, lambda: watched.unit(NEXT_RUN), refused)
    assert names == ["ready", "unreachable", "stopping", "stopping", "starting", "starting", "starting"]


# History and log --------------------------------------------------------------------------------


def test_a_second_without_rates_is_a_gap_in_the_charts_and_not_a_zero(watched: Watched):
    watched.rates(1, decode_tokens_per_s=150.0, accept_length=3.1)
    watched.later(1)
    watched.monitor.take_rates(watched.monitor.rates.failed("/metrics: timeout"))
    watched.later(1)
    watched.rates(1, decode_tokens_per_s=0.0)
    points = watched.shown().history
    assert [point.decode_tokens_per_s for point in points] == [150.0, None, 0.0]
    assert [point.accept_length for point in points] == [3.1, None, None]
    assert [point.at for point in points] == [1000.0, 1001.0, 1002.0]


def test_a_failed_reading_of_rates_counts_for_nothing(watched: Watched):
    watched.rates(100, 1)
    before = watched.monitor._in_flight_since
    watched.later(5)
    watched.monitor.take_rates(watched.monitor.rates.failed("/metrics: timeout"))
    assert (watched.monitor._in_flight_since, watched.monitor._tokens_moved_at) == (before, None)


def test_a_note_of_trouble_beside_new_rates_or_lines_does_not_void_them(watched: Watched):
    figures = EngineRates(generated_tokens_total=7.0, decode_tokens_per_s=20.0)
    watched.monitor.take_rates(Reading("rates", 1.0, figures, watched.clock.now, "cut off"))
    line = LogLine(at=watched.clock.wall(), text="one")
    watched.monitor.take_journal(Reading("journal", 2.0, (line,), watched.clock.now, "lines may be missing"))
    shown = watched.shown()
    assert [point.decode_tokens_per_s for point in shown.history] == [20.0]
    assert shown.log == (line,)


def test_a_port_that_refuses_again_refuses_since_then(watched: Watched):
    since = []
    for status, error in (
        (None, "refused"),
        (None, "refused"),
        (200, None),
        (None, "refused"),
        (None, "timeout"),
    ):
        watched.later(2)
        watched.models(status, error)
        evidence = watched.monitor.evidence(watched.clock.now, watched.clock.wall(), ())
        since.append(evidence.refused_since)
    assert since == [1002.0, 1002.0, None, 1008.0, None]


def test_the_charts_forget_what_is_older_than_half_an_hour(watched: Watched):
    for second in range(1810):
        watched.later(1)
        watched.rates(float(second))
    assert len(watched.shown().history) == 1800


def test_the_charts_begin_with_what_the_journal_remembers(watched: Watched):
    watched.rates(1, decode_tokens_per_s=5.0)
    watched.log(DECODE, age=60)
    watched.log(DECODE, age=30)
    points = watched.shown().history
    assert [(round(point.at), point.decode_tokens_per_s) for point in points] == [(940, 27.9), (1000, 5.0)]


def test_the_log_is_kept_to_a_length_and_counted_to_its_end(watched: Watched):
    for start in range(0, LOG_LINES + 500, 500):
        watched.log(*(f"line {number}" for number in range(start, start + 500)))
    shown = watched.shown()
    assert (len(shown.log), shown.log_total) == (LOG_LINES, LOG_LINES + 500)
    assert (shown.log[0].text, shown.log[-1].text) == ("line 500", f"line {LOG_LINES + 499}")


def test_a_journal_that_fails_repeats_no_line(watched: Watched):
    watched.log("one")
    watched.monitor.take_journal(watched.monitor.journal.failed("journalctl ended"))
    watched.log()
    assert [line.text for line in watched.shown().log] == ["one"]


# Profiles ---------------------------------------------------------------------------------------


def profile(
    name: str, path: str | None = None, served: str | None = None, expect_s: float | None = None
) -> Profile:
    args: dict[str, Any] = {} if path is None else {"model-path": path}
    return Profile(name=name, title=name, args=args, load=Load(expect_s), expect=Expect(served_name=served))


KIMI, KIMI_DRAFT, QWEN, BARE = (
    profile("kimi", "/models/kimi", "kimi-k2.5", 585.0),
    profile("kimi-draft", "/models/kimi", "kimi-eagle"),
    profile("qwen", "/models/qwen", "qwen3.5"),
    profile("bare", None, "bare"),
)


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        (EngineIdentity(model_path="/models/kimi", served_names=("kimi-k2.5",)), "kimi"),
        (EngineIdentity(model_path="/models/kimi", served_names=("kimi-eagle",)), "kimi-draft"),
        (EngineIdentity(model_path="/models/kimi", served_names=("else",)), "kimi"),
        (EngineIdentity(model_path="/mnt/copy/qwen", served_names=("qwen3.5",)), "qwen"),
        (EngineIdentity(model_path="/models/unknown", served_names=("unknown",)), None),
        (EngineIdentity(), None),
        (EngineIdentity(served_names=("bare",)), "bare"),
    ],
)
def test_the_profile_that_runs_is_known_by_model_and_name(identity: EngineIdentity, name: str | None):
    found = profile_of(identity, (KIMI, KIMI_DRAFT, QWEN, BARE))
    assert (found.name if found else None) == name


def test_a_load_is_of_the_model_that_its_first_line_names(clock: Clock):
    """HTTP says it ten minutes later; the time to ready is wanted now."""
    watched = Watched(clock, Path("/nowhere"), QWEN, KIMI)
    watched.unit(started_at=clock.wall() - 85)
    watched.models(None, "refused")
    watched.log(
        "[2026-11-30 01:03:01] server_args={'model_path': '/models/kimi', 'tokenizer_path': '/models/qwen'}"
    )
    shown = watched.shown()
    assert (shown.profile, shown.state.eta_s) == (KIMI, 500)
    watched.log("[2026-11-30 01:03:01] server_args=ServerArgs(model_path='/models/qwen', tokenizer_path='x')")
    assert watched.shown().profile == QWEN


def test_a_model_of_no_profile_is_not_shown_as_the_one_before(clock: Clock):
    watched = Watched(clock, Path("/nowhere"), KIMI)
    watched.well()
    watched.monitor.take_identity(watched.fresh("identity", 30.0, EngineIdentity(model_path="/models/kimi")))
    assert watched.shown().profile == KIMI
    watched.later(30)
    watched.monitor.take_identity(watched.monitor.identity.failed("/server_info: timeout"))
    assert watched.shown().profile == KIMI, "a failure says nothing about it"
    watched.monitor.take_identity(watched.fresh("identity", 30.0, EngineIdentity(model_path="/models/other")))
    assert watched.shown().profile is None


# Holders ----------------------------------------------------------------------------------------


def stranger(root: Path, pid: int = 4242) -> Path:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"NSpid:\t{pid}\n")
    (folder / "cgroup").write_text("0::/user.slice/user-0.slice/session-4.scope\n")
    (folder / "cmdline").write_bytes(b"train.py\0")
    return root


async def test_a_stranger_on_a_card_degrades_the_service_until_the_list_is_old(clock: Clock, tmp_path: Path):
    watched = Watched(clock, stranger(tmp_path))
    watched.well()
    watched.monitor.take_pci(watched.fresh("pci", 5.0, (pci_card(),)))
    watched.monitor.take_nvml(watched.fresh("nvml", 1.0, sample(clock.now, 5, 4242)))
    await watched.monitor.read_holders()
    shown = watched.shown()
    assert shown.state.reasons == ("train.py (pid 4242) holds card 0 and is not the service's",)
    assert (shown.holders[0].pid, shown.holders_at) == (4242, clock.now)
    watched.later(60)
    watched.well()
    assert watched.shown().state.name == "ready", "NVML is silent; the process may be long gone"


async def test_a_process_that_keeps_its_proc_files_keeps_nothing_else(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """/proc/PID/cmdline waits for a lock that a process stuck in the driver may hold."""
    release = threading.Event()
    monkeypatch.setattr(module, "read_holders", lambda *a, **k: release.wait(10) and ())
    sampled = Scripted("nvml", 1.0, Reading("nvml", 1.0, sample(1000.0, 5, 1), 1000.0))
    monitor = Monitor(
        SITE, sources(nvml=sampled, unit=Scripted("unit", 2.0, 0.05, Reading("unit", 2.0, None, None, "x")))
    )
    task = asyncio.create_task(monitor.run())
    try:
        await until(lambda: monitor.unit.error == "x")
        assert monitor.nvml.value is not None
    finally:
        release.set()
        await ended(task)


# Running ----------------------------------------------------------------------------------------


async def until(true: Callable[[], bool], within: float = 5.0) -> None:
    async with asyncio.timeout(within):
        while not true():  # noqa: ASYNC110  what is waited for is a value, and tells nobody
            await asyncio.sleep(0.005)


async def ended(task: asyncio.Task) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_every_source_is_followed_and_closed_at_the_end():
    watched = sources(**{
        name: Scripted(name, 1.0, Reading(name, 1.0).failed(f"{name} says so"))
        for name in ("pci", "nvml", "unit", "journal", "health", "ready", "models", "identity", "rates")
    })  # fmt: skip
    monitor = Monitor(SITE, watched)
    task = asyncio.create_task(monitor.run())
    names = ("pci", "nvml", "unit", "journal", "health", "ready", "models", "identity", "rates")
    await until(lambda: all(getattr(monitor, name).error == f"{name} says so" for name in names))
    await ended(task)
    assert [getattr(watched, name).closed for name in names] == [1] * 9


async def test_a_source_that_ends_or_breaks_is_said_to_and_costs_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.02)
    value = UnitStatus(id="u", load_state="loaded", active_state="active", sub_state="running")
    ends = Scripted("unit", 2.0, Reading("unit", 2.0, value, 5.0), ends=True)
    breaks = Scripted("journal", 2.0, ZeroDivisionError("\x1b[31moops"))
    lives = Scripted("pci", 5.0, 0.1, Reading("pci", 5.0, (pci_card(),), 5.0))
    monitor = Monitor(SITE, sources(unit=ends, journal=breaks, pci=lives))
    task = asyncio.create_task(monitor.run())
    await until(lambda: monitor.pci.value is not None and breaks.watched > 1)
    assert (monitor.unit.value, monitor.unit.error) == (value, "the source has ended")
    assert monitor.journal.error == "defect in source journal: ZeroDivisionError: oops"
    assert not task.done()
    await ended(task)


async def test_the_cards_come_first_but_silent_ones_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch):
    said = Reading("health", 5.0).failed("asked")
    for wait, cards, asked in (
        (5.0, (0.05, Reading("nvml", 1.0, sample(0.0), 0.0)), True),
        (0.05, (), False),
    ):
        monkeypatch.setattr(module, "CARDS_WAIT_S", wait)
        nvml = Scripted("nvml", 1.0, *cards)
        monitor = Monitor(SITE, sources(nvml=nvml, health=Scripted("health", 5.0, said)))
        task = asyncio.create_task(monitor.run())
        await until(lambda monitor=monitor: monitor.health.error == "asked", within=1.0)
        assert (monitor.nvml.value is not None) is asked
        await ended(task)


# One look ---------------------------------------------------------------------------------------

HERE = "0.5.23"
ANSWERS = {
    "/ready": (200, b"{}"),
    "/metrics": (200, (FIXTURES / f"metrics-{HERE}-load.txt").read_bytes()),
    "/v1/models": (200, (FIXTURES / f"models-{HERE}.json").read_bytes()),
    "/v1/loads": (200, (FIXTURES / f"loads-{HERE}.json").read_bytes()),
    "/server_info": (200, (FIXTURES / f"server_info-{HERE}.json").read_bytes()),
    "/model_info": (200, (FIXTURES / f"model_info-{HERE}.json").read_bytes()),
}


def now_reading(name: str, period: float, value: object) -> Reading:
    return Reading(name, period, value, time.monotonic())


def machine(client: Client, root: Path = Path("/nowhere"), **more: Scripted) -> Sources:
    status = UnitStatus(
        id="sglang.service", load_state="loaded", active_state="active", sub_state="running",
        invocation_id=RUN, started_at=time.time() - 90,
    )  # fmt: skip
    return sources(root, client, **{
        "pci": Scripted("pci", 5.0, now_reading("pci", 5.0, (pci_card(),))),
        "nvml": Scripted("nvml", 1.0, now_reading("nvml", 1.0, sample(time.monotonic(), 5, 4242))),
        "unit": Scripted("unit", 2.0, now_reading("unit", 2.0, status)),
        **more,
    })  # fmt: skip


async def look(watched: Sources, budget: float = 2.0) -> tuple[Snapshot, float]:
    began = time.monotonic()
    shown = await observe_once(Monitor(SITE, watched), budget)
    return shown, time.monotonic() - began


async def test_one_look_sees_everything_and_leaves_the_journal_alone(tmp_path: Path):
    watched = machine(Client(ANSWERS), stranger(tmp_path))
    shown, took = await look(watched)
    assert took < 0.5
    assert shown.served_names
    assert shown.identity is not None
    assert shown.rates.value is not None
    assert shown.rates.value.kv_usage_ratio is not None
    assert [holder.pid for holder in shown.holders] == [4242]
    assert shown.state.name == "degraded", "by the stranger"
    assert watched.journal.watched == 0  # type: ignore[attr-defined]
    assert [one.closed for one in (watched.pci, watched.nvml, watched.unit)] == [1, 1, 1]  # type: ignore[attr-defined]


async def test_one_look_at_a_silent_engine_reads_the_whole_past_of_its_journal():
    wall = time.time()

    def batch(*texts: str) -> Reading:
        lines = []
        for text in texts:
            found = read_line(text)
            lines.append(LogLine(at=wall - 20, text=text, invocation=RUN, kind=found.kind, phase=found.phase,
                                 percent=found.percent, fields=found.fields, ends=found.ends))  # fmt: skip
        return now_reading("journal", 2.0, tuple(lines))

    journal = Scripted(
        "journal", 2.0, batch("server_args={'model_path': '/models/m'}", "Init torch distributed begin."), 0.1,
        batch("Load weight begin.", "Loading safetensors checkpoint shards:  45% Completed | 29/64 [02:40<03:13]"),
    )  # fmt: skip
    shown, took = await look(machine(Client(), journal=journal))
    assert (shown.state.name, shown.state.phase, shown.state.percent) == ("starting", "weights", 45)
    assert shown.log_total == 4
    assert took < 1.2
    assert journal.closed == 1


async def test_one_look_never_takes_longer_than_its_budget():
    slow = dict.fromkeys(ANSWERS, (0, b""))
    watched = sources(client=Client(slow))
    shown, took = await look(watched, 0.4)
    assert took < 0.8
    assert shown.state.name == "unreachable"
    errors = {word.name: word.error for word in shown.sources}
    for name in ("pci", "nvml", "unit"):
        assert errors[name] == "no answer within 0.4 s"
    assert errors["journal"] is not None
    assert shown.cards == ()


async def test_one_look_waits_for_a_driver_that_starts_but_not_for_one_that_is_not_there():
    starting = Reading("nvml", 1.0).failed("NVML is starting: nvmlInit, 1 s so far")
    sampled = now_reading("nvml", 1.0, sample(time.monotonic()))
    shown, _ = await look(machine(Client(ANSWERS), nvml=Scripted("nvml", 1.0, starting, 0.1, sampled)))
    assert shown.cards[0].telemetry is not None
    shown, took = await look(machine(Client(ANSWERS), nvml=Scripted("nvml", 1.0, starting)), 0.4)
    assert [word.error for word in shown.sources if word.name == "nvml"] == [starting.error]
    absent = Reading("nvml", 1.0).failed("libnvidia-ml.so.1 cannot be loaded")
    shown, took = await look(machine(Client(ANSWERS), nvml=Scripted("nvml", 1.0, absent)))
    assert took < 0.5
    assert shown.cards[0].telemetry is None


async def test_one_look_at_an_older_engine_tells_that_it_still_warms_up():
    """Before 0.5.20 there is no /ready, and /v1/models answers as soon as the port is bound."""
    older = ANSWERS | {"/ready": (404, b""), "/health": (503, b"")}
    shown, _ = await look(machine(Client(older)))
    assert shown.state.name == "warming-up"
    shown, took = await look(machine(Client(ANSWERS | {"/ready": (404, b""), "/health": (0, b"")})))
    assert shown.state.name == "ready"
    assert took < 0.6


async def test_one_look_after_another_keeps_what_the_second_did_not_get():
    monitor = Monitor(SITE, machine(Client(ANSWERS)))
    await observe_once(monitor)
    monitor.sources = machine(
        Client(ANSWERS), nvml=silent("nvml"), pci=Scripted("pci", 5.0, RuntimeError("bad"))
    )
    shown = await observe_once(monitor, 0.3)
    errors = {word.name: word.error for word in shown.sources}
    assert shown.cards[0].telemetry is not None
    assert errors["nvml"] == "no answer within 0.3 s"
    assert errors["pci"] == "defect in source pci: RuntimeError: bad"
