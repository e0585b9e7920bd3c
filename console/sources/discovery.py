"""What is here when no site file says so: the container with the cards, the VM, the unit, the port.

Proxmox's guest files: pct.conf(5) and qm.conf(5); what follows a ``[name]`` line there is a snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from console.model.site import Container, Service, Site, Vm, unit_rule
from console.model.text import clean
from console.transport.container import lxc
from console.transport.runner import Runner

CONTAINERS = Path("etc/pve/lxc")
MACHINES = Path("etc/pve/qemu-server")

#: SGLang's own default.
PORT = 30000

#: Seconds for each command that looks around.
DEADLINE = 2.0

_GUEST = re.compile(r"[1-9]\d{2,8}")
_FILE_LIMIT = 64 * 1024

#: A device line that names the cards: ``dev0: /dev/nvidia0``, ``lxc.mount.entry: /dev/nvidia0 …``.
_NVIDIA = re.compile(r"^(?:dev\d+|lxc\.mount\.entry|mp\d+)\s*:\s*/dev/nvidia", re.MULTILINE)
_PASSED = re.compile(r"^hostpci\d+\s*:", re.MULTILINE)
_NAME = re.compile(r"^(?:hostname|name)\s*:\s*(\S+)", re.MULTILINE)
_ADDRESS = re.compile(r"^net\d+\s*:.*\bip=(\d+\.\d+\.\d+\.\d+)", re.MULTILINE)
_IPV4 = re.compile(r"\d+\.\d+\.\d+\.\d+")

_LISTEN = "0A"  # TCP_LISTEN, include/net/tcp_states.h


class Discovery(msgspec.Struct, frozen=True):
    """A site as it was found, and how it was found, in words."""

    site: Site
    words: str


class Guest(msgspec.Struct, frozen=True):
    """A container or VM that its file gives cards."""

    id: int
    name: str | None
    address: str | None  # IPv4, where the file fixes one


async def discover(runner: Runner) -> Discovery:
    """The most likely site of the host that ``runner`` reaches. Reads only, never raises.

    Of several candidates the first is taken and all are named.
    """
    found: list[str] = []
    site = Site()
    where = runner
    containers = guests(runner.root / CONTAINERS, _NVIDIA)
    if containers:
        chosen = containers[0]
        found.append(_chosen("container", containers))
        where = lxc(runner, chosen.id)
        address = chosen.address or await _address(runner, chosen.id)
        url = f"http://{address}:{PORT}" if address is not None else site.service.url
        site = msgspec.structs.replace(site, container=Container("lxc", chosen.id), service=Service(url=url))
    machines = guests(runner.root / MACHINES, _PASSED)
    if machines:
        found.append(_chosen("VM", machines))
        site = msgspec.structs.replace(site, vm=Vm(machines[0].id))
    units = await _units(where)
    if units:
        others = f" (also {', '.join(units[1:])})" if units[1:] else ""
        found.append(f"unit {units[0]}{others}")
        service = msgspec.structs.replace(site.service, unit=units[0])
        site = msgspec.structs.replace(site, service=service)
    if not containers and listens(runner.root, PORT):
        found.append(f"something listens on port {PORT} of this host")
    nothing = "neither a container with cards, nor a VM, nor a unit named *sglang*"
    return Discovery(site, "; ".join(found) or nothing)


def guests(folder: Path, gives_cards: re.Pattern[str]) -> tuple[Guest, ...]:
    """The guests whose files in ``folder`` give them cards, by id. A folder we cannot read has none."""
    return tuple(sorted(_guests(folder, gives_cards), key=lambda guest: guest.id))


def listens(root: Path, port: int) -> bool:
    """Whether a TCP socket of this host listens on ``port``: /proc/net/tcp and tcp6, in hexadecimal."""
    for name in ("tcp", "tcp6"):
        for line in _read(root / "proc/net" / name).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == _LISTEN and fields[1].endswith(f":{port:04X}"):
                return True
    return False


def _guests(folder: Path, gives_cards: re.Pattern[str]) -> Iterator[Guest]:
    try:
        files = [path for path in folder.iterdir() if path.suffix == ".conf" and _GUEST.fullmatch(path.stem)]
    except OSError:
        return
    for path in files:
        current = re.split(r"^\[", _read(path), maxsplit=1, flags=re.MULTILINE)[0]
        if gives_cards.search(current):
            name, address = _NAME.search(current), _ADDRESS.search(current)
            yield Guest(int(path.stem), clean(name[1]) if name else None, address[1] if address else None)


def _chosen(word: str, found: tuple[Guest, ...]) -> str:
    first = found[0]
    name = f" ({first.name})" if first.name else ""
    others = f", also {', '.join(str(guest.id) for guest in found[1:])}" if found[1:] else ""
    return f"{word} {first.id}{name} is given cards{others}"


async def _address(runner: Runner, container: int) -> str | None:
    """The container's first IPv4 address, as lxc-info prints them."""
    result = await runner.run(["lxc-info", "-n", str(container), "-i", "-H"], deadline=DEADLINE)
    words = result.stdout.decode("ascii", "replace").split() if result.ok else []
    return next((word for word in words if _IPV4.fullmatch(word)), None)


async def _units(runner: Runner) -> list[str]:
    """Services whose name holds sglang, loaded or only installed; active ones first."""
    show = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", "--type=service"]
    loaded = await runner.run([*show, "--", "*sglang*"], deadline=DEADLINE)
    rows = (
        [line.split() for line in loaded.stdout.decode("utf-8", "replace").splitlines()] if loaded.ok else []
    )
    active = [row[0] for row in rows if len(row) > 2 and row[2] == "active"]
    others = [row[0] for row in rows if len(row) > 2 and row[2] != "active"]
    names = [*active, *others]
    if not names:
        listing = ["systemctl", "list-unit-files", "--plain", "--no-legend", "--no-pager", "--type=service"]
        files = await runner.run([*listing, "--", "*sglang*"], deadline=DEADLINE)
        lines = files.stdout.decode("utf-8", "replace").splitlines() if files.ok else []
        names = [line.split()[0] for line in lines if line.split()]
    return [name for name in names if unit_rule(name) is None and "@." not in name]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_FILE_LIMIT).decode("utf-8", "replace")
    except OSError:
        return ""
