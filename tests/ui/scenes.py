"""Frozen moments of one host, as the monitor would have told them, and a watch that shows one."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from functools import cache

import msgspec

from console.model.card import (
    CardTelemetry,
    Holder,
    NvmlSample,
    PciCard,
    PciFunction,
    PciLink,
    Xid,
)
from console.model.engine import EngineIdentity, EngineRates, Probe, Quantiles
from console.model.load_times import Forecast
from console.model.log import Crash, LineKind, LoadProgress, LogLine, PhaseTime
from console.model.reading import Reading
from console.model.site import Container, Site, Vm
from console.model.snapshot import Point, Snapshot, SourceWord, view_cards
from console.model.state import ServiceState
from console.model.unit import UnitStatus

#: Monotonic seconds, and the same moment in Unix seconds.
NOW = 50_000.0
WALL = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC).timestamp()

GIB = 1024**3
TOTAL = int(95.6 * GIB)
SITE = Site(host="pve1", container=Container("lxc", 129), vm=Vm(100))

BUSES = ("01", "21", "41", "61", "81", "a1", "c1", "e1")
ADDRESSES = tuple(f"0000:{bus}:00.0" for bus in BUSES)


class Frozen:
    """A watch for the console: one moment, until a test sets another."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.now = snapshot
        self.closed = False

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True

    def snapshot(self) -> Snapshot:
        return self.now


def pci_card(address: str, driver: str | None = "nvidia", width: int = 16, present: bool = True) -> PciCard:
    function = PciFunction(address, 0x10DE, 0x2BB1, 0x030000, driver, None, "D0")
    group = 20 + 2 * ADDRESSES.index(address) if address in ADDRESSES else 99
    return PciCard(address, (function,), group, PciLink(32.0, width, 32.0, 16), 0, present)


def telemetry(address: str, **changed: object) -> CardTelemetry:
    n = ADDRESSES.index(address) if address in ADDRESSES else 0
    told = CardTelemetry(
        address=address,
        memory_total_bytes=TOTAL,
        memory_used_bytes=int((87.2 + n / 10) * GIB),
        utilization_percent=91 + n % 4,
        temperature_c=53 + n % 4,
        power_w=238.0 + n,
        power_limit_w=600.0,
        sm_clock_mhz=2617,
        memory_clock_mhz=14001,
        throttle_reasons=(),
        pcie_tx_bytes_per_s=2_100_000_000,
        pcie_rx_bytes_per_s=3_400_000_000,
    )
    return msgspec.structs.replace(told, **changed)


def cards(
    listed: tuple[PciCard, ...] | None = None,
    seen: tuple[CardTelemetry, ...] | None = None,
    *,
    xids: tuple[Xid, ...] = (),
    age: float = 0.4,
) -> dict[str, object]:
    """The cards of a snapshot, from what PCI and NVML said; ``age`` is that of NVML's sample."""
    listed = tuple(pci_card(address) for address in ADDRESSES) if listed is None else listed
    seen = tuple(telemetry(address) for address in ADDRESSES) if seen is None else seen
    pci: Reading[tuple[PciCard, ...]] = Reading("pci", 2.0, listed, NOW - 0.5)
    nvml = Reading("nvml", 1.0, NvmlSample(cards=seen, xids=xids), NOW - age)
    return {"cards": view_cards(pci, nvml, container=129, vm=100, now=NOW), "cards_at": NOW - age}


@cache
def history(seconds: int = 1800, *, speculation: bool = True) -> tuple[Point, ...]:
    """Half an hour that rises, breathes and once falls silent."""
    found = []
    for second in range(seconds):
        at = NOW - seconds + second
        if 1000 <= second < 1060:
            found.append(Point(at, None, None, None))
            continue
        load = 0.6 + 0.3 * math.sin(second / 140) + 0.1 * math.sin(second / 23)
        accept = round(2.55 + 0.25 * math.sin(second / 210), 3) if speculation else None
        found.append(Point(at, round(620 * load, 1), round(900 * load, 1), accept))
    return tuple(found)


def line(age: float, text: str, kind: LineKind = "plain") -> LogLine:
    return LogLine(at=WALL - age, text=text, kind=kind)


@cache
def log(lines: int = 60) -> tuple[LogLine, ...]:
    """The journal of an engine at work, newest last."""
    found = []
    for age in range(lines, 0, -1):
        stamp = f"[2026-11-30 11:{59 - age // 60:02}:{59 - age % 60:02} TP0]"
        match age % 4:
            case 0:
                text, kind = f"{stamp} Decode batch, #running-req: 12, #token: {39000 + age}, ", "decode"
                text += "token usage: 0.14, accept len: 2.51, accept rate: 0.75, cuda graph: True"
            case 1:
                text, kind = (
                    'INFO:     10.20.0.42:35826 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
                    "plain",
                )
            case 2:
                text, kind = 'INFO:     127.0.0.1:41612 - "GET /health HTTP/1.1" 200 OK', "noise"
            case _:
                text, kind = f"{stamp} Prefill batch, #new-seq: 1, #new-token: {700 + age}", "prefill"
        found.append(line(age, text, kind))  # type: ignore[arg-type]
    return tuple(found)


RATES = EngineRates(
    decode_tokens_per_s=352.0,
    prefill_tokens_per_s=317.0,
    requests_running=12,
    requests_queued=0,
    kv_usage_ratio=0.14,
    kv_used_tokens=38_000,
    kv_total_tokens=273_000,
    cache_hit_ratio=0.71,
    accept_length=2.52,
    accept_rate=0.75,
    ttft=Quantiles(0.17, 0.3, 0.39),
    itl=Quantiles(0.028, 0.029, 0.030),
    e2e=Quantiles(12.0, 40.0, 59.0),
    retractions_per_min=0.0,
    requests_per_s=0.9,
    aborted_per_min=0.0,
    hicache_used_tokens=940_000,
    hicache_total_tokens=1_090_000,
)

IDENTITY = EngineIdentity(
    version="0.5.18",
    served_names=("kimi-k2.5",),
    model_path="/models/Kimi-K2.5",
    context_length=262_144,
    tp_size=8,
    dp_size=1,
    speculative_algorithm="EAGLE3",
    speculative_steps=2,
    tool_call_parser="kimi_k2",
    reasoning_parser="kimi_k2",
    max_running_requests=48,
    weight_gb=64.7,
    kv_cache_gb=18.1,
    graph_gb=1.9,
)

UNIT = UnitStatus(
    id="sglang.service",
    load_state="loaded",
    active_state="active",
    sub_state="running",
    main_pid=1449,
    restarts=0,
    started_at=WALL - 12_100,
    memory_bytes=617 * GIB,
    unit_file_state="enabled",
)

HOLDERS = (
    Holder(41449, 1449, "sglang::scheduler_TP0", 129, "sglang.service", {ADDRESSES[0]: 80 * GIB}, False),
    Holder(41450, 1450, "sglang::scheduler_TP1", 129, "sglang.service", {ADDRESSES[1]: 80 * GIB}, False),
    Holder(5122, None, "python3 train.py --epochs 3", None, None, {ADDRESSES[2]: None}, True),
)

SOURCES = (
    SourceWord("pci", 0.5, False, None),
    SourceWord("nvml", 0.4, False, None),
    SourceWord("unit", 1.2, False, None),
    SourceWord("journal", 0.3, False, None),
    SourceWord("health", 4.0, False, None),
    SourceWord("models", 2.0, False, None),
    SourceWord("identity", 31.0, False, None),
    SourceWord("rates", 0.6, False, None),
)


def ready(**changed: object) -> Snapshot:
    """An engine at work; ``changed`` replaces fields of the snapshot."""
    told = Snapshot(
        now=NOW,
        wall=WALL,
        host="pve1",
        site=SITE,
        state=ServiceState(name="ready"),
        state_since=NOW - 12_000,
        **cards(),  # type: ignore[arg-type]
        holders=HOLDERS[:2],
        holders_at=NOW - 3,
        driver_version="580.95.05",
        unit=Reading("unit", 2.0, UNIT, NOW - 1.2),
        health=Reading("health", 10.0, Probe("/health", 200, None, 1.0), NOW - 4),
        rates=Reading("rates", 1.0, RATES, NOW - 0.6),
        identity=IDENTITY,
        served_names=("kimi-k2.5",),
        load=LoadProgress("a1"),
        history=history(),
        log=log(),
        log_total=60,
        sources=SOURCES,
    )
    return msgspec.structs.replace(told, **changed)


def _unserved(**changed: object) -> Snapshot:
    """Nothing answers over HTTP."""
    nothing: dict[str, object] = {
        "rates": Reading("rates", 1.0, error="connection refused"),
        "health": Reading("health", 10.0, Probe("/health", None, "refused", 0.0), NOW - 1),
        "identity": None,
        "served_names": (),
        "history": (),
    }
    return ready(**{**nothing, **changed})


def _unit(**changed: object) -> Reading[UnitStatus]:
    return Reading("unit", 2.0, msgspec.structs.replace(UNIT, **changed), NOW - 1.2)


def starting() -> Snapshot:
    """Weights at 45 %."""
    began = WALL - 250
    phases = (
        PhaseTime("starting", began, began + 21),
        PhaseTime("distributed", began + 21, began + 33),
        PhaseTime("weights", began + 33, None, 45.0, "shard 29/64"),
    )
    lines = (
        line(217, "[2026-11-30 11:56:23 TP0] Load weight begin. avail mem=94.31 GB", "phase"),
        line(
            2,
            "Loading safetensors checkpoint shards:  45% Completed | 29/64 [03:35<04:20,  7.4s/it]",
            "phase",
        ),
    )
    empty = tuple(telemetry(one, utilization_percent=6, power_w=92.0) for one in ADDRESSES)
    state = ServiceState(
        name="starting",
        phase="weights",
        percent=45.0,
        detail="shard 29/64",
        elapsed_s=250.0,
        forecast=Forecast(expected_s=585.0, loads=6, eta_s=335.0, spread_s=28.0),
    )
    return _unserved(
        state=state,
        unit=_unit(started_at=began),
        load=LoadProgress("b2", phases),
        log=lines,
        log_total=2,
        **cards(seen=empty),
    )


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has 1.12 GiB free"


def crashed() -> Snapshot:
    evidence = (
        "[2026-11-30 11:58:40 TP3] Capture cuda graph begin. avail mem=1.31 GB",
        "[2026-11-30 11:58:41 TP3] Scheduler hit an exception: Traceback (most recent call last):",
        f"[2026-11-30 11:58:41 TP3] {OOM}",
    )
    remedy = "Lower --mem-fraction-static or the CUDA graph batch size; look for a process left on the cards."
    crash = Crash("cuda-oom", OOM, WALL - 79, evidence, remedy)
    return _unserved(
        state=ServiceState(name="crashed", reasons=(OOM, remedy)),
        unit=_unit(active_state="failed", sub_state="failed", main_pid=None, memory_bytes=None),
        load=LoadProgress("c3", crash=crash),
        log=tuple(line(80 - index, text, "error") for index, text in enumerate(evidence)),
        log_total=3,
        **cards(
            seen=tuple(
                telemetry(one, memory_used_bytes=0, utilization_percent=0, power_w=17.0) for one in ADDRESSES
            )
        ),
    )


def degraded() -> Snapshot:
    reasons = (
        "KV cache 97% full with 6 requests queued",
        "12 retractions a minute: the KV cache is too small",
        "the unit file changed since it was loaded: systemctl daemon-reload",
    )
    rates = msgspec.structs.replace(
        RATES, kv_usage_ratio=0.97, requests_queued=6, retractions_per_min=12.0, requests_running=48
    )
    return ready(
        state=ServiceState(name="degraded", reasons=reasons), rates=Reading("rates", 1.0, rates, NOW - 0.6)
    )


def hung() -> Snapshot:
    rates = msgspec.structs.replace(RATES, decode_tokens_per_s=0.0, prefill_tokens_per_s=0.0)
    return ready(
        state=ServiceState(name="hung", reasons=("12 requests in flight and no token for 31 s",)),
        rates=Reading("rates", 1.0, rates, NOW - 0.6),
    )


def busy() -> Snapshot:
    return ready(state=ServiceState(name="busy", reasons=("/health timeout after 25 s, but tokens move",)))


def stopped() -> Snapshot:
    return _unserved(
        state=ServiceState(name="stopped", reasons=("stopped by hand",)),
        unit=_unit(active_state="inactive", sub_state="dead", main_pid=None, memory_bytes=None),
        log=(),
        log_total=0,
        **cards(
            seen=tuple(
                telemetry(one, memory_used_bytes=0, utilization_percent=0, power_w=17.0) for one in ADDRESSES
            )
        ),
    )


def unreachable() -> Snapshot:
    return _unserved(
        state=ServiceState(
            name="unreachable", reasons=("the container does not answer: CT 129 is not running",)
        ),
        unit=Reading("unit", 2.0, error="the container does not answer: CT 129 is not running"),
        log=(),
        log_total=0,
    )


def mixed() -> Snapshot:
    """Two cards at the VM, one off the bus, one bound to nothing, and marks on the others."""
    listed = [pci_card(address) for address in ADDRESSES]
    seen = {address: telemetry(address) for address in ADDRESSES}
    listed[1] = pci_card(ADDRESSES[1], width=8)
    listed[3] = pci_card(ADDRESSES[3], present=False)
    listed[5] = pci_card(ADDRESSES[5], driver=None)
    listed[6] = pci_card(ADDRESSES[6], driver="vfio-pci")
    listed[7] = pci_card(ADDRESSES[7], driver="vfio-pci")
    seen[ADDRESSES[0]] = telemetry(ADDRESSES[0], throttle_reasons=("power cap",), power_w=598.0)
    seen[ADDRESSES[2]] = telemetry(ADDRESSES[2], ecc_uncorrected=2, temperature_c=91)
    told = tuple(seen[one] for one in ADDRESSES if one not in (ADDRESSES[3], *ADDRESSES[5:]))
    shown = cards(
        tuple(listed), told, xids=(Xid(ADDRESSES[4], 79, NOW - 60), Xid(ADDRESSES[3], 79, NOW - 60))
    )
    reasons = ("card 3 (0000:61:00.0): off the bus", "card 4 (0000:81:00.0): Xid 79")
    return ready(state=ServiceState(name="degraded", reasons=reasons), holders=HOLDERS, **shown)


def stale() -> Snapshot:
    """NVML fell silent."""
    words = (SOURCES[0], SourceWord("nvml", 12.0, True, "no answer within 2 s"), *SOURCES[2:])
    return ready(sources=words, **cards(age=12.0))


def without_speculation() -> Snapshot:
    identity = msgspec.structs.replace(IDENTITY, speculative_algorithm=None, speculative_steps=None)
    rates = msgspec.structs.replace(
        RATES,
        accept_length=None,
        accept_rate=None,
        hicache_total_tokens=None,
        missing={"accept_length": "speculation is off", "accept_rate": "speculation is off"},
    )
    return ready(
        identity=identity, rates=Reading("rates", 1.0, rates, NOW - 0.6), history=history(speculation=False)
    )


def nothing_read() -> Snapshot:
    """The first moment."""
    words = tuple(SourceWord(word.name, None, True, None) for word in SOURCES)
    return _unserved(
        state=ServiceState(name="unreachable", reasons=("nothing has answered yet",), looking=True),
        cards=(),
        cards_at=None,
        holders=(),
        holders_at=None,
        driver_version=None,
        unit=Reading("unit", 2.0),
        health=Reading("health", 10.0),
        rates=Reading("rates", 1.0),
        log=(),
        log_total=0,
        sources=words,
    )


SCENES = {
    scene.__name__: scene
    for scene in (
        ready,
        starting,
        crashed,
        degraded,
        hung,
        busy,
        stopped,
        unreachable,
        mixed,
        stale,
        without_speculation,
        nothing_read,
    )
}
