"""The steps that move one card: every function to its driver on the other side, and back.

Each looks first and does what is left, so a job that died at any write goes on from there. A card
whose removal hangs in the kernel is never touched again while it does: every write would hang, too.
"""

from __future__ import annotations

from console.model.card import Address
from console.model.rebind.inventory import NVIDIA, VFIO, is_vfio
from console.model.rebind.moves import CardMove
from console.operations.rebind.functions import (
    Wanted,
    answers,
    clear_of_kernel,
    idle,
    place,
    problems,
    reset_card,
    restore_power,
)
from console.operations.rebind.world import release_own
from console.operations.step import Context, Step, StepFailed
from console.sources.sysfs import content_of, link_name, names_in

#: Seconds for all functions of a card. More than the deadlines of its writes together, so that it is
#: told which of them the kernel did not answer.
CARD_S = 400.0


class ToVfio(Step):
    """A card leaves its drivers for vfio-pci: a VM can then have it."""

    deadline = CARD_S
    undo_deadline = CARD_S

    def __init__(self, move: CardMove) -> None:
        self._move = move
        self.id = f"to-vfio-{move.name}"
        self.words = f"{move.name}: {move.kinds} to {VFIO}"
        self.undo_words = f"{move.name}: back to {_drivers(move.before())}"

    async def done(self, context: Context) -> str | None:
        return await _placed(context, self._move, self._move.on_vfio(), guarded=True)

    async def do(self, context: Context) -> None:
        await release_own(context)
        # The GPU last: while it has its driver, nothing is lost that cannot be had back at once.
        await place(context, self._move, _others_first(self._move, self._move.on_vfio()))

    async def verify(self, context: Context) -> str:
        evidence = await _must_be_placed(context, self._move, self._move.on_vfio(), guarded=True)
        _viable(context, self._move)
        return evidence

    async def undo(self, context: Context) -> str:
        return await _back(context, self._move)


class ToHost(Step):
    """A card leaves vfio-pci for the nvidia driver, its other functions for theirs."""

    deadline = CARD_S
    undo_deadline = CARD_S

    def __init__(self, move: CardMove) -> None:
        self._move = move
        self.id = f"to-host-{move.name}"
        self.words = f"{move.name}: reset, {move.kinds} to {_drivers(move.on_host())}"
        self.undo_words = f"{move.name}: back to {_drivers(move.before())}"

    async def done(self, context: Context) -> str | None:
        return await _placed(context, self._move, self._move.on_host())

    async def do(self, context: Context) -> None:
        await release_own(context)
        await _to_host(context, self._move, self._move.on_host())

    async def verify(self, context: Context) -> str:
        evidence = await _must_be_placed(context, self._move, self._move.on_host())
        minor = minor_of(context, self._move.address)
        return f"{evidence}; it is /dev/nvidia{minor}" if minor is not None else evidence

    async def undo(self, context: Context) -> str:
        return await _back(context, self._move)


class LoadDriver(Step):
    """A driver has to be loaded before functions can be bound to it. It stays loaded."""

    deadline = 60.0

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self.id = f"load-{driver}"
        self.words = f"load the driver {driver}"

    async def done(self, context: Context) -> str | None:
        return f"{self._driver} is loaded" if _is_loaded(context, self._driver) else None

    async def do(self, context: Context) -> None:
        result = await context.host.run(("modprobe", "--", self._driver), deadline=self.deadline - 5)
        if not result.ok:
            raise StepFailed(f"modprobe {self._driver}: {result.reason}")

    async def verify(self, context: Context) -> str:
        if not _is_loaded(context, self._driver):
            raise StepFailed(f"{self._driver} is not among the PCI drivers after modprobe")
        return f"{self._driver} is loaded"


def minor_of(context: Context, address: Address) -> int | None:
    """N of /dev/nvidiaN, as the driver says it. The node itself may be there without the card."""
    path = context.host.root / "proc/driver/nvidia/gpus" / address / "information"
    words = dict(line.partition(":")[::2] for line in (content_of(path) or "").splitlines())
    minor = words.get("Device Minor", "").strip()
    return int(minor) if minor.isascii() and minor.isdigit() else None


async def _back(context: Context, move: CardMove) -> str:
    """As it was when the plan was made."""
    await release_own(context)
    before = move.before()
    if is_vfio(before[move.address]):
        await place(context, move, _others_first(move, before))
    else:
        await _to_host(context, move, before)
    await restore_power(context, move)
    return await _must_be_placed(context, move, before)


async def _to_host(context: Context, move: CardMove, wanted: Wanted) -> None:
    """The GPU first. It gets no driver of the host before it answers and could be reset."""
    await clear_of_kernel(context, move)
    now = _now(context, move.address)
    if wanted[move.address] == NVIDIA and now != NVIDIA:
        await idle(context, move)  # a reset under a running machine is felt by its guest
        await answers(context, move.address)
        await reset_card(context, move)
    await place(context, move, wanted)


async def _placed(context: Context, move: CardMove, wanted: Wanted, *, guarded: bool = False) -> str | None:
    """The evidence when every function is where it is to be; None when something is left to do."""
    if await problems(context, move, wanted, guarded=guarded):
        return None
    return _evidence(wanted)


async def _must_be_placed(context: Context, move: CardMove, wanted: Wanted, *, guarded: bool = False) -> str:
    found = await problems(context, move, wanted, guarded=guarded)
    if found:
        raise StepFailed("; ".join(found))
    return _evidence(wanted)


def _viable(context: Context, move: CardMove) -> None:
    """Every endpoint of the group is on vfio, and the group has its file. StepFailed else.

    The kernel's own word is not enough: with a driver that manages DMA itself it calls a group viable
    though the card is still on that driver.
    """
    if move.group is None:
        raise StepFailed(f"{move.address} is in no IOMMU group: the IOMMU is off")
    root = context.host.root
    devices = root / "sys/bus/pci/devices"
    members = names_in(root / f"sys/kernel/iommu_groups/{move.group}/devices")
    foreign = [
        f"{name} is on {link_name(devices / name / 'driver') or 'no driver'}"
        for name in members
        if not (devices / name / "pci_bus").is_dir() and not is_vfio(link_name(devices / name / "driver"))
    ]
    if foreign:
        raise StepFailed(f"IOMMU group {move.group} cannot go to a VM: {', '.join(foreign)}")
    if not (root / f"dev/vfio/{move.group}").exists():
        raise StepFailed(f"/dev/vfio/{move.group} is not there")


def _evidence(wanted: Wanted) -> str:
    return ", ".join(f"{address} on {driver or 'no driver'}" for address, driver in wanted.items())


def _drivers(wanted: Wanted) -> str:
    return ", ".join(dict.fromkeys(driver or "no driver" for driver in wanted.values()))


def _others_first(move: CardMove, wanted: Wanted) -> Wanted:
    return {function.address: wanted[function.address] for function in reversed(move.functions)}


def _now(context: Context, address: Address) -> str | None:
    return link_name(context.host.root / "sys/bus/pci/devices" / address / "driver")


def _is_loaded(context: Context, driver: str) -> bool:
    return (context.host.root / "sys/bus/pci/drivers" / driver).is_dir()
