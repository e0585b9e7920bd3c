"""Proxmox's guests and reservations from its files: no command is run, so it is fast enough for a screen.

/etc/pve is a file system in memory that can be read without quorum; whether a guest
runs is told by its process (qemu-server, Helpers.pm) or its control group (pve-container, LXC.pm).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from console.model.card import Address
from console.model.rebind import pve
from console.model.rebind.inventory import ContainerConfig, Reservation, VmConfig, VmStatus
from console.sources.sysfs import content_of, link_name, text_of

#: A guest's file that is larger is none that Proxmox wrote.
_LARGEST = 512 * 1024

_CONFIGURATION = re.compile(r"([1-9][0-9]{2,8})\.conf")


class Guests(msgspec.Struct, frozen=True):
    """What Proxmox says on this node; ``problems`` are files that could not be read."""

    node: str | None
    vms: tuple[VmConfig, ...]
    containers: tuple[ContainerConfig, ...]
    reservations: tuple[Reservation, ...]
    absent: str | None  # why there is no Proxmox to read
    problems: tuple[str, ...]


def read_guests(root: Path, functions: Iterable[Address], wall: float) -> Guests:
    """Every guest of this node; ``functions`` are all PCI functions of the host, ``wall`` is Unix seconds.

    On a machine without Proxmox there are none. What may not be read is named in ``problems``.
    """
    folder = root / "etc/pve"
    problems: list[str] = []
    present = tuple(functions)
    node = link_name(folder / "local") or _host_name(root)
    mappings = pve.read_mappings(_text(root, "etc/pve/mapping/pci.cfg", problems))
    ha = pve.read_ha(_text(root, "etc/pve/ha/resources.cfg", problems))
    vms = []
    for id, text in _configurations(folder / "qemu-server", problems):
        vm = pve.read_vm(id, text)
        status, pid = _vm_status(root, id)
        lines = tuple(pve.resolve(line, present, mappings, node) for line in vm.hostpci)
        vms.append(msgspec.structs.replace(vm, status=status, pid=pid, hostpci=lines, ha=ha.get(f"vm:{id}")))
    containers = []
    for id, text in _configurations(folder / "lxc", problems):
        container = pve.read_container(id, text)
        state, init = _container_status(root, id)
        containers.append(msgspec.structs.replace(container, status=state, init=init, ha=ha.get(f"ct:{id}")))
    reserved = _text(root, "run/qemu-server/pci-id-reservations", problems)
    reservations = tuple(_reservations(root, reserved, wall))
    return Guests(
        node, tuple(vms), tuple(containers), reservations, _absent(folder), tuple(dict.fromkeys(problems))
    )


def _configurations(folder: Path, problems: list[str]) -> Iterator[tuple[int, str]]:
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return
    except OSError as problem:
        problems.append(f"/etc/pve/{folder.name}: {problem.strerror}")
        return
    ids = sorted(int(found[1]) for name in names if (found := _CONFIGURATION.fullmatch(name)))
    for id in ids:
        try:
            with (folder / f"{id}.conf").open("rb") as file:
                yield id, file.read(_LARGEST).decode("utf-8", "replace")
        except FileNotFoundError:
            continue  # destroyed or migrated just now
        except OSError as problem:
            problems.append(f"/etc/pve/{folder.name}/{id}.conf: {problem.strerror}")


def _text(root: Path, path: str, problems: list[str]) -> str:
    """A file that need not be there; one that cannot be read is named, since it may hold something."""
    try:
        with (root / path).open("rb") as file:
            return file.read(_LARGEST).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as problem:
        problems.append(f"/{path}: {problem.strerror}")
        return ""


def _host_name(root: Path) -> str | None:
    name = text_of(root / "proc/sys/kernel/hostname")
    return name.partition(".")[0] if name else None


def _vm_status(root: Path, id: int) -> tuple[VmStatus | None, int | None]:
    """By its pid file, and by the process that must bear its number: a pid is used again."""
    path = root / f"run/qemu-server/{id}.pid"
    try:
        with path.open("rb") as file:
            text = file.read(32).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return "stopped", None
    except OSError:
        return None, None
    if not (text.isascii() and text.isdigit()):
        return None, None
    pid = int(text)
    return ("running", pid) if is_vm_process(root, pid, id) else ("stopped", None)


def is_vm_process(root: Path, pid: int, id: int) -> bool:
    """Whether the process is QEMU of this machine: its command line says ``-id ID``."""
    words = (content_of(root / f"proc/{pid}/cmdline", 64 * 1024) or "").split("\0")
    return any(word == "-id" and after == str(id) for word, after in pairwise(words))


def _container_status(root: Path, id: int) -> tuple[VmStatus | None, int | None]:
    """By its control group: Proxmox makes ``lxc/ID`` when it starts, and removes it when it ends."""
    groups = root / "sys/fs/cgroup"
    if not groups.is_dir():
        return None, None
    events = content_of(groups / f"lxc/{id}/cgroup.events")
    if not (groups / f"lxc/{id}").is_dir() or (events is not None and "populated 0" in events):
        return "stopped", None
    return "running", _init(root, id)


def _init(root: Path, id: int) -> int | None:
    """The host's pid of the container's process 1: systemd keeps it in init.scope, others in no unit."""
    for group in (f"lxc/{id}/ns/init.scope", f"lxc/{id}/ns"):
        for text in (content_of(root / "sys/fs/cgroup" / group / "cgroup.procs") or "").split():
            if text.isascii() and text.isdigit() and _inner_pid(root, int(text)) == 1:
                return int(text)
    return None


def _inner_pid(root: Path, pid: int) -> int | None:
    for line in (content_of(root / f"proc/{pid}/status") or "").splitlines():
        if line.startswith("NSpid:"):
            last = line.split()[-1]
            return int(last) if last.isascii() and last.isdigit() else None
    return None


def _reservations(root: Path, text: str, wall: float) -> Iterator[Reservation]:
    for one in pve.read_reservations(text):
        if one.pid is not None:
            yield msgspec.structs.replace(one, alive=is_vm_process(root, one.pid, one.vmid))
        else:
            yield msgspec.structs.replace(one, alive=one.until is not None and one.until > wall)


def _absent(folder: Path) -> str | None:
    try:
        empty = not any(folder.iterdir())
    except FileNotFoundError:
        return "there is no /etc/pve: this host runs no Proxmox VE"
    except OSError as problem:  # ENOTCONN when its server has crashed
        return f"/etc/pve cannot be read: {problem.strerror}; systemctl status pve-cluster tells more"
    return "/etc/pve is empty: pve-cluster.service does not run" if empty else None
