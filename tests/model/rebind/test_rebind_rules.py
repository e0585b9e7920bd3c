"""Which cards an operator means, which minors they get, and what was left half way."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rebind_values import (
    BUSES,
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    changed,
    container,
    function,
    inventory,
    slot,
    vm,
)

from console.model.rebind.choice import ChoiceProblem, choose
from console.model.rebind.inventory import Inventory, Reservation
from console.model.rebind.minors import predicted_minors
from console.model.rebind.screen import firmware_pictures, framebuffer_names
from console.model.rebind.stranded import reconcile

DISK = function("0000:66:00.0", "nvme", vendor=0x144D, device=0xA80A, class_code=0x010802)


# The choice


def test_without_a_name_all_cards_of_the_site_are_meant():
    assert [one.address for one in choose(inventory(), ())] == [FIRST, SECOND, THIRD, FOURTH]
    assert [one.address for one in choose(inventory(), (), (THIRD, FIRST))] == [FIRST, THIRD]


@pytest.mark.parametrize(
    "text", ["0000:41:00.0", "41:00.0", "0000:41:00", "00000000:41:00.0", " 0000:41:00.0 "]
)
def test_a_card_may_be_named_in_every_usual_way(text: str):
    assert [one.address for one in choose(inventory(), (text,))] == [THIRD]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("gpu0",), "gpu0 is no PCI address: expected one such as 0000:41:00.0"),
        (("",), "an empty name is no PCI address"),
        (("\x1b[2J0",), "0 is no PCI address"),
        (("0000:99:00.0",), "0000:99:00.0 is not on the PCI bus; the cards are: 0000:01:00.0"),
        (("0000:41:00.1",), "0000:41:00.1 is the audio function of a card: name the card, 0000:41:00.0"),
        (("66:00",), "0000:66:00.0 is no NVIDIA GPU: NVMe disk 144d:a80a, driver nvme"),
        (("41:00", "0000:41:00.0"), "0000:41:00.0 is named twice: 41:00 and 0000:41:00.0"),
    ],
)
def test_what_is_no_card_is_refused_with_what_to_type(asked: tuple[str, ...], words: str):
    with pytest.raises(ChoiceProblem) as problem:
        choose(inventory(others=(DISK,)), asked)
    assert words in str(problem.value)


def test_a_card_that_is_not_the_sites_is_refused():
    with pytest.raises(ChoiceProblem, match=r"not one of this site's cards: 0000:01:00\.0"):
        choose(inventory(), (SECOND,), (FIRST,))
    with pytest.raises(ChoiceProblem, match=r"0000:e1:00\.0 of the site's gpus is not on the PCI bus"):
        choose(inventory(), (), ("0000:e1:00.0",))
    with pytest.raises(ChoiceProblem, match="no NVIDIA card"):
        choose(inventory(()), ())


# Minors


def away(*buses: str) -> Inventory:
    return inventory(tuple(slot(bus, "vfio-pci") if bus in buses else slot(bus) for bus in BUSES))


def test_cards_that_come_back_get_the_lowest_free_minors_in_their_order():
    assert predicted_minors(away("21", "61"), (FOURTH, SECOND)) == {SECOND: 1, FOURTH: 3}
    assert predicted_minors(away(*BUSES), (FOURTH, FIRST)) == {FIRST: 0, FOURTH: 1}, (
        "which is not what they had"
    )


def test_a_minor_that_is_not_known_makes_all_unknown():
    slots = (slot("01", minor=None), slot("21", "vfio-pci"))
    assert predicted_minors(inventory(slots), (SECOND,)) == {SECOND: None}


@given(gone=st.sets(st.sampled_from(BUSES)))
def test_no_two_cards_get_one_minor(gone: set[str]):
    world = away(*gone)
    given_out = predicted_minors(world, (f"0000:{bus}:00.0" for bus in gone))
    kept = {one.minor for one in world.slots if one.on_nvidia}
    assert len(set(given_out.values()) | kept) == 4
    assert list(given_out.values()) == sorted(number for number in given_out.values() if number is not None)


# What was left half way


def test_nothing_is_stranded_when_all_is_well():
    assert reconcile(inventory(), container=129) == ()
    running = inventory(
        tuple(slot(bus, "vfio-pci") for bus in BUSES),
        vms=(vm(status="running"),),
        reservations=(Reservation(address=FIRST, vmid=100, pid=9, alive=True),),
    )
    assert reconcile(running, container=129) == ()


def test_a_crash_between_unbind_and_bind_leaves_no_driver_and_an_override():
    card = changed(slot("41", None, "vfio-pci"), THIRD, override="vfio-pci")
    no_driver, override = reconcile(inventory((slot("01"), card)), container=129)
    assert (no_driver.kind, no_driver.repair, no_driver.functions) == ("no-driver", "container", (THIRD,))
    assert "0000:41:00.1 of it is on vfio-pci" in no_driver.words
    assert (override.kind, override.repair, override.functions) == ("override", "override", (THIRD,))
    assert not no_driver.harmless


def test_half_a_group_goes_where_the_gpu_is():
    (out,) = reconcile(inventory((slot("41", "vfio-pci", "snd_hda_intel"),), vms=(vm(status="running"),)))
    assert (out.kind, out.repair, out.functions) == ("half-group", "vm", ("0000:41:00.1",))
    (back,) = reconcile(inventory((slot("41", "nvidia", "vfio-pci"),)))
    assert (back.kind, back.repair, back.functions) == ("half-group", "container", ("0000:41:00.1",))
    (unbound,) = reconcile(inventory((slot("41", "vfio-pci", None),)))
    assert (unbound.kind, unbound.functions) == ("half-group", ("0000:41:00.1",))
    assert "no driver" in unbound.words


def test_sound_without_a_driver_is_fine_while_the_host_has_the_card():
    assert reconcile(inventory((slot("41", "nvidia", None),))) == ()


def test_a_dead_card_is_only_ever_for_the_ladder():
    card = changed(slot("41", None), THIRD, config_ok=False, override="nvidia")
    (dead,) = reconcile(inventory((card,)))
    assert (dead.kind, dead.repair) == ("dead", "recover")


def test_a_card_on_vfio_that_no_vm_uses_is_of_no_use():
    idle = reconcile(away("61"), container=129)
    assert [(one.card, one.kind, one.harmless) for one in idle] == [(FOURTH, "idle", True)]
    assert reconcile(away("61"), container=None) == (), "nothing says that anybody misses it"
    fewer = msgspec.structs.replace(away("61"), containers=(container(cards=3),))
    assert reconcile(fewer, container=129) == (), "the container is set up for three"


def test_a_reservation_of_a_dead_process_is_told():
    left = (
        Reservation(address=FIRST, vmid=100, pid=7, alive=False),
        Reservation(address="0000:01:00.1", vmid=100, pid=7, alive=False),
        Reservation(address=SECOND, vmid=101, pid=8, alive=True),
        Reservation(address="0000:66:00.0", vmid=101, pid=9, alive=False),
    )
    (found,) = reconcile(inventory(reservations=left))
    assert (found.card, found.kind, found.functions) == (FIRST, "reservation", (FIRST, "0000:01:00.1"))


def test_cards_of_a_job_that_is_not_over_are_not_stranded():
    world = inventory((slot("41", None), slot("61", None)))
    assert [one.card for one in reconcile(world, in_flight=frozenset({THIRD}))] == [FOURTH]


# The host's own picture


def test_the_cards_memory_in_which_firmware_left_a_picture():
    text = (
        "00000000-00000fff : Reserved\n"
        "90000000-93ffffff : PCI Bus 0000:62\n  90000000-93ffffff : 0000:62:00.0\n"
        "20000000000-2bfffffffff : PCI Bus 0000:40\n"
        "  20000000000-21fffffffff : 0000:41:00.0\n    20000000000-200007effff : BOOTFB\n"
        "      20000000000-200007effff : simplefb\n"
        "  22000000000-220007effff : 0000:42:00.0\n"
    )
    assert firmware_pictures(text) == {"0000:41:00.0": "simplefb"}
    hidden = "\n".join(
        " " * (len(line) - len(line.lstrip())) + "00000000-00000000 : " + line.split(" : ")[1]
        for line in text.splitlines()
    )
    assert firmware_pictures(hidden) == {"0000:41:00.0": "simplefb"}, "without root addresses are zero"


def test_framebuffers_have_names():
    assert framebuffer_names("0 EFI VGA\n1 nvidia-drmdrmfb\nx y\n") == {
        "0": "EFI VGA",
        "1": "nvidia-drmdrmfb",
    }


@given(text=st.text(alphabet=" 0f-:BOTF.\n", max_size=200))
def test_any_map_of_memory_is_survived(text: str):
    firmware_pictures(text)
    framebuffer_names(text)


def test_a_card_that_waits_in_the_kernel_is_told_as_that_and_nothing_is_proposed():
    card = changed(slot("41", None), THIRD, pending="pid 88 (dd of=/sys/bus/pci/devices/…/unbind)")
    (pending,) = reconcile(inventory((slot("01"), card)), container=129)
    assert (pending.kind, pending.repair, pending.functions) == ("pending", None, (THIRD,))
    assert "pid 88" in pending.words
    assert "restart the host" in pending.remedy
