"""One process of a unit as the host's /proc shows it: found by the pid that its own systemd counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from console.model.text import clean
from console.sources.holders import cgroup_path, container_of

#: Arguments and environment together may be a quarter of the stack's limit: 2 MiB, rarely more (execve(2)).
_LARGEST = 8 * 1024 * 1024
_SMALL = 65536


class ProcessProblem(Exception):
    """The process was not found or not read; the message says why."""


@dataclass(frozen=True)
class Process:
    """``pid`` as this host counts, ``inner_pid`` as its own machine does.

    ``environ`` is the initial environment; None when it may not be read, for the reason in ``problem``.
    """

    pid: int
    inner_pid: int
    argv: tuple[str, ...]
    environ: dict[str, str] | None
    problem: str | None = None


def engine_process(
    root: Path,
    main_pid: int,
    control_group: str | None,
    container: int | None,
    wanted: Callable[[Sequence[str]], bool],
) -> Process:
    """The unit's main process, or the one below it that is ``wanted``, should the main one be a wrapper.

    Raises ProcessProblem.
    """
    pid = _find(root, main_pid, control_group, container)
    main = _read(root, pid, main_pid)
    if wanted(main.argv) or control_group is None:
        return main
    for other in _pids(root):
        path = _cgroup(root, other)
        if other != pid and path is not None and _of_unit(path, control_group, container):
            argv = _words(root / "proc" / str(other) / "cmdline")
            inner = _inner_pid(root, other)
            if inner is not None and wanted(argv or ()):
                return _read(root, other, inner)
    return main


def _find(root: Path, main_pid: int, control_group: str | None, container: int | None) -> int:
    """The host's pid of process ``main_pid`` of the unit's machine."""
    path = _cgroup(root, main_pid)
    if container is None and path is not None and (control_group is None or path == control_group):
        return main_pid
    found = []
    for pid in _pids(root):
        if _inner_pid(root, pid) == main_pid:
            path = _cgroup(root, pid)
            if path is not None and _of_unit(path, control_group, container):
                found.append(pid)
    if len(found) == 1:
        return found[0]
    if found:
        raise ProcessProblem(
            f"{len(found)} processes of this host have pid {main_pid} in a unit of that name"
        )
    raise ProcessProblem(f"process {main_pid} of the unit is not in this host's /proc: it ended just now")


def _of_unit(path: str, control_group: str | None, container: int | None) -> bool:
    if container is not None and container_of(path) not in (None, container):
        return False
    return control_group is None or path.endswith(control_group)


def _pids(root: Path) -> Iterator[int]:
    try:
        entries = [entry.name for entry in (root / "proc").iterdir()]
    except OSError as problem:
        raise ProcessProblem(f"{root / 'proc'}: {problem.strerror}") from None
    yield from sorted(int(name) for name in entries if name.isdecimal())


def _cgroup(root: Path, pid: int) -> str | None:
    try:
        text = _bytes(root / "proc" / str(pid) / "cgroup", _SMALL).decode("utf-8", "replace")
    except OSError:  # it ended, or is not ours to look at
        return None
    return cgroup_path(text)


def _inner_pid(root: Path, pid: int) -> int | None:
    """The pid in the innermost namespace: the last of NSpid."""
    try:
        status = _bytes(root / "proc" / str(pid) / "status", _SMALL).decode("utf-8", "replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            last = line.split()[-1]
            return int(last) if last.isdecimal() else None
    return pid  # a kernel without pid namespaces


def _read(root: Path, pid: int, inner_pid: int) -> Process:
    folder = root / "proc" / str(pid)
    argv = _words(folder / "cmdline")
    if not argv:
        raise ProcessProblem(f"process {pid}: its argument list is empty; it ended just now")
    try:
        content = _bytes(folder / "environ", _LARGEST)
    except OSError as problem:
        reason = f"{folder / 'environ'}: {problem.strerror}"
        return Process(pid, inner_pid, argv, None, reason)
    return Process(pid, inner_pid, argv, environment_of(content))


def environment_of(content: bytes) -> dict[str, str]:
    """``/proc/PID/environ``: of a name that is there twice the first counts, as getenv(3) has it.

    Bytes that are no UTF-8 are written as escapes.
    """
    found: dict[str, str] = {}
    for pair in content.split(b"\0"):
        name, equals, value = pair.decode("utf-8", "backslashreplace").partition("=")
        if equals and name:
            found.setdefault(name, value)
    return found


def words_of(content: bytes) -> tuple[str, ...]:
    """``/proc/PID/cmdline``: words that end with a zero byte; one that rewrote its title has blanks."""
    if not content:
        return ()
    return tuple(word.decode("utf-8", "backslashreplace") for word in content.rstrip(b"\0").split(b"\0"))


def _words(path: Path) -> tuple[str, ...]:
    try:
        return words_of(_bytes(path, _LARGEST))
    except OSError as problem:
        raise ProcessProblem(f"{clean(str(path))}: {problem.strerror}") from None


def _bytes(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        return file.read(limit)
