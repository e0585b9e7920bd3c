"""Of the guests: can the VM start and does it name these cards, who else wants them, what does a boot do?"""

from __future__ import annotations

from console.checks.rebind_cards import Outcome, listed, there
from console.model.rebind.facts import Question
from console.model.rebind.inventory import HostPci, VmConfig

#: MiB that the host needs for itself beside a VM whose memory is pinned: QEMU's own, page tables, caches.
_BESIDE_MIB = 4096


def machine(question: Question) -> Outcome:
    """There, stopped, not locked."""
    inventory = question.inventory
    if question.vm is None:
        if question.target == "container":
            return "skipped", "the site names no VM", None
        return "fail", "the site names no VM", "add vm: {id: …} to the site file"
    vm = question.machine
    if vm is None:
        told = inventory.proxmox_absent or f"this node has no VM {question.vm}"
        remedy = "check vm in the site file; qm list shows the VMs of this node"
        return ("fail" if question.target == "vm" else "warn"), told, remedy
    name = f"VM {vm.id} {vm.name or ''}".strip()
    if vm.lock is not None:
        remedy = f"wait until the {vm.lock} is over; qm unlock {vm.id} only when no task of it runs"
        return "fail", f"{name} is locked: {vm.lock}", remedy
    if vm.template:
        return "fail", f"{name} is a template", "name a VM that can be started in the site file"
    if vm.status is None:
        return "unknown", f"{name}: whether it runs cannot be told", f"qm status {vm.id}; run gpuops as root"
    if question.target == "container":
        if vm.status == "running" and set(vm.functions) & question.addresses:
            return "warn", f"{name} runs: the plan shuts it down", None
        return "pass", f"{name} is {vm.status}", None
    if vm.status == "running":
        if all(there(slot, "vm") for slot in question.chosen):
            return "pass", f"{name} runs, and the cards are on its side already", None
        return "fail", f"{name} runs: it gets cards only when it starts", f"qm shutdown {vm.id}"
    if vm.pending:
        return (
            "warn",
            f"{name} is stopped; changes of its configuration wait for the start",
            f"qm pending {vm.id}",
        )
    return "pass", f"{name} is stopped", None


def matched(question: Question) -> Outcome:
    """Its hostpci lines name the chosen cards, all functions of them, and no card that stays."""
    vm = question.machine
    if vm is None:
        return "skipped", "there is no VM", None
    configuration = f"/etc/pve/qemu-server/{vm.id}.conf"
    if not vm.hostpci:
        remedy = f"qm set {vm.id} --hostpci0 {question.chosen[0].name if question.chosen else '…'},pcie=1"
        return "fail", f"VM {vm.id} has no hostpci line: it would start without cards", remedy
    problems = [line.problem for line in vm.hostpci if line.problem is not None]
    if problems:
        return "fail", listed(problems), f"correct {configuration}, or the mapping in Datacenter"
    own = [line for line in vm.hostpci if line.key == "args"]
    named = set(vm.functions)
    missing = [slot.address for slot in question.chosen if slot.address not in named]
    if missing:
        told = f"VM {vm.id} does not name {listed(missing, ', ')}"
        return (
            "fail",
            told,
            f"qm set {vm.id} --hostpci… {missing[0].rpartition('.')[0]},pcie=1, or leave it out",
        )
    extra = [
        slot.address
        for slot in question.inventory.slots_of(named)
        if slot.address not in question.cards and not slot.on_vfio
    ]
    if extra:
        told = f"VM {vm.id} also names {listed(extra, ', ')}: its start would take them from the host"
        return "fail", told, f"choose them too, or take their hostpci line out of {configuration}"
    parts = [
        f"{slot.address} without {', '.join(sorted(rest))}"
        for slot in question.chosen
        if (rest := {one.address for one in slot.functions} - named)
    ]
    lines = len(vm.hostpci) - len(own)
    if own:
        told = f"VM {vm.id} takes {listed(list(own[0].functions), ', ')} by its args, past Proxmox"
        return "warn", told, "name them in hostpci lines: Proxmox neither reserves nor checks those in args"
    if parts:
        remedy = f"write the address without function: hostpciN: {question.chosen[0].name},pcie=1"
        return "warn", f"VM {vm.id} gets {listed(parts)}", remedy
    alternatives = [line for line in vm.hostpci if line.alternatives]
    if alternatives:
        told = f"{alternatives[0].mapping} of {alternatives[0].key} stands for several cards"
        return "warn", told, "Proxmox takes the first that is free: name one card in each mapping"
    return "pass", f"VM {vm.id} names them in {lines} lines", None


def reserved(question: Question) -> Outcome:
    """Other VMs that run with one of them, and what Proxmox has reserved."""
    inventory = question.inventory
    wanted = question.addresses
    told = []
    for vm in inventory.vms:
        if vm.id == question.vm or vm.status != "running":
            continue
        shared = sorted(wanted.intersection(vm.functions))
        if shared:
            told.append(f"VM {vm.id} runs and names {shared[0]}")
    for one in inventory.reservations:
        if one.address in wanted and one.alive and one.vmid != question.vm:
            told.append(f"{one.address} is reserved for VM {one.vmid}")
    if told:
        return "fail", listed(list(dict.fromkeys(told))), "shut that VM down first"
    others = sorted(
        {vm.id for vm in inventory.vms if vm.id != question.vm and wanted.intersection(vm.functions)}
    )
    if others:
        names = ", ".join(f"VM {id}" for id in others)
        return (
            "pass",
            f"{names}, which is stopped, names some of them too"
            if len(others) == 1
            else (f"{names}, which are stopped, name some of them too"),
            None,
        )
    return "pass", "none", None


def boot(question: Question) -> Outcome:
    """What starts by itself takes its cards, whatever was agreed."""
    inventory = question.inventory
    vm = question.machine
    container = inventory.container(question.container) if question.container is not None else None
    told = []
    if vm is not None and vm.ha is not None:
        told.append(f"HA keeps VM {vm.id} {vm.ha}")
    if container is not None and container.ha is not None:
        told.append(f"HA keeps CT {container.id} {container.ha}")
    if vm is not None and container is not None and vm.onboot and container.onboot:
        told.append(f"VM {vm.id} and CT {container.id} both start at boot")
    if told:
        remedy = "let one of them start by itself: qm set … --onboot 0, or ha-manager remove vm:…"
        return "warn", listed(told), remedy
    if question.target == "vm" and container is not None and container.onboot:
        needed = [path for path in container.required if path.removeprefix("/dev/nvidia").isdecimal()]
        if needed:
            remedy = "give the cards back before a boot; or use lxc.mount.entry lines with optional"
            told = [f"CT {container.id} starts at boot and needs {listed(needed, ', ')}"]
            return "warn", f"{told[0]}: without its cards it does not start", remedy
    if question.target == "vm" and vm is not None and not vm.onboot:
        return "pass", f"VM {vm.id} does not start by itself: after a boot the host has the cards", None
    return "pass", "no conflict", None


def memory(question: Question) -> Outcome:
    """VFIO pins all of a VM's memory at its start."""
    vm = question.machine
    found = question.inventory.memory
    if vm is None or vm.status == "running":
        return "skipped", "no VM starts", None
    if vm.hugepages is not None:
        return _pages(question, vm)
    if found.available_mib is None:
        return "unknown", "the host's free memory cannot be read", None
    returned = question.facts.returned_mib
    free = found.available_mib + returned
    told = f"VM {vm.id} pins {_gib(vm.memory_mib)}, free {_gib(found.available_mib)}"
    if returned:
        told += f" and {_gib(returned)} once the service is stopped"
    remedy = f"free memory on the host, or lower it: qm set {vm.id} --memory …"
    if free < vm.memory_mib:
        return "fail", told, remedy
    if free < vm.memory_mib + _BESIDE_MIB:
        return "warn", f"{told}: less than {_gib(_BESIDE_MIB)} would be left", remedy
    return "pass", told, None


def _pages(question: Question, vm: VmConfig) -> Outcome:
    """Huge pages are set aside beforehand; Proxmox tries to make those that are missing."""
    pages = question.inventory.memory.hugepages
    sizes = [int(vm.hugepages) * 1024] if vm.hugepages in ("2", "1024") else sorted(pages)
    free_mib = sum(pages.get(size, 0) * size // 1024 for size in sizes)
    told = f"VM {vm.id} wants {_gib(vm.memory_mib)} in huge pages, {_gib(free_mib)} are free"
    if free_mib >= vm.memory_mib:
        return "pass", told, None
    return "warn", told, "reserve them at boot: the host may not find so much memory in one piece later"


def linted(question: Question) -> Outcome:
    """What a guest needs to see a card with 96 GB: else its BAR stays unmapped (canonical/lxd#14381)."""
    vm = question.machine
    if vm is None:
        return "skipped", "there is no VM", None
    cards = set(question.cards)
    plain = [line.key for line in vm.hostpci if _on_pci(line) and cards.intersection(line.functions)]
    wishes = []
    if (vm.bios or "seabios") != "ovmf":
        wishes.append((f"bios {vm.bios or 'seabios'}", "bios: ovmf"))
    if "q35" not in (vm.machine or ""):
        wishes.append((f"machine {vm.machine or 'i440fx'}", "machine: q35"))
    if (vm.cpu or "kvm64") != "host":
        wishes.append((f"cpu {vm.cpu or 'kvm64'}", "cpu: host"))
    if plain:
        wishes.append((f"{plain[0]} without pcie=1", "pcie=1 on each hostpci line"))
    if not vm.agent:
        wishes.append(("no guest agent: what the guest sees cannot be asked", "agent: 1"))
    if wishes:
        told = listed([seen for seen, _ in wishes])
        return "warn", told, "set " + ", ".join(wish for _, wish in wishes)
    return "pass", "OVMF, q35, cpu host, pcie, agent", None


def _on_pci(line: HostPci) -> bool:
    return line.key != "args" and line.options.get("pcie", "0") not in ("1", "on", "yes", "true")


def _gib(mib: int) -> str:
    return f"{mib / 1024:.0f} GiB"
