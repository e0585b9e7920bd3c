"""Which processes have cards open, found by device number in every process of the host.

A path proves nothing: a container has nodes of its own names. The number of what a descriptor
or a mapping leads to is the same in every mount and pid namespace, and asking for it opens nothing.
Not seen: a descriptor on its way through a socket, and one of a thread with a table of its own.
"""

# ruff: noqa: PTH115, PTH116, PTH123, PTH208
# Thousands of entries a scan: Path objects would take longer than the reads themselves.

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from console.model.rebind.holders import CardDevice, CardHolder, HolderScan
from console.model.rebind.inventory import Slot
from console.model.text import clean
from console.sources.holders import cgroup_path, container_of, unit_of
from console.sources.source import Unavailable
from console.sources.sysfs import content_of, names_in, text_of

Number = tuple[int, int]

#: The NVIDIA driver's own character devices (major 195 by registration, nv-linux.h).
_NVIDIA_NAMES = ("nvidia", "nvidia-frontend")
_NVIDIA_MAJOR = 195

_NUMBER = re.compile(r"(\d{1,9}):(\d{1,9})")
_MACHINE = re.compile(r"/qemu\.slice/(\d{3,9})\.scope")

#: How deep below a function's folder sysfs keeps what was made of it: sound/card0/controlC0,
#: nvme/nvme0/nvme0n1, drm/card0, vfio-dev/vfio0.
_DEEPEST = 4


def devices_of(root: Path, slot: Slot) -> tuple[CardDevice, ...]:
    """Every device file that leads to a card: NVIDIA's, DRM's, its sound, its vfio group.

    Those of all functions that move with it count, since each of them can hold up the unbinding.
    """
    found: dict[Number, str] = {}
    if slot.minor is not None:
        found[_nvidia_major(root), slot.minor] = f"/dev/nvidia{slot.minor}"
    for function in slot.endpoints:
        found.update(_below(root / "sys/bus/pci/devices" / function.address, _DEEPEST))
    if slot.group is not None:
        number = _number(root / f"sys/class/vfio/{slot.group.id}/dev")
        if number is not None:
            found[number] = f"/dev/vfio/{slot.group.id}"
    return tuple(CardDevice(*number, slot.address, node) for number, node in found.items())


def scan_holders(
    root: Path,
    slots: Iterable[Slot],
    *,
    own: Iterable[int] = (),
    devices: Iterable[CardDevice] = (),
    wall: float | None = None,
) -> HolderScan:
    """Every process that has one of the cards open or mapped, by pid. Takes 20 to 30 ms for 100 processes.

    ``own`` are pids of this program, which are marked and not left out; ``devices`` are looked
    for beside the cards'. Raises Unavailable when /proc cannot be listed.
    """
    wanted = [*devices, *(device for slot in slots for device in devices_of(root, slot))]
    by_number: dict[Number, list[CardDevice]] = {}
    for device in wanted:
        by_number.setdefault((device.major, device.minor), []).append(device)
    look = _Look(root, by_number)
    mine = frozenset(own)
    holders, count, unreadable = [], 0, 0
    for pid in _pids(root):
        count += 1
        opened: list[CardDevice] = []
        mapped: list[CardDevice] = []
        try:
            opened = look.opened(pid)
            mapped = look.mapped(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        except OSError:
            unreadable += 1  # what it has open is told all the same: without root only mappings are hidden
        if opened or mapped:
            holders.append(_holder(root, pid, opened, mapped, pid in mine))
    return HolderScan(
        taken_at=time.time() if wall is None else wall,
        holders=tuple(holders),
        devices=tuple(wanted),
        processes=count,
        unreadable=unreadable,
    )


class _Look:
    """Looks into one process after the other; what a mapped file is, is asked once for all of them."""

    def __init__(self, root: Path, wanted: Mapping[Number, list[CardDevice]]) -> None:
        self._proc = str(root / "proc")
        self._wanted = wanted
        self._files: dict[str, list[CardDevice]] = {}
        # Trees that stand in for a host hold no device files: there the name is all there is.
        self._by_name: dict[str, list[CardDevice]] | None = None
        if root != Path("/"):
            self._by_name = {}
            for devices in wanted.values():
                for device in devices:
                    self._by_name.setdefault(device.node, []).append(device)

    def opened(self, pid: int) -> list[CardDevice]:
        folder = f"{self._proc}/{pid}/fd"
        found: list[CardDevice] = []
        for name in os.listdir(folder):
            found += self._at(f"{folder}/{name}")
        return found

    def mapped(self, pid: int) -> list[CardDevice]:
        """The number of a mapped file is only behind its entry in map_files, which root may follow."""
        found: list[CardDevice] = []
        try:
            with open(f"{self._proc}/{pid}/maps", "rb") as file:
                text = file.read()
        except FileNotFoundError:
            if self._by_name is not None:  # the tree plays no mappings
                return found
            raise
        for line in text.splitlines():
            # start-end perms offset major:minor inode path
            parts = line.split(None, 5)
            if len(parts) < 5 or parts[4] == b"0":
                continue
            file_id = b"/".join(parts[3:5]).decode("ascii", "replace")
            if file_id not in self._files:
                area = parts[0].decode("ascii", "replace")
                try:
                    self._files[file_id] = self._at(f"{self._proc}/{pid}/map_files/{_area(area)}")
                except FileNotFoundError:
                    continue  # unmapped meanwhile: the next process that has it is asked
            found += self._files[file_id]
        return found

    def _at(self, path: str) -> list[CardDevice]:
        if self._by_name is not None:
            try:
                target = os.readlink(path)
            except FileNotFoundError:
                return []
            return self._by_name.get(target, [])
        try:
            status = os.stat(path)
        except FileNotFoundError:
            if "/fd/" in path:
                return []  # closed meanwhile
            raise
        if not stat.S_ISCHR(status.st_mode) and not stat.S_ISBLK(status.st_mode):
            return []
        return self._wanted.get((os.major(status.st_rdev), os.minor(status.st_rdev)), [])


def _area(text: str) -> str:
    """``maps`` pads addresses with zeros, the names in map_files are not padded."""
    first, _, last = text.partition("-")
    return f"{int(first, 16):x}-{int(last, 16):x}"


def _holder(
    root: Path, pid: int, opened: list[CardDevice], mapped: list[CardDevice], own: bool
) -> CardHolder:
    folder = root / "proc" / str(pid)
    comm = text_of(folder / "comm") or "?"
    command = (content_of(folder / "cmdline", 65536) or "").split("\0")
    title = clean(" ".join(part for part in command if part)).strip()
    path = cgroup_path(content_of(folder / "cgroup", 65536) or "")
    container = container_of(path)
    machine = _MACHINE.search(path)
    return CardHolder(
        pid=pid,
        inner_pid=_inner_pid(folder) if container is not None else None,
        comm=comm,
        name=(title or comm)[:200],
        container=container,
        vm=int(machine[1]) if machine else None,
        unit=unit_of(path),
        own=own,
        open=tuple(dict.fromkeys(device.node for device in opened)),
        mapped=tuple(dict.fromkeys(device.node for device in mapped)),
        cards=tuple(sorted({device.card for device in (*opened, *mapped)})),
    )


def _inner_pid(folder: Path) -> int | None:
    for line in (content_of(folder / "status") or "").splitlines():
        if line.startswith("NSpid:"):
            pids = line.split()[1:]
            return int(pids[-1]) if len(pids) > 1 and pids[-1].isdecimal() else None
    return None


def _pids(root: Path) -> Iterator[int]:
    try:
        names = os.listdir(root / "proc")
    except OSError as problem:
        raise Unavailable(f"{root / 'proc'}: {problem.strerror}") from None
    yield from sorted(int(name) for name in names if name.isdecimal())


def _nvidia_major(root: Path) -> int:
    """As /proc/devices says; the registered one where it says nothing."""
    for line in (content_of(root / "proc/devices", 65536) or "").splitlines():
        number, _, name = line.strip().partition(" ")
        if name in _NVIDIA_NAMES and number.isdecimal():
            return int(number)
        if line.startswith("Block devices"):
            break
    return _NVIDIA_MAJOR


def _below(folder: Path, depth: int) -> dict[Number, str]:
    """The device files that the kernel made of a function: folders with a ``dev``, links not followed."""
    found: dict[Number, str] = {}
    for name in names_in(folder):
        below = folder / name
        if below.is_symlink() or not below.is_dir() or ":" in name:
            continue
        number = _number(below / "dev")
        if number is not None:
            found[number] = _node(below, name)
        if depth > 1:
            found.update(_below(below, depth - 1))
    return found


def _node(folder: Path, name: str) -> str:
    """DEVNAME of its uevent is the path below /dev."""
    for line in (content_of(folder / "uevent") or "").splitlines():
        if line.startswith("DEVNAME="):
            return clean(f"/dev/{line.removeprefix('DEVNAME=').strip().removeprefix('/dev/')}")
    return clean(f"/dev/{name}")


def _number(path: Path) -> Number | None:
    found = _NUMBER.fullmatch(text_of(path) or "")
    return (int(found[1]), int(found[2])) if found else None
