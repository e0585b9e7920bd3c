"""A terminal without a window: a program on a pty, what it draws emulated by pyte."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte


class Terminal:
    """Runs ``argv`` as the leader of a session on a pty of ``columns`` by ``rows``."""

    def __init__(self, argv: Sequence[str], columns: int = 120, rows: int = 40) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._alternate = False
        self._master, slave = pty.openpty()
        _set_size(self._master, columns, rows)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *argv],  # execs: this process becomes the program
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def lines(self) -> list[str]:
        """What stands on the screen, row by row, without the blanks at the end."""
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    def text(self) -> str:
        return "\n".join(self.lines())

    @property
    def alternate(self) -> bool:
        """The program shows its own screen; False once it gave the shell's back."""
        with self._lock:
            return self._alternate

    def wait_for(self, seen: Callable[[str], object], within: float = 15) -> float:
        """Wait until the screen's text fits; the seconds it took. AssertionError with the screen."""
        began = time.monotonic()
        while not seen(text := self.text()):
            waited = time.monotonic() - began
            assert waited < within, f"not on the screen within {within:g} s:\n{text}"
            time.sleep(0.02)
        return time.monotonic() - began

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """As a window manager does it; the program gets SIGWINCH.

        What stood on the screen is wiped: terminals differ in what they keep, so all must be drawn anew.
        """
        with self._lock:
            self._screen.resize(rows, columns)
            self._screen.erase_in_display(2)
        _set_size(self._master, columns, rows)

    def drop(self) -> None:
        """Kill the program, as if the window or the connection had gone without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.drop()
        self._reader.join(5)
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # EIO: nobody holds the other end any more
                return
            if not data:
                return
            with self._lock:
                for number in (b"1049h", b"1049l"):
                    if b"\x1b[?" + number in data:
                        self._alternate = number.endswith(b"h")
                self._stream.feed(data)


def _set_size(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def marked(variables: Mapping[str, str]) -> list[str]:
    """The live processes with these environment variables, each as ``pid command line``."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                found.append(f"{process.name} {command.strip()}")
    return found
