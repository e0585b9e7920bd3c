"""The smoke tests against the simulated engine: well, and with each fault that concerns them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from console.checks.smoke import AFTER_START, Target, run_smoke, summary
from console.model.finding import Finding
from console.model.profile import Profile
from console.simulator.box import Box
from console.sources.files import load_profiles, shipped_profiles_directory
from tests.simulator.box_lab import Lab, eventually

PROFILES = {one.name: one for one in load_profiles([shipped_profiles_directory()]).profiles}
KIMI, QWEN = PROFILES["kimi-k2.5-int4"], PROFILES["qwen3.5-397b-nvfp4"]


@contextlib.asynccontextmanager
async def box(folder: Path, *faults: str) -> AsyncIterator[Box]:
    opened = Box(folder / "box", speed=2000.0, faults=faults, seed=7)
    await opened.open()
    try:
        yield opened
    finally:
        await opened.close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model on the box talks fast, and its scheduler looks often."""
    monkeypatch.setattr("console.simulator.chat.SINGLE_TOKENS_PER_S", 5_000.0)
    monkeypatch.setattr("console.simulator.box.TICK_S", 0.05)


async def smoke(opened: Box, profile: Profile, *only: str) -> dict[str, Finding]:
    target = Target(f"http://127.0.0.1:{opened.service.port}", None, profile)
    return {one.id: one for one in await run_smoke(target, only=only)}


async def test_a_box_that_is_well_passes_every_check(tmp_path: Path) -> None:
    async with box(tmp_path) as opened:
        found = await smoke(opened, KIMI)
        assert [summary(one) for one in found.values() if one.verdict != "pass"] == []
        assert opened.engine.traffic is not None
        assert not [one for one in opened.engine.traffic.running if one.served]


async def test_the_other_model_passes_too_with_ids_of_its_own(tmp_path: Path) -> None:
    async with box(tmp_path) as opened:
        folder = opened.rootfs / "etc/systemd/system/sglang.service.d"
        folder.mkdir(parents=True, exist_ok=True)
        command = " ".join(["/opt/sglang/bin/python -m sglang.launch_server", *QWEN.argv()])
        (folder / "50-switch.conf").write_text(f"[Service]\nExecStart=\nExecStart={command}\n")
        lab = Lab(opened, None)  # type: ignore[arg-type]  # nothing is asked through it over HTTP
        await lab.inside("systemctl", "daemon-reload")
        await lab.inside("systemctl", "restart", "sglang.service")

        async def up() -> bool:
            return opened.engine.state == "up"

        await eventually(up, 10)
        found = await smoke(opened, QWEN)
        mistaken = await smoke(opened, KIMI, "served-name", "parsers")
    assert {one.id: summary(one) for one in found.values() if one.verdict != "pass"} == {
        "speculation": "speculation is off"
    }
    assert "call_" in found["tools-call"].evidence
    assert {one.verdict for one in mistaken.values()} == {"fail"}
    assert "serves qwen3.5-397b, not kimi-k2.5" in summary(mistaken["served-name"])


async def test_nan_is_told_by_the_text_and_by_the_log_probabilities(tmp_path: Path) -> None:
    async with box(tmp_path, "nan") as opened:
        found = await smoke(opened, KIMI, *AFTER_START)
    assert {name for name, one in found.items() if one.verdict == "fail"} == {
        "sanity",
        "degenerate",
        "logprobs",
        "reasoning",
        "tools-call",
    }
    assert "nothing but '!'" in summary(found["degenerate"])
    assert "NaN" in summary(found["logprobs"])


async def test_a_leak_is_told_by_the_tool_calls_and_by_nothing_else(tmp_path: Path) -> None:
    async with box(tmp_path, "leak") as opened:
        found = await smoke(opened, KIMI, "sanity", "reasoning", "tools", "structured")
    failed = {name for name, one in found.items() if one.verdict == "fail"}
    assert failed == {name for name in found if name.startswith("tools-")} - {"tools-unneeded"}
    assert "<|tool_calls_section_begin|>" in summary(found["tools-call"])


async def test_a_box_that_hangs_is_told_so_and_left_with_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console.checks.smoke.wire.FIRST_TOKEN_S", 0.5)
    monkeypatch.setattr("console.checks.smoke.wire._LOOK_S", 0.05)
    monkeypatch.setattr("console.checks.smoke.session._INFO_S", 0.5)
    async with box(tmp_path, "hang") as opened:
        found = await smoke(opened, KIMI, "served-name", "sanity", "burst")
        desk = opened.engine._chat
        assert desk is not None

        async def left() -> bool:
            return not desk._active

        await eventually(left)
    assert found["served-name"].verdict == "pass"
    assert "hangs" in summary(found["sanity"]) and found["sanity"].verdict == "fail"
