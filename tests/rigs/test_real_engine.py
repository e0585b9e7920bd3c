"""The console's eyes on a real SGLang: what it shows against what clients counted and the server logged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from console.model.engine import EngineRates
from console.model.site import Service, Site
from console.model.snapshot import Snapshot
from console.sources.connect import connect
from console.sources.engine.client import EngineClient
from console.sources.engine.sources import IdentitySource, RatesSource
from console.sources.journal import JournalSource
from console.sources.monitor import Monitor
from console.sources.unit import UnitSource
from tests.rigs.sglang.install import Installation
from tests.rigs.sglang.server import MAX_RUNNING, SERVED_NAME, EngineServer, EngineUnit, folders
from tests.rigs.systemd.machine import Machine

pytestmark = pytest.mark.rig

#: The server's own watchdog would end a hang before the console could show it.
PATIENT = ("--watchdog-timeout", "600")


@pytest.fixture(scope="module")
def engine(
    sglang_installation: Installation, debian_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnit]:
    """SGLang as sglang.service, not started. Its weights take 4 s to load."""
    machine = Machine(
        debian_root,
        tmp_path_factory.mktemp("engine") / "scratch",
        host_network=True,
        folders=folders(sglang_installation),
    )
    try:
        machine.start()
        # Without the second, a warm-up on an idle machine is over between two looks.
        env = {"SCRIPTED_LOAD_S": "4", "SCRIPTED_WARM_UP_S": "3"}
        yield EngineUnit(sglang_installation, machine, flags=PATIENT, env=env)
    finally:
        machine.stop()


class Console:
    """A monitor that follows the engine and its unit, and every state it has shown."""

    def __init__(self, engine: EngineUnit) -> None:
        site = Site(service=Service(unit=engine.unit, url=engine.url))
        runner = engine.machine.runner()
        sources = dataclasses.replace(
            connect(site),
            service=runner,
            unit=UnitSource(runner, engine.unit),
            journal=JournalSource(runner, engine.unit),
        )
        self.monitor = Monitor(site, sources)
        self.states: list[str] = []

    def look(self) -> Snapshot:
        """What the screen would draw now."""
        snapshot = self.monitor.snapshot()
        if snapshot.state.name not in self.states[-1:]:
            self.states.append(snapshot.state.name)
        return snapshot

    async def follow(self) -> None:
        """Look five times a second, as a screen does."""
        while True:
            self.look()
            await asyncio.sleep(0.2)

    async def until(self, seen: Callable[[Snapshot], bool], within: float) -> Snapshot:
        """The first snapshot that fits. AssertionError with the last one after ``within`` seconds."""
        snapshot = self.look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not seen(snapshot):
                    await asyncio.sleep(0.1)
                    snapshot = self.look()
        assert seen(snapshot), f"not seen within {within:g} s; shown were {self.states}, now {snapshot.state}"
        return snapshot


@contextlib.asynccontextmanager
async def console(engine: EngineUnit) -> AsyncIterator[Console]:
    watching = Console(engine)
    tasks = [asyncio.create_task(watching.monitor.run()), asyncio.create_task(watching.follow())]
    try:
        yield watching
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await watching.monitor.close()


def state(*names: str) -> Callable[[Snapshot], bool]:
    return lambda snapshot: snapshot.state.name in names


def speculation_off(rates: EngineRates) -> bool:
    return rates.accept_length is None and "speculation is off" in rates.missing["accept_length"]


async def test_a_start_is_followed_from_stopped_to_ready(engine: EngineUnit) -> None:
    async with console(engine) as shown:
        await shown.until(state("stopped"), 10)
        engine.start()
        loading = await shown.until(lambda s: s.state.name == "starting" and s.state.phase == "weights", 60)
        assert loading.state.elapsed_s is not None
        assert 1 < loading.state.elapsed_s < 60
        await shown.until(state("ready"), 120)
        # The name is asked for every two seconds, so it may come that much after the first token.
        ready = await shown.until(lambda s: s.state.name == "ready" and s.served_names != (), 5)
    # While the port is closed nothing is wrong, and between its opening and the first token it is not ready.
    seen = shown.states[shown.states.index("stopped") :]
    assert seen == ["stopped", "starting", "warming-up", "ready"]
    assert ready.served_names == (SERVED_NAME,)
    phases = [phase.phase for phase in ready.load.phases]
    assert phases[0] == "starting"
    assert {"weights", "kv-cache", "warm-up"} <= set(phases)
    weights = next(phase for phase in ready.load.phases if phase.phase == "weights")
    assert weights.ended is not None
    assert weights.ended - weights.began >= 4


async def test_identity_is_what_the_server_was_started_with(engine: EngineUnit) -> None:
    await engine.ensure_ready()
    async with console(engine) as shown:
        identity = (await shown.until(lambda s: s.identity is not None, 15)).identity
    assert identity is not None
    assert (identity.version, identity.tp_size, identity.dp_size) == ("0.5.23", 1, 1)
    assert identity.speculative_algorithm is None
    assert identity.max_running_requests == MAX_RUNNING
    assert identity.kv_token_capacity == 65536


async def test_status_tells_a_ready_engine_and_one_that_is_stopped(
    engine: EngineUnit, tmp_path: Path
) -> None:
    await engine.ensure_ready()
    code, found = status(engine, tmp_path)
    assert (code, found["state"]["name"], found["served_name"]) == (0, "ready", SERVED_NAME)
    shown = found["engine"]
    assert (shown["requests_running"], shown["requests_queued"]) == (0, 0)
    assert shown["accept_length"] is None
    engine.machine.run("systemctl", "stop", engine.unit)
    code, found = status(engine, tmp_path)
    assert (code, found["state"]["name"]) == (1, "stopped")
    assert found["engine"]["decode_tokens_per_s"] is None  # not 0: it is not known


def status(engine: EngineUnit, folder: Path) -> tuple[int, dict]:
    """``gpuops status --json`` on a host whose systemd is the machine's."""
    engine.machine.lend_programs(folder)
    site = folder / "site.yaml"
    site.write_text(f"schema: 1\nservice: {{unit: {engine.unit}, url: '{engine.url}'}}\n")
    command = [sys.executable, "-m", "console", "status", "--json", "--site", str(site)]
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, timeout=30, env=os.environ | {"PATH": path})
    return done.returncode, json.loads(done.stdout)


async def test_tokens_per_second_add_up_to_what_clients_were_given(engine: EngineUnit) -> None:
    """Rates are shown once a second; their sum over time is the tokens that clients got."""
    await engine.ensure_ready()
    async with console(engine) as shown:
        idle = await shown.until(lambda s: decode_rate(s) == 0, 15)
        assert idle.rates.value is not None
        assert speculation_off(idle.rates.value)
        prompts = [f"request {number} [[len {150 + 40 * number}]] [[sleep 20]]" for number in range(12)]
        replies = await engine.chats(prompts)
        after = await shown.until(lambda s: decode_rate(s) == 0, 15)
    given = sum(reply.completion_tokens for reply in replies)
    asked = sum(reply.prompt_tokens for reply in replies)
    assert given > 4000
    points = [point for point in after.history if point.decode_tokens_per_s is not None]
    assert integral(points) == pytest.approx(given, rel=0.02)
    assert idle.rates.value is not None
    assert after.rates.value is not None
    assert moved(idle.rates.value.generated_tokens_total, after.rates.value.generated_tokens_total) == given
    assert moved(idle.rates.value.prompt_tokens_total, after.rates.value.prompt_tokens_total) == asked
    assert max(point.decode_tokens_per_s or 0 for point in points) > 100


def decode_rate(snapshot: Snapshot) -> float | None:
    return None if snapshot.rates.value is None else snapshot.rates.value.decode_tokens_per_s


def integral(points: list) -> float:
    """Tokens: each rate over the seconds since the point before it."""
    return sum(later.decode_tokens_per_s * (later.at - earlier.at) for earlier, later in pairwise(points))


def moved(before: float | None, after: float | None) -> float:
    assert before is not None
    assert after is not None
    return after - before


async def test_requests_that_wait_are_shown_as_a_queue(engine: EngineUnit) -> None:
    await engine.ensure_ready()
    async with console(engine) as shown:
        prompts = [f"waiting {number} [[len 90]] [[sleep 80]]" for number in range(40)]
        load = asyncio.create_task(engine.chats(prompts, max_tokens=100))
        full = await shown.until(lambda s: requests(s)[0] == MAX_RUNNING, 20)
        assert requests(full)[1] in (8, 9)  # the console's own health probe may stand in the queue
        assert full.state.name in ("ready", "busy")
        replies = await load
        await shown.until(lambda s: requests(s) == (0, 0), 20)
    assert [reply.status for reply in replies] == [200] * 40


def requests(snapshot: Snapshot) -> tuple[int | None, int | None]:
    """Running and queued."""
    rates = snapshot.rates.value
    return (None, None) if rates is None else (rates.requests_running, rates.requests_queued)


async def test_an_engine_that_is_slow_but_gives_tokens_is_never_called_hung(engine: EngineUnit) -> None:
    """Steps of 7 s: /health takes longer than an operator's patience, and tokens move."""
    await engine.ensure_ready()
    async with console(engine) as shown:
        await shown.until(state("ready"), 15)
        slow = asyncio.create_task(engine.chat("slow [[len 4]] [[sleep 7000]]"))
        await shown.until(state("busy"), 40)
        assert (await slow).completion_tokens == 5
        await shown.until(state("ready"), 30)
    assert set(shown.states) <= {"unreachable", "starting", "ready", "busy"}


async def test_a_scheduler_that_stands_still_is_hung_until_it_moves_again(engine: EngineUnit) -> None:
    await engine.ensure_ready()
    async with console(engine) as shown:
        await shown.until(state("ready"), 15)
        held = asyncio.create_task(engine.chat("[[hang 45]]"))
        hung = await shown.until(state("hung"), 44)
        assert hung.state.reasons
        assert hung.unit.value is not None
        assert hung.unit.value.active_state == "active"
        assert (await held).text == "awake"
        await shown.until(state("ready"), 40)
    assert "crashed" not in shown.states


async def test_a_crash_is_shown_with_the_line_that_caused_it(engine: EngineUnit) -> None:
    await engine.ensure_ready()
    async with console(engine) as shown:
        await shown.until(state("ready"), 15)
        with contextlib.suppress(httpx.TransportError):  # the connection closes without an answer
            await engine.chat("[[crash]]")
        crashed = await shown.until(
            lambda s: s.state.name == "crashed" and s.unit.value is not None
            and s.unit.value.active_state == "failed",
            40,
        )  # fmt: skip
    reasons = " ".join(crashed.state.reasons)
    assert "an illegal memory access was encountered" in reasons
    assert crashed.load.crash is not None
    assert any("scripted crash" in line for line in crashed.load.crash.lines)
    assert set(shown.states) <= {"unreachable", "ready", "busy", "crashed"}


async def read_rates(server: EngineServer, during: asyncio.Task, settle: float = 4.0) -> list[EngineRates]:
    """What the rates source shows while a load runs, and for ``settle`` seconds after it."""
    client = EngineClient(server.url)
    identity = IdentitySource(client)
    await anext(identity.watch())
    found: list[EngineRates] = []
    ends: float | None = None
    clock = asyncio.get_running_loop().time
    async for reading in RatesSource(client, identity.latest).watch():
        assert reading.error is None
        assert reading.value is not None
        found.append(reading.value)
        if during.done() and ends is None:
            ends = clock() + settle
        if ends is not None and clock() > ends:
            break
    await client.close()
    return found


@contextlib.asynccontextmanager
async def serving(installation: Installation, folder: Path, **launch: object) -> AsyncIterator[EngineServer]:
    server = EngineServer(installation, folder / "server.log", **launch)
    try:
        server.start()
        await server.wait_ready()
        yield server
    finally:
        server.stop()


async def test_accept_length_is_the_one_the_server_logs(
    sglang_installation: Installation, tmp_path: Path
) -> None:
    """STANDALONE with a draft that errs at one token in five."""
    env = {"SCRIPTED_DRAFT_ERR": "0.2", "SCRIPTED_STEP_MS": "20"}
    async with serving(sglang_installation, tmp_path, speculative=True, env=env) as server:
        load = asyncio.create_task(server.chats([f"draft {number} [[len 1200]]" for number in range(2)]))
        shown = await read_rates(server, load)
        replies = await load
        metrics = await server.get("/metrics")
    logged = [float(found) for found in re.findall(r"accept len: ([\d.]+)", "\n".join(server.lines()))]
    live = [rates.accept_length for rates in shown if rates.accept_length is not None]
    assert live
    assert min(logged) - 0.01 <= min(live) <= max(live) <= max(logged) + 0.01
    # In the end it is tokens by verify step, as the server counted both.
    verified = counter(metrics, "spec_verify_calls_total")
    given = sum(reply.completion_tokens for reply in replies)
    assert live[-1] == pytest.approx(given / verified, rel=0.05)
    assert 3 < live[-1] < 4


def counter(metrics: str, name: str) -> float:
    """The sum of a counter over its labels."""
    return sum(float(value) for value in re.findall(rf"^sglang:{name}\{{.*\}} (\S+)$", metrics, re.M))


async def test_two_data_parallel_replicas_are_one_engine(
    sglang_installation: Installation, tmp_path: Path
) -> None:
    async with serving(sglang_installation, tmp_path, dp=2) as server:
        prompts = [f"replica {number} [[len 120]] [[sleep 40]]" for number in range(20)]
        before = (await read_rates(server, asyncio.create_task(asyncio.sleep(0)), settle=1))[-1]
        load = asyncio.create_task(server.chats(prompts))
        shown = await read_rates(server, load)
        replies = await load
        metrics = await server.get("/metrics")
    ranks = set(re.findall(r'realtime_tokens_total\{dp_rank="(\d)"', metrics))
    assert ranks == {"0", "1"}  # both worked
    given = sum(reply.completion_tokens for reply in replies)
    assert moved(before.generated_tokens_total, shown[-1].generated_tokens_total) == given
    assert max(rates.requests_running or 0 for rates in shown) == 20
    assert all(speculation_off(rates) for rates in shown)
