"""Of the NVIDIA driver: is it the one that these cards need, do its parts fit, which device files come?"""

from __future__ import annotations

from console.checks.rebind_cards import Outcome, listed, there
from console.model.rebind.facts import Question
from console.model.rebind.inventory import NVIDIA, VFIO
from console.model.rebind.minors import predicted_minors
from console.model.rebind.pve import allows

#: Device ids from here on are Blackwell and later, which only the open kernel modules drive
#: (NVIDIA/open-gpu-kernel-modules#862, #872).
OPEN_ONLY_FROM = 0x2900

#: The registered number of NVIDIA's character devices.
_MAJOR = 195


def driver(question: Question) -> Outcome:
    """The driver of the side where they go has to be loaded; Blackwell cards want the open modules."""
    inventory = question.inventory
    versions = inventory.versions
    wants_open = any(slot.gpu.device >= OPEN_ONLY_FROM for slot in question.chosen)
    if wants_open and versions.open_module is False:
        remedy = (
            "install the open kernel modules (nvidia-open); the proprietary ones do not drive these cards"
        )
        return "fail" if question.target == "container" else "warn", "proprietary kernel modules", remedy
    if question.target == "container" and NVIDIA not in inventory.drivers:
        return "fail", "the nvidia kernel module is not loaded", "modprobe nvidia"
    if "nouveau" in inventory.modules:
        return "warn", "nouveau is loaded too", "blacklist nouveau: it may take a card before nvidia does"
    if question.target == "vm" and VFIO not in inventory.drivers:
        return "pass", "vfio-pci is not loaded yet: the plan loads it", None
    kind = {True: ", open kernel modules", False: ", proprietary modules", None: ""}[versions.open_module]
    return "pass", f"{versions.module or 'not loaded'}{kind}", None


def versions(question: Question) -> Outcome:
    """ "Driver/library version mismatch" is what NVML says after an upgrade without a restart."""
    found = question.inventory.versions
    parts = {
        "loaded module": found.module,
        "module on disk": question.facts.module_on_disk,
        "library of the host": found.library,
    }
    if question.container is not None:
        parts[f"library of CT {question.container}"] = found.container_libraries.get(question.container)
    known = {name: version for name, version in parts.items() if version is not None}
    told = ", ".join(f"{name} {version}" for name, version in known.items())
    if found.module is None or len(known) < 2:
        return (
            "unknown",
            told or "none of them is known",
            "compare nvidia-smi on the host and in the container",
        )
    if len(set(known.values())) > 1:
        remedy = "install one version on the host and in the container, then restart the host"
        # Only what the service loads keeps it from starting; the other side does not need it.
        library = known.get(f"library of CT {question.container}", known.get("library of the host"))
        broken = question.target == "container" and library not in (None, found.module)
        return "fail" if broken else "warn", told, remedy
    return "pass", f"all {found.module}", None


def minors(question: Question) -> Outcome:
    """Minors are given out anew: the container's configuration has to have a node for each."""
    coming = [slot.address for slot in question.chosen if not there(slot, "container")]
    if not coming:
        return "skipped", "no card comes", None
    given = predicted_minors(question.inventory, coming)
    container = question.inventory.container(question.container) if question.container is not None else None
    numbers = {address: minor for address, minor in given.items() if minor is not None}
    if len(numbers) < len(given):
        return "unknown", "the minor of a card that stays is not known", "look at /proc/driver/nvidia/gpus"
    told = listed([f"{address} becomes /dev/nvidia{minor}" for address, minor in numbers.items()], ", ")
    if question.container is None:
        return "pass", told, None
    if container is None:
        return "unknown", f"{told}; CT {question.container} has no configuration here", None
    nodes = {f"/dev/nvidia{minor}": minor for minor in numbers.values()}
    missing = [
        node
        for node, minor in nodes.items()
        if not any(path in (node, "/dev") for path in container.nodes)
        or not allows(container, node, _MAJOR, minor)
    ]
    if missing:
        remedy = (
            f"add a line such as dev0: {missing[0]},mode=0666 to /etc/pve/lxc/{question.container}.conf: "
            "without it the container does not see the card"
        )
        return "warn", f"CT {question.container} has no {listed(missing, ', ')}", remedy
    return "pass", f"{told}; CT {question.container} has them all", None
