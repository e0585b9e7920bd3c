"""What is printed of a snapshot and of findings."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from console.model.card import CardTelemetry, CardView, Owner, PciCard, PciFunction, PciLink
from console.model.engine import EngineRates, Probe
from console.model.finding import Finding
from console.model.load_times import Forecast
from console.model.reading import Reading
from console.model.report import (
    WIDTH,
    finding_lines,
    findings_document,
    healthy,
    status_document,
    status_lines,
)
from console.model.site import Site
from console.model.snapshot import Snapshot, SourceWord
from console.model.state import ServiceState
from console.model.unit import UnitStatus
from console.model.words import span

NOW = 1000.0
CT = Owner("ct", 129)


def card(driver: str | None = "nvidia", owner: Owner = CT, **seen: object) -> CardView:
    address = "0000:41:00.0"
    function = PciFunction(address, 0x10DE, 0x2BB1, 0x030000, driver, None, "D0")
    pci = PciCard(address, (function,), 3, PciLink(32.0, 16, 32.0, 16), 0)
    telemetry = CardTelemetry(address=address, **seen) if seen else None  # type: ignore[arg-type]
    return CardView(0, pci, telemetry, owner, (), None)


def snapshot(**fields: object) -> Snapshot:
    given: dict[str, object] = {
        "now": NOW,
        "wall": 1_796_000_000.25,
        "host": "pve1",
        "site": Site(),
        "state": ServiceState(name="ready"),
        "state_since": NOW,
        "unit": Reading("unit", 2.0),
        "health": Reading[Probe]("health", 5.0),
        "rates": Reading("rates", 1.0),
    }
    return Snapshot(**(given | fields))  # type: ignore[arg-type]


def text(shown: Snapshot) -> str:
    return "\n".join(line.text for line in status_lines(shown))


def test_nothing_known_is_null_throughout() -> None:
    document = status_document(snapshot(state=ServiceState(name="unreachable"), cards=(card(driver=None),)))
    assert document["taken_at"] == "2026-11-30T00:53:20.250Z"
    names = ("decode_tokens_per_s", "accept_length", "requests_running", "kv_usage_ratio", "stale_s")
    assert [document["engine"][name] for name in names] == [None] * 5
    shown = document["cards"][0]
    assert (shown["driver"], shown["memory_used_bytes"], shown["power_w"]) == (None, None, None)
    assert (document["profile"], document["served_name"], document["unit"]) == (None, None, None)
    assert document["holders"] is None


def test_zero_stays_zero() -> None:
    rates = Reading("rates", 1.0, EngineRates(requests_running=0, decode_tokens_per_s=0.0), NOW)
    document = status_document(snapshot(rates=rates, cards=(card(utilization_percent=0),)))
    assert document["engine"]["requests_running"] == 0
    assert document["engine"]["decode_tokens_per_s"] == 0.0
    assert document["cards"][0]["utilization_percent"] == 0
    assert "running 0" in text(snapshot(rates=rates))


def test_an_old_value_has_its_age() -> None:
    rates = Reading("rates", 1.0, EngineRates(requests_running=4), NOW - 12.5, "timeout")
    shown = snapshot(rates=rates, sources=(SourceWord("rates", 12.5, True, "timeout"),))
    assert status_document(shown)["engine"]["stale_s"] == 12.5
    assert "as of 12s ago" in text(shown)
    assert "! rates 12s old: timeout" in text(shown)


def test_a_source_that_was_not_asked_is_no_news() -> None:
    shown = snapshot(sources=(SourceWord("journal", None, True, None),))
    assert "journal" not in text(shown)


def test_a_load_tells_how_far_it_is() -> None:
    state = ServiceState(
        name="starting",
        phase="weights",
        percent=45.2,
        detail="shard 29/64",
        elapsed_s=263.0,
        forecast=Forecast(expected_s=585.0, loads=6, eta_s=322.0, spread_s=31.0),
    )
    unit = UnitStatus(
        id="sglang.service", load_state="loaded", active_state="active", sub_state="running",
        active_since=1_796_000_000.25 - 263,
    )  # fmt: skip
    shown = snapshot(state=state, unit=Reading("unit", 2.0, unit, NOW))
    lines = text(shown).splitlines()
    assert lines[0] == "pve1  STARTING weights 45 %, shard 29/64, 4m23 so far, ~5m30 to go"
    assert lines[1] == "  sglang.service active (running) for 4m23"
    assert lines[2] == "  ready in ~5m30 (+-30s, 6 loads)"
    assert not healthy(shown)
    document = status_document(shown)
    assert document["state"]["eta_s"] == 322.0
    assert document["load"]["loads"] == 6 and document["load"]["spread_s"] == 31.0


def test_reasons_come_before_the_cards() -> None:
    state = ServiceState(name="degraded", reasons=("KV cache 97% full with 12 requests queued",))
    lines = text(snapshot(state=state, cards=(card(temperature_c=40),))).splitlines()
    assert lines[2] == "- KV cache 97% full with 12 requests queued"
    assert lines.index("- KV cache 97% full with 12 requests queued") < next(
        number for number, line in enumerate(lines) if "0000:41:00.0" in line
    )


def test_a_card_of_the_vm_keeps_its_row() -> None:
    row = next(
        line
        for line in text(snapshot(cards=(card("vfio-pci", Owner("vm", 100)),))).splitlines()
        if "41" in line
    )
    assert row.split() == ["0", "0000:41:00.0", "VM", "100", "vfio-pci", "-", "-", "-", "-"]


numbers = st.none() | st.floats(allow_nan=True, allow_infinity=True)
words = st.text(max_size=300)


@given(
    host=words,
    reasons=st.lists(words, max_size=4),
    names=st.lists(words, max_size=3),
    rate=numbers,
    age=st.none() | st.floats(min_value=0, max_value=1e9),
    error=st.none() | words,
)
def test_every_line_fits_and_every_document_is_json(
    host: str,
    reasons: list[str],
    names: list[str],
    rate: float | None,
    age: float | None,
    error: str | None,
) -> None:
    finite = rate is None or math.isfinite(rate)
    shown = snapshot(
        host=host,
        state=ServiceState(name="degraded", reasons=tuple(reasons)),
        served_names=tuple(names),
        rates=Reading("rates", 1.0, EngineRates(decode_tokens_per_s=rate if finite else None), NOW),
        sources=(SourceWord("unit", age, True, error),),
        cards=(card(power_w=rate),),
    )
    assert all(len(line.text) <= WIDTH for line in status_lines(shown))
    document = msgspec.json.decode(msgspec.json.encode(status_document(shown)))
    assert finite or document["cards"][0]["power_w"] is None


def test_spans() -> None:
    assert [span(s) for s in (-1, 0, 59.9, 60, 585, 3599, 3600, 86399, 90000)] == [
        "0s", "0s", "59s", "1m00", "9m45", "59m59", "1h00", "23h59", "1d1h",
    ]  # fmt: skip


def test_findings_say_the_worst_and_what_to_do() -> None:
    found = (
        Finding("unit", "Service unit", "pass", "sglang.service is active", "not shown"),
        Finding("iommu", "IOMMU", "fail", "off", "add iommu=on " * 12),
        Finding("key", "API key file", "skipped"),
    )
    lines = [line.text for line in finding_lines(found)]
    assert lines[0] == "ok   Service unit: sglang.service is active"
    assert lines[1] == "FAIL IOMMU: off"
    assert lines[2].startswith("     > add iommu=on")
    assert "not shown" not in "".join(lines)
    assert lines[-1] == "1 pass, 1 fail, 1 skipped"
    assert max(map(len, lines)) <= WIDTH
    document = findings_document(found)
    assert document["schema"] == 1
    assert document["verdict"] == "fail"
    assert msgspec.to_builtins(document)["findings"][1]["id"] == "iommu"
