"""The exposition text: what is folded how, and that no bytes break it."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from console.sources.engine.metrics import TABLE, Scrape, parse


def text(*lines: str) -> bytes:
    return "".join(f"sglang:{line}\n" for line in lines).encode()


class TestRecorded:
    def test_under_load(self, recorded):
        scrape = parse(recorded("metrics-0.5.23-load.txt"))
        assert scrape.note is None
        values = scrape.values
        assert values["num_running_reqs"] == 32
        assert values["num_queue_reqs"] == 8
        assert values["realtime_tokens_total.decode"] == 5398
        assert values["realtime_tokens_total.prefill_compute"] == 1516
        assert values["realtime_tokens_total.prefill_cache"] == 779
        assert values["generation_tokens_total"] == 186
        assert values["kv_used_tokens"] == 6281
        assert values["max_total_num_tokens"] == 65536
        assert scrape.histograms["inter_token_latency_seconds"][-1] == (math.inf, 3217)
        assert len(scrape.histograms["time_to_first_token_seconds"]) == 19

    def test_two_replicas_are_added_up(self, recorded):
        values = parse(recorded("metrics-0.5.23-dp2.txt")).values
        assert values["realtime_tokens_total.decode"] == 807 + 807
        assert values["realtime_tokens_total.prefill_compute"] == 160 + 137
        assert values["realtime_tokens_total.prefill_cache"] == 24  # only one of them has the series

    def test_speculation(self, recorded):
        values = parse(recorded("metrics-0.5.23-speculation.txt")).values
        assert values["spec_verify_calls_total"] == 364
        assert values["spec_accept_length"] == pytest.approx(3.538, abs=1e-3)

    def test_an_older_release(self, recorded):
        values = parse(recorded("metrics-0.5.9.txt")).values
        assert values["num_running_reqs"] == 32
        assert values["generation_tokens_total"] == 186
        assert values["token_usage"] == 0.1
        assert "full_token_usage" not in values
        assert "kv_used_tokens" not in values

    @pytest.mark.parametrize("name", ["load", "dp2", "speculation", "ngram", "idle"])
    def test_the_escaped_prefix_reads_the_same(self, recorded, name):
        body = recorded(f"metrics-0.5.23-{name}.txt")
        assert parse(body.replace(b"sglang:", b"sglang_")) == parse(body)
        assert parse(body.replace(b"\n", b"\r\n")) == parse(body)

    def test_unknown_types_and_comments_change_nothing(self, recorded):
        body = recorded("metrics-0.5.23-load.txt")
        odd = body.replace(b" gauge\n", b" stateset\n").replace(b" counter\n", b" \xff\xfe\n")
        assert parse(odd + b"# nonsense\n#\n\n") == parse(body)


def ranks(name: str, *series: str) -> tuple[str, list[str]]:
    """One family's lines; each series is ``labels=value`` with labels written bare."""
    lines = []
    for one in series:
        labels, _, value = one.rpartition(" ")
        quoted = ",".join(
            f'{key}="{text}"' for key, _, text in (pair.partition("=") for pair in labels.split())
        )
        lines.append(f"{name}{{{quoted}}} {value}")
    return name, lines


FOLDING = [
    # streaming and other requests are one total (is_streaming from 0.5.18)
    (*ranks("generation_tokens_total", "is_streaming=true 30", "is_streaming=false 12"), 42),
    (*ranks("cached_tokens_total", "cache_source=device 5", "cache_source=host 2"), 7),
    (*ranks("num_requests_total", "priority=1 3", "priority=2 4"), 7),
    # with --enable-metrics-for-all-schedulers every TP rank writes the same requests
    (*ranks("num_running_reqs", "tp_rank=3 6", "tp_rank=1 6", "tp_rank=0 6", "tp_rank=2 6"), 6),
    (*ranks("num_running_reqs", "pp_rank=1 tp_rank=0 9", "pp_rank=0 tp_rank=1 4"), 4),
    (*ranks("num_running_reqs", "tp_rank=10 9", "tp_rank=2 4"), 4),
    (*ranks("realtime_tokens_total", *(f"mode=decode tp_rank={rank} 100" for rank in range(8))), 100),
    # replicas work on different requests; the ranks of each still on the same
    (
        *ranks("num_running_reqs", "dp_rank=1 tp_rank=4 2", "dp_rank=0 tp_rank=0 5", "dp_rank=1 tp_rank=5 2"),
        7,
    ),
    (*ranks("num_retracted_requests_total", "dp_rank=0 tp_rank=0 1", "dp_rank=1 tp_rank=1 2"), 3),
    (*ranks("max_total_num_tokens", "dp_rank=0 1000", "dp_rank=1 900"), 1900),
    (*ranks("gen_throughput", "dp_rank=0 100.5", "dp_rank=1 50"), 150.5),
    # priority="" is the total of the parts beside it
    (*ranks("num_queue_reqs", "priority= 5", "priority=1 2", "priority=7 3"), 5),
    (*ranks("num_queue_reqs", "priority=1 2", "priority=7 3"), 5),
    # the fullest replica, not the mean
    (*ranks("token_usage", "dp_rank=0 0.2", "dp_rank=1 0.97"), 0.97),
    # 0.0 is a replica that has not measured yet
    (*ranks("spec_accept_length", "dp_rank=0 0.0", "dp_rank=1 3.0", "dp_rank=2 2.0"), 2.5),
    (*ranks("spec_accept_length", "dp_rank=0 0.0"), 0.0),
]


@pytest.mark.parametrize(("name", "lines", "expected"), FOLDING)
def test_folding(name, lines, expected):
    key = f"{name}.decode" if name == "realtime_tokens_total" else name
    assert parse(text(*lines)) == Scrape({key: expected})
    assert parse(text(*reversed(lines))) == Scrape({key: expected})


def test_histograms_of_several_series_are_one():
    scrape = parse(
        text(
            'time_to_first_token_seconds_bucket{is_streaming="true",le="0.1"} 1',
            'time_to_first_token_seconds_bucket{is_streaming="true",le="+Inf"} 4',
            'time_to_first_token_seconds_bucket{is_streaming="false",le="0.1"} 2',
            'time_to_first_token_seconds_bucket{is_streaming="false",le="+Inf"} 2',
        )
    )
    assert scrape.histograms == {"time_to_first_token_seconds": ((0.1, 3.0), (math.inf, 6.0))}


@pytest.mark.parametrize(
    "bad",
    [
        'num_running_reqs{tp_rank="0" 3',
        "num_running_reqs{tp_rank=0} 3",
        'num_running_reqs{tp_rank="0"}',
        'num_running_reqs{tp_rank="0"} three',
        'num_running_reqs{tp_rank="0"} 1e999',
        'num_running_reqs{tp_rank="0"} -1',
        'num_running_reqs{a="1",a="2"} 3',
        "num_running_reqs " + "9" * 5000,
        "num_running_reqs",
        'e2e_request_latency_seconds_bucket{le="much"} 3',
    ],
)
def test_a_bad_line_costs_itself_and_is_counted(bad):
    scrape = parse(text("num_queue_reqs 7", bad, "token_usage 0.5"))
    assert scrape.values == {"num_queue_reqs": 7, "token_usage": 0.5}
    assert scrape.bad_lines == 1
    assert scrape.note == "/metrics: 1 of its lines could not be read"


def test_nan_is_no_value_and_no_fault():
    assert parse(text("num_running_reqs NaN", "num_queue_reqs 7")) == Scrape({"num_queue_reqs": 7})


def test_a_series_written_twice_counts_once():
    scrape = parse(text('generation_tokens_total{a="1"} 5', 'generation_tokens_total{a="1"} 6'))
    assert scrape.values == {"generation_tokens_total": 6}
    assert scrape.bad_lines == 1


def test_half_a_number_is_not_taken_for_a_number():
    scrape = parse(b"sglang:num_queue_reqs 7\nsglang:num_running_reqs 3")
    assert scrape.values == {"num_queue_reqs": 7}
    assert scrape.truncated
    assert "cut off" in scrape.note


def test_more_lines_than_any_engine_writes_are_bounded():
    lines = [f'generation_tokens_total{{x="{n}"}} 1' for n in range(6000)]
    scrape = parse(text(*lines))
    assert scrape.values["generation_tokens_total"] == 5000
    assert scrape.bad_lines == 1000


def test_another_programs_metrics_are_empty():
    assert parse(b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n").empty
    assert parse(b"").empty
    assert parse(b"<html><body>Not here</body></html>\n").empty


NAMES = st.sampled_from([family.name for family in TABLE] + ["inter_token_latency_seconds_bucket"])


@given(st.binary(max_size=400))
@example(b"sglang:num_running_reqs{} \n")
@example(b"sglang:num_running_reqs{,} 1\n")
@example(b'sglang:num_running_reqs{__name__="process_x"} 1\n')
@example(b'sglang:realtime_tokens_total{mode="\xff"} 1\n')
def test_any_bytes_are_survived(body):
    assert isinstance(parse(body), Scrape)


@given(st.lists(st.tuples(NAMES, st.text(max_size=40)), max_size=8))
def test_any_rest_of_a_wanted_line_is_survived(lines):
    body = "".join(f"sglang:{name}{rest}\n" for name, rest in lines).encode("utf-8", "replace")
    scrape = parse(body)
    assert all(math.isfinite(value) and value >= 0 for value in scrape.values.values())


@given(st.integers(0, 10**6))
def test_a_cut_anywhere_never_changes_a_value(cut):
    body = text("num_running_reqs 12345", 'token_usage{tp_rank="0"} 0.25', "num_queue_reqs 678")
    whole = parse(body).values
    part = parse(body[: cut % (len(body) + 1)]).values
    assert part.items() <= whole.items()
