"""A real sshd on a loopback port, with keys and a configuration of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from pathlib import Path

SSHD = "/usr/sbin/sshd"
START_S = 10.0

_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/client_key.pub
PidFile {directory}/sshd.pid
AllowUsers {user}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PrintMotd no
AcceptEnv LANG LC_* COLORTERM
"""

_CLIENT = {
    "BatchMode": "yes",
    "IdentitiesOnly": "yes",
    "StrictHostKeyChecking": "yes",
    "LogLevel": "ERROR",
}


class SshServer:
    """Lets the current user in by a key that only this server knows.

    Everything lies in ``directory``; the user's own SSH files are neither read nor written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Make keys, listen. ``RuntimeError`` with sshd's words when it ends, or without sshd."""
        if shutil.which(SSHD) is None:
            raise RuntimeError(f"the ssh rig needs {SSHD}")
        for key in ("host_key", "client_key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpuops rig"]
            subprocess.run([*make, "-f", str(self.directory / key)], check=True, stdin=subprocess.DEVNULL)
        self.port = _free_port()
        config = self.directory / "sshd_config"
        config.write_text(_CONFIG.format(port=self.port, directory=self.directory, user=self.user))
        host_key = (self.directory / "host_key.pub").read_text()
        (self.directory / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own chroot; the package makes it at boot
        log = self.directory / "sshd.log"
        command = [SSHD, "-D", "-f", str(config), "-E", str(log)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        ends = time.monotonic() + START_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"sshd does not listen:\n{log.read_text()}")
            time.sleep(0.02)

    def ssh_argv(self, *command: str, terminal: bool = False) -> list[str]:
        """The client's command line; with ``terminal`` the remote command gets a pty."""
        options = _CLIENT | {"UserKnownHostsFile": str(self.directory / "known_hosts")}
        argv = ["ssh", "-F", "none", "-i", str(self.directory / "client_key"), "-p", str(self.port)]
        for name, value in options.items():
            argv += ["-o", f"{name}={value}"]
        return [*argv, "-tt" if terminal else "-T", f"{self.user}@127.0.0.1", *command]

    def stop(self) -> None:
        """End the listener. Sessions that are open go on, as they do when a host's sshd is restarted."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
