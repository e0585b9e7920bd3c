"""``t``: the table of smoke tests under an operator's hands. The engine is a function of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot

from console.checks.smoke import CHECKS, Started
from console.model.finding import Finding, Verdict
from console.model.profile import Profile
from console.model.site import Site
from console.ui.app import Console
from console.ui.screens import smoke
from console.ui.screens.smoke import Report, SmokePage
from tests.ui import scenes
from tests.ui.scenes import Frozen

LEAK = "parser markers leaked into content: <|tool_calls_section_begin|>\ntimings: whole 1.2s\nrequest: POST"


class Engine:
    """What a run finds: every check starts, ``found`` are told, and then it waits for ``rest``."""

    def __init__(self, *verdicts: tuple[str, Verdict, str]) -> None:
        self.told = {name: (verdict, evidence) for name, verdict, evidence in verdicts}
        self.rest = asyncio.Event()
        self.runs = 0
        self.cancelled = 0
        self.profiles: list[Profile | None] = []

    async def fire(self, site: Site, profile: Profile | None, report: Report) -> object:
        self.runs += 1
        self.profiles.append(profile)
        for check in CHECKS:
            report(Started(check.id, check.title))
        for check in CHECKS:
            if check.id in self.told:
                verdict, evidence = self.told[check.id]
                report(Finding(check.id, check.title, verdict, evidence, "look at the parser"))
        try:
            await self.rest.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        for check in CHECKS:
            if check.id not in self.told:
                report(Finding(check.id, check.title, "pass", f"{check.id} is well"))
        return None


@asynccontextmanager
async def opened(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[Console, Pilot[int]]]:
    monkeypatch.setattr(smoke.SmokePage.__init__, "__defaults__", (engine.fire,))
    app = Console(Frozen(scenes.ready()), scenes.SITE, encoding="utf-8", theme="dark")
    async with app.run_test(size=size) as pilot:
        app.draw()
        await pilot.press("t")
        await pilot.pause()
        yield app, pilot


def text(app: Console) -> str:
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in line).rstrip() for line in strips)


async def test_the_table_fills_and_the_verdict_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(("served-name", "pass", "serves kimi-k2.5"))
    async with opened(engine, monkeypatch) as (app, pilot):
        rows = text(app).split("\n")
        assert "1 of 18" in rows[2]
        assert "serves kimi-k2.5" in rows[3]
        assert sum("asking" in row for row in rows) == len(CHECKS) - 1
        assert "esc stop" in rows[1]
        engine.rest.set()
        await pilot.pause()
        rows = text(app).split("\n")
        assert "ALL 18 PASSED" in rows[2] and "ago" in rows[2]
        assert "r again" in rows[1]
        assert "burst is well" in rows[20]


async def test_the_first_failure_is_shown_with_its_evidence_and_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(("sanity", "pass", "right"), ("tools-call", "fail", LEAK))
    engine.rest.set()
    async with opened(engine, monkeypatch) as (app, pilot):
        shown = text(app)
        assert "1 FAILED  Tool call" in shown
        assert "TOOL CALL  ──" in shown
        assert "→ look at the parser" in shown and "timings: whole 1.2s" in shown
        await pilot.press("home")
        assert "SERVED NAME  ──" in text(app) and "timings: whole 1.2s" not in text(app)
        await pilot.press("down", "down")
        assert "KNOWN ANSWERS  ──" in text(app)


async def test_escape_stops_the_run_and_then_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(("served-name", "pass", "serves kimi-k2.5"))
    async with opened(engine, monkeypatch) as (app, pilot):
        await pilot.press("escape")
        await pilot.pause()
        assert engine.cancelled == 1
        assert isinstance(app.screen, SmokePage)
        assert "STOPPED after 1 of 18" in text(app)
        assert "not run" in text(app) and "asking" not in text(app)
        await pilot.press("escape")
        assert not isinstance(app.screen, SmokePage)


async def test_r_runs_again_and_restarts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    async with opened(engine, monkeypatch) as (app, pilot):
        await pilot.press("r")  # one is under way
        assert engine.runs == 1
        engine.rest.set()
        await pilot.pause()
        await pilot.press("r")
        await pilot.pause()
        assert engine.runs == 2
        assert isinstance(app.screen, SmokePage)
        assert "ALL 18 PASSED" in text(app)


async def test_another_page_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    async with opened(engine, monkeypatch) as (app, pilot):
        await pilot.press("p")
        await pilot.pause()
        assert engine.cancelled == 1
        assert "PROCESSES ON THE CARDS" in text(app)


async def test_doubt_is_not_success(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(("burst", "unknown", "busy (HTTP 429)"), ("speculation", "skipped", "speculation is off"))
    engine.rest.set()
    async with opened(engine, monkeypatch) as (app, _):
        assert "1 NOT KNOWN  Burst" in text(app)
        assert "PASSED" not in text(app)
        assert "BURST  ──" in text(app)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60), (40, 10), (20, 3)])
async def test_it_fits_every_size_and_a_small_one_says_that_there_is_more(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    engine = Engine(("tools-call", "fail", f"{LEAK}\n" + "word " * 400))
    engine.rest.set()
    async with opened(engine, monkeypatch, size) as (app, pilot):
        assert all(len(row) <= size[0] for row in text(app).split("\n"))
        if size == (80, 24):
            assert "4 more checks" in text(app) and "Burst" not in text(app)
            before = text(app)
            await pilot.press("pagedown")
            assert text(app) != before
            await pilot.press("end")
            assert "Burst" in text(app)
        elif size[1] >= 40:
            assert "more checks" not in text(app) and "Burst" in text(app)


async def test_hostile_evidence_is_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(("sanity", "fail", "said [red]x[/red] \x1b[31m\u202e"))
    engine.rest.set()
    async with opened(engine, monkeypatch) as (app, _):
        assert "[red]x[/red]" in text(app)
        assert "\x1b" not in text(app) and "\u202e" not in text(app)
