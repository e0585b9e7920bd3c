"""What this host remembers of its loads: asked when one begins, told when the engine is up."""

from __future__ import annotations

from console.model.load_times import Expected, seen_whole
from console.model.profile import Profile
from console.model.snapshot import Snapshot
from console.store.state import State, StateProblem

#: States of an engine that is up; one with complaints has loaded all the same.
_UP = frozenset({"ready", "busy", "degraded"})


class LoadMemory:
    """Loads of the past, and the one that is watched. It never fails: ``problem`` says what did.

    ``keep`` is False where nothing may be written.
    """

    def __init__(self, state: State, *, keep: bool = True) -> None:
        self._state = state
        self._keep = keep
        self._seen: set[str] = set()
        self._told: set[str] = set()
        self._problem: str | None = None

    def expected(self, profile: Profile) -> Expected | None:
        """What this profile's loads took here; None when none is known. It may wait for a disk."""
        from console.store.loads import expected  # SQLite is for those who see a load

        try:
            return expected(self._state, profile.name)
        except StateProblem as problem:
            self._problem = f"earlier loads are not known: {problem}"
            return None

    def new_load(self, snapshot: Snapshot) -> bool:
        """Whether the snapshot shows a load, whole and up, that this memory was not told of yet."""
        if not self._keep or snapshot.state.name not in _UP or snapshot.profile is None:
            return False
        if snapshot.load.invocation in self._seen or not seen_whole(snapshot.load, snapshot.unit.value):
            return False
        self._seen.add(str(snapshot.load.invocation))
        return True

    def record(self, snapshot: Snapshot) -> None:
        """Remember the load that the snapshot shows, unless somebody else has. It waits for the disk."""
        from console.store.loads import record

        assert snapshot.profile is not None
        try:
            self._state.create()
            record(self._state, snapshot.profile.name, snapshot.load)
        except StateProblem as problem:
            self._problem = f"the times of this load are not remembered: {problem}"

    def problem(self) -> str | None:
        """What could not be read or kept, each told once."""
        problem, self._problem = self._problem, None
        if problem is None or problem in self._told:
            return None
        self._told.add(problem)
        return problem
