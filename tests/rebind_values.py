"""Inventories for tests: a host as it is when all is well, and the means to make one part of it different."""

from __future__ import annotations

from typing import Any

import msgspec

from console.model.rebind.holders import HolderScan
from console.model.rebind.inventory import (
    ContainerConfig,
    ContainerDevice,
    Function,
    Group,
    HostPci,
    Inventory,
    Memory,
    Slot,
    Versions,
    VmConfig,
)

BUSES = ("01", "21", "41", "61")
FIRST, SECOND, THIRD, FOURTH = (f"0000:{bus}:00.0" for bus in BUSES)
VERSION = "595.45.04"


def function(address: str, driver: str | None, **more: Any) -> Function:
    """A GPU at ``.0``, its sound at any other function."""
    gpu = address.endswith(".0")
    values: dict[str, Any] = {
        "address": address,
        "vendor": 0x10DE,
        "device": 0x2BB1 if gpu else 0x22E8,
        "class_code": 0x030000 if gpu else 0x040300,
        "driver": driver,
        "power_state": "D0",
        "d3cold_allowed": True,
        "reset_methods": ("flr",),
        "config_ok": True,
    }
    return Function(**(values | more))


def slot(
    bus: str,
    driver: str | None = "nvidia",
    sound: str | None = "same",
    *,
    more: tuple[Function, ...] = (),
    **fields: Any,
) -> Slot:
    """A card of two functions in a group of its own with its port; ``more`` is in the group too."""
    address = f"0000:{bus}:00.0"
    other = ("snd_hda_intel" if driver == "nvidia" else driver) if sound == "same" else sound
    functions = (function(address, driver), function(f"0000:{bus}:00.1", other))
    port = function(
        f"0000:{int(bus, 16) - 1:02x}:01.1", "pcieport", vendor=0x1022, class_code=0x060400, is_bridge=True
    )
    index = BUSES.index(bus)
    values: dict[str, Any] = {
        "address": address,
        "functions": functions,
        "group": Group(13 + index, (port, *functions, *more)),
        "uuid": f"GPU-{bus}" if driver == "nvidia" else None,
        "minor": index if driver == "nvidia" else None,
        "upstream": port.address,
        "bus_reset": True,
    }
    return Slot(**(values | fields))


def changed(card: Slot, which: str, **fields: Any) -> Slot:
    """The card with one function changed, in its group as well."""
    functions = tuple(
        msgspec.structs.replace(one, **fields) if one.address == which else one for one in card.functions
    )
    new = {one.address: one for one in functions}
    group = card.group
    if group is not None:
        group = Group(group.id, tuple(new.get(one.address, one) for one in group.members))
    return msgspec.structs.replace(card, functions=functions, group=group)


def vm(id: int = 100, buses: tuple[str, ...] = BUSES, **fields: Any) -> VmConfig:
    lines = tuple(
        HostPci(
            key=f"hostpci{place}",
            wanted=(f"0000:{bus}:00",),
            options={"pcie": "1"},
            functions=(f"0000:{bus}:00.0", f"0000:{bus}:00.1"),
        )
        for place, bus in enumerate(buses)
    )
    values: dict[str, Any] = {
        "id": id,
        "name": "gpu-vm",
        "status": "stopped",
        "memory_mib": 262_144,
        "hostpci": lines,
        "agent": True,
        "machine": "pc-q35-10.1",
        "bios": "ovmf",
        "cpu": "host",
    }
    return VmConfig(**(values | fields))


def container(id: int = 129, cards: int = 4, **fields: Any) -> ContainerConfig:
    devices = tuple(ContainerDevice(f"dev{place}", f"/dev/nvidia{place}") for place in range(cards))
    values: dict[str, Any] = {"id": id, "status": "running", "devices": devices}
    return ContainerConfig(**(values | fields))


def inventory(slots: tuple[Slot, ...] | None = None, **fields: Any) -> Inventory:
    """Four cards on the nvidia driver, CT 129 that has them, VM 100 that may, and memory enough."""
    values: dict[str, Any] = {
        "taken_at": 1_796_000_000.0,
        "node": "pve1",
        "iommu": True,
        "slots": tuple(map(slot, BUSES)) if slots is None else slots,
        "vms": (vm(),),
        "containers": (container(),),
        "drivers": ("nvidia", "snd_hda_intel", "vfio-pci"),
        "modules": ("nvidia", "nvidia_uvm", "vfio_pci"),
        "versions": Versions(
            module=VERSION, open_module=True, library=VERSION, container_libraries={129: VERSION}
        ),
        "memory": Memory(available_mib=600_000),
    }
    return Inventory(**(values | fields))


def scan(*holders: Any, **fields: Any) -> HolderScan:
    values: dict[str, Any] = {"taken_at": 1_796_000_000.0, "holders": holders, "processes": 300}
    return HolderScan(**(values | fields))
