"""The host's /sys, /proc, /etc and /run as a directory tree that a reader cannot tell from the real one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from console.simulator import memory
from console.simulator.guest_files import container_config, vm_config
from console.simulator.machine import (
    AUDIO_CLASS,
    AUDIO_DEVICE,
    CARD_NAME,
    CARDS,
    CONTAINER,
    CONTAINER_MEMORY,
    DRIVER_VERSION,
    GPU_CLASS,
    GPU_DEVICE,
    HOSTNAME,
    KERNEL,
    RAM,
    VENDOR,
    VM,
    CardSlot,
)

#: Other devices of the host: address, vendor, device, class, driver, IOMMU group.
_OTHERS = (
    ("0000:00:00.0", 0x1022, 0x14A4, 0x060000, None, 0),
    ("0000:62:00.0", 0x1A03, 0x2000, 0x030000, "ast", 58),
    ("0000:64:00.0", 0x15B3, 0x101D, 0x020000, "mlx5_core", 60),
    ("0000:66:00.0", 0x144D, 0xA80A, 0x010802, "nvme", 62),
)

#: The IOMMU groups of the ports that the cards are plugged into.
_PORT_GROUPS = (1, 21, 36, 49, 64, 77, 90, 105)

#: Kernel modules by the name of their PCI driver.
_MODULES = {
    "nvidia": "nvidia",
    "snd_hda_intel": "snd_hda_intel",
    "vfio-pci": "vfio_pci",
    "ast": "ast",
    "mlx5_core": "mlx5_core",
    "nvme": "nvme",
}

_LIBRARY = "usr/lib/x86_64-linux-gnu"

_SYSFS_DEVICES = "sys/bus/pci/devices"
_SYSFS_DRIVERS = "sys/bus/pci/drivers"
_GROUPS = "sys/kernel/iommu_groups"
_VFIO = "sys/class/vfio"

#: Major number of vfio's groups, as the box's /proc/devices has it.
_VFIO_MAJOR = 510

#: How proc(5) writes the states that the box plays.
_STATES = {"S": "S (sleeping)", "D": "D (disk sleep)"}


class PciFunction(msgspec.Struct, frozen=True, kw_only=True):
    """What is soldered or plugged in at an address. ``port`` is the one that a card is plugged into."""

    address: str
    vendor: int
    device: int
    class_code: int
    group: int
    numa_node: int = 0
    port: str | None = None


class Tree:
    """The tree under ``root``, which is a link into memory where there is some."""

    def __init__(self, root: Path, booted_at: float) -> None:
        self.root = root
        self.functions: dict[str, PciFunction] = {}  # by address, also those that were removed from the bus
        self._booted_at = booted_at
        self._memory: memory.MemoryDirectory | None = None

    def create(self) -> None:
        """Write all of it; what a former box left is removed."""
        self._clear()
        self._memory = memory.take()
        if self._memory is None:
            self.root.mkdir(parents=True)
        else:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.symlink_to(self._memory.path)
        for driver in ("nvidia", "snd_hda_intel", "vfio-pci", "pcieport", "ast", "mlx5_core", "nvme"):
            folder = self.root / _SYSFS_DRIVERS / driver
            folder.mkdir(parents=True)
            for name in ("bind", "unbind", "new_id", "remove_id"):
                self._write(folder / name, "")
            if driver in _MODULES:
                (self.root / "sys/module" / _MODULES[driver]).mkdir(parents=True, exist_ok=True)
                (folder / "module").symlink_to(f"../../../../module/{_MODULES[driver]}")
        (self.root / _SYSFS_DEVICES).mkdir(parents=True)
        self._write(self.root / "sys/bus/pci/drivers_probe", "")
        self._write(self.root / "sys/bus/pci/rescan", "")
        (self.root / "sys/class/iommu/ivhd0").mkdir(parents=True)
        for address, vendor, device, class_code, driver_name, group in _OTHERS:
            other = PciFunction(
                address=address, vendor=vendor, device=device, class_code=class_code, group=group
            )
            self._function(other, driver_name)
        self.set_boot_vga("0000:62:00.0")
        for card in CARDS:
            self._card(card)
        self._proc()
        self._modules()
        self._console()
        self._guests()

    def remove(self) -> None:
        """All of it goes."""
        self._clear()
        if self._memory is not None:
            self._memory.remove()
            self._memory = None

    def _clear(self) -> None:
        if self.root.is_symlink():
            self.root.unlink()
        elif self.root.exists():
            shutil.rmtree(self.root)

    # Cards -------------------------------------------------------------------------------------

    def _card(self, card: CardSlot) -> None:
        port, node = _port(card), card.numa_node
        bridge = PciFunction(
            address=port,
            vendor=0x1022,
            device=0x14AB,
            class_code=0x060400,
            group=_PORT_GROUPS[card.index],
            numa_node=node,
        )
        gpu = PciFunction(
            address=card.address,
            vendor=VENDOR,
            device=GPU_DEVICE,
            class_code=GPU_CLASS,
            group=card.group,
            numa_node=node,
            port=port,
        )
        audio = msgspec.structs.replace(gpu, address=card.audio, device=AUDIO_DEVICE, class_code=AUDIO_CLASS)
        self._function(bridge, "pcieport")
        self._function(gpu, "nvidia")
        self._function(audio, "snd_hda_intel")
        self.driver_has(card, card.index)

    def driver_has(self, card: CardSlot, minor: int | None) -> None:
        """What the nvidia driver tells of a card that it has under this minor; None: it has it no more."""
        folder = self.root / "proc/driver/nvidia/gpus" / card.address
        if minor is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        information = (
            f"Model: \t\t {CARD_NAME}\n"
            f"IRQ:   \t\t {181 + 3 * card.index}\n"
            f"GPU UUID: \t {card.uuid}\n"
            "Video BIOS: \t 98.02.52.00.02\n"
            "Bus Type: \t PCIe\n"
            "DMA Size: \t 52 bits\n"
            "DMA Mask: \t 0xfffffffffffff\n"
            f"Bus Location: \t {card.address}\n"
            f"Device Minor: \t {minor}\n"
            f"GPU Firmware: \t {DRIVER_VERSION}\n"
            "GPU Excluded:\t No\n"
        )
        self._write(folder / "information", information)

    def node(self, card: CardSlot) -> str | None:
        """``/dev/nvidiaN`` of a card, by the driver's own word; None while the driver does not have it."""
        information = self.root / "proc/driver/nvidia/gpus" / card.address / "information"
        if not information.is_file():
            return None
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("Device Minor"):
                return f"/dev/nvidia{line.split()[-1]}"
        return None

    def nodes(self) -> list[str]:
        """The device files of the cards that the driver has, in PCI order: as CUDA counts them."""
        return [node for card in CARDS if (node := self.node(card)) is not None]

    def _function(self, function: PciFunction, driver: str | None) -> None:
        """Its folder lies in that of the port above it."""
        self.functions[function.address] = function
        address, port = function.address, function.port
        above = (f"pci{port[:7]}/{port}" if port is not None else f"pci{address[:7]}").rstrip(":")
        place = f"sys/devices/{above}/{address}"
        folder = self.root / place
        folder.mkdir(parents=True)
        self.device(address).symlink_to(os.path.relpath(place, _SYSFS_DEVICES))
        (folder / "subsystem").symlink_to(os.path.relpath("sys/bus/pci", place))
        self._write(folder / "vendor", f"0x{function.vendor:04x}\n")
        self._write(folder / "device", f"0x{function.device:04x}\n")
        self._write(folder / "class", f"0x{function.class_code:06x}\n")
        self._write(folder / "subsystem_vendor", f"0x{function.vendor:04x}\n")
        self._write(folder / "subsystem_device", "0x204b\n" if port is not None else "0x0000\n")
        self._write(folder / "driver_override", "(null)\n")
        self._write(folder / "numa_node", f"{function.numa_node}\n")
        self._write(folder / "power_state", "D0\n")
        self._write(folder / "enable", "1\n")
        self._write(folder / "d3cold_allowed", "1\n")
        self._write(folder / "power/control", "on\n")
        self._write(folder / "power/runtime_status", "active\n")
        for name in ("remove", "rescan"):
            self._write(folder / name, "")
        bridge = function.class_code >> 8 == 0x0604
        if port is not None:
            # No bus reset: that is for a function that is alone on its bus (pci.c, pci_parent_bus_reset).
            self._write(folder / "reset_method", "flr\n")
            self._write(folder / "reset", "")
        elif bridge:
            self._write(folder / "reset_method", "pm\n")  # of the port itself
            for name in ("reset", "reset_subordinate"):
                self._write(folder / name, "")
        if function.class_code >> 8 == 0x0300:
            self._write(folder / "boot_vga", "0\n")
        speed, width = ("32.0 GT/s PCIe", "16") if port is not None else ("16.0 GT/s PCIe", "8")
        for side in ("current", "max"):
            self._write(folder / f"{side}_link_speed", f"{speed}\n")
            self._write(folder / f"{side}_link_width", f"{width}\n")
        (folder / "config").write_bytes(_config(function.vendor, function.device, function.class_code))
        if bridge:
            (folder / "pci_bus" / f"{address[:5]}{int(address[5:7], 16) + 1:02x}").mkdir(parents=True)
        group = str(function.group)
        members = self.root / _GROUPS / group / "devices"
        members.mkdir(parents=True, exist_ok=True)
        (members / address).symlink_to(os.path.relpath(folder, members))
        (folder / "iommu_group").symlink_to(os.path.relpath(self.root / _GROUPS / group, folder))
        if driver is not None:
            self.bind(address, driver)

    def unplug(self, address: str) -> None:
        """The function goes off the bus; it must have no driver. What it is stays known, for ``plug``."""
        folder = self.device(address).resolve()
        group = self.root / _GROUPS / str(self.functions[address].group)
        (group / "devices" / address).unlink()
        self.device(address).unlink()
        shutil.rmtree(folder)
        if not any((group / "devices").iterdir()):
            shutil.rmtree(group)

    def plug(self, address: str) -> None:
        """A function that was removed is found again, without a driver."""
        self._function(self.functions[address], None)

    def group_file(self, group: int, there: bool) -> None:
        """``/dev/vfio/GROUP`` comes or goes."""
        node, entry = self.root / f"dev/vfio/{group}", self.root / _VFIO / str(group)
        if there:
            self._write(node, "")
            self._write(entry / "dev", f"{_VFIO_MAJOR}:{group}\n")
        else:
            node.unlink(missing_ok=True)
            shutil.rmtree(entry, ignore_errors=True)

    def set_value(self, address: str, name: str, value: str) -> None:
        """A file of the function's own, such as ``power/control``."""
        self._write(self.device(address) / name, f"{value}\n")

    def value(self, address: str, name: str) -> str:
        return (self.device(address) / name).read_text(encoding="utf-8").strip()

    def driver(self, address: str) -> str | None:
        """What the link in the function's folder says."""
        link = self.device(address) / "driver"
        return link.readlink().name if link.is_symlink() else None

    def is_open(self, node: str) -> bool:
        """Whether some process has this device file open."""
        for process in (self.root / "proc").iterdir():
            if process.name.isdigit():
                for entry in (process / "fd").iterdir():
                    if str(entry.readlink()) == node:
                        return True
        return False

    def bind(self, address: str, driver: str | None) -> None:
        """Move the driver link of a function; None leaves it bound to nothing."""
        folder = self.device(address).resolve()
        link = folder / "driver"
        if link.is_symlink():
            (link.resolve() / address).unlink(missing_ok=True)
            link.unlink()
        if driver is not None:
            target = self.root.resolve() / _SYSFS_DRIVERS / driver
            link.symlink_to(os.path.relpath(target, folder))
            (target / address).symlink_to(os.path.relpath(folder, target))

    def lose(self, address: str) -> None:
        """The card has fallen off the bus: reads of its config space give ones."""
        for function in (address, address[:-1] + "1"):
            config = self.device(function) / "config"
            config.write_bytes(b"\xff" * config.stat().st_size)

    def set_boot_vga(self, address: str) -> None:
        self._write(self.device(address) / "boot_vga", "1\n")

    def device(self, address: str) -> Path:
        return self.root / _SYSFS_DEVICES / address

    # Processes ---------------------------------------------------------------------------------

    def add_process(
        self,
        pid: int,
        *,
        name: str,
        argv: tuple[str, ...],
        cgroup: str,
        inner: int | None,
        parent: int,
        started_at: float,
        files: dict[int, str],
        tcp: str | None = None,
        environ: tuple[str, ...] = (),
        state: str = "S",
        stack: tuple[str, ...] = (),
    ) -> None:
        """``files`` are descriptors and what they link to; ``tcp`` is its network namespace's table.

        ``state`` is S or D; ``stack`` are the kernel's functions that it stands in, the innermost first.
        """
        folder = self.root / "proc" / str(pid)
        comm = name[:15]
        ids = str(pid) if inner is None else f"{pid}\t{inner}"
        ticks = int((started_at - self._booted_at) * 100)
        self._write(folder / "comm", f"{comm}\n")
        self._write(folder / "cmdline", "\0".join(argv) + "\0")
        self._write(folder / "environ", "".join(f"{pair}\0" for pair in environ))
        self._write(folder / "cgroup", f"0::{cgroup}\n")
        self._write(
            folder / "status",
            f"Name:\t{comm}\nUmask:\t0022\nState:\t{_STATES[state]}\nTgid:\t{pid}\nNgid:\t0\nPid:\t{pid}\n"
            f"PPid:\t{parent}\nTracerPid:\t0\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nFDSize:\t256\n"
            f"NStgid:\t{ids}\nNSpid:\t{ids}\nNSpgid:\t{ids}\nThreads:\t41\n",
        )
        self._write(
            folder / "stat",
            f"{pid} ({comm}) {state} {parent} {pid} {pid} 0 -1 4194560 91 0 0 0 4120 933 0 0 20 0 41 0 "
            f"{ticks} 88212148224 1183220 18446744073709551615 1 1 0 0 0 0 0 16781312 17642 0 0 0 17 3 "
            "0 0 0 0 0 0 0 0 0 0 0 0 0\n",
        )
        if stack:
            self._write(folder / "stack", "".join(f"[<0>] {line}\n" for line in stack))
        (folder / "fd").mkdir()
        for number, target in files.items():
            (folder / "fd" / str(number)).symlink_to(target)
        if tcp is not None:
            self._write(folder / "net/tcp", tcp)

    def stand(self, pid: int, state: str, stack: tuple[str, ...]) -> None:
        """The process now waits there in the kernel."""
        folder = self.root / "proc" / str(pid)
        head, _, rest = (folder / "stat").read_text(encoding="ascii").rpartition(") ")
        self._write(folder / "stat", f"{head}) {state}{rest[1:]}")
        self._write(folder / "stack", "".join(f"[<0>] {line}\n" for line in stack))

    def link_root(self, pid: int, rootfs: Path) -> None:
        """``/proc/PID/root`` of a process with its own root."""
        link = self.root / "proc" / str(pid) / "root"
        link.symlink_to(os.path.relpath(rootfs, link.parent))

    def set_tcp(self, pid: int, tcp: str) -> None:
        self._write(self.root / "proc" / str(pid) / "net/tcp", tcp)

    def remove_process(self, pid: int) -> None:
        shutil.rmtree(self.root / "proc" / str(pid), ignore_errors=True)

    # The rest ----------------------------------------------------------------------------------

    def set_available_memory(self, available: int) -> None:
        """``available`` in bytes."""
        total = RAM // 1024
        self._write(
            self.root / "proc/meminfo",
            f"MemTotal:       {total} kB\nMemFree:        {available // 1024 - 4_194_304} kB\n"
            f"MemAvailable:   {available // 1024} kB\nBuffers:          381204 kB\n"
            "Cached:         10885312 kB\nSwapTotal:       8388604 kB\nSwapFree:        8388604 kB\n"
            "HugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB\n",
        )

    def set_container_memory(self, service: str, used: int, cached: int) -> None:
        """The control groups of the container and of its service: bytes in use, and of page cache."""
        container = self.root / f"sys/fs/cgroup/lxc/{CONTAINER}"
        for group, limit, cache in (
            (container, str(CONTAINER_MEMORY), cached),
            (container / "ns/system.slice" / service, "max", 0),
        ):
            self._write(group / "memory.max", f"{limit}\n")
            self._write(group / "memory.high", "max\n")
            self._write(group / "memory.current", f"{used + cache}\n")
            stat = f"anon {used}\nfile {cache}\nshmem 0\nactive_file 0\ninactive_file {cache}\n"
            self._write(group / "memory.stat", stat)
        self._write(container / "cgroup.events", "populated 1\nfrozen 0\n")

    def set_members(self, group: str, pids: tuple[int, ...]) -> None:
        """The processes of a control group, by the host's pids."""
        path = self.root / "sys/fs/cgroup" / group / "cgroup.procs"
        self._write(path, "".join(f"{pid}\n" for pid in pids))

    def set_uptime(self, seconds: float) -> None:
        self._write(self.root / "proc/uptime", f"{seconds:.2f} {seconds * 118:.2f}\n")

    def _proc(self) -> None:
        driver = (
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER_VERSION}  Release Build  "
            "(dvs-builder@U22-I3-AE18-09-6)  Thu Oct 15 18:04:22 UTC 2026\n"
            "GCC version:  gcc version 14.2.0 (Debian 14.2.0-19)\n"
        )
        self._write(self.root / "proc/driver/nvidia/version", driver)
        self._write(self.root / "sys/module/nvidia/version", f"{DRIVER_VERSION}\n")
        self._write(self.root / "proc/sys/kernel/hostname", f"{HOSTNAME}\n")
        self._write(self.root / "proc/sys/kernel/osrelease", f"{KERNEL}\n")
        self._write(self.root / "proc/sys/kernel/random/boot_id", "2f6c1a0e-84b7-4f1d-9c52-70d3e5b8a916\n")
        self._write(self.root / "proc/stat", f"cpu  0 0 0 0 0 0 0 0 0 0\nbtime {int(self._booted_at)}\n")
        self._write(self.root / "proc/loadavg", "9.41 8.87 8.32 12/3120 901233\n")
        self._write(
            self.root / "proc/devices",
            "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n507 nvidia-uvm\n508 nvidia-caps\n"
            f"{_VFIO_MAJOR} vfio\n",
        )
        (self.root / "run/qemu-server").mkdir(parents=True)
        nodes = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", *(f"nvidia{card.index}" for card in CARDS))
        for name in ("vfio/vfio", *nodes):
            self._write(self.root / "dev" / name, "")

    def _modules(self) -> None:
        for name in ("nvidia_drm", "nvidia_modeset", "nvidia_uvm"):
            (self.root / "sys/module" / name).mkdir()
        for name in ("modeset", "fbdev"):
            self._write(self.root / "sys/module/nvidia_drm/parameters" / name, "N\n")
        self._write(self.root / "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0\n")
        for root in (self.root, self.root / f"var/lib/lxc/{CONTAINER}/rootfs"):
            (root / _LIBRARY).mkdir(parents=True)
            name = f"libnvidia-ml.so.{DRIVER_VERSION}"
            self._write(root / _LIBRARY / name, "")
            (root / _LIBRARY / "libnvidia-ml.so.1").symlink_to(name)

    def _console(self) -> None:
        """The host's text console is drawn by the board's own controller."""
        self._write(self.root / "proc/fb", "0 astdrmfb\n")
        self._write(
            self.root / "proc/iomem",
            "00001000-0009ffff : System RAM\n90000000-93ffffff : PCI Bus 0000:62\n"
            "  90000000-93ffffff : 0000:62:00.0\n"
            "28000000000-2bfffffffff : PCI Bus 0000:00\n  28000000000-2a001ffffff : PCI Bus 0000:01\n"
            "    28000000000-29fffffffff : 0000:01:00.0\n",
        )
        folder = self.root / "sys/class/graphics/fb0"
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(os.path.relpath(self.device("0000:62:00.0"), folder))

    def _guests(self) -> None:
        devices = "".join(
            f"dev{place}: /dev/{name},mode=0666\n"
            for place, name in enumerate(
                (*(f"nvidia{card.index}" for card in CARDS), "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
            )
        )
        for kind in ("lxc", "qemu-server"):
            (self.root / f"etc/pve/nodes/{HOSTNAME}/{kind}").mkdir(parents=True)
            (self.root / "etc/pve" / kind).symlink_to(f"local/{kind}")
        (self.root / "etc/pve/local").symlink_to(f"nodes/{HOSTNAME}")
        self._write(self.root / f"etc/pve/lxc/{CONTAINER}.conf", container_config(devices))
        self._write(self.root / f"etc/pve/qemu-server/{VM}.conf", vm_config())
        self._write(self.root / "etc/hostname", f"{HOSTNAME}\n")

    @staticmethod
    def _write(path: Path, text: str) -> None:
        try:
            path.write_text(text, encoding="utf-8")
        except FileNotFoundError:
            path.parent.mkdir(parents=True)
            path.write_text(text, encoding="utf-8")


def _port(card: CardSlot) -> str:
    """The root port above a card: bus 41 hangs below 0000:40:01.1."""
    return f"0000:{int(card.slot[5:7], 16) - 1:02x}:01.1"


def _config(vendor: int, device: int, class_code: int) -> bytes:
    """The first 256 bytes of a function's config space, as far as anybody reads them."""
    head = bytearray(256)
    head[0:2] = vendor.to_bytes(2, "little")
    head[2:4] = device.to_bytes(2, "little")
    head[4:6] = b"\x06\x04"
    head[6:8] = b"\x10\x00"
    head[8] = 0xA1
    head[9:12] = class_code.to_bytes(3, "little")
    head[14] = 0x01 if class_code >> 8 == 0x0604 else 0x80 if vendor == VENDOR else 0x00
    return bytes(head)
