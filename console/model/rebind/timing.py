"""How long Proxmox gives a machine with cards to start, as qemu-server reckons it (Helpers.pm, 9.2.6)."""

from __future__ import annotations

from console.model.rebind.inventory import VmConfig

#: Seconds for a machine with little memory.
_PLAIN_S = 30.0

#: MiB from which the memory counts: a second for each GiB.
_LARGE_MIB = 30_720

#: With any card: the kernel pins all of the memory first.
_CARDS = 4.0
_NETWORK_S = 5.0
_HUGEPAGES_S = 150.0

#: Seconds that a guest has to shut down when it is asked to: the services in it end first.
SHUTDOWN_S = 300.0


def start_limit_s(vm: VmConfig) -> float:
    """Seconds after which ``qm start`` gives up: 1029 for 256 GiB, cards and one network."""
    limit = vm.memory_mib / 1024 if vm.memory_mib > _LARGE_MIB else _PLAIN_S
    if vm.hugepages is not None:
        limit = max(limit, _HUGEPAGES_S)
    if vm.hostpci:
        limit *= _CARDS
    return limit + _NETWORK_S * vm.networks
