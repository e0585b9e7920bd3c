"""What the measured programs look at: eight moving cards behind an NVML library, and a box that serves."""

from __future__ import annotations

import contextlib
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from console.sources.files.sites import load_site
from console.transport.demo import running_box
from tests.rigs.nvml.build import build

#: Seconds within which the box's engine must answer.
HEALTHY_DEADLINE = 30.0


class Stage(NamedTuple):
    """``variables`` make a program load the library; ``url`` is where the engine answers."""

    site: Path
    url: str
    variables: dict[str, str]


@contextlib.contextmanager
def stage(directory: Path) -> Iterator[Stage]:
    """The cards and the box, both below ``directory``, while the context is open; the engine is healthy."""
    library = build(directory / "nvml")
    with running_box(directory / "box", ("--nvml", "library")) as box:
        addresses = sorted(path.name for path in (directory / "box/root/proc/driver/nvidia/gpus").iterdir())
        url = load_site(box.site).service.url
        _wait_until_healthy(url)
        variables = {"LD_LIBRARY_PATH": str(library.parent), "STUB_ADDRESSES": ",".join(addresses)}
        yield Stage(box.site, url, variables)


def _wait_until_healthy(url: str) -> None:
    until = time.monotonic() + HEALTHY_DEADLINE
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        assert time.monotonic() < until, f"the box's engine did not answer within {HEALTHY_DEADLINE:g} s"
        time.sleep(0.2)


def program(name: str) -> str:
    """A command of this Python's environment: gpuops, nvitop."""
    return str(Path(sysconfig.get_path("scripts")) / name)
