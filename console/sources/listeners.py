"""Who listens on a TCP port of the service's machine, as the host's /proc shows it.

A socket belongs to a process by the inode of one of its descriptors; the table of a network
namespace is in ``/proc/PID/net/tcp`` of any process in it (proc_pid_net(5)).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from console.model.text import clean
from console.sources.holders import cgroup_path, container_of, unit_of

_LISTEN = "0A"  # TCP_LISTEN, include/net/tcp_states.h
_READ_LIMIT = 4 * 1024 * 1024


class Listener(msgspec.Struct, frozen=True):
    """A process with a listening socket. ``pid`` is of the host; None: it is not ours to see."""

    pid: int | None
    name: str
    unit: str | None
    own: bool  # it is a process of the service's unit


class _Process(msgspec.Struct, frozen=True):
    pid: int
    unit: str | None
    own: bool


def listeners(root: Path, port: int, *, container: int | None, unit: str) -> tuple[Listener, ...]:
    """Every process that listens on ``port`` where the service runs; () when nobody does.

    ``container`` is its CT, None for this host. Never raises: what cannot be read is not listed.
    """
    known = tuple(_processes(root, container, unit))
    # Processes of one machine share its network, unless one has been given its own: the unit's come first.
    ordered = sorted(known, key=lambda process: (not process.own, process.pid))
    found: dict[int, Listener] = {}
    seen: set[str] = set()
    for process in ordered:
        namespace = _link(root / "proc" / str(process.pid) / "ns/net") or "the only one"
        if namespace in seen:
            continue
        inodes = _listening(root / "proc" / str(process.pid) / "net", port)
        if inodes is None:
            continue
        seen.add(namespace)
        for inode in inodes:
            found[inode] = _owner(root, inode, ordered)
        if not process.own:
            break  # the machine's own network is that of its first process
    return tuple(found.values())


def _processes(root: Path, container: int | None, unit: str) -> Iterator[_Process]:
    try:
        entries = list((root / "proc").iterdir())
    except OSError:
        return
    for entry in entries:
        if not entry.name.isdecimal():
            continue
        path = cgroup_path(_read(root / "proc" / entry.name / "cgroup"))
        if container_of(path) == container:
            name = unit_of(path)
            yield _Process(int(entry.name), name, name == unit)


def _listening(folder: Path, port: int) -> list[int] | None:
    """Inodes of the sockets that listen on the port; None when there is no table."""
    tables = [_read(folder / name) for name in ("tcp", "tcp6")]
    if not any(tables):
        return None
    found = []
    for line in "".join(table.partition("\n")[2] for table in tables).splitlines():
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTEN and fields[1].endswith(f":{port:04X}"):
            found.append(int(fields[9]))
    return found


def _owner(root: Path, inode: int, processes: list[_Process]) -> Listener:
    wanted = f"socket:[{inode}]"
    for process in processes:
        folder = root / "proc" / str(process.pid)
        try:
            descriptors = list((folder / "fd").iterdir())
        except OSError:  # it ended, or is not ours to look at
            continue
        if any(_link(descriptor) == wanted for descriptor in descriptors):
            return Listener(process.pid, _name(folder), process.unit, process.own)
    return Listener(None, "a process that cannot be seen from here", None, False)


def _name(folder: Path) -> str:
    title = clean(_read(folder / "cmdline").replace("\0", " ")).strip()
    return (title or clean(_read(folder / "comm")).strip() or "?")[:200]


def _link(path: Path) -> str | None:
    try:
        return str(path.readlink())
    except OSError:
        return None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ_LIMIT).decode("utf-8", "replace")
    except OSError:
        return ""
