"""The whole NVML path through ctypes and a real process, against the stand-in library and its faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from console.model.card import CardTelemetry, NvmlSample
from console.model.reading import Reading
from console.sources.nvml import NvmlSource, default_command
from console.transport.local import LocalRunner
from tests.rigs.nvml.build import build, with_library

pytestmark = pytest.mark.rig

PERIOD = 0.5
ADDRESSES = [f"0000:{bus}:00.0" for bus in ("01", "21", "41", "61", "81", "a1", "c1", "e1")]
COUNTS_PER_SECOND = os.sysconf("SC_CLK_TCK")

#: What the helper may cost with eight cards at 1 Hz, percent of a core, and how often it may show that.
CPU_PERCENT = 1.0
COST_ROUNDS = 3

Read = Reading[NvmlSample]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


class Box:
    """The stand-in cards: a source that reads them, and their faults."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.library = library
        self.faults_file = folder / "faults"
        self.faults_file.write_text("")
        self.call_log = folder / "calls"
        self.proc = folder / "proc"

    def fault(self, faults: str) -> None:
        """Replaced in one step, as the library may read it at any moment."""
        new = self.faults_file.with_suffix(".new")
        new.write_text(faults)
        new.replace(self.faults_file)

    def command(self, period: float = PERIOD, **settings: str) -> list[str]:
        settings = {"STUB_FAULTS_FILE": str(self.faults_file), **settings}
        return [*with_library(self.library, **settings), *default_command(period), "--proc", str(self.proc)]

    def source(self, period: float = PERIOD, **settings: str) -> NvmlSource:
        return NvmlSource(LocalRunner(), period, self.command(period, **settings))

    @contextlib.asynccontextmanager
    async def watched(self, **settings: str) -> AsyncIterator[AsyncIterator[Read]]:
        async with asyncio.timeout(30), contextlib.aclosing(self.source(**settings).watch()) as readings:
            yield readings


@pytest.fixture
def box(library: Path, tmp_path: Path) -> Box:
    return Box(library, tmp_path)


async def until(readings: AsyncIterator[Read], holds: Callable[[Read], bool]) -> Read:
    async for reading in readings:
        if holds(reading):
            return reading
    raise AssertionError("the readings ended")


def cards_of(reading: Read) -> list[CardTelemetry]:
    return list(reading.value.cards) if reading.value is not None else []


def card(reading: Read, index: int) -> CardTelemetry:
    return next(card for card in cards_of(reading) if card.address == ADDRESSES[index])


def others(reading: Read, *indices: int) -> list[CardTelemetry]:
    return [card for card in cards_of(reading) if ADDRESSES.index(card.address) not in indices]


def worker_pids(box: Box) -> list[int]:
    """Processes whose command line names this box's proc folder: its NVML process only."""
    mark = str(box.proc).encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


# --- healthy -------------------------------------------------------------------------------------


async def test_eight_cards_are_read_with_all_they_tell(box: Box) -> None:
    async with box.watched(STUB_PID="4242") as readings:
        reading = await anext(readings)
        assert reading.error is None
        assert not reading.stale(time.monotonic())
        sample = reading.value
        assert sample is not None
        assert (sample.driver_version, sample.nvml_version) == ("580.95.05", "13.580.95.05")
        assert [card.address for card in sample.cards] == ADDRESSES
        for each in sample.cards:
            assert each.name == "NVIDIA RTX PRO 6000 Blackwell Server Edition"
            assert each.memory_total_bytes == 97_887 * 1024**2
            assert each.memory_used_bytes is not None
            assert each.memory_reserved_bytes is not None
            assert each.memory_free_bytes is not None
            parts = each.memory_used_bytes, each.memory_reserved_bytes, each.memory_free_bytes
            assert sum(parts) == each.memory_total_bytes
            assert each.power_w is not None
            assert 300 < each.power_w < each.power_limit_w == 600
            assert (each.persistence, each.ecc_uncorrected, each.row_remap_failed) == (True, 0, False)
            assert each.missing.pop("retired_pages") == "Not Supported"
            assert not each.lost
        assert len({card.uuid for card in sample.cards}) == 8
        assert {address: [p.pid for p in found] for address, found in sample.processes.items()} == {
            address: [4242] for address in ADDRESSES
        }


async def test_the_numbers_move(box: Box) -> None:
    async with box.watched() as readings:
        seen = set()
        async for reading in readings:
            seen.add(card(reading, 0).power_w)
            if len(seen) >= 3:
                break


async def test_throughput_is_read_of_one_card_at_a_time(box: Box) -> None:
    async with box.watched(STUB_CALL_LOG=str(box.call_log)) as readings:
        count = 0
        async for reading in readings:
            count += 1
            if all(card.pcie_tx_bytes_per_s is not None for card in cards_of(reading)):
                break
        assert count <= 9
    calls = box.call_log.read_text().split("\n")
    asked = [line for line in calls if line.startswith("nvmlDeviceGetPcieThroughput")]
    assert len(asked) <= 2 * (count + 1)
    names = [line for line in calls if line.startswith("nvmlDeviceGetName")]
    assert len(names) == 8


async def test_other_addresses_are_taken_as_they_come(box: Box) -> None:
    async with box.watched(STUB_ADDRESSES="0000:C1:00.0,10000:02:00.0") as readings:
        assert [card.address for card in cards_of(await anext(readings))] == ["0000:c1:00.0", "10000:02:00.0"]


# --- faults of a card ----------------------------------------------------------------------------


async def test_a_lost_card_costs_its_row_and_comes_back(box: Box) -> None:
    async with box.watched() as readings:
        await anext(readings)
        box.fault("lost:3")
        reading = await until(readings, lambda r: card(r, 3).lost)
        lost = card(reading, 3)
        assert (lost.power_w, lost.memory_used_bytes, lost.missing["power_w"]) == (None, None, "GPU is lost")
        assert lost.name is not None
        assert all(each.power_w is not None and not each.lost for each in others(reading, 3))
        box.fault("")
        assert card(await until(readings, lambda r: not card(r, 3).lost), 3).power_w is not None


@pytest.mark.parametrize(
    ("fault", "field", "reason"),
    [
        ("na:power:2", "power_w", "Not Supported"),
        ("na:utilization:2", "utilization_percent", "Not Supported"),
        ("denied:temperature:2", "temperature_c", "Insufficient Permissions"),
        ("na:throttle:2", "throttle_reasons", "Not Supported"),
        ("na:ecc:2", "ecc_corrected", "Not Supported"),
        ("old:remapped:2", "remapped_rows", "Function Not Found"),
        ("old:memory2:2", "memory_reserved_bytes", "this driver counts reserved memory as used"),
        ("na:processes:2", "processes", "Not Supported"),
        ("na:xid:2", "xid", "Not Supported"),
        ("garbage:2", "processes", "driver and nvidia-ml-py disagree"),
    ],
)
async def test_a_field_that_is_not_available_costs_that_field(
    box: Box, fault: str, field: str, reason: str
) -> None:
    box.fault(fault)
    async with box.watched() as readings:
        reading = await anext(readings)
    struck = card(reading, 2)
    assert reason in struck.missing[field]
    assert getattr(struck, field, None) is None
    assert struck.memory_used_bytes is not None
    assert struck.sm_clock_mhz is not None
    assert not struck.lost
    assert all(field not in each.missing for each in others(reading, 2))


async def test_a_call_that_hangs_costs_one_row_until_it_returns(box: Box) -> None:
    async with box.watched() as readings:
        await anext(readings)
        box.fault("hang:power:5")
        marked = await until(readings, lambda r: card(r, 5).power_w is None)
        struck = card(marked, 5)
        assert struck.missing["power_w"].startswith("nvmlDeviceGetPowerUsage has not returned for ")
        assert (struck.memory_used_bytes, struck.lost) == (None, False)
        assert struck.name is not None
        assert marked.error is None
        taken = [marked]
        for _ in range(4):
            taken.append(await anext(readings))
        # The others are read on every beat: their readings keep the pace and their numbers move.
        gaps = [after.taken_at - before.taken_at for before, after in pairwise(taken)]
        assert max(gaps) < 2 * PERIOD
        assert all(each.power_w is not None for reading in taken for each in others(reading, 5))
        assert len({card(reading, 4).power_w for reading in taken}) > 1
        box.fault("")
        back = card(await until(readings, lambda r: card(r, 5).power_w is not None), 5)
        assert "power_w" not in back.missing


async def test_all_cards_hanging_at_once_keeps_the_process_alive(box: Box) -> None:
    async with box.watched() as readings:
        await anext(readings)
        box.fault("hang:utilization:*")
        reading = await until(readings, lambda r: all(each.power_w is None for each in cards_of(r)))
        assert len(cards_of(reading)) == 8
        assert reading.error is None
        box.fault("")
        await until(readings, lambda r: all(each.power_w is not None for each in cards_of(r)))


async def test_slow_calls_do_not_break_the_beat(box: Box) -> None:
    box.fault("slow:25")
    async with box.watched() as readings:
        await until(readings, lambda r: all(each.power_w is not None for each in cards_of(r)))
        taken = [await anext(readings) for _ in range(6)]
    gaps = [after.taken_at - before.taken_at for before, after in pairwise(taken)]
    assert max(gaps) < 2.5 * PERIOD
    assert all(reading.error is None for reading in taken)


# --- cards that come and go ----------------------------------------------------------------------


async def test_a_card_that_is_unbound_leaves_and_one_that_is_bound_appears(box: Box) -> None:
    async with box.watched(STUB_PID="4242") as readings:
        await anext(readings)
        box.fault("gone:7")
        without = await until(readings, lambda r: len(cards_of(r)) == 7)
        assert without.value is not None
        assert ADDRESSES[7] not in {*(c.address for c in without.value.cards), *without.value.processes}
        box.fault("")
        again = await until(readings, lambda r: len(cards_of(r)) == 8)
        assert card(again, 7).power_w is not None


async def test_a_change_in_the_kernels_list_opens_nvml_anew(box: Box) -> None:
    gpus = box.proc / "driver" / "nvidia" / "gpus"
    for address in ADDRESSES[:7]:
        (gpus / address).mkdir(parents=True)
    box.fault("gone:7")
    async with box.watched(STUB_CALL_LOG=str(box.call_log)) as readings:
        assert len(cards_of(await anext(readings))) == 7
        (gpus / ADDRESSES[7]).mkdir()
        box.fault("")
        await until(readings, lambda r: len(cards_of(r)) == 8)
    assert box.call_log.read_text().count("nvmlInitWithFlags") == 2


async def test_a_withheld_card_keeps_its_row_by_the_kernels_list(box: Box) -> None:
    for address in ADDRESSES:
        (box.proc / "driver" / "nvidia" / "gpus" / address).mkdir(parents=True)
    box.fault("withheld:6")
    async with box.watched() as readings:
        reading = await anext(readings)
    assert len(cards_of(reading)) == 8
    assert card(reading, 6).lost
    assert card(reading, 6).missing["power_w"] == "GPU is lost"
    assert all(each.power_w is not None for each in others(reading, 6))


async def test_an_xid_is_reported_with_its_card(box: Box) -> None:
    async with box.watched() as readings:
        await anext(readings)
        box.fault("xid:79:1")
        reading = await until(readings, lambda r: r.value is not None and r.value.xids != ())
        assert reading.value is not None
        [xid] = reading.value.xids
        assert (xid.address, xid.code) == (ADDRESSES[1], 79)
        assert abs(time.monotonic() - xid.at) < 5


async def test_events_that_hang_are_told_and_cost_no_card(box: Box) -> None:
    async with box.watched() as readings:
        await anext(readings)
        box.fault("hang:wait")
        reading = await until(readings, lambda r: r.error is not None)
        assert "nvmlEventSetWait_v2 has not returned" in str(reading.error)
        assert "Xid errors are not seen" in str(reading.error)
        later = await anext(readings)
        assert all(each.power_w is not None for each in cards_of(later))
        box.fault("")
        await until(readings, lambda r: r.error is None)


# --- no driver -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nolib", "libnvidia-ml.so.1 is not found or cannot be loaded"),
        ("unloaded", "the nvidia kernel driver is not loaded"),
        ("noperm", "no permission to use the NVIDIA driver"),
        ("gone:*", "no card is bound to the nvidia driver"),
        ("mismatch", "the loaded kernel module is 570.124.06, the NVML library is 13.580.95.05"),
    ],
)
async def test_without_a_usable_driver_the_reason_is_told_until_it_works(
    box: Box, fault: str, words: str
) -> None:
    (box.proc / "driver" / "nvidia").mkdir(parents=True)
    (box.proc / "driver" / "nvidia" / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (root@pve1)\n"
    )
    box.fault(fault)
    async with box.watched() as readings:
        reading = await anext(readings)
        assert reading.value is None
        assert words in str(reading.error)
        box.fault("")
        assert len(cards_of(await anext(readings))) == 8


def test_a_missing_library_is_told_by_exit_status_and_reason(box: Box, tmp_path: Path) -> None:
    """Without the stand-in, where the machine has no NVIDIA library of its own."""
    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_bytes(b"no library")
    ended = subprocess.run(
        with_library(broken) + default_command(PERIOD), capture_output=True, timeout=20, check=False
    )
    assert ended.returncode == 3
    assert "libnvidia-ml.so.1" in json.loads(ended.stdout)["reason"]


async def test_a_driver_that_takes_long_to_initialise_says_so_meanwhile(box: Box) -> None:
    box.fault("hang:init")
    async with box.watched() as readings:
        seen = [await anext(readings) for _ in range(8)]
        assert all(str(reading.error).startswith("NVML is starting: nvmlInit") for reading in seen)
        box.fault("")
        assert len(cards_of(await until(readings, lambda r: r.error is None))) == 8


# --- the process's end ---------------------------------------------------------------------------


async def test_a_killed_process_is_started_again_and_leaves_only_an_old_reading(box: Box) -> None:
    async with box.watched() as readings:
        before = await anext(readings)
        [pid] = worker_pids(box)
        os.kill(pid, signal.SIGKILL)
        failed = await until(readings, lambda r: r.error is not None)
        assert "killed by signal 9" in str(failed.error)
        assert failed.value is not None
        assert len(failed.value.cards) == 8
        assert failed.taken_at is not None
        assert before.taken_at is not None
        assert failed.taken_at >= before.taken_at
        fresh = await until(readings, lambda r: r.error is None)
        assert not fresh.stale(time.monotonic())
        assert worker_pids(box) != [pid]


@pytest.mark.parametrize("fault", ["", "hang:power:*", "hang:shutdown", "hang:init"])
async def test_close_ends_the_process_within_a_second(box: Box, fault: str) -> None:
    if fault == "hang:init":
        box.fault(fault)
    source = box.source()
    async with asyncio.timeout(20), contextlib.aclosing(source.watch()) as readings:
        await anext(readings)
        box.fault(fault)
        await asyncio.sleep(2 * PERIOD)
        assert len(worker_pids(box)) == 1
        began = time.monotonic()
        await source.close()
        took = time.monotonic() - began
        assert worker_pids(box) == []
    print(f"\nclosed with {fault or 'no fault'} in {took * 1000:.0f} ms")
    assert took < 1.0


async def test_pause_lets_go_of_the_driver_and_resume_takes_it_up_again(box: Box) -> None:
    source = box.source()
    async with asyncio.timeout(20), contextlib.aclosing(source.watch()) as readings:
        await anext(readings)
        await source.pause("ended for the rebind")
        assert worker_pids(box) == []
        paused = await until(readings, lambda r: r.error is not None)
        assert paused.error == "ended for the rebind"
        source.resume()
        assert len(cards_of(await until(readings, lambda r: r.error is None))) == 8


@pytest.fixture
def bare(box: Box) -> Iterator[subprocess.Popen[bytes]]:
    """The process itself, with its output in a pipe."""
    with subprocess.Popen(box.command(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b'"hello"' in process.stdout.readline()
        yield process
        process.kill()


def test_it_ends_at_once_when_nobody_listens(bare: subprocess.Popen[bytes]) -> None:
    assert bare.stdout is not None
    began = time.monotonic()
    bare.stdout.close()
    bare.wait(5)
    assert time.monotonic() - began < 0.5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_ends_at_once_when_told_to(bare: subprocess.Popen[bytes], number: int) -> None:
    began = time.monotonic()
    bare.send_signal(number)
    assert bare.wait(5) == 0
    assert time.monotonic() - began < 0.5


def test_it_ends_when_told_to_while_its_listener_does_not_read(box: Box) -> None:
    with subprocess.Popen(box.command(0.01), stdout=subprocess.PIPE) as process:
        time.sleep(1.0)  # 64 KiB of pipe are full by now
        began = time.monotonic()
        process.terminate()
        process.wait(5)
        assert time.monotonic() - began < 1.0


# --- cost ----------------------------------------------------------------------------------------


def test_what_it_costs(box: Box) -> None:
    with subprocess.Popen(box.command(1.0, STUB_PID="4242"), stdout=subprocess.DEVNULL) as process:
        time.sleep(2.0)
        # Another program's load makes the same work cost more CPU time, by cold caches and shared
        # cores, and never less: the best of a few rounds is nearest to the cost of the work itself.
        percent = math.inf
        for _ in range(COST_ROUNDS):
            before, began = cpu_seconds(process.pid), time.monotonic()
            time.sleep(10.0)
            percent = min(percent, 100 * (cpu_seconds(process.pid) - before) / (time.monotonic() - began))
            if percent < CPU_PERCENT:
                break
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        process.terminate()
    print(f"\neight cards at 1 Hz: {percent:.2f} % of a core, {resident / 1024:.1f} MiB resident")
    assert percent < CPU_PERCENT
    assert resident < 18 * 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / COUNTS_PER_SECOND


def test_another_monitor_reads_the_stand_in_too(library: Path) -> None:
    nvitop = subprocess.run(
        [*with_library(library), sys.executable, "-m", "nvitop", "-1"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert nvitop.stdout.count("/ 600W") == 8
    assert "Error" not in nvitop.stdout + nvitop.stderr
