"""One card's memory by kind: the parts add up, and what nobody tells is not called nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.model.card import CardTelemetry, CardView, Holder, Owner, PciCard, PciLink
from console.model.card_memory import RankMemory, divide, rank_key

GIB = 1024**3
ADDRESS = "0000:01:00.0"
PCI = PciCard(ADDRESS, (), None, PciLink(None, None, None, None), None)
SEEN = CardTelemetry(
    address=ADDRESS,
    memory_total_bytes=96 * GIB,
    memory_used_bytes=88 * GIB,
    memory_reserved_bytes=GIB,
    memory_free_bytes=7 * GIB,
)
RANK = RankMemory(
    source="the load's log", weights=64 * GIB, draft=GIB, kv=17 * GIB, graphs=2 * GIB, before_weights=93 * GIB
)
KEY = rank_key("TP0")


def card(seen: CardTelemetry | None = SEEN) -> CardView:
    return CardView(0, PCI, seen, Owner("ct", 129), (), None)


def holder(size: int | None, *, orphan: bool = False, name: str = "sglang::scheduler_TP0") -> Holder:
    pid = 900 if orphan else 100
    return Holder(pid, None, name, 129, "sglang.service", {ADDRESS: size}, orphan)


def test_every_kind_has_its_share_and_the_process_its_rest() -> None:
    found = divide(card(), (holder(87 * GIB), holder(GIB, orphan=True)), {KEY: RANK}, drafts=True)
    shares = {part.kind: part.size // GIB for part in found.parts}
    assert shares == {
        "weights": 64,
        "draft": 1,
        "kv": 17,
        "graphs": 2,
        "workspace": 3,
        "others": 1,
        "unaccounted": 0,
    }
    assert (found.rank, found.unknown, found.words) == (KEY, {}, ())
    sources = {part.kind: part.source for part in found.parts}
    assert sources["weights"] == "the load's log"
    assert sources["others"] == "NVML, by process"


def test_a_draft_that_is_not_reported_is_unknown_and_hides_in_the_process() -> None:
    told = msgspec.structs.replace(RANK, draft=None)
    found = divide(card(), (holder(88 * GIB),), {KEY: told}, drafts=True)
    assert found.size("draft") is None
    assert found.unknown == {"draft": "the engine does not report it"}
    assert found.size("workspace") == 5 * GIB
    assert "draft model" in found.words[0]
    without = divide(card(), (holder(88 * GIB),), {KEY: told}, drafts=False)
    assert without.unknown == {}


def test_more_reported_than_in_use_is_negative_and_said_in_words() -> None:
    told = msgspec.structs.replace(RANK, weights=70 * GIB)
    found = divide(card(), (holder(88 * GIB),), {KEY: told})
    assert found.size("workspace") is None
    assert found.unknown["workspace"] == "the engine reports 2.00 GiB more than its process holds"
    assert found.size("unaccounted") == -2 * GIB
    assert found.words[0].startswith("2.00 GiB less is in use than is reported")


def test_a_process_without_a_size_makes_its_kind_unknown_not_zero() -> None:
    found = divide(card(), (holder(None), holder(None, orphan=True)), {KEY: RANK}, drafts=True)
    assert found.size("others") is None
    assert found.size("workspace") is None
    assert found.unknown.keys() == {"others", "workspace"}
    assert found.size("unaccounted") == 4 * GIB
    assert "engine's workspace, other processes" in found.words[0]


def test_processes_that_were_not_read_are_no_absence_of_processes() -> None:
    found = divide(card(), None, {KEY: RANK})
    assert found.unknown["others"] == "the processes on the card are not read"


def test_a_card_that_does_not_answer_has_no_parts_but_the_reason() -> None:
    lost = CardTelemetry(address=ADDRESS, lost=True, missing={"memory_used_bytes": "GPU is lost"})
    found = divide(card(lost), (), {KEY: RANK})
    assert (found.used, found.parts) == (None, ())
    assert set(found.unknown.values()) == {"GPU is lost"}
    assert set(divide(card(None), (), {}).unknown.values()) == {"NVML does not list it"}


def test_without_an_engine_there_is_only_what_others_hold() -> None:
    found = divide(card(), (holder(88 * GIB, orphan=True, name="python"),), {}, running=False)
    assert [(part.kind, part.size) for part in found.parts] == [("others", 88 * GIB), ("unaccounted", 0)]
    assert (found.unknown, found.words) == ({}, ())


@pytest.mark.parametrize(
    ("tags", "key"),
    [
        (None, "DP0 PP0 TP0"),
        ("TP3", "DP0 PP0 TP3"),
        ("DP1 TP3", "DP1 PP0 TP3"),
        ("sglang::scheduler_DP1_PP0_TP3_EP2", "DP1 PP0 TP3"),
    ],
)
def test_a_rank_has_one_name_however_it_is_written(tags: str | None, key: str) -> None:
    assert rank_key(tags) == key


def test_each_card_shows_its_own_rank() -> None:
    ranks = {KEY: RANK, rank_key("TP5"): msgspec.structs.replace(RANK, weights=60 * GIB)}
    found = divide(card(), (holder(88 * GIB, name="sglang::scheduler_TP5"),), ranks)
    assert (found.rank, found.size("weights")) == (rank_key("TP5"), 60 * GIB)


_SIZE = st.none() | st.integers(0, 100 * GIB)


@settings(deadline=None)
@given(
    st.integers(0, 96 * GIB),
    st.builds(
        RankMemory, source=st.just("x"), weights=_SIZE, draft=_SIZE, kv=_SIZE, state=_SIZE, graphs=_SIZE
    ),
    st.none() | st.lists(st.tuples(_SIZE, st.booleans()), max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_the_parts_always_add_up_to_what_is_in_use(
    used: int, told: RankMemory, held: list[tuple[int | None, bool]] | None, drafts: bool, running: bool
) -> None:
    seen = msgspec.structs.replace(SEEN, memory_used_bytes=used)
    holders = None if held is None else tuple(holder(size, orphan=orphan) for size, orphan in held)
    found = divide(card(seen), holders, {KEY: told}, drafts=drafts, running=running)
    assert sum(part.size for part in found.parts) == used
    assert all(part.size >= 0 for part in found.parts if part.kind != "unaccounted")
    assert {part.kind for part in found.parts}.isdisjoint(found.unknown)
    if (found.size("unaccounted") or 0) < 0:
        assert found.words
