"""What is tried on the real kernel. Each case begins with all cards at home, and may leave anything."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from console.operations.rebind import kernel_write
from console.operations.rebind.cards import LoadDriver
from console.operations.rebind.request import Rung
from console.sources.inventory import read_inventory
from console.sources.pending_writes import own_writes
from console.transport.local import LocalRunner
from tests.rigs.kernel import cards_lab as lab
from tests.rigs.kernel.cards_lab import GPUS, HOMES, NEIGHBOUR, PCI, ROOT, SHARED, Holder, Job, same, until

_CASES: dict[str, Callable[[], None]] = {}


def names() -> tuple[str, ...]:
    """In the order in which they are run."""
    return tuple(_CASES)


def carry_out(name: str) -> None:
    _CASES[name]()


def case(action: Callable[[], None]) -> Callable[[], None]:
    _CASES[action.__name__] = action
    return action


def _functions(gpu: str) -> tuple[str, str]:
    return gpu, gpu[:-1] + "1"


def _send(addresses: Sequence[str] = GPUS) -> None:
    """To vfio-pci, as a case's beginning."""
    with Job("vfio", addresses) as job:
        same(job.carry_on(), 0, job.view)


# The way out and back ----------------------------------------------------------------------------


@case
def vfio_pci_is_loaded_when_it_is_not() -> None:
    async def load() -> tuple[str | None, str, str | None]:
        step, context = LoadDriver("vfio-pci"), lab.context()
        before = await step.done(context)
        await step.do(context)
        return before, await step.verify(context), await step.done(context)

    same(asyncio.run(load()), (None, "vfio-pci is loaded", "vfio-pci is loaded"))


@case
def four_cards_go_out_and_come_back() -> None:
    before, numbers = lab.world(), lab.minors()
    with Job("vfio", GPUS) as job:
        same(job.carry_on(), 0, job.view)
        same({step.state for step in job.view.steps}, {"done"})
    # All awake, and nothing left over that would keep qm start from its own bind.
    same(lab.world(), dict.fromkeys(HOMES, ("vfio-pci", "(null)", "0", "on")))
    for gpu in GPUS:
        same(lab.viable(gpu), True, gpu)
        same(lab.value(gpu, "power_state"), "D0", gpu)
    same(lab.minors(), dict.fromkeys(GPUS))
    with Job("host", GPUS) as job:
        same(job.carry_on(), 0, job.view)
        same(
            [step.words.rpartition(" ")[2] for step in job.view.steps], [f"/dev/nvidia{n}" for n in range(4)]
        )
    same(lab.drivers(), HOMES)
    same(lab.minors(), numbers)
    same([line[:2] for line in lab.world().values()], [line[:2] for line in before.values()])


@case
def one_card_goes_out_and_the_others_stay() -> None:
    before = lab.world()
    _send(GPUS[1:2])
    moved = _functions(GPUS[1])
    same(
        lab.drivers(), {address: "vfio-pci" if address in moved else home for address, home in HOMES.items()}
    )
    same({address: line for address, line in lab.world().items() if address not in moved},
         {address: line for address, line in before.items() if address not in moved})  # fmt: skip
    with Job("vfio", GPUS[1:2]) as again:
        same(again.carry_on(), 0, again.view)
        same([step.state for step in again.view.steps], ["skipped"])


@case
def cards_that_come_back_in_another_order_get_other_minors_and_it_is_said() -> None:
    _send(GPUS[:2])
    with Job("host", (GPUS[1], GPUS[0])) as job:
        same(job.carry_on(), 0, job.view)
        same(
            [step.words.rpartition("; ")[2] for step in job.view.steps],
            ["it is /dev/nvidia0", "it is /dev/nvidia1"],
        )
    same(lab.minors(), {GPUS[0]: 1, GPUS[1]: 0, GPUS[2]: 2, GPUS[3]: 3})


# Killed -------------------------------------------------------------------------------------------


def _killed_everywhere(to: lab.Way, begin: Callable[[], None]) -> None:
    """One card, a job killed before each of its writes; from each crash on to the end, and back."""
    begin()
    with Job(to, GPUS[:1]) as job:
        count, code = lab.counted(job)
        same(code, 0, job.view)
    arrived = lab.world()
    assert count >= 7, count
    for nth in range(count):
        lab.put_home()
        begin()
        before = lab.world()
        for direction, code, after in (("rollback", 4, before), ("resume", 0, arrived)):
            with Job(to, GPUS[:1]) as job:
                same(job.carry_on(at=lab.killer(nth)), -signal.SIGKILL, nth)
                same(job.view.state, "interrupted", nth)
                same(job.carry_on(direction), code, (nth, direction, job.view))
                same(lab.world(), after, (nth, direction))


@case
def killed_before_any_write_on_the_way_out_it_goes_on_or_back() -> None:
    _killed_everywhere("vfio", lambda: None)


@case
def killed_before_any_write_on_the_way_home_it_goes_on_or_back() -> None:
    _killed_everywhere("host", lambda: lab.put_on_vfio(GPUS[0]))


@case
def killed_while_the_kernel_still_binds_the_next_process_waits_for_it() -> None:
    for direction, code, driver in (("resume", 0, "nvidia"), ("rollback", 4, "vfio-pci")):
        lab.put_home()
        _send(GPUS[:1])
        lab.set_parameter("probe_ms", "1500")
        with Job("host", GPUS[:1]) as job:
            process = job.start()
            until(lambda: any("nvidia/bind" in write.words for write in own_writes(ROOT, GPUS[0])))
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            assert own_writes(ROOT, GPUS[0]), "the bind was over too soon to be of use here"
            same(job.carry_on(direction), code, job.view)
            same(lab.driver_of(GPUS[0]), driver)


# In the way ---------------------------------------------------------------------------------------


def _refused_untouched(to: lab.Way, gpu: str, holder: str) -> None:
    before = lab.world()
    with Job(to, (gpu,)) as job:
        same(job.carry_on(), 4, job.view)
        assert "is in use, so it was not touched" in job.why, job.why
        assert holder in job.why, job.why
    same(lab.drivers(), {address: line[0] for address, line in before.items()})
    same({line[1] for line in lab.world().values()}, {"(null)"})


@case
def a_card_that_a_process_has_open_is_not_touched() -> None:
    holder = Holder(lab.opened("/dev/nvidia2"))
    _refused_untouched("vfio", GPUS[2], f"pid {holder.pid} ")


@case
def a_card_that_a_process_has_only_mapped_is_not_touched() -> None:
    holder = Holder(lab.mapped("/dev/nvidia1"))
    _refused_untouched("vfio", GPUS[1], f"pid {holder.pid} ")


@case
def a_card_that_is_open_in_other_namespaces_under_another_name_is_not_touched() -> None:
    Holder(lab.contained(3))
    _refused_untouched("vfio", GPUS[3], "/dev/nvidia3")


@case
def a_card_whose_sound_is_open_is_not_touched() -> None:
    control = next(
        path for path in Path("/dev/snd").glob("controlC*")
        if (Path("/sys/class/sound") / path.name / "device/device").resolve().name == GPUS[0][:-1] + "1"
    )  # fmt: skip
    holder = Holder(lab.opened(str(control)))
    _refused_untouched("vfio", GPUS[0], f"pid {holder.pid} ")


@case
def a_card_in_a_running_machine_is_not_touched() -> None:
    _send(GPUS[:1])
    machine = Holder(lab.as_a_vmm(GPUS[0]))
    _refused_untouched("host", GPUS[0], f"pid {machine.pid} ")


@case
def an_unbind_under_a_running_machine_is_told_as_pending_and_ends_with_it() -> None:
    _send(GPUS[:1])
    machine = Holder(lab.as_a_vmm(GPUS[0]))
    written = asyncio.run(kernel_write.unbind(LocalRunner(), GPUS[0]))
    same(written.outcome, "pending", written)
    assert written.pending is not None
    assert any("vfio" in line for line in written.pending.stack), written.pending
    machine.end()
    until(lambda: not own_writes(ROOT, GPUS[0]))
    same(lab.driver_of(GPUS[0]), None)


# Hanging ------------------------------------------------------------------------------------------


@case
def a_removal_that_hangs_ends_the_plan_and_the_card_is_left_alone() -> None:
    """Nobody holds the card, and still its driver does not let go: others have seen that."""
    lab.set_parameter("stuck", GPUS[1])
    with Job("vfio", GPUS[:3]) as job:
        began = time.monotonic()
        same(job.carry_on(), 5, job.view)
        assert time.monotonic() - began < 20, "the job waited for the kernel"
        same([step.state for step in job.view.steps], ["done", "failed", "waiting"], job.view)
        helper = own_writes(ROOT, GPUS[1])[0]
        same(helper.state, "D")
        assert "is pending in the kernel" in job.why and f"pid {helper.pid} " in job.why, job.why
        assert any("test_remove" in line for line in job.view.steps[1].lines), job.view.steps[1]
        # The card that is not concerned still moves, and can be read; the other is neither read nor written.
        with Job("host", GPUS[:1]) as other:
            same(other.carry_on(), 0, other.view)
        for direction in ("resume", "rollback"):
            same(job.carry_on(direction), 5, job.view)
            same([write.pid for write in own_writes(ROOT)], [helper.pid], "another write was made")
        # The link is gone though the driver still has it: no link is no proof.
        same(lab.driver_of(GPUS[1]), None)
        lab.set_parameter("stuck", "-")
        same(job.carry_on("rollback"), 4, job.view)
    same(lab.drivers(), HOMES)


@case
def a_removal_that_hangs_can_end_in_the_new_state_too() -> None:
    lab.set_parameter("stuck", GPUS[0])
    with Job("vfio", GPUS[:1]) as job:
        same(job.carry_on(), 5, job.view)
        lab.set_parameter("stuck", "-")
        same(job.carry_on("resume"), 0, job.view)
    same({lab.driver_of(address) for address in _functions(GPUS[0])}, {"vfio-pci"})


@case
def somebody_elses_removal_that_hangs_is_seen() -> None:
    """As Proxmox's own bind at qm start would hang: its process bears no mark of ours."""
    holder = Holder(lab.opened("/dev/nvidia0"))
    put = os.fork()
    if put == 0:
        lab.put(f"devices/{GPUS[0]}/driver/unbind", GPUS[0])
        os._exit(0)
    until(lambda: lab.driver_of(GPUS[0]) is None)
    with Job("vfio", GPUS[:1]) as job:
        same(job.carry_on(), 5, job.view)
        assert f"pid {put} " in job.why and "may be about it" in job.why, job.why
        same(own_writes(ROOT), (), "a write was made")
        holder.end()
        os.waitpid(put, 0)
        same(job.carry_on(), 0, job.view)


# What the kernel refuses --------------------------------------------------------------------------


@case
def a_card_whose_driver_fails_goes_back_where_it_was() -> None:
    _send(GPUS[:1])
    before = lab.world()
    lab.set_parameter("fail_probe", GPUS[0])
    with Job("host", GPUS[:1]) as job:
        same(job.carry_on(), 4, job.view)
        assert f"{GPUS[0]} was not taken by nvidia: EIO" in job.why, job.why
    same(lab.world(), before)


@case
def the_failure_of_one_card_brings_all_back() -> None:
    _send()
    before = lab.world()
    lab.set_parameter("fail_probe", GPUS[2])
    with Job("host", GPUS) as job:
        same(job.carry_on(), 4, job.view)
    same(lab.world(), before)


@case
def a_group_with_a_stranger_in_it_is_not_called_ready_for_a_machine() -> None:
    with Job("vfio", (SHARED,), {SHARED: "e1000"}) as job:
        same(job.carry_on(), 4, job.view)
        assert f"{NEIGHBOUR} is on e1000" in job.why, job.why
    same(lab.drivers((SHARED, NEIGHBOUR)), {SHARED: "e1000", NEIGHBOUR: "e1000"})


@case
def a_bridge_in_the_group_is_no_stranger() -> None:
    below = next(path.name for path in (PCI / "drivers/e1000e").iterdir() if path.name.startswith("0000:"))
    members = [path.name for path in (PCI / "devices" / below / "iommu_group/devices").resolve().iterdir()]
    assert len(members) > 1, members
    with Job("vfio", (below,), {below: "e1000e"}) as job:
        same(job.carry_on(), 0, job.view)
    same(lab.viable(below), True)
    lab.rebind(below, "e1000e")


@case
def the_kernel_tells_why_a_write_failed() -> None:
    async def errors() -> dict[str, str | None]:
        runner, gpu = LocalRunner(), GPUS[0]
        written = {
            "unbound twice": await kernel_write.unbind(runner, gpu)
            and await kernel_write.unbind(runner, gpu),
            "not its driver": await kernel_write.bind(runner, gpu, "snd_hda_intel"),
            "no such driver": await kernel_write.bind(runner, gpu, "no-such-driver"),
            "no such function": await kernel_write.bind(runner, "0000:99:00.0", "nvidia"),
            "taken": await kernel_write.bind(runner, gpu, "nvidia")
            and await kernel_write.bind(runner, gpu, "nvidia"),
            "no such id": await kernel_write.forget_id(runner, "vfio-pci", 0xDEAD, 0xBEEF),
        }
        return {name: one.error for name, one in written.items()}

    same(
        asyncio.run(errors()),
        {
            "unbound twice": "ENOENT",
            "not its driver": "ENODEV",
            "no such driver": "ENOENT",
            "no such function": "ENOENT",
            "taken": "EBUSY",
            "no such id": "ENODEV",
        },
    )


# What others left ---------------------------------------------------------------------------------


@case
def a_left_over_override_neither_hinders_nor_stays() -> None:
    for gpu, driver in ((GPUS[0], "nvidia"), (GPUS[1], "pci-stub")):
        lab.put(f"devices/{gpu}/driver_override", driver)
    _send(GPUS[:2])
    lab.put(f"devices/{GPUS[1]}/driver_override", "vfio-pci")
    with Job("vfio", GPUS[:2]) as job:
        same(job.carry_on(), 0, job.view)
    same({line[1] for line in lab.world().values()}, {"(null)"})
    lab.put(f"devices/{GPUS[0]}/driver_override", "vfio-pci")
    with Job("host", GPUS[:2]) as job:
        same(job.carry_on(), 0, job.view)
    same({line[1] for line in lab.world().values()}, {"(null)"})
    same(lab.drivers(), HOMES)


@case
def a_card_without_any_driver_is_taken_either_way() -> None:
    for to, wanted in (("vfio", "vfio-pci"), ("host", "nvidia")):
        for address in _functions(GPUS[0]):
            lab.rebind(address, None)
        with Job(to, GPUS[:1]) as job:
            same(job.carry_on(), 0, job.view)
        same(lab.driver_of(GPUS[0]), wanted)


@case
def an_id_that_proxmox_gave_vfio_pci_does_not_draw_a_card_back() -> None:
    """And vfio-pci was there first, so the kernel would ask it first."""
    for gpu in GPUS:
        lab.rebind(gpu, None)
    lab.modprobe("vfio-pci")
    subprocess.run(["rmmod", "nvidia"], check=True)
    lab.put("drivers/vfio-pci/new_id", "1b36 0010")
    lab.put("drivers/vfio-pci/new_id", "8086 293e")
    lab.load_nvidia()
    same({lab.driver_of(gpu) for gpu in GPUS}, {"vfio-pci"})
    with Job("host", GPUS) as job:
        same(job.carry_on(), 0, job.view)
    same(lab.drivers(GPUS), dict.fromkeys(GPUS, "nvidia"))
    same(lab.minors(), dict(zip(GPUS, range(4), strict=True)))


# The ladder ---------------------------------------------------------------------------------------


@case
def a_rung_leaves_a_card_that_answers_where_it_was() -> None:
    before, numbers = lab.world(), lab.minors()
    rungs: tuple[Rung, ...] = ("reset", "rescan")
    for rung in rungs:
        with Job(rung, GPUS[1:2]) as job:
            same(job.carry_on(), 0, job.view)
        same(lab.drivers(), HOMES, rung)
        same(lab.minors(), numbers, rung)
        same([line[:2] for line in lab.world().values()], [line[:2] for line in before.values()], rung)


@case
def a_rescan_that_was_killed_before_any_write_is_carried_on() -> None:
    with Job("rescan", GPUS[:1]) as job:
        count, code = lab.counted(job)
        same(code, 0, job.view)
    assert count >= 3, count
    for nth in range(count):
        lab.put_home()
        with Job("rescan", GPUS[:1]) as job:
            same(job.carry_on(at=lab.killer(nth)), -signal.SIGKILL, nth)
            same(job.carry_on("resume"), 0, (nth, job.view))
        same(lab.drivers(), HOMES, nth)


@case
def a_bus_is_reset_by_the_file_that_newer_kernels_have_for_it() -> None:
    before = lab.world()
    port = (PCI / "devices" / GPUS[0]).resolve().parent
    methods = port / "reset_method"  # the port's own way never resets the bus below it
    assert not methods.exists() or "bus" not in methods.read_text().split(), methods.read_text()
    assert read_inventory(ROOT, GPUS[:1]).slots[0].bus_reset
    with Job("bus-reset", GPUS[:1]) as job:
        same(job.carry_on(), 0, job.view)
    same(lab.world(), before)


@case
def a_bus_whose_link_stays_down_after_its_reset_leads_to_the_cold_cycle() -> None:
    before = lab.world()
    with Job("bus-reset", GPUS[3:4]) as job:
        same(job.carry_on(), 5, job.view)
        assert "reset_subordinate: ENOTTY, so no reset was done, or the card did not" in str(job.why), job.why
        assert "no rung is left" in str(job.why), job.why
    same(lab.world(), before)


@case
def no_rung_touches_a_card_that_is_open_nor_one_beside_it() -> None:
    holder = Holder(lab.opened("/dev/nvidia1"))
    rungs: tuple[tuple[Rung, Sequence[str]], ...] = (
        ("reset", GPUS[1:2]),
        ("rescan", GPUS[1:2]),
        ("bus-reset", GPUS[:2]),
    )
    for rung, cards in rungs:
        with Job(rung, cards) as job:
            same(job.carry_on(), 5, job.view)
            assert f"0000:02:00 is in use, so nothing was touched: pid {holder.pid} " in job.why, job.why
    same(lab.drivers(), HOMES)


@case
def a_card_that_was_removed_comes_back_by_a_rescan() -> None:
    group = lab.group_of(GPUS[3])

    async def away_and_back() -> None:
        runner = LocalRunner()
        for address in reversed(_functions(GPUS[3])):
            same((await kernel_write.remove(runner, address)).outcome, "done")
        same((PCI / "devices" / GPUS[3]).exists(), False)
        same((await kernel_write.rescan(runner)).outcome, "done")

    asyncio.run(away_and_back())
    until(lambda: lab.drivers() == HOMES)
    same(lab.group_of(GPUS[3]), group)
    same([slot.address for slot in read_inventory(ROOT, GPUS).slots], list(GPUS))
