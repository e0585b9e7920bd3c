"""A machine with a real systemd, as a container has it: PID 1 of namespaces of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from console.transport.container import ContainerRunner
from console.transport.local import LocalRunner

BOOT = Path(__file__).with_name("boot.sh")
NAMESPACES = ("--pid", "--mount", "--uts", "--ipc", "--cgroup")
_JOIN = ("-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w")  # the same, plus its root and working directory
UNITS = "etc/systemd/system"

#: Seconds to the end of booting: 0.3 to 4.
BOOT_S = 60.0

# systemd needs a cgroup to itself; on a host with the old hierarchy, one in each that it looks at.
_HIERARCHIES = ("", "unified", "systemd", "memory", "pids")


class Machine:
    """Boots on ``start``; all that it wrote is gone after ``stop``. Needs root.

    Its network is its own, without a way out, unless ``host_network``. ``folders`` of the host are
    bound into it at the same path.
    """

    def __init__(
        self,
        root: Path,
        scratch: Path,
        name: str = "gpuct",
        *,
        host_network: bool = False,
        folders: Sequence[Path] = (),
    ) -> None:
        self.name = name
        self.pid = 0  # of its init, as this host counts
        self._root = root
        self._scratch = scratch
        self._host_network = host_network
        self._folders = tuple(folders)
        self._groups = [
            group / f"gpuops-{name}-{os.getpid()}"
            for group in (Path("/sys/fs/cgroup", part) for part in _HIERARCHIES)
            if (group / "cgroup.procs").exists()
        ]
        self._unshare: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> Path:
        """The machine's file system as seen from here."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command so that it runs in the machine, as ``lxc-attach`` would do it."""
        return ("nsenter", "-t", str(self.pid), *_JOIN, "--")

    def runner(self) -> ContainerRunner:
        return ContainerRunner(LocalRunner(), self.prefix, self.name)

    def start(self) -> None:
        """Boot, and wait until systemd says it is done. ``RuntimeError`` with its output when it does not."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        log = self._scratch.with_suffix(".log")
        for group in self._groups:
            group.mkdir(exist_ok=True)
        command = ["unshare", "--fork", "--kill-child", *NAMESPACES]
        if not self._host_network:
            command.append("--net")
        command += ["bash", str(BOOT), str(self._root), str(self._scratch), self.name]
        command += map(str, self._folders)
        with log.open("wb") as output:
            self._unshare = subprocess.Popen(
                ["sh", "-c", _ENTER_GROUPS, "sh", *map(str, self._groups), "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ends = time.monotonic() + BOOT_S
        while not self._booted():
            if self._unshare.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the machine did not boot:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)

    def run(self, *argv: str, check: bool = True, stdin: bytes = b"") -> str:
        """Run a command in the machine; its stdout."""
        done = subprocess.run([*self.prefix, *argv], input=stdin, capture_output=True, timeout=60)
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.decode('utf-8', 'replace')}")
        return done.stdout.decode("utf-8", "replace")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the machine, with its folders."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def write_unit(self, name: str, text: str) -> None:
        """Write a unit, or with ``NAME.d/FILE.conf`` a drop-in, and have systemd read it."""
        self.write(f"{UNITS}/{name}", text)
        self.run("systemctl", "daemon-reload")

    def lend_programs(self, folder: Path, *names: str) -> None:
        """Programs in ``folder`` that run the machine's own, for a host that has no systemd itself."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in names or ("systemctl", "journalctl"):
            program = folder / name
            program.write_text(f'#!/bin/sh\nexec {shlex.join(self.prefix)} {name} "$@"\n')
            program.chmod(0o755)

    def stop(self) -> None:
        """Kill its init, which takes every process of the machine with it."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self._unshare is not None:
            self._unshare.kill()
            self._unshare.wait()
        for group in self._groups:
            _remove_groups(group)

    def _booted(self) -> bool:
        self.pid = self.pid or self._init_pid()
        if not self.pid or not (self.root / "run/systemd/private").exists():
            return False
        state = self.run("systemctl", "is-system-running", check=False).strip()
        return state in ("running", "degraded")

    def _init_pid(self) -> int:
        """The child of unshare once it has become systemd, else 0."""
        assert self._unshare is not None
        pid = self._unshare.pid
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for child in children:
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    return int(child)
        return 0


# The shell joins each group, then becomes the command: the cgroup namespace is rooted there.
_ENTER_GROUPS = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs"; shift; done; shift; exec "$@"'


def _remove_groups(group: Path) -> None:
    """The cgroup and those below it. A group empties only some time after its last process died."""
    ends = time.monotonic() + 5
    for directory, _, _ in os.walk(group, topdown=False):
        while True:
            try:
                Path(directory).rmdir()
                break
            except OSError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.05)
