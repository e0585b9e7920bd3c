"""Installs an unmodified SGLang 0.5.23 that serves on a CPU, from PyPI: 2.5 GB, one to four minutes.

By hand: ``python -m tests.rigs.sglang.install`` prints where its Python is.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.rigs.cache import cache_directory, locked

HERE = Path(__file__).parent
VERSION = "0.5.23"
# SGLang asks for 2.14.1; 2.13.0 serves as well.
TORCH = "torch==2.13.0"


class Installation(NamedTuple):
    """A Python that has SGLang, and the folders of the two models."""

    python: Path
    model: Path
    draft: Path


def install() -> Installation:
    """The installation in the cache, made when it is not complete.

    Raises ``RuntimeError`` without a Python 3.11, ``CalledProcessError`` when pip fails.
    """
    root = cache_directory() / f"sglang-{VERSION}"
    found = Installation(root / "venv/bin/python", root / "scripted-model", root / "scripted-draft")
    with locked(root.name):
        _once(root / "packages", HERE / "requirements.txt", lambda: _packages(root / "venv"))
        _once(root / "models", HERE / "make_model.py", lambda: _models(found))
    return found


def _once(stamp: Path, recipe: Path, make) -> None:
    """Make it unless the stamp says that this very recipe was carried out to its end."""
    wanted = hashlib.sha256(recipe.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    make()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(wanted)


def _packages(venv: Path) -> None:
    subprocess.run([_python311(), "-m", "venv", "--clear", str(venv)], check=True)
    pip = [str(venv / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
    for packages in (
        [TORCH],
        ["-r", str(HERE / "requirements.txt")],
        ["--no-deps", f"sglang=={VERSION}"],  # its own list asks for CUDA
    ):
        subprocess.run([*pip, *packages], check=True)


def _python311() -> str:
    """The pins are for Python 3.11."""
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        raise RuntimeError("the SGLang rig needs a python3.11 on PATH")
    return found


def _models(installation: Installation) -> None:
    for folder, architecture in (
        (installation.model, "ScriptedForCausalLM"),
        (installation.draft, "ScriptedDraftForCausalLM"),
    ):
        make = [str(installation.python), str(HERE / "make_model.py"), str(folder), architecture]
        subprocess.run(make, check=True)


if __name__ == "__main__":
    print(install().python)
