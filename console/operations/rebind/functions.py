"""One function after the other: what is in its way, from driver to driver, asleep or awake."""

from __future__ import annotations

import asyncio

from console.model.card import Address
from console.model.rebind.holders import CardDevice, HolderScan
from console.model.rebind.inventory import is_vfio
from console.model.rebind.moves import CardMove
from console.operations.rebind import kernel_write
from console.operations.rebind.kernel_write import Written
from console.operations.step import Context, StepFailed
from console.sources.card_holders import scan_holders
from console.sources.inventory import read_apart
from console.sources.pending_writes import PendingWrite, pending_for
from console.sources.source import Apart, Unavailable
from console.sources.sysfs import link_name, text_of

#: Where each function is to be, in the order in which they move. None: without a driver.
Wanted = dict[Address, str | None]

#: Seconds that a write of a job that died may still take.
PENDING_S = 15.0

#: Seconds for a read that wakes a sleeping card.
_WAKE_S = 75.0
_READ_S = 10.0
_LOOK_S = 0.2


async def place(context: Context, move: CardMove, wanted: Wanted) -> None:
    """Move every function to its driver, in the order of ``wanted``. StepFailed where one does not go.

    A function that is where it is to be is only rid of a left-over override.
    """
    for address, driver in wanted.items():
        await clear_of_kernel(context, move)
        await _place_one(context, move, address, driver)


async def problems(context: Context, move: CardMove, wanted: Wanted, *, guarded: bool = False) -> list[str]:
    """What is not as it is to be, in words. ``guarded``: and functions on vfio are kept awake.

    Of a card that hangs in the kernel only that is told: asking it for more would hang as well.
    """
    hanging = [one for address in wanted for one in pending_for(context.host.root, address)]
    if hanging:
        return [_hanging_words(move, hanging[0])]
    found = []
    for address, driver in wanted.items():
        now = _driver(context, address)
        if now != driver:
            found.append(f"{address} is on {now or 'no driver'}, not on {driver or 'none'}")
        override = await _override(context, address)
        if override is not None:
            found.append(f"{address} has a left-over driver_override {override}")
        if guarded and is_vfio(now):
            found += _asleep(context, address)
    return found


async def clear_of_kernel(context: Context, move: CardMove) -> None:
    """Wait a moment for writes of a job that died. StepFailed, which stops all, when one does not end."""
    clock = asyncio.get_running_loop().time
    ends = clock() + PENDING_S
    while True:
        hanging = [
            one for function in move.functions for one in pending_for(context.host.root, function.address)
        ]
        if not hanging:
            return
        if clock() >= ends:
            raise await _pending(context, move, hanging[0], ())
        context.say(f"wait for the kernel: {hanging[0].words}")
        await asyncio.sleep(_LOOK_S)


async def answers(context: Context, address: Address) -> None:
    """StepFailed when the card's config space reads all ones: it is off the bus, or sleeps for good."""
    path = f"/sys/bus/pci/devices/{address}/config"
    result = await context.host.run(("od", "-An", "-v", "-tx1", "-N4", path), deadline=_WAKE_S)
    if not result.ok:
        raise StepFailed(f"{address}: its config space cannot be read: {result.reason}")
    words = result.stdout.decode("ascii", "replace").split()
    if words == ["ff"] * 4 or len(words) != 4:
        raise StepFailed(
            f"{address} does not answer: its config space reads {' '.join(words) or 'nothing'}; it is not "
            f"given to the nvidia driver. Recover it first: gpuops rebind --recover {address}"
        )


async def reset_card(context: Context, move: CardMove) -> None:
    """Bring the card to the state it has after power-on: the driver must find no trace of the guest."""
    path = context.host.root / "sys/bus/pci/devices" / move.address / "reset"
    if not path.exists():
        context.say(f"{move.address} has no way to be reset; it goes on as it is")
        return
    context.say(f"{move.address}: reset")
    written = await kernel_write.reset(context.host, move.address)
    if not written.done:
        raise await _failure(context, move, written, f"{move.address} could not be reset", ())
    await answers(context, move.address)


async def restore_power(context: Context, move: CardMove) -> None:
    """The settings that keep a card awake, as they were when the plan was made."""
    for function in move.functions:
        folder = context.host.root / "sys/bus/pci/devices" / function.address
        if function.d3cold_allowed is not None:
            value = "1" if function.d3cold_allowed else "0"
            await _setting(context, move, function.address, "d3cold_allowed", value)
        if function.power_control is not None and (folder / "power/control").exists():
            await _setting(context, move, function.address, "power/control", function.power_control)


async def _place_one(context: Context, move: CardMove, address: Address, driver: str | None) -> None:
    if _driver(context, address) != driver:
        context.say(f"{address}: to {driver or 'no driver'}")
        if driver is not None:
            await _must(
                context, move, await kernel_write.set_override(context.host, address, driver), address
            )
        if _driver(context, address) is not None:
            await _unbind(context, move, address)
        if driver is not None:
            await _bind(context, move, address, driver)
    if await _override(context, address) is not None:
        await _must(context, move, await kernel_write.set_override(context.host, address, None), address)
    if is_vfio(driver):
        # vfio-pci lets what it binds fall asleep, so this comes after the bind. From D3cold some
        # cards do not come back.
        await _setting(context, move, address, "d3cold_allowed", "0")
        await _setting(context, move, address, "power/control", "on")


async def _unbind(context: Context, move: CardMove, address: Address) -> None:
    """Only once nothing holds the card: what is begun here cannot be taken back."""
    devices = await idle(context, move)
    written = await kernel_write.unbind(context.host, address)
    if written.outcome == "unknown" or written.error == "ENOENT":
        # The helper was ended, or the link was gone before it came: the card itself tells.
        await clear_of_kernel(context, move)
    elif not written.done:
        raise await _failure(context, move, written, f"{address} did not leave its driver", devices)
    now = _driver(context, address)
    if now is not None:
        raise StepFailed(f"{address} is still on {now} after the kernel took the unbind: {written.reason}")


async def _bind(context: Context, move: CardMove, address: Address, driver: str) -> None:
    written = await kernel_write.bind(context.host, address, driver)
    if written.outcome == "pending":
        raise await _failure(context, move, written, f"{address}: {driver} does not answer", ())
    if _driver(context, address) == driver:
        return
    # An override that is left would keep every other driver away, also from a later qm start.
    cleared = await kernel_write.set_override(context.host, address, None)
    left = "" if cleared.done else f"; its driver_override stays: {cleared.reason}"
    why = {
        "ENOENT": f"the driver {driver} is not loaded",
        "ENODEV": f"{driver} is not a driver for it, or gave up on it",
    }.get(written.error or "", f"{written.error or written.reason or 'the kernel said no error'}")
    raise StepFailed(f"{address} was not taken by {driver}: {why}; the kernel's log tells more{left}")


async def idle(context: Context, move: CardMove) -> tuple[CardDevice, ...]:
    """The device files of a card that nobody has open or mapped. StepFailed, with who, when somebody has."""
    root = context.host.root
    try:
        async with asyncio.timeout(_READ_S):
            inventory = await read_apart(Apart("card"), root, (move.address,))
            slot = inventory.slot(move.address)
            if slot is None:
                raise StepFailed(f"{move.address} is not on the bus any more")
            look: Apart[HolderScan] = Apart("holders")
            scan = await look(lambda: scan_holders(root, (slot,)))
    except TimeoutError:
        raise StepFailed(f"{move.name}: it could not be read within {_READ_S:g} s who has it open") from None
    except Unavailable as problem:
        raise StepFailed(f"{move.name}: it cannot be read who has it open: {problem}") from None
    if scan.holders:
        raise StepFailed(
            f"{move.name} is in use, so it was not touched: {scan.holders[0].words}",
            tuple(holder.words for holder in scan.holders),
        )
    if scan.unreadable:
        raise StepFailed(
            f"{move.name}: {scan.unreadable} processes did not let us look whether they have it open; "
            "only root may look into all of them"
        )
    return scan.devices


async def _setting(context: Context, move: CardMove, address: Address, name: str, value: str) -> None:
    path = context.host.root / "sys/bus/pci/devices" / address / name
    if not path.exists() or text_of(path) == value:
        return
    await _must(context, move, await kernel_write.set_attribute(context.host, address, name, value), address)


async def _must(context: Context, move: CardMove, written: Written, address: Address) -> None:
    if not written.done:
        raise await _failure(context, move, written, f"{address}: {written.path} was not written", ())


async def _failure(
    context: Context, move: CardMove, written: Written, words: str, devices: tuple[CardDevice, ...]
) -> StepFailed:
    if written.pending is not None:
        return await _pending(context, move, written.pending, devices)
    return StepFailed(f"{words}: {written.error or written.reason}")


async def _pending(
    context: Context, move: CardMove, hanging: PendingWrite, devices: tuple[CardDevice, ...]
) -> StepFailed:
    """The end of the plan: nothing of this card may be touched until the kernel lets go of it."""
    held = ""
    if devices:
        scan = scan_holders(context.host.root, (), devices=devices)
        held = "; held by " + ", ".join(one.words for one in scan.holders) if scan.holders else ""
    return StepFailed(_hanging_words(move, hanging) + held, hanging.stack, stop=True)


def _hanging_words(move: CardMove, hanging: PendingWrite) -> str:
    sure = "" if hanging.address is not None else ", which may be about it"
    return (
        f"{move.name} is pending in the kernel: pid {hanging.pid} ({hanging.words}) has not returned{sure}; "
        "end what holds the card, or restart the host; nothing else of this card can be done until then"
    )


def _asleep(context: Context, address: Address) -> list[str]:
    folder = context.host.root / "sys/bus/pci/devices" / address
    wrong = []
    if text_of(folder / "d3cold_allowed") not in (None, "0"):
        wrong.append(f"{address} may fall into D3cold")
    if text_of(folder / "power/control") not in (None, "on"):
        wrong.append(f"{address} may fall asleep: power/control is {text_of(folder / 'power/control')}")
    return wrong


async def _override(context: Context, address: Address) -> str | None:
    """Reading it takes the device's lock, so a process of its own reads, which may be left behind."""
    path = f"/sys/bus/pci/devices/{address}/driver_override"
    result = await context.host.run(("cat", "--", path), deadline=_READ_S)
    if not result.ok:
        raise StepFailed(f"{address}: its driver_override cannot be read: {result.reason}")
    text = result.stdout.decode("utf-8", "replace").strip()
    return None if text in ("", "(null)") else text


def _driver(context: Context, address: Address) -> str | None:
    return link_name(context.host.root / "sys/bus/pci/devices" / address / "driver")
