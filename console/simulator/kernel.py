"""The box's kernel as its PCI bus shows it: writes take drivers from functions and give them others.

What each write does, what it answers and what it waits for is that of drivers/base/bus.c and dd.c,
drivers/pci/pci-driver.c and pci-sysfs.c, vfio_pci_core.c, and the nvidia module's nv-pci.c. A removal
that waits for whoever has the card open waits as the real one does: its process stands in state D and
is not ended by a signal, the driver link is gone already, and what else needs the device's lock waits too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Protocol

import msgspec

from console.simulator.cards import Cards
from console.simulator.faults import Faults
from console.simulator.machine import CARDS, KERNEL
from console.simulator.tree import PciFunction, Tree

BUS = "/sys/bus/pci/"

#: The cards that the faults strike.
HANGING = CARDS[2].address
FAILING = CARDS[4].address

#: Who opens the card while its driver is taken from it (fault ``unbind-hangs``).
OPENER_PID = 77_480

#: Seconds that a driver needs to take a function, to give it up, and that a reset takes.
PROBE_S = {"nvidia": 1.4}
UNBIND_S = 0.6
RESET_S = 0.3

#: Seconds between two looks of the nvidia driver whether its card is still open (os_delay in nv-pci.c).
_LOOK_S = 0.5

_NVIDIA, _VFIO = "nvidia", "vfio-pci"

#: In the order in which they registered: who comes first is asked first. vfio-pci stands in /etc/modules.
_DRIVERS: dict[str, Callable[[PciFunction], bool]] = {
    "pcieport": lambda one: one.class_code >> 8 == 0x0604,
    "nvme": lambda one: one.class_code >> 8 == 0x0108,
    "vfio-pci": lambda one: False,
    "ast": lambda one: one.vendor == 0x1A03,
    "mlx5_core": lambda one: one.vendor == 0x15B3,
    "nvidia": lambda one: one.vendor == 0x10DE and one.class_code >> 8 in (0x0300, 0x0302),
    "snd_hda_intel": lambda one: one.class_code >> 8 == 0x0403,
}

#: Modules that modprobe finds, by either spelling; all of them are loaded.
_MODULES = frozenset(
    {"vfio", "vfio_pci", "nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "snd_hda_intel"}
)

_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_OVERRIDE = re.compile(rf"{BUS}devices/({_ADDRESS.pattern})/driver_override")

Stack = tuple[str, ...]

_WRITE: Stack = (
    "kernfs_fop_write_iter+0x142/0x1f0",
    "vfs_write+0x2a5/0x480",
    "ksys_write+0x73/0x100",
    "do_syscall_64+0x84/0x320",
    "entry_SYSCALL_64_after_hwframe+0x76/0x7e",
)
_RELEASE: Stack = ("pci_device_remove+0x47/0xb0", "device_release_driver_internal+0x19e/0x200")
_UNBIND: Stack = ("unbind_store+0xa4/0xb0", *_WRITE)
_BIND: Stack = ("device_driver_attach+0x39/0xa0", "bind_store+0x6f/0xa0", *_WRITE)
_REMOVE: Stack = ("pci_stop_bus_device+0x71/0xa0", "remove_store+0x84/0xa0", *_WRITE)
_LOCK: Stack = ("__mutex_lock.constprop.0+0x3c4/0x8a0",)
_HANGS: dict[str, tuple[str, Stack]] = {
    _NVIDIA: ("D", ("msleep+0x2d/0x40", "os_delay+0x9d/0xf0 [nvidia]", "nv_pci_remove+0x1c4/0x3b0 [nvidia]")),
    _VFIO: (
        "S",
        (
            "wait_woken+0x54/0x70",
            "vfio_unregister_group_dev+0xd1/0x1b0 [vfio]",
            "vfio_pci_core_unregister_device+0x1c/0x90 [vfio_pci_core]",
        ),
    ),
}


class Writer(msgspec.Struct, frozen=True):
    """The program that writes, as /proc shows it while it waits."""

    name: str
    argv: tuple[str, ...]
    cgroup: str = "/user.slice/user-0.slice/session-4.scope"


class _Process:
    """One write's process. It is only shown once it waits."""

    def __init__(self, kernel: Kernel, writer: Writer) -> None:
        self._kernel = kernel
        self.writer = writer
        self.pid: int | None = None

    def stand(self, stack: Stack, state: str = "D") -> None:
        if self.pid is None:
            self.pid = self._kernel.show(self.writer, stack, state)
        else:
            self._kernel.tree.stand(self.pid, state, stack)

    def end(self) -> None:
        if self.pid is not None:
            self._kernel.hide(self.pid)


class NotOpened(OSError):
    """The file that is written to could not be opened."""


class Output(Protocol):
    async def out(self, text: str) -> None: ...

    async def err(self, text: str) -> None: ...


#: Takes what is written, and the process that writes. OSError is what the kernel answers.
Store = Callable[[str, _Process], Coroutine[None, None, None]]


class Kernel:
    """The drivers of the host's PCI functions. ``speed``: how many times as fast as real ones they are."""

    def __init__(
        self,
        tree: Tree,
        cards: Cards,
        faults: Faults,
        speed: float,
        *,
        wall: Callable[[], float] = time.time,
        log: Callable[[str, int], None] = lambda text, priority: None,
    ) -> None:
        self.tree = tree
        self.log = log
        self._cards = {card.slot.address: card for card in cards}
        self._faults = faults
        self._speed = speed
        self._wall = wall
        self._drivers: dict[str, str | None] = {}  # the kernel's own word: a link goes before its driver does
        self._ids: dict[str, set[tuple[int, int]]] = {name: set() for name in _DRIVERS}  # by new_id
        self._minors: dict[str, int] = {}  # of the nvidia driver, by address
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: set[int] = set()  # pids
        self._next_pid = 90_200

    def create(self) -> None:
        """As it is after boot: what the tree says."""
        for address in self.tree.functions:
            self._drivers[address] = self.tree.driver(address)
        for card in self._cards.values():
            node = self.tree.node(card.slot)
            if node is not None:
                self._minors[card.slot.address] = int(node.removeprefix("/dev/nvidia"))

    async def close(self) -> None:
        """Nothing waits any longer."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # Programs ----------------------------------------------------------------------------------

    async def program(self, name: str, words: Sequence[str], stdin: str, output: Output) -> int | None:
        """``dd of=FILE`` into the PCI bus: its exit status. None when the words ask for something else.

        ``cat`` is answered by others, but reading an override waits for the device here.
        """
        if name == "cat":
            for word in words:
                found = _OVERRIDE.fullmatch(word)
                if found is not None and found[1] in self._locks:
                    writer = Writer("cat", ("cat", *words))
                    await self._begun(self._read(found[1], _Process(self, writer)))
            return None
        operands = dict(word.partition("=")[::2] for word in words) if name == "dd" else {}
        path = operands.get("of", "")
        if not path.startswith(BUS):
            return None
        try:
            await self.write(
                path, stdin, Writer("dd", ("dd", *words)), create="nocreat" not in operands.get("conv", "")
            )
        except NotOpened as problem:
            await output.err(f"dd: failed to open '{path}': {problem.strerror}\n")
            return 1
        except OSError as problem:
            await output.err(f"dd: error writing '{path}': {problem.strerror}\n")
            return 1
        return 0

    def modprobe(self, words: Sequence[str]) -> tuple[int, str, str]:
        """Exit status, stdout, stderr. Everything that is there is loaded and in use."""
        options = [word for word in words if word.startswith("-") and word != "--"]
        for word in words:
            if word in options or word == "--":
                continue
            if word.replace("-", "_") not in _MODULES:
                return 1, "", f"modprobe: FATAL: Module {word} not found in directory /lib/modules/{KERNEL}\n"
            if "-r" in options:
                return 1, "", f"modprobe: FATAL: Module {word.replace('-', '_')} is in use.\n"
        return 0, "", ""

    def kill(self, pid: int) -> bool:
        """A signal for a process of the kernel's: whether there is one. What waits here stays where it is."""
        if pid == OPENER_PID and (self.tree.root / f"proc/{pid}").exists():
            self.tree.remove_process(pid)
            self._faults.clear("unbind-hangs")
            return True
        return pid in self._waiting

    # Writes ------------------------------------------------------------------------------------

    async def write(self, path: str, text: str, writer: Writer, *, create: bool = False) -> None:
        """Write to a file below /sys/bus/pci. OSError is the kernel's answer, NotOpened that of open(2).

        ``create``: with O_CREAT, which sysfs refuses. Who is cancelled leaves the write behind: it goes on.
        """
        store = self._opened([part for part in path.removeprefix(BUS).split("/") if part], create)
        if text:
            await self._begun(self._stored(store, text, _Process(self, writer)))

    async def _stored(self, store: Store, text: str, process: _Process) -> None:
        try:
            await store(text, process)
        finally:
            process.end()

    async def _read(self, address: str, process: _Process) -> None:
        try:
            async with self._device(address, process, ("driver_override_show+0x22/0x60",)):
                pass
        finally:
            process.end()

    async def _begun(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Of a write that was left behind nobody hears the answer; a defect is told all the same."""
        self._tasks.discard(task)
        if not task.cancelled():
            problem = task.exception()
            if problem is not None and not isinstance(problem, OSError):
                task.get_loop().call_exception_handler({"message": "a write", "exception": problem})

    def _opened(self, parts: list[str], create: bool) -> Store:
        while parts[:1] == ["devices"] and len(parts) >= 3 and parts[1] in self._present():
            address, below = parts[1], parts[2:]
            if below[0] == "subsystem":
                parts = below[1:]
            elif below[0] == "driver" and len(below) > 1:
                driver = self.tree.driver(address)
                if driver is None:
                    raise _not_opened(errno.EACCES if create else errno.ENOENT)
                parts = ["drivers", driver, *below[1:]]
            else:
                return self._attribute(address, "/".join(below), create)
        if parts[:1] == ["drivers"] and len(parts) == 3 and parts[1] in _DRIVERS:
            driver, name = parts[1:]
            stores: dict[str, Callable[[str, str, _Process], Coroutine[None, None, None]]] = {
                "bind": self._bind,
                "unbind": self._unbind,
                "new_id": self._new_id,
                "remove_id": self._remove_id,
            }
            if name in stores:
                store = stores[name]
                return lambda text, process: store(driver, text, process)
        whole: dict[tuple[str, ...], Store] = {
            ("rescan",): lambda text, process: self._rescan(None, text, process),
            ("drivers_probe",): self._drivers_probe,
        }
        if tuple(parts) in whole:
            return whole[tuple(parts)]
        raise _not_opened(errno.EACCES if create else errno.ENOENT)

    def _attribute(self, address: str, name: str, create: bool) -> Store:
        stores: dict[str, Callable[[str, str, _Process], Coroutine[None, None, None]]] = {
            "driver_override": self._driver_override,
            "power/control": self._power_control,
            "d3cold_allowed": self._d3cold_allowed,
            "reset": self._reset,
            "reset_subordinate": self._reset_subordinate,
            "remove": self._remove,
            "rescan": self._rescan,
        }
        there = (self.tree.device(address) / name).exists()
        if name not in stores or not there:
            raise _not_opened(errno.EACCES if there or create else errno.ENOENT)
        store = stores[name]
        return lambda text, process: store(address, text, process)

    # Drivers -----------------------------------------------------------------------------------

    async def _bind(self, driver: str, text: str, process: _Process) -> None:
        address = text.strip()
        if address not in self._present() or not self._matches(driver, address):
            raise _error(errno.ENODEV)
        async with self._device(address, process, _BIND):
            if self._drivers[address] is not None:
                raise _error(errno.EBUSY)
            await self._probe(driver, address, process, _BIND)

    async def _unbind(self, driver: str, text: str, process: _Process) -> None:
        address = text.strip()
        if self._drivers.get(address) != driver:
            raise _error(errno.ENODEV)
        async with self._device(address, process, (*_RELEASE, *_UNBIND)):
            if self._drivers[address] == driver:
                await self._release(address, process, _UNBIND)

    async def _drivers_probe(self, text: str, process: _Process) -> None:
        """Says nothing of what came of it, as the real one."""
        if text.strip() not in self._present():
            raise _error(errno.ENODEV)
        await self._attach(text.strip(), _DRIVERS, process)

    async def _new_id(self, driver: str, text: str, process: _Process) -> None:
        identity = _identity(text)
        if identity in self._ids[driver]:
            raise _error(errno.EEXIST)
        self._ids[driver].add(identity)
        # It takes at once whatever fits and has no driver. What is being removed still has its own.
        for address in self._present():
            if self._drivers[address] is None:
                await self._attach(address, (driver,), process)

    async def _remove_id(self, driver: str, text: str, process: _Process) -> None:
        identity = _identity(text)
        if identity not in self._ids[driver]:
            raise _error(errno.ENODEV)
        self._ids[driver].discard(identity)

    def _matches(self, driver: str, address: str) -> bool:
        """pci_match_device: an override keeps all others away, and makes its own driver fit."""
        override = self.tree.value(address, "driver_override")
        if override != "(null)":
            return override == driver
        function = self.tree.functions[address]
        return (function.vendor, function.device) in self._ids[driver] or _DRIVERS[driver](function)

    async def _attach(self, address: str, drivers: Iterable[str], process: _Process) -> None:
        """The first of the drivers that fits and does not fail takes the function."""
        async with self._device(address, process, _BIND):
            for driver in drivers:
                if self._drivers[address] is None and self._matches(driver, address):
                    with contextlib.suppress(OSError):  # the kernel's log tells it, the next one is asked
                        await self._probe(driver, address, process, _BIND)

    async def _probe(self, driver: str, address: str, process: _Process, above: Stack) -> None:
        """The device's lock is held. OSError is what the driver's probe answers."""
        card = self._cards.get(address)
        process.stand(("pci_device_probe+0xd4/0x190", "really_probe+0xde/0x340", *above))
        await self._pause(PROBE_S.get(driver, 0.05))
        fails = driver == _NVIDIA and address == FAILING and "probe-fails" in self._faults
        if card is not None and driver == _NVIDIA and (fails or card.lost):
            if card.lost:
                self.log(f"NVRM: The NVIDIA GPU {address} is not responding to commands.", 3)
            self.log(f"nvidia {address}: probe with driver nvidia failed with error -5", 4)
            raise _error(errno.EIO)
        self._drivers[address] = driver
        self.tree.bind(address, driver)
        if driver == _VFIO:
            self.tree.group_file(self.tree.functions[address].group, True)
            self.tree.set_value(address, "power/control", "auto")  # vfio-pci lets it fall asleep
        if card is not None:
            card.driver = driver
            if driver == _NVIDIA:
                used = self._minors.values()
                minor = next(number for number in range(256) if number not in used)
                self._minors[address] = minor
                self.tree.driver_has(card.slot, minor)
                self.log(f"nvidia {address}: enabling device (0000 -> 0003)", 6)
        self._power(address)

    async def _release(self, address: str, process: _Process, above: Stack) -> None:
        """The device's lock is held. Does not return while somebody has the function open."""
        driver = self._drivers[address]
        self.tree.bind(address, None)
        card = self._cards.get(address)
        if card is not None:
            card.driver = None
        group = self.tree.functions[address].group
        process.stand((*_RELEASE, *above))
        if driver == _NVIDIA and address in self._minors:
            node = f"/dev/nvidia{self._minors[address]}"
            if address == HANGING and "unbind-hangs" in self._faults:
                self._open(node)
            await self._let_go(driver, address, node, process, above)
        elif driver == _VFIO:
            await self._let_go(driver, address, f"/dev/vfio/{group}", process, above)
        await self._pause(UNBIND_S if driver == _NVIDIA else 0.02)
        self._drivers[address] = None
        if card is not None and self._minors.pop(address, None) is not None:
            self.tree.driver_has(card.slot, None)
        if driver == _VFIO:
            if not any(self._drivers[one] == _VFIO for one in self._members(group)):
                self.tree.group_file(group, False)
            self.tree.set_value(address, "power/control", "on")  # pm_runtime_forbid in its remove
        self._power(address)

    async def _let_go(self, driver: str, address: str, node: str, process: _Process, above: Stack) -> None:
        if not self.tree.is_open(node):
            return
        state, inner = _HANGS[driver]
        process.stand((*inner, *_RELEASE, *above), state)
        if driver == _NVIDIA:
            self.log(f"NVRM: Attempting to remove device {address} with non-zero usage count!", 3)
        else:
            self.log(
                f'vfio-pci {address}: Device is currently in use, task "{process.writer.name}" '
                f"({process.pid}) blocked until device is released",
                4,
            )
        while True:
            await asyncio.sleep(max(0.02, _LOOK_S / self._speed))
            if not self.tree.is_open(node):
                return

    def _open(self, node: str) -> None:
        """Somebody opens the card between the last look and the removal."""
        self.tree.add_process(
            OPENER_PID,
            name="gpu_stats",
            argv=("/usr/bin/python3", "/opt/stats/gpu_stats.py", "--every", "15"),
            cgroup="/user.slice/user-0.slice/session-9.scope",
            inner=None,
            parent=1,
            started_at=self._wall(),
            files={0: "/dev/null", 3: "/dev/nvidiactl", 4: node},
        )

    # Functions ---------------------------------------------------------------------------------

    async def _driver_override(self, address: str, text: str, process: _Process) -> None:
        async with self._device(address, process, ("driver_override_store+0x2c/0x90", *_WRITE)):
            self.tree.set_value(address, "driver_override", text.partition("\n")[0] or "(null)")

    async def _power_control(self, address: str, text: str, process: _Process) -> None:
        word = text.strip()
        if word not in ("auto", "on"):
            raise _error(errno.EINVAL)
        async with self._device(address, process, ("control_store+0x30/0x80", *_WRITE)):
            self.tree.set_value(address, "power/control", word)
            self._power(address)

    async def _d3cold_allowed(self, address: str, text: str, process: _Process) -> None:
        self.tree.set_value(address, "d3cold_allowed", "1" if _number(text) else "0")

    async def _reset(self, address: str, text: str, process: _Process) -> None:
        if _number(text) != 1:
            raise _error(errno.EINVAL)
        async with self._device(address, process, ("reset_store+0x7c/0xd0", *_WRITE)):
            name = self._drivers[address] or "pci"
            process.stand(("msleep+0x2d/0x40", "pcie_flr+0x7c/0xc0", "reset_store+0x7c/0xd0", *_WRITE))
            self.log(f"{name} {address}: resetting", 6)
            card = self._cards.get(address)
            if card is not None and card.lost:
                await self._pause(65.5)
                self.log(f"{name} {address}: not ready 65535ms after FLR; giving up", 4)
                raise _error(errno.ENOTTY)
            await self._pause(RESET_S)
            self.log(f"{name} {address}: reset done", 6)

    async def _reset_subordinate(self, port: str, text: str, process: _Process) -> None:
        """The bus below a port, with every function on it. What fell off the bus does not come back by it."""
        if _number(text) != 1:
            raise _error(errno.EINVAL)
        stack = ("pci_reset_bus+0x5b/0x2d0", "reset_subordinate_store+0x61/0xb0", *_WRITE)
        async with contextlib.AsyncExitStack() as locks:
            for address in (one for one in self._present() if self._is_below(one, port)):
                await locks.enter_async_context(self._device(address, process, stack))
            process.stand(("msleep+0x2d/0x40", *stack))
            await self._pause(RESET_S)
            card = next((one for one in self._cards.values() if self._is_below(one.slot.address, port)), None)
            if card is not None and card.lost:
                await self._pause(60.0)
                raise _error(errno.ENOTTY)

    def _is_below(self, address: str, port: str) -> bool:
        return address in self._drivers and self.tree.functions[address].port == port

    async def _remove(self, address: str, text: str, process: _Process) -> None:
        if not _number(text):
            return
        below = [one for one in self._present() if self._is_below(one, address)]
        for one in (*below, address):
            async with self._device(one, process, (*_RELEASE, *_REMOVE)):
                if self._drivers[one] is not None:
                    await self._release(one, process, _REMOVE)
                self.tree.unplug(one)
                del self._drivers[one]

    async def _rescan(self, below: str | None, text: str, process: _Process) -> None:
        """``below`` a bridge, or on every bus. What fell off the bus does not answer, and is not found."""
        if not _number(text):
            return
        for address, function in self.tree.functions.items():  # ports come before what is plugged into them
            card = self._cards.get(address[:-1] + "0")
            if (
                address not in self._drivers
                and below in (None, function.port)
                and (function.port is None or function.port in self._drivers)
                and not (card is not None and card.lost)
            ):
                self.tree.plug(address)
                self._drivers[address] = None
                await self._attach(address, _DRIVERS, process)

    def settle(self, addresses: Iterable[str]) -> None:
        """A virtual machine has opened these functions or let go of them: they wake or fall asleep."""
        for address in addresses:
            if address in self._drivers:
                self._power(address)

    def _power(self, address: str) -> None:
        sleeps = (
            self._drivers[address] == _VFIO
            and self.tree.value(address, "power/control") == "auto"
            and not self.tree.is_open(f"/dev/vfio/{self.tree.functions[address].group}")
        )
        self.tree.set_value(address, "power_state", "D3hot" if sleeps else "D0")
        self.tree.set_value(address, "power/runtime_status", "suspended" if sleeps else "active")

    # Parts -------------------------------------------------------------------------------------

    def show(self, writer: Writer, stack: Stack, state: str) -> int:
        """The process appears in /proc: its pid."""
        self._next_pid += 7
        self.tree.add_process(
            self._next_pid,
            name=writer.name,
            argv=writer.argv,
            cgroup=writer.cgroup,
            inner=None,
            parent=1,
            started_at=self._wall(),
            files={0: "/dev/null"},
            state=state,
            stack=stack,
        )
        self._waiting.add(self._next_pid)
        return self._next_pid

    def hide(self, pid: int) -> None:
        self.tree.remove_process(pid)
        self._waiting.discard(pid)

    @contextlib.asynccontextmanager
    async def _device(self, address: str, process: _Process, stack: Stack) -> AsyncIterator[None]:
        """With the device's lock. ENODEV when it is gone by then."""
        lock = self._locks.setdefault(address, asyncio.Lock())
        if lock.locked():
            process.stand((*_LOCK, *stack))
        async with lock:
            if address not in self._drivers:
                raise _error(errno.ENODEV)
            yield

    def _present(self) -> tuple[str, ...]:
        """Addresses on the bus."""
        return tuple(self._drivers)

    def _members(self, group: int) -> tuple[str, ...]:
        return tuple(one for one in self._drivers if self.tree.functions[one].group == group)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._speed)


def _identity(text: str) -> tuple[int, int]:
    """``10de 2bb1``, with or without 0x: vendor and device. EINVAL for anything else."""
    words = text.split()[:2]
    try:
        vendor, device = (int(word, 16) for word in words)
    except ValueError:
        raise _error(errno.EINVAL) from None
    return vendor, device


def _number(text: str) -> int:
    try:
        return int(text.strip(), 0)
    except ValueError:
        raise _error(errno.EINVAL) from None


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _not_opened(number: int) -> NotOpened:
    return NotOpened(number, os.strerror(number))
