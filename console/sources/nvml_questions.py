"""What is asked of NVML about one card, and how often. Part of the NVML process.

Answers come back in the units and under the names of ``CardTelemetry``.
"""

from __future__ import annotations

import pynvml as nvml

TYPE_CHECKING = False  # importing typing itself would cost a megabyte
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    #: Calls one function of pynvml by name; whoever gives it knows what is being waited for.
    Ask = Callable[..., Any]
    #: The fields one question answers, and how to ask it of a handle.
    Group = tuple[tuple[str, ...], Callable[[Ask, Any], Sequence[object]]]

#: Linux never hands out a larger process id (PID_MAX_LIMIT): more means the records were misread.
PID_LIMIT = 1 << 22

#: nvml.h, nvmlClocksEventReason*. GpuIdle is left out: a card without work is not held back.
THROTTLE_REASONS = (
    (0x002, "application clocks"),
    (0x004, "power cap"),
    (0x008, "hardware slowdown"),
    (0x010, "sync boost"),
    (0x020, "thermal, software"),
    (0x040, "thermal, hardware"),
    (0x080, "power brake"),
    (0x100, "display clocks"),
    (0x200, "board limit"),
    (0x400, "reliability"),
)


class Missing(str):
    """In place of a value: why there is none."""

    __slots__ = ()


def first_known(ask: Ask, *calls: tuple[Any, ...]) -> Any:
    """The answer to the first of these calls that this library has."""
    for call in calls[:-1]:
        try:
            return ask(*call)
        except nvml.NVMLError as problem:
            if problem.value not in (
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            ):
                raise
    return ask(*calls[-1])


def memory(ask: Ask, card: Any) -> Sequence[object]:
    function = "nvmlDeviceGetMemoryInfo"
    info = first_known(ask, (function, card, nvml.nvmlMemory_v2), (function, card))
    reserved = getattr(info, "reserved", None)
    if reserved is None:
        reserved = Missing("this driver counts reserved memory as used")
    return info.total, info.used, reserved, info.free


def utilization(ask: Ask, card: Any) -> Sequence[object]:
    rates = ask("nvmlDeviceGetUtilizationRates", card)
    return rates.gpu, rates.memory


def temperature(ask: Ask, card: Any) -> Sequence[object]:
    sensor = nvml.NVML_TEMPERATURE_GPU
    calls = ("nvmlDeviceGetTemperature", card, sensor), ("nvmlDeviceGetTemperatureV", card, sensor)
    return (first_known(ask, *calls),)


def power(ask: Ask, card: Any) -> Sequence[object]:
    return (ask("nvmlDeviceGetPowerUsage", card) / 1000,)


def sm_clock(ask: Ask, card: Any) -> Sequence[object]:
    return (ask("nvmlDeviceGetClockInfo", card, nvml.NVML_CLOCK_SM),)


def memory_clock(ask: Ask, card: Any) -> Sequence[object]:
    return (ask("nvmlDeviceGetClockInfo", card, nvml.NVML_CLOCK_MEM),)


def throttle_reasons(ask: Ask, card: Any) -> Sequence[object]:
    bits = first_known(
        ask,
        ("nvmlDeviceGetCurrentClocksEventReasons", card),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", card),
    )
    return ([words for bit, words in THROTTLE_REASONS if bits & bit],)


def name(ask: Ask, card: Any) -> Sequence[object]:
    return (ask("nvmlDeviceGetName", card),)


def uuid(ask: Ask, card: Any) -> Sequence[object]:
    return (ask("nvmlDeviceGetUUID", card),)


def power_limit(ask: Ask, card: Any) -> Sequence[object]:
    calls = ("nvmlDeviceGetEnforcedPowerLimit", card), ("nvmlDeviceGetPowerManagementLimit", card)
    return (first_known(ask, *calls) / 1000,)


def persistence(ask: Ask, card: Any) -> Sequence[object]:
    return (bool(ask("nvmlDeviceGetPersistenceMode", card)),)


def ecc_errors(ask: Ask, card: Any) -> Sequence[object]:
    return tuple(
        ask("nvmlDeviceGetTotalEccErrors", card, kind, nvml.NVML_VOLATILE_ECC)
        for kind in (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    )


def retired_pages(ask: Ask, card: Any) -> Sequence[object]:
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    return (sum(len(ask("nvmlDeviceGetRetiredPages", card, cause)) for cause in causes),)


def remapped_rows(ask: Ask, card: Any) -> Sequence[object]:
    corrected, uncorrected, pending, failed = ask("nvmlDeviceGetRemappedRows", card)
    return corrected + uncorrected, bool(pending), bool(failed)


def pcie_throughput(ask: Ask, card: Any) -> Sequence[object]:
    return tuple(
        ask("nvmlDeviceGetPcieThroughput", card, counter) * 1024
        for counter in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
    )


ONCE: tuple[Group, ...] = ((("name",), name), (("uuid",), uuid))
EVERY_PERIOD: tuple[Group, ...] = (
    (("memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes", "memory_free_bytes"), memory),
    (("utilization_percent", "memory_utilization_percent"), utilization),
    (("temperature_c",), temperature),
    (("power_w",), power),
    (("sm_clock_mhz",), sm_clock),
    (("memory_clock_mhz",), memory_clock),
    (("throttle_reasons",), throttle_reasons),
)
NOW_AND_THEN: tuple[Group, ...] = (
    (("power_limit_w",), power_limit),
    (("persistence",), persistence),
    (("ecc_corrected", "ecc_uncorrected"), ecc_errors),
    (("retired_pages",), retired_pages),
    (("remapped_rows", "row_remap_pending", "row_remap_failed"), remapped_rows),
)
#: One card per period: each of the two calls measures for about 20 ms.
IN_TURN: tuple[Group, ...] = ((("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"), pcie_throughput),)

FIELDS = tuple(
    field for group in (ONCE, EVERY_PERIOD, NOW_AND_THEN, IN_TURN) for fields, _ in group for field in fields
)


def processes_on(ask: Ask, card: Any) -> list[dict[str, int | None]]:
    """Compute and graphics processes; one that is both is listed once.

    Raises ValueError when the library's records cannot be what they should be:
    a driver and a pynvml too far apart misread each other's struct.
    """
    found: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics"):
        function = f"nvmlDeviceGet{kind}RunningProcesses"
        for record in first_known(ask, (function, card), (f"{function}_v2", card)):
            if not 0 < record.pid <= PID_LIMIT:
                raise ValueError(f"{function} named process {record.pid}: driver and nvidia-ml-py disagree")
            sizes = [size for size in (record.usedGpuMemory, found.get(record.pid)) if size is not None]
            found[record.pid] = max(sizes, default=None)
    return [{"pid": pid, "memory_bytes": size} for pid, size in sorted(found.items())]
