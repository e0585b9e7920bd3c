"""One look at a host that is a tree of files, laid out as the kernel and the driver lay them out."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from console.model.rebind.inventory import Inventory, Slot
from console.sources.inventory import read_apart, read_inventory
from console.sources.pending_writes import other_removals, own_writes, pending_for
from console.sources.source import Apart, Unavailable

GPU, SOUND, PORT = "0000:41:00.0", "0000:41:00.1", "0000:40:01.1"
AWAKE, ALL_ONES = bytes.fromhex("de10b12b06041000"), b"\xff" * 64
LINE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build  (root@builder)\n"
    "GCC version:  gcc version 14.2.0\n"
)


class Host:
    """A /sys, /proc, /dev of one machine: devices as links into the folder of the port above them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/bus/pci/devices").mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def link(self, path: str, to: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        (self.root / to).mkdir(parents=True, exist_ok=True)
        place.symlink_to(self.root / to)

    def function(
        self,
        address: str,
        driver: str | None,
        *,
        group: int | None = None,
        below: str | None = PORT,
        config: bytes = AWAKE,
        **files: str,
    ) -> str:
        folder = "sys/devices/pci0000:40/" + (f"{below}/" if below else "") + address
        values = {
            "vendor": "0x10de",
            "device": "0x2bb1",
            "class": "0x030000",
            "driver_override": "(null)",
            "power_state": "D0",
            "power/control": "on",
            "d3cold_allowed": "1",
            "reset_method": "flr bus",
        } | {name.replace("__", "/"): text for name, text in files.items()}
        for name, text in values.items():
            self.write(f"{folder}/{name}", f"{text}\n")
        (self.root / folder / "config").write_bytes(config)
        if driver is not None:
            self.link(f"{folder}/driver", f"sys/bus/pci/drivers/{driver}")
        if group is not None:
            self.link(f"{folder}/iommu_group", f"sys/kernel/iommu_groups/{group}")
            self.link(f"sys/kernel/iommu_groups/{group}/devices/{address}", folder)
        (self.root / "sys/bus/pci/devices" / address).symlink_to(self.root / folder)
        return folder

    def port(self, address: str = PORT, group: int | None = 15) -> None:
        folder = self.function(
            address, "pcieport", group=group, below=None, vendor="0x1022", reset_method="pm"
        )
        self.write(f"{folder}/class", "0x060400\n")
        (self.root / folder / "pci_bus").mkdir()

    def card(self, driver: str | None = "nvidia", **files: str) -> str:
        """A port, and below it a GPU with its sound."""
        self.port()
        folder = self.function(GPU, driver, group=15, **files)
        other = "snd_hda_intel" if driver == "nvidia" else driver
        self.function(SOUND, other, group=15, **{"class": "0x040300", "device": "0x22e8"})
        return folder

    def driver_says(self, address: str = GPU, minor: int = 3) -> None:
        self.write(
            f"proc/driver/nvidia/gpus/{address}/information",
            f"Model: \t\t NVIDIA RTX PRO 6000\nGPU UUID: \t GPU-0a1b\nBus Location: \t {address}\n"
            f"Device Minor: \t {minor}\n",
        )

    def process(self, pid: int, comm: str, command: str, *, state: str = "D", stack: str = "") -> None:
        folder = f"proc/{pid}"
        self.write(f"{folder}/comm", f"{comm}\n")
        self.write(f"{folder}/cmdline", "".join(f"{word}\0" for word in command.split()))
        self.write(f"{folder}/stat", f"{pid} ({comm}) {state} 1 1 1 0 -1 4194304\n")
        self.write(f"{folder}/stack", stack)

    def read(self, *cards: str, wake: bool = False) -> Inventory:
        return read_inventory(self.root, cards, wake=wake, wall=1_796_000_000.0)

    def only(self) -> Slot:
        (slot,) = self.read().slots
        return slot


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def function_of(slot: Slot, address: str) -> object:
    return next(one for one in slot.functions if one.address == address)


# Cards, groups


def test_a_card_on_the_driver(host: Host):
    folder = host.card()
    host.driver_says()
    host.write(f"{folder}/boot_vga", "1\n")
    host.write(f"{folder}/sriov_numvfs", "2\n")
    (host.root / "sys/class/iommu/dmar0").mkdir(parents=True)
    found = host.read()
    (slot,) = found.slots
    assert (found.iommu, found.drivers) == (True, ("nvidia", "pcieport", "snd_hda_intel"))
    assert (slot.address, slot.driver, slot.minor, slot.uuid) == (GPU, "nvidia", 3, "GPU-0a1b")
    assert [(one.address, one.kind, one.driver) for one in slot.functions] == [
        (GPU, "GPU", "nvidia"),
        (SOUND, "audio", "snd_hda_intel"),
    ]
    assert (slot.boot_vga, slot.sriov_vfs) == (True, 2)
    assert (slot.upstream, slot.bus_reset) == (PORT, False)
    assert (slot.gpu.override, slot.gpu.config_ok, slot.gpu.reset_methods) == (None, True, ("flr", "bus"))
    assert (slot.gpu.d3cold_allowed, slot.gpu.power_control, slot.gpu.pending) == (True, "on", None)


def test_only_a_port_with_a_file_for_it_can_reset_the_bus_below_it(host: Host):
    host.card()
    assert not host.only().bus_reset, "a port's own reset is none of what is below it"
    host.write(f"sys/devices/pci0000:40/{PORT}/reset_subordinate", "")
    assert host.only().bus_reset


def test_the_port_is_in_the_group_and_does_not_move(host: Host):
    host.card()
    slot = host.only()
    assert slot.group is not None
    assert [one.address for one in slot.group.members] == [PORT, GPU, SOUND]
    assert [one.address for one in slot.endpoints] == [GPU, SOUND]
    assert slot.foreign == ()


def test_a_disk_in_the_group_is_known_by_what_it_is(host: Host):
    host.card()
    host.function("0000:42:00.0", "nvme", group=15, **{"class": "0x010802", "vendor": "0x144d"})
    (disk,) = host.only().foreign
    assert (disk.address, disk.kind, disk.driver) == ("0000:42:00.0", "NVMe disk", "nvme")
    assert host.read().function("0000:42:00.0") == disk


def test_no_iommu_is_no_group(host: Host):
    host.function(GPU, "nvidia")
    found = host.read()
    assert (found.iommu, found.slots[0].group) == (False, None)
    assert found.slots[0].endpoints == found.slots[0].functions


def test_cards_come_by_address_and_other_vendors_only_when_named(host: Host):
    host.card()
    host.function("0000:01:00.0", "nvidia")
    host.function("0000:62:00.0", "ast", vendor="0x1a03")
    host.function("0000:81:00.0", "nvme", vendor="0x144d", **{"class": "0x010802"})
    assert [one.address for one in host.read().slots] == ["0000:01:00.0", GPU]
    named = host.read("0000:81:00.0").slots
    assert [one.address for one in named] == ["0000:01:00.0", GPU, "0000:81:00.0"]
    assert not named[-1].gpu.is_gpu


def test_virtual_functions_are_no_cards(host: Host):
    host.card()
    folder = host.function("0000:41:01.0", None)
    host.link(f"{folder}/physfn", "sys/devices/pci0000:40/" + f"{PORT}/{GPU}")
    assert [one.address for one in host.read().slots] == [GPU]


@pytest.mark.parametrize(("text", "override"), [("(null)", None), ("", None), ("vfio-pci", "vfio-pci")])
def test_an_override(host: Host, text: str, override: str | None):
    host.card(driver_override=text)
    assert host.only().gpu.override == override


def test_a_card_with_a_vm(host: Host):
    host.card("vfio-pci", power_state="D3hot", power__control="auto")
    host.write("dev/vfio/15", "")
    host.write("dev/vfio/vfio", "")
    host.write("dev/nvidia3", "")
    host.write("dev/nvidiactl", "")
    host.write("dev/nvram", "")
    found = host.read()
    slot = found.slots[0]
    assert (slot.on_vfio, slot.on_nvidia, slot.minor, slot.uuid) == (True, False, None, None)
    assert (slot.gpu.power_state, slot.gpu.power_control) == ("D3hot", "auto")
    assert found.nodes == ("/dev/nvidia3", "/dev/nvidiactl", "/dev/vfio/15")


def test_a_card_that_sleeps_is_not_woken_to_be_asked(host: Host):
    host.card("vfio-pci", power_state="D3cold", config=ALL_ONES)
    assert host.only().gpu.config_ok is None
    assert host.read(wake=True).slots[0].gpu.config_ok is False


def test_a_card_that_fell_off_the_bus(host: Host):
    host.card(config=ALL_ONES, power_state="unknown")
    slot = host.only()
    assert (slot.gpu.config_ok, slot.functions[1].config_ok) == (False, True)


def test_files_that_are_missing_or_absurd_are_unknown_and_lose_no_card(host: Host):
    folder = host.card(d3cold_allowed="maybe", reset_method="", power_state="")
    for name in ("config", "driver_override", "d3cold_allowed"):
        (host.root / folder / name).unlink()
    host.write("proc/driver/nvidia/gpus/" + GPU + "/information", "Device Minor: \t many\n\xff")
    slot = host.only()
    assert (slot.gpu.config_ok, slot.gpu.override, slot.gpu.d3cold_allowed) == (None, None, None)
    assert (slot.gpu.reset_methods, slot.minor) == ((), None)


def test_a_machine_without_pci(tmp_path: Path):
    with pytest.raises(Unavailable, match="sys/bus/pci/devices"):
        read_inventory(tmp_path)


# The host's console


def test_the_console_on_a_card(host: Host):
    folder = host.card()
    host.write("proc/fb", "0 nvidia-drmdrmfb\n")
    host.link("sys/class/graphics/fb0/device", f"{folder}/drm/card1")
    host.link("sys/class/graphics/fbcon", "sys/devices/virtual/graphics/fbcon")
    assert host.only().framebuffer == "fb0 (nvidia-drmdrmfb)"


def test_the_firmwares_picture_in_a_cards_memory(host: Host):
    host.card()
    host.write("proc/iomem", f"20000000000-21fffffffff : {GPU}\n  20000000000-200007effff : BOOTFB\n")
    assert host.only().framebuffer == "BOOTFB"


def test_a_console_on_the_boards_own_graphics_is_no_cards(host: Host):
    host.card()
    folder = host.function("0000:62:00.0", "ast", vendor="0x1a03")
    host.write("proc/fb", "0 astdrmfb\n")
    host.link("sys/class/graphics/fb0/device", folder)
    assert host.only().framebuffer is None


# The driver, memory


def test_the_drivers_parts(host: Host):
    host.card()
    host.write("proc/driver/nvidia/version", LINE)
    folder = host.root / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (folder / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.595.45.04")
    for name in ("nvidia", "nvidia_uvm", "nouveau", "ext4"):
        (host.root / "sys/module" / name).mkdir(parents=True)
    host.write("sys/module/nvidia_drm/parameters/modeset", "Y\n")
    host.write("sys/module/nvidia_drm/parameters/fbdev", "N\n")
    uuid = "GPU-0a1b2c3d-0000-1111-2222-333344445555"
    host.write(f"proc/driver/nvidia-uvm/gpus/UVM-{uuid}/info", "retained_count: 2\n")
    host.write("proc/meminfo", "MemTotal:  9 kB\nMemAvailable:   2097152 kB\n")
    host.write("sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "12\n")
    found = host.read()
    assert (found.versions.module, found.versions.open_module) == ("595.45.04", True)
    assert found.versions.library == "595.45.04"
    assert found.modules == ("nvidia", "nvidia_drm", "nvidia_uvm", "nouveau")
    assert (found.references.modeset, found.references.fbdev) == (True, False)
    assert found.references.uvm_retained == {uuid: 2}
    assert (found.memory.available_mib, found.memory.hugepages) == (2048, {1_048_576: 12})


def test_what_the_host_does_not_tell_is_unknown(host: Host):
    host.card()
    found = host.read()
    assert (found.versions.module, found.versions.open_module, found.versions.library) == (None, None, None)
    assert (found.memory.available_mib, found.references.modeset) == (None, None)
    assert "no Proxmox" in (found.proxmox_absent or "")


def test_the_library_in_a_container_that_runs(host: Host):
    host.card()
    host.write("etc/pve/lxc/129.conf", "hostname: llm\n")
    host.write("sys/fs/cgroup/lxc/129/cgroup.events", "populated 1\n")
    host.write("sys/fs/cgroup/lxc/129/ns/init.scope/cgroup.procs", "700\n")
    host.write("proc/700/status", "Name:\tsystemd\nNSpid:\t700\t1\n")
    folder = host.root / "proc/700/root/usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (folder / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.590.48.01")
    assert host.read().versions.container_libraries == {129: "590.48.01"}


# Writes that the kernel has not answered


def block(host: Host, folder: str) -> None:
    """Make the override a file whose reading never ends, as the kernel's is while the device is locked."""
    path = host.root / folder / "driver_override"
    path.unlink()
    os.mkfifo(path)


def read_within(host: Host, seconds: float = 3.0) -> Inventory:
    """The look, or a failure when it blocks: the thread is left behind then."""
    found: list[Inventory] = []
    thread = threading.Thread(target=lambda: found.append(host.read()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "the look waits for a file that the kernel's lock guards"
    return found[0]


@pytest.mark.parametrize(
    "path",
    [
        f"/sys/bus/pci/devices/{GPU}/driver/unbind",
        f"/sys/bus/pci/devices/{GPU}/subsystem/drivers/nvidia/bind",
        f"/sys/bus/pci/devices/{GPU}/driver_override",
    ],
)
def test_of_a_card_whose_write_hangs_nothing_guarded_is_read(host: Host, path: str):
    folder = host.card(None)
    block(host, folder)
    host.process(88, "dd", f"dd of={path} conv=nocreat,notrunc", stack="[<0>] msleep+0x2d\n")
    slot = read_within(host).slots[0]
    assert slot.gpu.override is None
    assert slot.gpu.pending is not None
    assert slot.gpu.pending.startswith(f"pid 88 (dd of={path}")


def test_a_write_about_one_card_is_not_held_against_another(host: Host):
    host.card(driver_override="vfio-pci")
    host.process(88, "dd", "dd of=/sys/bus/pci/devices/0000:61:00.0/driver/unbind")
    assert (host.only().gpu.pending, host.only().gpu.override) == (None, "vfio-pci")
    assert pending_for(host.root, GPU) == ()


def test_the_start_of_a_machine_that_hangs_counts_for_what_has_no_driver(host: Host):
    folder = host.card(None)
    block(host, folder)
    stack = "[<0>] nv_pci_remove+0x1\n[<0>] device_release_driver_internal+0x2\n[<0>] unbind_store+0x3\n"
    host.process(99, "task UPID:pve1:", "task UPID:pve1:000:qmstart:100:root@pam:", stack=stack)
    (host.root / "sys/devices/pci0000:40" / PORT / SOUND / "driver_override").unlink()
    slot = read_within(host).slots[0]
    assert "pid 99 (task UPID:pve1:000:qmstart:100" in (slot.gpu.pending or "")
    (one,) = pending_for(host.root, GPU)
    assert (one.pid, one.address, one.state, len(one.stack)) == (99, None, "D", 3)


def test_a_card_that_has_its_driver_is_not_being_removed(host: Host):
    host.card(driver_override="nvidia")
    host.process(99, "bash", "bash", stack="[<0>] unbind_store+0x3\n")
    assert host.only().gpu.pending is None
    assert host.only().gpu.override == "nvidia"


def test_a_write_by_hand_that_names_no_device_counts_for_what_has_no_driver(host: Host):
    """``echo 0000:41:00.0 | tee /sys/bus/pci/drivers/vfio-pci/bind`` says in no word which device it is."""
    folder = host.card(None)
    block(host, folder)
    host.process(
        97, "tee", "tee /sys/bus/pci/drivers/vfio-pci/bind", stack="[<0>] bind_store+0x3\n", state="D"
    )
    (host.root / "sys/devices/pci0000:40" / PORT / SOUND / "driver_override").unlink()
    assert "pid 97 (tee" in (read_within(host).slots[0].gpu.pending or "")
    assert [one.pid for one in pending_for(host.root, GPU)] == [97]


def test_processes_that_do_something_else_are_no_writes(host: Host):
    host.card(None)
    host.process(90, "dd", "dd if=/dev/zero of=/tmp/x", stack="[<0>] folio_wait\n")
    host.process(91, "cat", f"cat /sys/bus/pci/devices/{GPU}/driver/unbind", stack="[<0>] read\n")
    host.process(92, "dd", "", stack="")
    host.process(93, "kworker (x) y", "", state="R", stack="[<0>] unbind_store\n")
    assert own_writes(host.root) == other_removals(host.root) == ()
    assert host.only().gpu.pending is None


async def test_who_asks_while_a_look_hangs_keeps_his_loop(host: Host):
    folder = host.card("nvidia")
    block(host, folder)
    path = host.root / folder / "driver_override"
    apart: Apart[Inventory] = Apart("inventory")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read_apart(apart, host.root), 0.1)
    # The kernel answers: the thread that was left behind ends.
    await asyncio.to_thread(path.write_text, "(null)\n")
    found = await asyncio.wait_for(read_apart(apart, host.root), 3.0)
    assert found.slots[0].address == GPU
