"""The service on the way of cards: it ends before they leave, and comes back after they have."""

from __future__ import annotations

from console.operations.service.following import follow_to_ready
from console.operations.service.request import ServiceRequest
from console.operations.service.starting import (
    GENERATION,
    SMOKE_S,
    ask_questions,
    followed,
    ready_limit,
    start,
)
from console.operations.service.world import (
    ENDED,
    RUNNING,
    patience_of,
    systemctl,
    unit_now,
    wait_inactive,
)
from console.operations.step import Context, Step, StepFailed


class StopService(Step):
    """By its unit, with SIGTERM: what is killed can leave a card's firmware without an answer."""

    id = "service-stop"

    def __init__(self, request: ServiceRequest) -> None:
        self._request = request
        self.words = f"stop {request.unit} (SIGTERM; SIGKILL after {request.stop_timeout_s:.0f} s)"
        self.deadline = patience_of(request.stop_timeout_s) + 30.0
        self.undo_deadline = ready_limit(request.old) + SMOKE_S + self.deadline
        if request.was_running:
            self.undo_words = f"start {request.unit} again and wait until it is ready"

    async def done(self, context: Context) -> str | None:
        unit = await unit_now(context)
        return f"{unit.id} is {unit.active_state}" if unit.active_state in ENDED and not unit.tasks else None

    async def do(self, context: Context) -> None:
        await systemctl(context, "stop", "--no-block", "--", self._request.unit)

    async def verify(self, context: Context) -> str:
        return await wait_inactive(context, self._request)

    async def undo(self, context: Context) -> str:
        request = self._request
        context.monitor.sources.nvml.resume()
        before = None
        if (await unit_now(context)).active_state not in RUNNING:
            before = await start(context, request)
        ready = await follow_to_ready(context, followed(request, request.old, before=before))
        return f"{ready}; {await ask_questions(context, request.old, GENERATION)}"


class Kept(Step):
    """A step after the cards have arrived: when it fails, they stay where they are."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.id, self.words, self.undo_words = step.id, step.words, step.undo_words
        self.deadline, self.undo_deadline = step.deadline, step.undo_deadline

    async def done(self, context: Context) -> str | None:
        return await self._step.done(context)

    async def do(self, context: Context) -> None:
        try:
            await self._step.do(context)
        except StepFailed as failed:
            raise _kept(failed) from None

    async def verify(self, context: Context) -> str:
        try:
            return await self._step.verify(context)
        except StepFailed as failed:
            raise _kept(failed) from None

    async def undo(self, context: Context) -> str:
        return await self._step.undo(context)


def _kept(failed: StepFailed) -> StepFailed:
    return StepFailed(f"{failed}; the cards have arrived and stay", failed.lines, stop=True)
