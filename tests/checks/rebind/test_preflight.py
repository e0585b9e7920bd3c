"""What forbids a move of cards, what only warns, and what an operator reads about it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rebind_values import (
    BUSES,
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    VERSION,
    changed,
    container,
    function,
    inventory,
    scan,
    slot,
    vm,
)

from console.checks.rebind import preflight
from console.checks.stranded import stranded_outcome
from console.model.finding import Finding, overall
from console.model.rebind.choice import ChoiceProblem, choose
from console.model.rebind.facts import Facts
from console.model.rebind.holders import CardHolder
from console.model.rebind.inventory import (
    ContainerDevice,
    DeviceRule,
    Function,
    Group,
    HostPci,
    Inventory,
    KernelReferences,
    Memory,
    MountEntry,
    Reservation,
    Slot,
    Target,
    Versions,
    VmConfig,
)
from console.model.rebind.kernel_log import CardEvent

UNIT = "sglang.service"
SOUND = "0000:41:00.1"
DISK = function("0000:42:00.0", "nvme", vendor=0x144D, device=0xA80A, class_code=0x010802)


def facts(**fields: Any) -> Facts:
    values: dict[str, Any] = {"root": True, "module_on_disk": VERSION, "log": (), "holders": scan()}
    return Facts(**(values | fields))


def findings(
    world: Inventory,
    target: Target = "vm",
    *,
    chosen: tuple[Slot, ...] | None = None,
    told: Facts | None = None,
    machine: int | None = 100,
    ct: int | None = 129,
) -> dict[str, Finding]:
    found = preflight(
        world,
        target=target,
        chosen=world.slots if chosen is None else chosen,
        vm=machine,
        container=ct,
        unit=UNIT,
        facts=facts() if told is None else told,
    )
    assert len({one.id for one in found}) == len(found), "every check answers once"
    return {one.id: one for one in found}


def only(card: Slot, **fields: Any) -> Inventory:
    """A host with this card alone, which the VM names."""
    bus = card.address.split(":")[1]
    return inventory((card,), **({"vms": (vm(buses=(bus,)),)} | fields))


def away(**fields: Any) -> Inventory:
    """All cards are with VM 100, which runs."""
    slots = tuple(slot(bus, "vfio-pci") for bus in BUSES)
    return inventory(slots, **({"vms": (vm(status="running", pid=9),)} | fields))


def holder(pid: int, comm: str, **fields: Any) -> CardHolder:
    values: dict[str, Any] = {"name": comm, "open": ("/dev/nvidia2",), "cards": (THIRD,)}
    return CardHolder(pid=pid, comm=comm, **(values | fields))


def event(card: str | None, kind: Any, words: str) -> CardEvent:
    return CardEvent(at=1.0, card=card, kind=kind, words=words, grave=True)


# A host on which all is well


def test_nothing_is_held_against_a_host_where_all_is_well():
    there = findings(inventory())
    assert {one.verdict for one in there.values()} == {"pass"}, there
    back = findings(away(), "container")
    assert overall(tuple(back.values())) == "warn", "the VM still runs: the plan shuts it down"
    assert [one.id for one in back.values() if one.verdict != "pass"] == ["vm"]
    assert "4 of 4 to move to the VM" in there["cards"].evidence


def test_each_finding_that_is_not_well_says_what_to_do():
    world = inventory(
        (
            changed(
                slot("41", more=(DISK,), framebuffer="fb0 (EFI VGA)", sriov_vfs=2), SOUND, config_ok=False
            ),
        ),
        iommu=False,
        vms=(vm(lock="backup", hostpci=()),),
        memory=Memory(available_mib=1000),
    )
    bad = [one for one in findings(world, told=Facts(root=False)).values() if one.verdict in ("fail", "warn")]
    assert len(bad) >= 9
    assert not [one.id for one in bad if not one.remedy]


# P1 to P13: one that fails, beside the passes above


def test_p1_no_iommu():
    found = findings(inventory(iommu=False))["iommu"]
    assert (found.verdict, "off" in found.evidence) == ("fail", True)
    assert "firmware" in (found.remedy or "")
    found = findings(inventory((slot("41", group=None), slot("61"))))["iommu"]
    assert found.verdict == "fail"
    assert THIRD in found.evidence
    assert FOURTH not in found.evidence


def test_p2_a_disk_controller_in_the_group_is_named():
    found = findings(only(slot("41", more=(DISK,))))["group"]
    assert found.verdict == "fail"
    assert found.evidence == "group 15 of 0000:41:00.0 also has 0000:42:00.0 (NVMe disk on nvme)"
    assert "another slot" in (found.remedy or "")


def test_p2_bridges_and_the_cards_own_usb_do_not_count():
    usb = function("0000:41:00.2", "xhci_hcd", class_code=0x0C0330)
    card = slot("41")
    assert card.group is not None
    whole = Group(card.group.id, (*card.group.members, usb))
    card = msgspec.structs.replace(card, functions=(*card.functions, usb), group=whole)
    found = findings(only(card))["group"]
    assert (found.verdict, found.evidence) == (
        "pass",
        "3 functions, nothing else in their groups, 1 bridges do not count",
    )


def test_p2_two_cards_of_one_group_go_together_or_not_at_all():
    plain = [slot("41"), slot("61")]
    both = tuple(
        msgspec.structs.replace(one, group=Group(15, (*plain[0].functions, *plain[1].functions)))
        for one in plain
    )
    world = inventory(both, vms=(vm(buses=("41", "61")),))
    assert findings(world)["group"].verdict == "pass"
    alone = findings(world, chosen=both[:1])["group"]
    assert alone.verdict == "fail"
    assert f"{FOURTH} (GPU on nvidia), part of card {FOURTH}" in alone.evidence


@pytest.mark.parametrize(
    ("machine", "evidence", "remedy"),
    [
        (vm(status="running"), "VM 100 gpu-vm runs: it gets cards only when it starts", "qm shutdown 100"),
        (vm(lock="backup"), "VM 100 gpu-vm is locked: backup", "qm unlock 100"),
        (vm(template=True), "VM 100 gpu-vm is a template", "site file"),
        (vm(id=101), "this node has no VM 100", "qm list"),
    ],
)
def test_p3_a_machine_that_cannot_start(machine: VmConfig, evidence: str, remedy: str):
    found = findings(inventory(vms=(machine,)))["vm"]
    assert found.verdict == "fail"
    assert evidence in found.evidence
    assert remedy in (found.remedy or "")


def test_p3_a_machine_of_which_nobody_knows_whether_it_runs():
    found = findings(inventory(vms=(vm(status=None),)))["vm"]
    assert (found.verdict, found.evidence) == ("unknown", "VM 100 gpu-vm: whether it runs cannot be told")
    assert "qm status 100" in (found.remedy or "")


def test_p3_a_site_without_a_machine():
    assert findings(inventory(), machine=None)["vm"].remedy == "add vm: {id: …} to the site file"
    assert findings(inventory(), "container", machine=None)["vm"].verdict == "skipped"
    none = inventory(vms=(), proxmox_absent="there is no /etc/pve: this host runs no Proxmox VE")
    assert "runs no Proxmox" in findings(none)["vm"].evidence
    assert findings(none, "container")["vm"].verdict == "warn", "cards may come back without it"


def test_p3_changes_that_wait_for_the_start_are_told():
    found = findings(inventory(vms=(vm(pending=True),)))["vm"]
    assert (found.verdict, found.remedy) == ("warn", "qm pending 100")


def test_p3_a_machine_that_has_no_hostpci():
    found = findings(inventory(vms=(vm(hostpci=()),)))["vm-cards"]
    assert found.verdict == "fail"
    assert "it would start without cards" in found.evidence
    assert found.remedy == "qm set 100 --hostpci0 0000:01:00,pcie=1"


def test_p3_a_machine_that_names_other_cards():
    found = findings(inventory(vms=(vm(buses=("01", "21", "41")),)))["vm-cards"]
    assert (found.verdict, found.evidence) == ("fail", "VM 100 does not name 0000:61:00.0")
    assert "0000:61:00,pcie=1" in (found.remedy or "")
    world = inventory()
    more = findings(world, chosen=world.slots[:3])["vm-cards"]
    assert more.verdict == "fail"
    assert more.evidence == f"VM 100 also names {FOURTH}: its start would take them from the host"
    assert "/etc/pve/qemu-server/100.conf" in (more.remedy or "")


def test_p3_a_line_that_stands_for_nothing():
    broken = HostPci(key="hostpci3", mapping="gpu9", problem="hostpci3: there is no mapping gpu9")
    lines = (*vm(buses=("01", "21", "41")).hostpci, broken)
    found = findings(inventory(vms=(vm(hostpci=lines),)))["vm-cards"]
    assert (found.verdict, found.evidence) == ("fail", "hostpci3: there is no mapping gpu9")


def test_p3_a_card_of_which_the_machine_gets_the_gpu_alone():
    line = HostPci(key="hostpci0", wanted=(THIRD,), options={"pcie": "1"}, functions=(THIRD,))
    found = findings(only(slot("41"), vms=(vm(hostpci=(line,)),)))["vm-cards"]
    assert (found.verdict, found.evidence) == ("warn", f"VM 100 gets {THIRD} without {SOUND}")
    assert "hostpciN: 0000:41:00,pcie=1" in (found.remedy or "")


def test_p3_a_mapping_of_several_cards_names_more_than_are_chosen():
    line = HostPci(
        key="hostpci0",
        mapping="any",
        options={"pcie": "1"},
        functions=(THIRD, SOUND, FOURTH, "0000:61:00.1"),
        alternatives=((THIRD, SOUND), (FOURTH, "0000:61:00.1")),
    )
    world = inventory((slot("41"), slot("61")), vms=(vm(hostpci=(line,)),))
    assert findings(world)["vm-cards"].verdict == "warn", "all of them go: which is taken is the same"
    one = findings(world, chosen=world.slots[:1])["vm-cards"]
    assert one.verdict == "fail"
    assert FOURTH in one.evidence


def test_p3_cards_given_past_proxmox():
    line = HostPci(key="args", wanted=(THIRD, SOUND), functions=(THIRD, SOUND))
    found = findings(only(slot("41"), vms=(vm(hostpci=(line,)),)))["vm-cards"]
    assert found.verdict == "warn"
    assert "by its args, past Proxmox" in found.evidence


@pytest.mark.parametrize("target", ["vm", "container"])
def test_p3_another_machine_runs_with_one_of_them(target: Target):
    other = vm(id=101, buses=("41",), status="running")
    found = findings(inventory(vms=(vm(), other)), target)["reserved"]
    assert (found.verdict, found.evidence) == ("fail", f"VM 101 runs and names {THIRD}")
    assert "shut that VM down" in (found.remedy or "")
    stopped = findings(inventory(vms=(vm(), vm(id=101, buses=("41",)))), target)["reserved"]
    assert stopped.verdict == "pass"
    assert "VM 101, which is stopped" in stopped.evidence


def test_p3_reserved_for_another_machine():
    def reservation(vmid: int, alive: bool) -> Reservation:
        return Reservation(address=SOUND, vmid=vmid, pid=77, alive=alive)

    found = findings(inventory(reservations=(reservation(101, True),)))["reserved"]
    assert (found.verdict, found.evidence) == ("fail", f"{SOUND} is reserved for VM 101")
    fine = inventory(reservations=(reservation(101, False), reservation(100, True)))
    assert findings(fine)["reserved"].verdict == "pass"


def test_p4_both_start_at_boot_or_ha_keeps_one():
    both = inventory(vms=(vm(onboot=True),), containers=(container(onboot=True),))
    found = findings(both)["boot"]
    assert (found.verdict, found.evidence) == ("warn", "VM 100 and CT 129 both start at boot")
    kept = findings(inventory(vms=(vm(ha="started"),)))["boot"]
    assert (kept.verdict, kept.evidence) == ("warn", "HA keeps VM 100 started")
    assert "ha-manager" in (kept.remedy or "")
    needs = findings(inventory(containers=(container(onboot=True),)))["boot"]
    assert "without its cards it does not start" in needs.evidence
    mounts = tuple(
        MountEntry(f"/dev/nvidia{number}", f"dev/nvidia{number}", optional=True) for number in range(4)
    )
    bears = inventory(containers=(container(devices=(), mounts=mounts, onboot=True),))
    assert findings(bears)["boot"].verdict == "pass"


def test_p5_virtual_functions_are_on():
    found = findings(only(slot("41", sriov_vfs=4)))["sriov"]
    assert (found.verdict, found.evidence) == ("fail", f"switched on: {THIRD} has 4")
    assert "sriov_numvfs" in (found.remedy or "")


def test_p6_the_hosts_console_is_on_one_of_all_cards():
    cards = (slot("01"), slot("21", framebuffer="fb0 (nvidia-drmdrmfb)", boot_vga=True))
    world = inventory(cards, vms=(vm(buses=("01", "21")),))
    found = findings(world, chosen=choose(world, (), "auto"))["display"]
    assert (found.verdict, found.evidence) == (
        "fail",
        f"the host's console is drawn on {SECOND}: fb0 (nvidia-drmdrmfb)",
    )
    assert "the site's gpus" in (found.remedy or "")
    other = findings(world, chosen=choose(world, (), (FIRST,)))
    assert other["display"].verdict == "pass"
    booted = findings(only(slot("41", boot_vga=True)))["display"]
    assert (booted.verdict, THIRD in booted.evidence) == ("warn", True)


def test_p7_no_way_to_reset():
    card = changed(slot("41", bus_reset=False), THIRD, reset_methods=())
    found = findings(only(card))["reset"]
    assert (found.verdict, THIRD in found.evidence) == ("warn", True)
    assert "cold boot" in (found.remedy or "")
    by_port = findings(only(changed(slot("41"), THIRD, reset_methods=())))["reset"]
    assert (by_port.verdict, "bus by its port" in by_port.evidence) == ("pass", True)
    assert "D3cold is switched off for 1" in by_port.evidence


@pytest.mark.parametrize("which", [THIRD, SOUND])
@pytest.mark.parametrize("target", ["vm", "container"])
def test_p8_a_card_off_the_bus(which: str, target: Target):
    found = findings(only(changed(slot("41"), which, config_ok=False)), target)["present"]
    assert (found.verdict, found.evidence) == ("fail", f"{which}: config space reads all ones, off the bus")
    assert f"--recover {THIRD}" in (found.remedy or ""), "a card is what can be named"


def test_p8_a_card_asleep_is_no_dead_card_and_one_that_cannot_be_asked_is_unknown():
    asleep = changed(slot("41", "vfio-pci"), THIRD, config_ok=None, power_state="D3hot")
    assert findings(only(asleep), "container")["present"].evidence.startswith("1 asleep (D3hot)")
    unread = findings(only(changed(slot("41"), THIRD, config_ok=None)))["present"]
    assert (unread.verdict, unread.remedy) == ("unknown", "run gpuops as root")


def test_p9_what_the_kernel_complained_of():
    xid = "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', GPU has fallen off the bus."
    log = (event(FIRST, "reset", "another card"), event(THIRD, "lost", "older"), event(THIRD, "lost", xid))
    found = findings(only(slot("41")), told=facts(log=log))["kernel-log"]
    assert (found.verdict, found.evidence) == ("warn", f"2 in the last 24 h; {xid}")
    assert "journalctl -k" in (found.remedy or "")
    assert findings(only(slot("41")), told=facts(log=log[:1]))["kernel-log"].verdict == "pass"
    unread = findings(inventory(), told=facts(log=None, log_problem="journalctl: not found"))["kernel-log"]
    assert (unread.verdict, unread.evidence) == ("unknown", "journalctl: not found")


@pytest.mark.parametrize(
    ("free_mib", "returned_mib", "verdict"),
    [
        (262_143, 0, "fail"),
        (262_144, 0, "warn"),
        (262_144 + 4096, 0, "pass"),
        (100_000, 170_000, "pass"),
    ],
)
def test_p10_memory_for_the_machine(free_mib: int, returned_mib: int, verdict: str):
    world = inventory(memory=Memory(available_mib=free_mib))
    found = findings(world, told=facts(returned_mib=returned_mib))["memory"]
    assert found.verdict == verdict
    assert "VM 100 pins 256 GiB" in found.evidence
    assert verdict == "pass" or "qm set 100 --memory" in (found.remedy or "")


def test_p10_memory_that_nobody_knows_and_huge_pages():
    assert findings(inventory(memory=Memory()))["memory"].verdict == "unknown"
    huge = (vm(hugepages="1024"),)
    few = findings(inventory(vms=huge, memory=Memory(available_mib=600_000, hugepages={1_048_576: 200})))
    assert few["memory"].verdict == "warn"
    assert "200 GiB are free" in few["memory"].evidence
    enough = inventory(vms=huge, memory=Memory(available_mib=1, hugepages={1_048_576: 256, 2048: 0}))
    assert findings(enough)["memory"].verdict == "pass"


def test_p11_versions_that_differ():
    old = Versions(module=VERSION, open_module=True, library=VERSION, container_libraries={129: "590.48.01"})
    back = findings(away(versions=old), "container")["versions"]
    assert back.verdict == "fail", "NVML refuses in the container: the service does not start"
    assert f"loaded module {VERSION}" in back.evidence
    assert "library of CT 129 590.48.01" in back.evidence
    assert "one version" in (back.remedy or "")
    assert findings(inventory(versions=old))["versions"].verdict == "warn", "the VM does not need it"
    upgraded = findings(inventory(), told=facts(module_on_disk="600.10"))["versions"]
    assert (upgraded.verdict, "module on disk 600.10" in upgraded.evidence) == ("warn", True)
    assert findings(inventory(versions=Versions()), told=facts(module_on_disk=None))["versions"].verdict == (
        "unknown"
    )


def test_p11_a_driver_that_cannot_take_the_cards():
    closed = away(versions=Versions(module=VERSION, open_module=False))
    found = findings(closed, "container")["driver"]
    assert (found.verdict, "nvidia-open" in (found.remedy or "")) == ("fail", True)
    missing = away(drivers=("vfio-pci",), modules=("vfio_pci",))
    found = findings(missing, "container")["driver"]
    assert (found.verdict, found.remedy) == ("fail", "modprobe nvidia")
    assert findings(inventory(modules=("nvidia", "nouveau")))["driver"].verdict == "warn"
    unloaded = findings(inventory(drivers=("nvidia",), modules=("nvidia",)))["driver"]
    assert (unloaded.verdict, "the plan loads it" in unloaded.evidence) == ("pass", True)


def test_p11_nouveau_does_not_hide_that_nvidia_is_not_loaded():
    world = away(drivers=("nouveau", "vfio-pci"), modules=("nouveau", "vfio_pci"))
    assert findings(world, "container")["driver"].verdict == "fail"


def test_p12_a_stranger_on_a_card_is_named_with_how_to_end_it():
    held = scan(
        holder(812, "python3", name="python3 train.py", container=131, inner_pid=44, unit="session-c3.scope"),
        holder(900, "ollama", name="ollama serve", unit="ollama.service"),
    )
    found = findings(inventory(), told=facts(holders=held))["holders"]
    assert found.verdict == "fail"
    assert "pid 812 python3 train.py (CT 131, session-c3.scope): /dev/nvidia2" in found.evidence
    assert "pid 900 ollama serve (host, ollama.service)" in found.evidence
    assert "pct exec 131 -- kill 44" in (found.remedy or "")
    assert "systemctl stop ollama.service" in (found.remedy or "")


def test_p12_the_service_and_known_programs_are_let_go_of():
    held = scan(
        holder(10, "python3", name="sglang", container=129, inner_pid=5, unit=UNIT),
        holder(11, "nvidia-persiste"),
        holder(12, "python3", name="python3 /x/console/sources/nvml_worker.py"),
        holder(13, "python3", cards=("0000:c1:00.0",), open=("/dev/nvidia7",)),
    )
    found = findings(inventory(), told=facts(holders=held))["holders"]
    assert found.verdict == "pass"
    assert f"{UNIT} with 1 processes is stopped" in found.evidence
    assert "persistence mode is switched off" in found.evidence
    assert "gpuops' own reader, pid 12" in found.evidence


def test_p12_the_same_unit_in_another_container_is_a_stranger():
    held = scan(holder(10, "python3", container=130, inner_pid=5, unit=UNIT))
    found = findings(inventory(), told=facts(holders=held))["holders"]
    assert (found.verdict, "CT 130" in found.evidence) == ("fail", True)


def test_p12_a_machine_that_holds_a_card():
    held = scan(holder(9, "kvm", vm=100, open=("/dev/vfio/15",)))
    back = findings(away(), "container", told=facts(holders=held))["holders"]
    assert (back.verdict, "VM 100 is shut down" in back.evidence) == ("pass", True)
    other = scan(holder(9, "kvm", vm=101, open=("/dev/vfio/15",)))
    found = findings(away(), "container", told=facts(holders=other))["holders"]
    assert (found.verdict, found.remedy) == ("fail", "end it: qm shutdown 101")


def test_p12_not_knowing_who_holds_a_card_forbids_the_move():
    blind = findings(inventory(), told=facts(holders=None, holders_problem="/proc: denied"))["holders"]
    assert (blind.verdict, blind.evidence) == ("fail", "/proc: denied")
    some = findings(inventory(), told=facts(holders=scan(unreadable=7)))["holders"]
    assert (some.verdict, "7 of 300" in some.evidence) == ("fail", True)
    minor = findings(only(slot("41", minor=None)))["holders"]
    assert (minor.verdict, THIRD in minor.evidence) == ("fail", True)


def test_p13_what_the_kernel_itself_holds():
    world = inventory(references=KernelReferences(modeset=True, fbdev=True))
    found = findings(world)["kernel-clients"]
    assert (found.verdict, "fbdev=0" in (found.remedy or "")) == ("warn", True)
    direct = findings(inventory(modules=("nvidia", "nvidia_peermem")))["kernel-clients"]
    assert (direct.verdict, direct.remedy) == (
        "warn",
        "stop what uses them, then modprobe -r nvidia_peermem",
    )
    fine = inventory(references=KernelReferences(modeset=True, fbdev=False, uvm_retained={"GPU-41": 1}))
    told = findings(fine, told=facts(persistence={THIRD: True, FIRST: False}))["kernel-clients"]
    assert told.verdict == "pass"
    assert f"UVM retains {THIRD}" in told.evidence
    assert "persistence mode on 1" in told.evidence


def test_p13_a_removal_that_waits_in_the_kernel():
    words = f"pid 88 (dd of=/sys/bus/pci/devices/{THIRD}/driver/unbind)"
    card = changed(slot("41", None), THIRD, pending=words)
    found = findings(only(card))["removal"]
    assert (found.verdict, found.evidence) == ("fail", f"{THIRD}: {words} has not returned")
    assert "restart the host" in (found.remedy or "")
    bare = only(slot("41", None))
    busy = facts(log=(event(THIRD, "busy", "NVRM: Attempting to remove device"),))
    assert findings(bare, told=busy)["removal"].verdict == "fail"
    assert findings(bare)["removal"].verdict == "warn"


# The way back


def test_minors_for_which_the_container_has_no_node():
    few = away(containers=(container(cards=2),))
    found = findings(few, "container")["minors"]
    assert found.verdict == "warn"
    assert "CT 129 has no /dev/nvidia2, /dev/nvidia3" in found.evidence
    assert "dev0: /dev/nvidia2" in (found.remedy or "")
    assert f"{FIRST} becomes /dev/nvidia0" in findings(away(), "container")["minors"].evidence


def test_minors_that_the_container_may_not_open():
    mounts = tuple(
        MountEntry(f"/dev/nvidia{number}", f"dev/nvidia{number}", optional=True) for number in range(4)
    )
    rule = DeviceRule(True, "c", 195, None, "rwm")
    shut = away(containers=(container(devices=(), mounts=mounts),))
    assert findings(shut, "container")["minors"].verdict == "warn"
    opened = away(containers=(container(devices=(), mounts=mounts, cgroup_rules=(rule,)),))
    assert findings(opened, "container")["minors"].verdict == "pass"
    gone = findings(away(containers=()), "container")["minors"]
    assert (gone.verdict, "CT 129 has no configuration here" in gone.evidence) == ("unknown", True)
    assert findings(away(containers=()), "container", ct=None)["minors"].verdict == "pass"


def test_cards_that_are_there_already_need_nothing():
    assert findings(away())["cards"].evidence == "all 4 are on that side already"
    assert findings(away())["vm"].verdict == "pass"
    assert findings(inventory(), "container")["minors"].verdict == "skipped"


def test_a_machine_unfit_for_large_cards():
    plain = HostPci(key="hostpci0", wanted=("0000:41:00",), functions=(THIRD, SOUND))
    poor = vm(hostpci=(plain,), bios=None, machine=None, cpu=None, agent=False)
    found = findings(only(slot("41"), vms=(poor,)))["guest"]
    assert found.verdict == "warn"
    assert "bios seabios; machine i440fx; cpu kvm64; hostpci0 without pcie=1" in found.evidence
    assert "bios: ovmf" in (found.remedy or "")


# What an operator may ask for by mistake


def test_not_root():
    found = findings(inventory(), told=facts(root=False))["root"]
    assert (found.verdict, found.remedy) == ("fail", "run gpuops as root")


def test_no_card_a_card_twice_and_what_is_no_card():
    world = inventory()
    none = findings(world, chosen=())["cards"]
    assert (none.verdict, "--gpu" in (none.remedy or "")) == ("fail", True)
    twice = findings(world, chosen=(world.slots[0], world.slots[0]))["cards"]
    assert (twice.verdict, twice.remedy) == ("fail", "name each card once")
    disk = Slot(address=DISK.address, functions=(DISK,))
    wrong = findings(inventory((*world.slots, disk)), chosen=(disk,))["cards"]
    assert (wrong.verdict, wrong.evidence) == (
        "fail",
        "0000:42:00.0 (NVMe disk on nvme) is no NVIDIA GPU",
    )
    for asked in (("0000:42:00.0",), ("0000:99:00.0",), ("41:00", THIRD), (SOUND,)):
        with pytest.raises(ChoiceProblem):
            choose(inventory(others=(DISK,)), asked)


def test_files_that_could_not_be_read_are_told():
    found = findings(inventory(problems=("/etc/pve/qemu-server/101.conf: Input/output error",)))["read"]
    assert (found.verdict, "101.conf" in found.evidence) == ("unknown", True)


def test_long_lists_are_cut_with_their_number():
    disks = tuple(
        function(f"0000:42:{number:02x}.0", "nvme", vendor=1, class_code=0x010802) for number in range(9)
    )
    assert findings(only(slot("41", more=disks)))["group"].evidence.endswith("; and 5 more")


def test_names_from_outside_are_safe_to_print():
    held = scan(holder(5, "x", name="\x1b]0;owned\x07evil\u202e"))
    found = findings(inventory(vms=(vm(name="a\x1b[2Jb"),)), told=facts(holders=held))
    assert not [one for one in found.values() if "\x1b" in one.evidence + (one.remedy or "")]


# The doctor's line


def test_the_doctor_tells_what_was_left_half_way():
    assert stranded_outcome(inventory(()), 129)[0] == "skipped"
    assert stranded_outcome(inventory(), 129)[0] == "pass"
    idle = inventory(tuple(slot(bus, "vfio-pci") for bus in BUSES))
    verdict, told, remedy = stranded_outcome(idle, 129)
    assert (verdict, told.endswith("; and 1 more")) == ("warn", True)
    assert f"gpuops rebind --to container --gpu {FIRST}" in (remedy or "")
    mixed = inventory((slot("01", "vfio-pci"), changed(slot("41", None), THIRD, override="vfio-pci")))
    verdict, told, remedy = stranded_outcome(mixed, 129)
    assert verdict == "fail"
    assert f"gpuops rebind --repair --gpu {THIRD}" in (remedy or ""), (
        "what is broken comes before what is idle"
    )


# Any inventory

_maybe = st.none() | st.booleans()
_drivers = st.sampled_from(("nvidia", "vfio-pci", "nvgrace-gpu-vfio-pci", "nouveau", "snd_hda_intel", None))
_text = st.text(max_size=12)


@st.composite
def _functions(draw: st.DrawFn, address: str) -> Function:
    return Function(
        address=address,
        vendor=draw(st.sampled_from((0x10DE, 0x10DE, 0x144D))),
        device=draw(st.sampled_from((0x2BB1, 0x2204, 0))),
        class_code=draw(st.sampled_from((0x030000, 0x030200, 0x040300, 0x010802, 0x060400, 0))),
        driver=draw(_drivers),
        override=draw(st.none() | _text),
        power_state=draw(st.sampled_from(("D0", "D3hot", "D3cold", "unknown", None))),
        d3cold_allowed=draw(_maybe),
        reset_methods=draw(st.sampled_from(((), ("flr",), ("flr", "bus")))),
        config_ok=draw(_maybe),
        is_bridge=draw(st.booleans()),
        pending=draw(st.none() | _text),
    )


@st.composite
def _slots(draw: st.DrawFn, bus: str) -> Slot:
    own = tuple(draw(_functions(f"0000:{bus}:00.{n}")) for n in range(draw(st.integers(1, 3))))
    others = [f"0000:{where}:00.0" for where in (*BUSES, "e1", "e2")]
    beside = draw(st.lists(st.sampled_from(others), max_size=2, unique=True))
    members = (*own, *(draw(_functions(name)) for name in beside if name != own[0].address))
    return Slot(
        address=own[0].address,
        functions=own,
        group=draw(st.none() | st.just(Group(draw(st.integers(0, 3)), members))),
        uuid=draw(st.none() | _text),
        minor=draw(st.none() | st.integers(0, 3)),
        boot_vga=draw(st.booleans()),
        framebuffer=draw(st.none() | _text),
        sriov_vfs=draw(st.integers(0, 2)),
    )


@st.composite
def _machines(draw: st.DrawFn, id: int) -> VmConfig:
    known = st.sampled_from([f"0000:{bus}:00.{n}" for bus in (*BUSES, "e1") for n in range(2)])
    lines = [
        HostPci(
            key=draw(st.sampled_from(("hostpci0", "hostpci1", "args"))),
            mapping=draw(st.none() | _text),
            functions=tuple(draw(st.lists(known, max_size=3))),
            alternatives=((THIRD,), (FOURTH,)) if draw(st.booleans()) else (),
            problem=draw(st.none() | _text),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    return vm(
        id,
        hostpci=tuple(lines),
        status=draw(st.sampled_from(("running", "stopped", None))),
        lock=draw(st.none() | _text),
        hugepages=draw(st.sampled_from((None, "2", "1024", "any", "odd"))),
        memory_mib=draw(st.integers(0, 10**7)),
        onboot=draw(st.booleans()),
        ha=draw(st.none() | _text),
        template=draw(st.booleans()),
        bios=draw(st.none() | _text),
    )


@st.composite
def _worlds(draw: st.DrawFn) -> Inventory:
    machines = tuple(draw(_machines(id)) for id in (100, 101) if draw(st.booleans()))
    devices = tuple(ContainerDevice(f"dev{n}", f"/dev/nvidia{n}") for n in range(draw(st.integers(0, 2))))
    return inventory(
        tuple(draw(_slots(bus)) for bus in BUSES if draw(st.booleans())),
        iommu=draw(st.booleans()),
        vms=machines,
        containers=(container(devices=devices, onboot=draw(st.booleans())),) if draw(st.booleans()) else (),
        reservations=(Reservation(address=THIRD, vmid=draw(st.integers(100, 102)), alive=draw(_maybe)),),
        modules=draw(st.sampled_from(((), ("nvidia",), ("nouveau", "gdrdrv")))),
        drivers=draw(st.sampled_from(((), ("nvidia", "vfio-pci")))),
        versions=Versions(module=draw(st.none() | _text), open_module=draw(_maybe)),
        memory=Memory(available_mib=draw(st.none() | st.integers(0, 10**6)), hugepages={2048: 5}),
        references=KernelReferences(modeset=draw(_maybe), fbdev=draw(_maybe), uvm_retained={"GPU-x": 1}),
    )


@settings(max_examples=60, deadline=None)
@given(world=_worlds(), data=st.data())
def test_no_inventory_breaks_it_and_no_neighbour_is_ever_taken(world: Inventory, data: st.DataObject):
    chosen = tuple(one for one in world.slots if data.draw(st.booleans()))
    told = facts(
        root=data.draw(st.booleans()),
        log=data.draw(st.sampled_from((None, (), (event(None, "firmware", "WPR2"),)))),
        holders=data.draw(st.sampled_from((None, scan(), scan(holder(5, "x")), scan(unreadable=1)))),
    )
    machine = data.draw(st.sampled_from((None, 100)))
    ct = data.draw(st.sampled_from((None, 129)))
    findings(world, "container", chosen=chosen, told=told, machine=machine, ct=ct)
    there = findings(world, "vm", chosen=chosen, told=told, machine=machine, ct=ct)
    moved = {one.address for card in chosen for one in card.functions}
    foreign = [one for card in chosen for one in card.foreign if one.address not in moved]
    assert not foreign or there["group"].verdict == "fail"


@settings(max_examples=40, deadline=None)
@given(at=st.sampled_from(BUSES), class_code=st.integers(0, 0xFFFFFF), driver=_drivers, odd=st.booleans())
def test_on_a_host_where_all_else_is_well_a_neighbour_alone_forbids_it(
    at: str, class_code: int, driver: str | None, odd: bool
):
    neighbour = function("0000:e1:00.0", driver, vendor=0x10DE if odd else 0x8086, class_code=class_code)
    cards = tuple(slot(bus, more=(neighbour,) if bus == at else ()) for bus in BUSES)
    found = findings(inventory(cards))
    assert [one.id for one in found.values() if one.verdict == "fail"] == ["group"]
    assert "0000:e1:00.0" in found["group"].evidence
