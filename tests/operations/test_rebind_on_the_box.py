"""Cards to the VM and back on the box: what comes of it when all is well, and on each bad day."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from console.model.operation import JobView, Plan
from console.model.rebind.inventory import Inventory
from console.operations.rebind import plan_rebind, plan_recover, plan_repair
from console.operations.rebind.request import Rung
from console.operations.step import Refused
from console.sources.inventory import read_inventory
from tests.operations.service_lab import ServiceLab, hurry, service_lab

FIRST, SECOND, LAST = "0000:01:00.0", "0000:21:00.0", "0000:e1:00.0"
VM_FILE = "etc/pve/qemu-server/100.conf"

to_vm = partial(plan_rebind, target="vm")
to_container = partial(plan_rebind, target="container")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr("console.operations.rebind.clients.APART_S", 0.05)
    monkeypatch.setattr("console.operations.rebind.clients.LET_GO_S", 2.0)
    monkeypatch.setattr("console.operations.rebind.guests.BEAT_S", 0.05)
    monkeypatch.setattr("console.operations.rebind.guests.AGENT_S", 3.0)
    monkeypatch.setattr("console.operations.rebind.guests.DRIVER_S", 1.0)
    monkeypatch.setattr("console.operations.rebind.kernel_write.UNBIND_S", 1.0)
    monkeypatch.setattr("console.operations.rebind.kernel_write._GONE_S", 0.3)
    monkeypatch.setattr("console.operations.rebind.functions.PENDING_S", 1.0)


@pytest.fixture
def lab() -> Iterator[ServiceLab]:
    with service_lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def shared_box() -> Iterator[ServiceLab]:
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        with service_lab() as lab:
            yield lab


def inventory(lab: ServiceLab) -> Inventory:
    return read_inventory(lab.runner.root)


def sides(lab: ServiceLab) -> dict[str, set[str | None]]:
    """By card, the drivers of its functions."""
    return {slot.name: {function.driver for function in slot.functions} for slot in inventory(lab).slots}


def minors(lab: ServiceLab) -> list[int | None]:
    return [slot.minor for slot in inventory(lab).slots]


def told(view: JobView, step: str) -> str:
    return next(f"{one.state}: {one.words}" for one in view.steps if one.planned.id == step)


def evidence(plan: Plan, id: str) -> str:
    return next(f"{one.verdict}: {one.evidence}" for one in plan.findings if one.id == id)


def all_home(lab: ServiceLab) -> None:
    """As before anything was asked for: cards, minors, service, persistence mode, no override."""
    assert sides(lab) == {card: {"nvidia", "snd_hda_intel"} for card in sides(lab)}
    assert minors(lab) == list(range(8))
    assert {function.override for slot in inventory(lab).slots for function in slot.functions} == {None}
    assert lab.served() == "kimi-k2.5"


# Well ----------------------------------------------------------------------------------------------


def test_all_cards_go_to_the_vm_and_come_back(lab: ServiceLab) -> None:
    code, view = lab.carried_out(to_vm)
    assert (code, view.state) == (0, "done"), view.reasons
    assert set(map(frozenset, sides(lab).values())) == {frozenset({"vfio-pci"})}
    assert lab.served() is None
    assert told(view, "unused") == "done: nobody has one of 8 cards open, in two looks"
    assert told(view, "vm-start") == "done: VM 100 runs and has 8 cards open"
    assert told(view, "guest") == "done: the guest sees 8 cards, open kernel module"
    vm = inventory(lab).vm(100)
    assert vm is not None
    assert vm.status == "running"

    code, view = lab.carried_out(to_container)
    assert (code, view.state) == (0, "done"), view.reasons
    assert "0000:e1:00.0 is /dev/nvidia7; CT 129 has all that it names" in told(view, "nodes")
    assert told(view, "driver-answers") == "done: the driver has 8 cards"
    assert told(view, "persistence-on") == "done: nvidia-persistenced.service restarted"
    all_home(lab)
    vm = inventory(lab).vm(100)
    assert vm is not None
    assert vm.status == "stopped"


def test_the_kernels_words_about_the_cards_are_kept_with_the_job() -> None:
    with service_lab("unbind-hangs") as lab:
        job = lab.put(lab.plan(to_vm))
        assert lab.run_as_a_program(job) == 5
        told = [line.words for line in lab.view(job).kernel]
    assert any("with non-zero usage count" in words for words in told), told


def test_a_plan_to_where_the_cards_are_is_none(shared_box: ServiceLab) -> None:
    plan = shared_box.plan(to_container)
    assert plan.blocked
    assert evidence(plan, "side") == "fail: the nvidia driver has these cards already: nothing to move"


def test_the_plan_says_what_stops_what_it_costs_and_how_each_step_goes_back(shared_box: ServiceLab) -> None:
    plan = shared_box.plan(to_vm)
    assert not plan.blocked
    assert (plan.target, plan.typed) == ("vm 100", True)
    assert plan.costs[0] == "sglang.service is stopped and stays stopped while the VM has the cards"
    back = {step.id: step.undo for step in plan.steps if step.undo}
    assert back["service-stop"] == "start sglang.service again and wait until it is ready"
    assert back["to-vfio-0000:41:00"] == "0000:41:00: back to nvidia, snd_hda_intel"
    assert [step.id for step in plan.steps][-2:] == ["vm-start", "guest"]


def test_one_card_that_the_vm_names_alone(lab: ServiceLab) -> None:
    """The service has to end even for one card; afterwards it is not started with too few."""
    path = lab.runner.root / VM_FILE
    lines = path.read_text().splitlines()
    kept = [line for line in lines if not line.startswith("hostpci") or "0000:e1:00" in line]
    path.write_text("\n".join(kept) + "\n")
    code, view = lab.carried_out(partial(to_vm, asked=(LAST,)))
    assert code == 0, view.reasons
    assert [name for name, drivers in sides(lab).items() if drivers == {"vfio-pci"}] == ["0000:e1:00"]
    assert minors(lab) == [*range(7), None]
    code, view = lab.carried_out(to_container)
    assert code == 0, view.reasons
    all_home(lab)


# Refused, and nothing changed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("0000:41:00.1",), "the audio function of a card: name the card, 0000:41:00.0"),
        (("0000:41:00", "41:00.0"), "0000:41:00.0 is named twice: 0000:41:00 and 41:00.0"),
        (("0000:99:00.0",), "0000:99:00.0 is not on the PCI bus"),
        (("card 3",), "card 3 is no PCI address"),
        (("\x1b[2J",), "is no PCI address"),
    ],
)
def test_what_is_no_card_is_refused_with_what_it_is(
    shared_box: ServiceLab, asked: tuple[str, ...], words: str
) -> None:
    with pytest.raises(Refused) as refused:
        shared_box.plan(partial(to_vm, asked=asked))
    assert words in str(refused.value)
    assert "\x1b" not in str(refused.value)


def test_a_vm_that_names_other_cards_or_none_blocks_the_plan(shared_box: ServiceLab) -> None:
    plan = shared_box.plan(partial(to_vm, asked=(FIRST,)))
    assert plan.blocked
    assert "its start would take them from the host" in evidence(plan, "vm-cards")
    path = shared_box.runner.root / VM_FILE
    text = path.read_text()
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("hostpci")) + "\n")
    try:
        plan = shared_box.plan(to_vm)
    finally:
        path.write_text(text)
    assert plan.blocked
    assert "has no hostpci line" in evidence(plan, "vm-cards")


def test_nothing_to_repair_is_said(shared_box: ServiceLab) -> None:
    with pytest.raises(Refused, match="nothing was left half way"):
        shared_box.plan(plan_repair)


# Bad days --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("vm-start-timeout", "qm start 100: "),
        ("no-quorum", "qm start 100: "),
    ],
)
def test_a_vm_that_does_not_start_gives_all_cards_back(fault: str, reason: str) -> None:
    with service_lab(fault) as lab:
        code, view = lab.carried_out(to_vm)
        assert (code, view.state) == (4, "rolled-back"), view.reasons
        assert reason in view.reasons[0], view.reasons
        all_home(lab)


def test_a_locked_vm_is_not_waited_for() -> None:
    with service_lab("vm-locked") as lab:
        plan = lab.plan(to_vm)
        assert plan.blocked
        assert "is locked" in evidence(plan, "vm")
        all_home(lab)


def test_a_guest_that_cannot_be_asked_keeps_its_cards_and_it_is_said() -> None:
    with service_lab("no-agent") as lab:
        code, view = lab.carried_out(to_vm)
        assert code == 5
        assert "could not be asked" in view.reasons[0]
        assert "the cards stay with VM 100" in view.reasons[0]
        assert set(map(frozenset, sides(lab).values())) == {frozenset({"vfio-pci"})}
        assert lab.run(view.id, "rollback") == 4
        all_home(lab)


def test_a_vm_that_keeps_running_is_stopped_hard_only_on_the_operators_word() -> None:
    with service_lab("vm-keeps-running") as lab:
        assert lab.carried_out(to_vm)[0] == 0
        code, view = lab.carried_out(to_container)
        assert code == 4
        assert "did not shut down" in view.reasons[0]
        assert "gpuops rebind --force-stop" in view.reasons[0]
        assert set(map(frozenset, sides(lab).values())) == {frozenset({"vfio-pci"})}
        code, view = lab.carried_out(partial(to_container, force_stop=True))
        assert code == 0, view.reasons
        all_home(lab)


def test_a_card_whose_removal_hangs_ends_the_plan_and_is_not_touched_again() -> None:
    with service_lab("unbind-hangs") as lab:
        code, view = lab.carried_out(to_vm)
        assert (code, view.state) == (5, "failed"), view.reasons
        assert "is pending in the kernel: pid " in view.reasons[0]
        (hanging,) = [slot for slot in inventory(lab).slots if any(one.pending for one in slot.functions)]
        assert hanging.name in view.reasons[0]
        assert lab.run(view.id, "rollback") == 5
        assert "is pending in the kernel" in " ".join(lab.view(view.id).reasons)
        blocked = lab.plan(to_container)
        assert blocked.blocked
        assert "has not returned" in evidence(blocked, "removal")


def test_a_card_that_its_driver_does_not_take_sends_all_back_to_the_vm() -> None:
    with service_lab("probe-fails") as lab:
        assert lab.carried_out(to_vm)[0] == 0
        code, view = lab.carried_out(to_container)
        assert code == 4, view.reasons
        assert "was not taken by nvidia: EIO" in view.reasons[0]
        assert set(map(frozenset, sides(lab).values())) == {frozenset({"vfio-pci"})}
        vm = inventory(lab).vm(100)
        assert vm is not None
        assert vm.status == "running"


# Left half way, and dead -------------------------------------------------------------------------------


def test_what_a_crash_left_is_repaired(lab: ServiceLab) -> None:
    """As by hand, and interrupted: no driver, an override, the sound still at home."""
    lab.host("systemctl", "stop", "nvidia-persistenced.service")
    lab.inside("systemctl", "stop", "sglang.service")
    lab.write(f"/sys/bus/pci/devices/{LAST}/driver_override", "vfio-pci\n")
    lab.write(f"/sys/bus/pci/devices/{LAST}/driver/unbind", LAST)
    assert sides(lab)["0000:e1:00"] == {None, "snd_hda_intel"}
    plan = lab.plan(plan_repair)
    assert [step.id for step in plan.steps] == ["load-nvidia", "mend-0000:e1:00"]
    job = lab.put(plan)
    assert lab.run(job) == 0, lab.view(job).reasons
    assert sides(lab)["0000:e1:00"] == {"nvidia", "snd_hda_intel"}
    assert {function.override for slot in inventory(lab).slots for function in slot.functions} == {None}


def free_cards(lab: ServiceLab) -> None:
    """Of everything that has them open."""
    lab.inside("systemctl", "stop", "sglang.service")
    lab.host("systemctl", "stop", "nvidia-persistenced.service")


def test_the_ladder_tries_what_was_asked_for_and_names_the_next_rung(shared_box: ServiceLab) -> None:
    plan = shared_box.plan(partial(plan_recover, card=FIRST))
    assert plan.target == "0000:01:00"
    assert "this tries one rung only" in plan.costs[0]
    assert "next is rescan" in plan.costs[1]
    assert "take the power off it" in plan.costs[-1]


def test_a_card_in_use_is_not_recovered(lab: ServiceLab) -> None:
    plan = lab.plan(partial(plan_recover, card=FIRST))
    assert evidence(plan, "holders").startswith("fail: pid ")
    free_cards(lab)
    plan = lab.plan(partial(plan_recover, card=FIRST))
    assert not plan.blocked
    lab.host("systemctl", "start", "nvidia-persistenced.service")
    job = lab.put(plan)
    assert lab.run(job) == 5
    assert "0000:01:00 is in use, so nothing was touched: pid " in lab.view(job).reasons[0]
    assert lab.view(job).reasons[0].endswith("systemctl stop nvidia-persistenced.service")


@pytest.mark.parametrize("rung", ["reset", "rescan", "bus-reset"])
def test_each_rung_leaves_a_card_that_answers_where_it_was(lab: ServiceLab, rung: Rung) -> None:
    free_cards(lab)
    code, view = lab.carried_out(partial(plan_recover, card="0000:41:00", rung=rung))
    assert code == 0, view.reasons
    assert told(view, f"rescue-{rung}") == "done: 0000:41:00.0 answers: its config space can be read"
    assert sides(lab) == {card: {"nvidia", "snd_hda_intel"} for card in sides(lab)}


def test_a_card_off_the_bus_is_led_up_the_ladder_to_the_cold_cycle() -> None:
    with service_lab("gpu-lost") as lab:
        (dead,) = [slot for slot in inventory(lab).slots if slot.gpu.config_ok is False]
        free_cards(lab)
        reasons = []
        for rung in ("reset", "rescan", "bus-reset"):
            code, view = lab.carried_out(partial(plan_recover, card=dead.name, rung=rung))
            assert (code, view.state) == (5, "failed")
            reasons.append(view.reasons[0])
        again = lab.plan(partial(plan_recover, card=dead.name))
    reset, rescan, bus_reset = reasons
    assert "ENOTTY" in reset
    assert reset.endswith(f"next: gpuops rebind --recover {dead.name} --rung rescan")
    assert rescan == (
        f"{dead.address} has not come back to the bus; "
        f"next: gpuops rebind --recover {dead.name} --rung bus-reset"
    )
    assert bus_reset.startswith(f"{dead.address} has not come back to the bus; no rung is left: ")
    assert again.blocked, "what is not there cannot be reset"
    assert evidence(again, "dead") == "pass: an earlier rung took it off the bus, and it did not come back"


def test_a_rescan_that_died_half_way_is_carried_on(lab: ServiceLab) -> None:
    """The card is off the bus by then."""
    free_cards(lab)
    job = lab.put(lab.plan(partial(plan_recover, card=FIRST, rung="rescan")))
    for address in ("0000:01:00.1", FIRST):
        lab.write(f"/sys/bus/pci/devices/{address}/remove", "1")
    assert FIRST[:-2] not in sides(lab)
    assert lab.run(job) == 0, lab.view(job).reasons
    assert sides(lab)["0000:01:00"] == {"nvidia", "snd_hda_intel"}


def plug_beside(lab: ServiceLab, card: str, other: str) -> None:
    """A card is behind the port of another, as on a riser with a switch of one port."""
    devices = lab.runner.root / "sys/bus/pci/devices"
    folder = (devices / card).resolve()
    port = (devices / other).resolve().parent
    folder.rename(port / card)
    folder.symlink_to(port / card)


def test_no_bus_is_reset_under_a_neighbour_that_is_in_use() -> None:
    with service_lab("holder") as lab:
        free_cards(lab)
        reset = partial(plan_recover, card=FIRST, rung="bus-reset")
        assert not lab.plan(reset).blocked, "who holds another card is of no matter"
        busy = inventory(lab).slots[6].address
        plug_beside(lab, busy, FIRST)
        plan = lab.plan(reset)
        assert f"{busy[:-2]} on the same port is reset too" in plan.costs
        assert evidence(plan, "holders").startswith("fail: pid 77120 python train.py")
        job = lab.put(plan)  # as if the process had come after the plan was made
        assert lab.run(job) == 5
        assert f"{busy[:-2]} is in use, so nothing was touched: pid 77120 " in lab.view(job).reasons[0]
        assert not lab.plan(partial(reset, rung="reset")).blocked, "the card alone is reset"


def test_no_bus_is_reset_with_a_device_on_it_that_is_no_card(lab: ServiceLab) -> None:
    free_cards(lab)
    reset = partial(plan_recover, card=FIRST, rung="bus-reset")
    others = [one for one in inventory(lab).others if not one.is_bridge and one.driver is not None]
    disk = others[0]
    beside = f"{FIRST[:8]}1f.0"
    devices = lab.runner.root / "sys/bus/pci/devices"
    (devices / beside).symlink_to((devices / disk.address).resolve())
    plan = lab.plan(reset)
    assert plan.blocked
    assert f"{beside} ({disk.kind}) on {disk.driver} is on the same bus" in evidence(plan, "rung")
