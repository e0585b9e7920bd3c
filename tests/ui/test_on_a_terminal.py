"""The console on a real pty: what it sends to a terminal that wants no colour, or knows only ASCII."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from console.ui import terminal, themes

TREE = Path(__file__).parents[2]

CONSOLE = """
import sys
from console.ui.app import Console
from tests.ui.scenes import SCENES, SITE, Frozen
sys.exit(Console(Frozen(SCENES["mixed"]()), SITE).run())
"""

ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


class Pty:
    """The console on a terminal of 100 by 30; keeps every byte it sends."""

    def __init__(self, **environment: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONSOLE],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=TREE,
            env={**ENVIRONMENT, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        os.close(slave)
        self.sent = b""

    def wait_for(self, word: bytes, within: float = 15.0) -> None:
        ends = time.monotonic() + within
        while word not in self.sent:
            assert time.monotonic() < ends, f"{word!r} was not sent: {self.sent[-600:]!r}"
            self._read()

    def type(self, keys: str, then: bytes) -> None:
        """Type, and wait until something new has been sent that contains ``then``."""
        before, self.sent = self.sent, b""
        os.write(self._master, keys.encode())
        self.wait_for(then)
        self.sent = before + self.sent

    def escape(self) -> None:
        """An escape by itself is told from a sequence by the pause after it."""
        os.write(self._master, b"\x1b")
        time.sleep(0.25)

    def close(self) -> int:
        self.escape()
        os.write(self._master, b"q")
        ends = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < ends:
            self._read()
        if self.process.poll() is None:
            self.process.kill()
        os.close(self._master)
        return self.process.wait()

    def _read(self) -> None:
        if select.select([self._master], [], [], 0.1)[0]:
            try:
                self.sent += os.read(self._master, 65536)
            except OSError:  # EIO: it has ended
                time.sleep(0.05)


@pytest.fixture
def on_a_pty() -> Iterator[Callable[..., Pty]]:
    """Opens the console with these variables in its environment; ended at the end, come what may."""
    opened: list[Pty] = []

    def start(**environment: str) -> Pty:
        opened.append(Pty(**environment))
        return opened[-1]

    yield start
    for console in opened:
        if console.process.poll() is None:
            console.process.kill()
            console.process.wait()


def colours(sent: bytes) -> set[str]:
    """Parameters of SGR sequences that choose a colour; 39 and 49 are the terminal's own."""
    chosen = set()
    for parameters in re.findall(rb"\x1b\[([\d;]*)m", sent):
        for word in parameters.decode().split(";"):
            if re.fullmatch("3[0-8]|4[0-8]|9[0-7]|10[0-7]", word):
                chosen.add(word)
    return chosen


def test_no_color_sends_no_colour_whatever_the_theme(on_a_pty: Callable[..., Pty]) -> None:
    console = on_a_pty(LANG="C.UTF-8", NO_COLOR="1", COLORTERM="truecolor")
    console.wait_for(b"DEGRADED")
    console.type("T", b"DEGRADED")
    console.type("?", b"escape closes")
    assert console.close() == 0
    assert colours(console.sent) == set()
    assert re.search(rb"\x1b\[(0;)?1[;m]", console.sent)  # bold still sets apart


def test_with_colour_there_is_some(on_a_pty: Callable[..., Pty]) -> None:
    console = on_a_pty(LANG="C.UTF-8", COLORTERM="truecolor")
    console.wait_for(b"DEGRADED")
    assert console.close() == 0
    assert {"38", "48"} <= colours(console.sent)
    assert "▲".encode() in console.sent


def test_a_terminal_that_is_not_utf8_gets_ascii_on_every_page(on_a_pty: Callable[..., Pty]) -> None:
    console = on_a_pty(LANG="C")
    console.wait_for(b"! DEGRADED")
    console.type("l", b"following")
    console.type("/", b"filter")
    console.escape()
    console.type("p", b"train.py")
    console.type("?", b"escape closes")
    console.escape()
    console.type(":", b"Search")
    console.type("theme", b"high-contrast")
    console.escape()
    assert console.close() == 0
    assert console.sent.isascii(), re.findall(rb"[^\x00-\x7f]+", console.sent)[:5]


@pytest.mark.parametrize(
    ("environment", "encoding"),
    [
        ({"LANG": "C"}, "ascii"),
        ({"LANG": "de_DE.UTF-8", "LC_ALL": "C"}, "ascii"),
        ({"LC_CTYPE": "POSIX", "LANG": "de_DE.UTF-8"}, "ascii"),
        ({"LANG": "de_DE.UTF-8"}, None),
        ({"LC_ALL": "", "LANG": "C.UTF-8"}, None),
        ({}, None),
    ],
)
def test_the_locale_tells_what_the_terminal_reads(
    environment: dict[str, str], encoding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Out:
        encoding = "utf-8"

    monkeypatch.setattr(sys, "stdout", Out())
    assert terminal.encoding(environment) == (encoding or "utf-8")


@pytest.mark.parametrize(
    ("wanted", "environment", "theme"),
    [
        (None, {"TERM": "xterm-256color"}, "dark"),
        (None, {"TERM": "xterm", "COLORTERM": "truecolor"}, "dark"),
        (None, {"TERM": "linux"}, "ansi"),
        (None, {"TERM": "xterm-256color", "NO_COLOR": "1"}, "ansi"),
        ("light", {"TERM": "linux"}, "light"),
        ("light", {"NO_COLOR": "1"}, "ansi"),
        ("no-such", {"TERM": "xterm-256color"}, "dark"),
    ],
)
def test_the_theme_fits_the_terminal(wanted: str | None, environment: dict[str, str], theme: str) -> None:
    assert themes.choose(wanted, environment) == theme


def test_the_screen_imports_nothing_that_can_wait() -> None:
    """The first frame is on the screen before any of these is read from disk."""
    program = "import sys, console.ui.app; print(*sorted(sys.modules))"
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=TREE, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    loaded = set(told.stdout.split())
    assert "textual.app" in loaded
    assert loaded.isdisjoint({"plotext", "httpx", "prometheus_client", "yaml", "sqlite3", "pynvml"})
    assert not [name for name in loaded if name.startswith("console.simulator")]
