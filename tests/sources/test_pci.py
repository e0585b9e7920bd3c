"""Cards from PCI sysfs: whoever drives them, asleep, lost or narrowed, and whatever the files hold."""

# ruff: noqa: E501  files are as long as they are

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from console.model.card import PciCard
from console.model.reading import Reading
from console.sources.pci import PciSource
from console.sources.source import Unavailable, attempt

GPU = "0x030000"
AUDIO = "0x040300"
AWAKE = bytes.fromhex("de10b12b06041000a1000003")


class Tree:
    """A /sys and /proc as the kernel lays them out: devices as links into their bridge's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bus = root / "sys/bus/pci"
        (self.bus / "devices").mkdir(parents=True)

    def function(
        self,
        address: str,
        *,
        driver: str | None = None,
        group: int | None = None,
        config: bytes = AWAKE,
        port: dict[str, str] | None = None,
        **files: str,
    ) -> Path:
        bus = address.split(":")[1]
        bridge = self.root / f"sys/devices/pci0000:{bus}/0000:{bus}:01.1"
        folder = bridge / address
        folder.mkdir(parents=True)
        for name, value in {"max_link_width": "16", **(port or {})}.items():
            (bridge / name).write_text(value + "\n")
        values = {
            "vendor": "0x10de",
            "device": "0x2bb1",
            "class": GPU,
            "driver_override": "(null)",
            "power_state": "D0",
            "numa_node": "1",
            "current_link_speed": "32.0 GT/s PCIe",
            "current_link_width": "16",
            "max_link_speed": "32.0 GT/s PCIe",
            "max_link_width": "16",
        }
        values.update({"class": files.pop("cls")} if "cls" in files else {})
        for name, value in {**values, **files}.items():
            (folder / name).write_text(value + "\n")
        (folder / "config").write_bytes(config)
        if driver is not None:
            (self.bus / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(self.bus / "drivers" / driver)
        if group is not None:
            (self.root / f"sys/kernel/iommu_groups/{group}").mkdir(parents=True, exist_ok=True)
            (folder / "iommu_group").symlink_to(self.root / f"sys/kernel/iommu_groups/{group}")
        (self.bus / "devices" / address).symlink_to(folder)
        return folder

    def card(self, bus: str, driver: str | None = "nvidia", **more: object) -> Path:
        """A card of two functions, GPU and audio."""
        folder = self.function(f"0000:{bus}:00.0", driver=driver, **more)  # type: ignore[arg-type]
        sound = driver if driver is None or driver.startswith("vfio") else "snd_hda_intel"
        group = more.get("group")
        self.function(f"0000:{bus}:00.1", driver=sound, cls=AUDIO, device="0x22e8", group=group)  # type: ignore[arg-type]
        return folder

    def nvidia_says(self, address: str, text: str) -> None:
        folder = self.root / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(text)

    def scan(self, **options: object) -> tuple[PciCard, ...]:
        return PciSource(self.root, **options).scan()  # type: ignore[arg-type]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


BUSES = ("01", "21", "41", "61", "81", "a1", "c1", "e1")


def test_eight_cards_of_two_functions(tree: Tree):
    for minor, bus in enumerate(reversed(BUSES)):
        tree.card(bus, group=20 + minor)
        tree.nvidia_says(
            f"0000:{bus}:00.0",
            f"Model: \t\t NVIDIA RTX PRO 6000\nGPU UUID: \t GPU-{bus}\nBus Location: \t 0000:{bus}:00.0\nDevice Minor: \t {minor}\n",
        )
    cards = tree.scan()
    assert [card.address for card in cards] == [f"0000:{bus}:00.0" for bus in BUSES]
    first = cards[0]
    assert [(one.address, one.driver, one.class_code) for one in first.functions] == [
        ("0000:01:00.0", "nvidia", 0x030000),
        ("0000:01:00.1", "snd_hda_intel", 0x040300),
    ]
    assert (first.driver, first.iommu_group, first.numa_node, first.present) == ("nvidia", 27, 1, True)
    assert (first.minor, first.uuid) == (7, "GPU-01")
    assert (first.link.speed, first.link.width, first.link.narrowed) == (32.0, 16, False)
    assert first.functions[0].driver_override is None


def test_a_card_that_a_vm_has(tree: Tree):
    tree.card("41", driver="vfio-pci", power_state="D3hot", driver_override="vfio-pci")
    (card,) = tree.scan()
    assert (card.driver, card.functions[1].driver) == ("vfio-pci", "vfio-pci")
    assert card.functions[0].driver_override == "vfio-pci", "left behind by whoever bound it"
    assert card.functions[0].power_state == "D3hot"
    assert (card.minor, card.uuid, card.present) == (None, None, True)


def test_a_card_without_driver_iommu_or_numa_node(tree: Tree):
    tree.card("41", driver=None, numa_node="-1")
    (card,) = tree.scan()
    assert (card.driver, card.iommu_group, card.numa_node) == (None, None, None)


def test_other_vendors_displays_and_nvidias_other_devices_are_no_cards(tree: Tree):
    tree.function("0000:c3:00.0", vendor="0x1a03", device="0x2000", driver="ast")  # the board's own VGA
    tree.function("0000:05:00.0", vendor="0x1002", device="0x744c", driver="amdgpu")
    tree.function("0000:07:00.0", cls="0x068000", device="0x22a3")  # an NVSwitch is a bridge
    tree.card("41")
    tree.function("0000:42:00.0", cls="0x030200", driver="nvidia")  # a 3D controller, without VGA
    assert [card.address for card in tree.scan()] == ["0000:41:00.0", "0000:42:00.0"]


async def test_no_card_at_all_is_said_in_words(tree: Tree):
    tree.function("0000:c3:00.0", vendor="0x1a03")
    source = PciSource(tree.root)
    with pytest.raises(Unavailable, match="no NVIDIA card on the PCI bus"):
        await source.read()


async def test_a_machine_without_pci_says_which_folder_is_not_there(tmp_path: Path):
    with pytest.raises(Unavailable, match="sys/bus/pci/devices: No such file"):
        await PciSource(tmp_path).read()


def test_a_card_off_the_bus_reads_all_ones(tree: Tree):
    tree.card("41", config=b"\xff" * 64, current_link_width="8")
    (card,) = tree.scan()
    assert not card.present
    assert card.driver == "nvidia", "its driver has not let go of it"
    assert (card.link.width, card.link.narrowed) == (None, False), "what is lost is not narrow"


def test_a_card_whose_folder_vanished_keeps_its_row_and_comes_back(tree: Tree):
    tree.card("41")
    tree.card("61")
    source = PciSource(tree.root)
    assert len(source.scan()) == 2
    removed = tree.bus / "devices/0000:41:00.0"
    target = removed.readlink()
    removed.unlink()
    lost, other = source.scan()
    assert (lost.address, lost.present, lost.driver, len(lost.functions)) == (
        "0000:41:00.0",
        False,
        "nvidia",
        2,
    )
    assert (lost.link.width, other.present) == (None, True)
    (tree.bus / "devices/0000:61:00.0").unlink()
    assert [card.present for card in source.scan()] == [False, False], "the last one, too"
    removed.symlink_to(target)
    assert [card.present for card in source.scan()] == [True, False]


@pytest.mark.parametrize(
    ("now", "card", "port", "narrowed"),
    [("8", "16", "16", True), ("8", "16", "8", False), ("16", "16", "16", False), ("0", "16", "16", False)],
)
def test_a_link_is_narrow_when_card_and_slot_could_do_more(
    tree: Tree, now: str, card: str, port: str, narrowed: bool
):
    tree.function("0000:41:00.0", current_link_width=now, max_link_width=card, port={"max_link_width": port})
    (found,) = tree.scan()
    assert found.link.narrowed is narrowed


def test_an_idle_cards_slow_link_is_not_narrow(tree: Tree):
    tree.card("41", current_link_speed="2.5 GT/s PCIe")
    (card,) = tree.scan()
    assert (card.link.speed, card.link.best_speed, card.link.narrowed) == (2.5, 32.0, False)


@pytest.mark.parametrize("state", ["D3hot", "D3cold"])
def test_a_sleeping_card_is_not_woken(tree: Tree, state: str, monkeypatch: pytest.MonkeyPatch):
    """The kernel resumes a card to read its config space."""
    asleep = {"power_state": state, "current_link_width": "63", "max_link_width": "255"}
    tree.card("41", driver="vfio-pci", config=b"\xff" * 64, **asleep)
    opened: list[str] = []
    plain = Path.open

    def spying(path: Path, *args: object, **kwargs: object) -> object:
        opened.append(str(path))
        return plain(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", spying)
    (card,) = tree.scan()
    assert card.present
    assert (card.link.width, card.link.best_width) == (None, 16), "registers of all ones are no width"
    assert opened
    assert not [path for path in opened if path.endswith("/config")]


def test_only_the_cards_of_the_site_also_one_that_is_not_there(tree: Tree):
    for bus in ("41", "61"):
        tree.card(bus)
    absent, found = tree.scan(only=("0000:61:00.0", "0000:21:00.0"))
    assert (absent.address, absent.present, absent.functions, absent.driver) == (
        "0000:21:00.0",
        False,
        (),
        None,
    )
    assert (found.address, found.present, len(found.functions)) == ("0000:61:00.0", True, 2)


def test_text_from_firmware_cannot_reach_the_terminal_raw(tree: Tree):
    tree.card("41", driver_override="\x1b[2Jvfio\u202e-pci")
    tree.nvidia_says("0000:41:00.0", "GPU UUID: \x1b]0;title\x07GPU-1\nDevice Minor: many\n")
    (card,) = tree.scan()
    assert card.functions[0].driver_override == "vfio-pci"
    assert (card.uuid, card.minor) == ("GPU-1", None)


FILES = (
    "vendor", "device", "class", "driver_override", "power_state", "numa_node", "config",
    "current_link_speed", "current_link_width", "max_link_speed", "max_link_width",
)  # fmt: skip
GARBAGE = st.one_of(
    st.none(),
    st.binary(max_size=60),
    st.sampled_from([b"", b"\n", b"0x", b"-1", b"...", b"9" * 5000, b"1_6", b"\xd9\xa3", b"inf", b"0x10de"]),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.dictionaries(st.sampled_from(FILES), GARBAGE), information=st.binary(max_size=80))
def test_any_bytes_in_any_file_give_cards_or_none(
    tmp_path: Path, contents: dict[str, bytes | None], information: bytes
):
    root = tmp_path / "root"
    shutil.rmtree(root, ignore_errors=True)
    tree = Tree(root)
    folder = tree.card("41")
    tree.card("61")
    for name, data in contents.items():
        (folder / name).unlink()
        if data is None:
            (folder / name).mkdir()  # neither file nor absent
        else:
            (folder / name).write_bytes(data)
    tree.nvidia_says("0000:41:00.0", "")
    (root / "proc/driver/nvidia/gpus/0000:41:00.0/information").write_bytes(information)
    cards = tree.scan()
    assert "0000:61:00.0" in [card.address for card in cards], "one card's garbage costs no other its row"
    for card in cards:
        assert isinstance(card.present, bool)
        assert card.link.width in (None, 1, 2, 4, 8, 12, 16, 32)
        for function in card.functions:
            for text in (function.driver_override, function.power_state, card.uuid):
                assert text is None or min(text, default=" ") >= " "


async def test_a_read_that_blocks_in_the_kernel_costs_one_thread_and_no_other_source(tree: Tree):
    """A card that is being reset holds its sysfs files; scans must not pile up behind it."""
    tree.card("41")
    source = PciSource(tree.root)
    release, started = threading.Event(), []
    real = source.scan

    def blocked() -> tuple[PciCard, ...]:
        started.append(threading.current_thread())
        release.wait(10)
        return real()

    source.scan = blocked  # type: ignore[method-assign]
    reading: Reading[tuple[PciCard, ...]] = Reading("pci", source.period)
    for _ in range(3):
        reading = await attempt(reading, 0.02, source.read)
        assert reading.error == "no answer within 0.02 s"
    assert len(started) == 1
    assert started[0].daemon, "it must not keep the console from ending"
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 2) == 7
    release.set()
    reading = await attempt(reading, 5, source.read)
    assert reading.error is None
    assert reading.value is not None
    assert [card.address for card in reading.value] == ["0000:41:00.0"]
    reading = await attempt(reading, 5, source.read)
    assert len(started) == 2, "and the next one looks anew"
