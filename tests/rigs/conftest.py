"""What the rigs install, once per run, and the machine that most of them need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.sglang import install as sglang
from tests.rigs.systemd import rootfs
from tests.rigs.systemd.machine import Machine


@pytest.fixture(scope="session")
def sglang_installation() -> sglang.Installation:
    return sglang.install()


@pytest.fixture(scope="session")
def debian_root() -> Path:
    return rootfs.install()


@pytest.fixture(scope="module")
def machine(debian_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A freshly booted machine, alone in its network."""
    machine = Machine(debian_root, tmp_path_factory.mktemp("machine") / "scratch")
    try:
        machine.start()
        yield machine
    finally:
        machine.stop()
