"""What the screen looks like, at the sizes operators have: compared with pictures that were looked at."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from console.ui.app import Console
from tests.ui.scenes import SCENES, SITE, Frozen

README = Path(__file__).parents[2] / "README.md"

SMALL, USUAL, LARGE = (80, 24), (120, 40), (200, 60)


def console(scene: str, *, theme: str = "dark", encoding: str = "utf-8") -> Console:
    return Console(Frozen(SCENES[scene]()), SITE, encoding=encoding, theme=theme)


async def settled(pilot: Pilot[int]) -> None:
    assert isinstance(pilot.app, Console)
    pilot.app.draw()
    await pilot.pause()


Compare = Callable[..., bool]


@pytest.mark.parametrize(
    ("scene", "size"),
    [
        ("ready", SMALL),
        ("ready", USUAL),
        ("ready", LARGE),
        ("starting", SMALL),
        ("starting", LARGE),
        ("crashed", SMALL),
        ("crashed", USUAL),
        ("mixed", SMALL),
        ("mixed", USUAL),
        ("degraded", USUAL),
        ("stale", SMALL),
        ("without_speculation", USUAL),
        ("nothing_read", USUAL),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}x{value[1]}",
)
def test_the_dashboard(snap_compare: Compare, scene: str, size: tuple[int, int]) -> None:
    assert snap_compare(console(scene), terminal_size=size, run_before=settled)


@pytest.mark.parametrize("theme", ["light", "high-contrast", "ansi"])
def test_the_themes(snap_compare: Compare, theme: str) -> None:
    assert snap_compare(console("mixed", theme=theme), terminal_size=USUAL, run_before=settled)


def test_in_ascii(snap_compare: Compare) -> None:
    assert snap_compare(console("mixed", encoding="ascii"), terminal_size=USUAL, run_before=settled)


@pytest.mark.parametrize(
    "keys",
    [["tab", "question_mark"], ["l"], ["p"], ["d"]],
    ids=["help of the cards", "log", "processes", "sources"],
)
def test_what_opens(snap_compare: Compare, keys: list[str]) -> None:
    assert snap_compare(console("mixed"), press=keys, terminal_size=USUAL, run_before=settled)


def test_the_picture_in_the_readme_shows_the_console() -> None:
    shown = re.search(r"!\[[^]]*]\(([^)]+\.svg)\)", README.read_text())
    assert shown is not None
    picture = (README.parent / shown[1]).read_text()
    assert picture.lstrip().startswith("<svg")
    assert "gpuops" in picture
