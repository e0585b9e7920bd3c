"""A load as its log tells it: phases in order, progress, and the cause of a crash rather than its echo."""

# ruff: noqa: E501  log lines are as long as they are

from __future__ import annotations

import re
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.load import LoadWatch
from console.model.log import PHASES, LoadProgress, LogLine
from console.sources.engine_log import read_line, read_manager_line
from console.sources.journal import message_text

LOGS = Path(__file__).parents[1] / "fixtures" / "log"
STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


def line(
    text: str, at: float = 0.0, *, run: str | None = None, pid: int | None = None, manager: bool = False
) -> LogLine:
    text = message_text(text)
    meaning = read_manager_line(text) if manager else read_line(text)
    return LogLine(
        at=at, text=text, invocation=run, pid=pid, kind=meaning.kind, rank=meaning.rank, fields=meaning.fields,
        phase=meaning.phase, percent=meaning.percent, ends=meaning.ends,
    )  # fmt: skip


def recorded(name: str) -> list[LogLine]:
    lines = []
    at = 0.0
    for text in (LOGS / name).read_bytes().decode("utf-8", "replace").split("\n"):
        if stamp := STAMP.match(text):
            at = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        lines.append(line(text, at))
    return lines


def follow(lines: list[LogLine]) -> LoadProgress:
    watch = LoadWatch()
    for each in lines:
        watch.feed(each)
    return watch.progress


def load(*texts: str | tuple[float, str]) -> LoadProgress:
    """Lines one second apart, or at the second given."""
    lines = []
    for second, text in enumerate(texts):
        lines.append(line(*reversed(text)) if isinstance(text, tuple) else line(text, float(second)))
    return follow(lines)


def phases(progress: LoadProgress) -> list[tuple[str, float, float | None]]:
    return [(p.phase, p.began, p.ended) for p in progress.phases]


@pytest.mark.parametrize(
    ("name", "kv_tokens"),
    [
        ("startup.log", 65536),
        ("tp2.log", 65536),
        ("dp2.log", 65536),
        ("standalone.log", 65536),
        ("ngram.log", 65536),
        ("kvfull.log", 3000),
        ("nul-bytes.log", 4096),
    ],
)
def test_recorded_loads_pass_through_their_phases_in_order_and_end(name: str, kv_tokens: int):
    progress = follow(recorded(name))
    names = [p.phase for p in progress.phases]
    assert names == ["starting", "distributed", "weights", "kv-cache", "warm-up"]
    assert all(p.ended is not None and p.ended >= p.began for p in progress.phases)
    assert progress.fired_up_at == progress.phases[-1].ended
    assert progress.kv_tokens == kv_tokens
    assert progress.crash is None
    assert progress.last_progress_at is not None


def test_retractions_are_counted():
    assert follow(recorded("kvfull.log")).retractions == 1
    assert follow(recorded("tp2.log")).retractions == 0


def test_a_recorded_crash_names_the_exception_not_the_signal():
    crash = follow(recorded("crash.log")).crash
    assert crash is not None
    assert crash.signature == "illegal-access"
    assert (
        crash.reason == "RuntimeError: scripted crash: CUDA error: an illegal memory access was encountered"
    )
    assert "Scheduler hit an exception" in crash.lines[0]
    assert "in make_plan" in crash.lines[-4]
    assert "SIGQUIT received" in crash.lines[-1]
    assert crash.remedy is not None


def test_a_recorded_hang_is_the_watchdogs():
    crash = follow(recorded("hang.log")).crash
    assert crash is not None
    assert crash.signature == "watchdog"
    assert crash.at == datetime(2026, 11, 29, 23, 59, 30, tzinfo=UTC).timestamp()


def test_eight_ranks_with_a_draft_model_and_a_host_cache():
    tags = [f"[2026-11-30 00:12:40 TP{rank}] " for rank in range(8)]
    texts: list[tuple[float, str]] = [(0, "Started sglang.service"), (20, "server_args={}")]
    texts += [(25, f"{tag}Init torch distributed begin.") for tag in tags]
    texts += [(30 + n, f"{tag}Init torch distributed ends. mem usage=1.1 GB") for n, tag in enumerate(tags)]
    texts += [(38, f"{tag}Load weight begin. avail mem=94 GB") for tag in tags]
    texts += [(200, "Loading safetensors checkpoint shards:  45% Completed | 29/64 [02:40<03:13,  5.5s/it]")]
    middle = load(*texts).phases[-1]
    assert (middle.phase, middle.began, middle.ended, middle.percent) == ("weights", 38, None, 45)
    assert middle.detail == "shard 29/64"
    texts += [
        (400 + n, f"{tag}Load weight end. elapsed=362 s, avail mem=20 GB, mem usage=73 GB.")
        for n, tag in enumerate(tags)
    ]
    texts += [(408, f"{tag}KV Cache is allocated. #tokens: 260000, KV size: 17.02 GB") for tag in tags]
    texts += [(409, f"{tag}Memory pool end. avail mem=3 GB") for tag in tags[:-1]]
    texts += [(410, f"{tag}Load weight begin. avail mem=3 GB") for tag in tags[:-1]]
    texts += [
        (411, f"{tags[-1]}Memory pool end. avail mem=3 GB"),
        (411, f"{tags[-1]}Load weight begin. avail mem=3 GB"),
    ]
    texts += [(420, f"{tag}Load weight end. elapsed=10 s, avail mem=2 GB, mem usage=1 GB.") for tag in tags]
    texts += [(421, f"{tag}KV Cache is allocated. #tokens: 260000, KV size: 0.28 GB") for tag in tags]
    texts += [(422, f"{tag}Memory pool end. avail mem=2 GB") for tag in tags]
    texts += [(430, f"{tag}Capture target decode CUDA graph begin. avail mem=2 GB") for tag in tags]
    texts += [(440, "Capturing batches (bs=96 avail_mem=1.22 GB):  50%|█████     | 18/36 [00:10<00:10]")]
    capture = load(*texts).phases[-1]
    assert (capture.phase, capture.percent, capture.detail) == ("graphs", 50, "bs=96")
    texts += [
        (450, f"{tag}Capture target decode CUDA graph end. elapsed=20 s, avail mem=1 GB.") for tag in tags
    ]
    texts += [(451, f"{tag}Capture draft decode CUDA graph begin. avail mem=1 GB") for tag in tags]
    draft = load(*texts).phases[-1]
    assert (draft.phase, draft.ended, draft.percent, draft.detail) == ("graphs", None, None, "draft decode")
    texts += [
        (460, f"{tag}Capture draft decode CUDA graph end. elapsed=9 s, avail mem=1 GB.") for tag in tags
    ]
    texts += [(465, f"{tags[0]}max_total_num_tokens=260000, chunked_prefill_size=8192, context_len=262144")]
    texts += [
        (470, f"{tag}Allocating kv hierarchical KV host pool: 520000 tokens, 35.1 GB host memory.")
        for tag in tags
    ]
    texts += [
        (540, "INFO:     Application startup complete."),
        (585, "The server is fired up and ready to roll!"),
    ]
    progress = load(*texts)
    assert phases(progress) == [
        ("starting", 0, 25),
        ("distributed", 25, 37),
        ("weights", 38, 407),
        ("kv-cache", 408, 411),
        ("weights", 410, 420),
        ("kv-cache", 421, 422),
        ("graphs", 430, 460),
        ("host-cache", 470, 540),
        ("warm-up", 540, 585),
    ]
    assert (progress.fired_up_at, progress.kv_tokens) == (585, 260000)


def test_a_rank_that_lags_does_not_turn_the_load_back():
    progress = load(
        "[2026-11-30 00:12:40 DP0] Load weight begin. avail mem=20 GB",
        "[2026-11-30 00:12:41 DP0] Load weight end. avail mem=20 GB",
        "[2026-11-30 00:12:42 DP0] KV Cache is allocated. #tokens: 10",
        "[2026-11-30 00:12:43 DP1] Load weight begin. avail mem=20 GB",
        "[2026-11-30 00:12:44 DP1] Load weight end. avail mem=20 GB",
    )
    assert phases(progress) == [("starting", 0, 0), ("weights", 0, 4), ("kv-cache", 2, None)]


def test_an_engine_that_was_up_before_we_looked_shows_no_load():
    progress = load(
        'INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        "Decode batch, #running-req: 1, #token: 63, token usage: 0.02, cuda graph: True, gen throughput (token/s): 90, #queue-req: 0",
        'INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    )
    assert progress.phases == ()
    assert progress.phase is None
    assert progress.last_progress_at == 1


def test_a_new_invocation_starts_afresh_and_the_old_one_is_remembered():
    watch = LoadWatch()
    for text in [
        "Load weight begin. avail mem=9 GB",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "Received sigquit from a child process.",
    ]:
        watch.feed(line(text, 1.0, run="a" * 32))
    watch.feed(
        line(
            "sglang.service: Main process exited, code=exited, status=1/FAILURE",
            2.0,
            run="a" * 32,
            manager=True,
        )
    )
    assert watch.progress.crash is not None
    watch.feed(line("Started sglang.service - SGLang.", 10.0, run="b" * 32, manager=True))
    watch.feed(line("a last word of the old process", 11.0, run="a" * 32))
    assert watch.progress == LoadProgress("b" * 32, phases=watch.progress.phases)
    assert phases(watch.progress) == [("starting", 10.0, None)]
    assert watch.previous is not None
    assert watch.previous.crash is not None
    assert watch.previous.crash.signature == "cuda-oom"


def test_without_systemd_a_second_start_in_the_same_log_starts_afresh():
    watch = LoadWatch()
    for text in [
        "server_args={}",
        "Load weight begin. avail mem=9 GB",
        "SIGQUIT received. signum=None",
        "server_args={}",
    ]:
        watch.feed(line(text))
    assert watch.progress.crash is None
    assert [p.phase for p in watch.progress.phases] == ["starting"]


SCHEDULER = "[2026-11-30 00:12:40 TP3] Scheduler hit an exception: Traceback (most recent call last):"
SIGQUIT = "[2026-11-30 00:12:40] Received sigquit from a child process. It usually means the child failed."
EXITED = "sglang.service: Main process exited, code=killed, status=9/KILL"

CRASHES = [
    ("cuda-oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has …"),
    (
        "no-kv-memory",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.8",
    ),
    (
        "no-kv-memory",
        "RuntimeError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7.",
    ),
    (
        "no-host-memory",
        "ValueError: Not enough host memory available. Requesting 70.00 GB but only have 12.00 GB free.",
    ),
    (
        "no-state-memory",
        "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed …",
    ),
    ("kv-exhausted", "RuntimeError: Prefill out of memory. Try to lower your batch size."),
    ("illegal-access", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    (
        "nccl",
        "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:3384, unhandled system error",
    ),
    (
        "unsupported-kernel",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    ("no-gpu", "RuntimeError: No CUDA GPUs are available"),
    ("bad-weights", "FileNotFoundError: [Errno 2] No such file or directory: '/models/kimi/config.json'"),
    ("bad-weights", "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"),
    ("bad-flag", "ValueError: Unknown speculative algorithm name: FOO"),
    ("bad-setting", "ValueError: radix cache needs --mamba-scheduler-strategy extra_buffer with speculation"),
    ("missing-module", "ModuleNotFoundError: No module named 'flashinfer'"),
    ("disk-full", "OSError: [Errno 28] No space left on device"),
    (
        "port-in-use",
        "torch.distributed.DistNetworkError: The server socket has failed to listen … EADDRINUSE",
    ),
    ("exception", "KeyError: 'model.layers.61.weight'"),
    ("exception", "AssertionError"),
]


@pytest.mark.parametrize(("signature", "text"), CRASHES)
def test_the_cause_stands_before_the_signal(signature: str, text: str):
    crash = load(
        "[2026-11-30 00:12:30 TP0] Load weight begin. avail mem=94 GB", SCHEDULER,
        '  File "/opt/sglang/scheduler.py", line 10, in run', "    self.go()", text, "", SIGQUIT,
    ).crash  # fmt: skip
    assert crash is not None
    assert (crash.signature, crash.reason) == (signature, text)
    assert text in crash.lines
    assert (crash.remedy is None) == (signature == "exception")


@pytest.mark.parametrize(
    ("signature", "text"),
    [
        ("bad-flag", "launch_server.py: error: argument --reasoning-parser: invalid choice: 'glm47'"),
        (
            "bad-flag",
            "sglang serve: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode",
        ),
        (
            "killed-oom",
            "Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer.",
        ),
        (
            "killed-oom",
            "Subprocess scheduler_0 (pid=123) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
        ),
        (
            "watchdog",
            "[2026-11-30 00:12:40 TP3] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        ),
        ("watchdog", "Watchdog timeout (self.watchdog_timeout=300)"),
        ("exit", "Rank 0 scheduler is dead. Please check if there are relevant logs."),
    ],
)
def test_a_death_that_says_itself_why(signature: str, text: str):
    crash = load("[2026-11-30 00:12:30 TP0] Load weight begin. avail mem=94 GB", text, SIGQUIT).crash
    assert crash is not None
    assert crash.signature == signature
    assert crash.reason == text.rpartition("TP3] ")[2]


def test_the_rank_that_failed_first_is_the_cause_not_those_that_lost_it():
    watch = LoadWatch()
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    lost = (
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
    )
    told = [(SCHEDULER, 13), (SCHEDULER.replace("TP3", "TP5"), 15), ('  File "five.py", line 1, in five', 15),
            ('  File "three.py", line 1, in three', 13), (lost, 15), (oom, 13), (SIGQUIT, 1)]  # fmt: skip
    for text, pid in told:
        watch.feed(line(text, 5.0, pid=pid))
    crash = watch.progress.crash
    assert crash is not None
    assert (crash.signature, crash.reason) == ("cuda-oom", oom)
    assert '  File "three.py", line 1, in three' in crash.lines
    assert '  File "five.py", line 1, in five' not in crash.lines, (
        "another process's traceback is no evidence"
    )


def test_a_real_exception_outweighs_the_exit_code_it_ends_in():
    crash = load(
        SCHEDULER, "KeyError: 'x'", SIGQUIT, "Rank 0 scheduler died during initialization (exit code: -9). …"
    ).crash
    assert crash is not None
    assert (crash.signature, crash.reason) == ("exception", "KeyError: 'x'")


def test_systemd_alone_can_tell_that_it_died():
    watch = LoadWatch()
    watch.feed(line("Load weight begin. avail mem=9 GB", 1.0))
    watch.feed(line(EXITED, 2.0, manager=True))
    crash = watch.progress.crash
    assert crash is not None
    assert (crash.signature, crash.at) == ("killed", 2.0)
    watch.feed(
        line("sglang.service: A process of this unit has been killed by the OOM killer.", 2.1, manager=True)
    )
    assert watch.progress.crash is not None
    assert watch.progress.crash.signature == "killed-oom"


def test_a_port_in_use_is_a_crash_although_the_log_says_fired_up():
    watch = LoadWatch()
    for second, text in enumerate([
        "[2026-11-30 00:12:40] INFO:     Application startup complete.",
        "[2026-11-30 00:12:40] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use",
        "[2026-11-30 00:12:40] The server is fired up and ready to roll!",
    ]):  # fmt: skip
        watch.feed(line(text, float(second)))
    watch.feed(
        line("sglang.service: Main process exited, code=exited, status=3/NOTIMPLEMENTED", 3.0, manager=True)
    )
    assert watch.progress.crash is not None
    assert watch.progress.crash.signature == "port-in-use"


def test_an_old_complaint_is_not_the_cause_of_a_later_death():
    started = [line("The server is fired up and ready to roll!", 0.0)]
    old = [
        line("RuntimeError: a request's trouble, long handled", 100.0),
        line("torch.OutOfMemoryError: long ago", 110.0),
    ]
    crash = follow([*started, *old, line(SCHEDULER, 900.0), line("KeyError: 'now'", 900.0)]).crash
    assert crash is not None
    assert crash.reason == "KeyError: 'now'"


def test_a_stop_that_was_asked_for_is_no_crash():
    watch = LoadWatch()
    watch.feed(line("The server is fired up and ready to roll!", 1.0))
    watch.feed(line("Stopping sglang.service - SGLang...", 2.0, manager=True))
    watch.feed(
        line("[2026-11-30 00:12:40] SIGTERM received. signum=None frame=None. Draining requests …", 2.0)
    )
    watch.feed(line(EXITED, 3.0, manager=True))
    assert watch.progress.crash is None


def test_memory_stays_flat_under_a_flood():
    watch = LoadWatch()
    giant = line("[2026-11-30 00:12:40] server_args={'model_path': '" + "x" * 100_000 + "'}", 1.0, run="a")
    loud = [line(f"RuntimeError: trouble {n} " + "y" * 1500, 2.0, run="a", pid=n % 8) for n in range(500)]
    watch.feed(line(SCHEDULER, 1.0, run="a"))
    tracemalloc.start()
    for _ in range(4):
        watch.feed(giant)
        for each in loud:
            watch.feed(each)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 600_000
    assert watch.progress.crash is not None
    assert len(watch.progress.crash.lines) <= 20
    assert not any("server_args" in text for text in watch.progress.crash.lines)


@given(
    st.lists(
        st.builds(
            LogLine,
            at=st.floats(0, 1e9),
            text=st.text(max_size=60),
            kind=st.sampled_from(
                ["plain", "phase", "prefill", "error", "crash", "noise", "ready", "warning"]
            ),
            invocation=st.sampled_from([None, "a", "b"]),
            rank=st.sampled_from([None, "TP0", "TP1"]),
            fields=st.dictionaries(
                st.sampled_from(["done", "total", "bs", "graph", "#tokens"]), st.text(max_size=5)
            ),
            phase=st.sampled_from([None, *PHASES]),
            percent=st.sampled_from([None, 0.0, 50.0, 100.0]),
            ends=st.booleans(),
        ),
        max_size=30,
    )
)
def test_any_lines_are_followed(lines: list[LogLine]):
    progress = follow(lines)
    assert progress.phase is None or progress.phase == progress.phases[-1]
    assert all(later.began >= 0 for later in progress.phases)
