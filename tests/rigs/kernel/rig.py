"""One boot of the small machine, in which the cases of ``cases.py`` are run on its kernel.

The guest sees this host's programs, this Python and this checkout read-only, and has four cards of
two functions each, a group of two network cards, and a network card behind a PCI Express switch.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import msgspec

from tests.rigs.kernel.install import Installation

CHECKOUT = Path(__file__).parents[3]

#: Seconds for the boot and all cases; without hardware virtualisation they take four minutes on two cores.
BOOT_AND_CASES_S = 900.0

_MEMORY_MIB = 1024


class Case(msgspec.Struct, frozen=True):
    """How one case ended. ``text`` is what there is to read when it failed."""

    name: str
    passed: bool
    seconds: float
    text: str = ""


class Run(msgspec.Struct, frozen=True):
    """One boot: its cases by name, what the guest said, and how long all of it took."""

    cases: dict[str, Case]
    console: str
    seconds: float


def run(installation: Installation, results: Path, cases: str = "") -> Run:
    """Boot, run the cases whose names hold ``cases`` (all when empty), and power off.

    RuntimeError with the guest's last words when it does not come to its end in time.
    """
    results.mkdir(parents=True, exist_ok=True)
    guest = [sys.executable, "-P", "-m", "tests.rigs.kernel.in_guest", "/results", cases]
    (results / "command").write_text(f"cd {shlex.quote(str(CHECKOUT))} && exec {shlex.join(guest)}\n")
    began = time.monotonic()
    console = results / "console"
    with console.open("wb") as output:
        try:
            subprocess.run(
                _qemu(installation, results),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=BOOT_AND_CASES_S,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the guest did not end within {BOOT_AND_CASES_S:g} s:\n{_tail(console)}"
            ) from None
    lines = results / "cases.jsonl"
    found = [] if not lines.exists() else lines.read_bytes().splitlines()
    ended = [msgspec.json.decode(line, type=Case) for line in found]
    return Run({case.name: case for case in ended}, _tail(console), time.monotonic() - began)


def _qemu(installation: Installation, results: Path) -> list[str]:
    words = (
        "console=ttyS0 quiet loglevel=3 panic=-1 intel_iommu=on "
        f"gpuops_folders={','.join(map(str, _folders()))}"
    )
    return [
        *("qemu-system-x86_64", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max"),
        *("-m", str(_MEMORY_MIB), "-smp", "2", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-serial", "stdio"),
        *("-kernel", str(installation.kernel), "-initrd", str(installation.initramfs), "-append", words),
        # Before the cards: what comes later is behind it.
        *("-device", "intel-iommu,intremap=on,caching-mode=on"),
        *_share("host", Path("/"), "none,readonly=on"),
        *_share("results", results, "mapped-xattr"),
        *_devices(),
    ]


def _share(name: str, folder: Path, model: str) -> tuple[str, ...]:
    backend = f"local,id={name},path={folder},security_model={model},multidevs=remap"
    return ("-fsdev", backend, "-device", f"virtio-9p-pci,fsdev={name},mount_tag={name},bus=pcie.0")


def _devices() -> list[str]:
    devices = []
    for card in range(1, 5):  # 0000:01:00.0 and .1 to 0000:04:00.0 and .1, a group each
        # Above 5 GT/s a port has to report its link, and QEMU's never reports it up again after a reset.
        speed = 16 if card == 4 else 5
        devices += [
            f"pcie-root-port,id=port{card},chassis={card},slot={card},bus=pcie.0,x-speed={speed}",
            f"nvme,bus=port{card},addr=0.0,multifunction=on,serial=CARD{card}",
            f"ich9-intel-hda,bus=port{card},addr=0.1",
        ]
    devices += [
        # One group: two network cards behind one bridge, 0000:06:01.0 and 0000:06:02.0.
        "pcie-root-port,id=port9,chassis=9,slot=9,bus=pcie.0",
        "pcie-pci-bridge,id=bridge,bus=port9",
        "e1000,bus=bridge,addr=1",
        "e1000,bus=bridge,addr=2",
        # A switch: the network card below it shares a group with the port that it is plugged into.
        "pcie-root-port,id=port10,chassis=10,slot=10,bus=pcie.0",
        "x3130-upstream,id=switch,bus=port10",
        "xio3130-downstream,id=below,bus=switch,chassis=11,slot=11",
        "e1000e,bus=below",
    ]
    return [word for device in devices for word in ("-device", device)]


def _folders() -> list[Path]:
    """Of this host: its programs and settings, this Python, its packages and the checkout."""
    wanted = {
        Path("/usr"),
        Path("/etc"),
        CHECKOUT,
        Path(sys.prefix),
        Path(sys.base_prefix),
        Path(sysconfig.get_path("purelib")),
    }
    found: list[Path] = []
    for folder in sorted(path.resolve() if path.name != "usr" else path for path in wanted):
        if not any(folder.is_relative_to(known) for known in found):
            found.append(folder)
    return found


def _tail(console: Path) -> str:
    return console.read_text(errors="replace")[-6000:]
