"""Writes to sysfs that the kernel has not answered yet, as /proc shows them.

The removal of a card that is in use never returns and cannot be killed. Until it does, whatever
touches the same device waits with it; so who means to touch a card asks here first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from console.model.card import Address
from console.model.text import clean
from console.sources.sysfs import content_of, names_in, text_of

#: Programs that write a file which their own words name. Ours is dd; tee is what many type.
_WRITERS = ("dd", "tee")

_BUS = "/sys/bus/pci/"
_ADDRESS = re.compile(r"/sys/bus/pci/devices/([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])/")

#: Kernel functions in which a process stands that takes a driver from a device or gives it one.
_REMOVING = ("unbind_store", "device_release_driver", "remove_store", "bind_store", "device_driver_attach")

#: Of the kernel's stack so many lines say enough.
_STACK_LINES = 12


class PendingWrite(msgspec.Struct, frozen=True, kw_only=True):
    """One process that waits in the kernel. ``address`` None: which device it is about is not known."""

    pid: int
    address: Address | None
    path: str | None = None  # of the file; None when its words do not say so
    words: str  # what it is: "dd of=/sys/bus/pci/devices/0000:41:00.0/driver/unbind"
    state: str | None = None  # of proc(5): D waits and cannot be killed
    stack: tuple[str, ...] = ()  # empty when it may not be read


def own_writes(root: Path, address: Address | None = None) -> tuple[PendingWrite, ...]:
    """Helpers that are still at work on the files of the PCI bus, for one function or for all."""
    found = []
    for pid in _pids(root):
        folder = root / "proc" / str(pid)
        if text_of(folder / "comm") not in _WRITERS:
            continue
        words = (content_of(folder / "cmdline") or "").split("\0")
        path = next((path for word in words if (path := word.removeprefix("of=")).startswith(_BUS)), None)
        if path is None:
            continue
        named = _ADDRESS.match(path)
        if address is None or (named is not None and named[1] == address):
            found.append(_pending(folder, pid, None if named is None else named[1], clean(path)))
    return tuple(found)


def other_removals(root: Path) -> tuple[PendingWrite, ...]:
    """Processes that stand in the unbinding or binding of a device that their words do not name.

    Such as a ``qm start``, or a ``tee`` into the file of a driver.
    Only root may see where a process stands in the kernel; without that, none is found.
    """
    own = {write.pid for write in own_writes(root) if write.address is not None}
    found = []
    for pid in _pids(root):
        folder = root / "proc" / str(pid)
        if pid in own or _state(folder) not in ("D", "S"):
            continue
        stack = content_of(folder / "stack") or ""
        if any(name in stack for name in _REMOVING):
            found.append(_pending(folder, pid, None, None))
    return tuple(found)


def pending_for(root: Path, address: Address) -> tuple[PendingWrite, ...]:
    """What keeps this function in the kernel: until it ends, writing to it or reading its override hangs.

    A function on a driver is not being removed: the link goes first. One without may be: then every
    removal by others counts, since theirs do not say which device they are about.
    """
    mine = own_writes(root, address)
    if mine or (root / "sys/bus/pci/devices" / address / "driver").is_symlink():
        return mine
    return other_removals(root)


def _pending(folder: Path, pid: int, address: Address | None, path: str | None) -> PendingWrite:
    command = (content_of(folder / "cmdline") or "").replace("\0", " ").strip()
    stack = (content_of(folder / "stack") or "").splitlines()[:_STACK_LINES]
    return PendingWrite(
        pid=pid,
        address=address,
        path=path,
        words=clean(command) or text_of(folder / "comm") or "?",
        state=_state(folder),
        stack=tuple(clean(line.removeprefix("[<0>] ")) for line in stack),
    )


def _state(folder: Path) -> str | None:
    """After the name, which stands in brackets and may hold brackets itself."""
    rest = (content_of(folder / "stat") or "").rpartition(") ")[2]
    return rest[:1] or None


def _pids(root: Path) -> Iterable[int]:
    return sorted(int(name) for name in names_in(root / "proc") if name.isdecimal())
