"""What the engine's log lines mean: every wording of 0.5.5 to 0.5.23, and recorded logs of 0.5.23."""

# ruff: noqa: E501  log lines are as long as they are

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.sources.engine_log import pairs, read_line, read_manager_line, split_prefix
from console.sources.journal import message_text

LOGS = Path(__file__).parents[1] / "fixtures" / "log"


def kinds_of(name: str) -> Counter[str]:
    text = (LOGS / name).read_bytes().decode("utf-8", "replace")
    return Counter(read_line(message_text(line)).kind for line in text.split("\n"))


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("[2026-11-30 00:12:40] Memory pool end. avail mem=1 GB", None),
        ("[2026-11-30 00:12:40 TP0] Memory pool end. avail mem=1 GB", "TP0"),
        ("[2026-11-30 00:12:40.123 DP1 TP3] Memory pool end. avail mem=1 GB", "DP1 TP3"),
        (
            "[2026-11-30 00:12:40,123 DP0 PP0 ATTN_CP0 MOE_DP0 TP0 EP0] Memory pool end.",
            "DP0 PP0 ATTN_CP0 MOE_DP0 TP0 EP0",
        ),
        ("Memory pool end. avail mem=1 GB", None),
    ],
)
def test_the_prefix_names_the_rank_with_or_without_milliseconds(text: str, rank: str | None):
    assert split_prefix(text)[0] == rank
    meaning = read_line(text)
    assert (meaning.rank, meaning.phase, meaning.ends) == (rank, "kv-cache", True)


@pytest.mark.parametrize(
    "text", ["[full] total=65536", "[2026-11-30", "[", "[2026-11-30 00:12:40 TP0", "[x] y"]
)
def test_other_brackets_are_no_prefix(text: str):
    assert split_prefix(text) == (None, text)


PREFILLS = [
    # 0.5.5, 0.5.8
    "Prefill batch, #new-seq: 2, #new-token: 300, #cached-token: 40, token usage: 0.25, #running-req: 3, #queue-req: 1, ",
    "Prefill batch [12], #new-seq: 2, #new-token: 300, #cached-token: 40, token usage: 0.25, #running-req: 3, "
    "#queue-req: 1, ",
    # 0.5.10
    "Prefill batch, #new-seq: 2, #new-token: 300, #cached-token: 40, token usage: 0.25, #running-req: 3, #queue-req: 1, "
    "cuda graph: False, input throughput (token/s): 1234.56",
    # 0.5.11 and later
    "Prefill batch, #new-seq: 2, #new-token: 300, #cached-token: 40, token usage: 0.25, #running-req: 3, #queue-req: 1, "
    "#pending-token: 0, #replay-token: 7, cuda graph: False, input throughput (token/s): 1234.56",
    # hybrid and sliding-window models
    "Prefill batch, #new-seq: 2, #new-token: 300, #cached-token: 40, full token usage: 0.25, mamba usage: 0.10, "
    "#running-req: 3, #queue-req: 1, #pending-token: 0, cuda graph: False, input throughput (token/s): 1234.56",
    "Prefill batch, #new-seq: 2, #new-token: 300, #cached-token: 40, full token usage: 0.25, swa token usage: 0.5, "
    "#running-req: 3, #queue-req: 1, ",
]


@pytest.mark.parametrize("text", PREFILLS)
def test_prefill_lines_of_every_version(text: str):
    meaning = read_line(f"[2026-11-30 00:12:40 TP0] {text}")
    assert meaning.kind == "prefill"
    fields = meaning.fields
    assert (fields["#new-seq"], fields["#new-token"], fields["#cached-token"]) == ("2", "300", "40")
    assert (fields["#running-req"], fields["#queue-req"]) == ("3", "1")
    assert fields.get("token usage", fields.get("full token usage")) == "0.25"
    if "throughput" in text:
        assert fields["input throughput (token/s)"] == "1234.56"


DECODES = [
    # 0.5.5, 0.5.8
    "Decode batch, #running-req: 4, #token: 1110, token usage: 0.02, accept len: 2.84, accept rate: 0.71, "
    "cuda graph: True, gen throughput (token/s): 155.20, #queue-req: 0, ",
    "Decode batch [40], #running-req: 4, #token: 1110, token usage: 0.02, accept len: 2.84, accept rate: 0.71, "
    "cuda graph: True, gen throughput (token/s): 155.20, #queue-req: 0, ",
    # 0.5.10 and later, with what later versions add
    "Decode batch, #running-req: 4, #token: 1110, token usage: 0.02, accept len: 2.84, accept rate: 0.71, "
    "cuda graph: True, gen throughput (token/s): 155.20, #queue-req: 0, fwd occupancy: 87.12%",
    "Decode batch, #running-req: 4, #token: 1110, token usage: 0.02, accept len: 2.84, accept rate: 0.71, "
    "cap len: 3.10, block accept len: 2.2, npu graph: True, gen throughput (token/s): 155.20, #queue-req: 0, "
    "est. decode TFLOPS/s (per GPU): 12.5, fwd+idle occupancy: 90.00%",
    # hybrid
    "Decode batch, #running-req: 4, #full token: 1110, full token usage: 0.02, mamba num: 4, mamba usage: 0.10, "
    "accept len: 2.84, accept rate: 0.71, cuda graph: True, gen throughput (token/s): 155.20, #queue-req: 0",
]


@pytest.mark.parametrize("text", DECODES)
def test_decode_lines_of_every_version(text: str):
    meaning = read_line(text)
    assert meaning.kind == "decode"
    assert meaning.fields["#running-req"] == "4"
    assert meaning.fields["accept len"] == "2.84"
    assert meaning.fields["gen throughput (token/s)"] == "155.20"
    assert meaning.fields["#queue-req"] == "0"


def test_without_speculation_there_is_no_accept_length():
    text = (
        "Decode batch, #running-req: 1, #token: 63, token usage: 0.02, cpu graph: False, "
        "gen throughput (token/s): 272.90, #queue-req: 0"
    )
    assert "accept len" not in read_line(text).fields


PHASES = [
    ("server_args=ServerArgs(model_path='/models/kimi', tp_size=8)", "starting", False),
    ("server_args={'model_path': '/models/kimi'}", "starting", False),
    ("Init torch distributed begin.", "distributed", False),
    ("Init torch distributed ends. mem usage=1.18 GB", "distributed", True),
    ("Init torch distributed ends. elapsed=3.21 s, mem usage=1.18 GB", "distributed", True),
    ("Init parallel begin.", "distributed", False),
    ("Init parallel ends. elapsed=0.02 s", "distributed", True),
    ("Load weight begin. avail mem=78.50 GB", "weights", False),
    ("Load weight end. type=KimiK25ForConditionalGeneration, dtype=torch.bfloat16, avail mem=9.1 GB, mem usage=69 GB.",
     "weights", True),
    ("Load weight end. elapsed=412.34 s, type=X, quant=compressed-tensors, avail mem=9.1 GB, mem usage=69 GB.",
     "weights", True),
    ("Load weight end. Committed real weights after CUDA graph capture in 12.00 s", "weights", True),
    ("Using KV cache dtype: torch.bfloat16", "kv-cache", False),
    ("KV Cache is allocated. #tokens: 260000, KV size: 17.02 GB", "kv-cache", False),
    ("KV Cache is allocated. #tokens: 260000, K size: 8.51 GB, V size: 8.51 GB", "kv-cache", False),
    ("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 260000, KV size: 17.02 GB", "kv-cache", False),
    ("Draft KV Cache is allocated. dtype: torch.bfloat16, #tokens: 260000, KV size: 0.28 GB", "kv-cache", False),
    ("KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 260000, KV size: 17.02 GB", "kv-cache", False),
    ("Mamba Cache is allocated. max_mamba_cache_size: 96, conv_state size: 0.4GB, ssm_state size: 2.1GB ",
     "kv-cache", False),
    ("Memory pool end. avail mem=10.86 GB", "kv-cache", True),
    ("Capture cuda graph begin. This can take up to several minutes. avail mem=10.86 GB", "graphs", False),
    ("Capture cuda graph end. Time elapsed: 21.30 s. mem usage=1.2 GB. avail mem=9.6 GB.", "graphs", True),
    ("Capture draft cuda graph begin. This can take up to several minutes. avail mem=9 GB", "graphs", False),
    ("Capture draft extend cuda graph begin. This can take up to several minutes. avail mem=9 GB", "graphs", False),
    ("Capture piecewise CUDA graph begin. avail mem=9 GB", "graphs", False),
    ("Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=9 GB", "graphs", False),
    ("Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=9.1 s, mem usage=1 GB, avail mem=8 GB.",
     "graphs", True),
    ("Allocating 35.00 GB host memory for hierarchical KV cache.", "host-cache", False),
    ("Allocating kv hierarchical KV host pool: 500000 tokens, 35.14 GB host memory.", "host-cache", False),
    ("HiCache auto-sizing: ratio 2.000 -> 1.310; 46.0 GiB host memory per rank (fraction 0.80, 8 ranks on this "
     "host), host pools 368.0 GiB.", "host-cache", False),
    ("INFO:     Application startup complete.", "warm-up", False),
    ("INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)", "warm-up", False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "phase", "ends"), PHASES)
def test_phases_in_every_wording(text: str, phase: str, ends: bool):
    meaning = read_line(f"[2026-11-30 00:12:40 TP0] {text}")
    assert (meaning.kind, meaning.phase, meaning.ends) == ("phase", phase, ends)


def test_fired_up_is_its_own_kind():
    meaning = read_line("[2026-11-30 00:12:40] The server is fired up and ready to roll!")
    assert (meaning.kind, meaning.phase, meaning.ends) == ("ready", "warm-up", True)


def test_the_size_of_the_kv_cache_is_read():
    text = (
        "[2026-11-30 00:12:40 TP0] max_total_num_tokens=260096, chunked_prefill_size=8192, "
        "max_prefill_tokens=16384, max_running_requests=48, context_len=262144, available_gpu_mem=9.60 GB"
    )
    fields = read_line(text).fields
    assert (fields["max_total_num_tokens"], fields["available_gpu_mem"]) == ("260096", "9.60 GB")
    post = "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 300032, KV size: 19 GB, avail mem=2 GB"
    assert read_line(post).fields["#tokens"] == "300032"


BARS = [
    (
        "Loading safetensors checkpoint shards:   0% Completed | 0/64 [00:00<?, ?it/s]",
        "weights",
        0,
        "0",
        "64",
    ),
    (
        "Loading safetensors checkpoint shards:  12% Completed | 8/64 [00:41<04:47,  5.1s/it]",
        "weights",
        12,
        "8",
        "64",
    ),
    (
        "Multi-thread loading shards:  50% Completed | 32/64 [00:41<00:41,  1.3s/it]",
        "weights",
        50,
        "32",
        "64",
    ),
    ("Loading pt checkpoint shards: 100% Completed | 4/4 [00:04<00:00,  1.0s/it]", "weights", 100, "4", "4"),
    (
        "Loading safetensors using Fastsafetensor loader:  25% Completed | 1/4 [00:01<00:03]",
        "weights",
        25,
        "1",
        "4",
    ),
]


@pytest.mark.parametrize(("text", "phase", "percent", "done", "total"), BARS)
def test_progress_bars(text: str, phase: str, percent: int, done: str, total: str):
    meaning = read_line(text)
    assert (meaning.kind, meaning.phase, meaning.percent) == ("phase", phase, percent)
    assert (meaning.fields["done"], meaning.fields["total"]) == (done, total)


@pytest.mark.parametrize(
    ("text", "percent", "size"),
    [
        (
            "Capturing batches (bs=160 avail_mem=11.22 GB):   8%|▊         | 3/36 [00:01<00:14,  2.31it/s]",
            8,
            "160",
        ),
        ("Capturing batches (bs=1 avail_mem=9.60 GB): 100%|██████████| 36/36 [00:12<00:00]", 100, "1"),
        (
            "Capturing num tokens (num_tokens=4096 avail_mem=9.60 GB):  50%|█████     | 9/18 [00:12<00:12]",
            50,
            "4096",
        ),
        (
            "Capturing prefill shape (num_tokens=256 avail_mem=9.60 GB):  50%|█████     | 9/18 [00:12<00:12]",
            50,
            "256",
        ),
    ],
)
def test_capture_bars_tell_the_batch_size(text: str, percent: int, size: str):
    meaning = read_line(text)
    assert (meaning.phase, meaning.percent, meaning.fields["bs"]) == ("graphs", percent, size)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('INFO:     127.0.0.1:46524 - "GET /health HTTP/1.1" 503 Service Unavailable', "noise"),
        ('INFO:     127.0.0.1:46524 - "GET /health_generate HTTP/1.1" 200 OK', "noise"),
        ('INFO:     127.0.0.1:46524 - "GET /metrics HTTP/1.1" 200 OK', "noise"),
        ('INFO:     127.0.0.1:46524 - "GET /v1/loads?include=all HTTP/1.1" 200 OK', "noise"),
        ('INFO:     127.0.0.1:46524 - "POST /v1/chat/completions HTTP/1.1" 200 OK', "plain"),
        ('INFO:     127.0.0.1:46524 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error', "warning"),
        ("Prefill batch, #new-seq: 1, #new-token: 1, #cached-token: 0, token usage: 0.00, #running-req: 0, "
         "#queue-req: 0, ", "noise"),
        ("Prefill batch, #new-seq: 1, #new-token: 1, #cached-token: 171, token usage: 0.00, #running-req: 0, "
         "#queue-req: 0, ", "prefill"),
        ("nanobind: leaked 4 instances!", "noise"),
        ("", "noise"),
        ("KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 389, "
         "#new_token_ratio: 0.3097 -> 0.9996", "warning"),
        ("Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.", "warning"),
        ("Scheduler hit an exception: Traceback (most recent call last):", "crash"),
        ("TokenizerManager hit an exception: Traceback (most recent call last):", "crash"),
        ("DataParallelController hit an exception: Traceback (most recent call last):", "crash"),
        ("Received sigquit from a child process. It usually means the child failed.", "crash"),
        ("SIGQUIT received. signum=None, frame=None. It usually means one child failed.", "crash"),
        ("Subprocess scheduler_0 (pid=123) crashed with exit code -9. Triggering SIGQUIT for cleanup...", "crash"),
        ("Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), …", "crash"),
        ("Rank 0 scheduler is dead. Please check if there are relevant logs.", "crash"),
        ("Initialization failed. Please see the error messages above.", "crash"),
        ("Initialization failed. warmup error: Traceback (most recent call last):", "crash"),
        ("Watchdog timeout (self.watchdog_timeout=300)", "crash"),
        ("Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "crash"),
        ("Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)", "warning"),
        ("launch_server.py: error: argument --reasoning-parser: invalid choice: 'glm47'", "crash"),
        ("sglang serve: error: unrecognized arguments: --foo", "crash"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "error"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "error"),
        ("AssertionError", "error"),
        ("Capture cuda graph failed: CUDA out of memory", "error"),
        ("ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000)", "error"),
        ("Decode out of memory. Try to lower your batch size.", "error"),
        ("NaN detected in logits; values were sanitized before sampling.", "error"),
        ("Ignore import error when loading sglang.srt.models.mamba: cannot import name 'x'", "warning"),
        ("    raise RuntimeError('quoted in a traceback')", "plain"),
        ('  File "/opt/sglang/error.py", line 1, in failed', "plain"),
        ("Receive: obj=GenerateReqInput(text='Traceback: fatal error')", "plain"),
        ("Decode the meaning of this", "plain"),
        ("Loading extension module", "plain"),
    ],
)  # fmt: skip
def test_kinds(text: str, kind: str):
    assert read_line(text).kind == kind
    assert read_line(f"[2026-11-30 00:12:40 TP0] {text}").kind == kind


@pytest.mark.parametrize(
    ("text", "kind", "phase"),
    [
        ("sglang.service: Main process exited, code=exited, status=1/FAILURE", "crash", None),
        ("sglang.service: Main process exited, code=killed, status=9/KILL", "crash", None),
        ("sglang.service: Main process exited, code=dumped, status=6/ABRT", "crash", None),
        ("sglang.service: Main process exited, code=exited, status=0/SUCCESS", "plain", None),
        ("sglang.service: Main process exited, code=killed, status=15/TERM", "plain", None),
        ("sglang.service: A process of this unit has been killed by the OOM killer.", "crash", None),
        ("sglang.service: Start request repeated too quickly.", "crash", None),
        ("sglang.service: Failed with result 'exit-code'.", "error", None),
        ("sglang.service: Scheduled restart job, restart counter is at 1.", "warning", None),
        ("sglang.service: State 'stop-sigterm' timed out. Killing.", "error", None),
        ("Started sglang.service - SGLang.", "phase", "starting"),
        ("Stopping sglang.service - SGLang...", "plain", None),
    ],
)
def test_systemds_own_lines(text: str, kind: str, phase: str | None):
    meaning = read_manager_line(text)
    assert (meaning.kind, meaning.phase) == (kind, phase)


def test_a_recorded_start_has_every_phase_once_and_folds_its_noise():
    kinds = kinds_of("startup.log")
    assert kinds["ready"] == 1
    assert kinds["decode"] == 1
    assert kinds["prefill"] == 2  # the warm-up's and the chat's; three health probes are noise
    assert kinds["crash"] == 0
    assert kinds["error"] == 0
    assert kinds["noise"] > 90


@pytest.mark.parametrize(
    "name", ["dp2.log", "tp2.log", "ngram.log", "standalone.log", "kvfull.log", "nul-bytes.log"]
)
def test_recorded_good_runs_show_neither_crash_nor_error(name: str):
    kinds = kinds_of(name)
    assert kinds["ready"] == 1
    assert kinds["crash"] == 0
    assert kinds["error"] == 0


@given(st.text())
def test_any_text_is_read(text: str):
    meaning = read_line(text)
    assert meaning.percent is None or 0 <= meaning.percent <= 100
    read_manager_line(text)


WORDS = ["Prefill", "Decode", "Init", "Load", "Capture", "Capturing", "KV", "INFO:", "The", "Loading", "Mamba",
         "batch", "weight", "begin", "end", "Cache is allocated.", ":", "%", "|", "=", ", ", " ", "[", "]", "12", "error"]  # fmt: skip


@given(st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join))
def test_any_salad_of_the_engines_own_words_is_read(text: str):
    read_line(text)
    read_line(f"[2026-11-30 00:12:40 TP0] {text}")


KEY = st.from_regex(r"#?[a-z][a-z +./()-]{0,20}[a-z)]", fullmatch=True)
VALUE = st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,2})?%?|True|False", fullmatch=True)


@given(st.dictionaries(KEY, VALUE), st.booleans())
def test_pairs_come_back_as_they_were_written(fields: dict[str, str], trailing_comma: bool):
    text = ", ".join(f"{key}: {value}" for key, value in fields.items()) + (", " if trailing_comma else "")
    assert pairs(text) == fields
    assert read_line(f"Decode batch, {text}").fields == fields
