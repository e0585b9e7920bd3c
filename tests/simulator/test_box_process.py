"""The box as a process: ready quickly, alone in its directory, gone without a trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from console.model.site import Simulated
from console.simulator import memory
from console.simulator.tree import Tree
from console.sources.files.sites import load_site


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "console.simulator", "--dir", str(directory), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    process.send_signal(number)
    return process.wait(timeout=5)


def test_prints_its_site_file_and_nothing_else_and_leaves_no_socket_and_no_port(tmp_path: Path) -> None:
    began = time.monotonic()
    process = start(tmp_path / "box", "--nvml", "library")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert time.monotonic() - began < 5  # measured 0.2 to 0.3 s; the machine may be busy
        site = load_site(Path(line.rstrip("\n")))
        assert site.host == "pve1"
        assert (site.container.kind, site.container.id) == ("lxc", 129)
        assert site.vm is not None and site.vm.id == 100
        assert site.simulated == Simulated(str(tmp_path / "box"), "library")
        port = int(site.service.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            pass
    finally:
        status = end(process)
    assert status == 0
    out, err = process.communicate()
    assert (out, err) == ("", "")
    assert [path.name for path in (tmp_path / "box").iterdir()] == ["site.yaml"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_a_second_box_in_the_same_directory_is_refused_and_the_first_lives_on(tmp_path: Path) -> None:
    first = start(tmp_path)
    try:
        assert first.stdout is not None
        first.stdout.readline()
        second = start(tmp_path)
        out, err = second.communicate(timeout=10)
        assert second.returncode == 2
        assert out == ""
        assert err == f"gpuops: a simulated box already runs in {tmp_path}\n"
        assert (tmp_path / "root/sys/bus/pci/devices/0000:01:00.0/vendor").exists()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "box.sock"))
    finally:
        end(first, signal.SIGINT)


def test_what_a_killed_box_left_behind_is_no_obstacle_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = start(tmp_path)
    assert killed.stdout is not None
    killed.stdout.readline()
    left = (tmp_path / "root").resolve()
    end(killed, signal.SIGKILL)
    assert (tmp_path / "box.sock").exists() and left.exists()
    again = start(tmp_path)
    try:
        assert again.stdout is not None
        assert again.stdout.readline() == f"{tmp_path}/site.yaml\n"
    finally:
        assert end(again) == 0
    monkeypatch.setattr(memory, "_YOUNG_S", -1.0)
    monkeypatch.setattr(memory, "_PREFIX", left.name)  # and nobody else's
    taken = memory.take()
    if taken is not None:
        taken.remove()
    assert not left.exists()


def test_without_memory_to_write_to_the_tree_lies_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "none")
    tree = Tree(tmp_path / "box/root", 0.0)
    tree.create()
    assert not (tmp_path / "box/root").is_symlink()
    assert (tmp_path / "box/root/sys/bus/pci/devices/0000:e1:00.1/vendor").read_text() == "0x10de\n"
    tree.remove()
    assert not (tmp_path / "box/root").exists()


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        process = start(tmp_path, "--port", str(port))
        _, err = process.communicate(timeout=10)
    assert process.returncode == 2
    assert str(port) in err


@pytest.mark.parametrize("words", [("--fault", "no-such"), ("--speed", "0"), ("--nvml", "none")])
def test_a_wrong_command_line_is_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    process = start(tmp_path, *words)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 2
    assert words[1] in err or "speed" in err


def test_a_directory_with_a_very_long_name_will_do(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    process = start(directory)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{directory}/site.yaml\n"
        assert (directory / "box.sock").is_socket()
    finally:
        end(process)


def test_imports_nothing_of_the_screen_nor_other_parts_of_the_console() -> None:
    program = (
        "import sys, console.simulator.box, console.simulator.__main__\n"
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in "
        "('textual', 'rich', 'httpx', 'yaml', 'plotext', 'prometheus_client', 'click') or "
        "name.startswith('console.') and not name.startswith(('console.simulator', 'console.model'))))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert shown.stdout.strip() == ""
