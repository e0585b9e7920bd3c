"""The files in which Proxmox keeps the container and the virtual machine of the box."""

from __future__ import annotations

from console.simulator.machine import CARDS, CONTAINER, CONTAINER_MEMORY, CONTAINER_NAME, MIB, VM


def container_config(devices: str) -> str:
    """``/etc/pve/lxc/129.conf``; ``pct config`` prints the same keys."""
    return (
        f"arch: amd64\ncores: 64\n{devices}features: nesting=1\nhostname: {CONTAINER_NAME}\n"
        f"memory: {CONTAINER_MEMORY // MIB}\n"
        "mp0: /tank/models,mp=/shared\n"
        "net0: name=eth0,bridge=vmbr0,hwaddr=BC:24:11:7A:90:3E,ip=dhcp,type=veth\n"
        f"onboot: 1\nostype: debian\nrootfs: local-zfs:subvol-{CONTAINER}-disk-0,size=200G\nswap: 0\n"
        "lxc.cgroup2.devices.allow: c 508:* rwm\n"
        "lxc.mount.entry: /dev/nvidia-caps dev/nvidia-caps none bind,optional,create=dir\n"
    )


def vm_config() -> str:
    """``/etc/pve/qemu-server/100.conf``: the machine that sometimes takes all eight cards."""
    cards = "".join(f"hostpci{card.index}: {card.slot},pcie=1\n" for card in CARDS)
    return (
        "agent: enabled=1\nbios: ovmf\nboot: order=scsi0\ncores: 32\ncpu: host\n"
        f"efidisk0: local-zfs:vm-{VM}-disk-0,efitype=4m,size=1M\n{cards}machine: q35\nmemory: 262144\n"
        "meta: creation-qemu=10.1.2,ctime=1762251120\nname: gpu-vm\n"
        "net0: virtio=BC:24:11:4F:2D:A1,bridge=vmbr0\nnuma: 1\nonboot: 0\nostype: l26\n"
        f"scsi0: local-zfs:vm-{VM}-disk-1,iothread=1,size=256G\nscsihw: virtio-scsi-single\n"
        "smbios1: uuid=6c1f2b0e-51d8-4a0f-9d3c-2b7a8f4ce190\nsockets: 1\n"
        "vmgenid: 0b9e7d54-3f6a-4c18-8a21-d5e04c7b96f3\n"
    )
