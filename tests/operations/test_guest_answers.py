"""What the VM's guest says when it is asked for its cards, and what an operator reads of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from console.model.site import Site
from console.operations.rebind import guests
from console.operations.rebind.guests import AskGuest
from console.operations.rebind.request import Machine
from console.operations.step import Context, StepFailed
from console.store.state import State
from console.transport.runner import Result

MACHINE = Machine(id=100, was_running=False, agent=True, start_s=1029.0, shutdown_s=300.0)
TWO = "GPU 0: NVIDIA RTX PRO 6000 (UUID: GPU-1)\nGPU 1: NVIDIA RTX PRO 6000 (UUID: GPU-2)\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.45.04  Release Build\n"

NVIDIA_OPEN = "install the open one there (nvidia-open)"
NO_MODULE = "no NVIDIA module is loaded there"

Answer = tuple[int, str, str] | bytes


class Guest:
    """Answers as ``qm guest exec`` does: exit status, stdout, stderr; bytes are what qm itself prints."""

    def __init__(self, listed: Answer, version: Answer) -> None:
        self.root = None
        self._answers = {"nvidia-smi": listed, "cat": version}

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        answer = self._answers[argv[argv.index("--") + 1]]
        if isinstance(answer, bytes):
            return Result(tuple(argv), 0 if answer.startswith(b"{") else 255, answer, answer)
        code, out, err = answer
        told = {"exitcode": code, "exited": 1, "out-data": out, "err-data": err}
        return Result(tuple(argv), 0, json.dumps(told).encode(), b"")


def context(guest: Guest) -> Context:
    monitor: Any = SimpleNamespace(sources=SimpleNamespace(host=guest))
    return Context(
        site=Site(), profiles=(), monitor=monitor, state=State.__new__(State), clock=time.monotonic,
        wall_clock=time.time,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "BEAT_S", 0.01)
    monkeypatch.setattr(guests, "AGENT_S", 0.1)
    monkeypatch.setattr(guests, "DRIVER_S", 0.1)


async def test_a_guest_that_sees_every_card_through_the_open_module_is_well() -> None:
    evidence = await AskGuest(MACHINE, 2).verify(context(Guest((0, TWO, ""), (0, OPEN, ""))))
    assert evidence == "the guest sees 2 cards, open kernel module"


@pytest.mark.parametrize(
    ("guest", "words"),
    [
        (
            Guest((6, "No devices were found\n", ""), (0, CLOSED, "")),
            NVIDIA_OPEN,
        ),
        (Guest((0, TWO, ""), (0, CLOSED, "")), NVIDIA_OPEN),
        (
            Guest((9, "", "NVIDIA-SMI has failed\n"), (1, "", "No such file")),
            NO_MODULE,
        ),
        (Guest((127, "", "nvidia-smi: command not found"), (1, "", "")), "the guest has no nvidia-smi"),
        (Guest((0, TWO.splitlines()[0] + "\n", ""), (0, OPEN, "")), "shows 1 of 2 cards"),
        (Guest(b"QEMU guest agent is not running\n", b""), "could not be asked within"),
        (Guest(b'{"pid": 7}', b""), "could not be asked within"),
        (Guest(b"{not json", b""), "could not be asked within"),
        (Guest((6, "\x1b[2JNo devices\n", ""), (0, OPEN, "")), "shows 0 of 2 cards"),
    ],
)
async def test_what_is_wrong_is_said_and_the_cards_stay_with_the_vm(guest: Guest, words: str) -> None:
    with pytest.raises(StepFailed) as failed:
        await AskGuest(MACHINE, 2).verify(context(guest))
    assert words in str(failed.value)
    assert "the cards stay with VM 100" in str(failed.value)
    assert failed.value.stop, "a guest without its driver is no reason to take the cards away"
    assert "\x1b" not in str(failed.value) + "".join(failed.value.lines)
