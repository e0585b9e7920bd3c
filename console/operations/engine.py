"""Carries the steps of a plan out, or takes them back, with each intent on the disk before it is acted on."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from console.model.operation import (
    Direction,
    Event,
    JobEnd,
    Outcome,
    Progress,
    StepEvent,
    StepState,
)
from console.model.text import clean
from console.operations.step import Context, Step, StepFailed
from console.store.journal import Journal, JournalProblem
from console.transport.files import FileProblem

#: Seconds between two words of progress in the journal.
PROGRESS_S = 0.5

#: Of a step's evidence so many lines are kept, each of so many characters.
LINES = 40
LINE_LENGTH = 1000

ASKED = "rolling back was asked for"

Value = TypeVar("Value")


async def carry_out(
    context: Context, steps: tuple[Step, ...], journal: Journal, direction: Direction
) -> JobEnd:
    """Go through the steps and write how it ended.

    Forward, and when a job goes on (``resume``): what is done already is passed over, the rest
    is done in order; at the first failure all that was begun, by whatever process, is taken
    back in reverse. ``rollback`` does only that. Whoever cancels this leaves the job as it
    stands: it can go on later. JournalProblem when the next intent cannot be written: it is
    not acted on then.
    """
    run = _Run(context, steps, journal)
    end = await (run.back((ASKED,)) if direction == "rollback" else run.forward())
    journal.append(end)
    return end


def failure_of(events: Iterable[Event]) -> str | None:
    """Why the job first failed, as its journal has it."""
    return next(
        (event.words for event in events if isinstance(event, StepEvent) and event.state == "failed"), None
    )


class _Failure(Exception):
    """A step failed, in words. ``stop``: nothing may be taken back."""

    def __init__(self, reason: str, lines: tuple[str, ...] = (), *, stop: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lines = lines
        self.stop = stop


class _Run:
    """One process's way through the steps."""

    def __init__(self, context: Context, steps: tuple[Step, ...], journal: Journal) -> None:
        self._context = context
        self._steps = steps
        self._journal = journal

    async def forward(self) -> JobEnd:
        for step in self._steps:
            try:
                await self._forward_one(step)
            except _Failure as failure:
                self._write(step, "failed", failure.reason, failure.lines)
                if failure.stop or not self._anything_begun():
                    return self._end("failed", (failure.reason,))
                return await self.back((failure.reason,))
        return self._end("done")

    async def _forward_one(self, step: Step) -> None:
        async with self._telling(step) as context:
            begun = self._last(step)
            evidence = await _bounded(step, step.deadline, lambda: step.done(context))
            if evidence is not None:
                if begun == "doing":  # it was done by a process that died before it could say so
                    self._write(step, "done", evidence)
                elif begun is None:
                    self._write(step, "skipped", evidence)
                return
            if begun == "done" and await self._still_holds(step, context):
                return
            self._write(step, "doing")

            async def do() -> str:
                await step.do(context)
                return await step.verify(context)

            self._write(step, "done", await _bounded(step, step.deadline, do))

    async def _still_holds(self, step: Step, context: Context) -> bool:
        """Whether what an earlier process did still stands."""
        try:
            await _bounded(step, step.deadline, lambda: step.verify(context))
        except _Failure:
            return False  # the step is done again, and says then what is wrong
        return True

    def _anything_begun(self) -> bool:
        """Whether there is anything to take back, or was."""
        return any(isinstance(event, StepEvent) and event.state == "doing" for event in self._journal.events)

    async def back(self, reasons: tuple[str, ...]) -> JobEnd:
        earlier = failure_of(self._journal.events)
        if earlier is not None and earlier not in reasons:
            reasons = (earlier, *(reason for reason in reasons if reason != ASKED))
        for step in reversed(self._steps):
            if self._last(step) is None:
                continue
            if step.undo_words is None:
                self._write(step, "nothing-to-undo")
                continue
            self._write(step, "undoing")
            try:
                evidence = await self._back_one(step)
            except _Failure as failure:
                self._write(step, "undo-failed", failure.reason, failure.lines)
                return self._end("failed", (*reasons, f"{step.undo_words}: {failure.reason}"))
            self._write(step, "undone", evidence)
        return self._end("rolled-back", reasons)

    async def _back_one(self, step: Step) -> str:
        async with self._telling(step) as context:
            return await _bounded(step, step.undo_deadline, lambda: step.undo(context))

    def _last(self, step: Step) -> StepState | None:
        """What the step came to, by whatever process; None when nothing of it is to be taken back."""
        state: StepState | None = None
        for event in self._journal.events:
            if isinstance(event, StepEvent) and event.step == step.id:
                if event.state in ("doing", "done"):
                    state = event.state
                elif event.state in ("undone", "nothing-to-undo"):
                    state = None
        return state

    def _write(self, step: Step, state: StepState, words: str = "", lines: tuple[str, ...] = ()) -> None:
        self._journal.append(
            StepEvent(
                at=self._context.wall_clock(),
                step=step.id,
                state=state,
                words=clean(words)[:LINE_LENGTH],
                lines=tuple(clean(line)[:LINE_LENGTH] for line in lines[-LINES:]),
            )
        )

    def _end(self, outcome: Outcome, reasons: tuple[str, ...] = ()) -> JobEnd:
        told = tuple(clean(reason)[:LINE_LENGTH] for reason in reasons)
        return JobEnd(at=self._context.wall_clock(), outcome=outcome, reasons=told)

    @contextlib.asynccontextmanager
    async def _telling(self, step: Step) -> AsyncIterator[Context]:
        """The context in which the step's words of progress reach the journal."""
        teller = _Teller(self._context, step, self._journal)
        try:
            yield replace(self._context, say=teller.say)
        finally:
            teller.close()


class _Teller:
    """Writes a step's progress to the journal: the newest word, at most every PROGRESS_S seconds."""

    def __init__(self, context: Context, step: Step, journal: Journal) -> None:
        self._context = context
        self._step = step
        self._journal = journal
        self._pending: Progress | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._told: tuple[object, ...] = ()

    def say(self, words: str, *, percent: float | None = None, eta_s: float | None = None) -> None:
        self._pending = Progress(
            at=self._context.wall_clock(),
            step=self._step.id,
            words=clean(words)[:LINE_LENGTH],
            percent=percent,
            eta_s=eta_s,
        )
        if self._timer is None:
            self._tell()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _tell(self) -> None:
        self._timer = None
        word, self._pending = self._pending, None
        if word is None:
            return
        told = (word.words, word.percent, word.eta_s)
        if told != self._told:
            self._told = told
            # A journal that cannot be written ends the job at the next intent, not at a word of progress.
            with contextlib.suppress(JournalProblem):
                self._journal.append(word, sync=False)
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_S, self._tell)


async def _bounded(step: Step, seconds: float, action: Callable[[], Awaitable[Value]]) -> Value:
    """What the action gives. _Failure in words when it fails, breaks, or is not over in time."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await action()
    except StepFailed as failed:
        raise _Failure(str(failed), failed.lines, stop=failed.stop) from None
    except FileProblem as problem:
        raise _Failure(str(problem)) from None
    except Exception as defect:  # noqa: BLE001  what went wrong is told, and all that was done is taken back
        if isinstance(defect, TimeoutError) and limit.expired():
            raise _Failure(f"{step.words}: not done within {seconds:g} s") from None
        lines = tuple("".join(traceback.format_exception(defect)).splitlines())
        reason = f"{step.words}: defect in step {step.id}: {type(defect).__name__}: {defect}"
        raise _Failure(reason, lines) from None
