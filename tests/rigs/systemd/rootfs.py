"""A Debian 12 root with systemd and Python, by debootstrap: about 300 MB, 40 to 90 seconds.

By hand: ``python -m tests.rigs.systemd.rootfs`` prints where it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.rigs.cache import cache_directory, locked

SUITE = "bookworm"
# All of Python: a service of the host's Debian can then run in here, from a virtual environment bound in.
PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3")


def install() -> Path:
    """The root in the cache, made when it is not complete. It is only ever read: machines write elsewhere.

    Raises ``RuntimeError`` without root or debootstrap, or when that fails.
    """
    root = cache_directory() / f"debian-{SUITE}"
    with locked(root.name):
        if not root.exists():
            _debootstrap(root)
    return root


def _debootstrap(root: Path) -> None:
    program = shutil.which("debootstrap")
    if os.geteuid() != 0 or program is None:
        raise RuntimeError("the systemd rig needs root and debootstrap")
    unfinished = root.with_name(root.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    include = "--include=" + ",".join(PACKAGES)
    command = [program, "--variant=minbase", include, SUITE, str(unfinished)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise RuntimeError("debootstrap failed:\n" + done.stdout.decode("utf-8", "replace")[-2000:])
    shutil.rmtree(unfinished / "var/cache/apt", ignore_errors=True)
    unfinished.rename(root)


if __name__ == "__main__":
    print(install())
