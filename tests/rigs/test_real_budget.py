"""The arithmetic of the KV cache against a real SGLang: bytes a token, and every figure it reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from console.model.card_memory import rank_key
from console.model.kv import bytes_per_token, cache_dtype
from console.model.kv_arguments import read_arguments
from console.sources.engine.client import EngineClient
from console.sources.engine.memory import read_report
from console.sources.memory_log import read_lines
from console.sources.model_files import read_model
from console.transport.local import LocalRunner
from tests.rigs.sglang.install import Installation
from tests.rigs.sglang.server import EngineServer

pytestmark = pytest.mark.rig

GIB = 1024**3

#: So many that the rounding of the engine's figures, a thousandth of a GiB, is a thousandth of them.
TOKENS = 3_000_000


@pytest.mark.parametrize("tp", [1, 2])
async def test_bytes_a_token_are_those_the_engine_takes(
    sglang_installation: Installation, tmp_path: Path, tp: int
) -> None:
    flags = ("--max-total-tokens", str(TOKENS))
    server = EngineServer(sglang_installation, tmp_path / "server.log", tp=tp, flags=flags)
    client = EngineClient(server.url)
    try:
        server.start()
        await server.wait_ready()
        report = read_report((await client.get("/server_info", 10.0)).body)
    finally:
        await client.close()
        server.stop()
    assert report is not None
    arguments, problems = read_arguments(report.arguments)
    assert problems == ()
    assert (arguments.attention_tp, arguments.ranks) == (tp, tp)
    assert arguments.model_path is not None
    files = await read_model(LocalRunner(), arguments.model_path, {})
    assert files.geometry is not None
    assert files.geometry.attention == "gqa"
    dtype = cache_dtype(files.geometry, arguments.kv_cache_dtype, arguments.dtype)
    cell = bytes_per_token(files.geometry, dtype, arguments.attention_tp)
    told = report.memory[rank_key(None)]
    assert told.tokens == TOKENS
    assert told.kv == pytest.approx(TOKENS * cell, abs=0.0006 * GIB)
    # Every rank logs as much, and of the same kind.
    logged = read_lines(server.lines())
    assert logged.keys() == {rank_key(f"TP{rank}") for rank in range(tp)}
    for rank in logged.values():
        assert (rank.tokens, rank.cache_dtype) == (TOKENS, dtype)
        assert rank.kv == pytest.approx(TOKENS * cell, abs=0.011 * GIB)
    assert re.search(
        r"KV Cache is allocated\. dtype: torch\.\w+, #tokens: 3000000", "\n".join(server.lines())
    )
