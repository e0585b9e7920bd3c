"""One frozen moment: everything the screen and ``gpuops status`` draw from, and nothing else."""

from __future__ import annotations

import msgspec

from console.model.card import (
    VENDOR_NVIDIA,
    Address,
    CardTelemetry,
    CardView,
    Holder,
    NvmlSample,
    Owner,
    PciCard,
    PciFunction,
    PciLink,
    owner_of,
)
from console.model.engine import EngineIdentity, EngineRates, Probe
from console.model.log import LoadProgress, LogLine
from console.model.profile import Profile
from console.model.reading import Reading
from console.model.site import Site
from console.model.state import ServiceState
from console.model.unit import UnitStatus


class Point(msgspec.Struct, frozen=True):
    """One second of the charts. ``at`` is monotonic seconds; None is a gap, not a zero."""

    at: float
    decode_tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    accept_length: float | None


class SourceWord(msgspec.Struct, frozen=True):
    """How one source is doing: the age of its value in seconds, and its last complaint."""

    name: str
    age_s: float | None
    stale: bool
    error: str | None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at ``now`` (monotonic seconds; ``wall`` is the same moment in Unix seconds)."""

    now: float
    wall: float
    host: str
    site: Site
    state: ServiceState
    state_since: float  # monotonic seconds
    cards: tuple[CardView, ...] = ()
    cards_at: float | None = None
    holders: tuple[Holder, ...] = ()
    holders_at: float | None = None
    driver_version: str | None = None
    unit: Reading[UnitStatus]
    health: Reading[Probe]
    rates: Reading[EngineRates]
    identity: EngineIdentity | None = None
    served_names: tuple[str, ...] = ()
    load: LoadProgress = LoadProgress(None)
    profile: Profile | None = None
    history: tuple[Point, ...] = ()
    log: tuple[LogLine, ...] = ()
    log_total: int = 0  # lines seen since the console started
    sources: tuple[SourceWord, ...] = ()
    notices: tuple[str, ...] = ()  # about files and surroundings, shown once


def view_cards(
    pci: Reading[tuple[PciCard, ...]],
    nvml: Reading[NvmlSample],
    *,
    container: int | None,
    vm: int | None,
    now: float,
) -> tuple[CardView, ...]:
    """PCI and NVML matched by address. Every card PCI ever showed keeps its row."""
    sample = nvml.value or NvmlSample()
    telemetry = {card.address: card for card in sample.cards}
    # Without a readable sysfs the cards NVML names are still better than none.
    listed = pci.value or tuple(_card_from_nvml(card) for card in sample.cards)
    age = nvml.age(now)
    stale_s = age if nvml.stale(now) else None
    rows = []
    for index, card in enumerate(sorted(listed, key=lambda card: card.address)):
        # What NVML last said of a card is of the past once another driver has it.
        seen = telemetry.get(card.address) if card.driver == "nvidia" or not card.present else None
        owner = owner_of(card, seen, container=container, vm=vm)
        xids = [xid.code for xid in sample.xids if xid.address == card.address]
        problems = card_problems(card, seen, owner, xids)
        on_driver = card.driver == "nvidia" or seen is not None
        rows.append(CardView(index, card, seen, owner, problems, stale_s if on_driver else None))
    return tuple(rows)


def _card_from_nvml(card: CardTelemetry) -> PciCard:
    function = PciFunction(card.address, VENDOR_NVIDIA, 0, 0x030000, "nvidia", None, None)
    return PciCard(card.address, (function,), None, PciLink(None, None, None, None), None, uuid=card.uuid)


#: Xids that a program causes, by a bad access or by being killed; the card itself is well
#: (NVIDIA's Xid catalogue: 13 and 31 application faults, 43 and 45 the clean-up after one).
APPLICATION_XIDS = frozenset({13, 31, 43, 45})


def card_problems(
    card: PciCard, seen: CardTelemetry | None, owner: Owner, xids: list[int]
) -> tuple[str, ...]:
    """Short marks for one card, worst first."""
    marks: list[str] = []
    if owner.kind == "lost":
        marks.append("off the bus" if not card.present else "lost: the driver cannot reach it")
    own = [code for code in xids if code not in APPLICATION_XIDS]
    if own:
        marks.append(f"Xid {own[-1]}" + (f" ×{len(own)}" if len(own) > 1 else ""))
    if seen is not None:
        if seen.ecc_uncorrected:
            marks.append(f"ECC {seen.ecc_uncorrected} uncorrected")
        if seen.row_remap_failed:
            marks.append("row remap failed")
        elif seen.row_remap_pending:
            marks.append("row remap pending")
        elif seen.retired_pages:
            marks.append(f"{seen.retired_pages} retired pages")
        if seen.throttle_reasons:
            marks.append("throttled: " + ", ".join(seen.throttle_reasons))
    if card.link.narrowed:
        marks.append(f"link x{card.link.width} of x{card.link.best_width}")
    if xids and not own:
        marks.append(f"program Xid {xids[-1]}")
    return tuple(marks)


#: Marks that alone make the service degraded; a power cap or an idle clock does not.
_GRAVE = ("off the bus", "lost", "Xid", "ECC", "row remap failed", "link")


def card_complaints(cards: tuple[CardView, ...], service_owner: Owner) -> tuple[str, ...]:
    """What the service's own cards have to say against it."""
    found = []
    for card in cards:
        if card.owner not in (service_owner, Owner("lost")):
            continue
        grave = [mark for mark in card.problems if mark.startswith(_GRAVE)]
        if grave:
            found.append(f"card {card.index} ({card.pci.address}): {grave[0]}")
    return tuple(found)


def holder_complaints(holders: tuple[Holder, ...], index_of: dict[Address, int]) -> tuple[str, ...]:
    """Processes that hold cards and are not the service's."""
    found = []
    for holder in holders:
        if holder.orphan:
            where = ", ".join(
                str(index_of[address]) for address in holder.memory_bytes if address in index_of
            )
            found.append(f"{holder.name} (pid {holder.pid}) holds card {where} and is not the service's")
    return tuple(found)
