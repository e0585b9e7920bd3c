"""The box's own traffic: figures that belong together, for any seed and any hour."""

from __future__ import annotations

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from console.simulator.counters import Counters
from console.simulator.definition import first_profile
from console.simulator.spec import EngineSpec, spec_of
from console.simulator.traffic import Traffic
from console.sources.engine_log import read_line

DAY = 1_796_000_000 - 1_796_000_000 % 86_400
KIMI = spec_of(first_profile().argv(), 30_000)


def engine(spec: EngineSpec, seed: int, hour: float) -> tuple[Traffic, Counters, list[str], float]:
    lines: list[str] = []
    now = DAY + hour * 3600
    counters = Counters(spec.served_name)

    def say(text: str, at: float) -> None:
        lines.append(text)

    return Traffic(spec, counters, random.Random(seed), say, say, now), counters, lines, now


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 23.9))
def test_limits_hold_and_counters_only_grow(seed: int, hour: float) -> None:
    traffic, counters, lines, now = engine(KIMI, seed, hour)
    before = 0.0
    for tick in range(1, 1200):
        traffic.advance(now + tick / 4)
        assert len(traffic.running) <= KIMI.max_running_requests
        assert 0 <= traffic.usage <= 1
        assert 1 < traffic.accept_now <= KIMI.steps + 1
        total = counters.value("realtime_tokens_total", mode="decode")
        assert total >= before and total == int(total)
        before = total
    assert before / 300 < 1100
    kinds = {read_line(f"[2026-11-30 00:00:00 TP0] {line}").kind for line in lines}
    assert {"prefill", "decode"} <= kinds <= {"prefill", "decode", "plain", "warning"}


def test_tokens_of_ended_requests_are_those_that_were_decoded() -> None:
    traffic, counters, _, now = engine(KIMI, 5, 9)
    for tick in range(1, 2400):
        traffic.advance(now + tick / 4)
    ended = counters.value("generation_tokens_total")
    running = sum(int(request.produced) for request in (*traffic.running, *traffic.waiting))
    assert ended + running == counters.value("realtime_tokens_total", mode="decode")
    verified = counters.value("spec_verify_calls_total")
    assert 2.3 < ended / verified < 2.9


def test_a_full_pool_retracts_and_says_so() -> None:
    small = spec_of(
        ["--model-path", "/m", "--tp-size", "8", "--mem-fraction-static", "0.30", "--enable-metrics"], 30_000
    )
    assert small.kv_tokens < 300_000
    traffic, counters, lines, now = engine(small, 2, 15)
    tick = 0
    while not counters.value("num_retracted_requests_total"):
        tick += 1
        traffic.advance(now + tick / 4)
        assert tick < 20_000
    retracted = next(line for line in lines if line.startswith("KV cache pool is full. Retract requests. "))
    assert re.search(
        r"#retracted_reqs: 1, #new_tokens_gained: \d+, #new_token_ratio: \d\.\d{4} -> ", retracted
    )
    assert read_line(f"[2026-11-30 00:00:00 TP0] {retracted}").kind == "warning"
    for later in range(1, 400):  # it comes to its end all the same
        traffic.advance(now + (tick + later) / 4)
    assert traffic.usage <= 1


def test_without_speculation_there_is_no_acceptance() -> None:
    plain = spec_of(
        ["--model-path", "nvidia/Qwen3.5-397B-A17B-NVFP4", "--tp-size", "8", "--enable-metrics"], 30_000
    )
    traffic, counters, lines, now = engine(plain, 3, 12)
    for tick in range(1, 400):
        traffic.advance(now + tick / 4)
    assert traffic.accept_length is None
    assert counters.value("spec_accept_length") == 0
    assert counters.value("spec_verify_calls_total") == 0
    assert not [line for line in lines if "accept len" in line]


def test_a_frozen_scheduler_keeps_its_requests_and_moves_nothing() -> None:
    traffic, counters, lines, now = engine(KIMI, 4, 15)
    for tick in range(1, 200):
        traffic.advance(now + tick / 4)
    traffic.frozen = True
    before = counters.text(), len(lines), [request.rid for request in traffic.running]
    for tick in range(200, 400):
        traffic.advance(now + tick / 4)
    assert (counters.text(), len(lines), [request.rid for request in traffic.running]) == before


def test_a_clock_that_jumps_back_or_far_ahead_does_no_harm() -> None:
    traffic, _, _, now = engine(KIMI, 6, 3)
    for moment in (now + 10, now - 3600, now + 11, now + 7200, now + 7200.25):
        traffic.advance(moment)
        assert traffic.usage <= 1
