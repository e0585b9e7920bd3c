"""One look at everything that decides whether cards can change sides: PCI, guests, driver, memory.

Read from /sys, /proc, /run and /etc/pve below a root; no command is run. A look takes a few
milliseconds, and may wait in the kernel for a card that is being reset: see ``read_apart``. Of a card
whose removal hangs nothing is read that the device's lock guards: that read would never end, and the
process that made it neither.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from console.model.card import Address
from console.model.rebind.inventory import (
    Function,
    Group,
    Inventory,
    KernelReferences,
    Memory,
    Slot,
    Versions,
)
from console.model.rebind.screen import firmware_pictures, framebuffer_names
from console.model.text import clean
from console.sources.guests import read_guests
from console.sources.pending_writes import other_removals, own_writes
from console.sources.source import Apart, Unavailable
from console.sources.sysfs import content_of, flag_of, link_name, names_in, number_of, text_of

_DEVICES = "sys/bus/pci/devices"
_DRIVERS = "sys/bus/pci/drivers"
_DRIVER_CARDS = "proc/driver/nvidia/gpus"

#: Kernel modules whose being there matters to cards that leave or come.
_MODULES = (
    "nvidia",
    "nvidia_drm",
    "nvidia_modeset",
    "nvidia_uvm",
    "nvidia_peermem",
    "gdrdrv",
    "nvidia_fs",
    "nouveau",
    "vfio_pci",
)

#: Where libnvidia-ml lies, by distribution.
_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/aarch64-linux-gnu", "usr/lib")

_VERSION = re.compile(r"\s(\d{3,4}\.\d+(?:\.\d+)?)\s")
_RETAINED = re.compile(r"retained_count\s*:?\s*(\d{1,9})")
_UUID = re.compile(r"GPU-[0-9a-f-]{36}")
_NODE = re.compile(r"nvidia(\d+|ctl|-uvm|-uvm-tools|-modeset)")
_LARGEST = 1024 * 1024

#: Opening the config space of a function that sleeps makes the kernel wake it.
_AWAKE = (None, "D0", "unknown")


def read_inventory(
    root: Path, cards: Iterable[Address] = (), *, wake: bool = False, wall: float | None = None
) -> Inventory:
    """Everything at one moment.

    ``cards`` count as cards whatever their class says, beside every NVIDIA display device.
    ``wake``: also ask the config space of those that sleep. Raises Unavailable when there is no PCI bus.
    """
    taken_at = time.time() if wall is None else wall
    devices = root / _DEVICES
    try:
        names = tuple(sorted(entry.name for entry in devices.iterdir()))
    except OSError as problem:
        raise Unavailable(f"{devices}: {problem.strerror}") from None
    functions = {name: _plain(devices / name, name) for name in names}
    named = frozenset(cards)
    homes = {
        name.rpartition(".")[0]: name
        for name in reversed(names)
        if (functions[name].is_gpu or name in named) and not (devices / name / "physfn").exists()
    }
    whole = {name: function for name, function in functions.items() if name.rpartition(".")[0] in homes}
    pending = _pending(root, whole)
    full = {
        name: _function(devices / name, function, wake, pending.get(name)) for name, function in whole.items()
    }
    functions.update(full)
    pictures = _pictures(root, devices, names)
    slots = tuple(
        _slot(
            root,
            home,
            [full[name] for name in names if name.rpartition(".")[0] == place],
            functions,
            pictures,
        )
        for place, home in sorted(homes.items(), key=lambda pair: pair[1])
    )
    guests = read_guests(root, names, taken_at)
    return Inventory(
        taken_at=taken_at,
        kernel=text_of(root / "proc/sys/kernel/osrelease"),
        node=guests.node,
        iommu=bool(names_in(root / "sys/class/iommu")),
        slots=slots,
        others=tuple(function for name, function in functions.items() if name not in full),
        vms=guests.vms,
        containers=guests.containers,
        reservations=guests.reservations,
        drivers=names_in(root / _DRIVERS),
        modules=tuple(name for name in _MODULES if (root / "sys/module" / name).is_dir()),
        nodes=_nodes(root),
        versions=_versions(root, {one.id: one.init for one in guests.containers}),
        memory=_memory(root),
        references=_references(root),
        proxmox_absent=guests.absent,
        problems=guests.problems,
    )


async def read_apart(
    apart: Apart[Inventory], root: Path, cards: Iterable[Address] = (), *, wake: bool = False
) -> Inventory:
    """``read_inventory`` in a thread of its own: a card that is being reset keeps nobody else waiting."""
    named = tuple(cards)
    return await apart(lambda: read_inventory(root, named, wake=wake))


# PCI ---------------------------------------------------------------------------------------------


def _plain(folder: Path, address: Address) -> Function:
    """What is needed to name it and to judge a group that it is in."""
    return Function(
        address=clean(address),
        vendor=number_of(folder / "vendor", 16) or 0,
        device=number_of(folder / "device", 16) or 0,
        class_code=number_of(folder / "class", 16) or 0,
        driver=link_name(folder / "driver"),
        is_bridge=(folder / "pci_bus").is_dir(),
    )


def _pending(root: Path, functions: Mapping[Address, Function]) -> dict[Address, str]:
    """By function, the write that the kernel has not answered, in words.

    The removals of others do not say which device they are about: each function without a driver counts.
    """
    found = {one.address: one for one in own_writes(root) if one.address is not None}
    loose = [name for name, one in functions.items() if one.driver is None and name not in found]
    others = other_removals(root) if loose else ()
    if others:
        found.update(dict.fromkeys(loose, others[0]))
    return {name: f"pid {one.pid} ({one.words})" for name, one in found.items()}


def _function(folder: Path, plain: Function, wake: bool, pending: str | None) -> Function:
    override = text_of(folder / "driver_override") if pending is None else None
    state = text_of(folder / "power_state")
    return Function(
        address=plain.address,
        vendor=plain.vendor,
        device=plain.device,
        class_code=plain.class_code,
        driver=plain.driver,
        is_bridge=plain.is_bridge,
        override=None if override in (None, "", "(null)") else override,
        power_state=state,
        power_control=text_of(folder / "power/control"),
        d3cold_allowed=flag_of(folder / "d3cold_allowed"),
        reset_methods=_words(folder / "reset_method"),
        config_ok=_answers(folder) if wake or state in _AWAKE else None,
        pending=pending,
    )


def _answers(folder: Path) -> bool | None:
    """Whether the first word of config space is not all ones; None when it cannot be read."""
    try:
        with (folder / "config").open("rb", buffering=0) as config:
            return config.read(4) != b"\xff\xff\xff\xff"
    except OSError:
        return None


def _slot(
    root: Path,
    home: Address,
    functions: list[Function],
    everything: dict[Address, Function],
    pictures: dict[Address, str],
) -> Slot:
    folder = root / _DEVICES / home
    words = _driver_words(root, home)
    minor = words.get("Device Minor", "")
    first = next(one for one in functions if one.address == home)
    upstream = _upstream(folder)
    return Slot(
        address=home,
        functions=(first, *(one for one in functions if one is not first)),
        group=_group(root, folder, everything),
        uuid=words.get("GPU UUID"),
        minor=int(minor) if minor.isascii() and minor.isdigit() else None,
        boot_vga=flag_of(folder / "boot_vga") is True,
        framebuffer=pictures.get(home),
        sriov_vfs=(number_of(folder / "sriov_numvfs") or 0) if first.pending is None else 0,
        upstream=upstream,
        bus_reset=upstream is not None and (root / _DEVICES / upstream / "reset_subordinate").exists(),
    )


def _group(root: Path, folder: Path, everything: dict[Address, Function]) -> Group | None:
    name = link_name(folder / "iommu_group")
    if name is None or not (name.isascii() and name.isdigit()):
        return None
    members = names_in(root / "sys/kernel/iommu_groups" / name / "devices")
    known = tuple(everything.get(member) or _plain(root / _DEVICES / member, member) for member in members)
    return Group(int(name), known)


def _upstream(folder: Path) -> Address | None:
    """The port above: sysfs lays a device into its bridge's folder."""
    try:
        parent = folder.resolve().parent
    except (OSError, RuntimeError):  # a link that leads nowhere or in a circle
        return None
    return parent.name if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", parent.name) else None


def _pictures(root: Path, devices: Path, names: Iterable[Address]) -> dict[Address, str]:
    """By card, the console that is drawn on it."""
    found = dict(firmware_pictures(content_of(root / "proc/iomem", _LARGEST) or ""))
    drivers = framebuffer_names(content_of(root / "proc/fb") or "")
    present = frozenset(names)
    for name in names_in(root / "sys/class/graphics"):
        if name.startswith("fb") and name[2:] in drivers:
            owner = _device_of(root / "sys/class/graphics" / name, present)
            if owner is not None:
                found[owner] = f"{name} ({drivers[name[2:]]})"
    return found


def _device_of(folder: Path, present: frozenset[Address]) -> Address | None:
    """The PCI function in whose folder a class device lies: fb0 is below card0 with some drivers."""
    try:
        parts = (folder / "device").resolve().parts
    except (OSError, RuntimeError):
        return None
    return next((part for part in reversed(parts) if part in present), None)


# The driver, memory -------------------------------------------------------------------------------


def _driver_words(root: Path, address: Address) -> dict[str, str]:
    text = content_of(root / _DRIVER_CARDS / address / "information") or ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): clean(value.strip()) for key, _, value in pairs}


def _versions(root: Path, inits: dict[int, int | None]) -> Versions:
    words = content_of(root / "proc/driver/nvidia/version")
    first = None if words is None else words.partition("\n")[0]
    found = _VERSION.search(first or "")
    libraries = {id: _library(root / f"proc/{init}/root") for id, init in inits.items() if init is not None}
    return Versions(
        module=found[1] if found else text_of(root / "sys/module/nvidia/version"),
        open_module=None if first is None else "Open Kernel Module" in first,
        library=_library(root),
        container_libraries={id: version for id, version in libraries.items() if version is not None},
    )


def _library(root: Path) -> str | None:
    """libnvidia-ml.so.1 is a link to the file that bears the version."""
    for folder in _LIBRARIES:
        name = link_name(root / folder / "libnvidia-ml.so.1")
        if name is not None and name.startswith("libnvidia-ml.so."):
            return name.removeprefix("libnvidia-ml.so.")
    return None


def _references(root: Path) -> KernelReferences:
    parameters = root / "sys/module/nvidia_drm/parameters"
    retained: dict[str, int] = {}
    folder = root / "proc/driver/nvidia-uvm/gpus"
    for name in names_in(folder):
        uuid, count = _UUID.search(name), _RETAINED.search(content_of(folder / name / "info") or "")
        if uuid and count:
            retained[uuid[0]] = int(count[1])
    return KernelReferences(
        modeset=flag_of(parameters / "modeset"),
        fbdev=flag_of(parameters / "fbdev"),
        uvm_retained=retained,
    )


def _memory(root: Path) -> Memory:
    found = re.search(
        r"^MemAvailable: +(\d{1,15}) kB$", content_of(root / "proc/meminfo") or "", re.MULTILINE
    )
    pages: dict[int, int] = {}
    folder = root / "sys/kernel/mm/hugepages"
    for name in names_in(folder):
        size = re.fullmatch(r"hugepages-(\d{1,9})kB", name)
        free = number_of(folder / name / "free_hugepages")
        if size is not None and free is not None:
            pages[int(size[1])] = free
    return Memory(available_mib=int(found[1]) // 1024 if found else None, hugepages=pages)


def _nodes(root: Path) -> tuple[str, ...]:
    """The device files of NVIDIA and vfio that are there: what they stand for is another question."""
    plain = [f"/dev/{name}" for name in names_in(root / "dev") if _NODE.fullmatch(name)]
    groups = [f"/dev/vfio/{name}" for name in names_in(root / "dev/vfio") if name.isdigit()]
    return (*plain, *groups)


def _words(path: Path) -> tuple[str, ...]:
    return tuple((text_of(path) or "").split())
