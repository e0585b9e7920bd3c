"""The box's SGLang, asked for its version and its flags: it answers as the released package does."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from console.simulator.definition import PYTHON
from console.simulator.spec import VERSION

#: When the package was installed, and how long its source of flags is.
_STAMP = "1787342856000000000-444424"


def asks(words: Sequence[str], program: str) -> bool:
    """Whether an interpreter with these arguments and this program on its input is asked for flags."""
    return list(words[-2:-1]) == ["-"] and words[-1] in ("version", "flags") and "add_cli_args" in program


def answer(question: str, installed: bool) -> tuple[int, str, str]:
    """Exit status, stdout and stderr. ``installed``: the interpreter asked has SGLang."""
    from console.checks.flags.ask import MARKER
    from console.checks.flags.table import shipped

    if not installed:
        said = "importlib.metadata.PackageNotFoundError: No package metadata was found for sglang\n"
        return 1, "", f"Traceback (most recent call last):\n{said}"
    told = {"version": VERSION, "python": PYTHON, "stamp": _STAMP}
    if question == "flags":
        table = shipped(VERSION)
        told |= msgspec.to_builtins(table)
    return 0, f"\n{MARKER}{msgspec.json.encode(told).decode()}\n", ""
