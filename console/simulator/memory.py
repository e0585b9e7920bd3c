"""A directory in memory for the box's many small files: on a busy disk they alone would take a second."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

MEMORY = Path("/dev/shm")
_PREFIX = "gpuops-box-"

#: A directory younger than this may be one whose box has not locked it yet.
_YOUNG_S = 10.0


class MemoryDirectory:
    """A directory under ``MEMORY``, locked for as long as its box lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def take() -> MemoryDirectory | None:
    """A new one, or None where there is no memory to write to. What killed boxes left is removed."""
    _sweep()
    try:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=MEMORY))
        path.chmod(0o755)
    except OSError:
        return None
    return MemoryDirectory(path)


def _sweep() -> None:
    for path in MEMORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another's, or just gone: not ours to remove
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_ctime < _YOUNG_S:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
