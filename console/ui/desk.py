"""What the screen does when a key changes something: makes the plan, starts its job, follows jobs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from console.model.operation import JobView, Plan
from console.model.profile import Profile
from console.model.site import Site
from console.store.lock import holder
from console.store.state import StateProblem, state_of

if TYPE_CHECKING:
    from console.model.rebind.inventory import Inventory, Slot
    from console.model.rebind.kernel_log import CardEvent
    from console.operations.step import Context
    from console.sources.monitor import Monitor
    from console.sources.source import Apart
    from console.ui.screens.job import Order

#: Seconds between two looks for a job that somebody else started.
LOOK_S = 1.0


#: Seconds for one look at cards and guests: a card that is being reset keeps it waiting.
CARDS_S = 8.0


def needs_cards(view: JobView) -> bool:
    """Whether this job moves cards just now: whoever has one open is then in its way."""
    if view.state != "running" or view.plan.action not in ("rebind", "repair", "recover"):
        return False
    steps = {step.planned.id: step.state for step in view.steps}
    back = any(state in ("undoing", "undone") for state in steps.values())
    return back or steps.get("driver-answers") != "done"


class Screen(Protocol):
    """What the desk tells the screen."""

    def job_moved(self, view: JobView, opened: bool) -> None:
        """A job that is followed changed, or ended. ``opened``: the operator is to see it now."""

    def job_ended(self, view: JobView) -> None:
        """A job that was running has ended, or was interrupted."""

    def jobs_unreadable(self, reason: str) -> None:
        """The state directory cannot be read: nothing is known of jobs."""


class Desk:
    """Plans and jobs of one site, for the console. It draws nothing.

    ``jobs`` are those of the audit trail; ``current`` is the job that runs, or the
    one that was interrupted and waits for a word; ``latest`` is how the last one that was
    followed stands, also after its end.
    """

    def __init__(self, site: Site, profiles: tuple[Profile, ...], monitor: Monitor) -> None:
        self._site = site
        self._profiles = profiles
        self._monitor = monitor
        self._state = state_of(site, os.environ, os.geteuid())
        self._followed: set[str] = set()
        self._released = False
        self._looking: Apart[Inventory] | None = None
        self.current: JobView | None = None
        self.latest: JobView | None = None

    def profile_with_key(self, key: int) -> Profile | None:
        return next((profile for profile in self._profiles if profile.key == key), None)

    def confirms(self, profile: Profile) -> bool:
        """Whether a switch to it waits for a ``y``."""
        how = self._site.switch.get(profile.name)
        return how is None or how.confirm

    async def plan(self, make: Callable[[Context], Awaitable[Plan]]) -> Plan:
        """The plan that ``make`` makes of what is seen now. Refused when there can be none."""
        from console.operations.step import Context

        return await make(
            Context(
                site=self._site,
                profiles=self._profiles,
                monitor=self._monitor,
                state=self._state,
                clock=time.monotonic,
                wall_clock=time.time,
            )
        )

    async def start(self, plan: Plan) -> str:
        """Start the job of a confirmed plan: its id. Locked, Refused or StateProblem when it cannot be."""
        from console.operations.launch import actor_here, submit

        actor = actor_here()
        return await asyncio.to_thread(submit, self._state, self._site, self._profiles, plan, actor, None)

    async def order(self, job: str, order: Order) -> None:
        """Let an interrupted job go on, or be taken back. Locked, Refused or StateProblem when it cannot."""
        from console.operations import launch

        self._followed.discard(job)
        await asyncio.to_thread(getattr(launch, order), self._state, job)

    async def jobs(self) -> tuple[JobView, ...]:
        """Newest first. StateProblem when they cannot be read."""
        from console.store.jobs import list_jobs

        return await asyncio.to_thread(list_jobs, self._state)

    async def follow(self, job: str, screen: Screen, *, opened: bool = False) -> None:
        """Tell the screen how a job goes, until it has ended or was interrupted."""
        from console.operations.journal import follow

        if job in self._followed:
            return
        self._followed.add(job)
        view: JobView | None = None
        try:
            async for view in follow(self._state, job):
                self.latest = view
                self.current = view if view.state in ("running", "interrupted") else None
                await self._let_go(needs_cards(view))
                screen.job_moved(view, opened)
                opened = False
        finally:
            await self._let_go(False)
        if view is not None:
            screen.job_ended(view)

    async def _let_go(self, wanted: bool) -> None:
        """End the NVML process while cards move: it has each of them open."""
        if wanted == self._released:
            return
        self._released = wanted
        nvml = self._monitor.sources.nvml
        if wanted:
            await nvml.pause("the cards are being moved")
        else:
            nvml.resume()

    # Cards -------------------------------------------------------------------------------------

    async def inventory(self) -> Inventory:
        """Cards and guests as they are. Unavailable with the reason."""
        from console.sources.inventory import read_apart
        from console.sources.source import Apart, Unavailable

        if self._looking is None:
            self._looking = Apart("cards")
        named = () if self._site.gpus == "auto" else self._site.gpus
        try:
            async with asyncio.timeout(CARDS_S):
                return await read_apart(self._looking, self._monitor.sources.host.root, named)
        except TimeoutError:
            raise Unavailable(f"cards and guests could not be read within {CARDS_S:g} s") from None

    async def card_events(self, inventory: Callable[[], Inventory | None]) -> AsyncIterator[CardEvent]:
        """What the kernel says about the cards, from now on."""
        from console.sources.kernel_events import KernelEvents

        def slots() -> tuple[Slot, ...]:
            found = inventory()
            return () if found is None else found.slots

        async for event in KernelEvents(self._monitor.sources.host, slots).watch():
            yield event

    async def watch(self, screen: Screen) -> None:
        """For as long as the console is open: follow every job of this host, whoever started it.

        What keeps the jobs from being read is told once, until it changes.
        """
        told: str | None = None
        looked = False
        async with asyncio.TaskGroup() as following:
            while True:
                try:
                    if not looked:
                        await self._find_interrupted(screen)
                        looked = True
                    found = await asyncio.to_thread(holder, self._state)
                    if found is not None and found.job not in self._followed:
                        following.create_task(self.follow(found.job, screen))
                except StateProblem as problem:
                    if str(problem) != told:
                        told = str(problem)
                        screen.jobs_unreadable(told)
                await asyncio.sleep(LOOK_S)

    async def _find_interrupted(self, screen: Screen) -> None:
        if not self._state.jobs.is_dir():
            return
        for view in await self.jobs():
            if view.state == "interrupted":
                self._followed.add(view.id)
                self.current = view
                screen.job_moved(view, True)
                return
