"""The keys that change something, and the pages that show what a change would do, does and did."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from console.model.operation import JobView, Plan
from console.model.snapshot import Snapshot
from console.model.state import HEALTHY
from console.store.load_memory import LoadMemory
from console.ui import terminal
from console.ui.arrivals import Arrivals
from console.ui.desk import Desk
from console.ui.glyphs import Glyphs
from console.ui.header import Header

if TYPE_CHECKING:
    from console.operations.step import Context
    from console.ui.app import Console
    from console.ui.screens.job import Order

#: Seconds after the start until cards are looked at that something left half way.
STRANDED_S = 3.0

#: States of the service in which ``s`` stops it; in any other it starts it.
_STOPPED = ("stopped", "crashed", "unreachable")


class Changes:
    """Takes an action from its key to its plan, and its job to the screen.

    Without a desk nothing can be changed from here: the keys say so.
    """

    def __init__(
        self, app: Console, desk: Desk | None, glyphs: Glyphs, memory: LoadMemory | None = None
    ) -> None:
        self._app = app
        self._desk = desk
        self._memory = memory
        self._arrivals = Arrivals()
        self._glyphs = glyphs
        self._planning = False
        self.handlers: dict[str, Callable[[], object]] = {
            **{f"switch-{key}": partial(self._switch, key) for key in range(1, 10)},
            "restart": self._restart,
            "start-stop": self._start_or_stop,
            "jobs": self._open_jobs,
            "rebind": self._open_rebind,
        }

    def watch(self) -> None:
        """Follow every job of this host for as long as the console is open."""
        if self._desk is not None:
            self._work(self._desk.watch(self), "jobs")
            self._work(self._look_for_stranded(self._desk), "cards")

    async def _look_for_stranded(self, desk: Desk) -> None:
        """Once, a moment after the start: cards that a crash left half way are told of."""
        await asyncio.sleep(STRANDED_S)
        from console.model.rebind.stranded import reconcile
        from console.sources.source import Unavailable

        try:
            found = reconcile(await desk.inventory(), container=self._app.site.container.id)
        except Unavailable:
            return  # the page of the cards says why, and the doctor
        broken = [one for one in found if not one.harmless]
        if broken and desk.current is None:
            more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
            self._say(f"{broken[0].card} {broken[0].words}{more}; b shows it")

    def look(self, snapshot: Snapshot) -> None:
        """See whether a load has come to its end: it is remembered, and who watched it is told."""
        job = None if self._desk is None or self._desk.current is None else self._desk.current.state
        told = self._arrivals.look(snapshot, job)
        if told is not None:
            self._ring(told, good=snapshot.state.name in HEALTHY)
        memory = self._memory
        if memory is None:
            return
        if memory.new_load(snapshot):
            self._work(asyncio.to_thread(memory.record, snapshot), "remember the load")
        if (problem := memory.problem()) is not None:
            self._say(problem)

    # Keys --------------------------------------------------------------------------------------

    def _switch(self, key: int) -> None:
        if self._desk is None:
            self._say("nothing can be changed from here")
            return
        profile = self._desk.profile_with_key(key)
        if profile is None:
            self._say(f"no profile has the key {key}; gpuops profile list shows those there are")
            return
        from console.operations.service import plan_switch

        self._propose(partial(plan_switch, name=profile.name), confirmed=not self._desk.confirms(profile))

    def _restart(self) -> None:
        from console.operations.service import plan_restart

        self._propose(plan_restart)

    def _start_or_stop(self) -> None:
        from console.operations.service import plan_start, plan_stop

        snapshot = self._app.snapshot()
        self._propose(plan_start if snapshot.state.name in _STOPPED else plan_stop)

    def _propose(self, make: Callable[[Context], Awaitable[Plan]], *, confirmed: bool = False) -> None:
        """Make the plan and show it; carry it out at once when it is confirmed beforehand."""
        desk = self._desk
        if desk is None:
            self._say("nothing can be changed from here")
            return
        running = desk.current
        if running is not None and running.state in ("running", "interrupted"):
            self._open_job(running)
            self._say(f"{running.plan.title} {'runs' if running.state == 'running' else 'was interrupted'}")
            return
        if self._planning:
            return
        self._planning = True
        self._app.notify("checking what this would change", timeout=3)

        async def work() -> None:
            from console.operations.step import Refused
            from console.store.state import StateProblem

            try:
                plan = await desk.plan(make)
            except (Refused, StateProblem) as problem:
                self._say(str(problem))
                return
            finally:
                self._planning = False
            # What ends the work of others is never done by a key alone.
            ends_others = any(step.id == "orphans" for step in plan.steps)
            if confirmed and not plan.blocked and not plan.typed and not ends_others:
                await self._start(plan)
            else:
                from console.ui.screens.plan import PlanPage

                page = PlanPage(plan, Header(self._glyphs), self._confirmed, self._glyphs)
                self._app.open_page(page)

        self._work(work(), "plan")

    def _confirmed(self, plan: Plan) -> None:
        self._work(self._start(plan), "submit")

    async def _start(self, plan: Plan) -> None:
        from console.operations.step import Refused
        from console.store.lock import Locked
        from console.store.state import StateProblem

        assert self._desk is not None
        try:
            job = await self._desk.start(plan)
        except (Locked, Refused, StateProblem) as problem:
            self._say(str(problem))
            return
        self._work(self._desk.follow(job, self, opened=True), f"job {job}")

    def _open_rebind(self) -> None:
        from console.ui.screens.page import Page
        from console.ui.screens.rebind import RebindPanel

        propose = None if self._app.READ_ONLY or self._desk is None else self._propose
        panel = RebindPanel(self._desk, self._app.site, propose, self._open_job, self._glyphs)
        self._app.open_page(Page(panel, Header(self._glyphs)))

    # Jobs --------------------------------------------------------------------------------------

    def job_moved(self, view: JobView, opened: bool) -> None:
        """A job that is followed changed; ``opened``: it is to be seen now."""
        from console.ui.screens.job import JobPage, moving_slots, short_words

        self._app.show_job(
            short_words(view) if view.state in ("running", "interrupted") else None, moving_slots(view)
        )
        page = self._app.screen
        if isinstance(page, JobPage) and page.job == view.id:
            page.show(view)
        elif opened:
            self._open_job(view)

    def job_ended(self, view: JobView) -> None:
        """Ring, and say how it ended, also to a terminal that shows something else."""
        self._ring(f"{view.plan.title}: {view.state.replace('-', ' ')}", good=view.state == "done")

    def jobs_unreadable(self, reason: str) -> None:
        self._say(reason)

    def _open_job(self, view: JobView) -> None:
        from console.ui.screens.job import JobPage

        self._app.open_page(JobPage(view, Header(self._glyphs), self._order, self._glyphs))

    def _order(self, job: str, order: Order) -> None:
        async def work() -> None:
            from console.operations.step import Refused
            from console.store.lock import Locked
            from console.store.state import StateProblem

            assert self._desk is not None
            try:
                await self._desk.order(job, order)
            except (Locked, Refused, StateProblem) as problem:
                self._say(str(problem))
                return
            await self._desk.follow(job, self, opened=True)

        self._work(work(), f"{order} {job}")

    def _open_jobs(self) -> None:
        from console.ui.screens.jobs import JobsPage

        page = JobsPage(Header(self._glyphs), self._open_job, self._glyphs)
        self._app.open_page(page)
        if self._desk is None:
            self._app.call_after_refresh(page.show, None, "no jobs are kept here")
            return
        desk = self._desk

        async def work() -> None:
            from console.store.state import StateProblem

            try:
                page.show(await desk.jobs())
            except StateProblem as problem:
                page.show(None, str(problem))

        self._app.call_after_refresh(self._work, work(), "read jobs")

    # What they share ---------------------------------------------------------------------------

    def _work(self, work: Awaitable[None], name: str) -> None:
        self._app.run_worker(work, name=name, exit_on_error=True)

    def _ring(self, told: str, *, good: bool) -> None:
        self._app.bell()
        self._app.tell_terminal(terminal.notification(told))
        self._say(told, good=good)

    def _say(self, words: str, *, good: bool = False) -> None:
        self._app.notify(words, severity="information" if good else "warning", timeout=8, markup=False)
