"""How long a command takes on a host whose engine is well: pytest -m bench tests/test_startup.py."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.transport.demo import running_box

pytestmark = pytest.mark.bench

TREE = Path(__file__).parents[1]
RUNS = 9


@pytest.fixture(scope="module")
def box() -> Iterator[Path]:
    with running_box(None, []) as running:
        yield running.site


def median_seconds(*arguments: str) -> float:
    """The median wall time of a command, its interpreter included."""
    command = [sys.executable, "-m", "console", *arguments]
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=TREE, env=os.environ)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def test_status_takes_a_quarter_of_a_second(box: Path) -> None:
    assert median_seconds("status", "--json", "--site", str(box)) <= 0.25


def test_the_version_takes_no_time() -> None:
    assert median_seconds("--version") <= 0.08
