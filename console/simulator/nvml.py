"""The card library's process as the box plays it: JSON lines about the cards it can see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Protocol

import msgspec

from console.simulator.cards import Cards
from console.simulator.clock import Clock
from console.simulator.machine import DRIVER_VERSION, NVML_VERSION

PERIOD_S = 1.0
PROCESSES_PERIODS = 5

#: A new process is told of Xid errors this recent: its registration came just too late for them.
XID_MEMORY_S = 30.0


class Output(Protocol):
    async def out(self, text: str) -> None: ...


class XidReport(msgspec.Struct, frozen=True):
    at: float  # monotonic seconds
    address: str
    code: int


#: By card address, the processes on it: pid as the host counts, bytes.
ProcessList = Callable[[], dict[str, list[tuple[int, int]]]]


class NvmlStream:
    """What every process that asks is told."""

    def __init__(self, cards: Cards, processes: ProcessList, clock: Clock) -> None:
        self._cards = cards
        self._processes = processes
        self._clock = clock
        self._xids: list[XidReport] = []

    def report(self, address: str, code: int) -> None:
        """The driver reports an Xid error now."""
        self._xids.append(XidReport(self._clock.mono(), address, code))

    async def run(self, output: Output) -> int:
        """Speak until the listener goes."""
        mono = self._clock.mono
        pid = os.getpid()
        await _line(
            output,
            {
                "kind": "hello",
                "at": mono(),
                "driver_version": DRIVER_VERSION,
                "nvml_version": NVML_VERSION,
                "pid": pid,
            },
        )
        told = next(
            (i for i, xid in enumerate(self._xids) if mono() - xid.at < XID_MEMORY_S), len(self._xids)
        )
        beat = mono()
        turn = 0
        while True:
            for xid in self._xids[told:]:
                await _line(output, {"kind": "xid", "at": xid.at, "address": xid.address, "code": xid.code})
            told = len(self._xids)
            visible = [card for card in self._cards if card.visible]
            if visible:
                cards = [card.telemetry() for card in visible]
                await _line(output, {"kind": "cards", "at": mono(), "cards": cards})
            else:
                await _line(output, {"kind": "unavailable", "at": mono(), "reason": "No devices were found"})
            if turn % PROCESSES_PERIODS == 0:
                listed = {
                    address: [{"pid": pid, "memory_bytes": size} for pid, size in found]
                    for address, found in self._processes().items()
                }
                await _line(output, {"kind": "processes", "at": mono(), "processes": listed})
            turn += 1
            beat = max(beat + PERIOD_S, mono() - PERIOD_S)
            await asyncio.sleep(max(0.0, beat - mono()))


async def _line(output: Output, message: dict[str, object]) -> None:
    await output.out(msgspec.json.encode(message).decode() + "\n")
