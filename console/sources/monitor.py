"""Follows every source and folds their readings into one frozen snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from console.model.card import Holder, NvmlSample, Owner, PciCard
from console.model.engine import EngineIdentity, EngineRates, Probe
from console.model.load import LoadWatch
from console.model.load_times import Expected
from console.model.log import LogLine
from console.model.profile import Profile
from console.model.reading import Reading
from console.model.site import Site
from console.model.snapshot import (
    Point,
    Snapshot,
    SourceWord,
    card_complaints,
    holder_complaints,
    view_cards,
)
from console.model.state import Evidence, ServiceState, derive
from console.model.text import clean
from console.model.unit import UnitStatus
from console.sources.connect import Sources, connect
from console.sources.engine.sources import (
    HealthSource,
    IdentitySource,
    Models,
    ModelsSource,
    RatesSource,
    ReadySource,
)
from console.sources.holders import read_holders
from console.sources.pci import PciSource
from console.sources.source import Apart, Source

#: Seconds of history that the charts can show, one point a second.
HISTORY_S = 1800

#: Lines of the journal kept for the screen.
LOG_LINES = 4000

#: Processes on the cards are read every 5 s; a list older than this, in seconds, accuses nobody.
HOLDERS_COUNT_S = 20.0

#: Seconds until a source that failed by a defect of ours is begun again.
AGAIN_S = 5.0

#: At the start, seconds that the cards have to come before the engine is asked, and then to be drawn.
CARDS_WAIT_S = 0.3
DRAW_S = 0.08

ENDED = "the source has ended"
_MODEL_PATH = re.compile(r"""model_path['"]?[=:] ?(['"])(.+?)\1""")


class Monitor:
    """Holds the latest word of every source; ``snapshot`` freezes it.

    ``expected`` says what this host's earlier loads of a profile took; it may wait for a
    disk, and does not fail. ``clock`` is monotonic and ``wall_clock`` Unix seconds; both
    are injected so that a test decides what time it is.
    """

    def __init__(
        self,
        site: Site,
        sources: Sources | None = None,
        profiles: tuple[Profile, ...] = (),
        *,
        notices: tuple[str, ...] = (),
        expected: Callable[[Profile], Expected | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.site = site
        self.sources = sources if sources is not None else connect(site)
        self._profiles = profiles
        self._notices = notices
        self.clock = clock
        self._wall_clock = wall_clock
        self._host = site.host or socket.gethostname()

        self.pci: Reading[tuple[PciCard, ...]] = Reading("pci", PciSource.period)
        self.nvml: Reading[NvmlSample] = Reading("nvml", 1.0)
        self.unit: Reading[UnitStatus] = Reading("unit", 2.0)
        self.journal: Reading[tuple[LogLine, ...]] = Reading("journal", 2.0)
        self.health: Reading[Probe] = Reading("health", HealthSource.period)
        self.ready: Reading[Probe] = Reading("ready", ReadySource.period)
        self.models: Reading[Models] = Reading("models", ModelsSource.period)
        self.identity: Reading[EngineIdentity] = Reading("identity", IdentitySource.period)
        self.rates: Reading[EngineRates] = Reading("rates", RatesSource.period)

        self.load = LoadWatch()
        self._log: deque[LogLine] = deque(maxlen=LOG_LINES)
        self._log_frozen: tuple[LogLine, ...] = ()
        self._log_total = 0
        self._history: deque[Point] = deque(maxlen=HISTORY_S)
        self._holders: tuple[Holder, ...] = ()
        self._holders_at: float | None = None
        self._profile: Profile | None = None
        self._named_in: str | None = None  # the invocation that named the model of ``_profile``
        self._apart: Apart[tuple[Holder, ...]] = Apart("holders")
        self._ask_expected = expected
        self._expected: Expected | None = None
        self._expected_of: _Load | None = None  # the load that ``_expected`` was asked for
        self._load_changed = asyncio.Event()
        self._remembering: Apart[Expected | None] = Apart("loads")
        self._processes_changed = asyncio.Event()
        self._cards_heard = asyncio.Event()

        # Of this run of the unit.
        self._began: float | None = None
        self._served_at: float | None = None
        self._refused_since: float | None = None
        self._generated: float | None = None
        self._prompted: float | None = None
        self._tokens_moved_at: float | None = None
        self._batch_logged: float | None = None  # Unix seconds of the newest batch line, as journald wrote it
        self._batch_logged_at: float | None = None
        self._in_flight_since: float | None = None

        self._state: ServiceState | None = None
        self._state_since = clock()

    async def run(self) -> None:
        """Follow every source until cancelled. A source that ends is said to have ended."""
        watched = self.sources
        async with asyncio.TaskGroup() as group:
            group.create_task(_follow(watched.pci, self.take_pci))
            group.create_task(_follow(watched.nvml, self.take_nvml))
            group.create_task(_follow(watched.unit, self.take_unit))
            group.create_task(_follow(watched.journal, self.take_journal))
            await self._cards_first()
            group.create_task(_follow(watched.health, self.take_health))
            group.create_task(_follow(watched.ready, self.take_ready))
            group.create_task(_follow(watched.models, self.take_models))
            group.create_task(_follow(watched.identity, self.take_identity))
            group.create_task(_follow(watched.rates, self.take_rates))
            group.create_task(self._follow_holders())
            group.create_task(self._follow_loads())

    async def _cards_first(self) -> None:
        """Let the cards come to the screen before the first request imports the HTTP client.

        That takes 60 ms, in which nothing is drawn. Cards that keep silent are not waited for.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CARDS_WAIT_S):
                await self._cards_heard.wait()
                await asyncio.sleep(DRAW_S)

    async def close(self) -> None:
        """End the NVML process, which holds the device files, and the connections."""
        await self.sources.nvml.close()
        await self.sources.client.close()

    def take_pci(self, reading: Reading[tuple[PciCard, ...]]) -> None:
        self.pci = reading

    def take_nvml(self, reading: Reading[NvmlSample]) -> None:
        known = self.nvml.value.processes_at if self.nvml.value is not None else None
        self.nvml = reading
        self._cards_heard.set()
        if reading.value is not None and reading.value.processes_at != known:
            self._processes_changed.set()

    async def read_holders(self) -> None:
        """Find out whose the processes are that NVML named last.

        Not on the event loop: /proc/PID/cmdline waits for the memory lock of a process, which
        one that is stuck in the driver may hold.
        """
        sample = self.nvml.value
        self._processes_changed.clear()
        if sample is None or sample.processes_at is None:
            return

        def read() -> tuple[Holder, ...]:
            site = self.site
            return read_holders(
                self.sources.host.root, sample, container=site.container.id, unit=site.service.unit
            )

        self._holders = await self._apart(read)
        self._holders_at = sample.processes_at

    async def _follow_holders(self) -> None:
        while True:
            await self._processes_changed.wait()
            await self.read_holders()

    @property
    def _known_load(self) -> _Load | None:
        """The profile of the run that journal and unit show; None until the run has named its model."""
        run, unit = self.load.progress.invocation, self.unit.value
        behind = unit is not None and unit.invocation_id is not None and run not in (None, unit.invocation_id)
        if self._profile is None or self._named_in != run or behind:
            return None
        return (self._profile.name, run)

    async def read_expected(self) -> None:
        """Ask what earlier loads of the profile that loads took, once a load."""
        self._load_changed.clear()
        wanted, profile, ask = self._known_load, self._profile, self._ask_expected
        over = self.load.progress.fired_up_at is not None
        if wanted is None or wanted == self._expected_of or over or profile is None or ask is None:
            return
        self._expected = await self._remembering(lambda: ask(profile))
        self._expected_of = wanted

    async def _follow_loads(self) -> None:
        while True:
            await self._load_changed.wait()
            await self.read_expected()

    def take_unit(self, reading: Reading[UnitStatus]) -> None:
        before, after = self.unit.value, reading.value
        self.unit = reading
        if after is None or (before is not None and _run_of(before) == _run_of(after)):
            return
        now = self.clock()
        self._began = None
        if after.started_at is not None:
            # Once on the monotonic clock, it does not move with the wall's.
            self._began = now - max(0.0, self._wall_clock() - after.started_at)
        if before is not None:
            self._forget_run()
        self._load_changed.set()

    def _forget_run(self) -> None:
        """Another run of the engine: what was said and counted belongs to the one before."""
        self._served_at = self._tokens_moved_at = self._in_flight_since = None
        self._generated = self._prompted = self._batch_logged_at = None
        told = self.identity.taken_at
        if told is not None and self._began is not None and told < self._began:
            self.identity = Reading(self.identity.source, self.identity.period)

    def take_journal(self, reading: Reading[tuple[LogLine, ...]]) -> None:
        before, self.journal = self.journal, reading
        # A failed reading repeats the last value; only a fresh one brings lines.
        lines = reading.value if _is_fresh(before, reading) and reading.value else ()
        if not lines:
            return
        if not self._log:
            self._fill_history(lines)
        for line in lines:
            self.load.feed(line)
            self._note_model(line)
        if self._known_load != self._expected_of:
            self._load_changed.set()
        self._log.extend(lines)
        self._log_total += len(lines)
        self._log_frozen = tuple(self._log)
        self._note_batches()

    def _note_batches(self) -> None:
        """A batch line's time is put on the monotonic clock as it arrives: the wall clock may jump later."""
        logged = self.load.progress.last_progress_at
        if logged == self._batch_logged:
            return
        self._batch_logged = logged
        age = None if logged is None else max(0.0, self._wall_clock() - logged)
        self._batch_logged_at = None if age is None else self.clock() - age

    def _note_model(self, line: LogLine) -> None:
        """Which profile a load is of: its first line names the model, minutes before HTTP does."""
        if "server_args=" not in line.text[:80]:
            return
        found = _MODEL_PATH.search(line.text)
        if found is not None:
            self._profile = profile_of(EngineIdentity(model_path=found[2]), self._profiles)
            self._named_in = line.invocation

    def _fill_history(self, lines: tuple[LogLine, ...]) -> None:
        """Charts that begin before the console did: from the decode lines of the journal's past."""
        now, wall = self.clock(), self._wall_clock()
        first = self._history[0].at if self._history else now
        past = [
            point
            for line in lines
            if line.kind == "decode" and (point := _decode_point(line, now - (wall - line.at))) is not None
        ]
        kept = [point for point in past if now - HISTORY_S < point.at < first]
        self._history = deque([*kept, *self._history], maxlen=HISTORY_S)

    def take_health(self, reading: Reading[Probe]) -> None:
        before, self.health = self.health, reading
        self._note_served(before, reading)

    def take_ready(self, reading: Reading[Probe]) -> None:
        before, self.ready = self.ready, reading
        self._note_served(before, reading)

    def _note_served(self, before: Reading[Probe], after: Reading[Probe]) -> None:
        if _is_fresh(before, after) and after.value is not None and after.value.ok:
            self._served_at = after.taken_at

    def take_models(self, reading: Reading[Models]) -> None:
        before, self.models = self.models, reading
        if not _is_fresh(before, reading) or reading.value is None:
            return
        if reading.value.probe.error != "refused":
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = reading.taken_at

    def take_identity(self, reading: Reading[EngineIdentity]) -> None:
        before, self.identity = self.identity, reading
        told = reading.value if _is_fresh(before, reading) else None
        if told is not None and (told.model_path is not None or told.served_names):
            self._profile = profile_of(told, self._profiles)
            self._named_in = self.load.progress.invocation
            self._load_changed.set()

    def take_rates(self, reading: Reading[EngineRates]) -> None:
        before, self.rates = self.rates, reading
        now = self.clock()
        rates = reading.value if _is_fresh(before, reading) else None
        if rates is None:
            self._history.append(Point(now, None, None, None))
            return
        self._history.append(
            Point(now, rates.decode_tokens_per_s, rates.prefill_tokens_per_s, rates.accept_length)
        )
        if self._tokens_moved(rates):
            self._tokens_moved_at = now
        self._note_in_flight(rates, now)

    def _tokens_moved(self, rates: EngineRates) -> bool:
        """Whether a token counter moved since the last reading that had it.

        One that went down says that the engine restarted, not that it lives. Prompt tokens are
        counted when a request ends; the rate of a long prompt's chunks tells before that.
        """
        moved = bool(rates.prefill_tokens_per_s)
        if rates.generated_tokens_total is not None:
            moved = moved or rates.generated_tokens_total > (
                rates.generated_tokens_total if self._generated is None else self._generated
            )
            self._generated = rates.generated_tokens_total
        if rates.prompt_tokens_total is not None:
            moved = moved or rates.prompt_tokens_total > (
                rates.prompt_tokens_total if self._prompted is None else self._prompted
            )
            self._prompted = rates.prompt_tokens_total
        return moved

    def _note_in_flight(self, rates: EngineRates, now: float) -> None:
        """Since when requests are in flight; without a counter of tokens nobody can say they wait."""
        waiting = bool(rates.requests_running or rates.requests_queued)
        if not waiting or rates.generated_tokens_total is None:
            self._in_flight_since = None
        elif self._in_flight_since is None:
            self._in_flight_since = now

    def snapshot(self) -> Snapshot:
        """Everything as it is known now."""
        now, wall = self.clock(), self._wall_clock()
        site = self.site
        container = site.container.id if site.container.kind == "lxc" else None
        cards = view_cards(
            self.pci, self.nvml, container=container, vm=site.vm.id if site.vm else None, now=now
        )
        service_owner = Owner("host") if container is None else Owner("ct", container)
        index_of = {card.pci.address: card.index for card in cards}
        known = self._holders_at is not None and now - self._holders_at <= HOLDERS_COUNT_S
        complaints = (
            *card_complaints(cards, service_owner),
            *(holder_complaints(self._holders, index_of) if known else ()),
        )
        state = derive(self.evidence(now, wall, complaints))
        if self._state is None or state.name != self._state.name:
            self._state_since = now
        self._state = state
        sample = self.nvml.value
        models = self.models.value
        return Snapshot(
            now=now,
            wall=wall,
            host=self._host,
            site=site,
            state=state,
            state_since=self._state_since,
            cards=cards,
            cards_at=self.nvml.taken_at,
            holders=self._holders,
            holders_at=self._holders_at,
            driver_version=sample.driver_version if sample is not None else None,
            unit=self.unit,
            health=self.health,
            rates=self.rates,
            identity=self.identity.value,
            served_names=models.names if models is not None else (),
            load=self.load.progress,
            profile=self._profile,
            history=tuple(self._history),
            log=self._log_frozen,
            log_total=self._log_total,
            sources=self._words(now),
            notices=self._notices,
        )

    def evidence(self, now: float, wall: float, complaints: tuple[str, ...]) -> Evidence:
        """What the state is derived from, at this moment."""
        models = self.models.value
        moved = max(
            (at for at in (self._tokens_moved_at, self._batch_logged_at) if at is not None), default=None
        )
        waiting = self._in_flight_since
        if waiting is not None and moved is not None:
            waiting = max(waiting, moved)
        loads = self._known_load
        # Until the memory has answered no time is better than a wrong one.
        silent = self._ask_expected is not None and self.load.progress.fired_up_at is None
        asked = loads is not None and (loads == self._expected_of or not silent)
        load = self._profile.load if self._profile is not None and asked else None
        return Evidence(
            now=now,
            wall=wall,
            unit=self.unit,
            health=self.health,
            ready=self.ready,
            models=Reading(
                "models",
                self.models.period,
                models.probe if models is not None else None,
                self.models.taken_at,
                self.models.error,
            ),
            rates=self.rates,
            identity=self.identity.value,
            served_names=models.names if models is not None else (),
            load=self.load.progress,
            log_current=self.journal.error is None and not self.journal.stale(now),
            previous=self.load.previous,
            began=self._began,
            served_at=self._served_at,
            refused_since=self._refused_since,
            tokens_moved_at=moved,
            waiting_since=waiting,
            expected_name=self._profile.served_name if self._profile is not None else None,
            expected_load_s=load.expect_s if load is not None else None,
            expected=self._expected if asked and loads == self._expected_of else None,
            complaints=complaints,
        )

    def _words(self, now: float) -> tuple[SourceWord, ...]:
        readings: tuple[Reading[Any], ...] = (
            self.pci,
            self.nvml,
            self.unit,
            self.journal,
            self.health,
            self.models,
            self.identity,
            self.rates,
        )
        return tuple(SourceWord(one.source, one.age(now), one.stale(now), one.error) for one in readings)


_Load = tuple[str, str | None]  # a profile's name, and the invocation that loads it


def _decode_point(line: LogLine, at: float) -> Point | None:
    """What a decode line said; None for one rank of several, whose parts would have to be added up."""
    if line.rank is not None and "DP" in line.rank:
        return None
    return Point(at, _amount(line, "gen throughput (token/s)"), None, _amount(line, "accept len"))


def _amount(line: LogLine, name: str) -> float | None:
    try:
        return float(line.fields[name])
    except (KeyError, ValueError):
        return None


def _is_fresh(before: Reading[Any], after: Reading[Any]) -> bool:
    """The reading brings a value of its own. A note of trouble beside a new value does not void it."""
    return after.error is None or after.taken_at != before.taken_at


def _run_of(unit: UnitStatus) -> tuple[object, ...]:
    """What tells one run of a unit from the next; a unit that is stopped has no invocation."""
    return (unit.invocation_id,) if unit.invocation_id else (None, unit.started_at)


async def _follow(source: Source[Any], fold: Callable[[Reading[Any]], None]) -> None:
    """Fold a source's readings; a defect costs this source a while, and no other anything."""
    last: Reading[Any] = Reading(source.name, source.period)
    while True:
        try:
            async for reading in source.watch():
                last = reading
                fold(reading)
        except Exception as defect:  # noqa: BLE001  it is shown beside the source
            fold(last.failed(defect_words(source, defect)))
            await asyncio.sleep(AGAIN_S)
        else:
            fold(last.failed(ENDED))
            return


def defect_words(source: Source[Any], defect: Exception) -> str:
    return f"defect in source {source.name}: {type(defect).__name__}: {clean(str(defect))}"


def profile_of(identity: EngineIdentity, profiles: tuple[Profile, ...]) -> Profile | None:
    """The profile that the engine runs: by the model's path, else by the served name.

    Of several with the same model, the one with the served name, too.
    """
    path, names = identity.model_path, identity.served_names
    by_path = [one for one in profiles if path is not None and one.text("model-path") == path]
    by_name = [one for one in profiles if one.served_name in names]
    both = [one for one in by_path if one in by_name]
    return next(iter(both or by_path or by_name), None)
