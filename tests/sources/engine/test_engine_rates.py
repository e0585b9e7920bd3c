"""Rates from counters: true to the tokens really generated, whatever the engine does meanwhile."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.model.engine import EngineIdentity, Quantiles
from console.sources.engine.metrics import Scrape, parse
from console.sources.engine.rates import Window, accept_rate_meaning, advance, quantiles

EAGLE = EngineIdentity(version="0.5.23", speculative_algorithm="EAGLE3")
PLAIN = EngineIdentity(version="0.5.23")
TTFT = "time_to_first_token_seconds"


def scrape(histograms=None, **values: float) -> Scrape:
    return Scrape({name.replace("__", "."): float(value) for name, value in values.items()}, histograms or {})


def watch(*scrapes: Scrape, every: float = 1.0, identity: EngineIdentity | None = None):
    """The rates after the last of these scrapes."""
    window = Window()
    for number, one in enumerate(scrapes):
        window, rates = advance(window, one, 1000 + number * every, identity)
    return rates


@dataclass
class Engine:
    """Generates as a real one counts: decode at every step, requests and their tokens when they end."""

    first_tokens: int = 0
    decoded: int = 0
    ended: int = 0
    generated_by_ended: int = 0
    running: list[list[int]] = field(default_factory=list)  # [generated, wanted] of each request

    def step(self, tokens: int) -> None:
        for request in list(self.running):
            made = min(tokens, request[1] - request[0])
            request[0] += made
            self.decoded += made
            if request[0] == request[1]:
                self.running.remove(request)
                self.ended += 1
                self.generated_by_ended += request[1]

    def begin(self, wanted: int) -> None:
        self.first_tokens += 1
        self.running.append([1, wanted])
        self.step(0)

    @property
    def generated(self) -> int:
        return self.first_tokens + self.decoded

    def scrape(self) -> Scrape:
        return scrape(
            {TTFT: ((1.0, self.first_tokens), (math.inf, self.first_tokens))},
            realtime_tokens_total__decode=self.decoded,
            realtime_tokens_total__prefill_compute=10 * self.first_tokens,
            generation_tokens_total=self.generated_by_ended,
            num_requests_total=self.ended,
            num_running_reqs=len(self.running),
        )


class TestTokensPerSecond:
    @settings(max_examples=40, deadline=None)
    @given(
        step=st.floats(0.01, 0.4),
        tokens=st.integers(1, 4),
        arrivals=st.lists(st.tuples(st.floats(0, 40), st.integers(20, 600)), min_size=1, max_size=40),
        jitter=st.lists(st.floats(-0.02, 0.02), min_size=8, max_size=8),
    )
    def test_integrated_they_are_the_tokens_generated(self, step, tokens, arrivals, jitter):
        """Requests come and go over 40 s, steps of any length, ticks that are late or early.

        They begin once the window is whole: its first three seconds weigh more than they last.
        """
        engine, window = Engine(), Window()
        arrivals = sorted(arrivals)
        at, next_step, tick, shown, last, before = 0.0, 0.0, 0, 0.0, 0.0, 0.0
        while engine.running or arrivals or at < last + 5:
            tick += 1
            at = tick + jitter[tick % len(jitter)]
            while next_step <= at:
                while arrivals and arrivals[0][0] + 5 <= next_step:
                    engine.begin(arrivals.pop(0)[1])
                engine.step(tokens)
                next_step += step
                if engine.running:
                    last = at
            window, rates = advance(window, engine.scrape(), at, PLAIN)
            if rates.decode_tokens_per_s is not None:
                shown += rates.decode_tokens_per_s * (at - before)
            before = at
        # One short answer alone between two uneven ticks may weigh a few tokens more or less.
        assert abs(shown - engine.generated) <= 0.02 * engine.generated + 3

    @pytest.mark.parametrize(("pattern", "tolerance"), [("steady", 0.001), ("bursts", 0.02), ("ramp", 0.02)])
    def test_known_patterns_at_the_even_beat(self, pattern, tolerance):
        """Ten minutes at 1 Hz, within 2 % over all of it."""
        per_second = {
            "steady": lambda second: 480,
            "bursts": lambda second: 2000 if second % 17 < 3 else 0,
            "ramp": lambda second: 3 * second,
        }[pattern]
        window, total, shown = Window(), 0, 0.0
        for second in range(600):
            total += per_second(second) if 5 <= second < 590 else 0
            window, rates = advance(window, scrape(realtime_tokens_total__decode=total), float(second))
            shown += rates.decode_tokens_per_s or 0.0
        assert shown == pytest.approx(total, rel=tolerance)

    def test_a_counter_that_moves_in_lumps_is_shown_smooth(self):
        """40 steps of 4 requests every 1.3 s are 123 tokens/s at every tick, give or take a lump in three."""
        window, seen = Window(), []
        for second in range(40):
            total = 160 * int(second / 1.3)
            window, rates = advance(window, scrape(realtime_tokens_total__decode=total), float(second))
            seen.append(rates.decode_tokens_per_s)
        assert all(rate == pytest.approx(160 / 1.3, rel=0.34) for rate in seen[5:])

    def test_a_request_of_one_token_counts(self):
        """It never decodes: its only token comes out of the prefill."""
        engine = Engine()
        before = engine.scrape()
        for _ in range(10):
            engine.begin(1)
        assert watch(before, engine.scrape()).decode_tokens_per_s == 10

    def test_two_recorded_replicas_generated_what_their_requests_got(self, recorded):
        rates = watch(parse(recorded("metrics-0.5.23-dp2.txt")))
        assert rates.generated_tokens_total == 1624

    def test_an_idle_engine_is_zero_and_a_first_reading_is_unknown(self, recorded):
        idle = parse(recorded("metrics-0.5.23-idle.txt"))
        first = watch(idle)
        assert first.decode_tokens_per_s is None
        assert first.missing["decode_tokens_per_s"] == "a rate needs a second reading"
        assert watch(idle, idle).decode_tokens_per_s == 0.0

    def test_a_restart_gives_neither_a_negative_rate_nor_a_spike(self):
        window, seen = Window(), []
        totals = [1000, 1100, 1200, 30, 130, 230, 330]
        for second, total in enumerate(totals):
            window, rates = advance(window, scrape(realtime_tokens_total__decode=total), float(second))
            seen.append(rates.decode_tokens_per_s)
        assert seen == [None, 100, 100, None, 100, 100, 100]
        assert window.restarts == 1

    def test_a_fresh_engine_without_its_counters_yet_is_a_restart(self):
        rates = watch(scrape(realtime_tokens_total__decode=500), scrape(num_running_reqs=0))
        assert rates.decode_tokens_per_s is None

    def test_the_first_tokens_ever_are_not_lost(self):
        """A counter is absent until it moves."""
        idle = scrape(num_running_reqs=0)
        assert watch(idle, scrape(realtime_tokens_total__decode=50)).decode_tokens_per_s == 50

    def test_prefill_is_what_was_computed_not_what_was_cached(self):
        before = scrape(realtime_tokens_total__prefill_compute=100, realtime_tokens_total__prefill_cache=0)
        after = scrape(realtime_tokens_total__prefill_compute=600, realtime_tokens_total__prefill_cache=9000)
        rates = watch(before, after)
        assert rates.prefill_tokens_per_s == 500
        assert rates.cache_hit_ratio == pytest.approx(9000 / 9500)

    def test_before_0_5_8_tokens_come_when_requests_end_and_it_says_so(self):
        before = scrape(generation_tokens_total=100, prompt_tokens_total=40, cached_tokens_total=30)
        after = scrape(generation_tokens_total=300, prompt_tokens_total=240, cached_tokens_total=80)
        rates = watch(before, after)
        assert (rates.decode_tokens_per_s, rates.prefill_tokens_per_s) == (200, 150)
        assert "when a request ends" in rates.notes["decode_tokens_per_s"]
        assert rates.cache_hit_ratio == 0.25

    def test_after_a_long_gap_there_is_no_now_to_compare_with(self):
        rates = watch(
            scrape(realtime_tokens_total__decode=0), scrape(realtime_tokens_total__decode=9000), every=300.0
        )
        assert rates.decode_tokens_per_s is None


class TestDamagedScrapes:
    def totals(self, *scrapes: Scrape):
        window, seen = Window(), []
        for second, one in enumerate(scrapes):
            window, rates = advance(window, one, float(second))
            seen.append(rates.decode_tokens_per_s)
        return seen

    def whole(self, total: int) -> Scrape:
        return scrape(realtime_tokens_total__decode=total)

    def test_one_that_was_cut_off_moves_no_counter(self):
        cut = Scrape({"num_running_reqs": 3.0}, truncated=True)
        assert self.totals(self.whole(100), self.whole(200), cut, self.whole(400)) == [None, 100, 100, 100]

    def test_one_cut_off_at_first_is_no_ground_for_a_spike(self):
        cut = Scrape({"num_running_reqs": 3.0}, truncated=True)
        assert self.totals(cut, self.whole(5000), self.whole(5100)) == [None, None, 100]

    def test_a_lost_line_moves_no_counter(self):
        lost = Scrape({"num_running_reqs": 3.0}, bad_lines=1)
        assert self.totals(self.whole(100), self.whole(200), lost, self.whole(400)) == [None, 100, 100, 100]

    def test_a_line_lost_at_first_is_no_ground_for_a_spike(self):
        lost = Scrape({"num_running_reqs": 3.0}, bad_lines=1)
        assert self.totals(lost, self.whole(5000), self.whole(5100)) == [None, None, 100]

    def test_a_line_that_is_always_bad_does_not_stop_the_rest(self):
        bad = [Scrape({"realtime_tokens_total.decode": 100.0 * n}, bad_lines=2) for n in range(4)]
        assert self.totals(*bad) == [None, 100, 100, 100]

    def test_it_is_said(self):
        assert "could not be read" in watch(Scrape({"num_queue_reqs": 1.0}, bad_lines=3)).notes["scrape"]


class TestLastMinute:
    def test_quantiles_are_of_the_last_minute_only(self):
        window = Window()
        slow = ((0.1, 0.0), (10.0, 500.0), (math.inf, 500.0))
        fast = ((0.1, 100.0), (10.0, 600.0), (math.inf, 600.0))
        for second in range(90):
            histogram = {TTFT: slow if second < 80 else fast}
            window, rates = advance(window, scrape(histogram, num_requests_total=1), float(second))
        assert rates.ttft.p99 == pytest.approx(0.099)

    def test_no_request_gives_no_quantile_and_a_reason(self, recorded):
        load = parse(recorded("metrics-0.5.23-load.txt"))
        rates = watch(load, load)
        assert rates.ttft == Quantiles()
        assert rates.missing["ttft"] == "no request had its first token in the last minute"
        assert rates.missing["itl"] == "no request streamed in the last minute"

    def test_quantiles_lie_in_the_bucket_that_holds_them(self, recorded):
        load = parse(recorded("metrics-0.5.23-load.txt"))
        itl = quantiles(None, load.histograms["inter_token_latency_seconds"])
        assert 0.02 < itl.p50 < itl.p90 < itl.p99 <= 0.025  # 3200 of 3217 are in that bucket

    def test_past_the_last_bound_it_is_the_last_bound(self):
        assert quantiles(None, ((8.0, 0.0), (math.inf, 5.0))) == Quantiles(8.0, 8.0, 8.0)

    @given(
        st.lists(st.tuples(st.floats(0.001, 100), st.floats(0, 1e6)), max_size=6),
        st.lists(st.tuples(st.floats(0.001, 100), st.floats(0, 1e6)), max_size=6),
    )
    def test_any_histogram_is_survived_and_quantiles_are_in_order(self, before, after):
        found = quantiles(tuple(sorted(before)), tuple(sorted(after)))
        values = [value for value in (found.p50, found.p90, found.p99) if value is not None]
        assert values == sorted(values)
        assert len(values) in (0, 3)

    def test_retractions_are_counted_not_extrapolated(self):
        rates = watch(scrape(num_retracted_requests_total=4), scrape(num_retracted_requests_total=5))
        assert rates.retractions_per_min == 1
        window = Window()
        for second in range(120):
            one = scrape(num_retracted_requests_total=second // 10, num_aborted_requests_total=second // 20)
            window, rates = advance(window, one, float(second))
        assert rates.retractions_per_min == pytest.approx(6)
        assert rates.aborted_per_min == pytest.approx(3)

    def test_requests_per_second(self):
        assert (
            watch(scrape(num_requests_total=4), scrape(num_requests_total=10), every=2.0).requests_per_s == 3
        )

    def test_health_probes_are_no_prompts(self):
        """Each computes one token and has no first-token latency."""
        window = Window()
        for second in range(61):
            one = scrape({TTFT: ((math.inf, 7.0),)}, realtime_tokens_total__prefill_compute=second // 5)
            window, rates = advance(window, one, float(second))
        assert rates.cache_hit_ratio is None
        assert rates.missing["cache_hit_ratio"] == "no prompt came in the last minute"

    def test_the_window_is_bounded_however_often_it_is_fed(self, recorded):
        load = parse(recorded("metrics-0.5.23-load.txt"))
        window = Window()
        for tick in range(3000):
            window, _ = advance(window, load, tick * 0.05)
        assert len(window.samples) < 250
        assert window.samples[-1].at - window.samples[0].at >= 60
        assert sys.getsizeof(window.samples) < 4096


class TestAcceptance:
    def test_off_is_not_zero(self, recorded):
        rates = watch(parse(recorded("metrics-0.5.23-load.txt")), identity=PLAIN)
        assert rates.accept_length is None
        assert rates.accept_rate is None
        assert rates.missing["accept_length"] == "speculation is off"

    def test_unknown_engine_with_gauges_at_zero(self, recorded):
        rates = watch(parse(recorded("metrics-0.5.23-load.txt")))
        assert rates.accept_length is None
        assert "off, or has verified nothing yet" in rates.missing["accept_length"]

    def test_on_but_without_a_measurement_yet(self, recorded):
        rates = watch(parse(recorded("metrics-0.5.23-idle.txt")), identity=EAGLE)
        assert rates.missing["accept_length"] == "no acceptance measured since the engine started"

    def test_the_gauge_is_as_of(self, recorded):
        rates = watch(parse(recorded("metrics-0.5.23-speculation.txt")), identity=EAGLE)
        assert rates.accept_length == pytest.approx(3.538, abs=1e-3)
        assert rates.notes["accept_length"] == "as of the engine's last decode interval"
        assert rates.accept_rate == pytest.approx(0.846, abs=1e-3)
        assert rates.accept_rate_meaning == "drafts that were right / drafts proposed (from 0.5.11)"

    def test_counters_of_requests_that_ended_go_before_the_gauge(self, recorded):
        """The engine's own lifetime mean of this recording is 3.513 (avg_spec_accept_length)."""
        body = recorded("metrics-0.5.23-speculation.txt")
        start = scrape(realtime_tokens_total__decode=0)
        rates = watch(start, parse(body), identity=EAGLE)
        assert rates.accept_length == pytest.approx(3.513, rel=0.01)
        assert rates.notes["accept_length"] == "of the requests that ended in the last minute"

    def test_an_older_release_has_the_gauge_and_its_own_meaning(self, recorded):
        old = EngineIdentity(version="0.5.9", speculative_algorithm="EAGLE3")
        load = parse(recorded("metrics-0.5.9.txt"))
        rates = watch(load, load, identity=old)
        assert rates.accept_length == 2.84
        assert rates.accept_rate == 0.71
        assert rates.accept_rate_meaning == "tokens per verify step / draft tokens (before 0.5.11)"

    @pytest.mark.parametrize(
        ("version", "word"),
        [("0.5.10", "before"), ("0.5.10.post2", "before"), ("0.5.11", "from"), ("0.6.0", "from"),
         ("1.0.0rc1", "from"), (None, "unknown"), ("main", "unknown")],
    )  # fmt: skip
    def test_meaning_by_version(self, version, word):
        assert word in accept_rate_meaning(version)


class TestGauges:
    def test_memory_of_the_cache(self, recorded):
        rates = watch(parse(recorded("metrics-0.5.23-load.txt")))
        assert rates.kv_usage_ratio == pytest.approx(6281 / 65536)
        assert (rates.kv_used_tokens, rates.kv_total_tokens) == (6281, 65536)

    def test_the_fullest_pool_of_a_hybrid_model(self):
        rates = watch(scrape(full_token_usage=0.1, swa_token_usage=0.0, mamba_usage=0.93, token_usage=0.93))
        assert rates.kv_usage_ratio == 0.93

    def test_older_releases_have_the_rounded_one(self, recorded):
        rates = watch(parse(recorded("metrics-0.5.9.txt")))
        assert rates.kv_usage_ratio == 0.1
        assert rates.kv_used_tokens == 6281

    def test_absent_metrics_say_so_with_the_version(self):
        old = EngineIdentity(version="0.5.9", kv_token_capacity=260000)
        rates = watch(scrape(num_queue_reqs=0), identity=old)
        assert rates.missing["requests_running"] == "metric num_running_reqs is absent in 0.5.9"
        assert rates.kv_total_tokens == 260000

    def test_hierarchical_cache(self):
        rates = watch(scrape(hicache_host_used_tokens=5, hicache_host_total_tokens=10))
        assert (rates.hicache_used_tokens, rates.hicache_total_tokens) == (5, 10)
        assert "hierarchical cache is off" in watch(scrape(num_queue_reqs=0)).missing["hicache_used_tokens"]

    def test_every_none_has_its_reason_and_no_value_has_one(self, recorded):
        for name in ("metrics-0.5.23-load.txt", "metrics-0.5.9.txt", "metrics-0.5.23-dp2.txt"):
            rates = watch(parse(recorded(name)))
            for field_name in rates.__struct_fields__:
                if field_name in ("missing", "notes"):
                    continue
                value = getattr(rates, field_name)
                gone = value is None or value == Quantiles()
                assert gone == (field_name in rates.missing), field_name
                assert not gone or rates.missing[field_name], field_name
