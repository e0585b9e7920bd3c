"""What NVML says of the cards, through a process of its own that may die, hang or babble without harm."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from console.model.card import Address, CardProcess, CardTelemetry, NvmlSample, Xid
from console.model.reading import Reading
from console.model.text import clean
from console.transport.runner import Runner

#: The process counts as hung when it has said nothing we understand for this many periods.
SILENT_PERIODS = 5

#: Seconds before the process is started again: 1, 2, 4 … up to the last.
FIRST_DELAY = 1.0
LAST_DELAY = 30.0

#: A process that read cards for this long starts the delays over.
STEADY_S = 10.0

#: Readings kept for a consumer that lags; older ones are dropped, since only the newest is true.
BACKLOG = 16

#: Xid errors remembered; a card in trouble can report without end.
XIDS_KEPT = 256


class Starting(msgspec.Struct, frozen=True, tag_field="kind", tag="starting"):
    """The driver is being initialised; without persistence mode that takes seconds per card."""

    at: float
    function: str
    seconds: float


class Hello(msgspec.Struct, frozen=True, tag_field="kind", tag="hello"):
    at: float
    pid: int
    driver_version: str | None = None
    nvml_version: str | None = None


class Cards(msgspec.Struct, frozen=True, tag_field="kind", tag="cards"):
    at: float
    cards: tuple[CardTelemetry, ...]
    trouble: str | None = None  # what the list may lack


class Processes(msgspec.Struct, frozen=True, tag_field="kind", tag="processes"):
    at: float
    processes: dict[Address, tuple[CardProcess, ...]]  # a card whose list is not known has no key


class XidError(msgspec.Struct, frozen=True, tag_field="kind", tag="xid"):
    at: float
    code: int
    address: Address | None = None


class Unavailable(msgspec.Struct, frozen=True, tag_field="kind", tag="unavailable"):
    at: float
    reason: str


Message = Starting | Hello | Cards | Processes | XidError | Unavailable

_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def decode(line: bytes) -> Message:
    """One line of the process. Raises ValueError, saying what is wrong with it."""
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, RecursionError) as problem:
        raise ValueError(str(problem)) from None


def fold(sample: NvmlSample, message: Message) -> NvmlSample:
    """The sample after this message; every text in it is safe to print."""
    change = msgspec.structs.replace
    match message:
        case Hello():
            versions = _clean(message.driver_version), _clean(message.nvml_version)
            return change(sample, driver_version=versions[0], nvml_version=versions[1])
        case Cards():
            cards = tuple(map(_clean_card, message.cards))
            there = {card.address for card in cards}
            processes = {address: found for address, found in sample.processes.items() if address in there}
            return change(sample, cards=cards, processes=processes)
        case Processes():
            lists = {clean(address): found for address, found in message.processes.items()}
            return change(sample, processes=lists, processes_at=message.at)
        case XidError():
            xid = Xid(_clean(message.address), message.code, message.at)
            return change(sample, xids=(*sample.xids, xid)[-XIDS_KEPT:])
    return sample


def _clean(text: str | None) -> str | None:
    return None if text is None else clean(text)


def _clean_card(card: CardTelemetry) -> CardTelemetry:
    reasons = card.throttle_reasons
    return msgspec.structs.replace(
        card,
        address=clean(card.address),
        name=_clean(card.name),
        uuid=_clean(card.uuid),
        throttle_reasons=None if reasons is None else tuple(map(clean, reasons)),
        missing={clean(field): clean(reason) for field, reason in card.missing.items()},
    )


def default_command(period: float = 1.0) -> list[str]:
    """How the NVML process is run on this host."""
    worker = Path(__file__).with_name("nvml_worker.py")
    found = importlib.util.find_spec("pynvml")
    library = str(Path(found.origin).parent) if found is not None and found.origin else ""
    options = {
        "--period": f"{period:g}",
        "--processes-period": f"{5 * period:g}",
        "--deadline": f"{3 * period:g}",
        "--site-packages": library,
    }
    return [sys.executable, "-I", "-S", str(worker), *(word for pair in options.items() for word in pair)]


class NvmlSource:
    """Watches the NVML process, and starts it again when it dies or falls silent.

    The process holds ``/dev/nvidia*``: ``pause`` or ``close`` ends it before a card is unbound.
    """

    name = "nvml"

    def __init__(
        self,
        runner: Runner,
        period: float = 1.0,
        command: Sequence[str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.period = period
        self.deadline = SILENT_PERIODS * period
        self._runner = runner
        self._command = list(command) if command is not None else default_command(period)
        self._clock = clock
        self._sleep = sleep
        self._readings: asyncio.Queue[Reading[NvmlSample] | None] = asyncio.Queue(BACKLOG)
        self._reading: Reading[NvmlSample] = Reading(self.name, period)
        self._sample = NvmlSample()
        self._keeper: asyncio.Task[None] | None = None
        self._reading_since: float | None = None  # first cards of the process that runs now
        self._paused = False
        self._closed = False

    async def watch(self) -> AsyncIterator[Reading[NvmlSample]]:
        """A reading for every message about the cards, and one for every failure; ends after ``close``."""
        if not self._paused:
            self._start()
        try:
            while not self._closed:
                reading = await self._readings.get()
                if reading is None:
                    return
                yield reading
        finally:
            await self._end_process()

    async def pause(self, reason: str = "paused") -> None:
        """End the process; returns once it is gone. Readings keep their last value and say ``reason``."""
        self._paused = True
        await self._end_process()
        self._fail(reason)

    def resume(self) -> None:
        """Start the process again after ``pause``."""
        if self._paused:
            self._paused = False
            self._start()

    async def close(self) -> None:
        """End the process for good; returns once it is gone."""
        self._closed = True
        await self._end_process()
        self._put(None)

    def _start(self) -> None:
        if self._keeper is None and not self._closed:
            self._keeper = asyncio.create_task(self._keep_running(), name="nvml")

    async def _end_process(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})

    async def _keep_running(self) -> None:
        delay = FIRST_DELAY
        while True:
            self._reading_since = None
            try:
                reason = await self._follow()
            except Exception as defect:  # noqa: BLE001  a defect in a source is shown, and costs that source only
                reason = f"defect in source {self.name}: {type(defect).__name__}: {defect}"
            if self._reading_since is not None and self._clock() - self._reading_since >= STEADY_S:
                delay = FIRST_DELAY
            self._fail(reason)
            await self._sleep(delay)
            delay = min(2 * delay, LAST_DELAY)

    async def _follow(self) -> str:
        """Run the process until it ends or must be ended; says why, in words."""
        malformed = _Malformed()
        silence = f"the NVML process said nothing for {self.deadline:g} s"
        async with self._runner.stream(self._command) as stream:
            lines = aiter(stream.lines())
            heard = self._clock()
            while True:
                try:
                    async with asyncio.timeout(max(0.0, heard + self.deadline - self._clock())):
                        line = await anext(lines)
                except StopAsyncIteration:
                    reason = clean(stream.reason or "no reason known")
                    return malformed.after(f"the NVML process ended: {reason}")
                except TimeoutError:
                    return malformed.after(silence)
                try:
                    message = decode(line)
                except ValueError as problem:
                    malformed.add(line, str(problem))
                    if self._clock() - heard > self.deadline:
                        return malformed.after(silence)
                    continue
                heard = self._clock()
                if isinstance(message, Unavailable):
                    return malformed.after(clean(message.reason))
                self._take(message, malformed)

    def _take(self, message: Message, malformed: _Malformed) -> None:
        self._sample = fold(self._sample, message)
        if isinstance(message, Starting):
            self._fail(f"NVML is starting: {clean(message.function)}, {message.seconds:.0f} s so far")
        if not isinstance(message, Cards):
            return
        now = self._clock()
        if self._reading_since is None:
            self._reading_since = now
        trouble = malformed.after(clean(message.trouble or "")) or None
        malformed.clear()
        at = min(message.at, now)
        self._publish(Reading(self.name, self.period, self._sample, at, trouble))

    def _fail(self, reason: str) -> None:
        self._publish(self._reading.failed(reason))

    def _publish(self, reading: Reading[NvmlSample]) -> None:
        self._reading = reading
        self._put(reading)

    def _put(self, reading: Reading[NvmlSample] | None) -> None:
        if self._readings.full():
            self._readings.get_nowait()
        self._readings.put_nowait(reading)


class _Malformed:
    """Lines that could not be read since the last reading."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.last = ""

    def add(self, line: bytes, problem: str) -> None:
        self.count += 1
        beginning = clean(line[:60].decode("utf-8", "replace"))
        self.last = f"{beginning!r}: {clean(problem)}"

    def after(self, reason: str) -> str:
        """The reason, followed by these lines if there are any."""
        if not self.count:
            return reason
        plural = "line" if self.count == 1 else "lines"
        lines = f"{self.count} malformed {plural} from the NVML process, the last {self.last}"
        return f"{reason}; {lines}" if reason else lines
