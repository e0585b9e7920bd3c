"""A box in this process, on a port of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from box_lab import Lab, OpenBox

from console.simulator.box import Box


@pytest.fixture
def open_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenBox:
    """Opens a box with the faults and the speed that a test names; its model talks fast."""
    monkeypatch.setattr("console.simulator.chat.SINGLE_TOKENS_PER_S", 5_000.0)
    monkeypatch.setattr("console.simulator.box.TICK_S", 0.05)
    monkeypatch.setattr("console.simulator.nvml.PERIOD_S", 0.1)

    @contextlib.asynccontextmanager
    async def opened(*faults: str, speed: float = 2000.0, seed: int = 7) -> AsyncIterator[Lab]:
        box = Box(tmp_path / "box", speed=speed, faults=faults, seed=seed)
        await box.open()
        try:
            url = f"http://127.0.0.1:{box.service.port}"
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as http:
                yield Lab(box, http)
        finally:
            await box.close()

    return opened


@pytest.fixture
async def lab(open_box: OpenBox) -> AsyncIterator[Lab]:
    async with open_box() as opened:
        yield opened
