"""Commands as an operator types them, on a box: what they print, ask, and end with."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from console.cli import run
from console.operations import context as contexts
from console.operations import launch
from console.operations.job import carry_on
from console.operations.registry import steps_of
from tests.operations.job_lab import own_children
from tests.operations.service_lab import ServiceLab


@contextlib.contextmanager
def forked_jobs(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs that commands start are forked from the test and share its short waits."""
    patch.setattr(launch, "submit", partial(launch.submit, starter=forking))
    with own_children(patch):
        yield


class Forked:
    """A job's process, forked from the test so that it shares its short waits."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def forking(state: object, job: str, direction: str, site: object) -> Forked:
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            with Path(os.devnull).open("r+b") as nowhere:
                for number in (0, 1, 2):
                    os.dup2(nowhere.fileno(), number)
            code = carry_on(state, job, direction, steps_of=steps_of, opened=contexts.opened)  # type: ignore[arg-type]
        finally:
            os._exit(code)
    return Forked(pid)


class Typed:
    """What came of one command line."""

    def __init__(self, lab: ServiceLab, *words: str) -> None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.code = run(["--site", str(lab.site_path), *words])
        self.out, self.err = out.getvalue(), err.getvalue()


def on_a_terminal(lab: ServiceLab, answer: bytes, *words: str, asks: bytes = b"[y/N]") -> tuple[int, str]:
    """Type a command on a terminal of its own and answer its question: exit status and all that was shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        code = 99
        try:
            sys.stdin = os.fdopen(0, closefd=False)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            os.environ["TERM"] = "xterm-256color"
            launch._children.clear()  # a gpuops of its own has started no job before
            code = run(["--site", str(lab.site_path), *words])
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:  # noqa: BLE001  whoever reads the terminal reads why
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while data := os.read(terminal, 65536):
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    ends = time.monotonic() + 20
    while asks not in shown and time.monotonic() < ends:
        time.sleep(0.02)
    os.write(terminal, answer)
    _, status = os.waitpid(pid, 0)
    reader.join(5)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), shown.decode("utf-8", "replace")
