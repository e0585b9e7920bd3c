"""Memory by rank from the lines of a load and from ``/server_info``: recorded ones, and every wording."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.model.card_memory import rank_key
from console.sources.engine.memory import read_report
from console.sources.memory_log import read_lines, read_load
from console.transport.runner import Result

FIXTURES = Path(__file__).parents[1] / "fixtures"
GIB = 1024**3
STAMP = "[2026-11-30 00:12:40 TP3]"
KEY = rank_key("TP3")

#: What 0.5.9 writes: the draft's weights come when the target's cache is there already.
OLD = (
    "Load weight begin. avail mem=93.63 GB",
    "Load weight end. elapsed=398.12 s, type=KimiK25ForConditionalGeneration, dtype=torch.bfloat16, "
    "avail mem=29.72 GB, mem usage=63.91 GB.",
    "KV Cache is allocated. #tokens: 260000, KV size: 17.02 GB",
    "Memory pool end. avail mem=12.70 GB",
    "Load weight begin. avail mem=12.60 GB",
    "Load weight end. type=LlamaForCausalLMEagle3, dtype=torch.bfloat16, "
    "avail mem=11.82 GB, mem usage=0.78 GB.",
    "KV Cache is allocated. #tokens: 260000, K size: 0.12 GB, V size: 0.13 GB",
    "Capture cuda graph begin. This can take up to several minutes. avail mem=11.40 GB",
    "Capture cuda graph end. Time elapsed: 36.10 s. mem usage=1.34 GB. avail mem=10.06 GB.",
    "Capture draft cuda graph end. Time elapsed: 6.10 s. mem usage=0.34 GB. avail mem=9.72 GB.",
    "max_total_num_tokens=260000, chunked_prefill_size=8192, max_prefill_tokens=16384, "
    "max_running_requests=48, context_len=262144, available_gpu_mem=9.72 GB",
    "Allocating 73.08 GB host memory for hierarchical KV cache.",
)

#: 0.5.23 loads both models first.
NEW = (
    OLD[0],
    OLD[1].replace(", dtype=torch.bfloat16", ""),
    OLD[5],
    "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 260000, KV size: 17.02 GB",
    "Draft KV Cache is allocated. dtype: torch.bfloat16, #tokens: 260000, K size: 0.12 GB, V size: 0.13 GB",
    "Capture target verify CUDA graph end. bs=[1], elapsed=36.10 s, mem usage=1.34 GB, avail mem=10.06 GB.",
    "Capture draft decode CUDA graph end. bs=[1, 2], elapsed=6.10 s, mem usage=0.34 GB, avail mem=9.72 GB.",
    OLD[10],
    "Allocating kv hierarchical KV host pool: 1040000 tokens, 73.08 GB host memory.",
)


def gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 2)


@pytest.mark.parametrize("lines", [OLD, NEW], ids=["0.5.9", "0.5.23"])
def test_a_load_with_a_draft_tells_each_share(lines: tuple[str, ...]) -> None:
    found = read_lines(f"{STAMP} {line}" for line in lines)
    assert found.keys() == {KEY}
    told = found[KEY]
    assert (gib(told.weights), gib(told.kv), gib(told.draft), gib(told.draft_kv)) == (
        63.91,
        17.02,
        1.03,
        0.25,
    )
    assert (gib(told.graphs), gib(told.before_weights), gib(told.after_graphs)) == (1.68, 93.63, 9.72)
    assert told.host == 73_080_000_000  # host memory is told in decimal gigabytes
    assert told.tokens == 260_000


def test_a_hybrid_models_states_are_added_up() -> None:
    line = (
        "Mamba Cache is allocated. max_mamba_cache_size: 96, conv_state size: 0.40GB, ssm_state size: 2.10GB "
        "intermediate_ssm_state_cache size: 0.50GB intermediate_conv_window_cache size: 0.05GB "
    )
    found = read_lines([OLD[1], line])
    assert gib(found[rank_key(None)].state) == 3.05


def test_a_cache_sized_after_the_graphs_is_read_too() -> None:
    late = (
        "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 5000, "
        "K size: 1.00 GB, V size: 1.00 GB, avail mem=3.00 GB"
    )
    found = read_lines([OLD[1], "KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 9000", late])
    told = found[rank_key(None)]
    assert (gib(told.kv), told.tokens) == (2.0, 5000)


def test_only_the_last_start_counts() -> None:
    again = [line.replace("63.91", "60.00") for line in OLD[:3]]
    found = read_lines([*OLD, "[2026-11-30 00:20:00] server_args=ServerArgs(model_path='/x')", *again])
    told = found[rank_key(None)]
    assert (gib(told.weights), told.draft, told.host) == (60.0, None, None)


@pytest.mark.parametrize(
    ("name", "keys", "drafts"),
    [
        ("startup.log", {"DP0 PP0 TP0"}, False),
        ("tp2.log", {"DP0 PP0 TP0", "DP0 PP0 TP1"}, False),
        ("dp2.log", {"DP0 PP0 TP0", "DP1 PP0 TP0"}, False),
        ("standalone.log", {"DP0 PP0 TP0"}, True),
    ],
)
def test_recorded_loads_tell_every_rank(name: str, keys: set[str], drafts: bool) -> None:
    lines = (FIXTURES / "log" / name).read_text(errors="replace").splitlines()
    found = read_lines(lines)
    assert found.keys() == keys
    for told in found.values():
        assert told.tokens == 65_536
        assert told.weights == 0
        assert (told.draft is not None) == drafts


@settings(deadline=None)
@given(
    st.lists(
        st.text()
        | st.sampled_from([*OLD, *NEW]).flatmap(
            lambda line: st.integers(0, len(line)).map(lambda cut: line[:cut])
        ),
        max_size=12,
    )
)
def test_any_lines_are_survived(lines: list[str]) -> None:
    for told in read_lines(lines).values():
        assert told.kv is None or told.kv >= 0


class Answers:
    """A runner that gives one answer and keeps what it was asked."""

    name = "fake"
    root = Path("/")

    def __init__(self, code: int, stdout: str = "", stderr: str = "") -> None:
        self.result = Result((), code, stdout.encode(), stderr.encode())
        self.asked: tuple[str, ...] = ()

    async def run(self, argv: tuple[str, ...], *, deadline: float, stdin: bytes = b"") -> Result:
        self.asked = tuple(argv)
        return self.result


async def test_the_journal_is_read_from_the_start_of_the_run_to_its_end() -> None:
    runner = Answers(0, "\n".join(OLD))
    found, problem = await read_load(runner, "sglang.service", 1000.4, 1585.0)  # type: ignore[arg-type]
    assert (found.keys(), problem) == ({rank_key(None)}, None)
    assert {"--since=@1000", "--until=@1590", "sglang.service"} <= set(runner.asked)


async def test_a_journal_that_has_forgotten_or_fails_says_so() -> None:
    found, problem = await read_load(Answers(0, "Decode batch, #running-req: 1"), "x", 1.0, None)  # type: ignore[arg-type]
    assert (found, problem) == ({}, "the journal no longer has the lines of the load")
    found, problem = await read_load(Answers(1, stderr="No \x1b[31mjournal\n"), "x", 1.0, None)  # type: ignore[arg-type]
    assert (found, problem) == ({}, "No journal")


# /server_info ----------------------------------------------------------------------------------


def test_graphs_are_one_number_or_one_by_phase() -> None:
    usage = {"weight": 63.91, "kvcache": 17.02, "token_capacity": 260_000, "graph": 1.5}
    for graph in (1.5, {"prefill": 0.0, "decode": 1.25, "draft_extend": 0.25, "odd": None}):
        body = {
            "model_path": "/x",
            "version": "0.5.9",
            "internal_states": [{"memory_usage": {**usage, "graph": graph}}],
        }
        report = read_report(msgspec.json.encode(body))
        assert report is not None
        told = report.memory[rank_key(None)]
        assert (gib(told.weights), gib(told.kv), gib(told.graphs)) == (63.91, 17.02, 1.5)
        assert (told.tokens, told.draft) == (260_000, None)


@pytest.mark.parametrize(
    "name", ["server_info-0.5.23.json", "server_info-0.5.9.json", "server_info-0.5.23-speculation.json"]
)
def test_recorded_reports_are_read(name: str) -> None:
    report = read_report((FIXTURES / "engine" / name).read_bytes())
    assert report is not None
    assert report.version in name
    assert report.memory[rank_key(None)].tokens


@settings(deadline=None)
@given(
    st.binary(max_size=60)
    | st.sampled_from(
        [
            b"{}",
            b"[]",
            b'{"internal_states": [1, {"memory_usage": 5}]}',
            b'{"model_path": "x", "internal_states": [{"memory_usage": {"weight": "1", "graph": [1]}}]}',
        ]
    )
)
def test_any_answer_is_survived(body: bytes) -> None:
    report = read_report(body)
    for told in report.memory.values() if report is not None else ():
        assert told.weights is None
