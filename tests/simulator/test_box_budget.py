"""The memory budget of the box: what its engine says, what NVML sees and what its host has agree."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from box_lab import Lab, OpenBox

from console.checks.budget import examine
from console.model.budget import Budget
from console.model.card_memory import RankMemory
from console.model.finding import Finding
from console.model.kv import bytes_per_token, exactly, read_geometry
from console.model.profile import Profile
from console.simulator.models import DRAFT
from console.simulator.spec import spec_of
from console.sources.connect import connect
from console.sources.files import load_profile, load_site, shipped_profiles_directory
from console.sources.memory_log import read_load
from console.sources.monitor import Monitor
from console.sources.once import observe_once

GIB = 1024**3
KIMI = load_profile(shipped_profiles_directory() / "kimi-k2.5-int4.yaml")
QWEN = load_profile(shipped_profiles_directory() / "qwen3.5-397b-nvfp4.yaml")


async def budget(lab: Lab, profile: Profile | None = None) -> Budget:
    site = load_site(lab.box.directory / "site.yaml")
    lab.box._keep_files()
    monitor = Monitor(site, connect(site), profiles=(KIMI, QWEN))
    try:
        snapshot = await observe_once(monitor, processes=True)
        return await examine(monitor.sources, snapshot, profile)
    finally:
        await monitor.close()


def finding(found: Budget, id: str) -> Finding:
    return next(one for one in found.findings if one.id == id)


async def test_every_card_of_the_box_closes(lab: Lab) -> None:
    found = await budget(lab)
    spec = lab.box.engine.spec
    assert spec is not None
    assert found.verdict == "pass", found.findings
    assert [card.index for card in found.cards] == list(range(8))
    assert [card.rank for card in found.cards] == [f"DP0 PP0 TP{rank}" for rank in range(8)]
    for card in found.cards:
        assert card.unknown == {}
        assert sum(part.size for part in card.parts) == card.used
        assert abs(card.size("unaccounted") or 0) < GIB / 100
        sizes = {part.kind: part.size / GIB for part in card.parts}
        assert sizes["weights"] == pytest.approx(63.91, abs=0.01)
        assert sizes["draft"] == pytest.approx(0.78 + spec.draft_kv_gb, abs=0.02)
        assert sizes["kv"] == pytest.approx(spec.target_kv_gb, abs=0.01)
        assert sizes["graphs"] == pytest.approx(1.93, abs=0.01)
        assert sizes["workspace"] == pytest.approx(1.34 + 1.12, abs=0.03)
        assert sizes["others"] == 0
        assert card.used == pytest.approx(spec.used_gb * GIB, abs=10)


async def test_the_answer_says_what_fits_and_what_it_costs_the_host(lab: Lab) -> None:
    found = await budget(lab)
    spec = lab.box.engine.spec
    assert spec is not None
    assert found.tokens == exactly(spec.kv_tokens)
    assert found.token_bytes == exactly(70_272)
    total = round(8 * round(spec.host_gb, 2))  # as each rank's line tells it
    assert found.answer.startswith(
        f"KV cache holds {round(spec.kv_tokens, -3):,} tokens on each card (18.70 GB); "
    )
    assert f"hierarchical cache takes {total} GB of host RAM: 8 ranks × {spec.host_gb:.1f} GB" in found.answer
    assert finding(found, "kv-size").verdict == "pass"
    assert found.host_cache is not None
    assert found.host_cache.total.low == pytest.approx(8e9 * spec.host_gb, rel=0.001)


async def test_a_profile_that_runs_is_reckoned_close_to_what_it_holds(lab: Lab) -> None:
    found = await budget(lab, KIMI)
    spec = lab.box.engine.spec
    assert spec is not None
    assert found.plan is not None
    assert found.tokens is not None
    assert found.tokens.low <= spec.kv_tokens <= found.tokens.high + 200
    assert found.tokens.high - found.tokens.low < 0.1 * spec.kv_tokens
    assert found.token_bytes == exactly(71_424)
    assert found.plan.weights.source == "as the running engine reports"
    assert found.plan.draft_own_cell == 1_024
    # The running service gives its cache back first.
    assert finding(found, "host-cache").verdict == "pass"
    assert found.host_memory is not None
    assert found.host_memory.returned > 8e9 * spec.host_gb


async def test_a_profile_of_another_model_lies_between_its_bounds(lab: Lab) -> None:
    found = await budget(lab, QWEN)
    assert found.plan is not None
    assert found.plan.weights.source == "model.safetensors.index.json"
    assert found.token_bytes == exactly(15_360)
    assert found.tokens is not None
    really = spec_of(QWEN.argv(), 30000).kv_tokens  # as the box would size it
    assert found.tokens.low < really < found.tokens.high
    assert found.host_cache is None
    assert found.answer.endswith("no hierarchical cache in host RAM")
    assert finding(found, "mem-fraction").verdict == "warn"


async def test_a_foreign_process_is_named_on_its_card(open_box: OpenBox) -> None:
    async with open_box("holder") as lab:
        found = await budget(lab)
        held = [card.size("others") or 0 for card in found.cards]
        assert [index for index, size in enumerate(held) if size] == [6]
        assert finding(found, "other-processes").verdict == "warn"
        assert "on card 6" in finding(found, "other-processes").evidence
        assert all(sum(part.size for part in card.parts) == card.used for card in found.cards)


async def test_a_lost_card_is_unknown_and_not_empty(open_box: OpenBox) -> None:
    async with open_box("gpu-lost") as lab:
        found = await budget(lab)
        assert found.cards[3].used is None
        assert finding(found, "cards").verdict == "unknown"
        assert "card 3: GPU is lost" in finding(found, "cards").evidence


async def test_a_stopped_service_leaves_the_budget_of_the_profile_named(lab: Lab) -> None:
    await lab.inside("systemctl", "stop", "sglang.service")
    lab.box.cards.advance(lab.box.engine.work(), 1.0)
    found = await budget(lab)  # of the profile that its log tells it was
    assert (found.subject, found.name) == ("profile", KIMI.name)
    assert found.answer.startswith("KV cache would hold")
    assert found.plan is not None
    assert found.plan.weights.source == "model.safetensors.index.json"
    assert found.plan.draft_weights is not None
    assert found.plan.draft_weights.source == "the sizes of 1 safetensors files"
    spec = spec_of(KIMI.argv(), 30000)
    assert found.tokens is not None
    assert found.tokens.low < spec.kv_tokens < found.tokens.high
    assert found.host_memory is not None
    assert found.host_memory.returned == 0


async def test_a_config_that_is_damaged_is_told_with_its_place(lab: Lab) -> None:
    config = lab.box.rootfs / "shared/kimi-k2.5-int4/config.json"
    config.write_text(config.read_text().replace("61", '"61"'))
    found = await budget(lab, KIMI)
    told = finding(found, "model-files")
    assert told.verdict == "fail"
    assert told.evidence.startswith(
        "/shared/kimi-k2.5-int4/config.json: text_config.num_hidden_layers: expected a whole number"
    )
    # What runs is still told by the engine itself.
    running = await budget(lab)
    assert running.tokens is not None
    assert finding(running, "model-files").verdict == "unknown"


async def test_the_loads_log_and_the_report_agree_on_every_rank(lab: Lab) -> None:
    properties = await lab.properties()
    spec = lab.box.engine.spec
    assert spec is not None
    ranks, problem = await read_load(lab.container, "sglang.service", 0.0, None)
    assert (problem, len(ranks), properties["ActiveState"]) == (None, 8, "active")
    usage = (await lab.http.get("/server_info")).json()["internal_states"][0]["memory_usage"]
    draft = bytes_per_token(read_geometry(DRAFT), "bf16", 8)  # as its own config.json has it
    for told in ranks.values():
        assert isinstance(told, RankMemory)
        for size, reported in ((told.weights, usage["weight"]), (told.kv, usage["kvcache"])):
            assert size == pytest.approx(reported * GIB, abs=0.006 * GIB)
        assert told.graphs == pytest.approx(sum(usage["graph"].values()) * GIB, abs=0.01 * GIB)
        assert told.draft_kv == pytest.approx(spec.kv_tokens * draft, abs=0.011 * GIB)
        assert told.before_weights is not None
        taken = (told.weights or 0) + (told.draft or 0) + (told.kv or 0) + (told.graphs or 0)
        left = usage["startup_available"] * GIB
        assert told.before_weights - taken == pytest.approx(left, abs=0.03 * GIB)
    assert ranks["DP0 PP0 TP0"].after_graphs == pytest.approx(left, abs=0.006 * GIB)  # the others do not say


async def command(lab: Lab, *arguments: str) -> tuple[int, str]:
    """``gpuops budget`` as an operator types it."""
    site = str(lab.box.directory / "site.yaml")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "console", "budget", *arguments, "--site", site),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parents[2],
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


async def test_the_command_answers_in_words_and_in_json(lab: Lab) -> None:
    lab.box._keep_files()
    code, text = await command(lab)
    assert code == 0
    assert text.startswith("KV cache holds 266,000 tokens on each card (18.70 GB);")
    assert max(map(len, text.splitlines())) <= 80
    code, text = await command(lab, "--json")
    document = json.loads(text)
    assert (code, next(iter(document)), document["schema"]) == (0, "schema", 1)
    assert (document["verdict"], document["subject"], document["profile"]) == ("pass", "running", KIMI.name)
    card = document["cards"][0]
    assert card["parts"]["state"] is None  # a model without such layers has no figure for them
    assert sum(size for size in card["parts"].values() if size is not None) == card["used_bytes"]
    assert document["kv"]["bytes_per_token"] == {"low": 70_272, "high": 70_272}
    code, text = await command(lab, "kimi")
    assert (code, "no profile is named kimi" in text) == (2, True)


async def test_the_command_fails_where_the_host_cache_does_not_fit(lab: Lab, tmp_path: Path) -> None:
    lab.box._keep_files()
    text = (shipped_profiles_directory() / "kimi-k2.5-int4.yaml").read_text()
    greedy = text.replace("hicache-ratio: 4.0", "hicache-ratio: 8").replace(
        "name: kimi-k2.5-int4", "name: greedy"
    )
    (tmp_path / "greedy.yaml").write_text(greedy.replace("key: 1", "key: 9"))
    code, text = await command(lab, "greedy", "--json", "--profiles", str(tmp_path))
    document = json.loads(text)
    told = next(one for one in document["findings"] if one["id"] == "host-cache")
    assert (code, told["verdict"]) == (1, "fail")
    assert "8 ranks" in told["evidence"]
    assert "more than is free" in document["answer"]
    assert told["remedy"].startswith("set hicache-size to at most")
