"""Proxmox's files in every shape that its own tools write, and in shapes that nobody should write."""

# ruff: noqa: E501  configuration lines are as long as they are

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.rebind import pve
from console.model.rebind.inventory import ContainerDevice, DeviceRule, HostPci, MountEntry
from console.model.text import clean

PRESENT = ("0000:01:00.0", "0000:01:00.1", "0000:41:00.0", "0000:41:00.1", "0001:41:00.0")

VM = """\
#Two cards%3A the small ones\xe4
#hostpci7: 0000:e1:00
agent: enabled=1,fstrim_cloned_disks=1
args: -fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=65536
bios: ovmf
boot: order=scsi0
cpu: host,flags=+pcid
hostpci10: 41:00.1
hostpci2: host=0000:41:00.0,pcie=1,x-vga=0
hostpci0: 0000:01:00,pcie=1
lock: backup
machine: pc-q35-10.1+pve0,viommu=intel
memory: 262144
name: gpu-vm
net0: virtio=BC:24:11:4F:2D:A1,bridge=vmbr0
net1: virtio=BC:24:11:4F:2D:A2,bridge=vmbr1
onboot: 1
parent: before

[PENDING]
memory: 1024
delete: hostpci0

[before]
#a snapshot
hostpci5: 0000:c1:00
memory: 2048
lock: snapshot
snaptime: 1790000000
vmstate: local:x
"""


def test_a_whole_machine():
    vm = pve.read_vm(100, VM)
    assert (vm.name, vm.lock, vm.memory_mib, vm.onboot) == ("gpu-vm", "backup", 262_144, True)
    assert (vm.agent, vm.bios, vm.cpu, vm.machine) == (True, "ovmf", "host", "pc-q35-10.1+pve0")
    assert (vm.networks, vm.pending, vm.template) == (2, True, False)
    assert [(line.key, line.wanted) for line in vm.hostpci] == [
        ("hostpci0", ("0000:01:00",)),
        ("hostpci2", ("0000:41:00.0",)),
        ("hostpci10", ("0000:41:00.1",)),
    ], "in the order of their numbers; comments, snapshots and pending changes do not count"


def test_a_machine_that_says_nothing_has_proxmoxs_defaults():
    vm = pve.read_vm(100, "")
    assert (vm.memory_mib, vm.agent, vm.onboot, vm.hostpci, vm.pending, vm.lock) == (
        512,
        False,
        False,
        (),
        False,
        None,
    )


@pytest.mark.parametrize(
    ("line", "memory"),
    [("memory: 4096", 4096), ("memory: current=8192", 8192), ("memory: lots", 512), ("memory:", 512)],
)
def test_memory_in_both_of_its_forms(line: str, memory: int):
    assert pve.read_vm(100, line).memory_mib == memory


@pytest.mark.parametrize(
    ("line", "agent"),
    [
        ("agent: 1", True),
        ("agent: enabled=0", False),
        ("agent: 0", False),
        ("agent: enabled=on,type=isa", True),
    ],
)
def test_the_agent_in_its_forms(line: str, agent: bool):
    assert pve.read_vm(100, line).agent is agent


@pytest.mark.parametrize(
    ("value", "wanted", "mapping", "options"),
    [
        ("0000:41:00", ("0000:41:00",), None, {}),
        ("41:00.0", ("0000:41:00.0",), None, {}),
        ("host=0000:41:00,pcie=1", ("0000:41:00",), None, {"pcie": "1"}),
        ("pcie=1,host=0000:41:00", ("0000:41:00",), None, {"pcie": "1"}),
        ("0000:41:00.0;0000:41:00.1,rombar=0", ("0000:41:00.0", "0000:41:00.1"), None, {"rombar": "0"}),
        ("00000001:41:00", ("0001:41:00",), None, {}),
        ("0000:C1:00,x-vga=1,romfile=a b.rom", ("0000:c1:00",), None, {"x-vga": "1", "romfile": "a b.rom"}),
        ("mapping=gpu0,pcie=1", (), "gpu0", {"pcie": "1"}),
        ("mapping=gpu0,driver=keep", (), "gpu0", {"driver": "keep"}),
    ],
)
def test_every_form_of_hostpci(
    value: str, wanted: tuple[str, ...], mapping: str | None, options: dict[str, str]
):
    line = pve.read_hostpci("hostpci0", value)
    assert (line.wanted, line.mapping, line.options, line.problem) == (wanted, mapping, options, None)


@pytest.mark.parametrize(
    "value", ["", "pcie=1", "0000:41", "0000:zz:00", "0000:41:20.0", "41:00.8", "gpu0", ";"]
)
def test_a_hostpci_that_names_nothing_says_so(value: str):
    line = pve.read_hostpci("hostpci3", value)
    assert line.problem is not None
    assert line.problem.startswith("hostpci3: ")
    assert pve.resolve(line, PRESENT, {}, "pve1").functions == ()


def test_devices_that_qemu_gets_past_proxmox_are_seen():
    text = "args: -device vfio-pci,host=0000:41:00.0,id=gpu,bus=b -device vfio-pci,id=x,host=41:00.1 -device e1000\n"
    (line,) = pve.read_vm(100, text).hostpci
    assert (line.key, line.wanted) == ("args", ("0000:41:00.0", "0000:41:00.1"))
    assert pve.read_vm(100, "args: -cpu host -device virtio-net,host=1\n").hostpci == ()


MAPPING = """\
gpu0
\tdescription the first one
\tmap id=10de:2bb1,iommugroup=24,node=pve1,path=0000:41:00,subsystem-id=10de:204b
\tmap id=10de:2bb1,iommugroup=30,node=pve2,path=0000:c1:00

any
\tmap id=10de:2bb1,iommugroup=24,node=pve1,path=0000:01:00
\tmap id=10de:2bb1,iommugroup=25,node=pve1,path=0000:41:00.0;0000:41:00.1

elsewhere
\tmap node=pve2,path=0000:41:00

gone
\tmap node=pve1,path=0000:e1:00
"""


def resolved(value: str, node: str | None = "pve1") -> HostPci:
    return pve.resolve(pve.read_hostpci("hostpci0", value), PRESENT, pve.read_mappings(MAPPING), node)


def test_a_line_stands_for_the_functions_that_this_host_has():
    assert resolved("0000:41:00").functions == ("0000:41:00.0", "0000:41:00.1")
    assert resolved("41:00.1").functions == ("0000:41:00.1",)
    assert resolved("0001:41:00").functions == ("0001:41:00.0",)


def test_a_mapping_of_one_card_and_one_of_several():
    assert resolved("mapping=gpu0").functions == ("0000:41:00.0", "0000:41:00.1")
    several = resolved("mapping=any")
    assert several.alternatives == (("0000:01:00.0", "0000:01:00.1"), ("0000:41:00.0", "0000:41:00.1"))
    assert several.functions == ("0000:01:00.0", "0000:01:00.1", "0000:41:00.0", "0000:41:00.1")


@pytest.mark.parametrize(
    ("value", "node", "words"),
    [
        ("0000:e1:00", "pve1", "this host has no device 0000:e1:00"),
        ("0000:41:00;e1:00.0", "pve1", "this host has no device 0000:e1:00.0"),
        ("mapping=nobody", "pve1", "there is no mapping nobody"),
        ("mapping=elsewhere", "pve1", "has no device of this node"),
        ("mapping=gpu0", None, "has no device of this node"),
        ("mapping=gone", "pve1", "names 0000:e1:00, which this host does not have"),
    ],
)
def test_a_line_that_stands_for_nothing_says_why(value: str, node: str | None, words: str):
    assert words in (resolved(value, node).problem or "")


CONTAINER = """\
arch: amd64
dev0: /dev/nvidia0,mode=0666
dev1: path=/dev/nvidia1,uid=100,deny-write=1
dev2: nonsense
hostname: sglang
onboot: 1
unprivileged: 1
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.deny = c 195:7 rwm
lxc.cgroup.devices.allow: c 507:0 rwm
lxc.cgroup2.devices.allow: a
lxc.cgroup2.devices.allow: whatever
lxc.mount.entry: /dev/nvidia2 dev/nvidia2 none bind,optional,create=file
lxc.mount.entry = /dev/nvidia3 dev/nvidia3 none bind,create=file 0 0
lxc.mount.entry: /mnt/my\\040models mnt none bind
lxc.mount.entry: short
[snap]
dev9: /dev/nvidia9
"""


def test_a_whole_container():
    ct = pve.read_container(129, CONTAINER)
    assert (ct.name, ct.onboot, ct.unprivileged, ct.lock) == ("sglang", True, True, None)
    assert ct.devices == (
        ContainerDevice("dev0", "/dev/nvidia0", {"mode": "0666"}),
        ContainerDevice("dev1", "/dev/nvidia1", {"uid": "100", "deny-write": "1"}),
    )
    assert ct.mounts == (
        MountEntry("/dev/nvidia2", "dev/nvidia2", True),
        MountEntry("/dev/nvidia3", "dev/nvidia3", False),
        MountEntry("/mnt/my models", "mnt", False),
    )
    assert ct.cgroup_rules == (
        DeviceRule(True, "c", 195, None, "rwm"),
        DeviceRule(False, "c", 195, 7, "rwm"),
        DeviceRule(True, "c", 507, 0, "rwm"),
        DeviceRule(True, "a", None, None, "rwm"),
    )
    assert ct.nodes == ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidia3")
    assert ct.required == ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia3"), (
        "one that is optional is not needed"
    )


def test_what_a_container_may_open():
    rules = (
        "lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.deny: c 195:7 rwm\ndev0: /dev/nvidia9\n"
    )
    ct = pve.read_container(129, rules)
    assert pve.allows(ct, "/dev/nvidia2", 195, 2)
    assert not pve.allows(ct, "/dev/nvidia7", 195, 7), "the last rule that fits counts"
    assert not pve.allows(ct, "/dev/other", 507, 0)
    assert pve.allows(ct, "/dev/nvidia9", 1, 9), "a dev line allows its own device"
    mounted = pve.read_container(129, "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind\n")
    assert not pve.allows(mounted, "/dev/nvidia0", 195, 0), "a mount alone allows nothing"


def test_reservations_and_what_is_none():
    text = "0000:41:00.0 100 pid:4711\n0000:41:00.1 100 time:1796000000\n0000:61:00 x pid:1\n0000:61:00.0 100 pid:\n\n"
    first, second = pve.read_reservations(text)
    assert (first.address, first.vmid, first.pid, first.until) == ("0000:41:00.0", 100, 4711, None)
    assert (second.address, second.pid, second.until) == ("0000:41:00.1", None, 1_796_000_000.0)


def test_what_ha_keeps():
    text = "vm: 100\n\tgroup all\n\tstate stopped\n\nct: 129\n\tmax_restart 2\n\nvm: x\n\tstate started\n"
    assert pve.read_ha(text) == {"vm:100": "stopped", "ct:129": "started"}


def test_text_for_the_screen_is_safe():
    vm = pve.read_vm(100, "name: \x1b]0;owned\x07gpu\u202evm\nhostpci0: \x1b[2Jx\nlock: \x1b[31mbackup\n")
    assert (vm.name, vm.lock) == ("gpuvm", "backup")
    assert vm.hostpci[0].problem == "hostpci0: x is no PCI address"


LINES = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.builds("{}: {}".format, st.sampled_from(["hostpci0", "hostpci3", "dev0", "memory", "lock", "args", "agent", "lxc.mount.entry", "lxc.cgroup2.devices.allow"]), st.text(max_size=40)),
        st.sampled_from(["[PENDING]", "[a]", "#x", "hostpci1: 41:00;01:00.0", "hostpci2: mapping=gpu0", "\tmap node=pve1,path=0000:41:00", "0000:41:00.0 100 pid:1"]),
    ),
    max_size=12,
)  # fmt: skip


@given(lines=LINES)
def test_any_text_is_survived_and_safe_to_print(lines: list[str]):
    text = "\n".join(lines)
    mappings = pve.read_mappings(text)
    vm = pve.read_vm(100, text)
    for line in vm.hostpci:
        found = pve.resolve(line, PRESENT, mappings, "pve1")
        assert set(found.functions) <= set(PRESENT), "only what this host has"
        assert found.functions or found.problem, "a line stands for something or says why not"
        assert clean(found.problem or "") == (found.problem or "")
    ct = pve.read_container(129, text)
    assert all(node.startswith("/dev/") and clean(node) == node for node in ct.nodes)
    assert set(ct.required) <= set(ct.nodes)
    pve.read_reservations(text)
    pve.read_ha(text)


@given(
    domain=st.one_of(st.none(), st.integers(0, 0xFFFF)),
    bus=st.integers(0, 255),
    device=st.integers(0, 31),
    part=st.one_of(st.none(), st.integers(0, 7)),
    upper=st.booleans(),
)
def test_any_address_reads_the_same_however_it_is_written(
    domain: int | None, bus: int, device: int, part: int | None, upper: bool
):
    slot = f"{bus:02x}:{device:02x}"
    tail = "" if part is None else f".{part}"
    written = ("" if domain is None else f"{domain:04x}:") + slot + tail
    assert pve.normal(written.upper() if upper else written) == f"{domain or 0:04x}:{slot}{tail}"
