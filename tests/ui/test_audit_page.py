"""``a``: the audit on the screen, read in the background, with its age, at the sizes operators have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from console.checks.audit import judge
from console.model.audit_report import Audit
from console.model.profile import Profile
from console.model.site import Site
from console.ui.glyphs import ASCII, UNICODE, Glyphs
from console.ui.screens.audit import AuditPanel
from tests.checks.test_audit import KIMI, running, with_flag, without
from tests.ui import scenes
from tests.ui.test_console import Hands, console

GOOD = judge(running(), KIMI)
BAD = judge(running((*without("disable-custom-all-reduce"), "--kv-cache-dtype", "fp8_e5m2")), KIMI)


class Reads:
    """What the page reads, one after the other; an exception is raised, a gate is waited for."""

    def __init__(self, *answers: Audit | Exception) -> None:
        self.answers = list(answers)
        self.gate = asyncio.Event()
        self.count = 0

    async def __call__(self) -> Audit:
        await self.gate.wait()
        self.count += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def panel(reads: Reads, glyphs: Glyphs = UNICODE) -> AuditPanel:
    return AuditPanel(reads, glyphs)


def text_of(shown: AuditPanel, width: int) -> list[str]:
    return ["".join(span.text for span in row).rstrip() for row in shown.all_rows(scenes.ready(), width)]


async def until(true: Callable[[], object], within: float = 10.0) -> None:
    """Wait until it holds; AssertionError after ``within`` seconds."""
    ends = asyncio.get_running_loop().time() + within
    while not true():
        assert asyncio.get_running_loop().time() < ends
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def opened(monkeypatch: pytest.MonkeyPatch, reads: Reads) -> AsyncIterator[Hands]:
    """The console with its audit page open by its key."""

    async def read(site: Site, profiles: tuple[Profile, ...]) -> Audit:
        return await reads()

    monkeypatch.setattr("console.checks.audit.audit", read)
    async with console(size=(80, 24)) as hands:
        await hands.press("a")
        yield hands


async def test_the_screen_goes_on_while_it_is_read_and_then_shows_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = Reads(GOOD, BAD)
    async with opened(monkeypatch, reads) as hands:
        assert "AUDIT reading" in hands.text()
        await hands.show(scenes.hung())
        assert "HUNG" in hands.text()
        reads.gate.set()
        await until(lambda: "production runs the benchmark's 13 flags and 7 variables" in hands.text())
        assert "AUDIT read 0s ago" in hands.text()
        await hands.press("r")
        await until(lambda: "differs from the benchmark" in hands.text())
        assert reads.count == 2
        await hands.press("escape")
        assert "AUDIT" not in hands.text()


async def test_a_defect_is_shown_and_what_was_read_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(GOOD, RuntimeError("\x1b[31mboom [bold]"))
    reads.gate.set()
    async with opened(monkeypatch, reads) as hands:
        await until(lambda: "production runs" in hands.text())
        await hands.press("r")
        await until(lambda: "defect in the audit: RuntimeError: boom [bold]" in hands.text())
        assert "production runs the benchmark's" in hands.text()


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
@pytest.mark.parametrize("found", [GOOD, BAD], ids=["good", "bad"])
def test_what_is_wrong_comes_first_at_any_width(found: Audit, width: int) -> None:
    shown = panel(Reads())
    shown.found = found
    lines = text_of(shown, width)
    table = lines[max(place for place, line in enumerate(lines) if not line) + 1 :]
    signs = [line[1] for line in table]
    assert signs == sorted(signs, key="-≠?+=".index)
    assert len(signs) == len(found.items)
    if found is BAD and width >= 80:
        whole = "\n".join(lines)
        assert "--disable-custom-all-reduce is missing" in whole
        assert "its measured speed does not hold" in whole
        assert lines.index(next(line for line in lines if "Benchmark" in line)) < 8


def test_on_a_terminal_without_utf_8_every_sign_is_ascii() -> None:
    shown = panel(Reads(), ASCII)
    shown.found = judge(running(with_flag("port", "1")), KIMI)
    rows = text_of(shown, 80)
    port = next(line for line in rows if "--port" in line and "benchmark" in line and line[1] in "!≠")
    assert port[1] == "!"
