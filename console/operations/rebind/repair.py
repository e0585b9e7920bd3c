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
        self._request = request
        self._move = request.move
        self._rung = request.rung
        self._port = request.port
        self.id = f"rescue-{request.rung}"
        self.words = f"{self._move.name}: {RUNGS[request.rung]}"

    async def done(self, context: Context) -> str | None:
        return None  # it was asked for

    async def do(self, context: Context) -> None:
        await release_own(context)
        for move in self._request.moves:
            await clear_of_kernel(context, move)
        await self._unused(context)
        if self._rung == "reset":
            self._must(await kernel_write.reset(context.host, self._move.address))
        elif self._rung == "rescan":
            await self._rescan(context)
        else:
            port = self._need_port()
            self._must(await kernel_write.reset_bus(context.host, port))
            if (await look(context)).slot(self._move.address) is None:
                self._must(await kernel_write.rescan(context.host, port))

    async def verify(self, context: Context) -> str:
        if (await look(context)).slot(self._move.address) is None:
            raise StepFailed(f"{self._move.address} has not come back to the bus; {self._next}", stop=True)
        for address in reversed(self._request.addresses):  # its own last: that is what was asked
            try:
                await answers(context, address)
            except StepFailed as failed:
                raise StepFailed(f"{failed}; {self._next}", stop=True) from None
        return f"{self._move.address} answers: its config space can be read"

    async def _unused(self, context: Context) -> None:
        """StepFailed when somebody has the card open, or one that is reset with it."""
        inventory = await look(context)
        # A rescan, also one that was cut short, takes the card off the bus; then nobody has it open.
        there = tuple(address for address in self._request.addresses if inventory.slot(address) is not None)
        if self._move.address not in there and self._rung == "reset":
            raise StepFailed(f"{self._move.address} is not on the bus any more; {self._next}", stop=True)
        holders = await who_holds(context, there)
        if holders:
            told = tuple(f"{holder.words}; to end it: {holder.remedy}" for holder in holders)
            names = ", ".join(
                move.name
                for move in self._request.moves
                if any(move.address in holder.cards for holder in holders)
            )
            raise StepFailed(f"{names} is in use, so nothing was touched: {told[0]}", told, stop=True)

    async def _rescan(self, context: Context) -> None:
        inventory = await look(context)
        # A driver that is bound to a dead card is asked to let go of it: with a client, that never ends.
        for function in reversed(self._move.functions):
            found = inventory.function(function.address)
            if found is None:
                continue
            if found.d3cold_allowed:
                self._must(
                    await kernel_write.set_attribute(context.host, function.address, "d3cold_allowed", "0")
                )
            self._must(await kernel_write.remove(context.host, function.address))
        self._must(await kernel_write.rescan(context.host, self._port))

    def _need_port(self) -> str:
        if self._port is None:
            raise StepFailed(f"the port that {self._move.name} is plugged into is not known", stop=True)
        return self._port

    def _must(self, written: Written) -> None:
        if written.outcome == "pending":
            raise StepFailed(f"pending in the kernel: {written.path}: {written.reason}", stop=True)
        if not written.done:
            words = f"{written.path}: {written.error or written.reason}"
            if written.error == "ENOTTY":
                words += ", so no reset was done, or the card did not come back after one"
            raise StepFailed(f"{words}; {self._next}", stop=True)

    @property
    def _next(self) -> str:
        """What to try when this rung did not help."""
        rungs = list(RUNGS)
        after = rungs[rungs.index(self._rung) + 1 :]
        return f"next: gpuops rebind --recover {self._move.name} --rung {after[0]}" if after else COLD
