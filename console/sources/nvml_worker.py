"""The process that talks to NVML, so that a call that never returns costs the console nothing.

Run as ``python -I -S nvml_worker.py --period S --processes-period S --deadline S --site-packages DIR``;
it imports only the standard library, its two parts beside it, and ``pynvml`` from DIR. On stdout it
speaks JSON lines: ``starting``, ``hello``, ``cards``, ``processes``, ``xid``, ``unavailable`` (then exit
status 3). ``at`` is in seconds on the monotonic clock; field names are those of ``CardTelemetry``.

Cards are read one after another by a reader thread. When a card does not answer, its
reader is left behind with it and another one reads on; the card comes back when its call returns.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections import deque
from json import dumps
from time import monotonic

TYPE_CHECKING = False  # importing typing itself would cost a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from console.sources.nvml_cards import Chore, Driver

EXIT_UNAVAILABLE = 3

#: Without persistence mode the driver initialises every card anew: seconds each.
START_DEADLINE = 60.0

#: Periods between looks at which cards there are.
INVENTORY_PERIODS = 10

#: Share of a period after which the other cards no longer wait for one.
PATIENCE = 0.25

#: Seconds for nvmlShutdown, and until the kernel ends us whatever we do.
SHUTDOWN_GRACE = 0.25
LAST_RESORT = 0.8

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Reader(threading.Thread):
    """Does chores one after another; left behind when one of them keeps it waiting."""

    def __init__(self, library: object, chores: deque[Chore], wake: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.library = library
        self.chores = chores
        self.function = "the first call"
        self.called_at = self.chore_at = monotonic()
        self.left_behind = False
        self.finished = False
        self._wake = wake

    def run(self) -> None:
        while not self.left_behind:
            try:
                chore = self.chores.popleft()
            except IndexError:
                break
            self.chore_at = monotonic()
            chore.held = self
            try:
                chore.run(self.ask)
                chore.defect = None
            except Exception as defect:  # noqa: BLE001  told as the card's or the driver's reason
                chore.defect = f"defect in {self.function}: {type(defect).__name__}: {defect}"
            chore.held = None
        self.finished = True
        self._wake()

    def ask(self, function: str, *arguments: object) -> Any:
        self.function = function
        self.called_at = monotonic()
        return getattr(self.library, function)(*arguments)


class Ended(BaseException):
    """A signal came, or nobody listens any more."""


class Unavailable(Exception):
    """There is nothing to read; the message says why."""


class Worker:
    """Says on an even beat what the readers brought. Times are in seconds."""

    def __init__(
        self, library: object, driver: Driver, period: float, processes_period: float, deadline: float
    ) -> None:
        self.library = library
        self.driver = driver
        self.period = period
        self.processes_period = processes_period
        self.deadline = deadline
        self.chores: deque[Chore] = deque()
        self.reader: Reader | None = None
        self._turn = 0
        self._processes_due = 0.0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._poll.register(1, 0)  # POLLERR: whoever read our output is gone

    def run(self) -> None:
        self._start()
        beat = monotonic()
        while True:
            asked = self._begin_round(beat)
            self._finish_round(beat + self.period)
            self._report(asked)
            beat = max(beat + self.period, monotonic())
            while (rest := beat - monotonic()) > 0:
                self._wait(rest)

    def _start(self) -> None:
        began = monotonic()
        self.chores.append(self.driver)
        self.reader = self._new_reader()
        while not self.reader.finished:
            self._wait(self.period)
            if self.reader.finished:
                break
            waited = monotonic() - began
            if waited > max(START_DEADLINE, self.deadline):
                raise Unavailable(f"{self.reader.function} has not returned for {waited:.0f} s")
            if waited >= self.period:
                self._say_starting(self.reader)
        self._check_driver()
        assert self.driver.hello is not None
        self._say("hello", None, **self.driver.hello)

    def _say_starting(self, reader: Reader) -> None:
        self._say("starting", function=reader.function, seconds=round(monotonic() - reader.called_at, 1))

    def _new_reader(self) -> Reader:
        reader = Reader(self.library, self.chores, self._wake)
        reader.start()
        return reader

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b".")
        except BlockingIOError:
            pass  # full: the main thread will wake anyway

    def _wait(self, seconds: float) -> None:
        for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000):
            if descriptor != self._wake_read:
                raise Ended
            os.read(self._wake_read, 4096)

    def _begin_round(self, now: float) -> bool:
        """Queue what is free. True when process lists are due, too."""
        processes = now >= self._processes_due
        if processes:
            self._processes_due = now + self.processes_period
        cards = [card for card in self.driver.cards.values() if card.handle is not None]
        if self.driver.reopening:
            cards = []
        self._turn += 1
        for index, card in enumerate(cards):
            if card.held is not None or card in self.chores:
                continue
            card.wants_processes = processes
            card.wants_throughput = index == self._turn % len(cards)
            self.chores.append(card)
        if self.driver.held is None and self.driver not in self.chores:
            self.chores.append(self.driver)
        return processes

    def _finish_round(self, until: float) -> None:
        patience = self.period * PATIENCE
        while True:
            if self.reader is None or self.reader.finished:
                if not self.chores:
                    return
                self.reader = self._new_reader()
            now = monotonic()
            give_up = self.reader.chore_at + patience
            if now >= until:
                return
            if now >= give_up:
                self.reader.left_behind = True
                self.reader = self._new_reader() if self.chores else None
                continue
            self._wait(min(until, give_up) - now)

    def _report(self, processes: bool) -> None:
        self._check_driver()
        if self.driver.reopening and self.driver.held is not None:
            self._say_starting(self.driver.held)
            return
        cards = [card for card in self.driver.cards.values() if card.worth_telling(self.deadline)]
        while self.driver.xids:
            at, address, code = self.driver.xids.popleft()
            self._say("xid", at, address=address, code=code)
        if processes:
            answering = [card for card in cards if card.obstacle(self.deadline) is None]
            known = {card.address: card.processes for card in answering if card.processes is not None}
            self._say("processes", processes=known)
        trouble = self.driver.obstacle(self.deadline)
        trouble = f"{trouble}; new cards and Xid errors are not seen" if trouble else self.driver.trouble
        self._say("cards", cards=[card.message(self.deadline) for card in cards], trouble=trouble)

    def _check_driver(self) -> None:
        failure = self.driver.failure or (self.driver.defect if self.driver.hello is None else None)
        if failure:
            raise Unavailable(failure)

    def _say(self, kind: str, at: float | None = None, **fields: object) -> None:
        say({"kind": kind, "at": monotonic() if at is None else at, **fields})


def say(message: dict[str, object]) -> None:
    data = dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        raise Ended from None


def end(status: int) -> None:
    """Let go of the device files and exit at once, though a thread may be stuck in a call."""
    arm_last_resort()
    library = sys.modules.get("pynvml")
    if library is not None:
        closing = threading.Thread(target=_shutdown, args=(library,), daemon=True)
        closing.start()
        closing.join(SHUTDOWN_GRACE)
    os._exit(status)


def _shutdown(library: Any) -> None:
    try:
        library.nvmlShutdown()
    except library.NVMLError:
        pass  # never initialised, or past caring: the exit closes the files


def arm_last_resort() -> None:
    """From here on nothing interrupts the end, and the kernel brings it about if we do not."""
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, LAST_RESORT)  # SIGALRM is not caught: it ends us


def on_signal(number: int, frame: object) -> None:
    arm_last_resort()
    raise Ended


def watch(options: dict[str, str]) -> None:
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    for folder in (package, options["--site-packages"]):
        if os.path.isabs(folder):  # noqa: PTH117  never the current folder, whoever may write there
            sys.path.append(folder)
    try:
        import pynvml

        from console.sources.nvml_cards import Driver
    except ImportError as problem:
        raise Unavailable(f"pynvml (the package nvidia-ml-py) cannot be imported: {problem}") from None
    period, processes_period, deadline = (
        float(options[name]) for name in ("--period", "--processes-period", "--deadline")
    )
    driver = Driver(options.get("--proc", "/proc"), INVENTORY_PERIODS * period)
    Worker(pynvml, driver, period, processes_period, deadline).run()


def main(arguments: list[str]) -> None:
    for number in END_SIGNALS:
        signal.signal(number, on_signal)
    status = 0
    try:
        watch(dict(zip(arguments[::2], arguments[1::2], strict=True)))
    except Unavailable as problem:
        status = EXIT_UNAVAILABLE
        try:
            say({"kind": "unavailable", "at": monotonic(), "reason": str(problem)})
        except Ended:
            pass
    except Ended:
        pass
    end(status)


if __name__ == "__main__":
    main(sys.argv[1:])
