"""Whether cards can change sides safely: everything that is looked at before anything is changed.

A finding that fails stops the plan. The reasons are known failures: an unbind of a busy card never
returns, a group goes over whole or not at all, and a card that does not answer hangs its driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from console.checks.rebind_cards import display, group, iommu, kernel_log, present, real, reset, virtual
from console.checks.rebind_driver import driver, minors, versions
from console.checks.rebind_guests import boot, linted, machine, matched, memory, reserved
from console.checks.rebind_use import holders, kernel_clients, removal
from console.model.finding import Finding, Verdict
from console.model.rebind.facts import Facts, Question
from console.model.rebind.inventory import Inventory, Slot, Target
from console.model.text import clean

Outcome = tuple[Verdict, str, str | None]
Check = tuple[str, str, Callable[[Question], Outcome]]

#: In the order in which they are shown.
_COMMON: tuple[Check, ...] = (
    ("cards", "Cards", real),
    ("present", "Cards answer", present),
    ("removal", "No removal waits", removal),
)
_TO_VM: tuple[Check, ...] = (
    ("iommu", "IOMMU", iommu),
    ("group", "IOMMU groups", group),
    ("vm", "Virtual machine", machine),
    ("vm-cards", "Cards of the VM", matched),
    ("reserved", "Other users of the cards", reserved),
    ("boot", "Next boot", boot),
    ("sriov", "Virtual functions", virtual),
    ("display", "Host console", display),
    ("reset", "Reset", reset),
    ("kernel-log", "Kernel log", kernel_log),
    ("memory", "Memory for the VM", memory),
    ("driver", "NVIDIA driver", driver),
    ("versions", "Driver versions", versions),
    ("holders", "Processes on the cards", holders),
    ("kernel-clients", "Kernel's own clients", kernel_clients),
    ("guest", "VM fit for large cards", linted),
)
_TO_CONTAINER: tuple[Check, ...] = (
    ("group", "IOMMU groups", group),
    ("vm", "Virtual machine", machine),
    ("reserved", "Other users of the cards", reserved),
    ("boot", "Next boot", boot),
    ("kernel-log", "Kernel log", kernel_log),
    ("driver", "NVIDIA driver", driver),
    ("versions", "Driver versions", versions),
    ("holders", "Processes on the cards", holders),
    ("minors", "Device files", minors),
)


def preflight(
    inventory: Inventory,
    *,
    target: Target,
    chosen: Iterable[Slot],
    vm: int | None,
    container: int | None,
    unit: str,
    facts: Facts,
) -> tuple[Finding, ...]:
    """Every finding about moving ``chosen`` to ``target``, in a fixed order. One that fails forbids it.

    ``vm``, ``container`` (None: the service runs on the host itself) and ``unit`` are the site's.
    """
    question = Question(
        inventory=inventory,
        chosen=tuple(chosen),
        target=target,
        vm=vm,
        container=container,
        unit=unit,
        facts=facts,
    )
    return tuple(_findings(question))


def _findings(question: Question) -> Iterator[Finding]:
    if question.facts.root:
        yield Finding("root", "Permissions", "pass", "running as root")
    else:
        words = "not root: only root may bind drivers and see who holds the cards"
        yield Finding("root", "Permissions", "fail", words, "run gpuops as root")
    for id, title, check in (*_COMMON, *(_TO_VM if question.target == "vm" else _TO_CONTAINER)):
        verdict, evidence, remedy = check(question)
        yield Finding(id, title, verdict, clean(evidence), None if remedy is None else clean(remedy))
    if question.inventory.problems:
        told = "; ".join(question.inventory.problems)
        yield Finding("read", "Files of the host", "unknown", clean(told), "run gpuops as root")
