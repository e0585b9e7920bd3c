"""A load of the engine, line by line: what its log says, when, and how its memory grows.

Wordings are SGLang 0.5.18's. The times of Kimi-K2.5 on eight cards add up to the 585 s that were measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from console.simulator.spec import CONTEXT_GB, DRAFT_GB, FREE_GB, WORKSPACE_GB, EngineSpec

#: Who writes the line: the main process, a scheduler (its rank follows) or nobody's prefix (tqdm, warnings).
Source = Literal["main", "rank", "bare"]

Event = Literal["bind", "up"]

#: Not a fault to arm: what happens to a load while somebody else holds memory on a card.
UNBALANCED = "unbalanced"

STARTING_S = 28.0
DISTRIBUTED_S = 8.0
DRAFT_S = 9.0
KV_S = 4.0
HOST_S_PER_GB = 0.6921  # pinning is slow: 75 GB per rank take 52 s
GRAPHS_S = 58.0
TIDY_S = 4.0
WARM_UP_S = 24.0

_PACKAGES = "/opt/sglang/lib/python3.11/site-packages/sglang"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """``after`` seconds after the step before. ``memory_gb`` is what each card then has in use.

    ``pinned`` is the share of the host cache that is allocated, 0..1.
    ``exit`` ends the process with this status; above 128, by a signal.
    """

    after: float = 0.0
    text: str | None = None
    source: Source = "main"
    rank: int = 0
    memory_gb: float | None = None
    pinned: float | None = None
    event: Event | None = None
    exit: int | None = None


def steps(spec: EngineSpec, fault: str | None = None) -> Iterator[Step]:
    """The whole load, or as far as ``fault`` lets it come; it then ends in a step with ``exit``."""
    yield from _starting(spec)
    yield from _distributed(spec)
    if fault == UNBALANCED:
        yield from _unbalanced(spec)
        return
    if fault == "crash-on-load":
        yield from _weights(spec, until=0.6)
        yield from _crash(spec)
        return
    yield from _weights(spec)
    if spec.speculates:
        yield from _draft(spec)
    yield from _kv_cache(spec)
    if fault == "oom":
        yield from _graphs(spec, until=0.3)
        yield from _out_of_memory(spec)
        return
    yield from _graphs(spec)
    yield from _pool_size(spec)
    if spec.hicache_ratio:
        yield from _host_cache(spec)
    yield from _tidy()
    if fault == "port-taken":
        yield from port_taken(spec)
        return
    yield from _warm_up(spec)


def duration(spec: EngineSpec) -> float:
    """Seconds from start to ready."""
    return sum(step.after for step in steps(spec))


def _everyone(
    spec: EngineSpec, text: str, after: float = 0.0, memory_gb: float | None = None
) -> Iterator[Step]:
    """The same line by every rank; rank 0 is not always the first."""
    order = [1, 0, *range(2, spec.tp_size)] if spec.tp_size > 1 else [0]
    for place, rank in enumerate(order):
        yield Step(
            after=after if place == 0 else 0.002,
            text=text,
            source="rank",
            rank=rank,
            memory_gb=memory_gb if place == 0 else None,
        )


def _starting(spec: EngineSpec) -> Iterator[Step]:
    yield Step(
        after=3.1,
        source="bare",
        text=f"{_PACKAGES}/launch_server.py:64: UserWarning: 'python -m sglang.launch_server' is still "
        "supported, but 'sglang serve' is the recommended entrypoint.\n"
        "  Example: sglang serve --model-path <model> [options]\n  warnings.warn(",
    )
    yield Step(after=7.4, text=f"server_args={server_args(spec)}")
    yield Step(after=0.4, text="Using default HuggingFace chat template with detected content format: openai")
    yield Step(after=STARTING_S - 10.9, memory_gb=0.0)


def _distributed(spec: EngineSpec) -> Iterator[Step]:
    yield from _everyone(spec, "Init torch distributed begin.", memory_gb=0.40)
    yield Step(after=2.2, source="rank", text="sglang is using nccl==2.28.3", memory_gb=0.9)
    yield from _everyone(
        spec,
        f"Init torch distributed ends. elapsed={DISTRIBUTED_S - 0.52:.2f} s, mem usage=0.94 GB",
        5.8,
        CONTEXT_GB,
    )


def _weights(spec: EngineSpec, until: float = 1.0) -> Iterator[Step]:
    model = spec.model
    yield from _everyone(spec, f"Load weight begin. avail mem={FREE_GB:.2f} GB")
    yield Step(source="bare", text=_shard_bar(0, model.shards, 0.0))
    each = model.load_s / (model.shards + 1)
    for done in range(1, model.shards + 1):
        if done / model.shards > until:
            return
        elapsed = each * done
        yield Step(
            after=each,
            source="bare",
            text="\r" + _shard_bar(done, model.shards, elapsed),
            memory_gb=CONTEXT_GB + model.weights_gb * done / model.shards,
        )
    yield from _everyone(
        spec,
        f"Load weight end. elapsed={model.load_s:.2f} s, type={model.architecture}, "
        f"avail mem={FREE_GB - model.weights_gb:.2f} GB, mem usage={model.weights_gb:.2f} GB.",
        each,
    )


def _shard_bar(done: int, total: int, elapsed: float) -> str:
    """tqdm's bar as the loader formats it; all but the first begin with a carriage return."""
    if done == 0:
        return f"Loading safetensors checkpoint shards:   0% Completed | 0/{total} [00:00<?, ?it/s]"
    left = elapsed / done * (total - done)
    return (
        f"Loading safetensors checkpoint shards: {100 * done // total:3d}% Completed | {done}/{total} "
        f"[{_clock(elapsed)}<{_clock(left)}, {elapsed / done:5.2f}s/it]"
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def _draft(spec: EngineSpec) -> Iterator[Step]:
    before = FREE_GB - spec.model.weights_gb
    yield from _everyone(spec, f"Load weight begin. avail mem={before:.2f} GB", 0.6)
    yield Step(
        after=0.4,
        source="bare",
        text="Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]",
    )
    yield Step(
        after=DRAFT_S - 2.0,
        source="bare",
        text="\rLoading safetensors checkpoint shards: 100% Completed | 1/1 [00:07<00:00,  7.02s/it]",
        memory_gb=CONTEXT_GB + spec.weights_gb,
    )
    yield from _everyone(
        spec,
        f"Load weight end. elapsed={DRAFT_S - 1.4:.2f} s, type=LlamaForCausalLMEagle3, "
        f"avail mem={before - DRAFT_GB:.2f} GB, mem usage={DRAFT_GB:.2f} GB.",
        1.0,
    )


def _kv_cache(spec: EngineSpec) -> Iterator[Step]:
    base = CONTEXT_GB + spec.weights_gb + spec.state_gb
    free = FREE_GB - spec.weights_gb - spec.state_gb
    target, draft = spec.target_kv_gb, spec.draft_kv_gb
    if spec.state_slots:
        window = 414_720 / spec.model.slot
        yield from _everyone(
            spec,
            f"Mamba Cache is allocated. max_mamba_cache_size: {spec.state_slots}, "
            f"conv_state size: {spec.state_gb * window:.2f}GB, "
            f"ssm_state size: {spec.state_gb * (1 - window):.2f}GB ",
            1.0,
            base,
        )
    yield from _everyone(
        spec,
        f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {spec.kv_tokens}, {_pool(spec, target)}",
        KV_S / 2,
        base + target,
    )
    yield from _everyone(spec, f"Memory pool end. avail mem={free - target:.2f} GB", 0.3)
    if spec.speculates:
        yield from _everyone(
            spec,
            f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {spec.kv_tokens}, "
            f"K size: {draft / 2:.2f} GB, V size: {draft / 2:.2f} GB",
            KV_S / 2 - 0.5,
            base + target + draft,
        )
        yield from _everyone(spec, f"Memory pool end. avail mem={free - target - draft:.2f} GB", 0.2)


def _pool(spec: EngineSpec, size: float) -> str:
    """A latent cache is one buffer; any other has one for keys and one for values."""
    if spec.model.model_type == "kimi_k25":
        return f"KV size: {size:.2f} GB"
    return f"K size: {size / 2:.2f} GB, V size: {size / 2:.2f} GB"


def _host_cache(spec: EngineSpec) -> Iterator[Step]:
    """The scheduler's prefix cache comes last, and its host pool with it."""
    seconds = spec.host_gb * HOST_S_PER_GB
    yield from _everyone(
        spec, f"Allocating {spec.host_gb:.2f} GB host memory for hierarchical KV cache.", 0.4
    )
    for slice_ in range(1, 9):
        yield Step(after=max(0.0, seconds - 0.4) / 8, pinned=slice_ / 8)


def _graphs(spec: EngineSpec, until: float = 1.0) -> Iterator[Step]:
    free = spec.available_gb + spec.graph_gb
    used = spec.used_gb - spec.graph_gb - WORKSPACE_GB
    sizes = _graph_sizes(spec)
    plan: tuple[tuple[str, int, float, float], ...]
    if spec.speculates:
        plan = (
            ("target verify", spec.draft_tokens, 0.62 * GRAPHS_S, 1.34),
            ("draft decode", 1, 0.21 * GRAPHS_S, 0.34),
            ("draft extend", spec.draft_tokens, 0.17 * GRAPHS_S, 0.25),
        )
    else:
        plan = (("target decode", 1, GRAPHS_S, 1.27),)
    for name, per_request, seconds, size in plan:
        yield from _everyone(
            spec,
            f"Capture {name} CUDA graph begin. backend=full, num_tokens_per_req={per_request}, "
            f"avail mem={free:.2f} GB",
            0.2,
        )
        each = (seconds - 0.4) / (len(sizes) + 1)
        for done, size_now in enumerate(sizes):
            if done / len(sizes) > until:
                return
            available = free - size * done / len(sizes)
            share = done / len(sizes)
            yield Step(
                after=each,
                source="bare",
                text=("\r" if done else "")
                + f"Capturing batches (bs={size_now} avail_mem={available:.2f} GB): {100 * share:3.0f}%|"
                f"{'█' * int(10 * share):<10}| {done}/{len(sizes)} [{_clock(each * done)}<"
                f"{_clock(each * (len(sizes) - done))}, {each:5.2f}s/it]",
                memory_gb=used + size * share,
            )
        free -= size
        used += size
        yield from _everyone(
            spec,
            f"Capture {name} CUDA graph end. bs={sorted(sizes)}, elapsed={seconds - 0.2:.2f} s, "
            f"mem usage={size:.2f} GB, avail mem={free:.2f} GB.",
            each + 0.2,
            used,
        )


def _graph_sizes(spec: EngineSpec) -> list[int]:
    top = min(spec.cuda_graph_max_bs, spec.max_running_requests)
    sizes = [1, 2, 4, *range(8, top + 1, 8 if top <= 128 else 32)]
    return sorted({size for size in sizes if size <= top}, reverse=True)


def _pool_size(spec: EngineSpec) -> Iterator[Step]:
    yield Step(
        after=1.6,
        source="rank",
        text=f"max_total_num_tokens={spec.kv_tokens}, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        f"max_running_requests={spec.max_running_requests}, context_len={spec.model.context_length}, "
        f"available_gpu_mem={spec.available_gb:.2f} GB",
        memory_gb=spec.used_gb,
    )


def _tidy() -> Iterator[Step]:
    yield Step(after=TIDY_S - 1.6)


def _warm_up(spec: EngineSpec) -> Iterator[Step]:
    yield Step(text="INFO:     Started server process [{main}]")
    yield Step(after=0.1, text="INFO:     Waiting for application startup.")
    yield Step(after=0.4, text="INFO:     Application startup complete.")
    yield Step(
        after=0.1,
        text=f"INFO:     Uvicorn running on http://{spec.host}:{spec.port} (Press CTRL+C to quit)",
        event="bind",
    )
    yield Step(after=1.0, text='INFO:     127.0.0.1:{client} - "GET /model_info HTTP/1.1" 200 OK')
    yield Step(
        after=0.9,
        source="rank",
        text="Prefill batch, #new-seq: 1, #new-token: 28, #cached-token: 0, token usage: 0.00, "
        "#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: False, "
        "input throughput (token/s): 2.11",
    )
    path = "/v1/chat/completions" if spec.model.multimodal else "/generate"
    yield Step(after=WARM_UP_S - 2.6, text=f'INFO:     127.0.0.1:{{client}} - "POST {path} HTTP/1.1" 200 OK')
    yield Step(after=0.1, text="The server is fired up and ready to roll!", event="up")


def _crash(spec: EngineSpec) -> Iterator[Step]:
    lines = (
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "{_PACKAGES}/srt/managers/scheduler.py", line 3187, in run_scheduler_process\n'
        "    scheduler = Scheduler(\n"
        "                ^^^^^^^^^^\n"
        f'  File "{_PACKAGES}/srt/managers/scheduler.py", line 371, in __init__\n'
        "    self.init_model_worker()\n"
        f'  File "{_PACKAGES}/srt/model_executor/model_runner.py", line 1093, in load_model\n'
        "    self.model = get_model(\n"
        "                 ^^^^^^^^^^\n"
        f'  File "{_PACKAGES}/srt/model_loader/weight_utils.py", line 742, in safetensors_weights_iterator\n'
        '    with safe_open(st_file, framework="pt", device="cpu") as f:\n'
        "         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, "
        "file not fully covered"
    )
    yield Step(after=1.3, source="rank", rank=3, text=lines)
    yield from _killed(spec)


def _unbalanced(spec: EngineSpec) -> Iterator[Step]:
    lines = (
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "{_PACKAGES}/srt/model_executor/model_runner.py", line 872, in init_torch_distributed\n'
        "    raise ValueError(\n"
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
        f"pre_model_load_memory={FREE_GB - 18.63:.2f}, local_gpu_memory={FREE_GB:.2f}, "
        f"local_gpu_memory * 0.9={FREE_GB * 0.9:.2f}"
    )
    yield Step(after=0.3, source="rank", text=lines)
    yield from _killed(spec)


def _out_of_memory(spec: EngineSpec) -> Iterator[Step]:
    lines = (
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "{_PACKAGES}/srt/model_executor/model_runner.py", line 2204, in init_device_graphs\n'
        "    self.graph_runner = CudaGraphRunner(self)\n"
        "                        ^^^^^^^^^^^^^^^^^^^^^\n"
        f'  File "{_PACKAGES}/srt/model_executor/cuda_graph_runner.py", line 398, in __init__\n'
        "    self.capture()\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 5 has a total capacity "
        "of 94.97 GiB of which 1.61 GiB is free. Including non-PyTorch memory, this process has 93.35 GiB "
        "memory in use. Of the allocated memory 90.88 GiB is allocated by PyTorch, and 412.51 MiB is "
        "reserved by PyTorch but unallocated.\n"
        "\n"
        "During handling of the above exception, another exception occurred:\n"
        "\n"
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.25 GiB.\n"
        "Possible solutions:\n"
        "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
        "2. set --cuda-graph-max-bs to a smaller value (e.g., 16)"
    )
    yield Step(after=1.1, source="rank", rank=5, text=lines, memory_gb=93.35)
    yield from _killed(spec)


def _killed(spec: EngineSpec) -> Iterator[Step]:
    yield Step(after=0.2, text="Received sigquit from a child process. It usually means the child failed.")
    yield Step(after=1.4, exit=137)


def port_taken(spec: EngineSpec) -> Iterator[Step]:
    """Uvicorn cannot bind; the warm-up, which talks to whoever has the port, is content all the same."""
    yield Step(text="INFO:     Started server process [{main}]")
    yield Step(after=0.1, text="INFO:     Waiting for application startup.")
    yield Step(after=0.4, text="INFO:     Application startup complete.")
    yield Step(
        after=0.1,
        text=f"ERROR:    [Errno 98] error while attempting to bind on address ('{spec.host}', {spec.port}): "
        "address already in use",
    )
    yield Step(after=0.2, text="INFO:     Waiting for application shutdown.")
    yield Step(after=0.1, text="INFO:     Application shutdown complete.")
    yield Step(after=0.9, text="The server is fired up and ready to roll!")
    yield Step(after=0.3, exit=3)


def server_args(spec: EngineSpec) -> dict[str, object]:
    """The resolved arguments, as the log prints them and ``/server_info`` answers them."""
    return {
        "model_path": spec.model_path,
        "tokenizer_path": spec.model_path,
        "tokenizer_mode": "auto",
        "tokenizer_worker_num": 1,
        "skip_tokenizer_init": False,
        "load_format": "auto",
        "model_loader_extra_config": "{}",
        "trust_remote_code": spec.trust_remote_code,
        "context_length": None,
        "dtype": "auto",
        "quantization": spec.quantization,
        "kv_cache_dtype": "auto",
        "mem_fraction_static": spec.mem_fraction,
        "max_running_requests": spec.max_running_requests,
        "max_queued_requests": None,
        "max_total_tokens": None,
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 16384,
        "schedule_policy": "fcfs",
        "page_size": 1,
        "disable_radix_cache": False,
        "disable_overlap_schedule": False,
        "tp_size": spec.tp_size,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "device": "cuda",
        "random_seed": 318_205_177,
        "watchdog_timeout": 300,
        "host": spec.host,
        "port": spec.port,
        "nccl_port": None,
        "dist_init_addr": None,
        "nnodes": 1,
        "node_rank": 0,
        "skip_server_warmup": False,
        "api_key": None,
        "admin_api_key": None,
        "served_model_name": spec.served_name,
        "weight_version": "default",
        "chat_template": None,
        "enable_cache_report": False,
        "reasoning_parser": spec.reasoning_parser,
        "tool_call_parser": spec.tool_call_parser,
        "log_level": "info",
        "log_requests": False,
        "crash_dump_folder": None,
        "enable_metrics": spec.metrics,
        "enable_metrics_for_all_schedulers": False,
        "decode_log_interval": 40,
        "attention_backend": spec.attention_backend,
        "sampling_backend": "flashinfer",
        "grammar_backend": "xgrammar",
        "moe_runner_backend": "auto",
        "disable_cuda_graph": False,
        "cuda_graph_max_bs": min(spec.cuda_graph_max_bs, spec.max_running_requests),
        "disable_custom_all_reduce": spec.disable_custom_all_reduce,
        "enable_torch_compile": False,
        "speculative_algorithm": spec.algorithm,
        "speculative_draft_model_path": spec.draft_path,
        "speculative_draft_model_revision": "main" if spec.draft_path else None,
        "speculative_num_steps": spec.steps if spec.speculates else None,
        "speculative_eagle_topk": 1 if spec.speculates else None,
        "speculative_num_draft_tokens": spec.draft_tokens if spec.speculates else None,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "enable_hierarchical_cache": spec.hicache_ratio is not None,
        "hicache_ratio": spec.hicache_ratio or 2.0,
        "hicache_size": 0,
        "hicache_write_policy": "write_through",
        "hicache_io_backend": "kernel",
        "hicache_mem_layout": "layer_first",
        "hicache_storage_backend": None,
    }
