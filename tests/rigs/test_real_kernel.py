"""Cards moved on a real kernel: out and back, killed at every write, busy, failing, hanging, left over.

One boot for all cases; each is told here as a test of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.kernel import cases, rig
from tests.rigs.kernel.install import install

pytestmark = pytest.mark.rig


@pytest.fixture(scope="module")
def boot(tmp_path_factory: pytest.TempPathFactory) -> rig.Run:
    return rig.run(install(), Path(tmp_path_factory.mktemp("kernel")))


@pytest.mark.parametrize("name", cases.names())
def test_on_a_real_kernel(boot: rig.Run, name: str) -> None:
    case = boot.cases.get(name)
    assert case is not None, f"the guest ended before it:\n{boot.console}"
    assert case.passed, case.text
