"""Starts the simulated box as a process of its own, and ends it with everything it left."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

#: Seconds within which the box must say that it is ready.
READY_DEADLINE = 30.0

#: Seconds between SIGTERM and SIGKILL.
END_GRACE = 3.0

_PACKAGE_PARENT = Path(__file__).parents[2]


class RunningBox(NamedTuple):
    """A box that answers."""

    site: Path
    process: subprocess.Popen[bytes]

    def wait(self) -> int:
        """Until the box ends by itself: its exit status."""
        return self.process.wait()


class DemoError(Exception):
    """The box did not come up; the message is its own last word."""


def box_command(directory: Path, options: Sequence[str]) -> list[str]:
    """The command that runs a box in ``directory``. ``-P``: the working directory has no say in imports."""
    return [sys.executable, "-P", "-m", "console.simulator", "--dir", str(directory), *options]


def box_environment() -> dict[str, str]:
    """Ours; in a source tree also with the way to the package, which only our working directory knew."""
    environment = dict(os.environ)
    if _PACKAGE_PARENT.name not in ("site-packages", "dist-packages"):
        paths = [str(_PACKAGE_PARENT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


@contextlib.contextmanager
def running_box(directory: Path | None, options: Sequence[str]) -> Iterator[RunningBox]:
    """A box while the context is open.

    Without ``directory`` it lives in a temporary one that goes with it. Raises DemoError
    when it does not come up. The box is ended whatever happens inside.
    """
    with contextlib.ExitStack() as stack:
        if directory is None:
            # A box that was killed may still hold files; what is left then is left in the system's own place.
            temporary = tempfile.TemporaryDirectory(prefix="gpuops-demo-", ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(temporary))
        errors = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            _mortal(box_command(directory, options)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=box_environment(),
            start_new_session=True,  # Ctrl-C and a lost terminal are ours to answer
        )
        stack.callback(_end, process)
        line = _first_line(process)
        if line is None:
            _end(process)
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().splitlines()
            raise DemoError(_reason(said))
        yield RunningBox(Path(line), process)


def _mortal(command: list[str]) -> list[str]:
    """The command, arranged to get SIGTERM when we die, even by SIGKILL (setpriv, util-linux)."""
    setpriv = shutil.which("setpriv")
    return command if setpriv is None else [setpriv, "--pdeathsig", "TERM", "--", *command]


def _first_line(process: subprocess.Popen[bytes]) -> str | None:
    """The first line of stdout; None when the process ends or is silent for too long."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    ends = time.monotonic() + READY_DEADLINE
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, ends - time.monotonic()))
        data = os.read(descriptor, 4096) if ready else b""
        if not data:
            return None
        line += data
    return os.fsdecode(line).splitlines()[0]


def _reason(said: list[str]) -> str:
    """The box's last word, without argparse's name for it."""
    if not said:
        return "the simulated box did not become ready"
    return said[-1].rpartition(": error: ")[2]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_GRACE)
    if process.stdout is not None:
        process.stdout.close()
