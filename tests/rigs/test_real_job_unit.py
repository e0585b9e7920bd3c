"""A job under a real systemd: a unit of its own that outlives who asked for it and ends when told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.operations.job_lab import make_old, world
from tests.rigs.systemd.machine import Machine

pytestmark = pytest.mark.rig

TREE = Path(__file__).parents[2]

#: Asks for a job as the console does it, says its id, and waits to be killed.
LAUNCHER = """
import sys, time
from pathlib import Path
from tests.operations import test_launch as here
here.launch.job_command = here.lab_command
print(here.submitted(here.State(Path(sys.argv[1])), here.plan_in(Path(sys.argv[2]), "slow")), flush=True)
time.sleep(600)
"""

#: Takes a job back, with the lab's operation.
ROLLBACK = """
import sys
from pathlib import Path
from tests.operations import test_launch as here
here.launch.job_command = here.lab_command
here.launch.rollback(here.State(Path(sys.argv[1])), sys.argv[2])
"""


class Inside:
    """The machine, with this Python and this tree in it."""

    def __init__(self, machine: Machine, scratch: Path) -> None:
        self.machine = machine
        self.state = scratch / "state"
        self.files = make_old(scratch / "files")
        self.site = scratch / "site.yaml"
        self.site.write_text(f"schema: 1\nstate: {self.state}\n")

    def python(self, *arguments: str | Path) -> list[str]:
        return [
            *self.machine.prefix,
            *("env", f"PYTHONPATH={TREE}", sys.executable, "-B", *map(str, arguments)),
        ]

    def job(self) -> dict[str, Any]:
        """The newest job, as the command inside says it."""
        command = self.python("-m", "console", "jobs", "show", "--json", "--site", self.site)
        said = subprocess.run(command, capture_output=True, timeout=60, check=True, cwd=TREE)
        found: dict[str, Any] = json.loads(said.stdout)
        return found

    def until(self, seen: Callable[[dict[str, Any]], object], within: float = 30) -> dict[str, Any]:
        ends = time.monotonic() + within
        while not seen(job := self.job()):
            assert time.monotonic() < ends, job
        return job


@pytest.fixture
def inside(debian_root: Path, tmp_path: Path) -> Iterator[Inside]:
    shared = tmp_path / "shared"
    shared.mkdir()
    interpreters = {Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
    machine = Machine(debian_root, tmp_path / "machine", folders=[TREE, shared, *interpreters])
    try:
        machine.start()
        yield Inside(machine, shared)
    finally:
        machine.stop()


def test_a_job_is_a_unit_that_outlives_its_launcher_and_ends_as_interrupted_when_told(inside: Inside) -> None:
    launcher = subprocess.Popen(
        inside.python("-c", LAUNCHER, inside.state, inside.files),
        stdout=subprocess.PIPE,
        text=True,
        cwd=TREE,
    )
    assert launcher.stdout is not None
    job = launcher.stdout.readline().strip()
    unit = f"gpuops-job-{job}.service"
    working = inside.until(lambda seen: seen["progress"])
    launcher.kill()
    launcher.wait()

    shown = inside.machine.run("systemctl", "show", unit, "-p", "ActiveState,MainPID,KillMode,ControlGroup")
    told = dict(line.split("=", 1) for line in shown.splitlines())
    assert (told["ActiveState"], told["KillMode"]) == ("active", "mixed")
    assert told["MainPID"] == str(working["pid"])
    assert told["ControlGroup"].endswith(unit)

    inside.machine.run("systemctl", "stop", unit)
    stopped = inside.until(lambda seen: seen["state"] != "running")
    assert (stopped["state"], stopped["id"]) == ("interrupted", job)
    assert "SIGTERM" in stopped["progress"]["words"]

    subprocess.run(inside.python("-c", ROLLBACK, inside.state, job), check=True, timeout=60, cwd=TREE)
    inside.until(lambda seen: seen["state"] == "rolled-back")
    assert world(inside.files) == "old"
    ends = time.monotonic() + 15
    while "not-found" not in (left := inside.machine.run("systemctl", "show", unit, "-p", "LoadState")):
        assert time.monotonic() < ends, left  # nothing of it stays behind
