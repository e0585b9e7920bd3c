"""The simulated box: one process that plays a whole host behind a socket and an HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from console.simulator import commands
from console.simulator.cards import Cards
from console.simulator.clients import Clients
from console.simulator.clock import Clock
from console.simulator.engine import TICK_S, Engine
from console.simulator.faults import Faults
from console.simulator.journal import Journal
from console.simulator.kernel import Kernel
from console.simulator.load import Source
from console.simulator.machine import (
    CONTAINER,
    CONTAINER_NAME,
    GIB,
    HOST_UPTIME_S,
    HOSTNAME,
    MIB,
    RAM,
    VM,
    CardSlot,
)
from console.simulator.nvml import NvmlStream
from console.simulator.processes import CONTAINER_INIT, Processes
from console.simulator.proxmox import Proxmox
from console.simulator.service import EngineService
from console.simulator.systemd import Manager, Unit
from console.simulator.tree import Tree

SOCKET_NAME = "box.sock"

#: A request line longer than this is nobody's.
_LINE_LIMIT = 1024 * 1024

#: A foreign process on a card (fault ``holder``).
HOLDER_PID = 77_120
_HOLDER_CARD = 6
_HOLDER_BYTES = 20 * 10**9

_LOST_CARD = 3
_XID_CARD = 5

_PAGE_CACHE = 9 * GIB  # of the container

_BASE_MEMORY = 71 * GIB  # what the host and the container use without the host cache


class AlreadyRunning(Exception):
    """A live box has this directory."""


class Box:
    """The box in ``directory``."""

    def __init__(
        self,
        directory: Path,
        *,
        speed: float = 1.0,
        faults: tuple[str, ...] = (),
        nvml: str = "simulated",
        port: int = 0,
        seed: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self.directory = directory
        self.faults = Faults(faults)
        self._hangs = "hang" in self.faults
        self.faults.clear("hang")  # it strikes an engine that has work to do
        self._nvml_mode = nvml
        self._wanted_port = port
        self._clock = clock or Clock()
        self._rng = random.Random(seed)
        booted_at = self._clock.wall() - HOST_UPTIME_S
        self._booted_at = booted_at
        root = directory / "root"
        self.tree = Tree(root, booted_at)
        self.rootfs = root / f"var/lib/lxc/{CONTAINER}/rootfs"
        self.host_journal = Journal(HOSTNAME, booted_at, self._clock.wall)
        self.journal = Journal(CONTAINER_NAME, booted_at, self._clock.wall)
        self.cards = Cards(random.Random(self._rng.random()))
        self.processes = Processes(self.tree)
        self.engine = Engine(self.faults, random.Random(self._rng.random()), self._clock, self._log)
        self.service = EngineService(
            rootfs=self.rootfs,
            engine=self.engine,
            journal=self.journal,
            processes=self.processes,
            cards=self.cards,
            faults=self.faults,
            rng=random.Random(self._rng.random()),
            clock=self._clock,
            speed=speed,
        )
        self.nvml = NvmlStream(self.cards, self._on_cards, self._clock)
        self.kernel = Kernel(
            self.tree, self.cards, self.faults, speed, wall=self._clock.wall, log=self._kernel
        )
        self.proxmox = Proxmox(self.tree, self.faults, speed, wall=self._clock.wall, kernel=self.kernel)
        self.clients = Clients(self.tree, self.cards, booted_at)
        self._host = self._commands()
        self._lock: int | None = None  # descriptor of the directory, locked
        self._socket: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()
        self._beat: asyncio.Task[None] | None = None

    # Life --------------------------------------------------------------------------------------

    async def open(self) -> Path:
        """Bring the box up; the path of its site file. AlreadyRunning when one is there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._claim()
        self.tree.create()
        self.kernel.create()
        self.proxmox.create()
        self.clients.create()
        self.processes.container_init(self._booted_at)
        await self.service.revive(self._wanted_port)
        self.tree.link_root(CONTAINER_INIT, self.rootfs)
        self._boot_log()
        now = self._clock.mono()
        for _ in range(240):  # the cards are warm
            self.cards.advance(self.engine.work(), 0.5)
        self._strike()
        self._keep_files()
        with _short_path(self.directory) as folder:
            self._socket = await asyncio.start_unix_server(
                self._accept, f"{folder}/{SOCKET_NAME}", limit=_LINE_LIMIT
            )
        self._beat = asyncio.create_task(self._live(now))
        site = self.directory / "site.yaml"
        whole = self.directory / "site.yaml.new"
        whole.write_text(self._site(), encoding="utf-8")
        whole.replace(site)  # who waits for the file finds all of it
        return site

    async def fail(self) -> None:
        """Returns never; raises what stops the box's own time, should anything."""
        assert self._beat is not None
        await self._beat

    async def close(self) -> None:
        """End everything; of the directory only the site file stays."""
        if self._beat is not None:
            self._beat.cancel()
        if self._socket is not None:
            self._socket.close()
        for task in tuple(self._conversations):
            task.cancel()
        if self._conversations:
            await asyncio.wait(self._conversations, timeout=1.0)
        await self.kernel.close()
        await self.service.shut_down()
        if self._lock is not None:
            (self.directory / SOCKET_NAME).unlink(missing_ok=True)
            self.tree.remove()
            os.close(self._lock)
            self._lock = None

    def _claim(self) -> None:
        """Take the directory for this process; the kernel gives it back however the process ends."""
        self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise AlreadyRunning(f"a simulated box already runs in {self.directory}") from None
        (self.directory / SOCKET_NAME).unlink(missing_ok=True)  # a killed box leaves it

    def _site(self) -> str:
        directory = json.dumps(str(self.directory.absolute()))
        return (
            f"# Written by the simulated box; it is gone with it.\nschema: 1\nhost: {HOSTNAME}\n"
            f"container: {{kind: lxc, id: {CONTAINER}}}\nvm: {{id: {VM}}}\n"
            f"service:\n  unit: {self.service.unit.id}\n  url: http://127.0.0.1:{self.service.port}\n"
            f"simulated:\n  directory: {directory}\n  nvml: {self._nvml_mode}\n"
        )

    async def _live(self, last: float) -> None:
        """The box's own time."""
        turn = 0
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock.mono()
            self.engine.advance(self._clock.wall())
            self.cards.advance(self.engine.work(), min(5.0, now - last))
            self._hold()
            last = now
            turn += 1
            if turn % 20 == 0:
                self._keep_files()
            if "xid" in self.faults and turn % 480 == 12:
                self._xid(31 if turn % 960 == 12 else 13)

    def _keep_files(self) -> None:
        """Files that change by themselves."""
        self.tree.set_uptime(self._clock.wall() - self._booted_at)
        self.tree.set_available_memory(RAM - _BASE_MEMORY - self.service.pinned_bytes)
        self.tree.set_container_memory(self.service.unit.id, self.service.memory_bytes, _PAGE_CACHE)

    # Trouble -----------------------------------------------------------------------------------

    def _strike(self) -> None:
        """The faults that strike at once."""
        if self._hangs and self.engine.traffic is not None:
            now = self._clock.wall()
            self.engine.traffic.burst(now)
            self.engine.advance(now)
            self.faults.arm("hang")
        if "holder" in self.faults:
            self.tree.add_process(
                HOLDER_PID,
                name="python",
                argv=("python", "train.py", "--config", "lora.yaml"),
                cgroup="/lxc/131/ns/user.slice/user-0.slice/session-c3.scope",
                inner=2_204,
                parent=76_902,
                started_at=self._clock.wall() - 41 * 60,
                files={0: "/dev/pts/2", 21: "/dev/nvidiactl", 22: f"/dev/nvidia{_HOLDER_CARD}"},
            )
            self._hold()
        if "gpu-lost" in self.faults:
            card = self.cards.all[_LOST_CARD]
            card.lost = True
            self.tree.lose(card.slot.address)
            pci = f"PCI:{card.slot.slot}"
            self._kernel(f"NVRM: GPU at {pci}: {card.slot.uuid}")
            self._kernel(f"NVRM: Xid ({pci}): 79, GPU has fallen off the bus.", 3)
            self._kernel(f"NVRM: GPU {card.slot.address}: GPU has fallen off the bus.", 3)
            self._kernel(
                f"NVRM: Xid ({pci}): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)", 3
            )
            self.nvml.report(card.slot.address, 79)

    def _hold(self) -> None:
        """The foreign process takes what the engine leaves it."""
        if "holder" in self.faults:
            card = self.cards.all[_HOLDER_CARD]
            free = card.free_bytes + card.foreign_bytes
            card.foreign_bytes = max(512 * MIB, min(_HOLDER_BYTES, free - 256 * MIB))

    def _xid(self, code: int) -> None:
        if not self.cards.all[_XID_CARD].visible:
            return
        slot: CardSlot = self.cards.all[_XID_CARD].slot
        run = self.service.processes()
        pid = run.schedulers[_XID_CARD] if run and len(run.schedulers) > _XID_CARD else 0
        who = f"pid={pid}, name=sglang::schedul" if pid else "pid='<unknown>', name=<unknown>"
        what = (
            "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_4 faulted @ "
            "0x7f3a_2c41d000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"
            if code == 31
            else "Graphics SM Warp Exception on (GPC 2, TPC 1, SM 0): Out Of Range Address"
        )
        self._kernel(f"NVRM: Xid (PCI:{slot.slot}): {code}, {who}, {what}", 3)
        self.nvml.report(slot.address, code)

    def _kill(self, pid: int) -> bool:
        """End a process that is none of the engine's."""
        if self.kernel.kill(pid):
            return True
        if pid != HOLDER_PID or "holder" not in self.faults:
            return False
        self.faults.clear("holder")
        self.cards.all[_HOLDER_CARD].foreign_bytes = 0
        self.tree.remove_process(HOLDER_PID)
        return True

    def _on_cards(self) -> dict[str, list[tuple[int, int]]]:
        """Who holds memory on each card that the driver's library can see."""
        run = self.service.processes()
        found: dict[str, list[tuple[int, int]]] = {}
        seen = (card for card in self.cards if card.visible)
        for rank, card in enumerate(seen):  # CUDA counts what the driver has
            if card.lost:
                continue
            listed: list[tuple[int, int]] = []
            if run is not None and card.engine_bytes and rank < len(run.schedulers):
                listed.append((run.schedulers[rank], card.engine_bytes))
            if card.foreign_bytes:
                listed.append((HOLDER_PID, card.foreign_bytes))
            found[card.slot.address] = listed
        return found

    # What is said ------------------------------------------------------------------------------

    def _log(self, text: str, source: Source, rank: int, at: float | None) -> None:
        self.service.log(text, source, rank, at)

    def _kernel(self, text: str, priority: int = 6) -> None:
        self.host_journal.write(text, pid=0, identifier="kernel", priority=priority, transport="kernel")

    def _boot_log(self) -> None:
        for card in self.cards:
            self.host_journal.write(
                f"nvidia {card.slot.address}: enabling device (0000 -> 0003)",
                pid=0,
                identifier="kernel",
                at=self._booted_at + 6 + 0.1 * card.slot.index,
                transport="kernel",
            )
        self.host_journal.write(
            "Started nvidia-persistenced.service - NVIDIA Persistence Daemon.",
            pid=1,
            identifier="systemd",
            at=self._booted_at + 11,
            unit="init.scope",
            about="nvidia-persistenced.service",
            transport="journal",
        )

    # Commands ----------------------------------------------------------------------------------

    def _commands(self) -> commands.Host:
        host = commands.Machine(HOSTNAME, Manager(self._host_units()), self.host_journal, self.tree.root)
        container = commands.Machine(
            CONTAINER_NAME,
            Manager([self.service.unit, *self._container_units()], self._refresh),
            self.journal,
            self.rootfs,
            self.service,
        )
        return commands.Host(host, container, self.nvml, self.proxmox, self.clients, self.kernel, self._kill)

    def _refresh(self, unit: Unit) -> None:
        if unit is self.service.unit:
            self.service.refresh(unit)

    def _host_units(self) -> Iterator[Unit]:
        for name, text, pid in (
            ("nvidia-persistenced.service", "NVIDIA Persistence Daemon", 2_114),
            ("pvedaemon.service", "PVE API Daemon", 2_377),
            ("pveproxy.service", "PVE API Proxy Server", 2_401),
            ("pve-cluster.service", "The Proxmox VE cluster filesystem", 1_892),
            (f"pve-container@{CONTAINER}.service", f"PVE LXC Container: {CONTAINER}", 31_020),
            ("ssh.service", "OpenBSD Secure Shell server", 1_760),
        ):
            yield self._running(name, text, pid)

    def _container_units(self) -> Iterator[Unit]:
        yield self._running("ssh.service", "OpenBSD Secure Shell server", 214)
        yield self._running("systemd-journald.service", "Journal Service", 61)

    def _running(self, name: str, text: str, pid: int) -> Unit:
        unit = Unit(name, text)
        unit.main_pid = unit.exec_pid = pid
        unit.invocation = f"{self._rng.getrandbits(128):032x}"
        unit.started_at = self._booted_at + 11
        unit.memory_bytes, unit.tasks, unit.cpu_s = 5 * MIB, 1, 2.0
        unit.state("active", "running", self._booted_at + 11)
        return unit

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._converse(reader, writer))
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one command. The client's hanging up ends it."""
        try:
            asked = _asked(await reader.readline())
            if asked is None:
                writer.write(_frame(err='the box wants one line such as {"argv": ["hostname"]}\n'))
                writer.write(_frame(exit=2))
                return
            work = asyncio.create_task(self._answer(*asked, writer))
            hang_up = asyncio.create_task(reader.read())
            try:
                await asyncio.wait({work, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (work, hang_up):
                    task.cancel()
                await asyncio.wait({work, hang_up})
        except (ConnectionError, ValueError, asyncio.LimitOverrunError):
            pass  # the client went, or sent more than a line: there is nobody to tell
        finally:
            writer.close()

    async def _answer(self, argv: list[str], stdin: str, writer: asyncio.StreamWriter) -> None:
        try:
            status = await commands.run(self._host, argv, _Speaker(writer, stdin))
        except ConnectionError:
            return  # nobody listens any more
        except Exception as defect:  # noqa: BLE001  a defect in one command is told to its caller
            writer.write(_frame(err=f"defect in the box: {type(defect).__name__}: {defect}\n"))
            status = 70
        writer.write(_frame(exit=status))
        await writer.drain()


class _Speaker:
    """A command's output as frames of the protocol, and what it reads."""

    def __init__(self, writer: asyncio.StreamWriter, stdin: str) -> None:
        self._writer = writer
        self.stdin = stdin

    async def out(self, text: str) -> None:
        if text:
            self._writer.write(_frame(out=text))
            await self._writer.drain()

    async def err(self, text: str) -> None:
        if text:
            self._writer.write(_frame(err=text))
            await self._writer.drain()


def _frame(**parts: object) -> bytes:
    return msgspec.json.encode(parts) + b"\n"


def _asked(line: bytes) -> tuple[list[str], str] | None:
    """The command and what it reads; None when the line is no such thing."""
    try:
        asked = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    if not isinstance(asked, dict):
        return None
    argv, stdin = asked.get("argv"), asked.get("stdin") or ""
    if (
        isinstance(argv, list)
        and argv
        and all(isinstance(word, str) for word in argv)
        and isinstance(stdin, str)
    ):
        return argv, stdin
    return None


@contextlib.contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    """A name of ``directory`` that fits a socket's address, whose path may have 107 bytes."""
    if len(os.fsencode(directory)) + len(SOCKET_NAME) + 2 < 108:
        yield str(directory)
        return
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}"
    finally:
        os.close(folder)


async def serve(
    directory: Path, speed: float, faults: tuple[str, ...], nvml: str, seed: int, port: int = 0
) -> None:
    """Run the box until SIGTERM or SIGINT; its site file's path goes to stdout once it is ready.

    AlreadyRunning when a live box has the directory; OSError when the directory or the port cannot be used.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    box = Box(directory, speed=speed, faults=faults, nvml=nvml, port=port, seed=seed)
    try:
        site = await box.open()
        sys.stdout.write(f"{site}\n")
        sys.stdout.flush()
        stop, defect = asyncio.create_task(ended.wait()), asyncio.create_task(box.fail())
        done, rest = await asyncio.wait({stop, defect}, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        for task in done:
            task.result()
    finally:
        await box.close()


def main(
    directory: Path,
    speed: float = 1.0,
    faults: tuple[str, ...] = (),
    nvml: str = "simulated",
    seed: int = 1,
    port: int = 0,
) -> int:
    """``serve`` as a program: its exit status, 2 when it cannot run as asked."""
    try:
        asyncio.run(serve(directory, speed, faults, nvml, seed, port))
    except (AlreadyRunning, OSError, ValueError) as problem:
        sys.stderr.write(f"gpuops: {problem}\n")
        return 2
    return 0
