"""The console against a journal that never rests: whether its memory stays flat."""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.bench.pty_probe import Memory, Probe
from tests.bench.stage import program, stage

LINES_PER_S = 2000

#: Seconds between two looks at the memory.
EVERY_S = 10.0

#: Seconds that do not count: until the journal's lines and the charts' points that are kept are all there.
WARM_UP_S = 60.0

#: Growth that counts as flat, in MB a minute.
FLAT_MB_PER_MIN = 0.3

_FLOOD = Path(__file__).with_name("flood.py")
_TALLY = "tally"

#: What systemctl says of a service that has run for an hour.
_UNIT = """\
Id=sglang.service
LoadState=loaded
ActiveState=active
SubState=running
Result=success
NRestarts=0
MainPID=1449
ExecMainStartTimestamp=@{since}
ActiveEnterTimestamp=@{since}
InvocationID=3f0d5b1f6f0f4bb1a4f9d5d0c2e4a6b8
UnitFileState=enabled
"""


class Sample(NamedTuple):
    """Of the console's own processes: seconds since the start, memory, CPU of one core since the last."""

    at: float
    memory: Memory
    cpu_percent: float


class Soaked(NamedTuple):
    """The samples, and what they say."""

    samples: list[Sample]
    lines_per_s: float  # that the console took in

    @property
    def slope(self) -> float:
        """Growth of resident memory after the warm-up, in MB a minute, by least squares."""
        counted = [sample for sample in self.samples if sample.at >= WARM_UP_S]
        times = [sample.at / 60 for sample in counted]
        return statistics.linear_regression(times, [sample.memory.resident / 1e6 for sample in counted]).slope

    @property
    def cpu_percent(self) -> float:
        return statistics.mean(sample.cpu_percent for sample in self.samples)

    @property
    def flat(self) -> bool:
        return self.slope <= FLAT_MB_PER_MIN


def soak(minutes: float, say: Callable[[Sample], None]) -> Soaked:
    """Run it; ``say`` gets each sample as it is taken."""
    with tempfile.TemporaryDirectory(prefix="gpuops-soak-") as name, stage(Path(name)) as scene:
        directory = Path(name)
        site = directory / "site.yaml"
        site.write_text(
            f"schema: 1\nhost: soak\ncontainer: {{kind: none}}\nservice: {{url: '{scene.url}'}}\n"
        )
        path = f"{_commands(directory)}:/usr/local/bin:/usr/bin:/bin"
        began = time.monotonic()
        with Probe(
            [program("gpuops"), "--site", str(site)],
            scene.variables | {"PATH": path},
            counted=lambda command: _FLOOD.name not in command,
        ) as probe:
            samples = _samples(probe, minutes * 60, say)
            lines = int((directory / _TALLY).read_text())
            return Soaked(samples, lines / (time.monotonic() - began))


def _samples(probe: Probe, seconds: float, say: Callable[[Sample], None]) -> list[Sample]:
    samples: list[Sample] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        window = probe.measure(EVERY_S)
        samples.append(Sample(time.monotonic() - began, window.memory, window.cpu_percent))
        say(samples[-1])
    return samples


def _commands(directory: Path) -> Path:
    """A directory with a journalctl that floods and a systemctl whose service runs."""
    commands = directory / "bin"
    commands.mkdir()
    unit = directory / "unit.txt"
    unit.write_text(_UNIT.format(since=int(time.time()) - 3600))
    flood = shlex.join([sys.executable, "-I", str(_FLOOD), str(LINES_PER_S), str(directory / _TALLY)])
    for name, command in (("journalctl", f"exec {flood}"), ("systemctl", f"exec cat {unit}")):
        script = commands / name
        script.write_text(f"#!/bin/sh\n{command}\n")
        script.chmod(0o755)
    return commands
