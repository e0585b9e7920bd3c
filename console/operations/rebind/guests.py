"""Steps that start and end the guests by Proxmox's own commands, and ask the VM what its driver sees."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from console.model.card import Address
from console.model.rebind.holders import CardHolder
from console.model.rebind.inventory import VmStatus
from console.model.text import clean
from console.operations.rebind.request import Machine
from console.operations.rebind.world import look, who_holds
from console.operations.step import Context, Step, StepFailed
from console.transport.runner import Result

#: Seconds that Proxmox's commands need beside the time that they are given.
BESIDE_S = 60.0

#: Seconds until a guest that boots must answer, and then until its driver must show every card.
AGENT_S = 300.0
DRIVER_S = 60.0

#: Seconds for one command in the guest, as qm is told, and between two.
EXEC_S = 30
BEAT_S = 2.0

#: Seconds for a container to start or end.
CONTAINER_S = 120.0


class StartVm(Step):
    """``qm start``, and a look that its process has every card."""

    id = "vm-start"

    def __init__(self, machine: Machine, cards: tuple[Address, ...]) -> None:
        self._machine = machine
        self._cards = cards
        self.words = f"start VM {machine.id} (Proxmox gives it {machine.start_s:.0f} s)"
        self.undo_words = f"shut VM {machine.id} down again"
        self.deadline = machine.start_s + 2 * BESIDE_S
        self.undo_deadline = machine.shutdown_s + 2 * BESIDE_S

    async def done(self, context: Context) -> str | None:
        if await vm_status(context, self._machine.id) != "running":
            return None
        return await self.verify(context)

    async def do(self, context: Context) -> None:
        await start_vm(context, self._machine)

    async def verify(self, context: Context) -> str:
        return await runs_with(context, self._machine, self._cards)

    async def undo(self, context: Context) -> str:
        return await shut_down(context, self._machine, self._cards)


class StopVm(Step):
    """``qm shutdown``: a guest that is killed is the usual way to a card that answers no more."""

    id = "vm-shutdown"

    def __init__(self, machine: Machine, cards: tuple[Address, ...]) -> None:
        self._machine = machine
        self._cards = cards
        hard = ", then stop it hard" if machine.force_stop else ""
        self.words = f"shut VM {machine.id} down (at most {machine.shutdown_s:.0f} s{hard})"
        self.deadline = machine.shutdown_s + 3 * BESIDE_S
        self.undo_deadline = machine.start_s + 2 * BESIDE_S
        if machine.was_running:
            self.undo_words = f"start VM {machine.id} again"

    async def done(self, context: Context) -> str | None:
        if await vm_status(context, self._machine.id) == "running":
            return None
        return None if await _guests_of(context, self._cards) else f"VM {self._machine.id} does not run"

    async def do(self, context: Context) -> None:
        await shut_down(context, self._machine, self._cards)

    async def verify(self, context: Context) -> str:
        if await vm_status(context, self._machine.id) == "running":
            raise StepFailed(f"VM {self._machine.id} still runs")
        return await _let_go(context, self._machine, self._cards)

    async def undo(self, context: Context) -> str:
        await start_vm(context, self._machine)
        return await runs_with(context, self._machine, self._cards)


class AskGuest(Step):
    """Whether the guest's driver has the cards. What it says does not take them away again."""

    id = "guest"
    deadline = AGENT_S + DRIVER_S + 2 * EXEC_S + 30.0

    def __init__(self, machine: Machine, cards: int) -> None:
        self._machine = machine
        self._cards = cards
        self.words = f"ask the guest of VM {machine.id} for its {cards} cards and for the open kernel module"

    async def do(self, context: Context) -> None:
        """Nothing is changed."""

    async def verify(self, context: Context) -> str:
        try:
            return await self._ask(context)
        except StepFailed as failed:
            kept = f"{failed}; the cards stay with VM {self._machine.id}"
            raise StepFailed(kept, failed.lines, stop=True) from None

    async def _ask(self, context: Context) -> str:
        heard: float | None = None
        began = context.clock()
        while True:
            result, answer = await guest_exec(context, self._machine.id, ("nvidia-smi", "-L"))
            if answer is None:
                context.say(f"the guest does not answer yet: {clean(result.reason)}")
                if context.clock() - began > AGENT_S:
                    raise StepFailed(
                        f"the guest of VM {self._machine.id} could not be asked within {AGENT_S:.0f} s: "
                        f"{clean(result.reason)}; whether its driver has the cards is not known"
                    )
            else:
                heard = heard if heard is not None else context.clock()
                seen = _listed(answer)
                if len(seen) >= self._cards:
                    return await self._module(context, seen)
                context.say(f"the guest sees {len(seen)} of {self._cards} cards")
                if context.clock() - heard > DRIVER_S:
                    raise await self._unseen(context, answer, seen)
            await asyncio.sleep(BEAT_S)

    async def _module(self, context: Context, seen: tuple[str, ...]) -> str:
        version = await self._version(context)
        if version is not None and "Open Kernel Module" not in version:
            raise StepFailed(_closed(version), seen)
        kind = "its kernel module's kind could not be read" if version is None else "open kernel module"
        return f"the guest sees {len(seen)} cards, {kind}"

    async def _unseen(self, context: Context, answer: dict[str, Any], seen: tuple[str, ...]) -> StepFailed:
        """Why, as far as the guest tells."""
        said = f"{answer.get('out-data', '')}\n{answer.get('err-data', '')}"
        lines = tuple(clean(line) for line in said.splitlines() if line.strip())[:20]
        words = f"the guest's driver shows {len(seen)} of {self._cards} cards"
        version = await self._version(context)
        if answer.get("exitcode") == 127:
            words = "the guest has no nvidia-smi: install its driver, with the open kernel module"
        elif version is None:
            words += ", and no NVIDIA module is loaded there: these cards need the open one (nvidia-open)"
        elif "Open Kernel Module" not in version:
            words += f": {_closed(version)}"
        elif lines:
            words += f": {lines[-1]}"
        return StepFailed(words, lines)

    async def _version(self, context: Context) -> str | None:
        _, answer = await guest_exec(context, self._machine.id, ("cat", "/proc/driver/nvidia/version"))
        text = "" if answer is None or answer.get("exitcode") != 0 else str(answer.get("out-data", ""))
        return clean(text.splitlines()[0])[:200] if text.strip() else None


class StartContainer(Step):
    """``pct start``: it stands still because its device files were not there."""

    id = "container-start"
    deadline = CONTAINER_S + 30.0
    undo_deadline = CONTAINER_S + 30.0

    def __init__(self, container: int) -> None:
        self._container = container
        self.words = f"start CT {container}"
        self.undo_words = f"shut CT {container} down again"

    async def done(self, context: Context) -> str | None:
        return f"CT {self._container} runs" if await self._running(context) else None

    async def do(self, context: Context) -> None:
        result = await context.host.run(("pct", "start", str(self._container)), deadline=CONTAINER_S)
        if not result.ok and not await self._running(context):
            raise StepFailed(f"pct start {self._container}: {clean(result.reason)}", said(result))

    async def verify(self, context: Context) -> str:
        if not await self._running(context):
            raise StepFailed(f"CT {self._container} does not run after pct start")
        return f"CT {self._container} runs"

    async def undo(self, context: Context) -> str:
        if not await self._running(context):
            return f"CT {self._container} does not run"
        result = await context.host.run(("pct", "shutdown", str(self._container)), deadline=CONTAINER_S)
        if await self._running(context):
            raise StepFailed(f"pct shutdown {self._container}: {clean(result.reason)}", said(result))
        return f"CT {self._container} is shut down"

    async def _running(self, context: Context) -> bool:
        result = await context.host.run(("pct", "status", str(self._container)), deadline=EXEC_S)
        if not result.ok:
            raise StepFailed(f"pct status {self._container}: {clean(result.reason)}")
        return result.stdout.decode("utf-8", "replace").strip() == "status: running"


async def vm_status(context: Context, id: int) -> VmStatus:
    """By its process. StepFailed when that cannot be told."""
    machine = (await look(context)).vm(id)
    if machine is None:
        raise StepFailed(f"this node has no VM {id} any more")
    if machine.status is None:
        raise StepFailed(f"whether VM {id} runs cannot be told: /run/qemu-server cannot be read")
    return machine.status


async def start_vm(context: Context, machine: Machine) -> None:
    """``qm start``, unless it runs. StepFailed with Proxmox's own words."""
    if await vm_status(context, machine.id) == "running":
        return
    result = await context.host.run(("qm", "start", str(machine.id)), deadline=machine.start_s + BESIDE_S)
    if not result.ok and await vm_status(context, machine.id) != "running":
        raise StepFailed(f"qm start {machine.id}: {clean(result.reason)}", said(result))


async def runs_with(context: Context, machine: Machine, cards: tuple[Address, ...]) -> str:
    """That the VM's process has every card open: the evidence. StepFailed."""
    if await vm_status(context, machine.id) != "running":
        raise StepFailed(f"VM {machine.id} does not run")
    holders = await who_holds(context, cards)
    held = {card for holder in holders if holder.vm == machine.id for card in holder.cards}
    missing = [card for card in cards if card not in held]
    if missing:
        raise StepFailed(f"VM {machine.id} runs, but has not opened {', '.join(missing)}")
    return f"VM {machine.id} runs and has {len(cards)} cards open"


async def shut_down(context: Context, machine: Machine, cards: tuple[Address, ...]) -> str:
    """Ask the guest to shut down and wait until nobody has the cards: the evidence. StepFailed."""
    reason = ""
    if await vm_status(context, machine.id) == "running":
        limit = int(machine.shutdown_s)
        context.say(f"VM {machine.id} is asked to shut down; it has {limit} s")
        result = await context.host.run(
            ("qm", "shutdown", str(machine.id), "--timeout", str(limit)), deadline=limit + BESIDE_S
        )
        reason = "" if result.ok else clean(result.reason)
    if machine.force_stop and await vm_status(context, machine.id) == "running":
        context.say(f"VM {machine.id} is stopped hard, as asked")
        result = await context.host.run(("qm", "stop", str(machine.id)), deadline=BESIDE_S)
        reason = "" if result.ok else clean(result.reason)
    if await vm_status(context, machine.id) == "running":
        raise StepFailed(
            f"VM {machine.id} did not shut down: {reason or 'its process is still there'}. It was not "
            "stopped hard: that can leave a card dead. When it must be: gpuops rebind --force-stop"
        )
    return await _let_go(context, machine, cards)


async def _let_go(context: Context, machine: Machine, cards: tuple[Address, ...]) -> str:
    """Unbinding a card under a process that has it open never returns."""
    ends = context.clock() + BESIDE_S / 2
    while holders := await _guests_of(context, cards):
        if context.clock() > ends:
            raise StepFailed(
                f"VM {machine.id} has ended, but a card is still open: {holders[0].words}",
                tuple(holder.words for holder in holders),
            )
        context.say(f"waiting for {holders[0].words}")
        await asyncio.sleep(BEAT_S / 4)
    return f"VM {machine.id} does not run, no guest has the cards open"


async def _guests_of(context: Context, cards: tuple[Address, ...]) -> tuple[CardHolder, ...]:
    """Who has a card open through vfio. What the host has open once a card is back is no guest's."""
    holders = await who_holds(context, cards)
    return tuple(
        holder
        for holder in holders
        if any(node.startswith("/dev/vfio/") for node in (*holder.open, *holder.mapped))
    )


async def guest_exec(
    context: Context, id: int, command: tuple[str, ...]
) -> tuple[Result, dict[str, Any] | None]:
    """A command in the guest: what qm said, and its answer; None when the guest did not answer."""
    words = ("qm", "guest", "exec", str(id), "--timeout", str(EXEC_S), "--", *command)
    result = await context.host.run(words, deadline=EXEC_S + 15.0)
    answer: object = None
    if result.ok:
        with contextlib.suppress(ValueError):  # no JSON: it is no answer, and the reason is qm's
            answer = json.loads(result.stdout)
    return result, answer if isinstance(answer, dict) and "exitcode" in answer else None


def said(result: Result) -> tuple[str, ...]:
    """What a command wrote, its last lines."""
    text = (result.stderr + b"\n" + result.stdout).decode("utf-8", "replace")
    return tuple(clean(line) for line in text.splitlines() if line.strip())[-20:]


def _listed(answer: dict[str, Any]) -> tuple[str, ...]:
    lines = str(answer.get("out-data", "")).splitlines()
    return tuple(clean(line) for line in lines if line.startswith("GPU ")) if not answer["exitcode"] else ()


def _closed(version: str) -> str:
    return (
        f"the guest runs the proprietary kernel module ({version}), which does not start these cards: "
        "install the open one there (nvidia-open) and restart the guest"
    )
