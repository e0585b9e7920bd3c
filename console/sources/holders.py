"""Whose processes are on the cards: container, unit and the pid inside, by cgroup and NSpid.

NVML names processes by the pids of this host. A Proxmox container's cgroup is
``lxc/<CT>/ns/…`` (pve-container, LXC.pm); systemd's is ``…/<slice>/<unit>``.
"""

from __future__ import annotations

import re
from pathlib import Path

from console.model.card import Address, Holder, NvmlSample
from console.model.text import clean

_CONTAINER = re.compile(r"/lxc(?:\.payload)?[./](\d+)(?:/|$)")
_UNIT = re.compile(r"/([^/]+\.(?:service|scope))(?=/|$)")
_READ_LIMIT = 65536


def read_holders(root: Path, sample: NvmlSample, *, container: int | None, unit: str) -> tuple[Holder, ...]:
    """Every process NVML lists, largest first; an orphan is one outside the service's own unit.

    A process that is gone by the time it is asked about is left out.
    """
    memory: dict[int, dict[Address, int | None]] = {}
    for address, processes in sample.processes.items():
        for process in processes:
            memory.setdefault(process.pid, {})[address] = process.memory_bytes
    found = (_holder(root, pid, held, container, unit) for pid, held in memory.items())
    return tuple(
        sorted(
            (holder for holder in found if holder is not None),
            key=lambda holder: (-sum(size or 0 for size in holder.memory_bytes.values()), holder.pid),
        )
    )


def _holder(
    root: Path, pid: int, held: dict[Address, int | None], container: int | None, unit: str
) -> Holder | None:
    folder = root / "proc" / str(pid)
    status, groups = _read(folder / "status"), _read(folder / "cgroup")
    if status is None or groups is None:  # it has ended, perhaps between the two
        return None
    path = cgroup_path(groups)
    owner = container_of(path)
    name = unit_of(path)
    return Holder(
        pid=pid,
        inner_pid=_inner_pid(status) if owner is not None else None,
        name=_name(folder),
        container=owner,
        unit=name,
        memory_bytes=held,
        orphan=not (owner == container and name == unit),
    )


def container_of(path: str) -> int | None:
    """The Proxmox container that a cgroup belongs to; None: the host itself."""
    inside = _CONTAINER.search(path)
    return int(inside[1]) if inside else None


def unit_of(path: str) -> str | None:
    """The unit that a cgroup belongs to: the innermost is the one that was started, outer ones contain it."""
    units = _UNIT.findall(path)
    return _unescape(units[-1]) if units else None


def cgroup_path(text: str) -> str:
    """The unified path, or on a v1 hierarchy that of systemd's own controller.

    The kernel writes ``(deleted)`` behind the group of a process that has outlived it (cgroups(7)).
    """
    found = ""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers in ("", "name=systemd") and len(path) > len(found):
            found = path
    return found.removesuffix(" (deleted)")


def _inner_pid(status: str) -> int | None:
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            pids = line.split()[1:]
            return int(pids[-1]) if len(pids) > 1 and pids[-1].isdecimal() else None
    return None


def _name(folder: Path) -> str:
    """The command as typed (SGLang titles its processes), or the kernel's 15 characters of it."""
    command = (_read(folder / "cmdline") or "").split("\0")
    title = clean(" ".join(part for part in command if part)).strip()
    return (title or clean(_read(folder / "comm") or "").strip() or "?")[:200]


def _unescape(unit: str) -> str:
    """systemd writes ``\\x2d`` for ``-`` in some names."""
    return clean(re.sub(r"\\x([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), unit))


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_READ_LIMIT).decode("utf-8", "replace")
    except OSError:
        return None
