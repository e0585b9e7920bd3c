"""The engine's sources against an engine that behaves, one that does not, and one that restarts."""

from __future__ import annotations

import asyncio
import time

import pytest

from console.sources.engine import sources
from console.sources.engine.client import EngineClient
from console.sources.engine.sources import (
    HealthSource,
    IdentitySource,
    ModelsSource,
    RatesSource,
    ReadySource,
    read_once,
)


@pytest.fixture
async def client(box):
    client = EngineClient(box.url)
    yield client
    await client.close()


@pytest.fixture
def engine(box, reply, recorded):
    """The box answers as the recorded 0.5.23 did under load."""
    box.replies.update(
        {
            "/health": reply(200),
            "/ready": reply(200),
            "/metrics": reply(200, recorded("metrics-0.5.23-load.txt")),
            "/v1/models": reply(200, recorded("models-0.5.23.json")),
            "/model_info": reply(200, recorded("model_info-0.5.23.json")),
            "/server_info": reply(200, recorded("server_info-0.5.23.json")),
            "/v1/loads": reply(200, recorded("loads-0.5.23.json")),
        }
    )
    return box


async def first(source):
    watching = source.watch()
    reading = await anext(watching)
    await watching.aclose()
    return reading


async def readings(source, count):
    found = []
    watching = source.watch()
    async for reading in watching:
        found.append(reading)
        if len(found) == count:
            break
    await watching.aclose()
    return found


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(RatesSource, "period", 0.05)
    monkeypatch.setattr(IdentitySource, "period", 60.0)
    monkeypatch.setattr(ReadySource, "period", 0.05)


def decode(total: int, running: int = 1, **more: float) -> bytes:
    values = {'realtime_tokens_total{mode="decode"}': total, "num_running_reqs": running, **more}
    return "".join(f"sglang:{name} {value}\n" for name, value in values.items()).encode()


class TestProbes:
    async def test_health_models_and_ready(self, engine, client):
        assert (await first(HealthSource(client))).value.ok
        assert (await first(ReadySource(client))).value.ok
        models = (await first(ModelsSource(client))).value
        assert models.probe.ok
        assert models.names == ("tiny",)
        assert models.context_length == 2048

    async def test_health_waits_longer_than_the_engines_own_verdict(self, client):
        assert HealthSource(client).deadline >= 25

    async def test_an_engine_that_is_not_there_is_a_fresh_reading_that_says_refused(self, box, client):
        await box.stop()
        for source in (HealthSource(client), ReadySource(client)):
            reading = await first(source)
            assert reading.error is None
            assert reading.value.error == "refused"
        assert (await first(ModelsSource(client))).value.probe.error == "refused"

    async def test_a_404_on_ready_is_not_asked_again_at_once(self, box, client, quick):
        reading, watching = None, ReadySource(client).watch()
        reading = await anext(watching)
        assert reading.value.status == 404
        assert not reading.stale(time.monotonic() + 60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(watching), 0.3)
        assert box.paths == ["/ready"]

    async def test_an_error_page_is_no_list_of_models(self, box, client, reply):
        box.replies["/v1/models"] = reply(200, b"<html>nginx</html>")
        models = (await first(ModelsSource(client))).value
        assert models.names == ()
        assert models.probe.error == "malformed"


class TestRates:
    async def test_the_recorded_engine(self, engine, client, quick):
        reading = await first(RatesSource(client))
        assert reading.error is None
        assert reading.value.requests_running == 32
        assert engine.paths == ["/metrics"]

    async def test_a_rate_from_the_second_reading_on(self, box, client, reply, quick):
        total = 0

        async def metrics(writer):
            nonlocal total
            total += 100
            writer.write(reply(200, decode(total)))

        box.replies["/metrics"] = metrics
        found = await readings(RatesSource(client), 5)
        assert found[0].value.decode_tokens_per_s is None
        assert all(500 < reading.value.decode_tokens_per_s < 4000 for reading in found[1:])

    @pytest.mark.parametrize(
        ("status", "body", "words"),
        [
            (401, b'{"error":"Unauthorized"}', "unauthorised: the service wants an API key"),
            (500, b"Internal Server Error", "/metrics: HTTP 500"),
            (200, b"<html>hello</html>\n", "/metrics: no metric of SGLang in it"),
            (200, b"", "/metrics: no metric of SGLang in it"),
        ],
    )
    async def test_a_failed_scrape_keeps_the_old_value_and_says_why(
        self, engine, client, reply, quick, status, body, words
    ):
        watching = RatesSource(client).watch()
        good = await anext(watching)
        engine.replies["/metrics"] = reply(status, body)
        bad = await anext(watching)
        assert bad.value == good.value
        assert bad.taken_at == good.taken_at
        assert words in bad.error
        await watching.aclose()

    async def test_silence_keeps_the_old_value_too(self, engine, client, quick, monkeypatch):
        async def never(writer):
            await asyncio.sleep(60)

        monkeypatch.setattr(RatesSource, "deadline", 0.2)
        watching = RatesSource(client).watch()
        await anext(watching)
        engine.replies["/metrics"] = never
        began = time.monotonic()
        bad = await anext(watching)
        assert bad.error == "/metrics: timeout (no answer within 0.2 s)"
        assert bad.value.requests_running == 32
        assert time.monotonic() - began < 0.6
        await watching.aclose()

    async def test_a_counter_that_goes_down_is_no_negative_rate(self, box, client, reply, quick):
        totals = iter([1000, 1100, 20, 120, 220])

        async def metrics(writer):
            writer.write(reply(200, decode(next(totals))))

        box.replies["/metrics"] = metrics
        rates = [reading.value.decode_tokens_per_s for reading in await readings(RatesSource(client), 5)]
        assert rates[2] is None
        assert all(rate > 0 for rate in (rates[1], rates[3], rates[4]))
        assert client.epoch == 1

    async def test_without_metrics_the_load_is_told(self, engine, client, reply, quick):
        engine.replies["/metrics"] = reply(404)
        found = await readings(RatesSource(client), 3)
        assert [reading.error for reading in found] == [None] * 3
        assert found[0].value.requests_running == 32
        assert found[0].value.missing["ttft"] == "the engine runs without --enable-metrics"
        assert engine.paths.count("/metrics") == 1

    async def test_without_v1_loads_the_older_one(self, box, client, reply, recorded, quick):
        box.replies["/get_load"] = reply(200, recorded("get_load-0.5.7.json"))
        reading = await first(RatesSource(client))
        assert reading.value.requests_running == 4

    async def test_without_either_it_says_so(self, box, client, quick):
        error = (await first(RatesSource(client))).error
        assert error == "/metrics: not there, the engine runs without --enable-metrics; /get_load: HTTP 404"

    async def test_a_running_gauge_that_lags_is_checked_with_the_live_load(self, box, client, reply, quick):
        """Before 0.5.23 it keeps its last value for up to 30 s after the last request ended."""
        box.replies["/metrics"] = reply(200, decode(5000, running=7))
        box.replies["/v1/loads"] = reply(
            200, b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}]}'
        )
        first_reading, second = await readings(RatesSource(client), 2)
        assert first_reading.value.requests_running == 7
        assert second.value.requests_running == 0
        assert second.value.kv_usage_ratio == 0.0
        assert "kv_usage_ratio" not in second.value.missing

    async def test_a_gauge_that_agrees_costs_no_request(self, box, client, reply, quick):
        total = 0

        async def metrics(writer):
            nonlocal total
            total += 10
            writer.write(reply(200, decode(total, running=1)))

        box.replies["/metrics"] = metrics
        await readings(RatesSource(client), 4)
        assert set(box.paths) == {"/metrics"}


class TestIdentity:
    async def test_the_recorded_engine(self, engine, client):
        source = IdentitySource(client)
        assert source.latest() is None
        reading = await first(source)
        assert reading.value.version == "0.5.23"
        assert source.latest() == reading.value

    async def test_endpoints_by_their_older_names(self, box, client, reply, recorded):
        box.replies["/get_server_info"] = reply(200, recorded("server_info-0.5.9.json"))
        box.replies["/get_model_info"] = reply(200, recorded("model_info-0.5.9.json"))
        assert (await first(IdentitySource(client))).value.version == "0.5.9"

    async def test_a_restart_is_asked_about_at_once(self, engine, client, reply, recorded, quick):
        source = IdentitySource(client)
        watching = source.watch()
        assert (await anext(watching)).value.version == "0.5.23"
        waiting = asyncio.create_task(anext(watching))
        await asyncio.sleep(0.05)
        await engine.stop()
        await client.get("/ready", 1.0)
        await client.get("/ready", 1.0)
        engine.replies["/server_info"] = reply(200, recorded("server_info-0.5.9.json"))
        await engine.start()
        await client.get("/ready", 1.0)
        assert source.latest() is None
        reading = await asyncio.wait_for(waiting, 1.0)
        assert reading.value.version == "0.5.9"
        await watching.aclose()

    async def test_what_it_was_stays_while_it_does_not_answer(
        self, engine, client, reply, quick, monkeypatch
    ):
        monkeypatch.setattr(IdentitySource, "period", 0.05)
        watching = IdentitySource(client).watch()
        await anext(watching)
        engine.replies["/server_info"] = reply(401)
        bad = await anext(watching)
        assert bad.value.version == "0.5.23"
        assert bad.error.startswith("/server_info: HTTP 401, unauthorised")
        await watching.aclose()


class TestOneLook:
    async def test_within_its_budget(self, engine, client):
        await read_once(client)  # connections and imports
        began = time.perf_counter()
        rates, identity, probes = await read_once(client)
        assert time.perf_counter() - began < 0.12
        assert identity.version == "0.5.23"
        assert rates.requests_running == 32
        assert rates.decode_tokens_per_s == pytest.approx(1351.97, rel=1e-4)
        assert "last decode interval" in rates.notes["decode_tokens_per_s"]
        assert rates.prefill_tokens_per_s is None
        assert rates.missing["prefill_tokens_per_s"]
        assert [(probe.path, probe.ok) for probe in probes] == [
            ("/ready", True),
            ("/v1/models", True),
            ("/metrics", True),
        ]

    async def test_an_idle_engine_is_zero_whatever_its_gauge_kept(self, engine, client, reply):
        engine.replies["/v1/loads"] = reply(
            200, b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}'
        )
        rates, _, _ = await read_once(client)
        assert rates.decode_tokens_per_s == 0.0
        assert rates.requests_running == 0

    async def test_what_is_late_is_left_out(self, engine, client):
        async def never(writer):
            await asyncio.sleep(60)

        engine.replies["/server_info"] = never
        began = time.perf_counter()
        rates, identity, _ = await read_once(client, deadline=0.2)
        assert time.perf_counter() - began < 0.5
        assert identity.version is None
        assert identity.served_names == ("tiny",)
        assert rates.requests_running == 32

    async def test_an_engine_that_is_not_there(self, box, client):
        await box.stop()
        rates, identity, probes = await read_once(client)
        assert rates.requests_running is None
        assert rates.missing["requests_running"] == "/metrics: refused (nothing listens there)"
        assert identity.served_names == ()
        assert {probe.error for probe in probes} == {"refused"}

    async def test_without_metrics(self, engine, client, reply):
        engine.replies["/metrics"] = reply(404)
        rates, _, _ = await read_once(client)
        assert rates.requests_running == 32
        assert rates.missing["e2e"] == "the engine runs without --enable-metrics"


async def test_one_hung_endpoint_holds_up_no_other_source(engine, client, quick):
    async def never(writer):
        await asyncio.sleep(60)

    engine.replies["/health"] = never
    engine.replies["/server_info"] = never
    health = asyncio.create_task(first(HealthSource(client)))
    identity = asyncio.create_task(first(IdentitySource(client)))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    assert (await first(RatesSource(client))).error is None
    assert (await first(ReadySource(client))).value.ok
    assert time.monotonic() - began < 0.5
    for task in (health, identity):
        task.cancel()
    await asyncio.gather(health, identity, return_exceptions=True)


def test_importing_the_sources_loads_no_http_library():
    import subprocess
    import sys

    code = (
        "import sys, console.sources.engine.sources as s; "
        "print([m for m in ('httpx', 'prometheus_client', 'textual') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert sources
