"""The console beside nvitop on the same cards: alternately, each alone on a terminal of its own."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tests.bench.pty_probe import Probe, Window
from tests.bench.stage import Stage, program, stage

#: Starts a round beside the one that is measured further: a start alone varies more than the rest.
EXTRA_STARTS = 3

#: Seconds within which a program must show everything, and that it then has to settle.
START_S, SETTLE_S = 15.0, 5.0

#: How often ``gpuops status --json`` is run.
LOOKS = 7

#: The power of a card in its row, as the console and as nvitop write it: 350/600W, 350W / 600W.
_POWER = re.compile(r"\d+(?:/|W / )600W")


class Measured(NamedTuple):
    """One program: seconds to its first card row with a number and to all that it shows, and its windows."""

    first_paint: tuple[float, ...]
    complete: tuple[float, ...]
    windows: tuple[Window, ...]


class Row(NamedTuple):
    """One line of the table; ``budgets`` in words, ``over`` is the worst of value / budget."""

    name: str
    unit: str
    console: float
    nvitop: float | None
    limit: float | None  # of the console's value
    ratio_limit: float | None  # of the console's value to nvitop's

    @property
    def ratio(self) -> float | None:
        return self.console / self.nvitop if self.nvitop else None

    @property
    def over(self) -> float | None:
        """The budget's share that is used, 1.0 all of it; the worst, where there are two. None: no budget."""
        shares = [self.console / self.limit] if self.limit else []
        if self.ratio_limit and self.ratio is not None:
            shares.append(self.ratio / self.ratio_limit)
        return max(shares, default=None)


def compare(window: float, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Run all of it; ``window`` in seconds is that of one program in one round. ``say`` gets the progress."""
    with tempfile.TemporaryDirectory(prefix="gpuops-bench-") as directory, stage(Path(directory)) as scene:
        programs = {
            "gpuops": ([program("gpuops"), "--site", str(scene.site)], _console_complete),
            "nvitop": ([program("nvitop"), "-m", "full"], _eight_cards),
        }
        found: dict[str, list[Measured]] = {name: [] for name in programs}
        for number in range(rounds):
            for name, (argv, complete) in programs.items():
                say(f"round {number + 1} of {rounds}: {name}")
                found[name].append(_measure(argv, scene, complete, window))
        say("gpuops status --json")
        looks = [_look(scene) for _ in range(LOOKS)]
    return list(_rows(_joined(found["gpuops"]), _joined(found["nvitop"]), looks))


def _eight_cards(text: str) -> bool:
    return len(_POWER.findall(text)) == 8


def _console_complete(text: str) -> bool:
    return _eight_cards(text) and "READY" in text


def _measure(argv: list[str], scene: Stage, complete: Callable[[str], bool], window: float) -> Measured:
    first, whole, windows = [], [], []
    for last in (*[False] * EXTRA_STARTS, True):
        with Probe(argv, scene.variables) as probe:
            probe.watch_until(complete, START_S)
            first.append(probe.painted(_POWER.search))
            whole.append(probe.painted(complete))
            if last:
                probe.watch(SETTLE_S)
                windows.append(probe.measure(window))
    return Measured(tuple(first), tuple(whole), tuple(windows))


def _look(scene: Stage) -> float:
    """Seconds of one ``gpuops status --json``, which must find the service well."""
    argv = [program("gpuops"), "status", "--json", "--site", str(scene.site)]
    began = time.monotonic()
    subprocess.run(argv, env=os.environ | scene.variables, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


def _joined(parts: list[Measured]) -> Measured:
    return Measured(
        tuple(value for part in parts for value in part.first_paint),
        tuple(value for part in parts for value in part.complete),
        tuple(value for part in parts for value in part.windows),
    )


def _rows(console: Measured, nvitop: Measured, looks: list[float]) -> Iterable[Row]:
    def pair(of: Callable[[Window], float]) -> tuple[float, float]:
        return statistics.mean(map(of, console.windows)), statistics.mean(map(of, nvitop.windows))

    first = statistics.median(console.first_paint), statistics.median(nvitop.first_paint)
    complete = statistics.median(console.complete), statistics.median(nvitop.complete)
    yield Row("first card row with a number", "s", *first, 0.6, 3.0)
    yield Row("all cards, and the service's state", "s", *complete, None, None)
    yield Row("CPU of one core", "%", *pair(lambda window: window.cpu_percent), None, 1.5)
    yield Row("written to the terminal", "KB/s", *pair(lambda window: window.bytes_per_s / 1e3), 2.5, None)
    yield Row("resident memory", "MB", *pair(lambda window: window.memory.resident / 1e6), 80.0, None)
    yield Row(
        "shared pages counted once", "MB", *pair(lambda window: window.memory.proportional / 1e6), None, None
    )
    yield Row("gpuops status --json", "s", statistics.median(looks), None, 0.25, None)


def table(rows: list[Row]) -> str:
    """For people: one line a row, with what was measured, the budget, and whether it is kept."""
    lines = [f"{'':36} {'gpuops':>8} {'nvitop':>8} {'ratio':>6}  budget"]
    for row in rows:
        nvitop = "" if row.nvitop is None else f"{row.nvitop:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        name = f"{row.name} ({row.unit})"
        lines.append(f"{name:36} {row.console:8.2f} {nvitop:>8} {ratio:>6}  {_budget(row)}".rstrip())
    return "\n".join(lines)


def _budget(row: Row) -> str:
    if row.over is None:
        return ""
    words = [f"{row.limit:g} {row.unit}"] if row.limit else []
    words += [f"{row.ratio_limit:g} x nvitop"] if row.ratio_limit else []
    return f"{' and '.join(words)}: {'kept' if row.over <= 1 else f'MISSED, {row.over:.2f} of it'}"


def document(rows: list[Row]) -> list[dict[str, object]]:
    """For machines."""
    return [row._asdict() | {"ratio": row.ratio, "over": row.over} for row in rows]
