"""Proxmox's own files: guests, mappings of PCI devices, reservations.

Grammars: qm.conf(5) and pct.conf(5); PVE/QemuServer/PCI.pm, PVE/Mapping/PCI.pm and
PVE/LXC/Config.pm of qemu-server 9.2, pve-guest-common and pve-container 6.1. No text makes
these functions raise: a line that cannot be read is left out or says so in ``problem``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from console.model.card import Address
from console.model.rebind.inventory import (
    ContainerConfig,
    ContainerDevice,
    DeviceRule,
    HostPci,
    MountEntry,
    Reservation,
    VmConfig,
)
from console.model.text import clean

_LINE = re.compile(r"([A-Za-z][A-Za-z0-9_-]*:|lxc\.[a-z0-9_.-]+(?::|\s*=))\s*(.*?)\s*")
_SECTION = re.compile(r"\[(.*)\]\s*")
_BDF = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.IGNORECASE)
_HOSTPCI = re.compile(r"hostpci(\d{1,2})")
_DEVICE = re.compile(r"dev(\d{1,3})")
_NETWORK = re.compile(r"net\d{1,2}")
_RULE = re.compile(r"([abc])(?:\s+(\d{1,9}|\*):(\d{1,9}|\*)(?:\s+([rwm]{1,3}))?)?")
_RESERVATION = re.compile(r"(\S+)\s(\d{1,10})\s(time|pid):(\d{1,12})")
_OWN_DEVICE = re.compile(r"vfio-pci[^\s]*?[,\s]host=([0-9a-fA-F:.]+)")
_NUMBER = re.compile(r"[0-9]{1,9}")

#: qemu-server's default in MiB, where a VM's file has no ``memory``.
DEFAULT_MEMORY_MIB = 512


class Section(NamedTuple):
    """A guest's file as it counts now: its lines in order, and whether changes wait for the next start."""

    lines: tuple[tuple[str, str], ...]
    pending: bool

    def get(self, key: str) -> str | None:
        """The last one counts, as in Proxmox's own parser."""
        return next((value for name, value in reversed(self.lines) if name == key), None)

    def is_on(self, key: str) -> bool:
        return is_true(self.get(key))


class MapEntry(msgspec.Struct, frozen=True):
    """One ``map`` line of a PCI mapping: ``paths`` are the parts of one device."""

    node: str
    paths: tuple[str, ...]
    group: int | None = None
    id: str | None = None


def is_true(text: str | None) -> bool:
    """A boolean as Proxmox reads one (PVE::JSONSchema::parse_boolean)."""
    return (text or "").lower() in ("1", "on", "yes", "true")


def normal(text: str) -> str | None:
    """A PCI address or slot in the kernel's form, ``0000:41:00.0`` or ``0000:41:00``; None for no address."""
    found = _BDF.fullmatch(text.strip())
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    number = int(domain or "0", 16)
    if number > 0xFFFF_FFFF or int(device, 16) > 0x1F:
        return None
    slot = f"{number:04x}:{bus.lower()}:{device.lower()}"
    return slot if function is None else f"{slot}.{function}"


def properties(text: str, default: str) -> dict[str, str]:
    """``a,key=value,…``: the first part without a key belongs to ``default``."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals:
            found.setdefault(clean(key.strip()), clean(value.strip()))
        elif key.strip():
            found.setdefault(default, clean(key.strip()))
    return found


# Guests ----------------------------------------------------------------------------------------


def read_section(text: str) -> Section:
    """The first section of a guest's file. Snapshots and pending changes come after it and do not count."""
    lines: list[tuple[str, str]] = []
    current, pending = True, False
    waiting = False
    for raw in text.split("\n"):
        line = raw.rstrip("\r")
        section = _SECTION.fullmatch(line)
        if section is not None:
            current = False
            waiting = section[1].lower() in ("pending", "special:pending")
            continue
        if line.startswith("#") or not line.strip():
            continue
        pending = pending or waiting
        found = _LINE.fullmatch(line) if current else None
        if found is not None:
            lines.append((found[1].rstrip(":= "), clean(found[2])))
    return Section(tuple(lines), pending)


def read_vm(id: int, text: str) -> VmConfig:
    """``/etc/pve/qemu-server/ID.conf``; what its hostpci lines stand for is not resolved yet."""
    section = read_section(text)
    agent = properties(section.get("agent") or "", "enabled")
    machine = properties(section.get("machine") or "", "type")
    cpu = properties(section.get("cpu") or "", "cputype")
    memory = properties(section.get("memory") or "", "current").get("current")
    return VmConfig(
        id=id,
        name=section.get("name"),
        lock=section.get("lock"),
        memory_mib=int(memory) if memory and _NUMBER.fullmatch(memory) else DEFAULT_MEMORY_MIB,
        hugepages=section.get("hugepages"),
        onboot=section.is_on("onboot"),
        hostpci=(*_hostpci_lines(section), *_own_devices(section.get("args") or "")),
        agent=is_true(agent.get("enabled")),
        machine=machine.get("type"),
        bios=section.get("bios"),
        cpu=cpu.get("cputype"),
        networks=len({key for key, _ in section.lines if _NETWORK.fullmatch(key)}),
        template=section.is_on("template"),
        pending=section.pending,
    )


def _hostpci_lines(section: Section) -> Iterator[HostPci]:
    latest: dict[int, tuple[str, str]] = {}
    for key, value in section.lines:
        found = _HOSTPCI.fullmatch(key)
        if found is not None:
            latest[int(found[1])] = (key, value)
    for _, (key, value) in sorted(latest.items()):
        yield read_hostpci(key, value)


def _own_devices(arguments: str) -> Iterator[HostPci]:
    """Devices given to QEMU in ``args``: Proxmox neither prepares nor reserves those."""
    wanted = tuple(
        dict.fromkeys(
            address
            for text in _OWN_DEVICE.findall(arguments)
            if (address := normal(text.strip("."))) is not None and "." in address
        )
    )
    if wanted:
        yield HostPci(key="args", wanted=wanted)


def read_hostpci(key: str, value: str) -> HostPci:
    """One hostpci line: ``[host=]ADDRESS[;ADDRESS…]`` or ``mapping=ID``, then options."""
    options = properties(value, "host")
    mapping = options.pop("mapping", None)
    host = options.pop("host", None)
    if mapping is not None:
        return HostPci(key=key, mapping=mapping, options=options)
    wanted = []
    for part in (host or "").split(";"):
        address = normal(part)
        if address is None:
            problem = f"{key}: {part.strip() or 'nothing'} is no PCI address"
            return HostPci(key=key, options=options, problem=problem)
        wanted.append(address)
    return HostPci(key=key, wanted=tuple(dict.fromkeys(wanted)), options=options)


def read_container(id: int, text: str) -> ContainerConfig:
    """``/etc/pve/lxc/ID.conf``."""
    section = read_section(text)
    devices, mounts, rules = [], [], []
    for key, value in section.lines:
        if _DEVICE.fullmatch(key):
            options = properties(value, "path")
            path = options.pop("path", "")
            if path.startswith("/"):
                devices.append(ContainerDevice(key, path, options))
        elif key == "lxc.mount.entry":
            mount = _mount(value)
            if mount is not None:
                mounts.append(mount)
        elif key in (
            "lxc.cgroup2.devices.allow",
            "lxc.cgroup2.devices.deny",
            "lxc.cgroup.devices.allow",
            "lxc.cgroup.devices.deny",
        ):
            rule = _rule(value, allow=key.endswith("allow"))
            if rule is not None:
                rules.append(rule)
    return ContainerConfig(
        id=id,
        name=section.get("hostname"),
        lock=section.get("lock"),
        onboot=section.is_on("onboot"),
        devices=tuple(devices),
        mounts=tuple(mounts),
        cgroup_rules=tuple(rules),
        unprivileged=section.is_on("unprivileged"),
    )


def _mount(value: str) -> MountEntry | None:
    """fstab(5): source, target, type, options; a blank within a name is ``\\040``."""
    parts = value.split()
    if len(parts) < 4:
        return None
    source, target = (part.replace("\\040", " ").replace("\\011", "\t") for part in parts[:2])
    return MountEntry(clean(source), clean(target), "optional" in parts[3].split(","))


def _rule(value: str, *, allow: bool) -> DeviceRule | None:
    found = _RULE.fullmatch(value.strip())
    if found is None:
        return None
    kind, major, minor, access = found.groups()
    return DeviceRule(allow, kind, _part(major), _part(minor), access or "rwm")


def _part(text: str | None) -> int | None:
    return None if text in (None, "*") else int(text)


def allows(container: ContainerConfig, path: str, major: int, minor: int) -> bool:
    """Whether the container may open the character device that ``path`` of the host is.

    A ``devN`` line allows its own device; a mount entry alone allows nothing.
    """
    if any(device.path == path for device in container.devices):
        return True
    allowed = False
    for rule in container.cgroup_rules:
        if rule.kind in ("a", "c") and rule.major in (None, major) and rule.minor in (None, minor):
            allowed = rule.allow
    return allowed


# Mappings, reservations, HA ----------------------------------------------------------------------


def read_mappings(text: str) -> dict[str, tuple[MapEntry, ...]]:
    """``/etc/pve/mapping/pci.cfg``: an id at the beginning of a line, below it indented ``map`` lines."""
    found: dict[str, list[MapEntry]] = {}
    current: list[MapEntry] | None = None
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if not line[0].isspace():
            current = found.setdefault(clean(line.strip()), [])
            continue
        key, _, value = line.strip().partition(" ")
        if key == "map" and current is not None:
            parts = properties(value, "path")
            paths = tuple(
                address for part in parts.get("path", "").split(";") if (address := normal(part)) is not None
            )
            group = parts.get("iommugroup", "")
            number = int(group) if _NUMBER.fullmatch(group) else None
            if paths:
                current.append(MapEntry(parts.get("node", ""), paths, number, parts.get("id")))
    return {id: tuple(entries) for id, entries in found.items()}


def resolve(
    line: HostPci,
    functions: Iterable[Address],
    mappings: Mapping[str, tuple[MapEntry, ...]],
    node: str | None,
) -> HostPci:
    """The line with the functions of this host that it stands for: ``functions`` are all there are."""
    if line.problem is not None:
        return line
    present = tuple(functions)
    if line.mapping is None:
        chosen = _expand(line.wanted, present)
        gone = [wanted for wanted in line.wanted if not _expand((wanted,), present)]
        problem = f"{line.key}: this host has no device {', '.join(gone)}" if gone else None
        return msgspec.structs.replace(line, functions=chosen, problem=problem)
    if line.mapping not in mappings:
        problem = f"{line.key}: there is no mapping {line.mapping}"
        return msgspec.structs.replace(line, problem=problem)
    entries = [entry for entry in mappings[line.mapping] if entry.node == node]
    if not entries:
        problem = f"{line.key}: the mapping {line.mapping} has no device of this node"
        return msgspec.structs.replace(line, problem=problem)
    alternatives = tuple(found for entry in entries if (found := _expand(entry.paths, present)))
    if not alternatives:
        named = ", ".join(path for entry in entries for path in entry.paths)
        problem = f"{line.key}: the mapping {line.mapping} names {named}, which this host does not have"
        return msgspec.structs.replace(line, problem=problem)
    union = tuple(dict.fromkeys(address for one in alternatives for address in one))
    return msgspec.structs.replace(
        line, functions=union, alternatives=alternatives if len(alternatives) > 1 else ()
    )


def _expand(wanted: Iterable[str], present: tuple[Address, ...]) -> tuple[Address, ...]:
    """A slot stands for all its functions, by address."""
    return tuple(
        dict.fromkeys(
            address
            for one in wanted
            for address in sorted(present)
            if address == one or ("." not in one and address.rpartition(".")[0] == one)
        )
    )


def read_reservations(text: str) -> tuple[Reservation, ...]:
    """``/run/qemu-server/pci-id-reservations``: ``ADDRESS VMID pid:N``, or ``time:T`` before it starts."""
    found = []
    for line in text.splitlines():
        parts = _RESERVATION.fullmatch(line)
        address = normal(parts[1]) if parts is not None else None
        if parts is None or address is None:
            continue
        number = int(parts[4])
        found.append(
            Reservation(
                address=address,
                vmid=int(parts[2]),
                pid=number if parts[3] == "pid" else None,
                until=float(number) if parts[3] == "time" else None,
            )
        )
    return tuple(found)


def read_ha(text: str) -> dict[str, str]:
    """``/etc/pve/ha/resources.cfg``: by ``vm:100`` or ``ct:129`` the state that HA keeps it in."""
    found: dict[str, str] = {}
    current: str | None = None
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        key, _, value = line.strip().partition(" ")
        if not line[0].isspace():
            kind, id = key.rstrip(":"), value.strip()
            current = f"{kind}:{id}" if kind in ("vm", "ct") and _NUMBER.fullmatch(id) else None
            if current is not None:
                found[current] = "started"  # the default
        elif key == "state" and current is not None:
            found[current] = clean(value.strip())
    return found
