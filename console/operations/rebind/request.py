"""What a plan that moves cards is made from: all that its steps need, in any process."""

from __future__ import annotations

from typing import Literal

import msgspec

from console.model.card import Address
from console.model.operation import Plan
from console.model.rebind.inventory import Target
from console.model.rebind.moves import CardMove
from console.operations.service.request import ServiceRequest

#: How persistence mode comes back with the cards: by its daemon, card by card, or not at all.
Persistence = Literal["daemon", "cards", "off"]

#: What is done about a card that does not answer, the mildest first.
Rung = Literal["reset", "rescan", "bus-reset"]


class Client(msgspec.Struct, frozen=True):
    """A program of the host that has cards open by its nature, and whose unit is stopped for the move."""

    unit: str
    name: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The VM; limits in seconds. ``was_running`` when it was planned."""

    id: int
    was_running: bool
    agent: bool  # its guest can be asked
    start_s: float
    shutdown_s: float
    force_stop: bool = False  # the operator's word: it is stopped hard when it does not shut down


class RebindRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One move, as it was planned; ``moves`` are in PCI order.

    ``service`` is stopped on the way to the VM and started on the way back; None: it is left as it
    is. ``persistent`` are UUIDs of cards that persistence mode keeps open.
    """

    target: Target
    moves: tuple[CardMove, ...]
    container: int | None = None
    machine: Machine | None = None
    service: ServiceRequest | None = None
    start_container: bool = False
    persistent: tuple[str, ...] = ()
    persistence: Persistence = "off"
    clients: tuple[Client, ...] = ()

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(move.address for move in self.moves)


class Repaired(msgspec.Struct, frozen=True):
    """A card that was left half way, and the side that it is brought to."""

    move: CardMove
    target: Target


class RepairRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Cards that were left half way. ``uuids`` are not known: the driver does not have all of them."""

    cards: tuple[Repaired, ...]
    container: int | None = None

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(card.move.address for card in self.cards)


class RecoverRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A card that does not answer, and what is tried. ``port`` is the bridge that it is plugged into.

    ``beside`` are cards that are reset with it.
    """

    move: CardMove
    rung: Rung
    port: Address | None = None
    bus_reset: bool = False  # the bus below the port can be reset
    beside: tuple[CardMove, ...] = ()

    @property
    def moves(self) -> tuple[CardMove, ...]:
        return (self.move, *self.beside)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(move.address for move in self.moves)


#: The request of each action of this package.
REQUESTS: dict[str, type[RebindRequest | RepairRequest | RecoverRequest]] = {
    "rebind": RebindRequest,
    "repair": RepairRequest,
    "recover": RecoverRequest,
}


def cards_of(plan: Plan) -> tuple[Address, ...]:
    """The cards that a plan moves; none for a plan that is about something else."""
    kind = REQUESTS.get(plan.action)
    return () if kind is None else msgspec.json.decode(plan.request, type=kind).addresses
