"""Which watched load has just come to its end, and how: what the terminal is rung for."""

from __future__ import annotations

from console.model.snapshot import Snapshot
from console.model.state import ServiceState

#: A load that ended sooner than this, in seconds, was waited for with open eyes.
WORTH_S = 20.0

#: A load counts as watched once it was seen for this long: the journal's past is read in pieces.
WATCHED_S = 3.0

_UP = ("ready", "busy", "degraded")
_DEAD = ("crashed", "crash-looping")


def loading(state: ServiceState) -> bool:
    return state.name in ("starting", "warming-up") or (
        state.name == "crash-looping" and state.phase is not None
    )


class Arrivals:
    """Follows the loads that snapshots show. One that a job of this host carries out is the job's to tell."""

    def __init__(self) -> None:
        self._run: str | None = None
        self._since = self._took = 0.0
        self._of_job = False
        self._crash_told = False

    def look(self, snapshot: Snapshot, job: str | None) -> str | None:
        """How the load that was watched ended, once; None as long as there is nothing new.

        ``job`` is the state of the host's job: running, interrupted, or None.
        """
        state, unit = snapshot.state, snapshot.unit.value
        if loading(state):
            self._note(snapshot, job)
            return None
        run = None if unit is None else unit.invocation_id
        if self._run is None or state.name not in (*_UP, *_DEAD, "stopped"):
            return None
        if state.name in _UP and (run != self._run or snapshot.load.fired_up_at is None):
            return None  # of another run, or what it seems to be before the log has been read
        worth = self._took >= WORTH_S and snapshot.now - self._since >= WATCHED_S and not self._of_job
        self._run = None
        if state.name in _DEAD:
            told, self._crash_told = self._crash_told, True
            return self._crashed(snapshot) if worth and not told else None
        self._crash_told = False
        if state.name == "stopped" or not worth:
            return None
        return f"{_name(snapshot)} is {state.name}"

    def _note(self, snapshot: Snapshot, job: str | None) -> None:
        unit = snapshot.unit.value
        run = None if unit is None else unit.invocation_id
        if run is None:
            return
        if run != self._run:
            # An attempt that systemd makes after a crash is no news when it fails again.
            self._crash_told = self._crash_told and bool(unit is not None and unit.restarts)
            self._run, self._since, self._of_job = run, snapshot.now, False
        if job is not None:  # the job may end a moment before the console sees that the engine is up
            self._of_job = job == "running"
        self._took = snapshot.state.elapsed_s or 0.0

    def _crashed(self, snapshot: Snapshot) -> str:
        why = next(iter(snapshot.state.reasons), "")
        return f"{_name(snapshot)} crashed: {why}" if why else f"{_name(snapshot)} crashed"


def _name(snapshot: Snapshot) -> str:
    return snapshot.profile.name if snapshot.profile is not None else snapshot.site.service.unit
