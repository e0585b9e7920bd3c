"""Steps for cards that something left behind: a left-over override, a card half way, a card that is dead."""

from __future__ import annotations

from console.model.rebind.inventory import NVIDIA
from console.operations.rebind import kernel_write
from console.operations.rebind.functions import answers, clear_of_kernel, place, problems
from console.operations.rebind.kernel_write import Written
from console.operations.rebind.request import RecoverRequest, Repaired, Rung
from console.operations.rebind.world import look, release_own, who_holds
from console.operations.step import Context, Step, StepFailed

#: What each rung of the ladder does, in words, and what it can cost. Nothing else is tried by itself.
RUNGS: dict[Rung, str] = {
    "reset": "reset the GPU function by the first method that the kernel knows for it",
    "rescan": "take all functions of the card off the bus, and look for them anew",
    "bus-reset": "reset the bus below the card's port: everything on that port is reset",
}

#: When no rung helps. The bridge's own ``pm`` reset does not take the power from the card.
COLD = (
    "no rung is left: shut the host down and take the power off it for half a minute, so that the card "
    "loses its own; a warm restart leaves it as it is"
)

#: Seconds for one rung: each of its writes has a deadline of its own.
_RUNG_S = 400.0


class Mend(Step):
    """Bring what belongs to a card to one side. There is no way back to a state that was of no use."""

    deadline = 400.0

    def __init__(self, repaired: Repaired) -> None:
        self._move = repaired.move
        self._target = repaired.target
        side = "vfio-pci" if self._target == "vm" else "its drivers of the host"
        self.id = f"mend-{self._move.name}"
        self.words = f"{self._move.name}: {self._move.kinds} to {side}, no override left"

    async def done(self, context: Context) -> str | None:
        return None if await problems(context, self._move, self._wanted()) else self._evidence()

    async def do(self, context: Context) -> None:
        await release_own(context)
        await clear_of_kernel(context, self._move)
        wanted = self._wanted()
        if wanted[self._move.address] == NVIDIA:
            await answers(context, self._move.address)  # a dead card is never given to the driver
        else:
            wanted = dict(reversed(wanted.items()))
        await place(context, self._move, wanted)

    async def verify(self, context: Context) -> str:
        found = await problems(context, self._move, self._wanted())
        if found:
            raise StepFailed("; ".join(found), stop=True)
        return self._evidence()

    def _wanted(self) -> dict[str, str | None]:
        return self._move.on_vfio() if self._target == "vm" else self._move.on_host()

    def _evidence(self) -> str:
        told = ", ".join(
            f"{address} on {driver or 'no driver'}" for address, driver in self._wanted().items()
        )
        return f"{told}; no override"


class Rescue(Step):
    """One rung of the ladder, and a look whether the card answers now."""

    deadline = _RUNG_S

    def __init__(self, request: RecoverRequest) -> None:
        self._move = request.move
        self._rung = request.rung
        self._port = request.port
        self.id = f"rescue-{request.rung}"
        self.words = f"{self._move.name}: {RUNGS[request.rung]}"

    async def done(self, context: Context) -> str | None:
        return None  # it was asked for

    async def do(self, context: Context) -> None:
        await release_own(context)
        await clear_of_kernel(context, self._move)
        holders = await who_holds(context, (self._move.address,))
        if holders:
            told = tuple(f"{holder.words}; to end it: {holder.remedy}" for holder in holders)
            raise StepFailed(
                f"{self._move.name} is in use, so it was not touched: {told[0]}", told, stop=True
            )
        if self._rung == "reset":
            _must(await kernel_write.reset(context.host, self._move.address))
        elif self._rung == "rescan":
            await self._rescan(context)
        else:
            _must(await kernel_write.reset_bus(context.host, self._need_port()))

    async def verify(self, context: Context) -> str:
        if (await look(context)).slot(self._move.address) is None:
            raise StepFailed(f"{self._move.address} has not come back to the bus. {COLD}", stop=True)
        try:
            await answers(context, self._move.address)
        except StepFailed as failed:
            raise StepFailed(f"{failed}; {next_words(self._rung)}", stop=True) from None
        return f"{self._move.address} answers: its config space can be read"

    async def _rescan(self, context: Context) -> None:
        inventory = await look(context)
        # A driver that is bound to a dead card is asked to let go of it: with a client, that never ends.
        for function in reversed(self._move.functions):
            found = inventory.function(function.address)
            if found is None:
                continue
            if found.d3cold_allowed:
                _must(await kernel_write.set_attribute(context.host, function.address, "d3cold_allowed", "0"))
            _must(await kernel_write.remove(context.host, function.address))
        _must(await kernel_write.rescan(context.host, self._port))

    def _need_port(self) -> str:
        if self._port is None:
            raise StepFailed(f"the port that {self._move.name} is plugged into is not known", stop=True)
        return self._port


def next_words(rung: Rung) -> str:
    """What to try after a rung that did not help."""
    rungs = list(RUNGS)
    after = rungs[rungs.index(rung) + 1 :]
    return f"next: gpuops rebind --recover … --rung {after[0]}" if after else COLD


def _must(written: Written) -> None:
    if written.outcome == "pending":
        raise StepFailed(f"pending in the kernel: {written.path}: {written.reason}", stop=True)
    if not written.done:
        raise StepFailed(f"{written.path}: {written.error or written.reason}", stop=True)
