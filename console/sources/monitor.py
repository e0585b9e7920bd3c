"""Follows every source and folds their readings into one frozen snapshot."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.model.card import Holder, NvmlSample, Owner, PciCard
from console.model.engine import EngineIdentity, EngineRates, Probe
from console.model.load import LoadWatch
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
from console.model.unit import UnitStatus
from console.sources.engine.client import EngineClient
from console.sources.engine.sources import (
    HealthSource,
    IdentitySource,
    Models,
    ModelsSource,
    RatesSource,
    ReadySource,
    read_once,
)
from console.sources.holders import read_holders
from console.sources.journal import JournalSource
from console.sources.nvml import NvmlSource
from console.sources.pci import PciSource
from console.sources.source import attempt
from console.sources.unit import UnitSource
from console.transport.box import BoxRunner
from console.transport.container import lxc
from console.transport.local import LocalRunner
from console.transport.runner import Runner

#: Seconds of history that the charts can show, one point a second.
HISTORY_S = 1800

#: Lines of the journal kept for the screen.
LOG_LINES = 4000


@dataclass(frozen=True)
class Sources:
    """Everything that is watched at one site, and the runners that reach it."""

    host: Runner
    service: Runner  # where the service's systemd is
    pci: PciSource
    nvml: NvmlSource
    unit: UnitSource
    journal: JournalSource
    client: EngineClient
    health: HealthSource
    ready: ReadySource
    models: ModelsSource
    identity: IdentitySource
    rates: RatesSource


def connect(site: Site) -> Sources:
    """The sources of a site. Nothing is opened or asked yet."""
    host: Runner = LocalRunner()
    cards: Runner = host
    if site.simulated is not None:
        host = BoxRunner(Path(site.simulated.directory))
        cards = LocalRunner() if site.simulated.nvml == "library" else host
    service = host
    if site.container.kind == "lxc" and site.container.id is not None:
        service = lxc(host, site.container.id)
    key_file = site.service.api_key_file
    client = EngineClient(site.service.url, Path(key_file) if key_file else None)
    identity = IdentitySource(client)
    return Sources(
        host=host,
        service=service,
        pci=PciSource(host.root, None if site.gpus == "auto" else site.gpus),
        nvml=NvmlSource(cards),
        unit=UnitSource(service, site.service.unit),
        journal=JournalSource(service, site.service.unit),
        client=client,
        health=HealthSource(client),
        ready=ReadySource(client),
        models=ModelsSource(client),
        identity=identity,
        rates=RatesSource(client, identity.latest),
    )


class Monitor:
    """Holds the latest word of every source; ``snapshot`` freezes it.

    ``clock`` is monotonic and ``wall_clock`` Unix seconds; both are injected so
    that a test decides what time it is.
    """

    def __init__(
        self,
        site: Site,
        sources: Sources | None = None,
        profiles: tuple[Profile, ...] = (),
        *,
        notices: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.site = site
        self.sources = sources if sources is not None else connect(site)
        self._profiles = profiles
        self._notices = notices
        self._clock = clock
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
        self._tokens: float | None = None
        self._tokens_moved_at: float | None = None
        self._in_flight_since: float | None = None
        self._state: ServiceState | None = None
        self._state_since = clock()

    async def run(self) -> None:
        """Follow every source until cancelled. A source that ends is said to have ended."""
        watched = self.sources
        async with asyncio.TaskGroup() as group:
            for readings, fold in (
                (watched.pci.watch(), self.take_pci),
                (watched.nvml.watch(), self.take_nvml),
                (watched.unit.watch(), self.take_unit),
                (watched.journal.watch(), self.take_journal),
                (watched.health.watch(), self.take_health),
                (watched.ready.watch(), self.take_ready),
                (watched.models.watch(), self.take_models),
                (watched.identity.watch(), self.take_identity),
                (watched.rates.watch(), self.take_rates),
            ):
                group.create_task(_follow(readings, fold))

    async def close(self) -> None:
        """End the NVML process, which holds the device files, and the connections."""
        await self.sources.nvml.close()
        await self.sources.client.close()

    def take_pci(self, reading: Reading[tuple[PciCard, ...]]) -> None:
        self.pci = reading

    def take_nvml(self, reading: Reading[NvmlSample]) -> None:
        known = self.nvml.value.processes_at if self.nvml.value is not None else None
        self.nvml = reading
        sample = reading.value
        if sample is not None and sample.processes_at != known:
            self._holders = read_holders(
                self.sources.host.root,
                sample,
                container=self.site.container.id,
                unit=self.site.service.unit,
            )
            self._holders_at = sample.processes_at

    def take_unit(self, reading: Reading[UnitStatus]) -> None:
        before = self.unit.value
        self.unit = reading
        unit = reading.value
        if unit is not None and before is not None and before.invocation_id != unit.invocation_id:
            # Another run of the engine: what its counters said belongs to the one before.
            self._tokens = self._tokens_moved_at = self._in_flight_since = None

    def take_journal(self, reading: Reading[tuple[LogLine, ...]]) -> None:
        self.journal = reading
        # A failed reading repeats the last value; only a fresh one brings lines.
        lines = reading.value if reading.error is None and reading.value else ()
        if lines and not self._log:
            self._fill_history(lines)
        for line in lines:
            self.load.feed(line)
        if lines:
            self._log.extend(lines)
            self._log_total += len(lines)
            self._log_frozen = tuple(self._log)

    def _fill_history(self, lines: tuple[LogLine, ...]) -> None:
        """Charts that begin before the console did: from the decode lines of the journal's past."""
        now, wall = self._clock(), self._wall_clock()
        first = self._history[0].at if self._history else now
        past = [
            point
            for line in lines
            if line.kind == "decode" and (point := _decode_point(line, now - (wall - line.at))) is not None
        ]
        kept = [point for point in past if now - HISTORY_S < point.at < first]
        self._history = deque([*kept, *self._history], maxlen=HISTORY_S)

    def take_health(self, reading: Reading[Probe]) -> None:
        self.health = reading

    def take_ready(self, reading: Reading[Probe]) -> None:
        self.ready = reading

    def take_models(self, reading: Reading[Models]) -> None:
        self.models = reading

    def take_identity(self, reading: Reading[EngineIdentity]) -> None:
        self.identity = reading
        if reading.error is None and reading.value is not None:
            found = profile_of(reading.value, self._profiles)
            self._profile = found or self._profile

    def take_rates(self, reading: Reading[EngineRates]) -> None:
        self.rates = reading
        now = self._clock()
        rates = reading.value if reading.error is None else None
        self._history.append(
            Point(
                now,
                None if rates is None else rates.decode_tokens_per_s,
                None if rates is None else rates.prefill_tokens_per_s,
                None if rates is None else rates.accept_length,
            )
        )
        if rates is None:
            return
        tokens = (rates.generated_tokens_total or 0.0) + (rates.prompt_tokens_total or 0.0)
        if self._tokens is not None and tokens != self._tokens:
            self._tokens_moved_at = now
        self._tokens = tokens
        if rates.requests_running or rates.requests_queued:
            if self._in_flight_since is None:
                self._in_flight_since = now
        else:
            self._in_flight_since = None

    def snapshot(self) -> Snapshot:
        """Everything as it is known now."""
        now, wall = self._clock(), self._wall_clock()
        site = self.site
        container = site.container.id if site.container.kind == "lxc" else None
        cards = view_cards(
            self.pci, self.nvml, container=container, vm=site.vm.id if site.vm else None, now=now
        )
        service_owner = Owner("host") if container is None else Owner("ct", container)
        index_of = {card.pci.address: card.index for card in cards}
        complaints = (
            *card_complaints(cards, service_owner),
            *holder_complaints(self._holders, index_of),
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
        progress = self.load.progress
        moved = self._moved_at(now, wall)
        waiting = self._in_flight_since
        if waiting is not None and moved is not None:
            waiting = max(waiting, moved)
        load = self._profile.load if self._profile is not None else None
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
            load=progress,
            tokens_moved_at=moved,
            waiting_since=waiting,
            expected_name=self._profile.served_name if self._profile is not None else None,
            expected_load_s=load.expect_s if load is not None else None,
            complaints=complaints,
        )

    def _moved_at(self, now: float, wall: float) -> float | None:
        """When the scheduler last proved alive: by its counters, or by a batch line in its log."""
        logged = self.load.progress.last_progress_at
        by_log = None if logged is None else now - max(0.0, wall - logged)
        proofs = [at for at in (self._tokens_moved_at, by_log) if at is not None]
        return max(proofs, default=None)

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


async def _follow(readings: AsyncIterator[Reading[Any]], fold: Callable[[Reading[Any]], None]) -> None:
    async for reading in readings:
        fold(reading)


def profile_of(identity: EngineIdentity, profiles: tuple[Profile, ...]) -> Profile | None:
    """The profile that the engine runs: by the model's path, else by the served name."""
    by_path = [one for one in profiles if one.args.get("model-path") == identity.model_path]
    by_name = [one for one in profiles if one.served_name in identity.served_names]
    return next(iter(by_path or by_name), None)


async def observe_once(monitor: Monitor, budget: float = 2.0) -> Snapshot:
    """One look at everything, as fast as the slowest source that is worth waiting for.

    The journal is read only when the engine does not answer: then it tells which
    phase the load is in, or why the engine died. ``budget`` is in seconds.
    """
    watched = monitor.sources
    nvml, pci, unit, engine = await asyncio.gather(
        _first(watched.nvml.watch(), monitor.nvml, budget),
        _first(watched.pci.watch(), monitor.pci, budget),
        _first(watched.unit.watch(), monitor.unit, budget),
        read_once(watched.client, budget / 2),
    )
    monitor.take_pci(pci)
    monitor.take_nvml(nvml)
    monitor.take_unit(unit)
    rates, identity, (ready, models, metrics) = engine
    now = monitor._clock()
    monitor.ready = monitor.ready.fresh(ready, now)
    monitor.models = monitor.models.fresh(Models(models, identity.served_names), now)
    if models.ok:
        monitor.take_identity(monitor.identity.fresh(identity, now))
    if metrics.status is not None:
        monitor.take_rates(monitor.rates.fresh(rates, now))
    if not models.ok:
        journal = await _first(watched.journal.watch(), monitor.journal, budget)
        monitor.take_journal(journal)
    return monitor.snapshot()


async def _first(readings: AsyncIterator[Reading[Any]], empty: Reading[Any], budget: float) -> Reading[Any]:
    """The first reading with a value or a reason; what keeps silent says so."""

    async def read() -> Any:
        return await anext(readings)

    outcome = await attempt(empty, budget, read)
    await readings.aclose()  # type: ignore[attr-defined]
    if outcome.value is None:
        return outcome
    first: Reading[Any] = outcome.value
    return first
