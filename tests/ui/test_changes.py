"""Keys that change something: nothing happens before a word of the operator, and every job is seen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from textual.pilot import Pilot

from console.model.operation import JobView, Plan, PlannedStep
from console.model.site import Site, SwitchTo
from console.store.lock import Locked
from console.store.state import StateProblem
from console.ui.app import Console, ReadOnlyConsole
from console.ui.screens.job import JobPage
from console.ui.screens.jobs import JobsPage
from console.ui.screens.plan import PlanPage
from console.ui.terminal import notification
from tests.ui import operations, scenes
from tests.ui.operations import FakeDesk
from tests.ui.scenes import Frozen

SMALL, USUAL, LARGE = (80, 24), (120, 40), (200, 60)


class Hands:
    def __init__(self, app: Console, desk: FakeDesk, pilot: Pilot[int]) -> None:
        self.app, self.desk, self.pilot = app, desk, pilot
        self.sent: list[str] = []
        assert app._driver is not None
        app._driver.write = self.sent.append  # type: ignore[method-assign]

    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in line) for line in strips)

    def notices(self) -> list[str]:
        return [notice.message for notice in self.app._notifications]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await self.pilot.pause()

    async def tell(self, view: JobView) -> None:
        await self.desk.told.put(view)
        await self.settle()


@asynccontextmanager
async def console(
    desk: FakeDesk, kind: type[Console] = Console, site: Site = scenes.SITE, size: tuple[int, int] = USUAL
) -> AsyncIterator[Hands]:
    app = kind(Frozen(scenes.ready()), site, desk=desk, encoding="utf-8", theme="dark")
    async with app.run_test(size=size) as pilot:
        hands = Hands(app, desk, pilot)
        await hands.settle()
        yield hands


async def test_a_key_shows_the_plan_and_y_carries_it_out() -> None:
    async with console(FakeDesk()) as hands:
        await hands.press("2")
        assert isinstance(hands.app.screen, PlanPage)
        for words in (
            "switch to qwen3.5",
            "9m45 without a model",
            "2 of 3 pass",
            "lower hicache-ratio",
            "STEPS",
        ):
            assert words in hands.text()
        assert "put /etc/systemd/system/sglang.service back" in hands.text()
        assert "+ExecStart=python --model-path /shared/qwen3.5" in hands.text()
        assert hands.desk.started == []
        await hands.press("y")
        assert hands.desk.started == [operations.PLAN]
        await hands.tell(operations.running())
        assert isinstance(hands.app.screen, JobPage)
        assert (
            "weights, shard 31/46" in hands.text() and "67 %" in hands.text() and "3m10 left" in hands.text()
        )
        assert "switch 5/6" in hands.text()


@pytest.mark.parametrize("key", ["escape", "n", "q"])
async def test_nothing_is_changed_without_a_yes(key: str) -> None:
    async with console(FakeDesk()) as hands:
        await hands.press("r", key)
        assert not isinstance(hands.app.screen, PlanPage)
        assert hands.desk.started == []


async def test_a_plan_that_is_forbidden_cannot_be_carried_out() -> None:
    async with console(FakeDesk(operations.BLOCKED)) as hands:
        await hands.press("2")
        assert "refused" in hands.text() and "write tool-call-parser: kimi_k2" in hands.text()
        await hands.press("y")
        assert hands.desk.started == [] and isinstance(hands.app.screen, PlanPage)


async def test_without_confirm_the_key_alone_does_it_unless_the_checks_forbid_it() -> None:
    site = msgspec.structs.replace(scenes.SITE, switch={operations.QWEN.name: SwitchTo(confirm=False)})
    async with console(FakeDesk(site=site)) as hands:
        await hands.press("1")
        assert isinstance(hands.app.screen, PlanPage) and hands.desk.started == []
        await hands.press("escape", "2")
        assert hands.desk.started == [operations.PLAN]
    ending = PlannedStep("orphans", "end what else holds the cards: train.py (pid 77120, CT 131)")
    others = msgspec.structs.replace(operations.PLAN, steps=(ending, *operations.PLAN.steps))
    async with console(FakeDesk(others, site=site)) as hands:
        await hands.press("2")
        assert hands.desk.started == [], "it would end the work of somebody else"
        await hands.press("y")
        assert hands.desk.started == [others]
    async with console(FakeDesk(operations.BLOCKED, site=site)) as hands:
        await hands.press("2")
        assert hands.desk.started == [] and "refused" in hands.text()


async def test_what_is_dangerous_wants_its_target_typed() -> None:
    async with console(FakeDesk(operations.TYPED)) as hands:
        await hands.press("r", "y", "enter")
        assert hands.desk.started == [] and "that is not vm 100" in " ".join(hands.notices())
        await hands.press("backspace", *"vm", "space", *"100", "enter")
        assert hands.desk.started == [operations.TYPED]


async def test_a_digit_without_a_profile_says_so() -> None:
    async with console(FakeDesk()) as hands:
        await hands.press("7")
        assert "no profile has the key 7" in " ".join(hands.notices())


@pytest.mark.parametrize(
    "problem",
    [Locked(None), StateProblem("/var/lib/gpuops: Read-only file system; gpuops keeps its jobs there")],
)
async def test_a_job_that_cannot_start_says_why(problem: Exception) -> None:
    async with console(FakeDesk()) as hands:
        await hands.press("2")
        hands.desk.problem = problem
        await hands.press("y")
        assert str(problem) in " ".join(hands.notices())
        assert hands.app.is_running


async def test_a_job_at_work_is_shown_instead_of_another_plan() -> None:
    async with console(FakeDesk()) as hands:
        await hands.press("2", "y")
        await hands.tell(operations.running())
        await hands.press("escape")
        assert not isinstance(hands.app.screen, JobPage)
        await hands.press("r")
        assert isinstance(hands.app.screen, JobPage) and len(hands.desk.started) == 1


async def test_the_end_of_a_job_rings_and_is_told_to_the_terminal() -> None:
    async with console(FakeDesk()) as hands:
        await hands.press("2", "y")
        await hands.tell(operations.running())
        await hands.press("escape")
        await hands.tell(operations.rolled_back())
        sent = "".join(hands.sent)
        assert "\x07" in sent and "\x1b]9;switch to qwen3.5-397b-nvfp4: rolled back\x07" in sent
        assert not isinstance(hands.app.screen, JobPage)  # it went to what the operator looks at


def test_nothing_from_outside_gets_into_a_notification() -> None:
    assert notification("a\x1b]0;b\x07c\n\u202ed").count("\x1b") == 1
    assert notification("a\x1b]0;b\x07c").count("\x07") == 1


async def test_an_interrupted_job_is_the_first_thing_that_is_seen() -> None:
    async with console(FakeDesk(jobs=(operations.interrupted(),))) as hands:
        assert isinstance(hands.app.screen, JobPage)
        assert "INTERRUPTED" in hands.text() and "switch interrupted" in hands.text()
        await hands.press("R")
        assert hands.desk.orders == [("20261130-114500-switch", "resume")]


async def test_an_interrupted_job_can_be_taken_back() -> None:
    async with console(FakeDesk(jobs=(operations.interrupted(),))) as hands:
        await hands.press("B")
        assert hands.desk.orders == [("20261130-114500-switch", "rollback")]


async def test_a_job_that_runs_takes_no_orders() -> None:
    async with console(FakeDesk()) as hands:
        await hands.press("2", "y")
        await hands.tell(operations.running())
        await hands.press("R", "B")
        assert hands.desk.orders == []


async def test_jobs_are_listed_and_opened() -> None:
    async with console(FakeDesk(jobs=(operations.rolled_back(), operations.done()))) as hands:
        await hands.press("j")
        assert isinstance(hands.app.screen, JobsPage)
        assert "rolled back" in hands.text() and "(new weights)" in hands.text()
        await hands.press("down", "enter")
        assert isinstance(hands.app.screen, JobPage) and hands.app.screen.job == "20261130-090000-switch"


async def test_a_step_that_failed_is_told_by_itself_and_by_its_evidence() -> None:
    async with console(FakeDesk(jobs=(operations.rolled_back(),))) as hands:
        await hands.press("j", "enter")
        text = hands.text()
        assert "ROLLED BACK" in text and "2.00 GiB" in text
        assert "start kimi-k2.5-int4 again" in text and "10.0.0.5" in text


async def test_read_only_has_no_key_that_changes_anything() -> None:
    async with console(FakeDesk(), ReadOnlyConsole) as hands:
        await hands.press("2", "r", "s", "1")
        assert hands.desk.started == [] and not isinstance(hands.app.screen, PlanPage)
        assert "switch" not in hands.text().splitlines()[-1]


# -- pictures ---------------------------------------------------------------------------------------

Compare = Callable[..., bool]


def showing(plan: Plan, jobs: tuple[JobView, ...] = ()) -> Console:
    return Console(
        Frozen(scenes.ready()), scenes.SITE, desk=FakeDesk(plan, jobs), encoding="utf-8", theme="dark"
    )


async def settled(pilot: Pilot[int]) -> None:
    assert isinstance(pilot.app, Console)
    for _ in range(3):
        await pilot.pause()
    pilot.app.clear_notifications()
    pilot.app.draw()
    await pilot.pause()


@pytest.mark.parametrize("size", [SMALL, USUAL, LARGE], ids=["80x24", "120x40", "200x60"])
@pytest.mark.parametrize(
    ("plan", "jobs", "keys"),
    [
        (operations.PLAN, (), ["2"]),
        (operations.BLOCKED, (), ["2"]),
        (operations.PLAN, (operations.interrupted(),), []),
        (operations.PLAN, (operations.rolled_back(), operations.done()), ["j"]),
        (operations.PLAN, (operations.rolled_back(),), ["j", "enter"]),
    ],
    ids=["plan", "refused", "interrupted", "jobs", "rolled back"],
)
def test_what_is_shown(
    snap_compare: Compare, plan: Plan, jobs: tuple[JobView, ...], keys: list[str], size: tuple[int, int]
) -> None:
    async def before(pilot: Pilot[int]) -> None:
        for key in keys:
            await pilot.press(key)
            await settled(pilot)
        await settled(pilot)

    assert snap_compare(showing(plan, jobs), terminal_size=size, run_before=before)
