"""Cards that something left half way between the sides, and which repair brings each back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from console.model.card import Address
from console.model.rebind.inventory import Inventory, Slot, Target, is_vfio

StrandedKind = Literal["pending", "dead", "no-driver", "half-group", "override", "reservation", "idle"]

#: ``container`` and ``vm``: move it, and what belongs to it, to that side. ``recover``: the ladder for
#: a card that does not answer. ``override``: clear driver_override. None: nothing for us to do.
Repair = Literal["container", "vm", "recover", "override"]


class Stranded(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with one card. ``functions`` are those that it is about."""

    card: Address
    kind: StrandedKind
    words: str
    repair: Repair | None
    remedy: str
    functions: tuple[Address, ...] = ()
    harmless: bool = False  # nothing is broken: the card is merely of no use where it is


def reconcile(
    inventory: Inventory,
    *,
    container: int | None = None,
    home: Target | None = None,
    in_flight: frozenset[Address] = frozenset(),
) -> tuple[Stranded, ...]:
    """What is left over, by card, the worst first. ``in_flight`` are cards of a job that is not over.

    ``container`` is the site's; ``home`` the side to which a card without a side goes, by
    default the container's unless a VM that names the card runs.
    """
    found: list[Stranded] = []
    for slot in inventory.slots:
        if slot.address not in in_flight:
            found += _of(inventory, slot, container, home)
    found += _reservations(inventory, in_flight)
    return tuple(found)


def _of(inventory: Inventory, slot: Slot, container: int | None, home: Target | None) -> Iterator[Stranded]:
    hanging = next((function.pending for function in slot.functions if function.pending is not None), None)
    if hanging is not None:
        yield Stranded(
            card=slot.address,
            kind="pending",
            words=f"pending in the kernel: {hanging} has not returned",
            repair=None,
            remedy="end what holds the card, or restart the host; nothing else of it can be done until then",
            functions=tuple(one.address for one in slot.functions if one.pending is not None),
        )
        return
    dead = [function for function in slot.functions if function.config_ok is False]
    if dead:
        yield Stranded(
            card=slot.address,
            kind="dead",
            words="its config space reads all ones: the card does not answer",
            repair="recover",
            remedy=f"gpuops rebind --recover {slot.address}",
            functions=tuple(one.address for one in dead),
        )
        return  # whatever else is wrong, nothing may be bound to it
    runs = _user(inventory, slot)
    side: Target = home or ("vm" if runs is not None else "container")
    move = f"gpuops rebind --repair --gpu {slot.address}"
    bound = [function for function in slot.endpoints if function.driver is not None]
    vfio = [function for function in bound if is_vfio(function.driver)]
    if slot.driver is None:
        words = "no driver has it"
        if vfio:
            words += f", and {', '.join(one.address for one in vfio)} of it is on vfio-pci"
        yield Stranded(
            card=slot.address,
            kind="no-driver",
            words=f"{words}: it was left half way",
            repair=side,
            remedy=move,
            functions=tuple(one.address for one in slot.endpoints if one.driver is None),
        )
    elif vfio and len(vfio) < len(slot.endpoints):
        rest = [function for function in slot.endpoints if function not in vfio]
        told = ", ".join(f"{one.address} on {one.driver or 'no driver'}" for one in rest)
        yield Stranded(
            card=slot.address,
            kind="half-group",
            words=f"part of it is on vfio-pci, but {told}",
            repair="container" if slot.on_nvidia else side,
            remedy=move,
            functions=tuple(one.address for one in (vfio if slot.on_nvidia else rest)),
        )
    left = [function for function in slot.endpoints if function.override is not None]
    if left:
        told = ", ".join(f"{one.address} ({one.override})" for one in left)
        yield Stranded(
            card=slot.address,
            kind="override",
            words=f"driver_override was left behind: {told}; the next driver it should get is refused",
            repair="override",
            remedy=move,
            functions=tuple(one.address for one in left),
        )
    if slot.on_vfio and runs is None and _expected(inventory, container):
        yield Stranded(
            card=slot.address,
            kind="idle",
            words=f"on vfio-pci, but no VM that has it runs; CT {container} is set up for it",
            repair="container",
            remedy=f"gpuops rebind --to container --gpu {slot.address}, or start the VM",
            functions=tuple(one.address for one in slot.endpoints),
            harmless=True,
        )


def _user(inventory: Inventory, slot: Slot) -> int | None:
    """A running VM that has the card, or may have."""
    own = {function.address for function in slot.functions}
    held = {one.vmid for one in inventory.reservations if one.alive and one.address in own}
    for vm in inventory.vms:
        if vm.status == "running" and (vm.id in held or own.intersection(vm.functions)):
            return vm.id
    return None


def _expected(inventory: Inventory, container: int | None) -> bool:
    """Whether the site's container names more cards than the nvidia driver has."""
    found = inventory.container(container) if container is not None else None
    if found is None:
        return False
    named = [path for path in found.nodes if path.removeprefix("/dev/nvidia").isdecimal()]
    return len(named) > sum(slot.on_nvidia for slot in inventory.slots)


def _reservations(inventory: Inventory, in_flight: frozenset[Address]) -> Iterator[Stranded]:
    for slot in inventory.slots:
        if slot.address in in_flight:
            continue
        own = {function.address for function in slot.functions}
        dead = [one for one in inventory.reservations if one.address in own and one.alive is False]
        if dead:
            vms = ", ".join(sorted({f"VM {one.vmid}" for one in dead}))
            yield Stranded(
                card=slot.address,
                kind="reservation",
                words=f"Proxmox still holds it reserved for {vms}, whose process is gone",
                repair=None,
                remedy="Proxmox drops the reservation itself at the next start of any VM with PCI devices",
                functions=tuple(one.address for one in dead),
                harmless=True,
            )
