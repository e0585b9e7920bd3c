"""Eight cards that move with the work: what the driver's library says of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from console.model.card import CardTelemetry
from console.simulator.machine import (
    CARD_MEMORY,
    CARD_NAME,
    CARD_POWER_LIMIT_W,
    CARD_RESERVED,
    CARDS,
    GIB,
    CardSlot,
)


class Work(msgspec.Struct, frozen=True):
    """What the engine asks of every card. Shares are 0..1, ``memory_gb`` GiB, ``link`` bytes/s."""

    decode: float = 0.0
    prefill: float = 0.0
    loading: float = 0.0
    spinning: float = 0.0  # kernels that wait for each other: busy to look at, cool to touch
    memory_gb: float = 0.0
    link_tx: float = 0.0
    link_rx: float = 0.0


class Card:
    """One card. Temperatures have inertia; a clock follows what runs."""

    def __init__(self, slot: CardSlot, rng: random.Random) -> None:
        self.slot = slot
        self.driver: str | None = "nvidia"
        self.lost = False
        self.engine_bytes = 0
        self.foreign_bytes = 0
        self._rng = rng
        self._utilization = 0.0
        self._power = 24.0 + rng.uniform(-3, 4)
        # Cards in the middle of the chassis breathe warmer air.
        self._ambient = 29.0 + 2.5 * (slot.index in (2, 3, 4, 5)) + rng.uniform(-0.8, 0.8)
        self._temperature = self._ambient + 6
        self._work = Work()

    @property
    def visible(self) -> bool:
        """The driver's library lists it."""
        return self.driver == "nvidia"

    @property
    def free_bytes(self) -> int:
        return CARD_MEMORY - CARD_RESERVED - self.engine_bytes - self.foreign_bytes

    def advance(self, work: Work, elapsed: float) -> None:
        """``elapsed`` seconds of this work."""
        self._work = work
        self.engine_bytes = int(work.memory_gb * GIB)
        noise = self._rng.gauss
        wanted = 100 * min(1.0, 0.97 * work.decode + work.prefill + 0.06 * work.loading + work.spinning)
        if wanted > 1:
            wanted = min(100.0, max(0.0, wanted + noise(0, 2.5)))
        if self.foreign_bytes:
            wanted = max(wanted, 88 + noise(0, 4))
        self._utilization += (wanted - self._utilization) * min(1.0, elapsed * 1.6)
        idle = 17.0 if not self.engine_bytes else 68.0
        busy = (
            0.33 * work.decode
            + 0.83 * work.prefill
            + 0.11 * work.spinning
            + (0.7 if self.foreign_bytes else 0.0)
        )
        target = idle + (CARD_POWER_LIMIT_W - idle) * min(0.985, busy) + noise(0, 4) * (busy > 0.01)
        self._power += (target - self._power) * min(1.0, elapsed * 1.3)
        equilibrium = self._ambient + 5 + 0.082 * self._power
        self._temperature += (equilibrium - self._temperature) * min(1.0, elapsed / 26.0)

    def telemetry(self) -> CardTelemetry:
        """What NVML would answer now."""
        if self.lost:
            reason = "GPU is lost"
            return CardTelemetry(
                address=self.slot.address,
                name=CARD_NAME,
                uuid=self.slot.uuid,
                memory_total_bytes=CARD_MEMORY,
                power_limit_w=CARD_POWER_LIMIT_W,
                lost=True,
                missing=dict.fromkeys(_ANSWERS, reason),
            )
        used = self.engine_bytes + self.foreign_bytes
        busy = self._utilization > 2 or used > 0
        power_capped = self._power > 0.97 * CARD_POWER_LIMIT_W
        clock = (2362 if power_capped else 2617) + int(self._rng.gauss(0, 9)) if busy else 180
        # An idle card is no throttled one: the NVML process leaves that reason out too.
        reasons = ("power cap",) if power_capped else ()
        return CardTelemetry(
            address=self.slot.address,
            name=CARD_NAME,
            uuid=self.slot.uuid,
            memory_total_bytes=CARD_MEMORY,
            memory_used_bytes=used,
            memory_reserved_bytes=CARD_RESERVED,
            memory_free_bytes=self.free_bytes,
            utilization_percent=round(self._utilization),
            memory_utilization_percent=round(self._utilization * (0.62 * self._work.decode + 0.25)),
            temperature_c=round(self._temperature),
            power_w=round(max(11.0, self._power), 2),
            power_limit_w=CARD_POWER_LIMIT_W,
            sm_clock_mhz=clock,
            memory_clock_mhz=13_365 if busy else 405,
            throttle_reasons=reasons,
            pcie_tx_bytes_per_s=self._jitter(self._work.link_tx),
            pcie_rx_bytes_per_s=self._jitter(self._work.link_rx),
            ecc_corrected=0,
            ecc_uncorrected=0,
            retired_pages=None,
            remapped_rows=0,
            row_remap_pending=False,
            row_remap_failed=False,
            persistence=True,
            missing={"retired_pages": "Not Supported"},
        )

    def _jitter(self, rate: float) -> int:
        return max(0, int(rate * self._rng.uniform(0.9, 1.1)))


_ANSWERS = (
    "memory_used_bytes",
    "memory_reserved_bytes",
    "memory_free_bytes",
    "utilization_percent",
    "memory_utilization_percent",
    "temperature_c",
    "power_w",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "throttle_reasons",
    "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s",
    "ecc_corrected",
    "ecc_uncorrected",
    "retired_pages",
    "remapped_rows",
    "row_remap_pending",
    "row_remap_failed",
    "persistence",
)


class Cards:
    """All cards of the host, in PCI order."""

    def __init__(self, rng: random.Random) -> None:
        self.all = tuple(Card(slot, random.Random(rng.random())) for slot in CARDS)

    def __iter__(self) -> Iterator[Card]:
        return iter(self.all)

    def advance(self, work: Work, elapsed: float) -> None:
        for card in self.all:
            card.advance(work, elapsed)
