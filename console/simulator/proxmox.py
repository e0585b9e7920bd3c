"""Proxmox on the box: its guests, their life, and what ``qm``, ``pct`` and ``pvesh`` print of them.

Texts and shapes are those of qemu-server 9.2, pve-container 6.1 and pve-manager 9.2.
"""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from console.model.rebind import pve
from console.model.rebind.inventory import VmConfig
from console.simulator.faults import Faults
from console.simulator.kernel import BUS, Kernel, Writer
from console.simulator.machine import CARD_NAME, CARDS, CONTAINER, DRIVER_VERSION, HOSTNAME, MIB, VM
from console.simulator.tree import Tree

#: Seconds of a machine with 256 GiB: QEMU pins its memory, the guest boots, the guest ends.
START_S = 48.0
BOOT_S = 35.0
SHUTDOWN_S = 21.0

VM_PID = 91_404

_RESERVATIONS = "run/qemu-server/pci-id-reservations"
#: The process of the daemon that carries a start out.
_WORKER = Writer(
    "task UPID:pve1:",
    (f"task UPID:{HOSTNAME}:0001650D:0A1F4C22:692CB0D0:qmstart:{VM}:root@pam:",),
    "/system.slice/pvedaemon.service",
)

_AGENT_DOWN = "QEMU guest agent is not running\n"


class Output(Protocol):
    async def out(self, text: str) -> None: ...

    async def err(self, text: str) -> None: ...


class Proxmox:
    """The virtual machine, as far as its cards are concerned; and the tables of the node.

    ``speed``: how many times as fast as a real one it starts and ends.
    """

    def __init__(
        self,
        tree: Tree,
        faults: Faults,
        speed: float,
        *,
        kernel: Kernel,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._tree = tree
        self._faults = faults
        self._speed = speed
        self._wall = wall
        self._kernel = kernel
        self._running_since: float | None = None  # Unix seconds
        self._busy = asyncio.Lock()  # of the machine's configuration, as PVE locks it

    @property
    def running(self) -> bool:
        return self._running_since is not None

    def create(self) -> None:
        """What the faults make of the files."""
        if "vm-locked" in self._faults:
            path = self._file("qemu-server", VM)
            path.write_text(f"{path.read_text(encoding='utf-8')}lock: backup\n", encoding="utf-8")

    # qm ----------------------------------------------------------------------------------------

    async def qm(self, words: Sequence[str], output: Output) -> int:
        verb, rest = (words[0], list(words[1:])) if words else ("", [])
        if verb not in ("status", "config", "start", "stop", "shutdown", "guest", "list"):
            await output.err(f"ERROR: unknown command 'qm {verb}'\n")
            return 255
        if verb == "list":
            await output.out(self._list())
            return 0
        if verb == "guest":
            if rest[:1] != ["exec"]:
                await output.err(f"ERROR: unknown command 'qm guest {' '.join(rest[:1])}'\n")
                return 255
            rest = rest[1:]
        if not rest or rest[0] != str(VM):
            path = f"nodes/{HOSTNAME}/qemu-server/{rest[0] if rest else ''}.conf"
            await output.err(f"Configuration file '{path}' does not exist\n")
            return 2
        if verb == "status":
            await output.out(f"status: {'running' if self.running else 'stopped'}\n")
            return 0
        if verb == "config":
            await output.out(self._file("qemu-server", VM).read_text(encoding="utf-8"))
            return 0
        if verb == "guest":
            return await self._guest_exec(rest[1:], output)
        work = {"start": self._start, "stop": self._stop, "shutdown": self._shutdown}[verb]
        # A task of the daemon: it goes on when the qm that asked for it has gone.
        problem = await asyncio.shield(asyncio.create_task(self._locked(work)))
        await output.err(problem)
        return 255 if problem else 0

    async def _locked(self, work: Callable[[], object]) -> str:
        async with self._busy:
            return str(await work())  # type: ignore[misc]

    async def _start(self) -> str:
        vm = self._config()
        if self.running:
            return f"VM {VM} already running\n"
        if vm.lock is not None:
            return f"VM is locked ({vm.lock})\n"
        if "no-quorum" in self._faults:
            return "cluster not ready - no quorum?\n"
        functions = self._functions(vm)
        for function in functions:
            if not self._tree.device(function).exists():
                return f"no PCI device found for '{function}'\n"
        self._reserve(functions, f"time:{int(self._wall()) + 5}")
        problem = await self._prepare(functions)
        if problem:
            self._reserve((), "")
            return problem
        await asyncio.sleep(START_S / self._speed)
        if "vm-start-timeout" in self._faults:
            self._faults.clear("vm-start-timeout")
            self._reserve((), "")
            command = f"/usr/bin/kvm -id {VM} -name 'gpu-vm,debug-threads=on' -no-shutdown"
            return f"start failed: command '{command}' failed: got timeout\n"
        self._reserve(functions, f"pid:{VM_PID}")
        self._process(vm, functions)
        self._running_since = self._wall()
        self._kernel.settle(functions)
        return ""

    async def _prepare(self, functions: tuple[str, ...]) -> str:
        """prepare_pci_device of PVE::QemuServer::PCI: it waits for whatever the kernel waits for."""
        for function in functions:
            members = self._tree.device(function) / "iommu_group/devices"
            for member in sorted(path.name for path in members.iterdir()):
                bridge = (self._tree.device(member) / "pci_bus").exists()
                if not bridge and not await self._to_vfio(member):
                    return f"Cannot bind {member} to vfio\n"
            if (self._tree.device(function) / "reset").exists():
                await self._write(f"devices/{function}/reset", "1")  # failing, it only warns
        return ""

    async def _to_vfio(self, function: str) -> bool:
        """pci_dev_bind_to_vfio of PVE::SysFSTools."""
        if self._driver(function) == "vfio-pci":
            return True
        identity = " ".join(self._tree.value(function, name)[2:] for name in ("vendor", "device"))
        if await self._write("drivers/vfio-pci/new_id", identity) not in (0, errno.EEXIST):
            return False
        gone = await self._write(f"devices/{function}/driver/unbind", function) == 0
        if not gone and self._driver(function) is not None:
            return self._driver(function) == "vfio-pci"
        if self._driver(function) != "vfio-pci":  # new_id may have given it one
            await self._write("drivers/vfio-pci/bind", function)
        return self._driver(function) == "vfio-pci"

    async def _write(self, path: str, text: str) -> int:
        """The kernel's answer: 0 or an errno."""
        try:
            await self._kernel.write(BUS + path, text, _WORKER)
        except OSError as problem:
            return problem.errno or errno.EIO
        return 0

    async def _stop(self) -> str:
        if self.running:
            await asyncio.sleep(2.0 / self._speed)
            self._ended()
        return ""

    async def _shutdown(self) -> str:
        if not self.running:
            return "VM 100 not running\n"
        if "vm-keeps-running" in self._faults:
            await asyncio.sleep(SHUTDOWN_S / self._speed)
            return "VM quit/powerdown failed - got timeout\n"
        await asyncio.sleep(SHUTDOWN_S / self._speed)
        self._ended()
        return ""

    def _ended(self) -> None:
        self._running_since = None
        self._tree.remove_process(VM_PID)
        (self._tree.root / f"run/qemu-server/{VM}.pid").unlink(missing_ok=True)
        self._reserve((), "")
        for card in CARDS:
            if self._driver(card.address) == "vfio-pci":
                self._kernel.log(f"vfio-pci {card.address}: resetting", 6)
                self._kernel.log(f"vfio-pci {card.address}: reset done", 6)
                self._kernel.settle((card.address, card.audio))

    async def _guest_exec(self, words: Sequence[str], output: Output) -> int:
        command = list(words)
        if "--" in command:
            command = command[command.index("--") + 1 :]
        if not self._config().agent:
            await output.err("No QEMU guest agent configured\n")
            return 255
        if not self.running:
            await output.err(f"VM {VM} is not running\n")
            return 255
        assert self._running_since is not None
        booted = self._wall() - self._running_since >= BOOT_S / self._speed
        if "no-agent" in self._faults or not booted:
            await output.err(_AGENT_DOWN)
            return 255
        status, out, err = self._inside(command)
        told = {"err-data": err, "exitcode": status, "exited": 1, "out-data": out}
        shown = {key: value for key, value in told.items() if value != ""}
        await output.out(json.dumps(shown, indent=3, separators=(",", " : "), sort_keys=True) + "\n")
        return 0

    def _inside(self, command: Sequence[str]) -> tuple[int, str, str]:
        """What a program of the guest says: exit status, stdout, stderr."""
        held = {function.rpartition(".")[0] for function in self._functions(self._config())}
        cards = [card for card in CARDS if card.slot in held]
        if command[:1] == ["nvidia-smi"] and "-L" in command:
            listed = "".join(
                f"GPU {place}: {CARD_NAME} (UUID: {card.uuid})\n" for place, card in enumerate(cards)
            )
            return (0, listed, "") if cards else (6, "No devices were found\n", "")
        if list(command) == ["cat", "/proc/driver/nvidia/version"]:
            text = (
                f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER_VERSION}  Release Build\n"
            )
            return 0, text, ""
        return 127, "", f"{command[0] if command else ''}: command not found\n"

    def _list(self) -> str:
        vm = self._config()
        status = "running" if self.running else "stopped"
        pid = VM_PID if self.running else 0
        return (
            "      VMID NAME                 STATUS     MEM(MB)    BOOTDISK(GB) PID       \n"
            f"{VM:>10} {vm.name or '':<20} {status:<10} {vm.memory_mib:<10} {256.0:>12.2f} {pid:<10}\n"
        )

    # Its process -------------------------------------------------------------------------------

    def _process(self, vm: VmConfig, functions: tuple[str, ...]) -> None:
        groups = list(dict.fromkeys(self._group(function) for function in functions))
        argv = ["/usr/bin/kvm", "-id", str(VM), "-name", f"{vm.name},debug-threads=on", "-no-shutdown"]
        for place, function in enumerate(functions):
            argv += ["-device", f"vfio-pci,host={function},id=hostpci{place}"]
        files = {0: "/dev/null", 20: "/dev/kvm", 25: "/dev/vfio/vfio"}
        files |= {30 + place: f"/dev/vfio/{group}" for place, group in enumerate(groups)}
        files |= {60 + place: "anon_inode:[vfio-device]" for place in range(len(functions))}
        self._tree.add_process(
            VM_PID,
            name="kvm",
            argv=tuple(argv),
            cgroup=f"/qemu.slice/{VM}.scope",
            inner=None,
            parent=1,
            started_at=self._wall(),
            files=files,
        )
        (self._tree.root / f"run/qemu-server/{VM}.pid").write_text(f"{VM_PID}\n", encoding="ascii")

    def _reserve(self, functions: tuple[str, ...], until: str) -> None:
        lines = "".join(f"{function} {VM} {until}\n" for function in functions)
        (self._tree.root / _RESERVATIONS).write_text(lines, encoding="ascii")

    # pct ---------------------------------------------------------------------------------------

    async def pct(self, words: Sequence[str], output: Output) -> int:
        if len(words) < 2 or words[0] not in ("status", "config", "start"):
            await output.err(f"ERROR: unknown command 'pct {' '.join(words[:1])}'\n")
            return 255
        if words[1] != str(CONTAINER):
            await output.err(f"Configuration file 'nodes/{HOSTNAME}/lxc/{words[1]}.conf' does not exist\n")
            return 2
        if words[0] == "start":
            await output.err(f"CT {CONTAINER} already running\n")
            return 255
        told = "status: running\n"
        if words[0] == "config":
            told = self._file("lxc", CONTAINER).read_text(encoding="utf-8")
        await output.out(told)
        return 0

    # pvesh -------------------------------------------------------------------------------------

    async def pvesh(self, words: Sequence[str], output: Output) -> int:
        path = words[1].strip("/") if len(words) > 1 and words[0] == "get" else ""
        tables: dict[str, Callable[[], object]] = {
            f"nodes/{HOSTNAME}/hardware/pci": self._hardware,
            f"nodes/{HOSTNAME}/qemu/{VM}/config": lambda: self._flat("qemu-server", VM),
            f"nodes/{HOSTNAME}/lxc/{CONTAINER}/config": lambda: self._flat("lxc", CONTAINER),
            "cluster/resources": self._resources,
            "cluster/mapping/pci": list,
        }
        if path not in tables:
            await output.err(f"No '{words[0] if words else ''}' handler defined for '{path}'\n")
            return 255
        await output.out(json.dumps(tables[path](), separators=(",", ":")) + "\n")
        return 0

    def _hardware(self) -> list[dict[str, object]]:
        """Bridges and memory controllers are left out, as by default."""
        found = []
        for folder in sorted((self._tree.root / "sys/bus/pci/devices").iterdir()):
            text = {name: (folder / name).read_text().strip() for name in ("class", "vendor", "device")}
            if text["class"][2:4] in ("05", "06", "0b"):
                continue
            shown: dict[str, object] = {"id": folder.name, "iommugroup": self._group(folder.name), **text}
            if text["vendor"] == "0x10de":
                shown["vendor_name"] = "NVIDIA Corporation"
            found.append(shown)
        return found

    def _flat(self, kind: str, guest: int) -> dict[str, object]:
        section = pve.read_section(self._file(kind, guest).read_text(encoding="utf-8"))
        flat: dict[str, object] = {}
        raw = [[key, value] for key, value in section.lines if key.startswith("lxc.")]
        for key, value in section.lines:
            if not key.startswith("lxc."):
                flat[key] = int(value) if value.isdigit() and key != "memory" else value
        return {**flat, **({"lxc": raw} if raw else {}), "digest": "6f0a9c1d0c8a55e2a87a8a5d2f1f6b0a5f5e0c11"}

    def _resources(self) -> list[dict[str, object]]:
        vm = self._config()
        status = "running" if self.running else "stopped"
        return [
            {"id": f"lxc/{CONTAINER}", "type": "lxc", "vmid": CONTAINER, "node": HOSTNAME,
             "name": "sglang", "status": "running", "template": 0},
            {"id": f"qemu/{VM}", "type": "qemu", "vmid": VM, "node": HOSTNAME, "name": vm.name,
             "status": status, "template": 0, "maxmem": vm.memory_mib * MIB},
        ]  # fmt: skip

    # Parts -------------------------------------------------------------------------------------

    def _driver(self, function: str) -> str | None:
        return self._tree.driver(function)

    def _group(self, function: str) -> int:
        """-1 is what Proxmox says for none."""
        link = self._tree.device(function) / "iommu_group"
        return int(link.resolve().name) if link.is_symlink() else -1

    def _file(self, kind: str, guest: int) -> Path:
        return self._tree.root / f"etc/pve/{kind}/{guest}.conf"

    def _config(self) -> VmConfig:
        return pve.read_vm(VM, self._file("qemu-server", VM).read_text(encoding="utf-8"))

    def _functions(self, vm: VmConfig) -> tuple[str, ...]:
        present = tuple(folder.name for folder in (self._tree.root / "sys/bus/pci/devices").iterdir())
        lines = (pve.resolve(line, present, {}, HOSTNAME) for line in vm.hostpci)
        return tuple(dict.fromkeys(address for line in lines for address in line.functions or line.wanted))
