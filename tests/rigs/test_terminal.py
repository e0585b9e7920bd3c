"""The console where operators have it: over ssh, in tmux, on a connection that may drop."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.rigs.ssh.server import SshServer
from tests.rigs.systemd.machine import Machine
from tests.rigs.terminal import Terminal, marked

pytestmark = pytest.mark.rig

REPOSITORY = Path(__file__).parents[2]

#: Seconds from the end of a connection until nothing of the console is left.
GONE_S = 2.0


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    server = SshServer(tmp_path_factory.mktemp("sshd"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


class Run:
    """One run of the console: its command for a shell, and its processes by a mark they all inherit."""

    def __init__(self, arguments: str, before: str = "") -> None:
        self._mark = {"GPUOPS_RIG": uuid.uuid4().hex}
        variables = {"PYTHONPATH": str(REPOSITORY), "LC_ALL": "C.UTF-8", **self._mark}
        settings = shlex.join(f"{name}={value}" for name, value in variables.items())
        self.command = f"{before} exec env {settings} {shlex.quote(sys.executable)} -m console {arguments}"

    def processes(self) -> list[str]:
        return marked(self._mark)

    def wait_until_gone(self, began: float) -> None:
        """Nothing of it is left GONE_S seconds after ``began`` (monotonic)."""
        while left := self.processes():
            assert time.monotonic() - began < GONE_S, f"still there after {GONE_S:g} s: {left}"
            time.sleep(0.02)


class Session(NamedTuple):
    terminal: Terminal
    run: Run


@pytest.fixture
def over_ssh(sshd: SshServer) -> Iterator[Callable[..., Session]]:
    """Opens a console in an ssh session of its own: ``over_ssh(arguments, before)``."""
    opened: list[Session] = []

    def start(arguments: str = "demo", before: str = "") -> Session:
        run = Run(arguments, before)
        opened.append(Session(Terminal(sshd.ssh_argv(run.command, terminal=True)), run))
        return opened[-1]

    yield start
    for session in opened:
        session.terminal.close()


def shows_ready(text: str) -> bool:
    return "READY" in text


def test_it_opens_over_ssh_and_leaves_the_terminal_as_it_was(over_ssh: Callable[..., Session]) -> None:
    session = over_ssh()
    session.terminal.wait_for(shows_ready, 20)
    assert session.terminal.alternate
    assert len(session.run.processes()) >= 2  # the screen and the box
    session.terminal.type("q")
    assert session.terminal.process.wait(5) == 0
    assert not session.terminal.alternate
    session.run.wait_until_gone(time.monotonic())


def test_it_follows_the_size_of_the_window(over_ssh: Callable[..., Session]) -> None:
    session = over_ssh()
    terminal = session.terminal
    terminal.wait_for(shows_ready, 20)
    for columns, rows in ((80, 24), (200, 60), (20, 6), (120, 40)):
        terminal.resize(columns, rows)
        terminal.wait_for(lambda text: fills(text.split("\n"), columns), 5)  # noqa: B023
        assert len(terminal.lines()) == rows
    terminal.wait_for(shows_ready, 5)
    assert len(session.run.processes()) >= 2


def fills(lines: list[str], columns: int) -> bool:
    """It is drawn to the right edge and to the last row."""
    return max(map(len, lines)) > columns * 0.8 and bool(lines[-1])


@pytest.mark.parametrize("before", ["", "trap '' HUP;"], ids=["as usual", "with SIGHUP ignored"])
def test_a_connection_that_drops_leaves_nothing_behind(over_ssh: Callable[..., Session], before: str) -> None:
    session = over_ssh(before=before)
    session.terminal.wait_for(shows_ready, 20)
    assert len(session.run.processes()) >= 2
    began = time.monotonic()
    session.terminal.drop()
    session.run.wait_until_gone(began)


def test_real_children_go_with_the_connection(
    over_ssh: Callable[..., Session], machine: Machine, tmp_path: Path
) -> None:
    """Here journalctl follows a real journal: the machine's programs stand in for those of the host."""
    machine.write_unit("sglang.service", "[Service]\nExecStart=/bin/sleep infinity\n")
    machine.run("systemctl", "start", "sglang.service")
    machine.lend_programs(tmp_path)
    site = tmp_path / "site.yaml"
    site.write_text("schema: 1\nservice: {unit: sglang.service, url: 'http://127.0.0.1:9'}\n")
    session = over_ssh(f"--site {site}", before=f"export PATH={tmp_path}:$PATH;")
    session.terminal.wait_for(lambda text: "STARTING" in text or "sglang.service" in text, 20)
    ends = time.monotonic() + 10
    while not any("journalctl -f" in process for process in session.run.processes()):
        assert time.monotonic() < ends, session.run.processes()
        time.sleep(0.05)
    began = time.monotonic()
    session.terminal.drop()
    session.run.wait_until_gone(began)
    machine.run("systemctl", "stop", "sglang.service")


class Tmux:
    """A tmux server of its own, with one window."""

    def __init__(self) -> None:
        self._socket = f"gpuops-{uuid.uuid4().hex[:8]}"

    def __call__(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._socket, "-f", os.devnull, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait_for(self, seen: Callable[[str], object], within: float = 20) -> None:
        ends = time.monotonic() + within
        while not seen(text := self("capture-pane", "-p")):
            assert time.monotonic() < ends, f"not in the pane within {within:g} s:\n{text}"
            time.sleep(0.05)


def test_in_tmux_it_opens_resizes_and_ends_with_the_server() -> None:
    tmux = Tmux()
    run = Run("demo")
    tmux("new-session", "-d", "-x", "120", "-y", "40", run.command)
    tmux.wait_for(shows_ready)
    tmux("resize-window", "-x", "90", "-y", "30")
    tmux.wait_for(lambda text: fills(text.rstrip("\n").split("\n"), 90), 5)
    began = time.monotonic()
    tmux("kill-server")
    run.wait_until_gone(began)
