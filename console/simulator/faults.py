"""What can be made to go wrong on the box, and when it strikes."""

from __future__ import annotations

from collections.abc import Iterable

#: Name and what an operator will see. The first three strike the next load, the others at once.
FAULTS: dict[str, str] = {
    "crash-on-load": "the next load crashes at about 60 % of the weights, restarts and fails for good",
    "oom": "the next load runs out of GPU memory while it captures graphs",
    "port-taken": "the next load ends because its port is taken",
    "hang": "the scheduler stops: no tokens, /health is not answered",
    "nan": "the model says nothing but exclamation marks",
    "leak": "tool calls come back unparsed, in the text",
    "slow-health": "/health takes 15 s and more while tokens keep moving",
    "holder": "a foreign process holds 20 GB on one card",
    "gpu-lost": "one card falls off the bus",
    "xid": "the driver reports Xid errors for one card now and then",
    "vm-locked": "the virtual machine is locked by a backup",
    "vm-start-timeout": "the next start of the virtual machine runs into Proxmox's time limit",
    "vm-keeps-running": "the guest does not shut down when it is asked to",
    "no-agent": "the guest agent of the virtual machine does not answer",
    "no-quorum": "the cluster has no quorum: Proxmox starts nothing",
    "unbind-hangs": "a process opens one card just as it is taken from its driver: the kernel waits for it",
    "probe-fails": "the nvidia driver fails on one card that is given to it",
}

LOAD_FAULTS = ("crash-on-load", "oom", "port-taken")


class Faults:
    """The faults that are armed. A load fault strikes one start, with the restarts that follow it."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._armed: set[str] = set()
        self._striking: str | None = None
        for name in names:
            self.arm(name)

    def arm(self, name: str) -> None:
        if name not in FAULTS:
            raise ValueError(f"no fault is named {name}; there are {', '.join(FAULTS)}")
        self._armed.add(name)

    def clear(self, name: str) -> None:
        self._armed.discard(name)

    def __contains__(self, name: str) -> bool:
        return name in self._armed

    def start_by_hand(self) -> None:
        """Somebody starts the unit: what struck the start before is over, the next armed one strikes."""
        self._striking = next((name for name in LOAD_FAULTS if name in self._armed), None)
        if self._striking is not None:
            self._armed.discard(self._striking)

    @property
    def load(self) -> str | None:
        """The fault that strikes the load that runs now."""
        return self._striking
