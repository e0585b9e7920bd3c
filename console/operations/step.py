"""The parts that operations are made of: a step, what it stands on, and how it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from console.model.operation import Plan, PlannedStep
from console.model.profile import Profile
from console.model.site import Site
from console.sources.monitor import Monitor
from console.store.state import State
from console.transport.runner import Runner


class StepFailed(Exception):
    """A step could not be carried out; the message is the reason in words.

    ``lines`` are the evidence. ``stop``: nothing may be undone either, such as when the
    kernel still holds a card's removal.
    """

    def __init__(self, reason: str, lines: tuple[str, ...] = (), *, stop: bool = False) -> None:
        super().__init__(reason)
        self.lines = lines
        self.stop = stop


class Refused(Exception):
    """A plan that cannot be made at all: an unknown profile, a unit that is not ours. Nothing was changed."""


class Say(Protocol):
    """How a step tells where it stands."""

    def __call__(self, words: str, *, percent: float | None = None, eta_s: float | None = None) -> None: ...


def _silent(words: str, *, percent: float | None = None, eta_s: float | None = None) -> None:
    """Nobody listens."""


@dataclass
class Context:
    """What plans are made from and steps act on.

    ``monitor`` follows every source while the context is open (``operations.context.opened``),
    so ``monitor.snapshot()`` is the state of the world by the same rules as the screen's.
    """

    site: Site
    profiles: tuple[Profile, ...]
    monitor: Monitor
    state: State
    clock: Callable[[], float]  # monotonic seconds
    wall_clock: Callable[[], float]  # Unix seconds
    say: Say = field(default=_silent)

    @property
    def host(self) -> Runner:
        return self.monitor.sources.host

    @property
    def service(self) -> Runner:
        """Where the service's systemd is: the container, or the host itself."""
        return self.monitor.sources.service


class Step:
    """One step: whether it is done already, do, verify, undo.

    A job may die at any moment and another may go on, so each method looks at the world
    first and does what is left: ``do`` after a ``do`` that was cut short must end well,
    and so must ``undo`` after a ``do`` or ``undo`` that was. ``deadline`` (seconds) is for
    ``do`` and ``verify`` together, ``undo_deadline`` for ``undo``.
    """

    id: str
    words: str
    undo_words: str | None = None
    deadline: float = 60.0
    undo_deadline: float = 60.0

    async def done(self, context: Context) -> str | None:
        """The evidence when there is nothing left to do, else None."""
        return None

    async def do(self, context: Context) -> None:
        """Change the world. StepFailed with the reason when it cannot be."""
        raise NotImplementedError

    async def verify(self, context: Context) -> str:
        """Look whether it happened: the evidence in words. StepFailed when it did not."""
        raise NotImplementedError

    async def undo(self, context: Context) -> str:
        """Bring back what was before, and look whether it is: the evidence. StepFailed when it is not."""
        return "nothing to undo"

    def planned(self) -> PlannedStep:
        return PlannedStep(self.id, self.words, self.undo_words, self.deadline)


class Operation(Protocol):
    """One kind of change. ``steps`` builds the same steps from the same request, in any process."""

    action: str

    def steps(self, plan: Plan) -> tuple[Step, ...]:
        """The steps of a plan, from its ``request``."""
