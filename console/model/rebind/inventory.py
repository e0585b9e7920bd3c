"""Everything that decides whether a card can change sides: functions, groups, guests, reservations.

Layout of the facts: Documentation/ABI/testing/sysfs-bus-pci and sysfs-kernel-iommu_groups in the
kernel's tree; qm.conf(5), pct.conf(5) and qemu-server's PCI.pm of Proxmox VE.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from console.model.card import CLASS_DISPLAY, VENDOR_NVIDIA, Address

#: On which side cards are: ``vm`` behind vfio-pci, ``container`` on the nvidia driver.
Target = Literal["vm", "container"]

NVIDIA = "nvidia"
VFIO = "vfio-pci"


def is_vfio(driver: str | None) -> bool:
    """Whether the driver is vfio-pci or one of its variants for one vendor (``nvgrace-gpu-vfio-pci``)."""
    return driver is not None and driver.endswith(VFIO)


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """One PCI function as sysfs shows it. None: the file is not there, or cannot be read."""

    address: Address
    vendor: int
    device: int
    class_code: int  # 24 bits: class, subclass, interface
    driver: str | None = None
    override: str | None = None  # driver_override; None also for "(null)"
    power_state: str | None = None  # D0, D3hot, D3cold, unknown
    power_control: str | None = None  # "on": never put to sleep; "auto"
    d3cold_allowed: bool | None = None
    reset_methods: tuple[str, ...] = ()  # in the order the kernel tries them
    config_ok: bool | None = None  # False: the first word of config space is all ones; None: not asked
    is_bridge: bool = False  # it has a bus below it; a group's viability does not count it
    pending: str | None = None  # the kernel has not answered this write about it; its override is not read

    @property
    def is_gpu(self) -> bool:
        return self.vendor == VENDOR_NVIDIA and self.class_code >> 16 == CLASS_DISPLAY

    @property
    def kind(self) -> str:
        """What it is, in a word, by class and subclass (PCI Code and ID Assignment)."""
        return _KINDS.get(self.class_code >> 8) or _CLASSES.get(self.class_code >> 16) or "device"


_KINDS = {
    0x0106: "SATA controller",
    0x0108: "NVMe disk",
    0x0107: "SAS controller",
    0x0403: "audio",
    0x0C03: "USB",
    0x0C80: "USB-C",
    0x0200: "network",
}
_CLASSES = {0x01: "disk controller", 0x02: "network", 0x03: "GPU", 0x04: "multimedia", 0x06: "bridge"}


class Group(msgspec.Struct, frozen=True):
    """An IOMMU group: what is in it goes to a guest together or not at all."""

    id: int
    members: tuple[Function, ...]  # all of them, by address

    @property
    def endpoints(self) -> tuple[Function, ...]:
        """The members without bridges."""
        return tuple(function for function in self.members if not function.is_bridge)


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A card: all functions of one slot, the GPU's first."""

    address: Address  # of the GPU function
    functions: tuple[Function, ...]
    group: Group | None = None  # None: the IOMMU is off
    uuid: str | None = None  # only while the nvidia driver has it
    minor: int | None = None  # N of /dev/nvidiaN, only while the nvidia driver has it
    boot_vga: bool = False
    framebuffer: str | None = None  # "fb0 (nvidia-drmdrmfb)": a console is drawn on it
    sriov_vfs: int = 0  # virtual functions that are switched on
    upstream: Address | None = None  # the port that it is plugged into
    bus_reset: bool = False  # the port has a file that resets the bus below it: see kernel_write.reset_bus

    @property
    def gpu(self) -> Function:
        return self.functions[0]

    @property
    def driver(self) -> str | None:
        return self.gpu.driver

    @property
    def name(self) -> str:
        """The slot without the function, as hostpci lines name it: ``0000:41:00``."""
        return self.address.rpartition(".")[0]

    @property
    def on_vfio(self) -> bool:
        """Every function that can be bound is on vfio: a VM can have the card."""
        return all(is_vfio(function.driver) for function in self.endpoints)

    @property
    def on_nvidia(self) -> bool:
        """The GPU function is on the nvidia driver: the host and its containers can have the card."""
        return self.driver == NVIDIA

    @property
    def endpoints(self) -> tuple[Function, ...]:
        """What has to move for this card: the endpoints of its group, or its own functions without one."""
        return self.group.endpoints if self.group is not None else self.functions

    @property
    def foreign(self) -> tuple[Function, ...]:
        """Endpoints of its group that are none of the card's own functions."""
        own = {function.address for function in self.functions}
        return tuple(function for function in self.endpoints if function.address not in own)


class HostPci(msgspec.Struct, frozen=True, kw_only=True):
    """One ``hostpciN`` line. ``functions`` is what it stands for on this host.

    With a mapping of several entries Proxmox takes the first that is free: ``functions`` then is the
    union, and ``alternatives`` holds each.
    """

    key: str  # hostpci0 … hostpci15; "args" when QEMU's own arguments name it, past Proxmox
    wanted: tuple[str, ...] = ()  # 0000:41:00 (all functions) or 0000:41:00.0
    mapping: str | None = None
    options: dict[str, str] = msgspec.field(default_factory=dict)
    functions: tuple[Address, ...] = ()
    alternatives: tuple[tuple[Address, ...], ...] = ()
    problem: str | None = None  # why it stands for nothing: a mapping that is not there, an unreadable text


VmStatus = Literal["running", "stopped"]


class VmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual machine of this node, as its file says and its process shows."""

    id: int
    name: str | None = None
    status: VmStatus | None = None  # None: /run/qemu-server cannot be read
    pid: int | None = None  # of its process while it runs
    lock: str | None = None
    memory_mib: int = 512  # Proxmox's default
    hugepages: str | None = None  # "2", "1024", "any"
    onboot: bool = False
    ha: str | None = None  # the state that the HA manager is to keep it in
    hostpci: tuple[HostPci, ...] = ()
    agent: bool = False
    machine: str | None = None
    bios: str | None = None
    cpu: str | None = None
    networks: int = 0  # number of netN lines: each adds to the start's deadline
    template: bool = False
    pending: bool = False  # the file has changes that wait for the next start

    @property
    def functions(self) -> tuple[Address, ...]:
        """Every function that one of its lines may take."""
        return tuple(dict.fromkeys(address for line in self.hostpci for address in line.functions))


class ContainerDevice(msgspec.Struct, frozen=True):
    """One ``devN`` line: the path must exist when the container starts."""

    key: str
    path: str
    options: dict[str, str] = msgspec.field(default_factory=dict)


class MountEntry(msgspec.Struct, frozen=True):
    """One ``lxc.mount.entry``. Without ``optional`` a missing source keeps the container from starting."""

    source: str
    target: str
    optional: bool = False


class DeviceRule(msgspec.Struct, frozen=True):
    """One ``lxc.cgroup2.devices.allow`` or ``.deny``. None stands for ``*``."""

    allow: bool
    kind: str  # "a", "b", "c"
    major: int | None
    minor: int | None
    access: str  # of "rwm"


class ContainerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A container of this node, as its file says and its control group shows."""

    id: int
    name: str | None = None
    status: VmStatus | None = None
    init: int | None = None  # the host's pid of its process 1, while it runs
    lock: str | None = None
    onboot: bool = False
    ha: str | None = None
    devices: tuple[ContainerDevice, ...] = ()
    mounts: tuple[MountEntry, ...] = ()
    cgroup_rules: tuple[DeviceRule, ...] = ()
    unprivileged: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """The device files of the host that it names, whichever way."""
        return tuple(
            dict.fromkeys(
                path
                for path in (
                    *(device.path for device in self.devices),
                    *(mount.source for mount in self.mounts),
                )
                if path.startswith("/dev/")
            )
        )

    @property
    def required(self) -> tuple[str, ...]:
        """Of ``nodes`` those without which it does not start."""
        optional = {mount.source for mount in self.mounts if mount.optional}
        named = {device.path for device in self.devices}
        return tuple(path for path in self.nodes if path in named or path not in optional)


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """One line of Proxmox's pci-id-reservations: who is to have a function, as long as ``pid`` lives."""

    address: Address
    vmid: int
    pid: int | None = None
    until: float | None = None  # Unix seconds: made before the process is there, and void after
    alive: bool | None = None  # None: not known


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """The NVIDIA driver's parts, which must be of one version. None: not loaded, or not found."""

    module: str | None = None  # what is loaded
    open_module: bool | None = None
    library: str | None = None  # libnvidia-ml of this host
    container_libraries: dict[int, str] = msgspec.field(default_factory=dict)  # of containers that run


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of the host, in MiB."""

    available_mib: int | None = None
    hugepages: dict[int, int] = msgspec.field(default_factory=dict)  # by size in KiB: free pages


class KernelReferences(msgspec.Struct, frozen=True, kw_only=True):
    """What in the kernel itself may keep a card busy, without any process. None: not loaded, or not told."""

    modeset: bool | None = None  # nvidia_drm draws: modeset=1
    fbdev: bool | None = None  # and puts the text console on the card: fbdev=1
    uvm_retained: dict[str, int] = msgspec.field(default_factory=dict)  # by UUID, where UVM tells


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """One look at all of it. ``taken_at`` is Unix seconds."""

    taken_at: float
    kernel: str | None = None
    node: str | None = None  # the name by which Proxmox knows this host
    iommu: bool = False
    slots: tuple[Slot, ...] = ()  # by address
    others: tuple[Function, ...] = ()  # every other PCI function, as far as needed to name it
    vms: tuple[VmConfig, ...] = ()
    containers: tuple[ContainerConfig, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    drivers: tuple[str, ...] = ()  # PCI drivers that are loaded
    modules: tuple[str, ...] = ()  # kernel modules that matter to cards: those loaded
    nodes: tuple[str, ...] = ()  # of /dev/nvidia*, /dev/vfio/*: those that are there
    versions: Versions = Versions()
    memory: Memory = Memory()
    references: KernelReferences = KernelReferences()
    proxmox_absent: str | None = None  # why /etc/pve says nothing; None when it can be read
    problems: tuple[str, ...] = ()  # what could not be read: path and reason

    def slot(self, address: Address) -> Slot | None:
        """The card that has this function; None when it is none of ours."""
        return next(
            (slot for slot in self.slots if any(one.address == address for one in slot.functions)), None
        )

    def function(self, address: Address) -> Function | None:
        """Any function of the host."""
        return next((one for one in self._functions() if one.address == address), None)

    def vm(self, id: int) -> VmConfig | None:
        return next((vm for vm in self.vms if vm.id == id), None)

    def container(self, id: int) -> ContainerConfig | None:
        return next((container for container in self.containers if container.id == id), None)

    def slots_of(self, functions: Iterable[Address]) -> tuple[Slot, ...]:
        """The cards that these functions belong to, by address."""
        wanted = set(functions)
        return tuple(
            slot for slot in self.slots if wanted.intersection(one.address for one in slot.functions)
        )

    def _functions(self) -> Iterable[Function]:
        for slot in self.slots:
            yield from slot.functions
        yield from self.others
