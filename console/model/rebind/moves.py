"""What a card's step has to know: its functions, the driver of each on either side, and what was before."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from console.model.card import Address
from console.model.rebind.inventory import NVIDIA, VFIO, Function, Slot, is_vfio

#: The kernel's own drivers for what an NVIDIA card has beside the GPU, by class and subclass.
_BY_KIND = {0x0403: "snd_hda_intel", 0x0C03: "xhci_hcd", 0x0C80: "nvidia-gpu"}


class FunctionMove(msgspec.Struct, frozen=True, kw_only=True):
    """One function. A driver that is None: it is left without one."""

    address: Address
    kind: str  # "GPU", "audio"
    home: str | None  # its driver on the side of the host and its containers
    before: str | None  # its driver when the plan was made
    d3cold_allowed: bool | None = None  # as they were then; None: not known
    power_control: str | None = None


class CardMove(msgspec.Struct, frozen=True, kw_only=True):
    """A card with everything that has to move with it, the GPU first."""

    address: Address
    functions: tuple[FunctionMove, ...]
    group: int | None = None  # of the IOMMU: /dev/vfio/GROUP

    @property
    def name(self) -> str:
        """The slot: ``0000:41:00``."""
        return self.address.rpartition(".")[0]

    @property
    def kinds(self) -> str:
        return " and ".join(dict.fromkeys(function.kind for function in self.functions))

    def on_host(self) -> dict[Address, str | None]:
        return {function.address: function.home for function in self.functions}

    def on_vfio(self) -> dict[Address, str | None]:
        return {function.address: VFIO for function in self.functions}

    def before(self) -> dict[Address, str | None]:
        return {function.address: function.before for function in self.functions}


def move_of(
    slot: Slot, drivers: Collection[str], homes: Mapping[Address, str | None] | None = None
) -> CardMove:
    """A card's move as it stands now.

    ``drivers`` are those that are loaded. ``homes`` names drivers on the host's side that are known
    better, such as from the job that took the card away; else a function that has a driver of the host
    keeps it, and one on vfio gets the kernel's usual one if that is loaded.
    """
    known = homes or {}
    return CardMove(
        address=slot.address,
        group=slot.group.id if slot.group is not None else None,
        functions=tuple(
            FunctionMove(
                address=function.address,
                kind="GPU" if function.address == slot.address else function.kind,
                home=known[function.address]
                if function.address in known
                else _home(function, function.address == slot.address, drivers),
                before=function.driver,
                d3cold_allowed=function.d3cold_allowed,
                power_control=function.power_control,
            )
            for function in slot.functions
        ),
    )


def _home(function: Function, is_card: bool, drivers: Collection[str]) -> str | None:
    if is_card:
        return NVIDIA
    if function.driver is not None and not is_vfio(function.driver):
        return function.driver
    usual = _BY_KIND.get(function.class_code >> 8)
    return usual if usual in drivers else None
