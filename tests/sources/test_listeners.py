"""Who listens on a port, from sockets that are really there and from a container's /proc as the host shows it."""

# ruff: noqa: E501  a row of the kernel's table is as long as it is

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from console.sources.listeners import listeners

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
V2 = "0::/lxc/129/ns/system.slice/sglang.service\n"
OTHER = "0::/lxc/129/ns/system.slice/nginx.service\n"


def row(port: int, inode: int, state: str = "0A", address: str = "00000000") -> str:
    return f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0000000000000000 100 0 0 10 0\n"


def process(root: Path, pid: int, cgroup: str, *, tcp: str = "", inode: int | None = None) -> None:
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "net").mkdir()
    (folder / "net/tcp").write_text(HEAD + tcp)
    (folder / "cgroup").write_text(cgroup)
    (folder / "cmdline").write_bytes(f"program-{pid}\0--port\x1b[31m\0".encode())
    if inode is not None:
        (folder / "fd/7").symlink_to(f"socket:[{inode}]")


def asked(root: Path, port: int = 30000) -> list[tuple[int | None, bool]]:
    found = listeners(root, port, container=129, unit="sglang.service")
    return [(one.pid, one.own) for one in found]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_socket_of_this_process_is_found_with_its_owner(family: socket.AddressFamily) -> None:
    with socket.socket(family) as listening:
        listening.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert listeners(Path("/"), port, container=None, unit="x.service") == ()
        listening.listen()
        (found,) = listeners(Path("/"), port, container=None, unit="x.service")
    assert (found.pid, found.own) == (os.getpid(), False)
    assert "python" in found.name


def test_the_units_own_process_owns_the_port(tmp_path: Path) -> None:
    table = row(30000, 501)
    process(tmp_path, 40, V2, tcp=table)
    process(tmp_path, 41, V2, tcp=table, inode=501)
    assert asked(tmp_path) == [(41, True)]


def test_a_stranger_of_the_same_container_is_named_and_safe_to_print(tmp_path: Path) -> None:
    process(tmp_path, 40, OTHER, tcp=row(30000, 501), inode=501)
    (found,) = listeners(tmp_path, 30000, container=129, unit="sglang.service")
    assert (found.pid, found.unit, found.own) == (40, "nginx.service", False)
    assert found.name == "program-40 --port"


def test_the_same_port_elsewhere_is_nobodys_business_here(tmp_path: Path) -> None:
    """Another container has a network of its own; so has the host."""
    process(tmp_path, 40, "0::/lxc/131/ns/system.slice/nginx.service\n", tcp=row(30000, 501), inode=501)
    process(tmp_path, 41, "0::/system.slice/nginx.service\n", tcp=row(30000, 502), inode=502)
    process(tmp_path, 42, V2, tcp=row(30001, 503), inode=503)
    assert asked(tmp_path) == []


def test_a_connection_is_no_listener(tmp_path: Path) -> None:
    process(tmp_path, 41, V2, tcp=row(30000, 501, state="01"), inode=501)
    assert asked(tmp_path) == []


def test_a_socket_whose_owner_cannot_be_seen_is_a_strangers(tmp_path: Path) -> None:
    process(tmp_path, 41, V2, tcp=row(30000, 501))
    assert asked(tmp_path) == [(None, False)]


def test_without_proc_nobody_listens(tmp_path: Path) -> None:
    assert asked(tmp_path) == []
