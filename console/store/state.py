"""Where gpuops keeps what it remembers: one directory per host, readable and writable by its owner only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from console.model.site import Site

#: Where root keeps it (file-hierarchy(7)); others below their own state directory (XDG base directories).
SYSTEM_STATE = Path("/var/lib/gpuops")


class StateProblem(Exception):
    """The state directory cannot be used; the message names the path, why, and what to do."""


class State:
    """The state directory: the jobs' directories, the host's lock, the database."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.jobs = directory / "jobs"
        self.lock = directory / "lock"
        self.database = directory / "gpuops.sqlite"

    def create(self) -> None:
        """Make it when it is not there yet. StateProblem when it cannot be written."""
        try:
            self.jobs.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as problem:
            raise StateProblem(
                f"{problem.filename or self.directory}: {problem.strerror}; gpuops keeps its jobs there"
            ) from None


def state_of(site: Site, environment: Mapping[str, str], user: int) -> State:
    """The state directory of a site: of its ``state`` key, beside its simulated box, or the user's own."""
    if site.state is not None:
        return State(Path(site.state))
    if site.simulated is not None:
        return State(Path(site.simulated.directory) / "state")
    if user == 0:
        return State(SYSTEM_STATE)
    base = environment.get("XDG_STATE_HOME", "")
    return State(Path(base if base.startswith("/") else "~/.local/state").expanduser() / "gpuops")
