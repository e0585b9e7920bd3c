"""The NVML source against scripted processes, and the process's own rules against a scripted NVML."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.card import CardProcess, CardTelemetry, NvmlSample, Xid
from console.model.reading import Reading
from console.sources import nvml_questions
from console.sources.nvml import (
    LAST_DELAY,
    STEADY_S,
    NvmlSource,
    decode,
    default_command,
    fold,
)
from console.sources.nvml_cards import Card, Driver, kernel_address
from console.transport.runner import Result

A, B = "0000:41:00.0", "0000:61:00.0"

HELLO = {"kind": "hello", "at": 10.0, "pid": 7, "driver_version": "580.95.05", "nvml_version": "13.580.95.05"}


def cards(at: float, *addresses: str, **fields: object) -> dict[str, object]:
    return {"kind": "cards", "at": at, "cards": [{"address": address, **fields} for address in addresses]}


# --- a process that says what it is told ---------------------------------------------------------


class Clock:
    """Time that passes only when somebody sleeps, or when a script says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


#: A line (bytes, or a message), a call, or None: nothing more is said, but the process lives on.
Script = Sequence[bytes | dict[str, Any] | Callable[[], None] | None]


class ScriptedStream:
    def __init__(self, script: Script, reason: str) -> None:
        self._script = script
        self.reason: str | None = reason

    async def lines(self) -> AsyncIterator[bytes]:
        for step in self._script:
            await asyncio.sleep(0)
            if step is None:
                await asyncio.Event().wait()
            elif callable(step):
                step()
            else:
                yield step if isinstance(step, bytes) else json.dumps(step).encode()


class ScriptedRunner:
    """Runs the scripts one after another, the last one for ever."""

    name = "scripted"
    root = Path("/")

    def __init__(self, *scripts: Script, reason: str = "killed by signal 9") -> None:
        self.scripts = scripts
        self.reason = reason
        self.started = 0
        self.running = 0

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        raise AssertionError("the NVML process is streamed")

    @contextlib.asynccontextmanager
    async def stream(self, argv: Sequence[str]) -> AsyncIterator[ScriptedStream]:
        script = self.scripts[min(self.started, len(self.scripts) - 1)]
        self.started += 1
        self.running += 1
        try:
            yield ScriptedStream(script, self.reason)
        finally:
            await asyncio.sleep(0)
            self.running -= 1


def source_of(runner: ScriptedRunner, clock: Clock, period: float = 1.0) -> NvmlSource:
    return NvmlSource(runner, period, ["nvml"], clock=clock, sleep=clock.sleep)


async def take(source: NvmlSource, count: int) -> list[Reading[NvmlSample]]:
    taken: list[Reading[NvmlSample]] = []
    async with asyncio.timeout(5), contextlib.aclosing(source.watch()) as readings:
        async for reading in readings:
            taken.append(reading)
            if len(taken) == count:
                break
    return taken


# --- folding -------------------------------------------------------------------------------------


async def test_a_reading_carries_all_that_was_said_up_to_it() -> None:
    script = [
        HELLO,
        {"kind": "processes", "at": 98.5, "processes": {A: [{"pid": 42, "memory_bytes": 1 << 30}], B: []}},
        {"kind": "xid", "at": 98.7, "address": B, "code": 79},
        cards(99.0, A, B, temperature_c=61, missing={"power_w": "Not Supported"}),
        None,
    ]
    source = source_of(ScriptedRunner(script), Clock())
    [reading] = await take(source, 1)
    sample = reading.value
    assert sample is not None
    assert (reading.taken_at, reading.error, reading.period) == (99.0, None, 1.0)
    assert (sample.driver_version, sample.nvml_version) == ("580.95.05", "13.580.95.05")
    assert [card.address for card in sample.cards] == [A, B]
    assert sample.cards[0].temperature_c == 61
    assert sample.cards[0].power_w is None
    assert sample.cards[0].missing == {"power_w": "Not Supported"}
    assert sample.processes == {A: (CardProcess(42, 1 << 30),), B: ()}
    assert sample.processes_at == 98.5
    assert sample.xids == (Xid(B, 79, 98.7),)


def test_processes_of_a_card_that_is_gone_are_forgotten() -> None:
    sample = fold(NvmlSample(), decode(json.dumps(cards(1, A, B)).encode()))
    processes = {"kind": "processes", "at": 1, "processes": {A: [{"pid": 1, "memory_bytes": None}], B: []}}
    sample = fold(sample, decode(json.dumps(processes).encode()))
    sample = fold(sample, decode(json.dumps(cards(2, A)).encode()))
    assert sample.processes == {A: (CardProcess(1, None),)}


def test_text_from_the_driver_cannot_reach_the_terminal_raw() -> None:
    reasons = {"missing": {"power_w": "No\x07t"}, "throttle_reasons": ["pow\x1b[1mer"]}
    spoken = cards(1, A, name="RTX\x1b[2J\n6000", **reasons)
    [card] = fold(NvmlSample(), decode(json.dumps(spoken).encode())).cards
    shown = f"{card.name}{card.missing}{card.throttle_reasons}"
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "\n" not in shown


def test_a_reading_from_the_future_is_dated_now() -> None:
    async def scenario() -> None:
        [reading] = await take(source_of(ScriptedRunner([cards(5000.0, A), None]), Clock()), 1)
        assert reading.taken_at == 100.0

    asyncio.run(scenario())


async def test_malformed_lines_are_counted_and_named_and_cost_nothing_else() -> None:
    wrong_type = {"kind": "cards", "at": 1.0, "cards": [{"address": A, "temperature_c": "hot"}]}
    script = [b"Segmentation fault", wrong_type, cards(99.0, A), cards(99.5, A), None]
    first, second = await take(source_of(ScriptedRunner(script), Clock()), 2)
    assert first.value is not None
    assert first.error is not None
    assert first.error.startswith("2 malformed lines from the NVML process")
    assert "temperature_c" in first.error
    assert second.error is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
KINDS = st.sampled_from(["hello", "cards", "processes", "xid", "unavailable", "starting", "other"])
KEYS = st.sampled_from(["at", "cards", "processes", "code", "address", "reason", "pid", "trouble", "seconds"])
MESSAGES = st.builds(lambda kind, rest: {**rest, "kind": kind}, KINDS, st.dictionaries(KEYS, JSON))


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_a_message_or_a_value_error(line: bytes) -> None:
    with contextlib.suppress(ValueError):
        fold(NvmlSample(), decode(line))


@given(MESSAGES)
def test_any_message_of_a_known_kind_folds_or_is_refused(message: dict[str, Any]) -> None:
    try:
        sample = fold(NvmlSample(), decode(json.dumps(message).encode()))
    except ValueError:
        return
    msgspec.json.encode(sample)


@given(st.lists(st.binary(max_size=40) | MESSAGES, max_size=6))
def test_whatever_the_process_says_the_source_goes_on(lines: list[bytes | dict[str, Any]]) -> None:
    async def scenario() -> None:
        script = [line.replace(b"\n", b" ") if isinstance(line, bytes) else line for line in lines]
        runner = ScriptedRunner(script, [cards(99.0, A), None])
        async with asyncio.timeout(5):
            async for reading in source_of(runner, Clock()).watch():
                if reading.value is not None and [card.address for card in reading.value.cards] == [A]:
                    break
        assert runner.started >= 1

    asyncio.run(scenario())


# --- the process's life --------------------------------------------------------------------------


async def test_a_dying_process_is_started_again_ever_more_slowly() -> None:
    clock = Clock()
    script = [cards(99.0, A, temperature_c=50)]
    readings = await take(source_of(ScriptedRunner(script, []), clock), 9)
    assert clock.slept[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, LAST_DELAY, LAST_DELAY]
    failed = readings[1:]
    assert all(reading.error == "the NVML process ended: killed by signal 9" for reading in failed)
    assert all(reading.value == readings[0].value and reading.taken_at == 99.0 for reading in failed)
    assert failed[-1].stale(clock.now)


async def test_a_process_that_ran_well_is_started_again_at_once() -> None:
    clock = Clock()

    def time_passes() -> None:
        clock.now += STEADY_S

    good = [cards(99.0, A), time_passes]
    await take(source_of(ScriptedRunner([], [], good, []), clock), 5)
    assert clock.slept[:4] == [1.0, 2.0, 1.0, 2.0]


async def test_a_silent_process_is_killed_and_started_again() -> None:
    runner = ScriptedRunner([HELLO, None], [HELLO, cards(99.0, A), None])
    failed, fresh = await take(source_of(runner, Clock(), period=0.01), 2)
    assert failed.error == "the NVML process said nothing for 0.05 s"
    assert fresh.value is not None
    assert fresh.error is None
    assert runner.started == 2
    assert runner.running == 0


async def test_babble_is_silence() -> None:
    clock = Clock()

    def time_passes() -> None:
        clock.now += 1.0

    babble: Script = [step for _ in range(20) for step in (b"babble", time_passes)]
    failed, fresh = await take(source_of(ScriptedRunner(babble, [cards(99.0, A), None]), clock), 2)
    assert failed.error is not None
    assert failed.error.startswith("the NVML process said nothing for 5 s; ")
    assert "malformed lines" in failed.error
    assert fresh.error is None


async def test_the_process_says_why_it_has_nothing() -> None:
    script = [{"kind": "unavailable", "at": 1.0, "reason": "the nvidia kernel driver is not loaded"}]
    [reading] = await take(source_of(ScriptedRunner(script), Clock()), 1)
    assert reading.value is None
    assert reading.error == "the nvidia kernel driver is not loaded"


async def test_a_slow_start_is_told_as_such() -> None:
    starting = {"kind": "starting", "at": 1.0, "function": "nvmlInit", "seconds": 4.2}
    script = [starting, HELLO, cards(99.0, A), None]
    slow, fresh = await take(source_of(ScriptedRunner(script), Clock()), 2)
    assert slow.error == "NVML is starting: nvmlInit, 4 s so far"
    assert fresh.error is None


async def test_what_the_list_of_cards_may_lack_is_told_beside_it() -> None:
    trouble = "nvmlDeviceGetCount has not returned for 12 s; new cards and Xid errors are not seen"
    script = [{**cards(99.0, A), "trouble": trouble}, None]
    [reading] = await take(source_of(ScriptedRunner(script), Clock()), 1)
    assert reading.value is not None
    assert reading.error == trouble


async def test_pause_returns_once_the_process_is_gone_and_resume_brings_it_back() -> None:
    runner = ScriptedRunner([cards(99.0, A), None])
    source = source_of(runner, Clock())
    async with asyncio.timeout(5), contextlib.aclosing(source.watch()) as readings:
        fresh = await anext(readings)
        assert runner.running == 1
        await source.pause("ended for the rebind")
        assert runner.running == 0
        paused = await anext(readings)
        assert (paused.value, paused.error) == (fresh.value, "ended for the rebind")
        await asyncio.sleep(0.01)
        assert runner.started == 1
        source.resume()
        assert (await anext(readings)).error is None
        assert runner.started == 2


async def test_close_ends_the_process_and_the_readings() -> None:
    runner = ScriptedRunner([cards(99.0, A), None])
    source = source_of(runner, Clock())
    async with asyncio.timeout(5):
        readings = source.watch()
        await anext(readings)
        await source.close()
        assert runner.running == 0
        assert [reading async for reading in readings] == []
        source.resume()
        assert runner.started == 1


async def test_leaving_the_readings_ends_the_process() -> None:
    runner = ScriptedRunner([cards(99.0, A), None])
    await take(source_of(runner, Clock()), 1)
    assert runner.running == 0


async def test_a_consumer_that_lags_gets_the_newest() -> None:
    script: Script = [*(cards(float(at), A) for at in range(60)), None]
    source = source_of(ScriptedRunner(script), Clock())
    async with asyncio.timeout(5), contextlib.aclosing(source.watch()) as readings:
        await anext(readings)
        await asyncio.sleep(0.05)
        rest = [(await anext(readings)).taken_at for _ in range(16)]
    assert rest == [float(at) for at in range(44, 60)]


# --- the process itself, without a library -------------------------------------------------------


def test_the_process_runs_isolated_and_says_what_it_lacks() -> None:
    command = default_command(0.5)
    assert command[1:3] == ["-I", "-S"]
    assert command[4:10] == ["--period", "0.5", "--processes-period", "2.5", "--deadline", "1.5"]
    nowhere = [*command[:-1], "/nonexistent"]
    ended = subprocess.run(nowhere, capture_output=True, timeout=20, check=False)
    assert ended.returncode == 3
    message = json.loads(ended.stdout)
    assert message["kind"] == "unavailable"
    assert message["reason"].startswith("pynvml (the package nvidia-ml-py) cannot be imported")


def test_the_process_imports_nothing_heavy() -> None:
    site_packages = default_command()[-1]
    package = str(Path(nvml_questions.__file__).parents[2])
    code = (
        f"import sys; sys.path += [{package!r}, {site_packages!r}]\n"
        "import console.sources.nvml_worker, console.sources.nvml_cards\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    output = subprocess.run(command, capture_output=True, check=True, text=True)
    loaded = set(output.stdout.split())
    assert "pynvml" in loaded
    assert not {"msgspec", "asyncio", "typing", "argparse", "console.model"} & loaded


def test_the_process_uses_the_field_names_of_card_telemetry() -> None:
    others = {"address", "lost", "missing"}
    assert {*nvml_questions.FIELDS, *others} == set(CardTelemetry.__struct_fields__)
    assert len(set(nvml_questions.FIELDS)) == len(nvml_questions.FIELDS)


@pytest.mark.parametrize(
    ("given_by_nvml", "kernel"),
    [
        (b"00000000:41:00.0", "0000:41:00.0"),
        ("00000000:A1:00.0", "0000:a1:00.0"),
        (b"0000:C1:00.0", "0000:c1:00.0"),
        (b"00010000:01:00.0", "10000:01:00.0"),
    ],
)
def test_addresses_are_written_as_the_kernel_does(given_by_nvml: bytes | str, kernel: str) -> None:
    assert kernel_address(given_by_nvml) == kernel


class ScriptedNvml:
    """Answers questions from a table: a value, an NVML error code, or what a function gives."""

    def __init__(self, **answers: object) -> None:
        self.answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlSystemGetNVMLVersion": "13.580.95.05",
            "nvmlEventSetCreate": None,
            **answers,
        }
        self.asked: list[str] = []

    def __call__(self, function: str, *arguments: object) -> Any:
        self.asked.append(function)
        answer = self.answers.get(function, Error(pynvml.NVML_ERROR_NOT_SUPPORTED))
        if isinstance(answer, Error):
            raise pynvml.NVMLError(answer.code)
        return answer(*arguments) if callable(answer) else answer


class Error(SimpleNamespace):
    def __init__(self, code: int) -> None:
        super().__init__(code=code)


def holding(*addresses: str, **answers: object) -> ScriptedNvml:
    """An NVML with these cards."""
    return ScriptedNvml(
        nvmlDeviceGetCount=len(addresses),
        nvmlDeviceGetHandleByIndex=lambda index: addresses[index],
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"0000{handle.upper()}".encode()),
        **answers,
    )


def read(card: Card, ask: ScriptedNvml) -> dict[str, Any]:
    card.run(ask)
    return card.message(deadline=3.0)


def test_a_field_that_is_not_available_costs_that_field() -> None:
    message = read(
        Card(A, object(), 0),
        ScriptedNvml(
            nvmlDeviceGetPowerUsage=412_500,
            nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=97, memory=40),
            nvmlDeviceGetTemperature=Error(pynvml.NVML_ERROR_UNKNOWN),
            nvmlDeviceGetTotalEccErrors=2,
        ),
    )
    assert (message["power_w"], message["utilization_percent"], message["ecc_corrected"]) == (412.5, 97, 2)
    assert message["temperature_c"] is None
    assert message["missing"]["temperature_c"] == "Unknown Error"
    assert message["missing"]["persistence"] == "Not Supported"
    assert not message["missing"].keys() & {"power_w", "utilization_percent", "ecc_corrected"}
    assert message["lost"] is False


def test_an_older_driver_tells_memory_without_the_reserved_part() -> None:
    def memory(handle: object, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=100, used=60, free=40)

    message = read(Card(A, object(), 0), ScriptedNvml(nvmlDeviceGetMemoryInfo=memory))
    sizes = [message[f"memory_{part}_bytes"] for part in ("total", "used", "free")]
    assert sizes == [100, 60, 40]
    assert message["memory_reserved_bytes"] is None
    assert message["missing"]["memory_reserved_bytes"] == "this driver counts reserved memory as used"


def test_throttle_reasons_are_named_and_idling_is_none_of_them() -> None:
    def reasons(bits: int) -> object:
        ask = ScriptedNvml(nvmlDeviceGetCurrentClocksEventReasons=bits)
        return read(Card(A, object(), 0), ask)["throttle_reasons"]

    assert reasons(0x1) == []
    assert reasons(0x4 | 0x40) == ["power cap", "thermal, hardware"]


def test_a_lost_card_keeps_its_name_and_loses_its_numbers() -> None:
    card = Card(A, object(), 0)
    read(card, ScriptedNvml(nvmlDeviceGetName="RTX PRO 6000", nvmlDeviceGetPowerUsage=1000))
    lost = read(card, ScriptedNvml(nvmlDeviceGetMemoryInfo=Error(pynvml.NVML_ERROR_GPU_IS_LOST)))
    assert lost["lost"] is True
    assert (lost["name"], lost["power_w"]) == ("RTX PRO 6000", None)
    assert lost["missing"]["power_w"] == "GPU is lost"
    back = read(card, ScriptedNvml(nvmlDeviceGetPowerUsage=2000))
    assert (back["lost"], back["power_w"]) == (False, 2.0)


def test_processes_that_compute_and_draw_are_listed_once_with_the_larger_size() -> None:
    def record(pid: int, size: int | None) -> SimpleNamespace:
        return SimpleNamespace(pid=pid, usedGpuMemory=size)

    ask = ScriptedNvml(
        nvmlDeviceGetComputeRunningProcesses=[record(9, None), record(5, 100)],
        nvmlDeviceGetGraphicsRunningProcesses=[record(5, 300)],
    )
    found = nvml_questions.processes_on(ask, object())
    assert found == [{"pid": 5, "memory_bytes": 300}, {"pid": 9, "memory_bytes": None}]


def test_misread_process_records_are_refused() -> None:
    misread = SimpleNamespace(pid=4_294_967_280, usedGpuMemory=1)
    ask = ScriptedNvml(nvmlDeviceGetComputeRunningProcesses=[misread])
    card = Card(A, object(), 0)
    card.wants_processes = True
    message = read(card, ask)
    assert card.processes is None
    assert "driver and nvidia-ml-py disagree" in message["missing"]["processes"]


def proc_with(folder: Path, *addresses: str, version: str | None = None) -> str:
    cards_folder = folder / "driver" / "nvidia" / "gpus"
    cards_folder.mkdir(parents=True, exist_ok=True)
    for gone in cards_folder.iterdir():
        gone.rmdir()
    for address in addresses:
        (cards_folder / address).mkdir()
    if version:
        line = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
        (folder / "driver" / "nvidia" / "version").write_text(line)
    return str(folder)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "libnvidia-ml.so.1 is not found or cannot be loaded"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the nvidia kernel driver is not loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission to use the NVIDIA driver"),
        (
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            "the loaded kernel module is 570.124.06, the NVML library is 13.580.95.05",
        ),
        (pynvml.NVML_ERROR_UNKNOWN, "NVML: Unknown Error"),
    ],
)
def test_a_driver_that_cannot_be_used_says_why(tmp_path: Path, code: int, words: str) -> None:
    driver = Driver(proc_with(tmp_path, version="570.124.06"), 10.0)
    driver.run(ScriptedNvml(nvmlInit=Error(code)))
    assert driver.failure is not None
    assert words in driver.failure


def test_a_driver_without_cards_says_so(tmp_path: Path) -> None:
    driver = Driver(str(tmp_path), 10.0)
    driver.run(holding())
    assert driver.failure == "no card is bound to the nvidia driver"


def test_nvml_is_initialised_anew_when_the_kernel_lists_other_cards(tmp_path: Path) -> None:
    driver = Driver(proc_with(tmp_path, A), 0.0)
    driver.run(holding(A))
    assert list(driver.cards) == [A]
    card = driver.cards[A]
    unchanged = holding(A)
    driver.run(unchanged)
    assert driver.cards[A] is card
    assert "nvmlInit" not in unchanged.asked
    proc_with(tmp_path, A, B)
    changed = holding(A, B)
    driver.run(changed)
    assert changed.asked[:2] == ["nvmlShutdown", "nvmlInit"]
    assert list(driver.cards) == [A, B]
    assert driver.reopening is False


def withholding(code: int) -> ScriptedNvml:
    """An NVML with two cards that gives out the first only."""
    ask = holding(A, B)

    def handle(index: int) -> str:
        if index == 1:
            raise pynvml.NVMLError(code)
        return A

    ask.answers["nvmlDeviceGetHandleByIndex"] = handle
    return ask


def test_a_card_the_driver_withholds_keeps_its_row_by_the_kernels_list(tmp_path: Path) -> None:
    driver = Driver(proc_with(tmp_path, A, B), 0.0)
    driver.run(holding(A, B))
    driver.cards[B].values["name"] = "RTX PRO 6000"
    driver.run(withholding(pynvml.NVML_ERROR_GPU_IS_LOST))
    message = driver.cards[B].message(3.0)
    assert (message["lost"], message["name"], message["power_w"]) == (True, "RTX PRO 6000", None)
    assert driver.trouble is None


def test_a_withheld_card_nobody_can_name_is_told_in_words(tmp_path: Path) -> None:
    driver = Driver(str(tmp_path), 0.0)
    driver.run(withholding(pynvml.NVML_ERROR_NO_PERMISSION))
    assert list(driver.cards) == [A]
    assert driver.trouble == "1 card without an address: Insufficient Permissions"
