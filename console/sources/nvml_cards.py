"""The cards and the driver as the NVML process knows them, and what a reader does for each.

Part of the NVML process: only the standard library and pynvml are imported.
"""

from __future__ import annotations

import os
from collections import deque
from ctypes import c_void_p, cast
from time import monotonic

import pynvml as nvml

from console.sources.nvml_questions import (
    EVERY_PERIOD,
    FIELDS,
    IN_TURN,
    NOW_AND_THEN,
    ONCE,
    Missing,
    processes_on,
)

TYPE_CHECKING = False  # importing typing itself would cost a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from console.sources.nvml_questions import Ask
    from console.sources.nvml_worker import Reader

#: Seconds between looks at fields that hardly change.
RARELY = 30.0

#: Events taken per period at most; a card in trouble can report without end.
EVENT_LIMIT = 64

#: What stays true of a card while it does not answer.
STATIC = ("name", "uuid", "memory_total_bytes", "power_limit_w")


class Chore:
    """Something to ask of NVML that may never be answered."""

    held: Reader | None = None  # the reader that is at it now
    defect: str | None = None

    def run(self, ask: Ask) -> None:
        raise NotImplementedError

    def obstacle(self, deadline: float) -> str | None:
        """In words, the call that has not returned within ``deadline`` seconds, or our own defect."""
        reader = self.held
        if reader is None:
            return self.defect
        now = monotonic()
        if now - reader.chore_at <= deadline:
            return None
        return f"{reader.function} has not returned for {now - reader.called_at:.0f} s"


class Card(Chore):
    """One card, its handle, and the last that was read of it."""

    def __init__(self, address: str, handle: Any, turn: int) -> None:
        self.address = address
        self.handle = handle  # None: the driver lists the card but does not give it out
        self.turn = turn
        self.lost = False
        self.answered = False  # at least once
        self.values: dict[str, object] = dict.fromkeys(FIELDS)
        self.missing: dict[str, str] = dict.fromkeys(FIELDS, "not read yet")
        self.no_xid: str | None = None  # why its Xid errors are not reported
        self.processes: list[dict[str, int | None]] | None = None
        self.look_again = 0.0  # when the fields that hardly change are due
        self.wants_throughput = False
        self.wants_processes = False

    def run(self, ask: Ask) -> None:
        now = monotonic()
        values, missing = dict(self.values), dict(self.missing)
        groups = list(EVERY_PERIOD)
        groups += [group for group in ONCE if values[group[0][0]] is None]
        rare = now >= self.look_again
        if rare:
            groups += NOW_AND_THEN
        if self.wants_throughput:
            groups += IN_TURN
        try:
            for fields, question in groups:
                self._put(values, missing, fields, _answer(question, ask, self.handle, len(fields)))
            if self.wants_processes:
                self._read_processes(ask, missing)
        except nvml.NVMLError as problem:  # only GPU_IS_LOST comes this far
            self.processes = None
            self.values, self.missing, self.lost = *_only_static(values, str(problem)), True
            self.look_again = 0.0
            self.answered = True
            return
        if rare:
            self.look_again = now + RARELY + self.turn  # not all cards in the same second
        self.values, self.missing, self.lost = values, missing, False
        self.answered = True

    @staticmethod
    def _put(
        values: dict[str, object], missing: dict[str, str], fields: Iterable[str], answers: Sequence[object]
    ) -> None:
        for field, answer in zip(fields, answers, strict=True):
            if isinstance(answer, Missing):
                values[field] = None
                missing[field] = answer
            else:
                values[field] = answer
                missing.pop(field, None)

    def _read_processes(self, ask: Ask, missing: dict[str, str]) -> None:
        missing.pop("processes", None)
        try:
            self.processes = processes_on(ask, self.handle)
        except (nvml.NVMLError, ValueError) as problem:
            if _is_lost(problem):
                raise
            self.processes = None
            missing["processes"] = str(problem)

    def worth_telling(self, deadline: float) -> bool:
        """False for a card so new that there is nothing to say of it yet."""
        return self.answered or self.handle is None or self.obstacle(deadline) is not None

    def message(self, deadline: float) -> dict[str, object]:
        """The card as ``CardTelemetry``."""
        values, missing = self.values, self.missing
        obstacle = self.obstacle(deadline)
        if obstacle:
            values, missing = _only_static(values, obstacle)
        if self.no_xid:
            missing = {**missing, "xid": self.no_xid}
        return {"address": self.address, **values, "lost": self.lost, "missing": missing}


def _answer(
    question: Callable[[Ask, Any], Sequence[object]], ask: Ask, handle: Any, count: int
) -> Sequence[object]:
    try:
        return question(ask, handle)
    except (nvml.NVMLError, UnicodeDecodeError) as problem:
        if _is_lost(problem):
            raise
        return (Missing(problem),) * count


def _is_lost(problem: Exception) -> bool:
    return isinstance(problem, nvml.NVMLError) and problem.value == nvml.NVML_ERROR_GPU_IS_LOST


def _only_static(values: dict[str, object], reason: str) -> tuple[dict[str, object], dict[str, str]]:
    kept = {field: values[field] if field in STATIC else None for field in values}
    return kept, {field: reason for field, value in kept.items() if value is None}


class Driver(Chore):
    """The driver as a whole: which cards it has, and the Xid errors it reports."""

    def __init__(self, proc: str, inventory_period: float) -> None:
        self.proc = proc
        self.inventory_period = inventory_period  # seconds between looks at which cards there are
        self.cards: dict[str, Card] = {}
        self.hello: dict[str, object] | None = None
        self.failure: str | None = None  # why there is nothing to read at all
        self.trouble: str | None = None  # what the list of cards may lack
        self.xids: deque[tuple[float, str | None, int]] = deque()
        self.reopening = False  # handles are void for a moment
        self._listed: set[str] = set()  # the kernel's list when NVML was last initialised
        self._events: Any = None
        self._due = 0.0

    def run(self, ask: Ask) -> None:
        try:
            if self.hello is None:
                self._start(ask)
            if monotonic() >= self._due:
                self._take_inventory(ask)
                self._due = monotonic() + self.inventory_period
        except nvml.NVMLError as problem:
            self.failure = self._explain(problem, ask)
            return
        self._collect_events(ask)

    def _start(self, ask: Ask) -> None:
        self._listed = self._kernel_list()
        ask("nvmlInit")
        self.hello = {
            "driver_version": ask("nvmlSystemGetDriverVersion"),
            "nvml_version": ask("nvmlSystemGetNVMLVersion"),
            "pid": os.getpid(),
        }

    def _kernel_list(self) -> set[str]:
        """Addresses of the cards the kernel driver is bound to; empty where it does not say."""
        try:
            return {entry.lower() for entry in os.listdir(f"{self.proc}/driver/nvidia/gpus")}  # noqa: PTH208
        except OSError:
            return set()

    def _take_inventory(self, ask: Ask) -> None:
        known = self.cards
        listed = self._kernel_list()
        if listed != self._listed and not any(card.held for card in known.values()):
            self._reopen(ask)
            self._listed = listed
            known = {}
        handles, problems = self._handles(ask)
        withheld = (listed or known.keys()) - handles.keys() if problems else set()
        cards: dict[str, Card] = {}
        for address in sorted(handles.keys() | withheld):
            card = known.get(address)
            if card is None or (card.handle is None) != (address in withheld):
                card = Card(address, handles.get(address), len(cards))
                if address in known:
                    card.values = known[address].values
            if address in withheld:
                card.values, card.missing = _only_static(card.values, str(problems[0]))
                card.lost = _is_lost(problems[0])
            cards[address] = card
        unnamed = problems[len(withheld) :]
        plural = "cards" if len(unnamed) > 1 else "card"
        self.trouble = f"{len(unnamed)} {plural} without an address: {unnamed[0]}" if unnamed else None
        if not cards:
            self.failure = self.trouble or "no card is bound to the nvidia driver"
        if cards.keys() != known.keys() or self._events is None:
            self._register_events(ask, cards)
        self.cards = cards
        self.reopening = False

    def _reopen(self, ask: Ask) -> None:
        """Initialise NVML again: it counts cards only then, and one was bound or unbound since."""
        self.reopening = True
        self._events = None
        ask("nvmlShutdown")
        ask("nvmlInit")

    def _handles(self, ask: Ask) -> tuple[dict[str, Any], list[Exception]]:
        """Handles by address, and why cards have none."""
        handles: dict[str, Any] = {}
        problems: list[Exception] = []
        for index in range(ask("nvmlDeviceGetCount")):
            try:
                handle = ask("nvmlDeviceGetHandleByIndex", index)
                handles[kernel_address(ask("nvmlDeviceGetPciInfo", handle).busId)] = handle
            except nvml.NVMLError as problem:
                problems.append(problem)
        return handles, problems

    def _register_events(self, ask: Ask, cards: dict[str, Card]) -> None:
        try:
            if self._events is not None:
                self._drop_events(ask)
            self._events = ask("nvmlEventSetCreate")
        except nvml.NVMLError as problem:
            for card in cards.values():
                card.no_xid = str(problem)
            return
        for card in cards.values():
            if card.handle is None:
                continue
            try:
                ask("nvmlDeviceRegisterEvents", card.handle, nvml.nvmlEventTypeXidCriticalError, self._events)
                card.no_xid = None
            except nvml.NVMLError as problem:
                card.no_xid = str(problem)

    def _collect_events(self, ask: Ask) -> None:
        if self._events is None:
            return
        by_handle = {_pointer(card.handle): address for address, card in self.cards.items() if card.handle}
        try:
            for _ in range(EVENT_LIMIT):
                event = ask("nvmlEventSetWait_v2", self._events, 0)
                self.xids.append((monotonic(), by_handle.get(_pointer(event.device)), event.eventData))
        except nvml.NVMLError as problem:
            if problem.value != nvml.NVML_ERROR_TIMEOUT:
                self._drop_events(ask)  # a lost card ends the whole set; the next inventory makes another

    def _drop_events(self, ask: Ask) -> None:
        events, self._events = self._events, None
        try:
            ask("nvmlEventSetFree", events)
        except nvml.NVMLError:
            pass  # it is given up either way

    def _explain(self, problem: Any, ask: Ask) -> str:
        if problem.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return "libnvidia-ml.so.1 is not found or cannot be loaded: is the NVIDIA driver installed?"
        if problem.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
            return "the nvidia kernel driver is not loaded"
        if problem.value == nvml.NVML_ERROR_NO_PERMISSION:
            return f"no permission to use the NVIDIA driver ({problem})"
        if problem.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            loaded, library = self._loaded_version(), self._library_version(ask)
            return (
                f"driver/library version mismatch: the loaded kernel module is {loaded}, the NVML library "
                f"is {library}; reload the module or reboot"
            )
        return f"NVML: {problem}"

    def _loaded_version(self) -> str:
        try:
            with open(f"{self.proc}/driver/nvidia/version", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                words = file.readline().split()
        except OSError:
            return "of an unknown version"
        numbered = (word for word in words if word[0].isdigit() and "." in word)
        return next(numbered, "of an unknown version")

    def _library_version(self, ask: Ask) -> str:
        try:
            return str(ask("nvmlSystemGetNVMLVersion"))
        except nvml.NVMLError:
            return "of an unknown version"


def kernel_address(bus_id: bytes | str) -> str:
    """NVML's ``00000000:41:00.0`` as the kernel writes it: ``0000:41:00.0``, lower case."""
    text = bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def _pointer(handle: Any) -> int | None:
    return cast(handle, c_void_p).value
