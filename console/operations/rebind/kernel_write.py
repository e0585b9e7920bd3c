"""Writes to the kernel's PCI files, each by a small process of its own that may be left behind.

A write that takes the driver from a card in use does not return, and the process that made it
cannot be killed. So none is made by the job itself: what has not returned by its deadline is told
as ``pending``, with the pid, and the job goes on to its end.

Sources: Documentation/ABI/testing/sysfs-bus-pci; drivers/base/bus.c for what bind and unbind answer.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from typing import Literal

import msgspec

from console.model.card import Address
from console.sources.pending_writes import PendingWrite, own_writes
from console.transport.runner import Result, Runner

DEVICES = "/sys/bus/pci/devices"
BUS = "/sys/bus/pci"

#: Seconds after which a write counts as pending. An idle card gives its driver up within two; a bind may
#: wait for the card's firmware; the kernel itself waits 65 s for a card that does not come out of a reset.
QUICK_S = 10.0
UNBIND_S = 20.0
BIND_S = 60.0
RESET_S = 75.0

#: Seconds within which a helper that was killed is gone, unless the kernel holds it.
_GONE_S = 2.0
_LOOK_S = 0.05

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_DRIVER = re.compile(r"[A-Za-z0-9_-]{1,64}")

_NAMES = {os.strerror(number): name for number, name in errno.errorcode.items()}

#: ``done``: the kernel took it. ``refused``: it answered with an error. ``pending``: it has not answered,
#: and the helper cannot be ended. ``unknown``: the helper ended without an answer; look at the card.
Outcome = Literal["done", "refused", "pending", "unknown"]


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """How a write ended. ``error`` is the kernel's own name for it: ENODEV, EIO."""

    path: str
    value: str
    outcome: Outcome
    error: str | None = None
    reason: str | None = None  # in one line, when it is not done
    pending: PendingWrite | None = None

    @property
    def done(self) -> bool:
        return self.outcome == "done"


async def write(runner: Runner, path: str, value: str, *, deadline: float = QUICK_S) -> Written:
    """Write ``value`` to a file of sysfs.

    Ends within ``deadline`` seconds, and the few that it takes to see whether a helper can be ended.
    """
    # The value goes in by stdin: nothing is interpreted, and dd makes one write of it. Without
    # nocreat a file that is not there would be told as one that must not be written.
    command = ("dd", f"of={path}", "conv=nocreat,notrunc", "status=none")
    result = await runner.run(command, deadline=deadline, stdin=value.encode("ascii"))
    if result.ok:
        return Written(path=path, value=value, outcome="done")
    if result.returncode is not None and result.returncode > 0:
        return Written(path=path, value=value, outcome="refused", error=_error(result), reason=result.reason)
    left = await _left_behind(runner, path)
    return Written(
        path=path,
        value=value,
        outcome="unknown" if left is None else "pending",
        reason=result.reason if left is None else f"the kernel did not answer within {deadline:g} s",
        pending=left,
    )


async def unbind(runner: Runner, address: Address) -> Written:
    """Take its driver from a function. Only of one that nothing holds: else the kernel never answers."""
    return await write(runner, f"{_device(address)}/driver/unbind", address, deadline=UNBIND_S)


async def bind(runner: Runner, address: Address, driver: str) -> Written:
    """Give a function to one driver. Unlike ``drivers_probe`` it says when that did not happen.

    EIO and others come from the driver's probe, ENODEV when the driver is not for this function,
    ENOENT when it is not loaded, EBUSY when the function has a driver.
    """
    # The long way to the driver's folder: the helper's own words then say which function it is about.
    path = f"{_device(address)}/subsystem/drivers/{_driver(driver)}/bind"
    return await write(runner, path, address, deadline=BIND_S)


async def set_override(runner: Runner, address: Address, driver: str | None) -> Written:
    """Only this driver may take the function; None: any that matches."""
    value = "\n" if driver is None else f"{_driver(driver)}\n"
    return await write(runner, f"{_device(address)}/driver_override", value)


async def set_attribute(runner: Runner, address: Address, name: str, value: str) -> Written:
    """A file of the function's own, such as ``power/control``."""
    return await write(runner, f"{_device(address)}/{name}", value)


async def reset(runner: Runner, address: Address) -> Written:
    """Reset the function by the first method that works. ENOTTY when none did, or it was not ready after."""
    return await write(runner, f"{_device(address)}/reset", "1", deadline=RESET_S)


async def remove(runner: Runner, address: Address) -> Written:
    """Take the function off the bus, its driver first: as dangerous as ``unbind`` when it is held."""
    return await write(runner, f"{_device(address)}/remove", "1", deadline=UNBIND_S)


async def rescan(runner: Runner, bridge: Address | None = None) -> Written:
    """Look for functions below a bridge, or on every bus, and bind what is found."""
    path = f"{BUS}/rescan" if bridge is None else f"{_device(bridge)}/rescan"
    return await write(runner, path, "1", deadline=BIND_S)


async def reset_bus(runner: Runner, port: Address) -> Written:
    """Reset the bus below a port, and with it everything that is plugged into it.

    Linux 6.13 brought the file, and updates of older kernels (seen in 6.1.192): ENOENT without it, as a
    port's own ``reset`` never does it (pci.c, pci_parent_bus_reset). ENOTTY when the bus may not be reset,
    and also when it was and the link did not come up after it (pci_bridge_wait_for_secondary_bus).
    """
    return await write(runner, f"{_device(port)}/reset_subordinate", "1", deadline=RESET_S)


async def forget_id(runner: Runner, driver: str, vendor: int, device: int) -> Written:
    """Take back an id that ``new_id`` gave a driver. ENODEV when it has none such."""
    return await write(runner, f"{BUS}/drivers/{_driver(driver)}/remove_id", f"{vendor:04x} {device:04x}")


async def _left_behind(runner: Runner, path: str) -> PendingWrite | None:
    """The helper of this write, when it is still there after it was killed."""
    ends = asyncio.get_running_loop().time() + _GONE_S
    while True:
        helpers = [one for one in own_writes(runner.root) if one.path == path]
        if not helpers or asyncio.get_running_loop().time() >= ends:
            return helpers[-1] if helpers else None
        await asyncio.sleep(_LOOK_S)


def _error(result: Result) -> str | None:
    """``dd: error writing '…': No such device`` is ENODEV; None for words that are no error of the system."""
    return _NAMES.get(result.reason.rpartition(": ")[2])


def _device(address: Address) -> str:
    if not _ADDRESS.fullmatch(address):
        raise ValueError(f"not the address of a PCI function: {address!r}")
    return f"{DEVICES}/{address}"


def _driver(name: str) -> str:
    if not _DRIVER.fullmatch(name):
        raise ValueError(f"not the name of a driver: {name!r}")
    return name
