"""The way of each operation: its steps in order; taken back in reverse they are the way home."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

from console.model.operation import Plan
from console.operations.service.request import ServiceRequest, request_of
from console.operations.service.starting import GENERATION, SMOKE_S, Ready, Smoke, Start, bring_back
from console.operations.service.stopping import Free, Orphans, Stop
from console.operations.service.unit_steps import Check, Disable, Enable, Reload, Write
from console.operations.step import Context, Step, StepFailed

Value = TypeVar("Value")


def steps(plan: Plan) -> tuple[Step, ...]:
    """The steps of a plan, from its request alone. msgspec.DecodeError for a request that is not of these."""
    return steps_for(plan.action, request_of(plan))


def steps_for(action: str, request: ServiceRequest) -> tuple[Step, ...]:
    """The steps of ``switch``, ``restart``, ``stop`` or ``start``. KeyError for another action."""
    return {"switch": _switch, "restart": _restart, "stop": _stop, "start": _start}[action](request)


def _switch(request: ServiceRequest) -> tuple[Step, ...]:
    from console.checks.smoke import AFTER_START

    back = partial(bring_back, request=request, only=AFTER_START)
    return (
        Check(request),
        Stop(request, back, request.old_ready_s + SMOKE_S + 60.0),
        *_freeing(request),
        Disable(request),
        Write(request),
        Reload(request),
        Start(request),
        Ready(request),
        Smoke(request, AFTER_START),
        Enable(request),
    )


def _restart(request: ServiceRequest) -> tuple[Step, ...]:
    return tuple(
        OneWay(step)
        for step in (
            Stop(request),
            *_freeing(request),
            Start(request),
            Ready(request),
            Smoke(request, GENERATION),
        )
    )


def _stop(request: ServiceRequest) -> tuple[Step, ...]:
    return tuple(OneWay(step) for step in (Stop(request), Free(request)))


def _start(request: ServiceRequest) -> tuple[Step, ...]:
    return (*_freeing(request), Start(request), Ready(request), Smoke(request, GENERATION))


def _freeing(request: ServiceRequest) -> tuple[Step, ...]:
    orphans = (Orphans(request),) if request.orphans else ()
    return (*orphans, Free(request))


class OneWay(Step):
    """A step of an operation that has no earlier state to go back to: what fails stays as it is."""

    undo_words = "nothing: there is no earlier state to go back to"

    def __init__(self, step: Step) -> None:
        self._step = step
        self.id, self.words = step.id, step.words
        self.deadline, self.undo_deadline = step.deadline, step.undo_deadline

    async def done(self, context: Context) -> str | None:
        return await self._step.done(context)

    async def do(self, context: Context) -> None:
        await self._one_way(self._step.do(context))

    async def verify(self, context: Context) -> str:
        return await self._one_way(self._step.verify(context))

    async def undo(self, context: Context) -> str:
        raise StepFailed("the service is left as it is now", stop=True)

    async def _one_way(self, work: Awaitable[Value]) -> Value:
        try:
            return await work
        except StepFailed as failed:
            raise StepFailed(str(failed), failed.lines, stop=True) from None
