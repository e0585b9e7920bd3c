"""Cards as PCI sees them, as NVML sees them, and who owns them.

A card is listed from PCI sysfs, never from NVML: one that is bound to
``vfio-pci`` or has fallen off the bus keeps its row.
"""

from __future__ import annotations

from typing import Literal

import msgspec

#: PCI addresses are written as the kernel does: ``0000:41:00.0``, lower case.
Address = str

VENDOR_NVIDIA = 0x10DE
CLASS_DISPLAY = 0x03


class PciFunction(msgspec.Struct, frozen=True):
    """One function of a card's slot (``.0`` GPU, ``.1`` audio, …)."""

    address: Address
    vendor: int
    device: int
    class_code: int  # 24 bits: class, subclass, interface
    driver: str | None  # None: bound to nothing
    driver_override: str | None
    power_state: str | None  # D0, D3hot, D3cold, unknown


class PciLink(msgspec.Struct, frozen=True):
    """PCIe link, now and at its best. Speeds in GT/s, widths in lanes."""

    speed: float | None
    width: int | None
    best_speed: float | None
    best_width: int | None

    @property
    def narrowed(self) -> bool:
        """Fewer lanes than the card can use. Speed is not judged: an idle card lowers it."""
        return self.width is not None and self.best_width is not None and 0 < self.width < self.best_width


class PciCard(msgspec.Struct, frozen=True):
    """A GPU with all functions of its slot, as sysfs shows it."""

    address: Address  # of the GPU function
    functions: tuple[PciFunction, ...]
    iommu_group: int | None  # None: the IOMMU is off
    link: PciLink
    numa_node: int | None
    present: bool = True  # False: its config space reads all ones, or its folder is gone
    minor: int | None = None  # N of /dev/nvidiaN, from /proc/driver/nvidia
    uuid: str | None = None

    @property
    def driver(self) -> str | None:
        return next((f.driver for f in self.functions if f.address == self.address), None)


class CardTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML said of one card in one sample.

    Any field may be None; ``missing`` then says why, by field name, in NVML's
    own words ("Not Supported"), or that the call passed its deadline.
    """

    address: Address
    name: str | None = None
    uuid: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None  # without the driver's reserved part (v2 struct)
    memory_reserved_bytes: int | None = None
    memory_free_bytes: int | None = None
    utilization_percent: int | None = None  # share of time a kernel ran, over the driver's window
    memory_utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None  # () means none
    pcie_tx_bytes_per_s: int | None = None
    pcie_rx_bytes_per_s: int | None = None
    ecc_corrected: int | None = None  # since the driver was loaded
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None
    remapped_rows: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    persistence: bool | None = None
    lost: bool = False  # the driver says the card fell off the bus
    missing: dict[str, str] = msgspec.field(default_factory=dict)


class CardProcess(msgspec.Struct, frozen=True):
    """A process that holds memory on a card, as NVML names it (host pid)."""

    pid: int
    memory_bytes: int | None


class Xid(msgspec.Struct, frozen=True):
    """An Xid error the driver reported for a card. ``at`` is monotonic seconds."""

    address: Address | None
    code: int
    at: float


class NvmlSample(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the NVML process knows at one moment."""

    driver_version: str | None = None
    nvml_version: str | None = None
    cards: tuple[CardTelemetry, ...] = ()
    processes: dict[Address, tuple[CardProcess, ...]] = msgspec.field(default_factory=dict)
    processes_at: float | None = None  # monotonic seconds; the list is read less often
    xids: tuple[Xid, ...] = ()  # since the NVML process started, newest last


class Holder(msgspec.Struct, frozen=True):
    """A process on the cards, and whose it is."""

    pid: int  # as this host counts
    inner_pid: int | None  # inside its container
    name: str
    container: int | None  # CT id
    unit: str | None  # systemd unit, by cgroup
    memory_bytes: dict[Address, int | None]
    orphan: bool  # holds a card, but belongs to no unit we know
    started_at: float | None = None


OwnerKind = Literal["ct", "vm", "host", "none", "lost", "moving"]


class Owner(msgspec.Struct, frozen=True):
    """Who has the card. Written ``ct:129``, ``vm:100``, ``host``, ``none``, ``lost``."""

    kind: OwnerKind
    id: int | None = None

    def __str__(self) -> str:
        return self.kind if self.id is None else f"{self.kind}:{self.id}"

    @property
    def words(self) -> str:
        """As an operator reads it: ``CT 129``, ``VM 100``, ``host``, ``nobody``, ``lost``."""
        if self.id is not None:
            return f"{self.kind.upper()} {self.id}"
        return "nobody" if self.kind == "none" else self.kind


def owner_of(
    card: PciCard,
    telemetry: CardTelemetry | None,
    *,
    container: int | None,
    vm: int | None,
) -> Owner:
    """Who has the card, by the driver its GPU function is bound to.

    ``container`` and ``vm`` are the ids of the site's guests; with no container
    a card on ``nvidia`` serves this host itself.
    """
    if not card.present or (telemetry is not None and telemetry.lost):
        return Owner("lost")
    if card.driver == "nvidia":
        return Owner("host") if container is None else Owner("ct", container)
    if card.driver is not None and card.driver.startswith("vfio") and vm is not None:
        return Owner("vm", vm)
    return Owner("none")


class CardView(msgspec.Struct, frozen=True):
    """One row of the cards panel: PCI and NVML matched by address."""

    index: int  # 0-based, in PCI order of all cards, present or not
    pci: PciCard
    telemetry: CardTelemetry | None
    owner: Owner
    problems: tuple[str, ...]  # short marks, worst first: "Xid 79", "ECC 2", "x8 of x16", "throttled: power"
    stale_s: float | None  # age of the telemetry when stale, else None
