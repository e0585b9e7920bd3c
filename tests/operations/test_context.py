"""The context in which plans are made and jobs act: on the simulated box, with its sources followed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.model.site import Site
from console.operations import context as contexts
from console.operations.context import opened
from console.sources.files import load_site
from console.sources.monitor import Monitor
from console.store.state import State
from console.transport.demo import running_box
from tests.simulator.box_lab import eventually


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running_box(None, ["--speed=200"]) as box:
        yield load_site(box.site)


async def test_it_opens_with_the_state_of_the_world(site: Site, tmp_path: Path) -> None:
    async with opened(site, (), state=State(tmp_path)) as context:
        seen = context.monitor.snapshot()
        assert seen.state.name in ("ready", "busy")
        assert len(seen.cards) == 8
        assert seen.unit.value is not None
        assert context.service is context.monitor.sources.service
        first = context.monitor.unit.taken_at

        async def read_again() -> bool:
            return context.monitor.unit.taken_at != first

        await eventually(read_again, 10)  # it goes on being followed
    ticks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert ticks == []


async def test_sources_that_keep_silent_are_not_waited_for_for_ever(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(self: Monitor) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Monitor, "run", silent)
    monkeypatch.setattr(contexts, "FIRST_READINGS_S", 0.1)
    async with opened(site, (), state=State(tmp_path)) as context:
        assert context.monitor.snapshot().unit.taken_at is None


async def test_a_defect_in_the_following_is_told(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(self: Monitor) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(Monitor, "run", broken)
    async with opened(site, (), state=State(tmp_path)):
        await asyncio.sleep(0)
    assert "followed no longer: ZeroDivisionError('oh')" in capsys.readouterr().err
