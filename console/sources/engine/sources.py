"""The engine as sources: health, readiness, models, identity and rates, each at its own pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from console.model.engine import EngineIdentity, EngineRates, Probe
from console.model.reading import Reading
from console.sources.engine.client import METRICS_LIMIT, Answer, EngineClient
from console.sources.engine.identity import model_list, read_identity
from console.sources.engine.loads import Loads, rates_from_loads, read_loads
from console.sources.engine.metrics import Scrape, parse
from console.sources.engine.rates import Window, advance, moving
from console.sources.source import Unavailable, attempt, poll

LOADS = "/v1/loads?include=core,spec"

#: An endpoint that this version does not have is asked for again this often, seconds.
ABSENT_PERIOD = 30.0

# Sources give the client's own deadline, whose outcome names the request, time to come first.
_SLACK = 0.1

Clock = Callable[[], float]


class Models(msgspec.Struct, frozen=True):
    """What ``/v1/models`` answered: the true name. In a request SGLang accepts any other too."""

    probe: Probe
    names: tuple[str, ...] = ()
    context_length: int | None = None


class HealthSource:
    """``/health``: one token through the whole engine.

    A healthy answer takes 1 s or more, and a busy or hung engine says 503 only after 20 s
    (SGLANG_HEALTH_CHECK_TIMEOUT). It does not tell busy from hung: moving token counters do.
    """

    name = "health"
    period = 5.0
    deadline = 25.0

    def __init__(self, client: EngineClient, clock: Clock = time.monotonic) -> None:
        self._client = client
        self._clock = clock

    def watch(self) -> AsyncIterator[Reading[Probe]]:
        return poll(self.name, self.period, self.deadline + _SLACK, self._read, self._clock)

    async def _read(self) -> Probe:
        return (await self._client.get("/health", self.deadline)).probe


class ReadySource:
    """``/ready``: instant, without generating a token. From 0.5.20; before, a Probe with status 404."""

    name = "ready"
    period = 2.0
    deadline = 2.0

    def __init__(self, client: EngineClient, clock: Clock = time.monotonic) -> None:
        self._client = client
        self._clock = clock

    async def watch(self) -> AsyncIterator[Reading[Probe]]:
        reading: Reading[Probe] = Reading(self.name, self.period)
        while True:
            began = self._clock()
            reading = await attempt(reading, self.deadline + _SLACK, self._read, self._clock)
            absent = reading.value is not None and reading.value.status == 404
            period = ABSENT_PERIOD if absent else self.period
            reading = msgspec.structs.replace(reading, period=period)
            yield reading
            await self._client.sleep(period - (self._clock() - began))

    async def _read(self) -> Probe:
        return (await self._client.get("/ready", self.deadline)).probe


class ModelsSource:
    """``/v1/models``: the served name. The HTTP process knows it, so it answers while the engine is busy."""

    name = "models"
    period = 2.0
    deadline = 2.0

    def __init__(self, client: EngineClient, clock: Clock = time.monotonic) -> None:
        self._client = client
        self._clock = clock

    def watch(self) -> AsyncIterator[Reading[Models]]:
        return poll(self.name, self.period, self.deadline + _SLACK, self._read, self._clock)

    async def _read(self) -> Models:
        return _models(await self._client.get("/v1/models", self.deadline))


class IdentitySource:
    """``/server_info`` and its like: every 30 s, and as soon as the engine is seen to have restarted.

    ``latest`` is what the engine running now said of itself; None until it said something.
    """

    name = "identity"
    period = 30.0
    deadline = 5.0
    retry_period = 5.0

    def __init__(self, client: EngineClient, clock: Clock = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._latest: EngineIdentity | None = None
        self._epoch = client.epoch

    def latest(self) -> EngineIdentity | None:
        return self._latest if self._epoch == self._client.epoch else None

    async def watch(self) -> AsyncIterator[Reading[EngineIdentity]]:
        reading: Reading[EngineIdentity] = Reading(self.name, self.period)
        while True:
            # /server_info goes through the scheduler and takes as long as its current step.
            reading = await attempt(reading, self.deadline + _SLACK, self._read, self._clock)
            yield reading
            if self._epoch == self._client.epoch:
                await self._client.sleep(self.period if reading.error is None else self.retry_period)

    async def _read(self) -> EngineIdentity:
        self._epoch = epoch = self._client.epoch
        found, problem = await fetch_identity(self._client, self.deadline)
        if problem is not None:
            raise Unavailable(problem)
        if epoch == self._client.epoch:
            self._latest = found
        return found


class RatesSource:
    """``/metrics`` once a second, as rates; without ``--enable-metrics``, what ``/v1/loads`` tells."""

    name = "rates"
    period = 1.0
    deadline = 2.0

    def __init__(
        self,
        client: EngineClient,
        identity: Callable[[], EngineIdentity | None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._client = client
        self._identity = identity
        self._clock = clock
        self._window = Window()
        self._epoch = client.epoch
        self._metrics_absent_until = 0.0

    def watch(self) -> AsyncIterator[Reading[EngineRates]]:
        return poll(self.name, self.period, self.deadline + _SLACK, self._read, self._clock)

    def reset(self) -> None:
        """Forget what was counted: this is another run of the engine."""
        self._window = Window()
        self._metrics_absent_until = 0.0

    async def _read(self) -> EngineRates:
        if self._epoch != self._client.epoch:
            self._epoch = self._client.epoch
            self.reset()
        ends = self._clock() + self.deadline
        if self._clock() < self._metrics_absent_until:
            return await self._from_loads()
        answer = await self._client.get("/metrics", self.deadline, limit=METRICS_LIMIT)
        if answer.probe.status == 404:
            self._metrics_absent_until = self._clock() + ABSENT_PERIOD
            return await self._from_loads()
        return await self._from_metrics(answer, ends)

    async def _from_metrics(self, answer: Answer, ends: float) -> EngineRates:
        scrape = _scrape(answer)
        restarts = self._window.restarts
        self._window, rates = advance(self._window, scrape, answer.at, self._identity())
        if self._window.restarts != restarts:
            self._client.note_restart()
            self._epoch = self._client.epoch
        if _doubtful(self._window, rates):
            loads, _ = await fetch_loads(self._client, max(0.1, ends - self._clock()))
            if loads is not None:
                return correct(rates, loads)
        return rates

    async def _from_loads(self) -> EngineRates:
        loads, problem = await fetch_loads(self._client, self.deadline / 2)
        if loads is None:
            raise Unavailable(f"/metrics: not there, the engine runs without --enable-metrics; {problem}")
        return rates_from_loads(loads, self._identity())


async def read_once(
    client: EngineClient, deadline: float = 0.5
) -> tuple[EngineRates, EngineIdentity, tuple[Probe, ...]]:
    """Everything that one look can tell, all requests at once.

    A rate takes two readings seconds apart, and one look has no such time: the decode rate is
    the engine's own gauge, with a note that it is as old as its last decode interval, or 0 when
    ``/v1/loads``, which is live, says that nothing runs. Other rates are missing, with the reason.
    ``/health`` is not asked: a healthy answer takes a second. What has not answered within
    ``deadline`` seconds is left out. Probes: ``/ready``, ``/v1/models``, ``/metrics``.
    """
    ready, metrics, (loads, no_loads), models, (server, model) = await asyncio.gather(
        client.get("/ready", deadline),
        client.get("/metrics", deadline, limit=METRICS_LIMIT),
        fetch_loads(client, deadline),
        client.get("/v1/models", deadline),
        _fetch_info(client, deadline),
    )
    identity = read_identity(_body(server), _body(models), _body(model))
    rates = _one_look(metrics, loads, no_loads, identity if _body(server) is not None else None)
    return rates, identity, (ready.probe, models.probe, metrics.probe)


async def fetch_identity(client: EngineClient, deadline: float) -> tuple[EngineIdentity, str | None]:
    """The identity, and why ``/server_info`` is not part of it; then the rest is what it is made of."""
    models, (server, model) = await asyncio.gather(
        client.get("/v1/models", deadline), _fetch_info(client, deadline)
    )
    problem = None if server.probe.ok else describe(server.probe)
    return read_identity(_body(server), _body(models), _body(model)), problem


async def fetch_loads(client: EngineClient, deadline: float) -> tuple[Loads | None, str | None]:
    """The live load, or why there is none."""
    answer = await _first_present(client, (LOADS, "/get_load"), deadline)
    if not answer.probe.ok:
        return None, describe(answer.probe)
    loads = read_loads(answer.body)
    return loads, None if loads is not None else f"{answer.probe.path}: not the expected JSON"


def describe(probe: Probe) -> str:
    """A request that did not succeed, in words: what, and why."""
    path = probe.path.partition("?")[0]
    if probe.error is not None:
        return f"{path}: {probe.error}" + (f" ({probe.detail})" if probe.detail else "")
    return f"{path}: HTTP {probe.status}" + (f", {probe.detail}" if probe.detail else "")


def correct(rates: EngineRates, loads: Loads) -> EngineRates:
    """The rates with the gauges that lag replaced by the live load."""
    live = {
        "requests_running": loads.running,
        "requests_queued": loads.queued,
        "kv_usage_ratio": loads.usage,
        "kv_used_tokens": loads.used_tokens,
    }
    return msgspec.structs.replace(
        rates,
        **{name: value for name, value in live.items() if value is not None},
        missing={name: why for name, why in rates.missing.items() if live.get(name) is None},
    )


def _doubtful(window: Window, rates: EngineRates) -> bool:
    """The gauges contradict the counters.

    Gauges move every 40 decode steps and, before 0.5.23, up to 30 s late when the engine
    falls idle: a request that runs while no token comes, or the reverse, is worth asking about.
    """
    if len(window.samples) < 2 or rates.requests_running is None:
        return False
    busy = rates.requests_running + (rates.requests_queued or 0) > 0
    return busy != moving(window)


def _one_look(
    metrics: Answer, loads: Loads | None, no_loads: str | None, identity: EngineIdentity | None
) -> EngineRates:
    if not metrics.probe.ok:
        if loads is None:
            reason = describe(metrics.probe)
            if no_loads is not None and metrics.probe.status is not None:
                reason = f"{reason}; {no_loads}"
            return rates_from_loads(Loads(), identity, reason)
        if metrics.probe.status == 404:
            return rates_from_loads(loads, identity)
        return rates_from_loads(loads, identity, describe(metrics.probe))
    scrape = parse(metrics.body)
    _, rates = advance(Window(), scrape, metrics.at, identity)
    if loads is not None:
        rates = correct(rates, loads)
    missing, notes = dict(rates.missing), dict(rates.notes)
    decode = scrape.values.get("gen_throughput") or None
    if loads is not None and loads.running == 0 and loads.queued == 0:
        decode = 0.0
    elif decode is not None:
        notes["decode_tokens_per_s"] = "as of the engine's last decode interval"
    if decode is not None:
        del missing["decode_tokens_per_s"]
    return msgspec.structs.replace(rates, decode_tokens_per_s=decode, missing=missing, notes=notes)


def _scrape(answer: Answer) -> Scrape:
    if not answer.probe.ok:
        raise Unavailable(describe(answer.probe))
    scrape = parse(answer.body)
    if scrape.empty:
        raise Unavailable(scrape.note or "/metrics: no metric of SGLang in it")
    return scrape


def _models(answer: Answer) -> Models:
    listed = model_list(answer.body) if answer.probe.ok else []
    if answer.probe.ok and not listed:
        probe = msgspec.structs.replace(answer.probe, error="malformed", detail="no list of models")
        return Models(probe)
    names = tuple(name for name, _ in listed)
    return Models(answer.probe, names, listed[0][1] if listed else None)


async def _fetch_info(client: EngineClient, deadline: float) -> tuple[Answer, Answer]:
    """``/server_info`` and ``/model_info``, by their names of before 0.5.8 where they have none other."""
    return await asyncio.gather(
        _first_present(client, ("/server_info", "/get_server_info"), deadline),
        _first_present(client, ("/model_info", "/get_model_info"), deadline),
    )


async def _first_present(client: EngineClient, paths: tuple[str, str], deadline: float) -> Answer:
    began = time.monotonic()
    answer = await client.get(paths[0], deadline)
    if answer.probe.status != 404:
        return answer
    return await client.get(paths[1], max(0.05, deadline - (time.monotonic() - began)))


def _body(answer: Answer) -> bytes | None:
    return answer.body if answer.probe.ok else None
