"""Of the cards that are to change sides: are they cards, do they answer, can their groups go over whole?"""

from __future__ import annotations

from console.model.finding import Verdict
from console.model.rebind.facts import Question
from console.model.rebind.inventory import Function, Slot, is_vfio

Outcome = tuple[Verdict, str, str | None]

#: At most so many things are named in one finding.
_NAMED = 4


def listed(parts: list[str], joint: str = "; ") -> str:
    """The first few, and how many more there are."""
    more = len(parts) - _NAMED
    return joint.join(parts[:_NAMED]) + (f"{joint}and {more} more" if more > 0 else "")


def real(question: Question) -> Outcome:
    chosen = question.chosen
    if not chosen:
        return "fail", "no card is chosen", "name cards with --gpu; gpuops status lists them"
    wrong = [slot for slot in chosen if not slot.gpu.is_gpu]
    if wrong:
        others = [f"{_what(one.gpu)} is no NVIDIA GPU" for one in wrong]
        return "fail", listed(others), "correct the site's gpus"
    twice = len(chosen) - len({slot.address for slot in chosen})
    if twice:
        return "fail", "a card is named twice", "name each card once"
    move = [slot for slot in chosen if not there(slot, question.target)]
    target = "VM" if question.target == "vm" else "container"
    told = f"{len(move)} of {len(chosen)} to move to the {target}"
    if not move:
        return "pass", f"all {len(chosen)} are on that side already", None
    return "pass", f"{told}: {listed([slot.address for slot in move], ', ')}", None


def there(slot: Slot, target: str) -> bool:
    """Whether a card is on that side already, with all that belongs to it."""
    if target == "vm":
        return slot.on_vfio
    return slot.on_nvidia and not any(is_vfio(function.driver) for function in slot.endpoints)


def present(question: Question) -> Outcome:
    """A card whose config space is all ones hangs the driver that it is bound to."""
    dead = [one.address for slot in question.chosen for one in slot.functions if one.config_ok is False]
    if dead:
        card = question.inventory.slot(dead[0])  # the ladder is for whole cards
        whole = dead[0] if card is None else card.address
        remedy = f"do not bind it; gpuops rebind --recover {whole}, or power the host off and on"
        return "fail", f"{listed(dead, ', ')}: config space reads all ones, off the bus", remedy
    unasked = [slot.address for slot in question.chosen if slot.gpu.config_ok is None]
    if unasked:
        asleep = [slot for slot in question.chosen if slot.gpu.power_state not in (None, "D0", "unknown")]
        if len(asleep) == len(unasked):
            state = ", ".join(sorted({slot.gpu.power_state or "?" for slot in asleep}))
            return "pass", f"{len(asleep)} asleep ({state}): each is asked when it is woken", None
        return "unknown", f"{listed(unasked, ', ')}: config space cannot be read", "run gpuops as root"
    return "pass", f"all {len(question.chosen)} do", None


def iommu(question: Question) -> Outcome:
    """On, and every card in a group; Proxmox's own test is /sys/class/iommu."""
    remedy = "switch it on in the firmware, and add intel_iommu=on to the kernel's command line on Intel"
    if not question.inventory.iommu:
        return "fail", "off: nothing can be given to a VM", remedy
    without = [slot.address for slot in question.chosen if slot.group is None]
    if without:
        return "fail", f"{listed(without, ', ')}: in no IOMMU group", remedy
    groups = sorted({slot.group.id for slot in question.chosen if slot.group is not None})
    return "pass", f"on; groups {', '.join(map(str, groups))}", None


def group(question: Question) -> Outcome:
    """Judged from the drivers of the members: with some drivers the kernel's own word is wrong."""
    chosen = question.cards
    if question.target == "container":
        return "pass", f"{sum(len(slot.functions) for slot in question.chosen)} functions come back", None
    told = []
    for slot in question.chosen:
        if slot.group is None:
            continue
        for other in slot.foreign:
            owner = question.inventory.slot(other.address)
            if owner is not None and owner.address in chosen:
                continue
            whose = f", part of card {owner.address}" if owner is not None else ""
            told.append(f"group {slot.group.id} of {slot.address} also has {_what(other)}{whose}")
    if told:
        remedy = (
            "all of a group goes to one guest: use another slot, or the firmware's ACS setting to part them"
        )
        return "fail", listed(told), remedy
    bridges = sum(one.is_bridge for slot in question.chosen if slot.group for one in slot.group.members)
    with_bridges = f", {bridges} bridges do not count" if bridges else ""
    return "pass", f"{len(question.addresses)} functions, nothing else in their groups{with_bridges}", None


def virtual(question: Question) -> Outcome:
    """Unbinding a card under its virtual functions has crashed hosts (xapi-project/xenopsd#689)."""
    on = [f"{slot.address} has {slot.sriov_vfs}" for slot in question.chosen if slot.sriov_vfs]
    if on:
        return "fail", f"switched on: {listed(on)}", "write 0 to sriov_numvfs of the card first"
    return "pass", "none switched on", None


def display(question: Question) -> Outcome:
    """A card that the host draws on cannot leave: the framebuffer keeps it, or the console goes dark."""
    drawn = [
        f"{slot.address}: {slot.framebuffer}" for slot in question.chosen if slot.framebuffer is not None
    ]
    if drawn:
        remedy = (
            "list the other cards in the site's gpus; or let the host boot without a picture on this card: "
            "nvidia_drm fbdev=0 modeset=0, initcall_blacklist=sysfb_init"
        )
        return "fail", f"the host's console is drawn on {listed(drawn)}", remedy
    first = [slot.address for slot in question.chosen if slot.boot_vga]
    if first:
        remedy = "let the firmware use the board's own graphics first; or leave this card out"
        return "warn", f"{first[0]} is the card that the firmware booted with (boot_vga)", remedy
    return "pass", "none of them", None


def reset(question: Question) -> Outcome:
    """Between two owners a card has to be reset; with which means is recorded."""
    without = [slot.address for slot in question.chosen if not slot.gpu.reset_methods and not slot.bus_reset]
    if without:
        remedy = "only a cold boot cleans it between owners; check reset_method in sysfs"
        return "warn", f"{listed(without, ', ')}: the kernel knows no way to reset it", remedy
    methods = sorted({_means(slot) for slot in question.chosen})
    cold = sum(bool(slot.gpu.d3cold_allowed) for slot in question.chosen)
    guard = f"; D3cold is switched off for {cold} of them once they are on vfio-pci" if cold else ""
    return "pass", f"{' or '.join(methods)}{guard}", None


def _means(slot: Slot) -> str:
    by_port = ("bus by its port",) if slot.bus_reset else ()
    return ", ".join((*slot.gpu.reset_methods, *by_port))


def kernel_log(question: Question) -> Outcome:
    """What the kernel complained of in the last day; whether it is cured, the other findings tell."""
    facts = question.facts
    if facts.log is None:
        return "unknown", facts.log_problem or "not read", "run gpuops as root; journalctl -k has to answer"
    span = f"{facts.log_s / 3600:.0f} h"
    grave = [event for event in facts.log if event.grave and event.card in (*question.cards, None)]
    if grave:
        latest = {event.card: event for event in grave}
        told = [f"{len(grave)} in the last {span}", *(event.words for event in latest.values())]
        remedy = "journalctl -k tells more; a card that had an Xid 79 or a failed reset may need a cold boot"
        return "warn", listed(told), remedy
    return "pass", f"nothing against them in the last {span}", None


def _what(function: Function) -> str:
    driver = f" on {function.driver}" if function.driver is not None else ""
    return f"{function.address} ({function.kind}{driver})"
