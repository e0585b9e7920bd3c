"""What the pre-flight of a rebind judges: one inventory, and what only commands can tell."""

from __future__ import annotations

import msgspec

from console.model.card import Address
from console.model.rebind.holders import HolderScan
from console.model.rebind.inventory import Inventory, Slot, Target, VmConfig
from console.model.rebind.kernel_log import CardEvent


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """None where nobody could tell; ``log_problem`` and ``holders_problem`` then say why."""

    root: bool  # whether this program may change the host
    module_on_disk: str | None = None  # version of the nvidia module that would be loaded next
    log: tuple[CardEvent, ...] | None = None  # of the last ``log_s`` seconds, oldest first
    log_s: float = 86_400.0
    log_problem: str | None = None
    holders: HolderScan | None = None
    holders_problem: str | None = None
    persistence: dict[Address, bool] = msgspec.field(default_factory=dict)  # as NVML says
    returned_mib: int = 0  # host memory that the service gives back when it is stopped


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Can ``chosen`` go to ``target``? ``vm``, ``container`` and ``unit`` are the site's."""

    inventory: Inventory
    chosen: tuple[Slot, ...]
    target: Target
    vm: int | None
    container: int | None
    unit: str
    facts: Facts

    @property
    def machine(self) -> VmConfig | None:
        return self.inventory.vm(self.vm) if self.vm is not None else None

    @property
    def addresses(self) -> frozenset[Address]:
        """Every function that moves."""
        return frozenset(function.address for slot in self.chosen for function in slot.endpoints)

    @property
    def cards(self) -> frozenset[Address]:
        return frozenset(slot.address for slot in self.chosen)
