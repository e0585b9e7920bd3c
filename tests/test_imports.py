"""What a command imports: nothing that only the screen needs, and little enough to start at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.transport.demo import running_box

TREE = Path(__file__).parents[1]

#: Runs a command, then prints its exit status and what it imported.
IMPORTED = """
import json, sys, io
from console.cli import run
said, sys.stdout = sys.stdout, io.StringIO()
code = run(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]), file=said)
"""

FOR_THE_SCREEN = ("textual", "rich", "plotext", "console.ui", "console.simulator")


@pytest.fixture(scope="module")
def box() -> Iterator[Path]:
    with running_box(None, []) as running:
        yield running.site


def imported(*arguments: str) -> tuple[int, set[str]]:
    """The exit status of a command, and every module it imported."""
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTED, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=TREE,
        timeout=30,
    )
    code, modules = json.loads(ended.stdout)
    return code, set(modules)


@pytest.mark.parametrize(
    "arguments",
    [
        "status --json",
        "status",
        "doctor",
        "budget",
        "budget qwen3.5-397b-nvfp4 --json",
        "config validate",
        "config path",
        "profile list",
        "profile show kimi-k2.5-int4",
        "jobs list",
    ],
)
def test_a_command_never_imports_what_only_the_screen_needs(box: Path, arguments: str) -> None:
    code, modules = imported("--site", str(box), *arguments.split())
    assert code == 0
    assert "console.sources.files.sites" in modules
    found = [name for name in modules if name.startswith(FOR_THE_SCREEN)]
    assert found == []


def test_files_alone_need_no_network_and_no_event_loop(box: Path) -> None:
    _, modules = imported("--site", str(box), "profile", "list")
    assert modules.isdisjoint({"asyncio", "httpx", "prometheus_client"})


def test_help_reads_no_file() -> None:
    _, modules = imported("--help")
    assert modules.isdisjoint({"asyncio", "msgspec", "yaml", "httpx"})
