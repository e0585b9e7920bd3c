"""``k``: the memory budget on the screen: a bar a card, the profiles to compare, and its age."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.checks.budget import judge
from console.model.budget import Budget
from console.model.card_memory import KINDS, CardMemory, Kind, Part
from console.model.profile import Profile
from console.model.site import Site
from console.model.snapshot import Snapshot
from console.ui.app import Console
from console.ui.glyphs import ASCII, UNICODE
from console.ui.memory_bars import LOOKS, alike, card_bar, legend, stacked
from console.ui.rows import width_of
from console.ui.screens.budget import BudgetPanel
from tests.checks.test_budget import PROFILE, running
from tests.ui import scenes
from tests.ui.test_console import Hands

GIB = 1024**3
NOW = judge(running())
THEN = judge(running(profile=PROFILE))


def card(index: int, **sizes: int) -> CardMemory:
    parts = tuple(Part(kind, size * GIB, "x") for kind, size in sizes.items())  # type: ignore[arg-type]
    used = sum(part.size for part in parts)
    return CardMemory(
        index=index,
        address=str(index),
        rank=None,
        total=96 * GIB,
        used=used,
        reserved=0,
        free=96 * GIB - used,
        parts=parts,
    )


def text(row: list) -> str:
    return "".join(span.text for span in row)


async def until(true: Callable[[], object], within: float = 10.0) -> None:
    """Wait until it holds; AssertionError after ``within`` seconds."""
    ends = asyncio.get_running_loop().time() + within
    while not true():
        assert asyncio.get_running_loop().time() < ends
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def opened(
    monkeypatch: pytest.MonkeyPatch,
    gate: asyncio.Event,
    asked: list[str | None],
    size: tuple[int, int] = (80, 24),
) -> AsyncIterator[Hands]:
    """The console with its budget open by its key; ``asked`` gets the profiles that it reads for."""

    async def read(site: Site, snapshot: Snapshot, profile: Profile | None) -> Budget:
        await gate.wait()
        asked.append(None if profile is None else profile.name)
        if profile is None:
            return NOW
        if profile is PROFILE:
            return THEN
        raise RuntimeError("\x1b[31mboom [bold]")

    monkeypatch.setattr("console.checks.budget.read_budget", read)
    other = msgspec.structs.replace(PROFILE, name="other", key=2)
    watch = scenes.Frozen(scenes.ready())
    app = Console(watch, scenes.SITE, profiles=(PROFILE, other), encoding="utf-8", theme="dark")
    async with app.run_test(size=size) as pilot:
        hands = Hands(app, watch, pilot)
        await hands.show(watch.now)
        await hands.press("k")
        yield hands


async def test_the_answer_comes_when_it_is_read_and_the_screen_goes_on_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()
    async with opened(monkeypatch, gate, []) as hands:
        assert "MEMORY BUDGET reading" in hands.text()
        await hands.show(scenes.hung())
        assert "HUNG" in hands.text()
        gate.set()
        await until(lambda: "KV cache holds 159,000 tokens on each card (11.18 GB)" in hands.text())
        assert "MEMORY BUDGET read 0s ago" in hands.text()
        assert "70,272 B a token on each card, bfloat16" in hands.text()
        await hands.press("escape")
        assert "MEMORY BUDGET" not in hands.text()


async def test_left_and_right_compare_profiles_and_a_defect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, asked = asyncio.Event(), []
    gate.set()
    async with opened(monkeypatch, gate, asked) as hands:
        await until(lambda: "KV cache holds" in hands.text())
        await hands.press("right")
        await until(lambda: "KV cache would hold" in hands.text())
        assert "THEN, EACH CARD" in hands.text()
        await hands.press("right")
        await until(lambda: "defect in the budget: RuntimeError: boom [bold]" in hands.text())
        assert "KV cache would hold" not in hands.text()  # that was another profile's
        await hands.press("left", "left")
        await until(lambda: "KV cache holds" in hands.text())
        assert "defect" not in hands.text()
        assert asked[:3] == [None, PROFILE.name, "other"]


async def test_k_opens_the_budget_from_another_page_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    async with opened(monkeypatch, gate, []) as hands:
        await hands.press("p")
        assert "PROCESSES ON THE CARDS" in hands.text()
        await hands.press("k")
        assert "MEMORY BUDGET" in hands.text()


@pytest.mark.parametrize("width", [30, 40, 80, 120, 200])
@pytest.mark.parametrize("found", [NOW, THEN], ids=["running", "profile"])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_the_answer_is_first_and_every_row_fits(found: Budget, width: int, glyphs) -> None:
    async def never(snapshot: Snapshot, profile: Profile | None) -> Budget:
        raise AssertionError

    shown = BudgetPanel(never, (PROFILE,), glyphs)
    shown.found = found
    rows = shown.all_rows(scenes.ready(), width)
    answer = " ".join(" ".join(text(row) for row in rows[2:]).split())
    assert found.answer[:20] in answer[:60]
    for card_ in found.cards:
        assert width_of(card_bar(card_, width, glyphs)) == max(width, 8 + 3 + 14)


# Bars ------------------------------------------------------------------------------------------


def test_each_kind_is_told_by_its_letter_and_takes_its_share() -> None:
    shown = text(card_bar(card(3, weights=48, kv=24, graphs=12), 112, UNICODE))
    bar = shown[3:98]
    assert shown.startswith(" 3 w")
    assert shown.endswith("84.0 of 96.0")
    places = [bar.index(letter) for letter in "wkg"]
    assert places == [0, pytest.approx(48, abs=2), pytest.approx(72, abs=3)]
    assert bar[-1] == UNICODE.bar_rest
    assert len({LOOKS[kind][0] for kind in KINDS}) == len(KINDS)


def test_a_card_that_does_not_tell_is_no_empty_card() -> None:
    lost = msgspec.structs.replace(card(3), used=None, unknown={"weights": "GPU is lost"})
    assert text(card_bar(lost, 60, UNICODE)) == " 3 not known: GPU is lost"


def test_cards_that_look_alike_are_drawn_once() -> None:
    cards = [card(0, kv=9), card(1, kv=9), card(2, kv=9, others=1), card(3, kv=9)]
    assert [name for name, _ in alike(cards)] == ["0-1", "2", "3"]


def test_the_legend_tells_sizes_and_what_is_not_known() -> None:
    unknown = msgspec.structs.replace(card(1, kv=9), unknown={"draft": "the engine does not report it"})
    told = " ".join(map(text, legend([card(0, kv=8), unknown], 200)))
    assert "k KV cache 8.0 to 9.0" in told
    assert "d draft not known" in told
    assert "weights" not in told
    assert all(width_of(row) <= 44 for row in legend([card(0, weights=1, kv=8, graphs=2, others=3)], 40))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(-(2**40), 2**40)), max_size=8),
    st.integers(0, 2**38),
    st.integers(1, 200),
)
def test_any_parts_fill_exactly_the_width(parts: list[tuple[Kind, int]], whole: int, width: int) -> None:
    assert width_of(stacked(parts, whole, width, UNICODE)) == width
