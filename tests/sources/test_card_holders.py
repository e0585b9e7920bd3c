"""Who has a card open: real processes on real character devices, and cgroups as Proxmox writes them."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rebind_values import slot

from console.model.rebind.holders import CardDevice, CardHolder, HolderScan
from console.sources.card_holders import devices_of, scan_holders
from console.sources.source import Unavailable

CARD, OTHER = "0000:41:00.0", "0000:61:00.0"
HERE = Path("/")

#: Device files that are everywhere and that few hold; they stand in for a card's.
FULL = CardDevice(1, 7, CARD, "/dev/nvidia2")
ZERO = CardDevice(1, 5, CARD, "/dev/nvidia2")

_OPEN = "import os, sys, time; os.open(sys.argv[1], os.O_RDWR); print('ready', flush=True); time.sleep(60)"

#: Maps the device and closes it: nothing of it is left among the descriptors.
_MAP = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
fd = os.open("/dev/zero", os.O_RDWR)
assert libc.mmap(None, 8192, 3, 2, fd, 0) not in (None, 2**64 - 1)
os.close(fd)
print("ready", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def running(*command: str) -> Iterator[int]:
    """A process of that command, which has said that it is ready; its pid."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 20.0)[0], f"{command[0]} said nothing for 20 s"
        line = process.stdout.readline()
        if line.strip() != b"ready":
            pytest.skip(f"{command[0]} is not permitted here")
        yield process.pid
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def python(text: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-c", text, *words)


def of(scan: HolderScan, pid: int) -> CardHolder | None:
    return next((holder for holder in scan.holders if holder.pid == pid), None)


# Real processes


def test_a_process_that_has_it_open():
    with running(*python(_OPEN, "/dev/full")) as pid:
        scan = scan_holders(HERE, (), devices=[FULL], own=[1])
        found = of(scan, pid)
    assert found is not None
    assert (found.open, found.mapped, found.cards, found.own) == (("/dev/nvidia2",), (), (CARD,), False)
    assert "import os, sys, time" in found.name
    assert scan.of(CARD) == scan.holders
    assert scan.of(OTHER) == ()
    assert scan.processes > 1
    gone = scan_holders(HERE, (), devices=[FULL])
    assert of(gone, pid) is None


def test_it_is_the_number_that_counts_and_not_the_name(tmp_path: Path):
    node = tmp_path / "dev-of-a-container"
    try:
        os.mknod(node, 0o600 | 0o020000, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("device files may only be made by root")
    with running(*python(_OPEN, str(node))) as pid:
        found = of(scan_holders(HERE, (), devices=[FULL]), pid)
        stranger = of(scan_holders(HERE, (), devices=[CardDevice(1, 99, CARD, str(node))]), pid)
    assert found is not None
    assert found.open == ("/dev/nvidia2",)
    assert stranger is None, "the name is the same, the device is not"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may follow another's mappings")
def test_a_process_that_has_only_mapped_it():
    with running(*python(_MAP)) as pid:
        found = of(scan_holders(HERE, (), devices=[ZERO]), pid)
    assert found is not None
    assert (found.open, found.mapped) == ((), ("/dev/nvidia2",))
    assert "/dev/nvidia2 mapped" in found.words


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")
def test_a_process_behind_its_own_mounts_and_process_numbers():
    script = (
        "mount -t tmpfs none /mnt && mknod /mnt/card c 1 7 && exec 3</mnt/card && "
        "umount -l /mnt && echo ready && sleep 60"
    )
    command = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script)
    with running(*command) as pid:
        holders = scan_holders(HERE, (), devices=[FULL]).holders
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert {int(child) for child in children} <= {holder.pid for holder in holders}
    assert len(children) == 1


def test_this_program_is_marked_and_not_left_out():
    descriptor = os.open("/dev/full", os.O_RDWR)
    try:
        found = of(scan_holders(HERE, (), devices=[FULL], own=[os.getpid()]), os.getpid())
    finally:
        os.close(descriptor)
    assert found is not None
    assert found.own


def test_a_process_that_has_ended_and_is_not_reaped_holds_nothing_and_hides_nothing():
    before = scan_holders(HERE, (), devices=[FULL])
    child = subprocess.Popen(python("import os; os.open('/dev/full', os.O_RDWR)"))
    ends = time.monotonic() + 20.0
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
        assert time.monotonic() < ends, "the child does not end"
        time.sleep(0.01)
    after = scan_holders(HERE, (), devices=[FULL])
    child.wait()
    assert of(after, child.pid) is None
    assert after.unreadable <= before.unreadable or os.geteuid() != 0


# Processes in a tree, with the cgroups that Proxmox and systemd give them


class Tree:
    """A /proc and /sys; what a descriptor leads to is the name of a node."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc").mkdir()

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def process(
        self,
        pid: int,
        cgroup: str,
        *nodes: str,
        comm: str = "python3",
        command: str = "",
        inner: int | None = None,
    ) -> None:
        folder = f"proc/{pid}"
        self.write(f"{folder}/comm", f"{comm}\n")
        self.write(f"{folder}/cgroup", f"0::{cgroup}\n")
        self.write(f"{folder}/cmdline", command.replace(" ", "\0"))
        self.write(f"{folder}/status", f"NSpid:\t{pid}" + (f"\t{inner}\n" if inner else "\n"))
        (self.root / folder / "fd").mkdir()
        for number, node in enumerate(nodes):
            (self.root / folder / "fd" / str(number)).symlink_to(node)

    def only(self) -> CardHolder:
        (holder,) = scan_holders(self.root, (slot("41"),)).holders
        return holder


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "where", "remedy"),
    [
        (
            "/lxc/129/ns/system.slice/sglang.service",
            "CT 129, sglang.service",
            "pct exec 129 -- systemctl stop sglang.service",
        ),
        (
            "/lxc/131/ns/user.slice/user-0.slice/session-c3.scope",
            "CT 131, session-c3.scope",
            "pct exec 131 -- kill 44",
        ),
        ("/lxc/131/ns", "CT 131", "pct exec 131 -- kill 44"),
        ("/lxc.monitor.131", "host", "kill 812"),
        ("/system.slice/ollama.service", "host, ollama.service", "systemctl stop ollama.service"),
        ("/user.slice/user-0.slice/session-2.scope", "host, session-2.scope", "kill 812"),
        ("/qemu.slice/100.scope", "VM 100, 100.scope", "qm shutdown 100"),
        ("/", "host", "kill 812"),
    ],
)
def test_whose_a_holder_is_and_how_it_is_ended_there(tree: Tree, cgroup: str, where: str, remedy: str):
    tree.process(812, cgroup, "/dev/null", "/dev/nvidia2", inner=44)
    found = tree.only()
    assert (found.where, found.remedy) == (where, remedy)


def test_a_holder_in_words(tree: Tree):
    tree.process(
        812, "/lxc/131/ns/a.scope", "/dev/nvidia2", "/dev/nvidia2", command="python3 train.py ", inner=44
    )
    assert tree.only().words == "pid 812 python3 train.py (CT 131, a.scope): /dev/nvidia2"


def test_a_process_that_hides_its_command_line_has_its_name(tree: Tree):
    tree.process(812, "/", "/dev/nvidia2", comm="nvidia-persiste")
    assert tree.only().name == "nvidia-persiste"


def test_names_are_safe_to_print(tree: Tree):
    tree.process(
        812, "/system.slice/\x1b[2Jx.service", "/dev/nvidia2", comm="\x1b[2Jx", command="\x1b]0;a\x07b"
    )
    assert "\x1b" not in tree.only().words + tree.only().remedy


def test_a_process_that_ends_meanwhile_is_no_holder_and_not_unreadable(tree: Tree):
    (tree.root / "proc/812").mkdir()  # listed a moment ago, its descriptors are gone
    tree.process(813, "/", "/dev/nvidia2")
    scan = scan_holders(tree.root, (slot("41"),))
    assert ([holder.pid for holder in scan.holders], scan.processes, scan.unreadable) == ([813], 2, 0)


def test_processes_that_do_not_let_us_look_are_counted(tree: Tree):
    tree.write("proc/812/fd", "no folder: an error that root gets as well")
    tree.process(813, "/", "/dev/nvidia2")
    scan = scan_holders(tree.root, (slot("41"),))
    assert ([holder.pid for holder in scan.holders], scan.unreadable) == ([813], 1)


def test_a_holder_whose_mappings_are_hidden_is_named_and_counted(tree: Tree):
    tree.process(812, "/", "/dev/nvidia2")
    (tree.root / "proc/812/maps").mkdir()  # reading it is an error
    scan = scan_holders(tree.root, (slot("41"),))
    assert ([holder.pid for holder in scan.holders], scan.unreadable) == ([812], 1)


def test_no_proc_is_no_answer(tmp_path: Path):
    with pytest.raises(Unavailable, match="proc"):
        scan_holders(tmp_path, ())


# Which device files lead to a card


def test_every_device_file_that_was_made_of_a_card_counts(tree: Tree):
    tree.write(
        "proc/devices",
        "Character devices:\n195 nvidia-frontend\n508 nvidia-uvm\n\nBlock devices:\n259 blkext\n",
    )
    gpu, sound = f"sys/bus/pci/devices/{CARD}", "sys/bus/pci/devices/0000:41:00.1"
    tree.write(f"{gpu}/drm/card1/dev", "226:1\n")
    tree.write(f"{gpu}/drm/card1/uevent", "MAJOR=226\nMINOR=1\nDEVNAME=dri/card1\n")
    tree.write(f"{gpu}/vfio-dev/vfio0/dev", "511:0\n")
    tree.write(f"{sound}/sound/card2/controlC2/dev", "116:9\n")
    tree.write(f"{sound}/sound/card2/controlC2/uevent", "DEVNAME=snd/controlC2\n")
    tree.write("sys/class/vfio/15/dev", "243:0\n")
    tree.write(f"{gpu}/odd/dev", "many\n")
    (tree.root / gpu / "subsystem").symlink_to(tree.root / "sys/class/vfio")  # links lead to others' devices
    found = {(one.major, one.minor): one.node for one in devices_of(tree.root, slot("41"))}
    assert found == {
        (195, 2): "/dev/nvidia2",
        (226, 1): "/dev/dri/card1",
        (511, 0): "/dev/vfio0",
        (116, 9): "/dev/snd/controlC2",
        (243, 0): "/dev/vfio/15",
    }
    assert {one.card for one in devices_of(tree.root, slot("41"))} == {CARD}


def test_a_card_whose_minor_is_not_known_has_no_file_of_the_driver(tree: Tree):
    assert devices_of(tree.root, slot("41", minor=None)) == ()


def test_a_process_with_two_cards_is_one_holder(tree: Tree):
    tree.process(812, "/", "/dev/nvidia2", "/dev/nvidia3")
    (found,) = scan_holders(tree.root, (slot("41"), slot("61"))).holders
    assert (found.cards, found.open) == ((CARD, OTHER), ("/dev/nvidia2", "/dev/nvidia3"))
