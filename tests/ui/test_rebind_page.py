"""``b``: the cards between the sides: where each stands, what is chosen, what moves, what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.operation import Actor, JobState, JobView, Plan, PlannedStep, Progress, StepState, StepView
from console.model.rebind.inventory import Inventory
from console.model.rebind.kernel_log import CardEvent
from console.sources.source import Unavailable
from console.ui.app import Console
from console.ui.desk import Desk, needs_cards
from console.ui.glyphs import ASCII, UNICODE, Glyphs
from console.ui.header import Header
from console.ui.screens.job import moving_slots
from console.ui.screens.page import Page
from console.ui.screens.rebind import RebindPanel
from tests.rebind_values import FIRST, SECOND, THIRD, changed, inventory, slot, vm
from tests.ui import scenes
from tests.ui.test_console import Hands

SITE = msgspec.structs.replace(scenes.SITE, gpus="auto")

#: One card on each side, one half way, and one that waits in the kernel.
MIXED = inventory(
    (
        slot("01"),
        slot("21", "vfio-pci"),
        changed(slot("41", None, "vfio-pci"), THIRD, override="vfio-pci"),
        changed(slot("61", None, None), "0000:61:00.0", pending="pid 88 (dd of=/sys/…/unbind)"),
    ),
    vms=(vm(status="running", lock="backup"),),
)


def job(
    *states: tuple[str, StepState], action: str = "rebind", state: JobState = "running", **more: Any
) -> JobView:
    steps = tuple(
        StepView(planned=PlannedStep(id, id, f"back: {id}"), state=now, words="the words of it")
        for id, now in states
    )
    plan = Plan(action=action, title="move 4 cards to vm 100", target="vm 100", made_at=0.0, steps=())
    return JobView(
        id="20261130-101502-rebind",
        plan=plan,
        actor=Actor("root"),
        note=None,
        created_at=0.0,
        state=state,
        steps=steps,
        **more,
    )


class Host:
    """What the page reads, as a test has it."""

    def __init__(self, found: Inventory | str, *events: CardEvent) -> None:
        self.found = found
        self.current: JobView | None = None
        self.latest: JobView | None = None
        self._events = events

    async def inventory(self) -> Inventory:
        if isinstance(self.found, str):
            raise Unavailable(self.found)
        return self.found

    async def card_events(self, inventory: Callable[[], Inventory | None]) -> AsyncIterator[CardEvent]:
        for event in self._events:
            yield event
        await asyncio.Event().wait()


class Opened:
    """The page on a screen, and what was asked of it."""

    def __init__(self, hands: Hands, panel: RebindPanel) -> None:
        self.hands, self.panel = hands, panel
        self.plans: list[Any] = []
        self.jobs: list[JobView] = []

    async def line(self, part: str, with_: str = "") -> str:
        """The first line that holds both, as soon as there is one."""
        ends = asyncio.get_running_loop().time() + 10
        while True:
            for line in self.hands.text().splitlines():
                if part in line and with_ in line:
                    return line
            assert asyncio.get_running_loop().time() < ends, f"no {part!r} in\n{self.hands.text()}"
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def opened(
    host: Host | None, size: tuple[int, int] = (120, 40), *, read_only: bool = False
) -> AsyncIterator[Opened]:
    watch = scenes.Frozen(scenes.ready())
    app = Console(watch, SITE, encoding="utf-8", theme="dark")
    async with app.run_test(size=size) as pilot:
        hands = Hands(app, watch, pilot)
        seen: list[Opened] = []
        panel = RebindPanel(
            host,
            SITE,
            None if read_only else lambda make: seen[0].plans.append(make),
            lambda view: seen[0].jobs.append(view),
        )
        seen.append(Opened(hands, panel))
        app.open_page(Page(panel, Header(UNICODE)))
        await hands.show(watch.now)
        yield seen[0]


async def test_each_card_stands_on_its_side() -> None:
    async with opened(Host(MIXED)) as page:
        await page.line("read 0s ago")
        assert "CT 129 running" in await page.line("VM 100 gpu-vm running, locked: backup")
        home, away, half, hung = [
            await page.line(f" {number} {name}")
            for number, name in enumerate(("01:00", "21:00", "41:00", "61:00"))
        ]
        assert "nvidia0  ●────" in home
        assert "────● group 14, GPU, audio" in away
        assert "────●────" in half and "no driver has it" in half
        assert "pending in the kernel: pid 88" in hung
        assert "gpuops rebind --repair --gpu 0000:41:00.0" in await page.line("→ gpuops rebind --repair")
        assert "restart the host" in await page.line("end what holds the card")


async def test_what_is_chosen_is_what_the_plan_is_asked_for() -> None:
    async with opened(Host(inventory())) as page:
        await page.line("nvidia0")
        await page.hands.press("down", "space", "space", "v")
        assert "●" in (line := await page.line(" 1 21:00")) and "→" in line, "it would go to the VM"
        assert "→" not in await page.line(" 0 01:00")
        (make,) = page.plans
        assert isinstance(make, partial)
        assert make.keywords == {"target": "vm", "asked": (SECOND, THIRD)}
        await page.hands.press("up", "space", "c")
        assert page.plans[-1].keywords == {"target": "container", "asked": (SECOND,)}
        await page.hands.press("A", "v")
        assert page.plans[-1].keywords["asked"] == tuple(one.address for one in inventory().slots)
        await page.hands.press("A", "v")
        assert page.plans[-1].keywords["asked"] == (), "none chosen stands for all"


async def test_repair_is_offered_where_something_was_left() -> None:
    async with opened(Host(MIXED)) as page:
        await page.line("repair")
        await page.hands.press("f")
        assert page.plans[0].__name__ == "plan_repair"
    async with opened(Host(inventory())) as page:
        assert "repair" not in await page.line("space")


async def test_read_only_shows_and_plans_nothing() -> None:
    async with opened(Host(inventory()), read_only=True) as page:
        await page.line("nvidia0")
        await page.hands.press("v", "c", "f")
        assert page.plans == []
        told = [one.message for one in page.hands.app._notifications]
        assert told and all("read only: nothing is changed from here" in one for one in told)


async def test_a_reading_that_fails_says_why_and_leaves_what_was_read_before() -> None:
    host = Host(inventory())
    async with opened(host) as page:
        await page.line("nvidia0")
        host.found = "cards and guests could not be read within 8 s"
        page.panel._read()
        await page.line("could not be read within 8 s")
        await page.line("nvidia0")
    async with opened(None) as page:
        await page.line("cards are not read from here")


async def test_a_job_shows_card_by_card_and_who_is_in_the_way() -> None:
    host = Host(MIXED)
    host.current = job(
        ("check", "done"),
        ("to-vfio-0000:01:00", "doing"),
        ("to-vfio-0000:21:00", "done"),
        ("to-vfio-0000:41:00", "waiting"),
        progress=Progress(at=0.0, step="to-vfio-0000:01:00", words="wait for the kernel: pid 88"),
    )
    async with opened(host) as page:
        assert "◐" in await page.line(" 0 01:00", "moving")
        await page.line(" 1 21:00", "moved")
        await page.line(" 2 41:00", "waits for its turn")
        await page.line("JOB move 4 cards to vm 100", "running")
        await page.line("wait for the kernel: pid 88")
        await page.hands.press("enter")
        assert page.jobs == [host.current]
        host.current = job(
            ("unused", "failed"),
            state="interrupted",
            reasons=("a card is in use: pid 4711 python3 (CT 131): /dev/nvidia0; to end it: kill 4711",),
        )
        page.panel.redraw()
        await page.line("pid 4711 python3 (CT 131)")


@pytest.mark.parametrize("state", ["failed", "rolled-back"])
async def test_why_the_last_job_failed_stays_until_the_next(state: JobState) -> None:
    host = Host(inventory())
    why = "a card is in use: pid 4711 python3 (CT 131); to end it: kill 4711"
    host.latest = job(("unused", "failed"), state=state, reasons=(why,))
    async with opened(host) as page:
        await page.line("JOB move 4 cards to vm 100", state.replace("-", " "))
        await page.line("to end it: kill 4711")
        assert "back: unused" not in page.hands.text(), "what failed is the step, not its way back"
        await page.line("to container", "enter")  # and cards can be moved again
        await page.hands.press("enter")
        assert page.jobs == [host.latest]
        host.latest = job(("unused", "done"), state="done")
        page.panel.redraw()
        await page.hands.press("up")
        assert "JOB" not in page.hands.text()


async def test_a_card_on_the_ladder_moves_too() -> None:
    host = Host(MIXED)
    host.current = job(("rescue-reset", "doing"), action="recover")
    host.current = msgspec.structs.replace(
        host.current, plan=msgspec.structs.replace(host.current.plan, target="0000:41:00")
    )
    assert moving_slots(host.current) == {"0000:41:00"}
    async with opened(host) as page:
        assert "◐" in await page.line(" 2 41:00", "moving")
        assert "moving" not in await page.line(" 1 21:00")


async def test_the_kernels_words_are_shown_and_cannot_act_on_the_terminal() -> None:
    events = [
        CardEvent(at=1.0, card=FIRST, kind="xid", words=f"NVRM: Xid {number} \x1b[2J", grave=True)
        for number in range(9)
    ]
    async with opened(Host(inventory(), *events)) as page:
        await page.line(" 01:00 ", "NVRM: Xid 0")
        await page.line("NVRM: Xid 8")
    async with opened(Host(inventory(), *events), size=(80, 17)) as page:
        await page.line("NVRM: Xid 8")
        assert "NVRM: Xid 0" not in page.hands.text(), "the newest stay when not all fit"
        assert "\x1b" not in page.hands.text()


@given(
    width=st.integers(1, 250),
    found=st.sampled_from([MIXED, inventory(), inventory(()), inventory(vms=(), containers=())]),
    glyphs=st.sampled_from([UNICODE, ASCII]),
)
def test_any_width_is_drawn(width: int, found: Inventory, glyphs: Glyphs) -> None:
    panel = RebindPanel(None, SITE, None, lambda view: None, glyphs)
    panel._inventory = found
    rows = panel.rows(scenes.ready(), width, 40)
    assert rows and all(isinstance(span.text, str) for row in rows for span in row)
    if glyphs is ASCII:
        assert all(span.text.isascii() for row in rows for span in row)


# On the dashboard, and the console's own readers ------------------------------------------------------


async def test_a_card_that_moves_has_no_owner_on_the_dashboard() -> None:
    watch = scenes.Frozen(scenes.ready())
    app = Console(watch, SITE, encoding="utf-8", theme="dark")
    async with app.run_test(size=(120, 40)) as pilot:
        hands = Hands(app, watch, pilot)
        slots = moving_slots(job((f"to-vfio-{scenes.ADDRESSES[1][:-2]}", "doing")))
        app.show_job("rebind 1/8", slots)
        await pilot.pause()
        lines = [line for line in hands.text().splitlines() if " moving " in line]
        assert len(lines) == 1 and lines[0].startswith("1 ")
        app.show_job(None)
        await pilot.pause()
        assert " moving " not in hands.text()


@pytest.mark.parametrize(
    ("view", "needed"),
    [
        (job(("check", "doing")), True),
        (job(("check", "done"), ("driver-answers", "doing")), True),
        (job(("driver-answers", "done"), ("start", "doing")), False),
        (job(("driver-answers", "done"), ("start", "undoing")), True),
        (job(("check", "doing"), state="interrupted"), False),
        (job(("stop", "doing"), action="switch"), False),
        (job(("mend-0000:41:00", "doing"), action="repair"), True),
    ],
)
def test_the_consoles_reader_lets_go_while_cards_are_needed(view: JobView, needed: bool) -> None:
    assert needs_cards(view) is needed


async def test_the_reader_is_ended_once_and_comes_back() -> None:
    told: list[str] = []

    class Nvml:
        async def pause(self, reason: str) -> None:
            told.append(reason)

        def resume(self) -> None:
            told.append("resumed")

    class Sources:
        nvml = Nvml()

    class Monitor:
        sources = Sources()

    desk = Desk(SITE, (), Monitor())  # type: ignore[arg-type]
    for wanted in (False, True, True, False, False):
        await desk._let_go(wanted)
    assert told == ["the cards are being moved", "resumed"]


# Pictures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_page(
    snap_compare: Callable[..., bool], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console.ui.screens.rebind.AGAIN_S", 3600.0)
    monkeypatch.setattr("console.ui.screens.rebind.words.span", lambda seconds: "0s")
    watch = scenes.Frozen(scenes.ready())
    app = Console(watch, SITE, encoding="utf-8", theme="dark")
    panel = RebindPanel(Host(MIXED), SITE, lambda make: None, lambda view: None)

    async def show(pilot: Any) -> None:
        app.open_page(Page(panel, Header(UNICODE)))
        await pilot.pause()
        await pilot.press("space")
        while panel._inventory is None:
            await pilot.pause(0.02)
        await pilot.press("space")
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=show)
