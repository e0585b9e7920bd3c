"""The host's RAM: what is free, and what the control groups of the service still allow."""

from __future__ import annotations

import re
from pathlib import Path

from console.model.host_cache import HostMemory, MemoryLimit
from console.sources.source import Unavailable

_MEMINFO = re.compile(r"^(MemTotal|MemAvailable): +(\d{1,15}) kB$", re.MULTILINE)


def read_host_memory(root: Path, groups: tuple[str, ...], *, returned: int = 0) -> HostMemory:
    """Read ``/proc/meminfo`` and the limits of ``groups`` (paths below ``/sys/fs/cgroup``, outermost first).

    ``returned``: bytes that the running service will give back. Raises Unavailable when the
    host's own memory cannot be read.
    """
    path = root / "proc/meminfo"
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as problem:
        raise Unavailable(f"{path}: {problem.strerror}") from None
    found = {name: int(number) * 1024 for name, number in _MEMINFO.findall(text)}
    if found.keys() != {"MemTotal", "MemAvailable"}:
        raise Unavailable(f"{path}: expected MemTotal and MemAvailable, found neither or one")
    limits = [limit for group in groups if (limit := _limit(root, group)) is not None]
    return HostMemory(
        total=found["MemTotal"],
        available=found["MemAvailable"],
        limits=tuple(limits),
        returned=returned,
    )


def read_held(root: Path, group: str) -> int | None:
    """Bytes that come back when the processes of a control group end: not its page cache, which is free.

    None when the kernel does not tell.
    """
    try:
        text = (root / "sys/fs/cgroup" / group / "memory.stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.findall(r"^(?:anon|shmem) (\d{1,19})$", text, re.MULTILINE)
    return sum(map(int, found)) if found else None


def groups_of(container: int | None, control_group: str | None) -> tuple[str, ...]:
    """The control groups the service lives in, outermost first.

    ``control_group`` is the unit's, as the systemd in the container counts; Proxmox puts a
    container's own below ``lxc/<CT>/ns``.
    """
    outer = () if container is None else (f"lxc/{container}", f"lxc/{container}/ns")
    parts = [part for part in (control_group or "").split("/") if part]
    if any(part in (".", "..") for part in parts):
        return outer
    inner = ["/".join([*outer[-1:], *parts[: count + 1]]) for count in range(len(parts))]
    return (*outer, *inner)


def _limit(root: Path, group: str) -> MemoryLimit | None:
    """The lower of memory.max and memory.high; None when neither is set, or there is no such group."""
    folder = root / "sys/fs/cgroup" / group
    limits = [number for name in ("memory.max", "memory.high") if (number := _number(folder / name))]
    if not limits:
        return None
    used = _number(folder / "memory.current")
    if used is not None:
        used = max(0, used - _page_cache(folder / "memory.stat"))
    return MemoryLimit(group, min(limits), used)


def _number(path: Path) -> int | None:
    """None for ``max`` as well: there is no limit then."""
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if re.fullmatch(r"\d{1,19}", text, re.ASCII) else None


def _page_cache(path: Path) -> int:
    """Bytes the kernel gives back before it refuses any; 0 where it does not say, which is the safe side."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return sum(int(size) for size in re.findall(r"^(?:in)?active_file (\d{1,19})$", text, re.MULTILINE))
