"""What the simulated host is made of: its name, its cards, its guests, its memory."""

from __future__ import annotations

import msgspec

HOSTNAME = "pve1"
CONTAINER_NAME = "sglang"
KERNEL = "6.17.2-2-pve"
DRIVER_VERSION = "595.45.04"
NVML_VERSION = "13.595.45"

CONTAINER = 129
VM = 100

MIB = 1024 * 1024
GIB = 1024 * MIB

#: RTX PRO 6000 Blackwell Workstation Edition, as nvidia-smi shows it.
CARD_NAME = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
CARD_MEMORY = 97_887 * MIB
CARD_RESERVED = 638 * MIB
CARD_POWER_LIMIT_W = 600.0

VENDOR = 0x10DE
GPU_DEVICE = 0x2BB1
GPU_CLASS = 0x030000
AUDIO_DEVICE = 0x22E8
AUDIO_CLASS = 0x040300

RAM = 768 * GIB

#: What the container may use of it.
CONTAINER_MEMORY = 720 * GIB

#: The host has been up for nineteen days when the box starts.
HOST_UPTIME_S = 19 * 86400.0 + 7431.0

#: Seconds since the engine of the first run said it was ready.
READY_SINCE_S = 3 * 3600.0 + 12 * 60.0


class CardSlot(msgspec.Struct, frozen=True):
    """One card's place: ``slot`` is its address without the function."""

    index: int
    slot: str
    group: int
    numa_node: int
    uuid: str

    @property
    def address(self) -> str:
        return f"{self.slot}.0"

    @property
    def audio(self) -> str:
        return f"{self.slot}.1"


_BUSES = ("01", "21", "41", "61", "81", "a1", "c1", "e1")
_GROUPS = (13, 24, 38, 51, 66, 79, 92, 107)
_UUIDS = (
    "GPU-3c1d7f0e-52a4-4bb6-9d0e-8f1f7c2a6e10",
    "GPU-8a06e3b2-0f7d-4c59-b1c3-27d5e9a4f011",
    "GPU-f7e2490c-6b18-4f0a-8c35-90ab1de26c72",
    "GPU-15bd8e6a-c943-4e27-a60f-4b7d0c8f9233",
    "GPU-d0947ac1-3e5f-4871-92de-6c18fb03a754",
    "GPU-6be1f358-914d-4ad0-bf27-e305c7d9a8b5",
    "GPU-a92c04d7-7f36-48be-8e51-1d6f30b7c4e6",
    "GPU-41f8b6e9-d20a-4593-a7c4-b98e25f06d17",
)

CARDS: tuple[CardSlot, ...] = tuple(
    CardSlot(index, f"0000:{bus}:00", _GROUPS[index], index // 4, _UUIDS[index])
    for index, bus in enumerate(_BUSES)
)
