"""Cards that change sides on the box, by the steps that move real ones, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from box_lab import Lab, OpenBox, eventually

from console.model.rebind.moves import move_of
from console.model.site import Site
from console.operations.rebind import functions, kernel_write
from console.operations.rebind.cards import LoadDriver, ToHost, ToVfio, minor_of
from console.operations.step import Context, Step, StepFailed
from console.simulator.kernel import FAILING, HANGING, OPENER_PID
from console.simulator.machine import CARDS, VM
from console.sources.inventory import read_inventory
from console.sources.pending_writes import other_removals, own_writes
from console.store.state import State

GPUS = tuple(card.address for card in CARDS)
FIRST, SECOND = GPUS[:2]

#: driver, driver_override, d3cold_allowed, power/control, power_state
AWAKE_ON_VFIO = ("vfio-pci", "(null)", "0", "on", "D0")


def context(lab: Lab) -> Context:
    """The host alone: these steps look at nothing else."""

    async def pause(reason: str) -> None:
        """Nothing here reads NVML."""

    monitor: Any = SimpleNamespace(sources=SimpleNamespace(host=lab.host, nvml=SimpleNamespace(pause=pause)))
    return Context(
        site=Site(),
        profiles=(),
        monitor=monitor,
        state=State(Path("/run/none")),
        clock=time.monotonic,
        wall_clock=time.time,
    )


def step(lab: Lab, to: str, address: str) -> ToVfio | ToHost:
    """Made from what the host shows now, as a plan would."""
    inventory = read_inventory(lab.host.root)
    slot = inventory.slot(address)
    assert slot is not None
    return (ToVfio if to == "vfio" else ToHost)(move_of(slot, inventory.drivers))


async def carry_out(lab: Lab, one: Step) -> str:
    await one.do(context(lab))
    return await one.verify(context(lab))


async def send(lab: Lab, to: str, addresses: Sequence[str]) -> list[str]:
    return [await carry_out(lab, step(lab, to, address)) for address in addresses]


async def free(lab: Lab) -> None:
    """Nobody has a card open any more."""
    assert (await lab.inside("systemctl", "stop", "sglang.service")).ok
    assert (await lab.on_host("systemctl", "stop", "nvidia-persistenced.service")).ok


def state_of(lab: Lab, address: str) -> tuple[str, ...]:
    folder = lab.host.root / "sys/bus/pci/devices" / address
    link = folder / "driver"
    names = ("driver_override", "d3cold_allowed", "power/control", "power_state")
    values = [(folder / name).read_text().strip() for name in names]
    return (link.readlink().name if link.is_symlink() else "none", *values)


def driver_of(lab: Lab, address: str) -> str:
    return state_of(lab, address)[0]


def minors(lab: Lab) -> list[int | None]:
    return [minor_of(context(lab), address) for address in GPUS]


async def seen_by_nvml(lab: Lab) -> list[str]:
    said = await lab.nvml()
    return [card["address"] for one in said[:2] if one["kind"] == "cards" for card in one["cards"]]


async def put(lab: Lab, path: str, text: str) -> str:
    """Write as anybody may: what dd says, nothing when it went well."""
    words = ("dd", f"of=/sys/bus/pci/{path}", "conv=nocreat,notrunc", "status=none")
    result = await lab.host.run(words, deadline=5, stdin=text.encode())
    return result.stderr.decode()


async def dmesg(lab: Lab) -> str:
    return (await lab.on_host("journalctl", "-k", "-n", "all")).stdout.decode()


# Out and back ------------------------------------------------------------------------------------


async def test_one_card_goes_out_and_comes_back_and_the_others_stay(lab: Lab) -> None:
    await free(lab)
    before = {address: state_of(lab, address) for address in GPUS}
    (said,) = await send(lab, "vfio", [SECOND])
    assert said == f"{SECOND} on vfio-pci, {CARDS[1].audio} on vfio-pci"
    assert state_of(lab, SECOND) == state_of(lab, CARDS[1].audio) == AWAKE_ON_VFIO
    assert [state_of(lab, address) for address in GPUS if address != SECOND] == [
        before[address] for address in GPUS if address != SECOND
    ]
    assert (lab.host.root / f"dev/vfio/{CARDS[1].group}").exists()
    assert minors(lab) == [0, None, 2, 3, 4, 5, 6, 7]
    assert await seen_by_nvml(lab) == [address for address in GPUS if address != SECOND]
    listed = (await lab.on_host("nvidia-smi", "-L")).stdout.decode()
    assert CARDS[1].uuid not in listed and listed.count("GPU-") == 7
    assert await step(lab, "vfio", SECOND).done(context(lab)) is not None

    (said,) = await send(lab, "host", [SECOND])
    assert said.endswith("it is /dev/nvidia1")
    assert driver_of(lab, CARDS[1].audio) == "snd_hda_intel"
    assert not (lab.host.root / f"dev/vfio/{CARDS[1].group}").exists()
    assert minors(lab) == list(range(8))
    assert await seen_by_nvml(lab) == list(GPUS)
    assert own_writes(lab.host.root) == ()


async def test_all_cards_go_out_and_come_back(lab: Lab) -> None:
    await free(lab)
    await send(lab, "vfio", GPUS)
    assert {state_of(lab, address) for card in CARDS for address in (card.address, card.audio)} == {
        AWAKE_ON_VFIO
    }
    assert await seen_by_nvml(lab) == []
    assert (await lab.on_host("nvidia-smi", "-L")).returncode == 6
    said = await send(lab, "host", GPUS)
    assert [words.rpartition(" ")[2] for words in said] == [f"/dev/nvidia{n}" for n in range(8)]
    assert (await lab.inside("systemctl", "start", "sglang.service")).ok
    await lab.until_ready()


async def test_cards_that_come_back_in_another_order_get_other_minors(lab: Lab) -> None:
    await free(lab)
    await send(lab, "vfio", [FIRST, SECOND])
    await send(lab, "host", [SECOND, FIRST])
    assert minors(lab) == [1, 0, 2, 3, 4, 5, 6, 7]
    assert (await lab.inside("systemctl", "start", "sglang.service")).ok
    run = lab.box.service.processes()
    assert run is not None
    opened = [
        {str(fd.readlink()) for fd in (lab.host.root / f"proc/{pid}/fd").iterdir()} for pid in run.schedulers
    ]
    assert "/dev/nvidia1" in opened[0] and "/dev/nvidia0" in opened[1] and "/dev/nvidia2" in opened[2]


async def test_vfio_pci_lets_a_card_fall_asleep_until_it_is_told_not_to(lab: Lab) -> None:
    await free(lab)
    for path, text in (
        (f"devices/{FIRST}/driver_override", "vfio-pci"),
        (f"devices/{FIRST}/driver/unbind", FIRST),
        ("drivers/vfio-pci/bind", FIRST),
    ):
        assert await put(lab, path, text) == ""
    assert state_of(lab, FIRST) == ("vfio-pci", "vfio-pci", "1", "auto", "D3hot")
    assert await put(lab, f"devices/{FIRST}/power/control", "on") == ""
    assert state_of(lab, FIRST)[3:] == ("on", "D0")


async def test_the_drivers_are_loaded(lab: Lab) -> None:
    for driver in ("nvidia", "vfio-pci"):
        await carry_out(lab, LoadDriver(driver))
    unknown = await lab.on_host("modprobe", "--", "nouveau")
    assert unknown.returncode == 1 and "Module nouveau not found" in unknown.reason


# What is in the way ------------------------------------------------------------------------------


async def test_a_card_in_use_is_not_touched(lab: Lab) -> None:
    with pytest.raises(StepFailed, match="in use"):
        await step(lab, "vfio", FIRST).do(context(lab))
    assert driver_of(lab, FIRST) == "nvidia"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_write, "UNBIND_S", 1.0)
    monkeypatch.setattr(kernel_write, "_GONE_S", 0.1)
    monkeypatch.setattr(functions, "PENDING_S", 0.2)


@pytest.mark.usefixtures("impatient")
async def test_a_removal_that_hangs_ends_with_its_holder(open_box: OpenBox) -> None:
    async with open_box("unbind-hangs") as lab:
        await free(lab)
        move = step(lab, "vfio", HANGING)
        with pytest.raises(StepFailed, match="pending in the kernel") as failed:
            await move.do(context(lab))
        assert failed.value.stop
        assert f"pid {OPENER_PID}" in str(failed.value)
        (helper,) = own_writes(lab.host.root, HANGING)
        assert helper.state == "D"
        assert helper.path == f"/sys/bus/pci/devices/{HANGING}/driver/unbind"
        assert any("nv_pci_remove" in line for line in helper.stack)
        assert "non-zero usage count" in await dmesg(lab)
        assert driver_of(lab, HANGING) == "none"  # and still the driver has it: no link is no proof
        assert HANGING not in await seen_by_nvml(lab)

        # Whatever needs the device waits too; other cards move.
        assert (await kernel_write.write(lab.host, helper.path, HANGING)).error == "ENOENT"
        override = f"/sys/bus/pci/devices/{HANGING}/driver_override"
        read = await lab.host.run(("cat", "--", override), deadline=0.2)
        assert read.returncode is None
        assert await send(lab, "vfio", [FIRST])
        assert await put(lab, "drivers/vfio-pci/new_id", "10de 2bb1") == ""
        assert driver_of(lab, HANGING) == "none"

        assert (await lab.on_host("kill", "-9", str(helper.pid))).ok
        assert [one.pid for one in own_writes(lab.host.root, HANGING)] == [helper.pid]
        assert (await lab.on_host("kill", str(OPENER_PID))).ok
        await eventually(lambda: _none_left(lab))
        assert (await lab.on_host("cat", "--", override)).stdout == b"vfio-pci\n"
        await carry_out(lab, move)
        assert state_of(lab, HANGING) == AWAKE_ON_VFIO


@pytest.mark.usefixtures("impatient")
async def test_a_box_in_which_a_removal_hangs_can_be_closed(open_box: OpenBox) -> None:
    async with open_box() as lab:
        written = await kernel_write.unbind(lab.host, FIRST)  # everybody has it open
        assert written.outcome == "pending"
        root = lab.host.root
    assert not root.exists()


async def _none_left(lab: Lab) -> bool:
    return own_writes(lab.host.root) == ()


async def test_a_driver_that_fails_leaves_the_card_to_the_other_side(open_box: OpenBox) -> None:
    async with open_box("probe-fails") as lab:
        await free(lab)
        await send(lab, "vfio", [FAILING])
        before = state_of(lab, FAILING)
        home = step(lab, "host", FAILING)
        with pytest.raises(StepFailed, match=f"{FAILING} was not taken by nvidia: EIO"):
            await home.do(context(lab))
        assert state_of(lab, FAILING)[:2] == ("none", "(null)")
        assert "probe with driver nvidia failed with error -5" in await dmesg(lab)
        await home.undo(context(lab))
        assert state_of(lab, FAILING) == before


@pytest.mark.usefixtures("impatient")
async def test_a_card_in_a_running_machine_stays_until_the_machine_ends(lab: Lab) -> None:
    await free(lab)
    await send(lab, "vfio", GPUS)
    assert (await lab.on_host("qm", "start", str(VM))).ok
    before = await dmesg(lab)
    with pytest.raises(StepFailed, match="in use"):
        await step(lab, "host", FIRST).do(context(lab))
    assert await dmesg(lab) == before, "a reset that its guest would have felt"
    written = await kernel_write.unbind(lab.host, FIRST)
    assert written.outcome == "pending" and written.pending is not None
    assert written.pending.state == "S" and any("vfio" in line for line in written.pending.stack)
    assert "Device is currently in use" in await dmesg(lab)
    assert (await lab.on_host("qm", "stop", str(VM))).ok
    await eventually(lambda: _none_left(lab))
    assert driver_of(lab, FIRST) == "none"
    await send(lab, "host", GPUS)
    assert minors(lab) == list(range(8))


# What the kernel answers -------------------------------------------------------------------------


async def test_the_kernel_tells_why_a_write_failed(lab: Lab) -> None:
    await free(lab)
    bus = "/sys/bus/pci"
    said = {
        ("drivers/snd_hda_intel/bind", FIRST): "error writing '{}': No such device",
        ("drivers/nvidia/bind", FIRST): "error writing '{}': Device or resource busy",
        ("drivers/nvidia/bind", "0000:99:00.0"): "error writing '{}': No such device",
        ("drivers/vfio-pci/unbind", FIRST): "error writing '{}': No such device",
        ("drivers/no-such-driver/bind", FIRST): "failed to open '{}': No such file or directory",
        ("devices/0000:99:00.0/subsystem/drivers/nvidia/bind", "0000:99:00.0"): (
            "failed to open '{}': No such file or directory"
        ),
        ("drivers/vfio-pci/remove_id", "dead beef"): "error writing '{}': No such device",
        ("drivers/vfio-pci/new_id", "dead"): "error writing '{}': Invalid argument",
        (f"devices/{FIRST}/power/control", "off"): "error writing '{}': Invalid argument",
        (f"devices/{FIRST}/vendor", "1"): "failed to open '{}': Permission denied",
    }
    for (path, text), words in said.items():
        assert await put(lab, path, text) == f"dd: {words.format(f'{bus}/{path}')}\n"
    assert (await kernel_write.unbind(lab.host, FIRST)).done
    assert (await kernel_write.unbind(lab.host, FIRST)).error == "ENOENT"


async def test_an_override_that_is_left_keeps_proxmox_from_its_own_bind(lab: Lab) -> None:
    await free(lab)
    assert await put(lab, f"devices/{FIRST}/driver_override", "nvidia\n") == ""
    assert (await kernel_write.unbind(lab.host, FIRST)).done
    assert (await kernel_write.bind(lab.host, FIRST, "vfio-pci")).error == "ENODEV"
    assert await put(lab, "drivers_probe", FIRST) == ""  # back to nvidia
    started = await lab.on_host("qm", "start", str(VM))
    assert started.returncode == 255 and started.reason.endswith(f"Cannot bind {FIRST} to vfio")
    # The engine's step is rid of it.
    await send(lab, "vfio", [FIRST])
    assert state_of(lab, FIRST) == AWAKE_ON_VFIO


async def test_a_card_that_was_removed_comes_back_by_a_rescan(lab: Lab) -> None:
    await free(lab)
    group = f"sys/kernel/iommu_groups/{CARDS[3].group}"
    for address in (CARDS[3].audio, GPUS[3]):
        assert (await kernel_write.remove(lab.host, address)).done
    assert not (lab.host.root / "sys/bus/pci/devices" / GPUS[3]).exists()
    assert not (lab.host.root / group).exists()
    assert (await kernel_write.rescan(lab.host, "0000:60:01.1")).done
    assert (driver_of(lab, GPUS[3]), driver_of(lab, CARDS[3].audio)) == ("nvidia", "snd_hda_intel")
    assert len(list((lab.host.root / group / "devices").iterdir())) == 2
    assert minors(lab) == list(range(8))


# Proxmox -----------------------------------------------------------------------------------------


async def test_a_start_takes_the_cards_from_the_driver_by_itself(lab: Lab) -> None:
    await free(lab)
    started = await lab.on_host("qm", "start", str(VM))
    assert started.ok, started.reason
    assert {driver_of(lab, one) for card in CARDS for one in (card.address, card.audio)} == {"vfio-pci"}
    assert (await lab.on_host("qm", "stop", str(VM))).ok
    assert {state_of(lab, address) for address in GPUS} == {("vfio-pci", "(null)", "1", "auto", "D3hot")}
    # vfio-pci now fits by its id and is asked first: who clears and probes gets it back.
    assert (await kernel_write.unbind(lab.host, FIRST)).done
    assert await put(lab, "drivers_probe", FIRST) == ""
    assert driver_of(lab, FIRST) == "vfio-pci"
    await send(lab, "host", GPUS)
    assert minors(lab) == list(range(8))
    assert (await kernel_write.forget_id(lab.host, "vfio-pci", 0x10DE, 0x2BB1)).done


@pytest.mark.usefixtures("impatient")
async def test_a_start_on_cards_in_use_hangs_until_they_are_free(lab: Lab) -> None:
    assert (await lab.inside("systemctl", "stop", "sglang.service")).ok  # nvidia-persistenced goes on
    start = asyncio.create_task(lab.on_host("qm", "start", str(VM)))
    await eventually(lambda: _removal_hangs(lab))
    (hanging,) = other_removals(lab.host.root)
    assert hanging.state == "D" and f"qmstart:{VM}" in hanging.words
    assert not start.done()
    with pytest.raises(StepFailed, match="pending in the kernel"):
        await functions.clear_of_kernel(context(lab), step(lab, "vfio", FIRST)._move)
    assert (await lab.on_host("systemctl", "stop", "nvidia-persistenced.service")).ok
    assert (await start).ok
    assert driver_of(lab, GPUS[7]) == "vfio-pci"


async def _removal_hangs(lab: Lab) -> bool:
    return any(one.stack and "msleep" in one.stack[0] for one in other_removals(lab.host.root))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("vm-locked", "VM is locked (backup)"),
        ("no-quorum", "cluster not ready - no quorum?"),
        ("vm-start-timeout", "failed: got timeout"),
    ],
)
async def test_a_machine_that_does_not_start(open_box: OpenBox, fault: str, words: str) -> None:
    async with open_box(fault) as lab:
        await free(lab)
        await send(lab, "vfio", GPUS)
        started = await lab.on_host("qm", "start", str(VM))
        assert started.returncode == 255 and words in started.reason
        assert (await lab.on_host("qm", "status", str(VM))).stdout == b"status: stopped\n"
        reservations = lab.host.root / "run/qemu-server/pci-id-reservations"
        assert not reservations.exists() or reservations.read_text() == ""
        again = await lab.on_host("qm", "start", str(VM))
        assert again.ok is (fault == "vm-start-timeout")  # the next start goes well
        if fault == "vm-locked":
            assert "lock: backup" in (await lab.on_host("qm", "config", str(VM))).stdout.decode()
