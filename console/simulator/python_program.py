"""The service's Python on the box: what it sees in os.environ after its sitecustomize.py.

The file is not run: of what it does to ``os.environ`` the plain assignments and ``setdefault`` of
constants are read from it, so an operator who edits it on the box sees what changes.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path

SITECUSTOMIZE = "/opt/sglang/lib/python3.11/site-packages/sitecustomize.py"
VERSION = "3.11.9"

#: The words of the question behind ``-c PROGRAM``: pid, mark, beginnings of names to leave out, interpreter.
_WORDS = 4


def answer(words: Sequence[str], rootfs: Path, process: Path | None) -> tuple[int, str, str]:
    """Exit status, stdout and stderr. ``process`` is the /proc folder of the process asked about.

    The one question it knows is what the interpreter of a process sees in its environment.
    """
    if "-c" not in words or "/environ" not in words[words.index("-c") + 1]:
        return 1, "", "python: the box knows only the question for the environment\n"
    asked = words[words.index("-c") + 2 :]
    if len(asked) < _WORDS or process is None:
        return 1, "", "FileNotFoundError: [Errno 2] No such file or directory: '/proc/…/environ'\n"
    mark, without = asked[1], tuple(name for name in asked[2].split(",") if name)
    environment = _initial(process)
    if without:
        environment = {name: value for name, value in environment.items() if not name.startswith(without)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    place = rootfs / SITECUSTOMIZE.lstrip("/")
    loaded = {}
    if place.is_file():
        loaded["sitecustomize"] = SITECUSTOMIZE
        try:
            _apply(place.read_text(encoding="utf-8"), environment)
        except (SyntaxError, ValueError) as problem:
            # As the site module does it: it says so, and goes on.
            said = f"Error in sitecustomize; set PYTHONVERBOSE for traceback:\nSyntaxError: {problem}\n"
            return 0, _told(mark, environment, {}), said
    return 0, _told(mark, environment, loaded), ""


def _told(mark: str, environment: dict[str, str], loaded: dict[str, str]) -> str:
    told = {"environment": environment, "loaded": loaded, "version": VERSION}
    return f"{mark}{json.dumps(told)}{mark}\n"


def _initial(process: Path) -> dict[str, str]:
    pairs = (process / "environ").read_text(encoding="utf-8").split("\0")
    return dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)


def _apply(source: str, environment: dict[str, str]) -> None:
    """``os.environ["A"] = "1"`` and ``os.environ.setdefault("A", "1")``, in the file's order."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(
                targets=[
                    ast.Subscript(value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str(name)))
                ],
                value=ast.Constant(value=str(value)),
            ):
                environment[name] = value
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(attr="setdefault", value=ast.Attribute(attr="environ")),
                    args=[ast.Constant(value=str(name)), ast.Constant(value=str(value))],
                )
            ):
                environment.setdefault(name, value)
