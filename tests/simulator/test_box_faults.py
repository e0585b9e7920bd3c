"""Loads that go well and loads that do not, as the console's own log reader tells them."""

from __future__ import annotations

import asyncio
import json

import pytest
from box_lab import Lab, OpenBox, eventually

from console.model.load import LoadWatch
from console.model.log import PHASES, LoadProgress
from console.simulator.definition import first_profile
from console.simulator.faults import Faults
from console.simulator.load import duration, steps
from console.simulator.spec import spec_of
from console.sources.journal import EntryDecoder

KIMI = first_profile().argv()


async def progress(lab: Lab) -> LoadProgress:
    """What the console makes of the unit's journal."""
    shown = await lab.inside("journalctl", "-o", "json", "-u", "sglang.service", "-n", "all")
    decode, watch = EntryDecoder(), LoadWatch()
    for line in shown.stdout.splitlines():
        watch.feed(decode(line))
    return watch.progress


def test_a_load_of_kimi_takes_what_was_measured() -> None:
    assert duration(spec_of(KIMI, 30000)) == pytest.approx(585.0, abs=0.5)


def test_memory_of_a_load_grows_and_ends_where_the_service_stays() -> None:
    spec = spec_of(KIMI, 30000)
    sizes = [step.memory_gb for step in steps(spec) if step.memory_gb is not None]
    assert sizes == sorted(sizes)
    assert sizes[-1] == spec.used_gb < 94.9


@pytest.mark.parametrize("fault", ["crash-on-load", "oom", "port-taken", "unbalanced"])
def test_a_load_that_fails_ends_in_an_exit(fault: str) -> None:
    script = list(steps(spec_of(KIMI, 30000), fault))
    assert script[-1].exit not in (None, 0)
    assert [step for step in script if step.event == "up"] == []


async def test_the_load_behind_a_fresh_box_is_whole(lab: Lab) -> None:
    seen = await progress(lab)
    assert tuple(phase.phase for phase in seen.phases) == PHASES
    assert seen.fired_up_at is not None and seen.crash is None
    assert seen.fired_up_at - seen.phases[0].began == pytest.approx(585, abs=2)
    assert seen.kv_tokens == lab.box.engine.spec.kv_tokens
    assert seen.last_progress_at is not None and lab.box._clock.wall() - seen.last_progress_at < 10


async def test_a_live_load_passes_its_phases_in_order_and_in_time(open_box: OpenBox) -> None:
    async with open_box(speed=200.0) as lab:
        began = lab.box._clock.mono()
        await lab.inside("systemctl", "restart", "sglang.service")
        await lab.until_ready()
        assert lab.box._clock.mono() - began == pytest.approx(587 / 200, abs=1.0)
        seen = await progress(lab)
        assert tuple(phase.phase for phase in seen.phases) == PHASES
        weights = next(phase for phase in seen.phases if phase.phase == "weights")
        assert weights.percent == 100.0
        assert seen.fired_up_at is not None and seen.crash is None
        assert (await lab.http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("fault", "words", "result"),
    [
        ("crash-on-load", "Received sigquit from a child process", "signal"),
        ("oom", "torch.OutOfMemoryError: CUDA out of memory.", "signal"),
        ("port-taken", "[Errno 98] error while attempting to bind on address", "exit-code"),
    ],
)
async def test_a_failing_load_is_restarted_until_systemd_gives_up(
    open_box: OpenBox, fault: str, words: str, result: str
) -> None:
    async with open_box(fault, speed=2000.0) as lab:
        assert (await progress(lab)).crash is None  # the box starts ready
        await lab.inside("systemctl", "restart", "sglang.service")
        await lab.until("failed/failed")
        properties = await lab.properties()
        assert (properties["Result"], properties["NRestarts"]) == (result, "3")
        messages = await lab.messages()
        assert any(words in text for text in messages)
        assert "sglang.service: Scheduled restart job, restart counter is at 1." in messages
        assert "sglang.service: Start request repeated too quickly." in messages
        assert (await progress(lab)).crash is not None
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", lab.box.service.port)
        # The way back: systemd wants to be told, and the next load is a good one.
        refused = await lab.inside("systemctl", "start", "sglang.service")
        assert refused.returncode == 1 and b"attempted too often" in refused.stderr
        assert (await lab.inside("systemctl", "reset-failed", "sglang.service")).ok
        assert await lab.state() == "inactive/dead"
        assert (await lab.inside("systemctl", "start", "sglang.service")).ok
        await lab.until_ready()
        assert (await progress(lab)).crash is None


async def test_between_automatic_restarts_a_stop_ends_it(
    open_box: OpenBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console.simulator.service.RESTART_S", 10_000.0)
    async with open_box("crash-on-load", speed=1000.0) as lab:
        await lab.inside("systemctl", "restart", "sglang.service")
        await lab.until("activating/auto-restart")
        assert (await lab.inside("systemctl", "stop", "sglang.service")).ok
        assert await lab.state() == "inactive/dead"
        await lab.inside("systemctl", "start", "sglang.service")
        await lab.until_ready()


async def test_a_hung_engine_answers_metrics_but_no_health_and_must_be_killed(
    open_box: OpenBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console.simulator.engine.HEALTH_TIMEOUT_S", 0.3)
    async with open_box("hang", speed=1500.0) as lab:

        def tokens() -> float:
            return lab.box.engine.counters.value("realtime_tokens_total")

        before = tokens()
        running = (await lab.http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]
        assert running > 0
        health = await lab.http.get("/health")
        assert health.status_code == 503
        assert (await lab.http.get("/metrics")).status_code == 200
        assert tokens() == before
        assert (await lab.http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == running
        assert any(
            text.partition("] ")[2].startswith("Health check failed.") for text in await lab.messages()
        )
        await lab.inside("systemctl", "stop", "sglang.service")
        assert (await lab.properties())["Result"] == "timeout"
        await lab.inside("systemctl", "start", "sglang.service")
        await lab.until_ready()
        assert "hang" not in lab.box.faults


async def test_tokens_move_while_health_is_slow(open_box: OpenBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.simulator.engine.HEALTH_S", 0.01)
    async with open_box("slow-health") as lab:
        before = lab.box.engine.counters.value("realtime_tokens_total")
        asked = asyncio.create_task(lab.http.get("/health"))

        async def moved() -> bool:
            return lab.box.engine.counters.value("realtime_tokens_total") > before

        await eventually(moved)
        await asyncio.sleep(0.3)
        assert not asked.done()
        asked.cancel()


async def test_nan_is_exclamation_marks_while_all_else_looks_well(
    open_box: OpenBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console.simulator.engine.HEALTH_S", 0.01)
    async with open_box("nan") as lab:
        answer = await lab.chat("What is 2+2?", max_tokens=32)
        assert answer["choices"][0]["message"]["content"] == "!" * 32
        assert (await lab.http.get("/health")).status_code == 200


async def test_a_leaking_tool_call_has_its_markers_in_the_text(open_box: OpenBox) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    async with open_box("leak") as lab:
        answer = await lab.chat("What is the weather in Paris?", tools=[tool])
        message = answer["choices"][0]["message"]
        assert message["tool_calls"] is None
        assert message["content"].startswith(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        )
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_the_same_seed_gives_the_same_journal(open_box: OpenBox) -> None:
    async def told() -> list[str]:
        async with open_box(seed=3) as lab:
            shown = await lab.inside("journalctl", "-o", "json", "-n", "all", "-u", "sglang.service")
            entries = [json.loads(line) for line in shown.stdout.splitlines()]
            return [entry["_PID"] for entry in entries][:250]

    assert await told() == await told()


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no fault is named x; there are crash-on-load"):
        Faults(["x"])
