"""Where rigs keep what they install: ``$GPUOPS_RIG_CACHE``, else ``.rigs/`` in the checkout."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def cache_directory() -> Path:
    """The folder, which exists afterwards. It is never emptied: delete it to install again."""
    named = os.environ.get("GPUOPS_RIG_CACHE")
    directory = Path(named) if named else Path(__file__).parents[2] / ".rigs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One installer at a time: parallel test runs wait for the first."""
    with (cache_directory() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
