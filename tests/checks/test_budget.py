"""What a budget says of figures that were read: the answer in words, and each finding with its remedy."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from console.checks.budget import judge
from console.checks.budget_evidence import Evidence
from console.checks.budget_findings import (
    arithmetic_finding,
    cards_finding,
    context_finding,
    geometry_findings,
    host_cache_finding,
    plan_findings,
)
from console.model.budget import Budget, budget_document, margin_words
from console.model.budget_report import budget_lines
from console.model.card_memory import CardMemory, Part, RankMemory, rank_key
from console.model.finding import Finding
from console.model.host_cache import HostCache, HostMemory
from console.model.kv import Range, exactly, read_geometry
from console.model.kv_arguments import read_arguments
from console.model.kv_plan import GIB, CardRoom, plan, spread
from console.simulator.models import DRAFT, KIMI, KIMI_WEIGHTS
from console.sources.engine.memory import EngineReport
from console.sources.files import load_profile, shipped_profiles_directory
from console.sources.model_files import ModelFiles
from tests.ui.scenes import ready

GB = 10**9
PROFILE = load_profile(shipped_profiles_directory() / "kimi-k2.5-int4.yaml")
FILES = ModelFiles(
    path="/m",
    folder="/m",
    geometry=read_geometry(KIMI),
    weights=KIMI_WEIGHTS,
    weights_source="model.safetensors.index.json",
)
#: What the host's log told: 11.18 GB of KV on each card.
TOKENS = 159_096
SERVER = {"model_path": "/m", "tp_size": 8, "enable_hierarchical_cache": True, "hicache_ratio": 4.0}


def running(**changed: Any) -> Evidence:
    """An engine that reports ``TOKENS``, beside a host with 296 GB free."""
    kv = TOKENS * 70_272
    told = RankMemory(source="/server_info", weights=64 * GIB, kv=kv, graphs=2 * GIB, tokens=TOKENS)
    evidence = Evidence(
        snapshot=ready(profile=PROFILE),
        report=EngineReport(version="0.5.9", arguments=SERVER, memory={rank_key(None): told}),
        host=HostMemory(total=800 * GB, available=296 * GB),
        files=FILES,
    )
    return Evidence(**{**vars(evidence), **changed})


def named(found: Budget, id: str) -> Finding:
    return next(one for one in found.findings if one.id == id)


# The answer ------------------------------------------------------------------------------------


def test_a_running_service_is_answered_with_what_it_holds() -> None:
    found = judge(running())
    assert found.answer == (
        "KV cache holds 159,000 tokens on each card (11.18 GB); hierarchical cache takes 358 GB of host RAM: "
        "8 ranks × 44.7 GB; 296 GB are still free"
    )
    assert named(found, "kv-size").verdict == "pass"
    assert found.token_bytes == exactly(70_272)


def test_a_cache_that_does_not_fit_says_by_how_much() -> None:
    arguments = {**SERVER, "model_path": "/other"}
    report = EngineReport(version="0.5.9", arguments=arguments, memory={})
    flags = {**PROFILE.args, "model-path": "/m", "max-total-tokens": str(TOKENS)}
    flags.pop("speculative-algorithm")
    profile = msgspec.structs.replace(PROFILE, args=flags)
    found = judge(running(profile=profile, report=report))
    assert found.answer == (
        "KV cache would hold 159,000 tokens on each card (11.18 GB); hierarchical cache would take 358 GB of "
        "host RAM: 8 ranks × 44.7 GB, 62 GB more than is free"
    )
    told = named(found, "host-cache")
    assert told.verdict == "fail"
    assert "before 0.5.20 every rank checks only its own share" in told.evidence
    assert told.remedy == "set hicache-size to at most 35 (GB on each rank), or free host memory"
    assert (found.verdict, budget_document(found)["verdict"]) == ("fail", "fail")


def test_without_a_service_and_a_profile_there_is_nothing_to_answer() -> None:
    snapshot = ready(profile=None, identity=None)
    assert snapshot.unit.value is not None
    unit = msgspec.structs.replace(snapshot.unit.value, active_state="inactive")
    snapshot = msgspec.structs.replace(snapshot, unit=snapshot.unit.fresh(unit, snapshot.now))
    found = judge(Evidence(snapshot))
    assert (found.subject, found.verdict) == ("nothing", "unknown")
    assert found.findings[0].remedy == "name a profile: gpuops profile list shows them"
    assert budget_document(found)["kv"]["tokens"] is None
    assert budget_lines(found)[0].text == "no service runs, and no profile is named"


def test_an_engine_that_does_not_answer_is_unknown_with_the_reason() -> None:
    found = judge(running(report=None, problems={"report": "nothing listens there"}))
    told = named(found, "engine-report")
    assert (told.verdict, told.evidence) == ("unknown", "/server_info: nothing listens there")
    assert found.tokens is None
    assert "how many tokens fit is not known" in found.answer


def test_a_host_that_cannot_be_read_is_not_a_host_with_nothing_free() -> None:
    found = judge(running(host=None))
    assert named(found, "host-cache").verdict == "unknown"
    assert found.answer.endswith("what the host has free is not known")


def test_a_profile_whose_arguments_cannot_be_read_fails_by_their_name() -> None:
    profile = msgspec.structs.replace(PROFILE, args={**PROFILE.args, "tp-size": "eight"})
    told = named(judge(running(profile=profile)), "arguments")
    assert (told.verdict, told.evidence) == (
        "fail",
        "tp-size: expected a number that is not negative, found 'eight'",
    )


def test_cards_whose_memory_is_not_known_leave_the_tokens_unknown() -> None:
    snapshot = msgspec.structs.replace(ready(profile=PROFILE), cards=())
    found = judge(running(profile=PROFILE, snapshot=snapshot))
    assert (found.tokens, found.token_bytes) == (None, exactly(70_272))
    assert named(found, "weights").evidence == "the cards' memory is not known"


def test_control_characters_of_the_engine_reach_no_line() -> None:
    report = EngineReport(version="0.5.9", arguments={**SERVER, "model_path": "/m\x1b[2J"}, memory={})
    text = "".join(line.text for line in budget_lines(judge(running(report=report))))
    assert "\x1b" not in text
    assert "/m" in text


@pytest.mark.parametrize(
    ("needed", "free", "words"),
    [
        (exactly(358 * GB), 296 * GB, "62 GB more than is free"),
        (exactly(358 * GB), 420 * GB, "62 GB less than is free"),
        (Range(300 * GB, 358 * GB), 290 * GB, "10 to 68 GB more than is free"),
        (Range(300 * GB, 358 * GB), 320 * GB, "between 20 GB less and 38 GB more than is free"),
    ],
)
def test_the_margin_in_words(needed: Range, free: int, words: str) -> None:
    assert margin_words(needed, free) == words


# Findings --------------------------------------------------------------------------------------


def cache(low: int, high: int | None = None) -> HostCache:
    each = Range(low * GB // 8, (high or low) * GB // 8)
    return HostCache(tokens=exactly(1), per_rank=each, ranks=8, set_by="ratio 4")


@pytest.mark.parametrize(
    ("asked", "version", "verdict"),
    [
        (cache(358), "0.5.18", "pass"),
        (cache(495), "0.5.18", "warn"),  # the engine leaves 10 GiB alone
        (cache(495), "0.5.20", "fail"),  # and from here on refuses to start
        (cache(495, 520), None, "warn"),
        (cache(501), "0.5.18", "fail"),
    ],
)
def test_host_ram_is_judged_for_all_ranks_together(asked: HostCache, version: str, verdict: str) -> None:
    memory = HostMemory(total=800 * GB, available=500 * GB)
    found = host_cache_finding(asked, memory, version=version)
    assert found.verdict == verdict
    assert "8 ranks × " in found.evidence
    assert (found.remedy is None) == (verdict == "pass")


def test_a_cache_that_shrinks_by_itself_is_a_warning() -> None:
    memory = HostMemory(total=800 * GB, available=500 * GB)
    found = host_cache_finding(cache(600), memory, version="0.5.23", shrinks=True)
    assert (found.verdict, found.remedy) == ("warn", "set hicache-ratio")


def test_a_host_about_to_run_out_is_a_warning_while_it_runs() -> None:
    low = HostMemory(total=800 * GB, available=5 * GB)
    found = host_cache_finding(cache(358), low, running=True)
    assert found.verdict == "warn"
    assert "allocated; 5.00 GB free" in found.evidence


def test_a_cache_that_is_not_what_config_json_tells_is_a_warning() -> None:
    told = RankMemory(source="x", kv=260_000 * 70_272, tokens=260_000)
    good, bad = arithmetic_finding(told, 70_272, 1), arithmetic_finding(told, 35_136, 1)
    assert good is not None
    assert bad is not None
    assert (good.verdict, bad.verdict) == ("pass", "warn")
    assert good.evidence == "260,000 tokens × 70,272 B = 17.02 GiB; the engine reports 17.02 GiB"
    assert arithmetic_finding(RankMemory(source="x", tokens=5), 70_272, 1) is None


@pytest.mark.parametrize(
    ("tokens", "verdict", "words"),
    [
        (exactly(600_000), "pass", "2.3 requests of 262,144 tokens or 48 requests of 12,500 tokens"),
        (Range(240_000, 280_000), "warn", "a single request may not be able to use its whole context"),
        (exactly(159_096), "warn", "0.61 requests of 262,144 tokens"),
        (exactly(0), "fail", "not one token fits"),
    ],
)
def test_context_times_concurrency(tokens: Range, verdict: str, words: str) -> None:
    found = context_finding(tokens, 262_144, 48)
    assert found.verdict == verdict
    assert words in found.evidence


def card(unaccounted: int = 0, **changed: Any) -> CardMemory:
    parts = (Part("kv", 80 * GIB, "x"), Part("unaccounted", unaccounted, "rest"))
    told = CardMemory(
        index=2, address="a", rank=None, total=96 * GIB, used=80 * GIB + unaccounted, reserved=0, free=0
    )
    return msgspec.structs.replace(told, parts=parts, **changed)


def test_memory_that_nobody_names_is_a_warning() -> None:
    assert cards_finding((card(),)).verdict == "pass"
    found = cards_finding((card(), card(3 * GIB)))
    assert (found.verdict, "card 2: 3.00 GiB unaccounted" in found.evidence) == ("warn", True)
    unknown = cards_finding((card(unknown={"graphs": "the engine does not report it"}),))
    assert (unknown.verdict, "graphs: the engine does not report it" in unknown.evidence) == ("unknown", True)
    assert cards_finding(()).verdict == "unknown"


def test_the_drafts_share_is_told_by_version() -> None:
    flags, _ = read_arguments(PROFILE.args)
    words = {
        "0.5.13": "not charged before 0.5.14",
        "0.5.14": "charged to the budget (0.5.14",
        None: "version is not known",
    }
    for version, told in words.items():
        found = plan(
            read_geometry(KIMI),
            flags,
            CardRoom(95 * GIB),
            spread(KIMI_WEIGHTS, 8, "index"),
            version=version,
            draft=read_geometry(DRAFT),
        )
        draft = next(one for one in plan_findings(found, flags) if one.id == "draft")
        assert told in draft.evidence
        assert "1,152 B a token beside 70,272" in draft.evidence
        assert "its own config.json makes 1,024 B" in draft.evidence


def test_weights_that_do_not_fit_fail_with_what_to_do() -> None:
    flags, _ = read_arguments({"tp-size": "4", "mem-fraction-static": "0.88"})
    found = plan(read_geometry(KIMI), flags, CardRoom(95 * GIB), spread(KIMI_WEIGHTS, 4, "index"))
    told = plan_findings(found, flags)[0]
    assert (told.id, told.verdict) == ("weights", "fail")
    assert told.remedy == "raise mem-fraction-static, or use more cards"


def test_what_is_left_out_of_the_arithmetic_is_a_warning() -> None:
    geometry = msgspec.structs.replace(read_geometry(KIMI), uncounted=("the index",))
    assert [one.evidence for one in geometry_findings(geometry)] == ["not counted: the index"]
    assert geometry_findings(read_geometry(KIMI)) == []
