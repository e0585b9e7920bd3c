"""What is found on a host that has no site file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from console.model.site import Container, Site, Vm
from console.sources.discovery import MACHINES, discover, listens
from console.sources.files import parse_site, site_template
from console.transport.runner import Result

GIVEN_CARDS = (
    "hostname: sglang\nnet0: name=eth0,bridge=vmbr0,ip={ip},type=veth\ndev0: /dev/nvidia0,mode=0666\n"
)


class Host:
    """A runner whose commands answer from a table by their last words."""

    name = "host"

    def __init__(self, root: Path, answers: dict[str, str] | None = None) -> None:
        self.root = root
        self.asked: list[tuple[str, ...]] = []
        self._answers = answers or {}

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        self.asked.append(tuple(argv))
        line = " ".join(argv)
        for words, answer in self._answers.items():
            if words in line:
                return Result(tuple(argv), 0, answer.encode(), b"")
        return Result(tuple(argv), None, b"", b"", "not found")

    def stream(self, argv: Sequence[str]) -> object:
        raise AssertionError("nothing here goes on")


def guest(root: Path, kind: str, id: int, content: str) -> None:
    path = root / "etc/pve" / kind / f"{id}.conf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


async def test_nothing_here_is_the_default_site(tmp_path: Path) -> None:
    found = await discover(Host(tmp_path))  # type: ignore[arg-type]
    assert found.site == Site()
    assert found.words == "neither a container with cards, nor a VM, nor a unit named *sglang*"


async def test_a_proxmox_host_with_container_and_vm(tmp_path: Path) -> None:
    guest(tmp_path, "lxc", 105, "hostname: mail\n")
    guest(tmp_path, "lxc", 129, GIVEN_CARDS.format(ip="192.168.7.29/24"))
    guest(tmp_path, "qemu-server", 100, "name: win\nhostpci0: 0000:41:00,pcie=1\n")
    guest(tmp_path, "qemu-server", 101, "name: desk\n")
    units = "sglang-old.service loaded inactive dead Old\nsglang-k2.service loaded active running K2\n"
    host = Host(tmp_path, {"list-units": units})
    found = await discover(host)  # type: ignore[arg-type]
    assert found.site.container == Container("lxc", 129)
    assert found.site.vm == Vm(100)
    assert found.site.service.unit == "sglang-k2.service"
    assert found.site.service.url == "http://192.168.7.29:30000"
    assert found.words == (
        "container 129 (sglang) is given cards; VM 100 (win) is given cards; "
        "unit sglang-k2.service (also sglang-old.service)"
    )
    assert host.asked[-1][:4] == ("lxc-attach", "-n", "129", "--")
    assert parse_site(site_template(found.site), "site.yaml") == found.site


async def test_a_leased_address_is_asked_for(tmp_path: Path) -> None:
    guest(tmp_path, "lxc", 129, GIVEN_CARDS.format(ip="dhcp"))
    found = await discover(Host(tmp_path, {"lxc-info": "fe80::1\n10.0.0.9\n"}))  # type: ignore[arg-type]
    assert found.site.service.url == "http://10.0.0.9:30000"


async def test_a_snapshot_is_not_the_present(tmp_path: Path) -> None:
    guest(tmp_path, "lxc", 129, "hostname: sglang\n[before]\ndev0: /dev/nvidia0\n")
    guest(tmp_path, "qemu-server", 100, "name: win\n\n[with-cards]\nhostpci0: 0000:41:00\n")
    assert (await discover(Host(tmp_path))).site == Site()  # type: ignore[arg-type]


async def test_an_installed_unit_counts_and_nonsense_does_not(tmp_path: Path) -> None:
    files = "sglang@.service disabled\n-rm.service enabled\nsglang.service\tenabled enabled\n"
    found = await discover(Host(tmp_path, {"list-units": "", "list-unit-files": files}))  # type: ignore[arg-type]
    assert found.site.service.unit == "sglang.service"
    assert found.words == "unit sglang.service"


@pytest.mark.parametrize(
    ("line", "heard"),
    [
        ("   0: 00000000:7530 00000000:0000 0A 00000000:00000000", True),
        ("   0: 0100007F:7530 0100007F:C350 01 00000000:00000000", False),
        ("   0: 00000000:7531 00000000:0000 0A 00000000:00000000", False),
    ],
)
def test_a_listening_port(tmp_path: Path, line: str, heard: bool) -> None:
    table = tmp_path / "proc/net/tcp"
    table.parent.mkdir(parents=True)
    table.write_text(f"  sl  local_address rem_address   st tx_queue rx_queue\n{line}\n")
    assert listens(tmp_path, 30000) is heard


async def test_a_folder_that_cannot_be_read_has_no_guests(tmp_path: Path) -> None:
    (tmp_path / MACHINES).parent.mkdir(parents=True)
    (tmp_path / MACHINES).write_text("not a folder")
    assert (await discover(Host(tmp_path))).site.vm is None  # type: ignore[arg-type]
