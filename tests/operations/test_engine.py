"""How steps are carried out and taken back, by what the journal says and what the world looks like."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from console.model.operation import Direction, JobEnd, JobStart, Progress, StepEvent
from console.model.site import Site
from console.operations.engine import PROGRESS_S, carry_out
from console.operations.step import Context, Step, StepFailed
from console.store.journal import Journal, JournalProblem
from console.store.state import State
from console.transport.files import FileProblem
from tests.operations.job_lab import opened


class Spoken(Step):
    """Notes what is asked of it; each method may be given another body."""

    def __init__(self, id: str, told: list[str], **bodies: Callable[[Context], Awaitable[Any]]) -> None:
        self.id = id
        self.words = f"do {id}"
        self.undo_words = f"undo {id}"
        self._told = told
        self._bodies = bodies

    async def done(self, context: Context) -> str | None:
        body = self._bodies.get("done")
        found: str | None = await body(context) if body is not None else None
        return found

    async def do(self, context: Context) -> None:
        await self._say("do", context)

    async def verify(self, context: Context) -> str:
        await self._say("verify", context)
        return f"{self.id} is done"

    async def undo(self, context: Context) -> str:
        await self._say("undo", context)
        return f"{self.id} is undone"

    async def _say(self, method: str, context: Context) -> None:
        self._told.append(f"{method} {self.id}")
        if method in self._bodies:
            await self._bodies[method](context)


def raises(problem: Exception) -> Callable[[Context], Awaitable[None]]:
    async def body(context: Context) -> None:
        raise problem

    return body


def gives(value: str | None) -> Callable[[Context], Awaitable[str | None]]:
    async def body(context: Context) -> str | None:
        return value

    return body


class Desk:
    """A journal and what the steps were asked."""

    def __init__(self, directory: Path) -> None:
        self.told: list[str] = []
        self.path = directory / "journal.jsonl"
        Journal.create(
            self.path, "job", (JobStart(at=1.0, direction="forward", pid=1, start_ticks=1, boot_id=""),)
        )
        self.journal = Journal(self.path)
        self._state = State(directory)

    def step(self, id: str, **bodies: Callable[[Context], Awaitable[Any]]) -> Spoken:
        return Spoken(id, self.told, **bodies)

    async def run(self, *steps: Step, direction: Direction = "forward") -> JobEnd:
        async with opened(Site(), (), state=self._state) as context:
            return await carry_out(context, steps, self.journal, direction)

    def states(self) -> list[str]:
        return [
            f"{event.step} {event.state}"
            for event in Journal(self.path).events
            if isinstance(event, StepEvent)
        ]

    def event(self, step: str, state: str) -> StepEvent:
        return next(
            event
            for event in self.journal.events
            if isinstance(event, StepEvent) and (event.step, event.state) == (step, state)
        )


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_each_step_is_announced_done_and_looked_at_in_order(desk: Desk) -> None:
    end = await desk.run(desk.step("a"), desk.step("b"))
    assert end.outcome == "done"
    assert desk.told == ["do a", "verify a", "do b", "verify b"]
    assert desk.states() == ["a doing", "a done", "b doing", "b done"]
    assert desk.event("a", "done").words == "a is done"
    assert Journal(desk.path).events[-1] == end


async def test_what_is_done_already_is_passed_over_and_not_taken_back(desk: Desk) -> None:
    broken = desk.step("b", do=raises(StepFailed("no room")))
    end = await desk.run(desk.step("a", done=gives("it is so")), broken)
    assert (end.outcome, end.reasons) == ("rolled-back", ("no room",))
    assert desk.told == ["do b", "undo b"]
    assert desk.states() == ["a skipped", "b doing", "b failed", "b undoing", "b undone"]


async def test_a_failure_takes_everything_back_in_reverse(desk: Desk) -> None:
    failing = desk.step("c", verify=raises(StepFailed("c is not there", ("line 1", "line 2"))))
    end = await desk.run(desk.step("a"), desk.step("b"), failing, desk.step("d"))
    assert (end.outcome, end.reasons) == ("rolled-back", ("c is not there",))
    assert desk.told[-3:] == ["undo c", "undo b", "undo a"]
    assert "do d" not in desk.told
    assert desk.event("c", "failed").lines == ("line 1", "line 2")


async def test_a_failure_before_anything_was_announced_takes_back_only_what_was_begun(desk: Desk) -> None:
    end = await desk.run(desk.step("a"), desk.step("b", done=raises(StepFailed("cannot look"))))
    assert end.outcome == "rolled-back"
    assert desk.told == ["do a", "verify a", "undo a"]


async def test_when_the_old_state_does_not_come_back_both_reasons_are_said_once(desk: Desk) -> None:
    stuck = desk.step("b", undo=raises(StepFailed("the old one does not start", ("why",))))
    end = await desk.run(desk.step("a"), stuck, desk.step("c", do=raises(StepFailed("the new one died"))))
    assert end.outcome == "failed"
    assert end.reasons == ("the new one died", "undo b: the old one does not start")
    assert desk.told[-2:] == ["undo c", "undo b"]  # a is left: it depends on b
    assert desk.event("b", "undo-failed").lines == ("why",)


async def test_going_back_once_more_begins_where_it_was_stuck(desk: Desk) -> None:
    steps = [desk.step("a"), desk.step("b", undo=raises(StepFailed("stuck"))), desk.step("c")]
    await desk.run(*steps, desk.step("d", do=raises(StepFailed("first reason"))))
    desk.told.clear()
    end = await desk.run(desk.step("a"), desk.step("b"), desk.step("c"), desk.step("d"), direction="rollback")
    assert desk.told == ["undo b", "undo a"]
    assert (end.outcome, end.reasons) == ("rolled-back", ("first reason",))


async def test_a_step_may_forbid_to_take_anything_back(desk: Desk) -> None:
    end = await desk.run(
        desk.step("a"), desk.step("b", do=raises(StepFailed("the kernel holds it", stop=True)))
    )
    assert (end.outcome, end.reasons) == ("failed", ("the kernel holds it",))
    assert "undo a" not in desk.told


async def test_a_step_that_takes_too_long_has_failed(desk: Desk) -> None:
    slow = desk.step("a", do=lambda context: asyncio.sleep(60))
    slow.deadline = 0.05
    end = await desk.run(slow)
    assert (end.outcome, end.reasons) == ("rolled-back", ("do a: not done within 0.05 s",))


async def test_an_undo_that_takes_too_long_has_failed(desk: Desk) -> None:
    slow = desk.step("a", do=raises(StepFailed("x")), undo=lambda context: asyncio.sleep(60))
    slow.undo_deadline = 0.05
    end = await desk.run(slow)
    assert (end.outcome, end.reasons[1]) == ("failed", "undo a: do a: not done within 0.05 s")


async def test_a_timeout_of_the_step_s_own_is_not_taken_for_the_deadline(desk: Desk) -> None:
    end = await desk.run(desk.step("a", do=raises(TimeoutError("the engine is silent"))))
    assert "defect in step a: TimeoutError: the engine is silent" in end.reasons[0]


async def test_a_defect_is_a_failure_with_the_place_it_is_at(desk: Desk) -> None:
    end = await desk.run(desk.step("a"), desk.step("b", do=raises(ZeroDivisionError("oh"))))
    assert end.outcome == "rolled-back"
    assert end.reasons == ("do b: defect in step b: ZeroDivisionError: oh",)
    assert any("test_engine.py" in line for line in desk.event("b", "failed").lines)


async def test_a_file_in_the_way_is_said_in_its_own_words(desk: Desk) -> None:
    end = await desk.run(desk.step("a", do=raises(FileProblem("/etc/x: Read-only file system"))))
    assert end.reasons == ("/etc/x: Read-only file system",)


async def test_a_step_without_undo_is_said_to_have_none(desk: Desk) -> None:
    step = desk.step("a")
    step.undo_words = None
    await desk.run(step, desk.step("b", do=raises(StepFailed("x"))))
    assert "undo a" not in desk.told
    assert desk.states()[-1] == "a nothing-to-undo"


async def test_what_a_dead_process_did_is_looked_at_again_before_the_job_goes_on(desk: Desk) -> None:
    for step in ("a", "b"):
        desk.journal.append(StepEvent(at=1.0, step=step, state="doing"))
        desk.journal.append(StepEvent(at=1.0, step=step, state="done"))
    lost = desk.step("b", verify=_once(raises(StepFailed("it is gone"))))
    end = await desk.run(desk.step("a"), lost, desk.step("c"), direction="resume")
    assert end.outcome == "done"
    assert desk.told == ["verify a", "verify b", "do b", "verify b", "do c", "verify c"]


async def test_what_was_cut_short_but_is_done_is_recorded_as_done_and_can_be_taken_back(desk: Desk) -> None:
    desk.journal.append(StepEvent(at=1.0, step="a", state="doing"))
    failing = desk.step("b", do=raises(StepFailed("x")))
    await desk.run(desk.step("a", done=gives("it is so")), failing, direction="resume")
    assert "a done" in desk.states()
    assert desk.told == ["do b", "undo b", "undo a"]


async def test_text_from_outside_is_cleaned_and_cut_before_it_is_kept(desk: Desk) -> None:
    lines = tuple(f"\x1b[31m{number}\x07" + "x" * 5000 for number in range(500))
    await desk.run(desk.step("a", do=raises(StepFailed("bad\x1b]0;title\x07 news\n", lines))))
    event = desk.event("a", "failed")
    assert event.words == "bad news "
    assert len(event.lines) == 40
    assert event.lines[-1].startswith("499x")
    assert max(map(len, event.lines)) == 1000
    assert desk.path.stat().st_size < 60_000


async def test_progress_is_told_at_most_twice_a_second_and_the_newest_word_counts(desk: Desk) -> None:
    async def talk(context: Context) -> None:
        for number in range(200):
            context.say(f"word {number}", percent=number / 2, eta_s=1.0)
            await asyncio.sleep(0)
        await asyncio.sleep(PROGRESS_S * 1.5)

    await desk.run(desk.step("a", do=talk))
    said = [event for event in desk.journal.events if isinstance(event, Progress)]
    assert [event.words for event in said] == ["word 0", "word 199"]
    assert said[1].percent == 99.5


async def test_whoever_cancels_it_leaves_the_job_as_it_stands(desk: Desk) -> None:
    begun = asyncio.Event()

    async def wait(context: Context) -> None:
        begun.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(desk.run(desk.step("a"), desk.step("b", do=wait)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert desk.states() == ["a doing", "a done", "b doing"]
    assert "undo a" not in desk.told


@pytest.mark.parametrize("state", ["doing", "undoing"])
async def test_nothing_is_done_that_could_not_be_announced(
    desk: Desk, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = desk.journal.append

    def full(event: Any, *, sync: bool = True) -> None:
        if isinstance(event, StepEvent) and event.state == state and event.step == "b":
            raise JournalProblem("no space left on device")
        append(event, sync=sync)

    monkeypatch.setattr(desk.journal, "append", full)
    with pytest.raises(JournalProblem):
        await desk.run(desk.step("a"), desk.step("b"), desk.step("c", do=raises(StepFailed("x"))))
    assert ("do b" if state == "doing" else "undo b") not in desk.told
    assert not any(isinstance(event, JobEnd) for event in Journal(desk.path).events)


async def test_a_word_of_progress_that_cannot_be_written_fails_no_step(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = desk.journal.append

    def full(event: Any, *, sync: bool = True) -> None:
        if isinstance(event, Progress):
            raise JournalProblem("no space left on device")
        append(event, sync=sync)

    async def talk(context: Context) -> None:
        context.say("a word")

    monkeypatch.setattr(desk.journal, "append", full)
    assert (await desk.run(desk.step("a", do=talk))).outcome == "done"


def _once(body: Callable[[Context], Awaitable[None]]) -> Callable[[Context], Awaitable[None]]:
    asked = 0

    async def first(context: Context) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            await body(context)

    return first
