"""The host's files and cards as the console's own readers see them."""

from __future__ import annotations

import re

import msgspec
import pytest
from box_lab import Lab, OpenBox

from console.model.card import CardTelemetry, NvmlSample
from console.simulator.box import HOLDER_PID
from console.simulator.machine import CARDS, GIB
from console.sources.holders import read_holders
from console.sources.nvml import decode, fold
from console.sources.pci import PciSource


async def sample(lab: Lab) -> NvmlSample:
    """What the console makes of the card library's first words."""
    found = NvmlSample()
    for message in await lab.nvml():
        found = fold(found, decode(msgspec.json.encode(message)))
    return found


async def test_eight_cards_of_two_functions_each_and_nothing_else(lab: Lab) -> None:
    cards = PciSource(lab.host.root).scan()
    assert [card.address for card in cards] == [slot.address for slot in CARDS]
    for card, slot in zip(cards, CARDS, strict=True):
        assert [(f.device, f.class_code, f.driver) for f in card.functions] == [
            (0x2BB1, 0x030000, "nvidia"),
            (0x22E8, 0x040300, "snd_hda_intel"),
        ]
        assert (card.iommu_group, card.numa_node, card.minor, card.uuid) == (
            slot.group, slot.numa_node, slot.index, slot.uuid,
        )  # fmt: skip
        assert (card.link.speed, card.link.width) == (32.0, 16)
        assert not card.link.narrowed and card.present
        assert all(f.driver_override is None and f.power_state == "D0" for f in card.functions)
    assert len({card.iommu_group for card in cards}) == 8


async def test_other_devices_are_there_too(lab: Lab) -> None:
    devices = lab.host.root / "sys/bus/pci/devices"
    aspeed = devices / "0000:62:00.0"
    assert (aspeed / "vendor").read_text() == "0x1a03\n"
    assert (aspeed / "boot_vga").read_text() == "1\n"
    classes = {(folder / "class").read_text().strip() for folder in devices.iterdir()}
    assert {"0x060400", "0x020000", "0x030000", "0x040300"} <= classes
    for folder in devices.iterdir():
        assert (folder / "iommu_group" / "devices" / folder.name).resolve() == folder.resolve()


async def test_the_driver_names_its_version_and_its_cards(lab: Lab) -> None:
    driver = lab.host.root / "proc/driver/nvidia"
    assert "NVIDIA UNIX Open Kernel Module for x86_64  595.45.04 " in (driver / "version").read_text()
    assert sorted(path.name for path in (driver / "gpus").iterdir()) == [slot.address for slot in CARDS]


async def test_every_rank_holds_its_card_and_belongs_to_the_unit(lab: Lab) -> None:
    found = await sample(lab)
    holders = read_holders(lab.host.root, found, container=129, unit="sglang.service")
    assert len(holders) == 8
    for holder in holders:
        assert (holder.container, holder.unit, holder.orphan) == (129, "sglang.service", False)
        assert holder.inner_pid is not None and holder.inner_pid != holder.pid
    by_card = {address: holder.name for holder in holders for address in holder.memory_bytes}
    assert [by_card[slot.address] for slot in CARDS] == [f"sglang::scheduler_TP{rank}" for rank in range(8)]
    comm = (lab.host.root / "proc" / str(holders[0].pid) / "comm").read_text()
    assert comm == "sglang::schedul\n"


async def test_the_main_process_owns_the_listening_socket(lab: Lab) -> None:
    main = int((await lab.properties())["MainPID"])
    proc = lab.host.root / "proc"
    folder = next(
        path
        for path in proc.glob("[0-9]*")
        if f"\t{main}\n" in (path / "status").read_text().split("NSpid:")[1]
    )
    row = (folder / "net/tcp").read_text().splitlines()[1].split()
    assert row[3] == "0A" and int(row[1].partition(":")[2], 16) == lab.box.service.port
    targets = [str(link.readlink()) for link in (folder / "fd").iterdir()]
    assert f"socket:[{row[9]}]" in targets


async def test_cards_report_every_field_in_its_range(lab: Lab) -> None:
    found = await sample(lab)
    assert (found.driver_version, found.nvml_version) == ("595.45.04", "13.595.45")
    assert len(found.cards) == 8
    for card in found.cards:
        absent = {name for name in CardTelemetry.__struct_fields__ if getattr(card, name) is None}
        assert absent == set(card.missing) == {"retired_pages"}
        assert card.memory_total_bytes == 97_887 * 1024 * 1024
        assert card.memory_used_bytes is not None and 80 * GIB < card.memory_used_bytes < 95 * GIB
        used, reserved, free = card.memory_used_bytes, card.memory_reserved_bytes, card.memory_free_bytes
        assert (used or 0) + (reserved or 0) + (free or 0) == card.memory_total_bytes
        assert card.temperature_c is not None and 30 < card.temperature_c < 90
        assert card.power_w is not None and 20 < card.power_w <= 600
        assert card.utilization_percent is not None and 0 <= card.utilization_percent <= 100
    assert set(found.processes) == {slot.address for slot in CARDS}


async def test_memory_is_free_when_the_service_is_stopped_and_fills_as_it_loads(open_box: OpenBox) -> None:
    async with open_box(speed=700.0) as lab:
        await lab.inside("systemctl", "stop", "sglang.service")
        lab.box.cards.advance(lab.box.engine.work(), 1.0)
        assert {card.memory_used_bytes for card in (await sample(lab)).cards} == {0}
        await lab.inside("systemctl", "start", "sglang.service")
        seen = []
        while lab.box.engine.state != "up":
            cards = (await sample(lab)).cards
            seen.append(cards[0].memory_used_bytes or 0)
        assert seen == sorted(seen)
        assert len({size // GIB for size in seen}) > 5


async def test_the_host_cache_is_pinned_memory(lab: Lab) -> None:
    def available() -> int:
        text = (lab.host.root / "proc/meminfo").read_text()
        return int(re.findall(r"MemAvailable: +(\d+) kB", text)[0]) * 1024

    before = available()
    await lab.inside("systemctl", "stop", "sglang.service")
    lab.box._keep_files()
    spec = lab.box.engine.spec
    assert spec is not None
    assert available() - before == pytest.approx(8 * spec.host_gb * 1e9, rel=0.01)


# Faults ----------------------------------------------------------------------------------------


async def test_a_foreign_process_holds_a_card_and_can_be_ended(open_box: OpenBox) -> None:
    async with open_box("holder") as lab:
        found = await sample(lab)
        holders = read_holders(lab.host.root, found, container=129, unit="sglang.service")
        stranger = next(holder for holder in holders if holder.orphan)
        assert (stranger.pid, stranger.container) == (HOLDER_PID, 131)
        assert stranger.name.startswith("python")
        assert set(stranger.memory_bytes) == {CARDS[6].address}
        for card in found.cards:  # never more than there is
            assert card.memory_free_bytes is not None and card.memory_free_bytes >= 0
        await lab.inside("systemctl", "stop", "sglang.service")
        lab.box.cards.advance(lab.box.engine.work(), 1.0)
        lab.box._hold()
        assert (await sample(lab)).cards[6].memory_used_bytes == 20 * 10**9
        assert (await lab.on_host("kill", "-TERM", str(HOLDER_PID))).ok
        assert (await sample(lab)).cards[6].memory_used_bytes == 0


async def test_a_load_beside_a_foreign_process_fails_as_it_does(open_box: OpenBox) -> None:
    async with open_box("holder") as lab:
        await lab.inside("systemctl", "restart", "sglang.service")
        await lab.until("failed/failed")
        assert any("The memory capacity is unbalanced" in text for text in await lab.messages())


async def test_a_card_that_fell_off_the_bus(open_box: OpenBox) -> None:
    async with open_box("gpu-lost") as lab:
        said = await lab.nvml()
        xid = next(message for message in said if message["kind"] == "xid")
        assert (xid["address"], xid["code"]) == (CARDS[3].address, 79)
        found = await sample(lab)
        assert [card.lost for card in found.cards] == [index == 3 for index in range(8)]
        assert found.cards[3].memory_used_bytes is None
        assert found.cards[3].missing["memory_used_bytes"] == "GPU is lost"
        present = [card.present for card in PciSource(lab.host.root).scan()]
        assert present == [index != 3 for index in range(8)]
        kernel = (await lab.on_host("journalctl", "-k", "-o", "cat")).stdout.decode()
        assert "NVRM: Xid (PCI:0000:61:00): 79, GPU has fallen off the bus." in kernel


async def test_xid_errors_come_soon_and_name_the_rank(open_box: OpenBox) -> None:
    async with open_box("xid") as lab:
        said = await lab.nvml(0.9)  # the first strikes at the twelfth tick
        xids = [message for message in said if message["kind"] == "xid"]
        assert [(xid["address"], xid["code"]) for xid in xids] == [(CARDS[5].address, 31)]
        kernel = (await lab.on_host("journalctl", "-k", "-o", "cat", "-n", "1")).stdout.decode()
        run = lab.box.service.processes()
        assert run is not None
        assert f"Xid (PCI:0000:a1:00): 31, pid={run.schedulers[5]}, name=sglang::schedul" in kernel
