"""The first step of every plan that moves cards: the world is still the one that it was made for."""

from __future__ import annotations

from collections.abc import Sequence

from console.model.rebind.inventory import Target
from console.model.rebind.moves import CardMove
from console.operations.rebind.request import Machine
from console.operations.rebind.world import look
from console.operations.step import Context, Step, StepFailed

_ANEW = "; nothing was touched: look at it, then plan anew"


class Check(Step):
    """Every function on the driver it had, or where this very plan brings it; the VM not locked."""

    id = "check"
    deadline = 30.0

    def __init__(self, moves: Sequence[CardMove], target: Target, machine: Machine | None = None) -> None:
        self._moves = moves
        self._target = target
        self._machine = machine
        self.words = "check that cards and guests are as the plan saw them"

    async def done(self, context: Context) -> str | None:
        # Looked at before the step counts as begun: a job that is refused here has changed nothing.
        inventory = await look(context)
        for move in self._moves:
            goal = move.on_vfio() if self._target == "vm" else move.on_host()
            for address, before in move.before().items():
                function = inventory.function(address)
                if function is None:
                    raise StepFailed(f"{address} is not on the bus any more{_ANEW}")
                # A job that goes on after a crash finds what it did itself: on its way it has no driver.
                if function.driver not in (before, goal[address], None):
                    saw = before or "no driver"
                    raise StepFailed(f"{address} is on {function.driver}, the plan saw it on {saw}{_ANEW}")
        if self._machine is not None:
            vm = inventory.vm(self._machine.id)
            if vm is None:
                raise StepFailed(f"there is no VM {self._machine.id} any more{_ANEW}")
            if vm.lock is not None:
                raise StepFailed(f"VM {vm.id} is locked: {vm.lock}{_ANEW}")
        return f"{len(self._moves)} cards are where the plan saw them"

    async def do(self, context: Context) -> None:
        """There is never anything left to do."""

    async def verify(self, context: Context) -> str:
        return await self.done(context) or ""
