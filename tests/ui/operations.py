"""Plans and jobs as an operator would meet them, and a desk that carries nothing out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from console.model.finding import Finding
from console.model.operation import (
    Actor,
    FileChange,
    JobEnd,
    JobStart,
    JobView,
    KernelLine,
    Plan,
    PlannedStep,
    Progress,
    StepEvent,
    job_view,
)
from console.model.profile import Profile
from console.ui.desk import Desk, Screen
from tests.ui.scenes import SITE, WALL

UNIT = "/etc/systemd/system/sglang.service"

STEPS = (
    PlannedStep("stale", "check that the unit is as the plan saw it"),
    PlannedStep(
        "stop", "stop sglang.service (SIGTERM; SIGKILL after 90 s)", "start kimi-k2.5-int4 again", 120
    ),
    PlannedStep("write", f"write {UNIT}", f"put {UNIT} back as it was"),
    PlannedStep("start", "start sglang.service", "stop sglang.service again"),
    PlannedStep("ready", "follow the load until it is ready as qwen3.5-397b (at most 900 s)", None, 900),
    PlannedStep("enable", "enable sglang.service: it starts with the machine", "disable sglang.service"),
)

PLAN = Plan(
    action="switch",
    title="switch to qwen3.5-397b-nvfp4",
    target="qwen3.5-397b-nvfp4",
    made_at=WALL,
    steps=STEPS,
    changes=(
        FileChange(
            "ct:129",
            UNIT,
            "[Service]\nExecStart=python --model-path /shared/kimi-k2.5-int4 \\\n    --tp-size 8\n",
            "[Service]\nExecStart=python --model-path /shared/qwen3.5 \\\n    --tp-size 8\n",
        ),
    ),
    findings=(
        Finding("flags", "Flags", "pass", "11 of 11 are as SGLang 0.5.18 wants them"),
        Finding("port", "Port", "pass", "30000 belongs to sglang.service, which stops first"),
        Finding(
            "memory",
            "Host memory",
            "warn",
            "hierarchical cache takes 598 GB of 700 GB",
            "lower hicache-ratio to 3.0",
        ),
    ),
    costs=("about 9m45 without a model (median of 3 loads here)", "12 requests in flight"),
)

BLOCKED = msgspec.structs.replace(
    PLAN,
    findings=(
        Finding("flags", "Flags", "fail", "--kimi is unknown", "write tool-call-parser: kimi_k2"),
        *PLAN.findings,
    ),
)
TYPED = msgspec.structs.replace(
    PLAN, action="rebind", title="give 8 cards to VM 100", target="vm 100", typed=True
)

WHO = Actor("root", "10.0.0.5 51022 10.0.0.1 22")


def job(*events: Any, alive: bool = True, plan: Plan = PLAN, name: str = "20261130-114500-switch") -> JobView:
    start = JobStart(at=WALL - 300, direction="forward", pid=4711, start_ticks=1, boot_id="b")
    return job_view(name, plan, WHO, "new weights", WALL - 300, (start, *events), alive)


def _went(*steps: str, at: float = WALL - 290) -> tuple[StepEvent, ...]:
    found: list[StepEvent] = []
    for number, step in enumerate(steps):
        began = at + 3 * number
        found.append(StepEvent(at=began, step=step, state="doing"))
        found.append(StepEvent(at=began + 2, step=step, state="done", words=f"{step} is seen to be done"))
    return tuple(found)


def running() -> JobView:
    """In the middle of a load."""
    return job(
        *_went("stale", "stop", "write", "start"),
        StepEvent(at=WALL - 270, step="ready", state="doing"),
        Progress(at=WALL - 1, step="ready", words="weights, shard 31/46", percent=67, eta_s=190),
        KernelLine(at=WALL - 200, words="NVRM: Xid (PCI:0000:41:00): 31, MMU Fault"),
    )


def rolled_back() -> JobView:
    """The new model died while it was loaded, and the old one is back."""
    why = "the engine died: torch.OutOfMemoryError: CUDA out of memory"
    undone = (
        StepEvent(at=WALL - 90 + n, step=step, state=state, words=f"{step} is taken back")  # type: ignore[arg-type]
        for n, step in enumerate(("start", "write", "stop"))
        for state in ("undoing", "undone")
    )
    return job(
        *_went("stale", "stop", "write", "start"),
        StepEvent(at=WALL - 270, step="ready", state="doing"),
        StepEvent(at=WALL - 100, step="ready", state="failed", words=why, lines=("2.00 GiB",)),
        *undone,
        JobEnd(at=WALL - 20, outcome="rolled-back", reasons=(why,)),
        alive=False,
    )


def interrupted() -> JobView:
    """Its process died in the middle of a load."""
    return job(
        *_went("stale", "stop", "write", "start"),
        StepEvent(at=WALL - 270, step="ready", state="doing"),
        alive=False,
    )


def done() -> JobView:
    return job(
        *_went(*(step.id for step in STEPS)),
        JobEnd(at=WALL - 20, outcome="done"),
        alive=False,
        name="20261130-090000-switch",
    )


KIMI = Profile(name="kimi-k2.5-int4", title="Kimi", key=1, args={"model-path": "/shared/kimi"})
QWEN = Profile(name="qwen3.5-397b-nvfp4", title="Qwen", key=2, args={"model-path": "/shared/qwen"})


class FakeDesk(Desk):
    """Makes the plan it was given, and tells of jobs what it was told to."""

    def __init__(self, plan: Plan = PLAN, jobs: tuple[JobView, ...] = (), site: Any = SITE) -> None:
        super().__init__(site, (KIMI, QWEN), None)  # type: ignore[arg-type]
        self._made = plan
        self._jobs = jobs
        self.problem: Exception | None = None
        self.started: list[Plan] = []
        self.orders: list[tuple[str, str]] = []
        self.told: asyncio.Queue[JobView] = asyncio.Queue()

    async def plan(self, make: Callable[..., Awaitable[Plan]]) -> Plan:
        if self.problem is not None:
            raise self.problem
        return self._made

    async def start(self, plan: Plan) -> str:
        if self.problem is not None:
            raise self.problem
        self.started.append(plan)
        return "20261130-114500-switch"

    async def order(self, job: str, order: Any) -> None:
        self.orders.append((job, order))

    async def jobs(self) -> tuple[JobView, ...]:
        return self._jobs

    async def follow(self, job: str, screen: Screen, *, opened: bool = False) -> None:
        while True:
            view = await self.told.get()
            self.current = view if view.state in ("running", "interrupted") else None
            screen.job_moved(view, opened)
            opened = False
            if view.state != "running":
                screen.job_ended(view)
                return

    async def watch(self, screen: Screen) -> None:
        await self._find_interrupted(screen)

    async def _find_interrupted(self, screen: Screen) -> None:
        for view in self._jobs:
            if view.state == "interrupted":
                self.current = view
                screen.job_moved(view, True)
