"""Who has a card open: processes by the device numbers that they hold, whatever their nodes are called."""

from __future__ import annotations

from typing import Literal

import msgspec

from console.model.card import Address

#: How a plan deals with one that holds a card: it is the service, which is stopped by its unit; it is
#: the VM, which is shut down; it is a program that is known and let go of by name; or anybody else.
HolderKind = Literal["service", "vm", "known", "console", "foreign"]

#: Programs that hold cards by their nature, by the kernel's name of the process (15 characters), and how
#: each lets go. NVIDIA/dcgm-exporter#706 and kubernetes-sigs/dra-driver-nvidia-gpu#1037 tell why.
KNOWN = {
    "nvidia-persiste": "nvidia-persistenced: persistence mode is switched off for the card",
    "dcgm-exporter": "dcgm-exporter: its unit is stopped and started again",
    "nv-hostengine": "the DCGM host engine: its unit is stopped and started again",
    "nvidia_gpu_expo": "nvidia_gpu_exporter: its unit is stopped and started again",
    "nvidia_gpu_prom": "nvidia_gpu_exporter: its unit is stopped and started again",
}


class CardDevice(msgspec.Struct, frozen=True):
    """A device file that leads to a card, by its number. ``node`` is its usual path."""

    major: int
    minor: int
    card: Address
    node: str


class CardHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has cards open, and whose it is."""

    pid: int  # as this host counts
    inner_pid: int | None = None  # inside its container
    comm: str  # the kernel's name of it
    name: str  # its command line, or ``comm``
    container: int | None = None
    vm: int | None = None  # the machine that it is the process of
    unit: str | None = None
    own: bool = False  # this program, or a child of it
    open: tuple[str, ...] = ()  # nodes that it has open: /dev/nvidia3
    mapped: tuple[str, ...] = ()  # nodes that it has mapped, the file itself may be closed
    cards: tuple[Address, ...] = ()

    @property
    def where(self) -> str:
        """As an operator looks for it: ``CT 131, session-c3.scope``."""
        place = f"CT {self.container}" if self.container is not None else "host"
        place = f"VM {self.vm}" if self.vm is not None else place
        return f"{place}, {self.unit}" if self.unit is not None else place

    @property
    def words(self) -> str:
        how = ", ".join((*self.open, *(f"{node} mapped" for node in self.mapped if node not in self.open)))
        return f"pid {self.pid} {self.name[:60]} ({self.where}): {how}"

    @property
    def remedy(self) -> str:
        """How to end it, where it belongs."""
        if self.vm is not None:
            return f"qm shutdown {self.vm}"
        service = self.unit is not None and self.unit.endswith(".service")
        if self.container is not None:
            if service:
                return f"pct exec {self.container} -- systemctl stop {self.unit}"
            return f"pct exec {self.container} -- kill {self.inner_pid or '…'}"
        return f"systemctl stop {self.unit}" if service else f"kill {self.pid}"


class HolderScan(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over every process. ``unreadable`` counts those that did not let us look."""

    taken_at: float  # Unix seconds
    holders: tuple[CardHolder, ...] = ()
    devices: tuple[CardDevice, ...] = ()  # what was looked for
    processes: int = 0
    unreadable: int = 0

    def of(self, card: Address) -> tuple[CardHolder, ...]:
        return tuple(holder for holder in self.holders if card in holder.cards)


#: What reads NVML for a console, in whatever process of gpuops: it ends by itself when cards are moved.
_READER = "/sources/nvml_worker.py"


def is_reader(holder: CardHolder) -> bool:
    """Whether it is the NVML process of a gpuops, ours or another's."""
    return holder.own or _READER in holder.name


def kind_of(holder: CardHolder, *, container: int | None, unit: str, vm: int | None) -> HolderKind:
    """How a plan deals with it; ``container``, ``unit`` and ``vm`` are the site's."""
    if is_reader(holder):
        return "console"
    if holder.vm is not None and holder.vm == vm:
        return "vm"
    if holder.container == container and holder.unit == unit:
        return "service"
    if holder.container is None and holder.comm[:15] in KNOWN:
        return "known"
    return "foreign"
