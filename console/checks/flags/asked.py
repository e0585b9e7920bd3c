"""Asks the service's own Python what its SGLang accepts, and remembers the answer per installation.

The cheap question comes first: which version is installed, without importing it. Only when that answer
is new is SGLang imported there, with no card visible to it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from console.checks.flags import ask as script
from console.checks.flags.table import FlagTable
from console.model.text import clean
from console.store.state import State
from console.transport.runner import Runner

CACHE_SCHEMA = 1

#: Seconds for the question that imports nothing.
_VERSION_DEADLINE = 15.0

#: No card, no network. ``-I``: nothing of this process's own Python, nothing of the working directory.
_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES=", "HF_HUB_OFFLINE=1")
_OPTIONS = ("-I", "-B")

#: A reason is cut to this many characters.
_REASON = 200

_PROGRAM = re.compile(r"path=([^;]*?) ;")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")

T = TypeVar("T")


class Installed(msgspec.Struct, frozen=True):
    """The answer to the cheap question. ``stamp`` changes whenever the source of the flags does."""

    version: str
    python: str
    stamp: str = ""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What came of asking. Without a ``table``, ``reason`` says why; ``version`` may be known all the same.

    ``remembered``: the answer is from an earlier time, for the same installation.
    ``note`` is a word on what did not work although the answer came.
    """

    table: FlagTable | None = None
    version: str | None = None
    reason: str | None = None
    remembered: bool = False
    note: str | None = None


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the cache."""

    schema: int = CACHE_SCHEMA
    machine: str
    asked: str  # the Python as it was named
    installed: Installed
    table: FlagTable


class _NoAnswer(Exception):
    """There is no answer; the message is the reason."""


async def ask(runner: Runner, state: State | None, python: str | None, *, deadline: float = 60.0) -> Asked:
    """The table of the SGLang that ``python`` (a path on the runner's machine) would run. Never raises.

    ``deadline`` is in seconds, for both questions together. Without ``state`` nothing is remembered.
    """
    if python is None:
        return Asked(
            reason="the service's Python is not known; name it in the profile, python: /path/bin/python"
        )
    end = time.monotonic() + deadline
    version = None
    try:
        first = min(_VERSION_DEADLINE, deadline)
        installed = await _question(runner, python, "version", first, Installed)
        version = clean(installed.version)
        kept = _remembered(state, runner.name, python, installed)
        if kept is not None:
            return Asked(table=kept, version=version, remembered=True)
        table = await _question(runner, python, "flags", max(1.0, end - time.monotonic()), FlagTable)
    except _NoAnswer as reason:
        return Asked(version=version, reason=str(reason))
    if not table.flags:
        return Asked(version=version, reason=f"{clean(python)}: its SGLang names no flags")
    return Asked(table=table, version=version, note=_remember(state, runner.name, python, installed, table))


async def _question(runner: Runner, python: str, word: str, deadline: float, kind: type[T]) -> T:
    argv = ("env", *_ENVIRONMENT, python, *_OPTIONS, "-", word)
    result = await runner.run(argv, deadline=deadline, stdin=_program())
    if not result.ok:
        reason = (
            result.error.replace("deadline passed", f"no answer within {deadline:.0f} s")
            if result.error
            else ""
        )
        raise _NoAnswer(f"{clean(python)}: {clean(reason or result.reason)[:_REASON]}")
    mark = script.MARKER.encode()
    line = next((one for one in reversed(result.stdout.splitlines()) if one.startswith(mark)), None)
    if line is None:
        raise _NoAnswer(f"{clean(python)}: it printed something else than an answer")
    try:
        return msgspec.json.decode(line.removeprefix(mark), type=kind)
    except (msgspec.DecodeError, RecursionError) as problem:
        raise _NoAnswer(f"{clean(python)}: its answer cannot be read: {clean(str(problem))}") from None


@functools.cache
def _program() -> bytes:
    return Path(script.__file__).read_bytes()


async def service_python(runner: Runner, unit: str) -> tuple[str | None, str | None]:
    """The interpreter of a unit's present command, or None and why it is not known.

    A console script such as ``/opt/sglang/bin/sglang`` has its Python beside it.
    """
    argv = ("systemctl", "show", "-p", "ExecStart", "--value", "--", unit)
    result = await runner.run(argv, deadline=_VERSION_DEADLINE)
    if not result.ok:
        return None, f"{unit}: {clean(result.reason)}"
    programs = _PROGRAM.findall(result.stdout.decode("utf-8", "replace"))
    if not programs:
        return None, f"{unit} has no command"
    program = Path(programs[-1])
    if _PYTHON.fullmatch(program.name):
        return str(program), None
    if program.name == "sglang":
        return str(program.with_name("python")), None
    return None, f"{unit} runs {clean(str(program))}, which is no Python"


# The cache -------------------------------------------------------------------------------------


def _place(state: State, machine: str, python: str, version: str) -> Path | None:
    """``STATE/flags/VERSION-….json``; None for a version that can be no file's name."""
    if not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,99}", version):
        return None
    which = hashlib.sha256(f"{machine}\0{python}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return state.directory / "flags" / f"{version}-{which}.json"


def _remembered(state: State | None, machine: str, python: str, installed: Installed) -> FlagTable | None:
    """The kept table of this very installation; None when there is none that can be read."""
    path = None if state is None else _place(state, machine, python, installed.version)
    if path is None:
        return None
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None  # then it is asked again, and kept anew
    same = (kept.schema, kept.machine, kept.asked, kept.installed) == (
        CACHE_SCHEMA,
        machine,
        python,
        installed,
    )
    return kept.table if same and kept.table.flags else None


def _remember(
    state: State | None, machine: str, python: str, installed: Installed, table: FlagTable
) -> str | None:
    """Keep the table; the reason when it cannot be kept, which costs the next one some seconds."""
    path = None if state is None else _place(state, machine, python, installed.version)
    if path is None:
        return None
    kept = _Kept(machine=machine, asked=python, installed=installed, table=table)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished.write_bytes(msgspec.json.encode(kept))
        unfinished.replace(path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        return f"not remembered: {problem.filename or path}: {problem.strerror}"
    return None
