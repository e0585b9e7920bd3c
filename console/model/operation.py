"""What changes the host: the plan as it is shown and confirmed, and the journal of its job."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from console.model.finding import Finding, overall

OPERATION_SCHEMA = 1

#: A job's state. ``interrupted``: its journal has no end, and no process of it lives.
JobState = Literal["running", "done", "failed", "rolled-back", "interrupted"]

#: Which way a job's process goes through the steps.
Direction = Literal["forward", "resume", "rollback"]

StepState = Literal[
    "waiting", "doing", "done", "skipped", "failed", "undoing", "undone", "undo-failed", "nothing-to-undo"
]

Outcome = Literal["done", "rolled-back", "failed"]


class FileChange(msgspec.Struct, frozen=True):
    """A file that a plan replaces. None: the file is not there before, or not any more after."""

    machine: str  # "host", "ct:129"
    path: str
    before: str | None
    after: str | None

    def diff(self) -> tuple[str, ...]:
        """Unified, three lines of context, without newlines; empty when nothing changes."""
        return tuple(
            difflib.unified_diff(
                (self.before or "").splitlines(),
                (self.after or "").splitlines(),
                f"{self.path} now" if self.before is not None else "nothing",
                f"{self.path} after" if self.after is not None else "nothing",
                lineterm="",
            )
        )


class PlannedStep(msgspec.Struct, frozen=True):
    """One step in plain words. ``undo`` None: there is nothing to take back."""

    id: str
    words: str
    undo: str | None = None
    deadline_s: float = 60.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The very plan that would run: what ``--dry-run`` and the confirmation show is what the job carries out.

    ``request`` holds the operation's own parameters as JSON: all that its steps are built from,
    so that another process, after a crash, builds the same steps. It holds no secrets.
    """

    schema: Literal[1] = 1
    action: str  # "switch", "restart", "stop", "start", "rebind", …
    title: str  # "switch to qwen3.5-397b-nvfp4"
    target: str  # what the operator names to confirm: a profile, a unit, "vm 100"
    made_at: float  # Unix seconds
    request: msgspec.Raw = msgspec.Raw(b"null")
    steps: tuple[PlannedStep, ...]
    changes: tuple[FileChange, ...] = ()
    findings: tuple[Finding, ...] = ()
    costs: tuple[str, ...] = ()  # what it costs: the time of a load, the requests in flight
    typed: bool = False  # confirmed only by typing ``target``

    @property
    def blocked(self) -> bool:
        """Whether the pre-flight forbids it: nothing may be changed."""
        return overall(self.findings) == "fail"


class Actor(msgspec.Struct, frozen=True):
    """Who asked for it. ``connection`` is SSH_CONNECTION: address and port of the client, then ours."""

    user: str
    connection: str | None = None


class JobStart(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="event"):
    """A process begins to carry the job out. ``start_ticks`` tells it from a later one with the same pid."""

    at: float
    direction: Direction
    pid: int
    start_ticks: int
    boot_id: str


class StepEvent(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="event"):
    """A step changes its state. Before anything is changed, ``doing`` or ``undoing`` is on the disk."""

    at: float
    step: str
    state: StepState
    words: str = ""  # evidence, or why it failed
    lines: tuple[str, ...] = ()  # the lines that show why: journal lines, a command's output


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress", tag_field="event"):
    """Where the current step stands. Not worth an fsync."""

    at: float
    step: str
    words: str
    percent: float | None = None
    eta_s: float | None = None


class KernelLine(msgspec.Struct, frozen=True, kw_only=True, tag="kernel", tag_field="event"):
    """Something the kernel said about a card while the job ran."""

    at: float
    words: str


class JobEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="event"):
    """How the job ended. ``reasons``: first why it failed, then why the old state did not come back."""

    at: float
    outcome: Outcome
    reasons: tuple[str, ...] = ()


class Notice(msgspec.Struct, frozen=True, kw_only=True, tag="notice", tag_field="event"):
    """Something that went wrong beside the job and did not stop it, such as an audit trail that is full."""

    at: float
    words: str


Event = JobStart | StepEvent | Progress | KernelLine | Notice | JobEnd


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a job as it stands."""

    planned: PlannedStep
    state: StepState = "waiting"
    words: str = ""
    lines: tuple[str, ...] = ()
    began: float | None = None  # Unix seconds
    ended: float | None = None


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its journal shows it."""

    id: str
    plan: Plan
    actor: Actor
    note: str | None
    created_at: float
    state: JobState
    steps: tuple[StepView, ...]
    pid: int | None = None
    direction: Direction = "forward"
    progress: Progress | None = None
    kernel: tuple[KernelLine, ...] = ()
    notices: tuple[Notice, ...] = ()
    ended_at: float | None = None
    reasons: tuple[str, ...] = ()

    @property
    def begun(self) -> bool:
        """Whether anything on the host may have been changed by it."""
        return any(step.began is not None for step in self.steps)

    @property
    def turned_back(self) -> bool:
        """Whether it began to take its steps back: from then on it only goes back."""
        return any(
            step.state in ("undoing", "undone", "undo-failed", "nothing-to-undo") for step in self.steps
        )

    @property
    def outcome(self) -> str | None:
        """In words; None while it runs or was interrupted."""
        if self.state in ("running", "interrupted"):
            return None
        failed = "failed and not rolled back" if self.begun else "failed, nothing was changed"
        words = {"done": "done", "rolled-back": "rolled back", "failed": failed}[self.state]
        return f"{words}: {'; '.join(self.reasons)}" if self.reasons else words


_ENDED: frozenset[StepState] = frozenset(
    {"done", "skipped", "failed", "undone", "undo-failed", "nothing-to-undo"}
)


def job_view(
    job: str,
    plan: Plan,
    actor: Actor,
    note: str | None,
    created_at: float,
    events: Iterable[Event],
    alive: bool,
) -> JobView:
    """Fold a job's journal. ``alive``: whether the process of the last ``JobStart`` still lives."""
    steps = {planned.id: StepView(planned=planned) for planned in plan.steps}
    start: JobStart | None = None
    end: JobEnd | None = None
    progress: Progress | None = None
    kernel: list[KernelLine] = []
    notices: list[Notice] = []
    for event in events:
        if isinstance(event, JobStart):
            start, end, progress = event, None, None
        elif isinstance(event, JobEnd):
            end, progress = event, None
        elif isinstance(event, Progress):
            progress = event
        elif isinstance(event, KernelLine):
            kernel.append(event)
        elif isinstance(event, Notice):
            notices.append(event)
        elif event.step in steps:
            steps[event.step] = _moved(steps[event.step], event)
            progress = None
    state: JobState = end.outcome if end is not None else "running" if alive else "interrupted"
    return JobView(
        id=job,
        plan=plan,
        actor=actor,
        note=note,
        created_at=created_at,
        state=state,
        steps=tuple(steps.values()),
        pid=start.pid if start is not None and end is None else None,
        direction=start.direction if start is not None else "forward",
        progress=progress,
        kernel=tuple(kernel),
        notices=tuple(notices),
        ended_at=end.at if end is not None else None,
        reasons=end.reasons if end is not None else (),
    )


def _moved(view: StepView, event: StepEvent) -> StepView:
    if event.state == "nothing-to-undo" and view.state != "doing":
        return view  # that it failed, or was done, says more
    began = event.at if event.state in ("doing", "undoing") else view.began
    return StepView(
        planned=view.planned,
        state=event.state,
        words=event.words or view.words,
        lines=event.lines or view.lines,
        began=began,
        ended=event.at if event.state in _ENDED else None,
    )


def plan_words(plan: Plan) -> Sequence[str]:
    """The plan as numbered lines of plain words, without findings and changes."""
    width = len(str(len(plan.steps)))
    return [f"{number:>{width}}  {step.words}" for number, step in enumerate(plan.steps, 1)]
