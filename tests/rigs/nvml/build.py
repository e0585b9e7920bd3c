"""Compiles the stand-in for libnvidia-ml.so.1 and says how a program is made to load it.

By hand: ``LD_LIBRARY_PATH=$(python tests/rigs/nvml/build.py DIRECTORY) nvitop -1``
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("stub.c")
LIBRARY = "libnvidia-ml.so.1"
COMPILE = ("cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread")


def build(directory: Path) -> Path:
    """The compiled library below ``directory``, in a folder of its own; kept while the source is the same.

    Raises ``CalledProcessError`` with the compiler's words, or ``FileNotFoundError`` without a compiler.
    """
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + " ".join(COMPILE).encode()).hexdigest()[:16]
    library = directory / key / LIBRARY
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_name(f"{LIBRARY}.{os.getpid()}")
        command = [*COMPILE, "-Wl,-soname," + LIBRARY, "-o", str(unfinished), str(SOURCE)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        unfinished.replace(library)
    return library


def with_library(library: Path, **settings: str) -> list[str]:
    """The start of a command that finds ``library`` first: ``env LD_LIBRARY_PATH=… STUB_…=…``."""
    variables = {"LD_LIBRARY_PATH": str(library.parent), **settings}
    return ["env", *(f"{name}={value}" for name, value in variables.items())]


if __name__ == "__main__":
    print(build(Path(sys.argv[1])).parent)
