"""Steps that make everybody let go of the cards: persistence mode, exporters, our own readers."""

from __future__ import annotations

import asyncio

from console.model.rebind.holders import CardHolder, is_reader
from console.model.text import clean
from console.operations.rebind.guests import said
from console.operations.rebind.request import Client, RebindRequest
from console.operations.rebind.world import look, release_own, who_holds
from console.operations.step import Context, Step, StepFailed

#: Seconds for one command of systemctl or nvidia-smi.
COMMAND_S = 60.0

#: Seconds that those who are to let go of the cards have, and between the two last looks.
LET_GO_S = 20.0
APART_S = 0.5


class PersistenceOff(Step):
    """Persistence mode keeps a card open without any program; its daemon does it."""

    id = "persistence-off"

    def __init__(self, uuids: tuple[str, ...]) -> None:
        self._uuids = uuids
        self.words = f"switch persistence mode off for {len(uuids)} cards"
        self.undo_words = f"switch persistence mode on again for {len(uuids)} cards"
        self.deadline = self.undo_deadline = 30.0 + COMMAND_S * len(uuids)

    async def do(self, context: Context) -> None:
        for uuid in self._uuids:
            await set_persistence(context, uuid, on=False)

    async def verify(self, context: Context) -> str:
        return f"switched off for {len(self._uuids)} cards"  # whether it let go is the next look's

    async def undo(self, context: Context) -> str:
        for uuid in self._uuids:
            await set_persistence(context, uuid, on=True)
        return f"switched on again for {len(self._uuids)} cards"


class StopClients(Step):
    """Programs that hold every card by their nature: their units are stopped, and started again."""

    id = "clients-stop"
    deadline = 2 * COMMAND_S
    undo_deadline = 2 * COMMAND_S

    def __init__(self, clients: tuple[Client, ...]) -> None:
        self._clients = clients
        self.words = f"stop {_named(clients)}"
        self.undo_words = f"start {_named(clients)} again"

    async def do(self, context: Context) -> None:
        for client in self._clients:
            result = await context.host.run(("systemctl", "stop", "--", client.unit), deadline=COMMAND_S)
            if not result.ok:
                raise StepFailed(f"systemctl stop {client.unit}: {clean(result.reason)}", said(result))

    async def verify(self, context: Context) -> str:
        return f"{_named(self._clients)} stopped"

    async def undo(self, context: Context) -> str:
        return await start_clients(context, self._clients)


class StartClients(Step):
    """They see the cards that are left. One that does not start is told, and holds nothing up."""

    id = "clients-start"
    deadline = 2 * COMMAND_S

    def __init__(self, clients: tuple[Client, ...]) -> None:
        self._clients = clients
        self.words = f"start {_named(clients)} again"

    async def do(self, context: Context) -> None:
        """Each is started, and told about, in one go."""

    async def verify(self, context: Context) -> str:
        return await start_clients(context, self._clients)


class Unused(Step):
    """The last look before anything is moved: nobody has a card open, twice in a row."""

    id = "unused"
    deadline = LET_GO_S + 60.0

    def __init__(self, request: RebindRequest) -> None:
        self._request = request
        self.words = f"look twice that nobody has one of the {len(request.moves)} cards open"

    async def done(self, context: Context) -> str | None:
        # A job that goes on after a crash may find every card moved, and in use on its new side.
        inventory = await look(context)
        vm = self._request.target == "vm"
        for move in self._request.moves:
            wanted = move.on_vfio() if vm else move.on_host()
            functions = [inventory.function(address) for address in wanted]
            if [one.driver if one else None for one in functions] != list(wanted.values()):
                return None
        return "every card is on that side already" if self._request.moves else None

    async def do(self, context: Context) -> None:
        await release_own(context)

    async def verify(self, context: Context) -> str:
        await release_own(context)
        ends = context.clock() + LET_GO_S
        free = 0
        while free < 2:
            holders = await who_holds(context, self._request.addresses)
            free = 0 if holders else free + 1
            if holders:
                if context.clock() > ends:
                    raise _held(holders)
                context.say(f"waiting for {_who(holders[0])}")
            if free < 2:
                await asyncio.sleep(APART_S)
        return f"nobody has one of {len(self._request.moves)} cards open, in two looks"


async def set_persistence(context: Context, uuid: str, *, on: bool) -> None:
    """StepFailed with nvidia-smi's own words."""
    words = ("nvidia-smi", "-i", uuid, "-pm", "1" if on else "0")
    result = await context.host.run(words, deadline=COMMAND_S)
    if not result.ok:
        raise StepFailed(f"{' '.join(words)}: {clean(result.reason)}", said(result))


async def start_clients(context: Context, clients: tuple[Client, ...]) -> str:
    """Start each: the evidence, which names those that did not start."""
    failed = []
    for client in clients:
        result = await context.host.run(("systemctl", "start", "--", client.unit), deadline=COMMAND_S)
        if not result.ok:
            failed.append(f"{client.unit} did not start: {clean(result.reason)}")
    return "; ".join(failed) if failed else f"{_named(clients)} started again"


def _named(clients: tuple[Client, ...]) -> str:
    return ", ".join(client.unit for client in clients)


def _who(holder: CardHolder) -> str:
    return f"another gpuops, pid {holder.pid}" if is_reader(holder) else holder.words


def _held(holders: tuple[CardHolder, ...]) -> StepFailed:
    told = tuple(f"{holder.words}; to end it: {holder.remedy}" for holder in holders)
    return StepFailed(f"a card is in use, so nothing was touched: {told[0]}", told)
