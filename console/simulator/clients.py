"""Programs of the host that hold cards by their nature, and NVIDIA's small tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from console.simulator.cards import Cards
from console.simulator.machine import CARD_NAME
from console.simulator.systemd import Unit
from console.simulator.tree import Tree

PERSISTENCED = "nvidia-persistenced.service"
_PERSISTENCED_PID = 2_114

#: Pids of the processes in which consoles ask NVML.
_FIRST_WORKER = 81_000

#: What each tool answers: exit status, stdout, stderr.
Answer = tuple[int, str, str]


class Clients:
    """Keeps /proc in step with who has which card open."""

    def __init__(self, tree: Tree, cards: Cards, booted_at: float) -> None:
        self._tree = tree
        self._cards = cards
        self._booted_at = booted_at
        self._persistent: set[str] = set()  # addresses of the cards that persistenced keeps open
        self._worker = _FIRST_WORKER

    def create(self) -> None:
        self.persistenced(True)

    def persistenced(self, running: bool) -> None:
        """The daemon starts, and opens every card that the driver has; or it ends."""
        self._persistent = {card.slot.address for card in self._cards if card.visible} if running else set()
        if not running:
            self._tree.remove_process(_PERSISTENCED_PID)
            return
        self._show_daemon()

    def _show_daemon(self) -> None:
        self._tree.remove_process(_PERSISTENCED_PID)
        held = [card for card in self._cards if card.slot.address in self._persistent]
        nodes = [self._tree.node(card.slot) for card in held]
        self._tree.add_process(
            _PERSISTENCED_PID,
            name="nvidia-persistenced",
            argv=("/usr/bin/nvidia-persistenced", "--user", "nvpd", "--persistence-mode", "--verbose"),
            cgroup=f"/system.slice/{PERSISTENCED}",
            inner=None,
            parent=1,
            started_at=self._booted_at + 11,
            files={0: "/dev/null", 3: "/dev/nvidiactl"}
            | {4 + place: node for place, node in enumerate(nodes) if node is not None},
        )

    def switched(self, unit: Unit, verb: str) -> None:
        """systemctl did this to a unit of the host."""
        if unit.id == PERSISTENCED:
            self.persistenced(verb != "stop")

    def worker(self, at: float) -> int:
        """A console's NVML process begins: its pid. It has every card open that the driver has."""
        self._worker += 1
        nodes = self._tree.nodes()
        self._tree.add_process(
            self._worker,
            name="python3",
            argv=("/usr/bin/python3", "-I", "-S", "/usr/lib/gpuops/console/sources/nvml_worker.py"),
            cgroup="/user.slice/user-0.slice/session-4.scope",
            inner=None,
            parent=1,
            started_at=at,
            files={0: "/dev/null", 3: "/dev/nvidiactl"}
            | {4 + place: node for place, node in enumerate(nodes)},
        )
        return self._worker

    def worker_ended(self, pid: int) -> None:
        self._tree.remove_process(pid)

    # Tools -------------------------------------------------------------------------------------

    def nvidia_smi(self, words: Sequence[str]) -> Answer:
        """``-L``, and ``-i UUID -pm 0|1``."""
        if list(words) == ["-L"]:
            seen = [card for card in self._cards if card.visible and not card.lost]
            listed = "".join(
                f"GPU {n}: {CARD_NAME} (UUID: {card.slot.uuid})\n" for n, card in enumerate(seen)
            )
            return (0, listed, "") if seen else (6, "No devices were found\n", "")
        if len(words) == 4 and words[0] == "-i" and words[2] == "-pm" and words[3] in ("0", "1"):
            card = next((one for one in self._cards if words[1] in (one.slot.uuid, one.slot.address)), None)
            if card is None or not card.visible:
                return 6, f"No devices were found for {words[1]}\n", ""
            change = self._persistent.add if words[3] == "1" else self._persistent.discard
            change(card.slot.address)
            self._show_daemon()
            state = "Enabled" if words[3] == "1" else "Disabled"
            bus = card.slot.address.upper().replace("0000:", "00000000:")
            return 0, f"{state} persistence mode for GPU {bus}.\nAll done.\n", ""
        return 1, "", "nvidia-smi: the box knows -L and -i UUID -pm 0|1\n"

    def nvidia_modprobe(self, words: Sequence[str]) -> Answer:
        """``-c MINOR`` and ``-u -c 0``: device files are made, those that are there stay."""
        options = list(words)
        if options[:2] == ["-u", "-c"]:
            names = ["nvidia-uvm", "nvidia-uvm-tools"]
        elif options[:1] == ["-c"] and len(options) == 2 and options[1].isdigit():
            names = [f"nvidia{options[1]}", "nvidiactl"]
        else:
            return 1, "", "nvidia-modprobe: the box knows -c MINOR and -u -c 0\n"
        for name in names:
            _touch(self._tree.root / "dev" / name)
        return 0, "", ""


def _touch(path: Path) -> None:
    if not path.exists():
        path.write_text("", encoding="utf-8")
