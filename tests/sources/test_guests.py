"""Proxmox's files of one host: which cards a guest is given here, whether it runs, what cannot be read."""

# ruff: noqa: E501  configuration lines are as long as they are

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from console.model.rebind.inventory import ContainerDevice, DeviceRule, MountEntry, VmConfig
from console.sources.guests import Guests, is_vm_process, read_guests

PRESENT = tuple(f"0000:{bus}:00.{number}" for bus in ("01", "21", "41") for number in range(2))
NOW = 1_796_000_000.0


class Proxmox:
    """The files of a node named pve1, as its services lay them out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("nodes/pve1/qemu-server", "nodes/pve1/lxc", "mapping", "ha"):
            (root / "etc/pve" / folder).mkdir(parents=True)
        for name, to in (
            ("local", "nodes/pve1"),
            ("qemu-server", "nodes/pve1/qemu-server"),
            ("lxc", "nodes/pve1/lxc"),
        ):
            (root / "etc/pve" / name).symlink_to(to)
        (root / "run/qemu-server").mkdir(parents=True)
        (root / "sys/fs/cgroup/lxc").mkdir(parents=True)

    def write(self, path: str, text: str | bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode())

    def vm(self, id: int, *lines: str) -> None:
        self.write(f"etc/pve/qemu-server/{id}.conf", "".join(f"{line}\n" for line in lines))

    def ct(self, id: int, *lines: str) -> None:
        self.write(f"etc/pve/lxc/{id}.conf", "".join(f"{line}\n" for line in lines))

    def process(self, pid: int, *words: str) -> None:
        self.write(f"proc/{pid}/cmdline", "".join(f"{word}\0" for word in words))

    def kvm(self, pid: int, id: int) -> None:
        self.process(pid, "/usr/bin/kvm", "-id", str(id), "-name", "gpu-vm,debug-threads=on")

    def runs(self, id: int, pid: int, inner: int = 1, group: str = "init.scope") -> None:
        self.write(f"sys/fs/cgroup/lxc/{id}/cgroup.events", "populated 1\nfrozen 0\n")
        self.write(f"sys/fs/cgroup/lxc/{id}/ns/{group}/cgroup.procs", f"{pid}\n")
        self.write(f"proc/{pid}/status", f"Name:\tsystemd\nNSpid:\t{pid}\t{inner}\n")

    def read(self) -> Guests:
        return read_guests(self.root, PRESENT, NOW)

    def only(self) -> VmConfig:
        (vm,) = self.read().vms
        return vm


@pytest.fixture
def pve(tmp_path: Path) -> Proxmox:
    return Proxmox(tmp_path)


# Machines


@pytest.mark.parametrize(
    ("value", "functions", "options"),
    [
        ("0000:41:00,pcie=1,x-vga=1", ("0000:41:00.0", "0000:41:00.1"), {"pcie": "1", "x-vga": "1"}),
        ("41:00", ("0000:41:00.0", "0000:41:00.1"), {}),
        ("host=0000:41:00.0;0000:41:00.1", ("0000:41:00.0", "0000:41:00.1"), {}),
        ("0000:41:00.1,rombar=0,driver=keep", ("0000:41:00.1",), {"rombar": "0", "driver": "keep"}),
    ],
)
def test_a_hostpci_line_is_the_functions_that_are_here(
    pve: Proxmox, value: str, functions: tuple[str, ...], options: dict[str, str]
):
    pve.vm(100, f"hostpci0: {value}")
    (line,) = pve.only().hostpci
    assert (line.functions, line.options, line.problem) == (functions, options, None)
    assert pve.only().functions == functions


def test_a_mapping_counts_for_this_node_and_may_have_alternatives(pve: Proxmox):
    pve.write(
        "etc/pve/mapping/pci.cfg",
        "gpu0\n\tmap id=10de:2bb1,iommugroup=15,node=pve1,path=0000:41:00\n\tmap node=pve2,path=0000:01:00\n\n"
        "any\n\tdescription whichever is free\n\tmap node=pve1,path=0000:01:00.0;0000:01:00.1\n\tmap node=pve1,path=0000:21:00\n",
    )
    pve.vm(100, "hostpci0: mapping=gpu0,pcie=1", "hostpci1: mapping=any", "hostpci2: mapping=gone")
    one, several, gone = pve.only().hostpci
    assert (one.functions, one.alternatives) == (("0000:41:00.0", "0000:41:00.1"), ())
    assert [parts[0] for parts in several.alternatives] == ["0000:01:00.0", "0000:21:00.0"]
    assert gone.problem == "hostpci2: there is no mapping gone"


def test_snapshots_and_pending_changes_are_not_what_the_machine_has(pve: Proxmox):
    pve.vm(
        100,
        "hostpci0: 0000:41:00,pcie=1",
        "memory: 262144",
        "[PENDING]",
        "hostpci1: 0000:01:00",
        "delete: hostpci0",
        "[before]",
        "hostpci2: 0000:21:00",
        "memory: 1024",
    )
    vm = pve.only()
    assert (vm.functions, vm.memory_mib, vm.pending) == (("0000:41:00.0", "0000:41:00.1"), 262_144, True)


def test_cards_that_qemu_gets_by_its_own_arguments(pve: Proxmox):
    pve.vm(100, "args: -device vfio-pci,host=0000:41:00.0,multifunction=on -device vfio-pci,host=41:00.1")
    (line,) = pve.only().hostpci
    assert (line.key, line.functions) == ("args", ("0000:41:00.0", "0000:41:00.1"))


def test_a_machine_runs_when_its_pid_is_its_own_process(pve: Proxmox):
    for id in (100, 101, 102, 103):
        pve.vm(id, f"name: vm{id}")
    pve.kvm(4000, 100)
    pve.write("run/qemu-server/100.pid", "4000\n")
    pve.kvm(4001, 999)  # the number was used again
    pve.write("run/qemu-server/101.pid", "4001\n")
    pve.write("run/qemu-server/102.pid", "")  # written just now
    assert [(vm.id, vm.status, vm.pid) for vm in pve.read().vms] == [
        (100, "running", 4000),
        (101, "stopped", None),
        (102, None, None),
        (103, "stopped", None),
    ]


@pytest.mark.parametrize(
    ("words", "is_it"),
    [
        (("kvm", "-id", "100"), True),
        (("kvm", "-id", "1000"), False),
        (("kvm", "-name", "100"), False),
        (("grep", "-id 100"), False),
        ((), False),
    ],
)
def test_whose_process_it_is(pve: Proxmox, words: tuple[str, ...], is_it: bool):
    pve.process(5, *words)
    assert is_vm_process(pve.root, 5, 100) is is_it


def test_what_ha_keeps(pve: Proxmox):
    pve.vm(100, "name: a")
    pve.ct(129, "hostname: b")
    pve.write("etc/pve/ha/resources.cfg", "vm: 100\n\tstate stopped\n\nct: 129\n\tgroup all\n")
    found = pve.read()
    assert (found.vms[0].ha, found.containers[0].ha) == ("stopped", "started")


# Containers


def test_a_containers_ways_to_a_card(pve: Proxmox):
    pve.ct(
        129,
        "hostname: llm",
        "unprivileged: 1",
        "dev0: /dev/nvidia0,mode=0666",
        "dev1: path=/dev/nvidia-uvm,uid=1000",
        "lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,optional,create=file",
        "lxc.mount.entry: /dev/nvidiactl dev/nvidiactl none bind,create=file",
        "lxc.cgroup2.devices.allow: c 195:* rwm",
        "lxc.cgroup2.devices.deny: c 195:3 rwm",
        "[before]",
        "dev2: /dev/nvidia2",
    )
    (ct,) = pve.read().containers
    assert ct.unprivileged
    assert ct.devices == (
        ContainerDevice("dev0", "/dev/nvidia0", {"mode": "0666"}),
        ContainerDevice("dev1", "/dev/nvidia-uvm", {"uid": "1000"}),
    )
    assert ct.mounts == (
        MountEntry("/dev/nvidia1", "dev/nvidia1", optional=True),
        MountEntry("/dev/nvidiactl", "dev/nvidiactl", optional=False),
    )
    assert ct.cgroup_rules == (
        DeviceRule(True, "c", 195, None, "rwm"),
        DeviceRule(False, "c", 195, 3, "rwm"),
    )
    assert ct.required == ("/dev/nvidia0", "/dev/nvidia-uvm", "/dev/nvidiactl")


@pytest.mark.parametrize("group", ["init.scope", ""])
def test_a_container_runs_while_its_group_has_processes(pve: Proxmox, group: str):
    for id in (129, 130, 131):
        pve.ct(id, f"hostname: ct{id}")
    pve.runs(129, 700, group=group)
    pve.write("sys/fs/cgroup/lxc/130/cgroup.events", "populated 0\n")
    assert [(ct.id, ct.status, ct.init) for ct in pve.read().containers] == [
        (129, "running", 700),
        (130, "stopped", None),
        (131, "stopped", None),
    ]


def test_a_container_whose_first_process_cannot_be_told_runs_all_the_same(pve: Proxmox):
    pve.ct(129, "hostname: llm")
    pve.runs(129, 700, inner=55)
    (ct,) = pve.read().containers
    assert (ct.status, ct.init) == ("running", None)


def test_without_control_groups_nobody_knows(pve: Proxmox):
    pve.ct(129, "hostname: llm")
    (pve.root / "sys/fs/cgroup/lxc").rmdir()
    (pve.root / "sys/fs/cgroup").rmdir()
    assert pve.read().containers[0].status is None


# Reservations


def test_reservations_live_as_long_as_their_process_or_their_time(pve: Proxmox):
    pve.kvm(4000, 100)
    pve.process(4001, "/usr/bin/sleep", "9")
    pve.write(
        "run/qemu-server/pci-id-reservations",
        f"0000:41:00.0 100 pid:4000\n0000:41:00.1 100 pid:4001\n0000:01:00.0 101 pid:4999\n"
        f"0000:21:00.0 102 time:{NOW + 5:.0f}\n0000:21:00.1 102 time:{NOW - 5:.0f}\n0000:61:00.0 1",
    )
    assert [(one.address, one.vmid, one.alive) for one in pve.read().reservations] == [
        ("0000:41:00.0", 100, True),
        ("0000:41:00.1", 100, False),
        ("0000:01:00.0", 101, False),
        ("0000:21:00.0", 102, True),
        ("0000:21:00.1", 102, False),
    ]


# What is not as it should be


def test_a_half_written_file_loses_neither_its_other_lines_nor_the_other_guests(pve: Proxmox):
    pve.write("etc/pve/qemu-server/100.conf", b"name: a\xff\x00b\nhostpci0: 0000:41:00\nhostpci1: 0000:0")
    pve.write("etc/pve/qemu-server/101.conf", b"")
    pve.vm(102, "hostpci0: 0000:01:00")
    first, empty, last = pve.read().vms
    assert first.functions == ("0000:41:00.0", "0000:41:00.1")
    assert [line.problem for line in first.hostpci] == [None, "hostpci1: 0000:0 is no PCI address"]
    assert "\x00" not in (first.name or "")
    assert (empty.id, empty.hostpci) == (101, ())
    assert last.functions == ("0000:01:00.0", "0000:01:00.1")


def test_files_beside_the_guests_are_none(pve: Proxmox):
    for name in ("100.conf.tmp.123", "x.conf", "099.conf", "1.conf", "100"):
        pve.write(f"etc/pve/qemu-server/{name}", "name: x\n")
    assert pve.read().vms == ()
    assert pve.read().problems == ()


@pytest.mark.parametrize("kind", ["qemu-server", "lxc"])
def test_a_guest_that_cannot_be_read_is_named_and_the_others_stay(pve: Proxmox, kind: str):
    pve.write(f"etc/pve/{kind}/101.conf", "name: x\n")
    (pve.root / f"etc/pve/{kind}/100.conf").mkdir()  # reading it is an error for root as well
    found = pve.read()
    assert found.problems == (f"/etc/pve/{kind}/100.conf: Is a directory",)
    assert [one.id for one in (*found.vms, *found.containers)] == [101]


@pytest.mark.parametrize(
    "path",
    ["etc/pve/mapping/pci.cfg", "etc/pve/ha/resources.cfg", "run/qemu-server/pci-id-reservations"],
)
def test_any_other_file_that_cannot_be_read_is_named(pve: Proxmox, path: str):
    pve.vm(100, "hostpci0: 0000:41:00")
    (pve.root / path).mkdir(parents=True)
    found = pve.read()
    assert found.problems == (f"/{path}: Is a directory",)
    assert found.vms[0].functions == ("0000:41:00.0", "0000:41:00.1")


def test_a_pid_file_that_cannot_be_read_leaves_the_status_unknown(pve: Proxmox):
    pve.vm(100, "name: a")
    (pve.root / "run/qemu-server/100.pid").mkdir()
    assert pve.only().status is None


def test_a_host_without_proxmox(tmp_path: Path):
    found = read_guests(tmp_path, (), NOW)
    assert (found.vms, found.containers, found.problems) == ((), (), ())
    assert found.absent == "there is no /etc/pve: this host runs no Proxmox VE"
    (tmp_path / "etc/pve").mkdir(parents=True)
    assert "pve-cluster.service" in (read_guests(tmp_path, (), NOW).absent or "")


def test_the_nodes_name(pve: Proxmox):
    assert pve.read().node == "pve1"
    (pve.root / "etc/pve/local").unlink()
    pve.write("proc/sys/kernel/hostname", "pve7.lan\n")
    assert pve.read().node == "pve7"


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EACCES])
def test_proxmoxs_file_system_that_answers_nothing_is_not_a_host_without_guests(
    pve: Proxmox, monkeypatch: pytest.MonkeyPatch, number: int
):
    """When pmxcfs has crashed, each access below /etc/pve is ENOTCONN; without root it is EACCES."""
    place = str(pve.root / "etc/pve")

    def refusing(real: Any) -> Any:
        def called(path: Any, *more: Any, **named: Any) -> Any:
            if isinstance(path, str | Path) and str(path).startswith(place):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *more, **named)

        return called

    for name in ("stat", "lstat", "listdir", "scandir", "readlink"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    found = pve.read()
    assert found.absent is not None
    assert os.strerror(number) in found.absent
    assert f"/etc/pve/qemu-server: {os.strerror(number)}" in found.problems
