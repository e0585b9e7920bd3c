"""A small operation on real files, a process that carries it out, and ways to kill it at any point.

``python -m tests.operations.job_lab`` is ``console.operations.job`` with this operation alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from console.model.operation import Actor, Direction, Event, JobStart, Plan, PlannedStep, StepEvent
from console.model.profile import Profile
from console.model.site import Site
from console.operations import job as job_process
from console.operations import launch
from console.operations.job import carry_on
from console.operations.step import Context, Step, StepFailed
from console.store.job_directory import JobFile, SiteFile, create_job, new_id
from console.store.journal import Journal
from console.store.state import State

if TYPE_CHECKING:
    import pytest  # a job's process does without it

OLD = "old\n" * 200
NEW = "new\n" * 300

#: Called at each point at which a process may die, with the point's name.
at: Callable[[str], None] = lambda point: None  # noqa: E731  tests put another in its place


class Replace(Step):
    """Replaces a file in two moves, so that there is a time at which it is half done."""

    def __init__(self, path: str, before: str | None, *, looks_first: bool) -> None:
        name = Path(path).name
        self.id = f"replace-{name}"
        self.words = f"replace {name}"
        self.undo_words = f"put {name} back"
        self._path = Path(path)
        self._before = before
        self._looks_first = looks_first

    async def done(self, context: Context) -> str | None:
        at(f"{self.id} look")
        return "new" if self._looks_first and self._is(NEW) else None

    async def do(self, context: Context) -> None:
        at(f"{self.id} do")
        self._put(NEW)
        at(f"{self.id} did")

    async def verify(self, context: Context) -> str:
        if not self._is(NEW):
            raise StepFailed(f"{self._path.name} is not new")
        at(f"{self.id} verified")
        return "new"

    async def undo(self, context: Context) -> str:
        at(f"{self.id} undo")
        if self._before is None:
            self._path.unlink(missing_ok=True)
        else:
            self._put(self._before)
        self._unfinished.unlink(missing_ok=True)
        at(f"{self.id} undid")
        return "old"

    @property
    def _unfinished(self) -> Path:
        return self._path.with_suffix(".half")

    def _is(self, text: str) -> bool:
        return self._path.exists() and self._path.read_text() == text

    def _put(self, text: str) -> None:
        self._unfinished.write_text(text[: len(text) // 2])
        at(f"{self.id} half")
        self._unfinished.write_text(text)
        at(f"{self.id} written")
        self._unfinished.replace(self._path)
        at(f"{self.id} moved")


class Broken(Step):
    """Never works; there is nothing of it to take back."""

    id = "broken"
    words = "do what cannot be done"

    async def do(self, context: Context) -> None:
        at("broken do")
        raise StepFailed("it cannot be done", ("line one", "line two"))


class Slow(Step):
    """Waits until a file is there, and says so meanwhile."""

    id = "slow"
    words = "wait for the file go"
    undo_words = "wait no more"
    deadline = 30.0

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def do(self, context: Context) -> None:
        import asyncio

        while not self._path.exists():
            context.say("waiting for go", percent=50.0)
            await asyncio.sleep(0.02)

    async def verify(self, context: Context) -> str:
        return "go is there"

    async def undo(self, context: Context) -> str:
        return "waits no more"


class Request(msgspec.Struct):
    """What the steps are built from."""

    directory: str
    kind: str  # "plain", "broken" (fails at its end), "slow" (waits for a file in its middle)


def steps_of(plan: Plan) -> tuple[Step, ...]:
    request = msgspec.json.decode(plan.request, type=Request)
    files: list[Step] = [
        Replace(f"{request.directory}/a", OLD, looks_first=True),
        Replace(f"{request.directory}/b", None, looks_first=False),
        Replace(f"{request.directory}/c", OLD, looks_first=False),
    ]
    if request.kind == "broken":
        files.append(Broken())
    if request.kind == "slow":
        files.insert(1, Slow(f"{request.directory}/go"))
    return tuple(files)


def plan_in(directory: Path, kind: str = "plain") -> Plan:
    request = msgspec.Raw(msgspec.json.encode(Request(str(directory), kind)))
    bare = Plan(action="test", title="make it new", target="it", made_at=0.0, request=request, steps=())
    planned: tuple[PlannedStep, ...] = tuple(step.planned() for step in steps_of(bare))
    return msgspec.structs.replace(bare, steps=planned)


def make_old(directory: Path) -> Path:
    """The world before: a and c are old, b is not there, and a file that is nobody's business."""
    directory.mkdir()
    for name in ("a", "c"):
        (directory / name).write_text(OLD)
    (directory / "other").write_text("other")
    return directory


def world(directory: Path) -> str:
    """``old``, ``new``, or what is there instead."""
    found = {path.name: path.read_text() for path in directory.iterdir() if path.name not in ("go",)}
    known = {
        "old": {"a": OLD, "c": OLD, "other": "other"},
        "new": {"a": NEW, "b": NEW, "c": NEW, "other": "other"},
    }
    return next(
        (name for name, files in known.items() if files == found),
        f"between: { ({name: text[:3] for name, text in found.items()}) }",
    )


@asynccontextmanager
async def opened(site: Site, profiles: tuple[Profile, ...], *, state: State) -> AsyncIterator[Context]:
    """A context without sources: these steps look at their files alone."""
    monitor: Any = SimpleNamespace(snapshot=lambda: SimpleNamespace(profile=None))
    yield Context(
        site=site, profiles=profiles, monitor=monitor, state=state, clock=time.monotonic, wall_clock=time.time
    )


def put_on_disk(state: State, plan: Plan) -> str:
    """A job whose process died before it could begin."""
    state.create()
    now = time.time()
    job = new_id(state, plan.action, now)
    file = JobFile(id=job, created_at=now, actor=Actor("tester"), note=None, plan=plan)
    begun = JobStart(at=now, direction="forward", pid=1, start_ticks=0, boot_id="another boot")
    create_job(state, file, SiteFile(site=Site(), profiles=()), begun)
    return job


@contextmanager
def own_children(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The processes of jobs that a test starts end with it, and are no other test's."""
    patch.setattr(launch, "_children", [])
    yield
    for child in launch._children:
        child.kill()
        child.wait()


class PointedJournal(Journal):
    """A journal that is a point before each event, in the middle of its line, and after it."""

    def append(self, event: Event, *, sync: bool = True) -> None:
        name = f"{event.step} {event.state}" if isinstance(event, StepEvent) else type(event).__name__
        at(f"before {name}")
        at(f"inside {name}")
        super().append(event, sync=sync)
        at(f"after {name}")


def in_a_process(
    state: State, job: str, direction: Direction, on_point: Callable[[str], None] | None = None
) -> int:
    """Carry the job on in a forked process: its exit status, negative when a signal ended it."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            global at
            at = on_point or (lambda point: None)
            code = carry_on(
                state,
                job,
                direction,
                steps_of=steps_of,
                opened=opened,
                open_journal=PointedJournal if on_point is not None else Journal,
            )
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def points_of(state: State, job: str, direction: Direction, notes: Path) -> list[str]:
    """Every point that the job passes on its way, in order."""

    def note(point: str) -> None:
        with notes.open("a") as file:
            file.write(point + "\n")

    in_a_process(state, job, direction, note)
    return notes.read_text().splitlines()


def killer(nth: int, torn: Path) -> Callable[[str], None]:
    """Kills its process at the nth point; inside an event half of a line is left in the journal ``torn``."""
    passed = 0

    def kill(point: str) -> None:
        nonlocal passed
        if passed == nth:
            if point.startswith("inside"):
                with torn.open("ab") as journal:
                    journal.write(b'{"event":"step","at":1.0,"st')
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    return kill


if __name__ == "__main__":
    os._exit(job_process.main(steps_of=steps_of, opened=opened))
