"""What a plan of the service's life is made from: all that its steps need, in any process."""

from __future__ import annotations

import msgspec

from console.model.operation import Plan
from console.model.profile import Profile


class Orphan(msgspec.Struct, frozen=True):
    """A process that holds cards and is not the service's, and that the plan ends.

    ``pid`` and ``start_ticks`` are of the host: together they name one process, also when the
    pid is given out again.
    """

    pid: int
    start_ticks: int
    name: str
    where: str  # "CT 131", "this host"

    @property
    def words(self) -> str:
        return f"{self.name} (pid {self.pid}, {self.where})"


class ServiceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the service, as it was planned.

    ``invocation`` is of the run that the plan saw; ``was_running`` says whether it served or was
    about to, so that the way back starts it again. Texts are those of the unit's own file: None
    where there is none. ``cards`` are the addresses whose memory must be free before a start.
    """

    unit: str
    path: str  # of the unit's file, where its systemd is
    invocation: str | None = None
    was_running: bool = False
    was_enabled: bool = False
    enable: bool = False  # auto-start once the change is proven
    old_text: str | None = None
    new_text: str | None = None
    old: Profile | None = None
    new: Profile | None = None
    cards: tuple[str, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    stop_timeout_s: float = 90.0  # systemd kills what is left after this
    old_ready_s: float = 900.0  # the longest that the way back waits for the old one

    @property
    def replaces(self) -> bool:
        """Whether the unit's file changes."""
        return self.new_text is not None


def request_of(plan: Plan) -> ServiceRequest:
    """The request of a plan. msgspec.DecodeError for one that is not of these operations."""
    return msgspec.json.decode(plan.request, type=ServiceRequest)
