"""Of the cards' use: an unbind of a busy card never returns, so who holds one is known before."""

from __future__ import annotations

from console.checks.rebind_cards import Outcome, listed, there
from console.model.rebind.facts import Question
from console.model.rebind.holders import KNOWN, CardHolder, is_reader, kind_of

#: Modules that take references of their own on cards, for memory that goes past the processor.
_DIRECT = ("nvidia_peermem", "gdrdrv", "nvidia_fs")

_LET_GO = "end what holds it, or restart the host; nothing can be written for this card until then"


def removal(question: Question) -> Outcome:
    """While a removal waits in the kernel the driver link is gone, and every write to the card waits too."""
    hanging = {
        function.pending: slot.address
        for slot in question.chosen
        for function in slot.functions
        if function.pending is not None
    }
    if hanging:
        told = listed([f"{card}: {words} has not returned" for words, card in hanging.items()])
        return "fail", told, _LET_GO
    bare = [slot for slot in question.chosen if slot.driver is None]
    if not bare:
        return "pass", "every card has a driver", None
    busy = {event.card for event in question.facts.log or () if event.kind in ("busy", "in-use")}
    waiting = [slot.address for slot in bare if slot.address in busy]
    if waiting:
        return "fail", f"{listed(waiting, ', ')}: a removal seems to wait in the kernel", _LET_GO
    told = f"no driver has {listed([slot.address for slot in bare], ', ')}"
    return "warn", told, "gpuops doctor tells what was left half way"


def holders(question: Question) -> Outcome:
    """The service, the VM and known programs are let go of by the plan; anybody else stops it.

    So does not knowing: a holder that nobody saw makes the unbind wait for ever.
    """
    facts = question.facts
    scan = facts.holders
    if scan is None:
        return "fail", facts.holders_problem or "not looked for", "run gpuops as root"
    moving = {slot.address for slot in question.chosen if not there(slot, question.target)}
    found = [holder for holder in scan.holders if moving.intersection(holder.cards)]
    kinds = {
        holder.pid: kind_of(holder, container=question.container, unit=question.unit, vm=question.vm)
        for holder in found
    }
    foreign = [holder for holder in found if kinds[holder.pid] == "foreign"]
    running = [holder for holder in found if kinds[holder.pid] == "vm" and question.target == "vm"]
    if foreign or running:
        told = listed([holder.words for holder in (*foreign, *running)])
        return "fail", told, listed([f"end it: {holder.remedy}" for holder in (*foreign, *running)])
    unknown = [slot.address for slot in question.chosen if slot.on_nvidia and slot.minor is None]
    if unknown and question.target == "vm":
        told = f"{listed(unknown, ', ')}: its minor is not known, so its holders are not"
        return "fail", told, "look at /proc/driver/nvidia/gpus"
    if scan.unreadable:
        told = f"{scan.unreadable} of {scan.processes} processes did not let us look"
        return "fail", told, "run gpuops as root"
    if not found:
        return "pass", f"none of {scan.processes} has one of them open", None
    service = sum(kind == "service" for kind in kinds.values())
    parts = [f"{question.unit} with {service} processes is stopped"] if service else []
    parts += [_let_go(holder) for holder in found if kinds[holder.pid] != "service"]
    return "pass", f"the plan lets go: {listed(parts)}", None


def _let_go(holder: CardHolder) -> str:
    if is_reader(holder):
        return f"gpuops' own reader, pid {holder.pid}"
    if holder.vm is not None:
        return f"VM {holder.vm} is shut down"
    return KNOWN.get(holder.comm[:15], holder.words)


def kernel_clients(question: Question) -> Outcome:
    """What the kernel itself has open shows in no process."""
    inventory = question.inventory
    moving = [slot for slot in question.chosen if not there(slot, "vm")]
    if not moving:
        return "skipped", "no card moves", None
    direct = [name for name in _DIRECT if name in inventory.modules]
    if direct:
        remedy = f"stop what uses them, then modprobe -r {' '.join(direct)}"
        return "warn", f"{', '.join(direct)} loaded: they may keep references on cards", remedy
    told = []
    if inventory.references.fbdev:
        remedy = "options nvidia_drm fbdev=0 in /etc/modprobe.d, then restart the host"
        return "warn", "nvidia_drm puts a text console on every card (fbdev=1)", remedy
    if inventory.references.modeset:
        told.append("nvidia_drm modeset=1, which lets go when it is unbound")
    retained = inventory.references.uvm_retained
    kept = [slot.address for slot in moving if slot.uuid is not None and retained.get(slot.uuid)]
    if kept:
        told.append(f"UVM retains {listed(kept, ', ')} until the service is stopped")
    persistent = [slot.address for slot in moving if question.facts.persistence.get(slot.address)]
    if persistent:
        told.append(f"persistence mode on {len(persistent)}, which the plan switches off")
    return "pass", listed(told) if told else "none is known", None
