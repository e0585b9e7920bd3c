"""In the guest: its cards, jobs that move them, and processes that are in the way."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import msgspec

from console.model.operation import Actor, Direction, JobStart, JobView, Plan
from console.model.profile import Profile
from console.model.rebind.moves import CardMove, move_of
from console.model.site import Site
from console.operations.job import carry_on
from console.operations.rebind import functions, kernel_write
from console.operations.rebind.cards import ToHost, ToVfio
from console.operations.rebind.repair import Rescue
from console.operations.rebind.request import RecoverRequest, Rung
from console.operations.step import Context, Step
from console.sources.inventory import read_inventory
from console.sources.pending_writes import own_writes
from console.store.job_directory import JobFile, SiteFile, create_job
from console.store.jobs import get_job
from console.store.state import State
from console.transport.local import LocalRunner
from console.transport.runner import Result

ROOT = Path("/")
PCI = Path("/sys/bus/pci")

#: As the rig plugs them in: four cards with a sound function each.
GPUS = tuple(f"0000:0{bus}:00.0" for bus in (1, 2, 3, 4))
HOMES = {
    address: driver
    for gpu in GPUS
    for address, driver in ((gpu, "nvidia"), (gpu[:-1] + "1", "snd_hda_intel"))
}

#: Two network cards in one group, and one behind a switch, with a bridge in its group.
SHARED, NEIGHBOUR = "0000:06:01.0", "0000:06:02.0"

_PARAMETERS = Path("/sys/module/nvidia/parameters")


def set_up() -> None:
    """The drivers, and deadlines that are worth waiting for in a test. vfio-pci is not loaded yet."""
    for module in ("snd-hda-intel", "e1000", "e1000e"):
        modprobe(module)
    load_nvidia()
    kernel_write.UNBIND_S = 3.0
    functions.PENDING_S = 2.0
    until(lambda: all(driver_of(address) == home for address, home in HOMES.items()))


def modprobe(module: str) -> None:
    subprocess.run(["modprobe", module], check=True, capture_output=True)


def load_nvidia() -> None:
    subprocess.run(["insmod", f"/modules/lib/modules/{os.uname().release}/extra/nvidia.ko"], check=True)


def until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    """Wait for it. AssertionError when it does not come about."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            raise AssertionError(f"not within {seconds:g} s: {condition}")
        time.sleep(0.02)


def same(found: object, wanted: object, about: object = "") -> None:
    """Both, when they are not the same: nobody is there to look at them again."""
    if found != wanted:
        raise AssertionError(f"{about}\nfound:  {found}\nwanted: {wanted}")


# What there is ---------------------------------------------------------------------------------


def driver_of(address: str) -> str | None:
    link = PCI / "devices" / address / "driver"
    return link.readlink().name if link.is_symlink() else None


def value(address: str, name: str) -> str:
    return (PCI / "devices" / address / name).read_text().strip()


World = dict[str, tuple[str | None, str, str, str]]


def world(addresses: Sequence[str] = tuple(HOMES)) -> World:
    """Of each function its driver, its override, and whether it may sleep."""
    return {
        address: (
            driver_of(address),
            value(address, "driver_override"),
            value(address, "d3cold_allowed"),
            value(address, "power/control"),
        )
        for address in addresses
    }


def drivers(addresses: Sequence[str] = tuple(HOMES)) -> dict[str, str | None]:
    return {address: driver_of(address) for address in addresses}


def minors() -> dict[str, int | None]:
    return {slot.address: slot.minor for slot in read_inventory(ROOT, GPUS).slots}


def group_of(address: str) -> int:
    return int((PCI / "devices" / address / "iommu_group").readlink().name)


# Writes as anybody may make them ---------------------------------------------------------------


def put(path: str | Path, text: str) -> None:
    descriptor = os.open(PCI / path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def rebind(address: str, driver: str | None) -> None:
    """Past gpuops, with nobody holding it."""
    device = PCI / "devices" / address
    if driver_of(address) is not None:
        put(device / "driver/unbind", address)
    if driver is not None:
        put(device / "driver_override", driver)
        put(f"drivers/{driver}/bind", address)
    put(device / "driver_override", "\n")


def put_on_vfio(gpu: str) -> None:
    """As a ToVfio leaves a card."""
    for address in (gpu[:-1] + "1", gpu):
        rebind(address, "vfio-pci")
        put(f"devices/{address}/d3cold_allowed", "0")
        put(f"devices/{address}/power/control", "on")


def set_parameter(name: str, text: str) -> None:
    (_PARAMETERS / name).write_text(text)


def put_home() -> None:
    """Whatever a case left: every function on its own driver, minors in order, nothing left over."""
    Holder.end_all()
    for name in ("stuck", "fail_probe"):
        set_parameter(name, "-")
    set_parameter("probe_ms", "0")
    until(lambda: not own_writes(ROOT))
    if (PCI / "drivers/vfio-pci").is_dir():
        for identity in ("1b36 0010", "8086 293e"):
            with contextlib.suppress(OSError):  # it was not given
                put("drivers/vfio-pci/remove_id", identity)
    if minors() != dict(zip(GPUS, range(4), strict=True)):
        for gpu in GPUS:
            rebind(gpu, None)
    for address, home in HOMES.items():
        if driver_of(address) != home:
            rebind(address, home)
        put(f"devices/{address}/driver_override", "\n")
        put(f"devices/{address}/d3cold_allowed", "1")
        put(f"devices/{address}/power/control", "on")
    for address in (SHARED, NEIGHBOUR):
        if driver_of(address) != "e1000":
            rebind(address, "e1000")


# Who is in the way -----------------------------------------------------------------------------


class Holder:
    """A process that has something open, until it is told to end."""

    _all: ClassVar[list[Holder]] = []

    def __init__(self, hold: Callable[[], object]) -> None:
        ready, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            kept = None
            try:
                kept = hold()
                os.write(tell, b"%d\n" % os.getpid())
                signal.pause()
            finally:
                os._exit(0 if kept else 1)
        os.close(tell)
        with os.fdopen(ready, "rb") as words:
            if not words.readline():
                raise AssertionError("the holder could not begin")
        self._all.append(self)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._all.remove(self)

    @classmethod
    def end_all(cls) -> None:
        for holder in tuple(cls._all):
            holder.end()


def opened(path: str) -> Callable[[], object]:
    return lambda: os.fdopen(os.open(path, os.O_RDWR), "rb", buffering=0)


def mapped(path: str) -> Callable[[], object]:
    """Only mapped: the descriptor is closed."""

    def hold() -> object:
        descriptor = os.open(path, os.O_RDWR)
        area = ctypes.CDLL(None, use_errno=True)
        area.mmap.restype = ctypes.c_void_p
        area.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        where = area.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        os.close(descriptor)
        return where not in (None, ctypes.c_void_p(-1).value)

    return hold


def contained(minor: int) -> Callable[[], object]:
    """In a mount and a pid namespace of its own, with a node of its own name."""

    def hold() -> object:
        new_mounts, new_pids = 0x00020000, 0x20000000
        if ctypes.CDLL(None, use_errno=True).unshare(new_mounts | new_pids) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        inside = os.fork()
        if inside:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # nobody but the one inside tells that it is ready
            os.waitpid(inside, 0)
            os._exit(0)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        subprocess.run(["mount", "-t", "tmpfs", "elsewhere", "/run"], check=True)
        os.mknod("/run/card", stat.S_IFCHR | 0o600, os.makedev(195, minor))
        return opened("/run/card")()

    return hold


def as_a_vmm(address: str) -> Callable[[], object]:
    """As QEMU holds a card: container, group and device (linux/vfio.h)."""

    def hold() -> object:
        group = os.open(f"/dev/vfio/{group_of(address)}", os.O_RDWR)
        container = os.open("/dev/vfio/vfio", os.O_RDWR)
        fcntl.ioctl(group, _vfio(4), struct.pack("i", container))  # VFIO_GROUP_SET_CONTAINER
        fcntl.ioctl(container, _vfio(2), 1)  # VFIO_SET_IOMMU, VFIO_TYPE1_IOMMU
        fcntl.ioctl(group, _vfio(6), address.encode() + b"\0")  # VFIO_GROUP_GET_DEVICE_FD
        return True

    return hold


def viable(address: str) -> bool:
    """What the kernel itself says of the group: VFIO_GROUP_GET_STATUS."""
    descriptor = os.open(f"/dev/vfio/{group_of(address)}", os.O_RDWR)
    try:
        answer = fcntl.ioctl(descriptor, _vfio(3), struct.pack("II", 8, 0))
    finally:
        os.close(descriptor)
    return bool(struct.unpack("II", answer)[1] & 1)


def _vfio(number: int) -> int:
    return ord(";") << 8 | 100 + number


# Jobs ------------------------------------------------------------------------------------------


#: Where cards go; or a rung, which is tried on the first of them: the others are beside it.
Way = Literal["vfio", "host"] | Rung


class Request(msgspec.Struct):
    """What the steps are built from."""

    to: Way
    moves: tuple[CardMove, ...]
    port: str | None = None


def steps_of(plan: Plan) -> tuple[Step, ...]:
    request = msgspec.json.decode(plan.request, type=Request)
    if request.to != "vfio" and request.to != "host":
        card, *beside = request.moves
        tried = RecoverRequest(move=card, rung=request.to, port=request.port, beside=tuple(beside))
        return (Rescue(tried),)
    kind: type[ToVfio | ToHost] = ToVfio if request.to == "vfio" else ToHost
    return tuple(kind(move) for move in request.moves)


def moves(addresses: Sequence[str], homes: dict[str, str | None] | None = None) -> tuple[CardMove, ...]:
    """As a plan would take them from the inventory."""
    inventory = read_inventory(ROOT, addresses)
    found = [inventory.slot(address) for address in addresses]
    return tuple(move_of(slot, inventory.drivers, homes) for slot in found if slot is not None)


class PointedRunner(LocalRunner):
    """Calls before each write, and after the last one nothing is left to call for."""

    def __init__(self, at: Callable[[], None]) -> None:
        super().__init__()
        self._at = at

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        if "dd" in argv:
            self._at()
        return await super().run(argv, deadline=deadline, stdin=stdin)


class Job:
    """A move of cards on the engine, each process of it forked from this one."""

    def __init__(
        self,
        to: Way,
        addresses: Sequence[str],
        homes: dict[str, str | None] | None = None,
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(dir="/run"))
        self.state = State(self._directory)
        self.state.create()
        card = read_inventory(ROOT, addresses[:1]).slot(addresses[0])
        assert card is not None, addresses
        request = msgspec.Raw(msgspec.json.encode(Request(to, moves(addresses, homes), card.upstream)))
        bare = Plan(action="rebind", title=to, target="it", made_at=0.0, request=request, steps=())
        self.steps = steps_of(bare)
        plan = msgspec.structs.replace(bare, steps=tuple(step.planned() for step in self.steps))
        now = time.time()
        self.id = "20261130-101502-rebind"
        file = JobFile(id=self.id, created_at=now, actor=Actor("root"), note=None, plan=plan)
        begun = JobStart(at=now, direction="forward", pid=1, start_ticks=0, boot_id="another boot")
        create_job(self.state, file, SiteFile(site=Site(), profiles=()), begun)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *raised: object) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def view(self) -> JobView:
        return get_job(self.state, self.id)

    @property
    def why(self) -> str:
        return "; ".join(self.view.reasons)

    def carry_on(self, direction: Direction = "resume", at: Callable[[], None] = lambda: None) -> int:
        """In a process of its own, to its end: its exit status, negative when a signal ended it."""
        _, status = os.waitpid(self.start(direction, at), 0)
        return os.waitstatus_to_exitcode(status)

    def start(self, direction: Direction = "resume", at: Callable[[], None] = lambda: None) -> int:
        """Its pid."""
        child = os.fork()
        if child:
            return child
        code = 99
        try:
            code = carry_on(self.state, self.id, direction, steps_of=steps_of, opened=_context(at))
        finally:
            os._exit(code)


def _context(at: Callable[[], None]) -> Callable[..., Any]:
    @contextlib.asynccontextmanager
    async def opened(site: Site, profiles: tuple[Profile, ...], *, state: State) -> AsyncIterator[Context]:
        yield context(PointedRunner(at), state)

    return opened


def context(runner: LocalRunner | None = None, state: State | None = None) -> Context:
    """The host alone: these steps look at nothing else."""

    async def pause(reason: str) -> None:
        """Nothing here reads NVML."""

    nvml = SimpleNamespace(pause=pause)
    monitor: Any = SimpleNamespace(
        sources=SimpleNamespace(host=runner or LocalRunner(), nvml=nvml),
        snapshot=lambda: SimpleNamespace(profile=None),
    )
    return Context(
        site=Site(gpus=GPUS),
        profiles=(),
        monitor=monitor,
        state=state or State(Path("/run/none")),
        clock=time.monotonic,
        wall_clock=time.time,
    )


def counted(job: Job) -> tuple[int, int]:
    """Carry a job out: how many writes it made, and its exit status."""
    count = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the process that is forked

    def at() -> None:
        count[:8] = struct.pack("q", struct.unpack("q", count[:8])[0] + 1)

    code = job.carry_on(at=at)
    return struct.unpack("q", count[:8])[0], code


def killer(nth: int) -> Callable[[], None]:
    """Kills its process before the nth write."""
    passed: Iterator[int] = iter(range(1_000_000))

    def at() -> None:
        if next(passed) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    return at
