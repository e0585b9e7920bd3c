"""What the kernel says about the cards: its log through a scripted journalctl, its events as messages."""

# ruff: noqa: E501  kernel lines are as long as they are

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rebind_values import slot

from console.model.rebind.inventory import Slot
from console.model.rebind.kernel_log import CardEvent, read_kernel_line, read_uevent
from console.model.text import clean
from console.sources import kernel_events
from console.sources.kernel_events import KernelEvents, open_uevents, recent_events
from console.sources.source import Unavailable
from console.transport.runner import Result

THIRD, FOURTH = "0000:41:00.0", "0000:61:00.0"
CARDS = (slot("41"), slot("61"))


def entry(number: int, message: object) -> bytes:
    """One line as ``journalctl -o json`` prints it."""
    return json.dumps(
        {
            "__CURSOR": f"s=1;i={number:x}",
            "__REALTIME_TIMESTAMP": str(1_796_000_000_000_000 + number * 1_000_000),
            "MESSAGE": message,
        }
    ).encode()


XID = "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
CORRECTED = "pcieport 0000:40:01.1: AER: Correctable error message received from 0000:41:00.0"

#: Lines of kernels and drivers as reports show them: kind, whether it is grave, card.
LINES = [
    (XID, "lost", True, THIRD),
    ("NVRM: Xid (PCI:0000:41:00): 31, pid=812, name=python3, MMU Fault", "xid", False, THIRD),
    ("NVRM: Xid (PCI:0000:61:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)", "xid", True, FOURTH),
    ("NVRM: Xid (PCI:0000:41:00): 119, pid=1, Timeout after 6s of waiting for RPC response", "xid", True, THIRD),
    ("NVRM: Attempting to remove device 0000:41:00.0 with non-zero usage count!", "busy", True, THIRD),
    ("vfio-pci 0000:61:00.0: not ready 65535ms after FLR; giving up", "reset", True, FOURTH),
    ("pcieport 0000:40:01.1: not ready 65535ms after bus reset; giving up", "reset", True, THIRD),
    ("vfio-pci 0000:41:00.0: not ready 1023ms after FLR; waiting", "reset", False, THIRD),
    ("vfio-pci 0000:41:00.0: not ready 65535ms after resume; giving up", "reset", True, THIRD),
    ("vfio-pci 0000:41:00.0: Unable to change power state from D3cold to D0, device inaccessible", "power", True, THIRD),
    ("vfio-pci 0000:41:00.0: can't change power state from D3hot to D0 (config space inaccessible), stuck in D3", "power", True, THIRD),
    ("pci 0000:41:00.0: unknown header type 7f, ignoring device", "lost", True, THIRD),
    (CORRECTED, "bus-error", False, THIRD),
    ("nvidia 0000:41:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer", "bus-error", True, THIRD),
    ("pcieport 0000:60:01.1: pciehp: Slot(4): Link Down", "bus-error", True, FOURTH),
    ("vfio-pci 0000:41:00.1: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x001a address=0x0 flags=0x0000]", "dma-fault", True, THIRD),
    ("NVRM: GPU 0000:61:00.0: RmInitAdapter failed! (0x22:0x56:884)", "init", True, FOURTH),
    ("NVRM: rm_init_adapter failed, device minor number 3", "init", True, FOURTH),
    ("NVRM: rm_init_adapter failed, device minor number 9", "init", True, None),
    ("NVRM: installed in this system requires use of the NVIDIA open kernel modules.", "module", True, None),
    ("NVRM: _kgspBootGspRm: unexpected WPR2 already up, cannot proceed with booting GSP", "firmware", True, None),
    ("vfio-pci 0000:41:00.0: Device is currently in use, task \"dd\" (88) blocked until device is released", "in-use", True, THIRD),
]  # fmt: skip

NOTHING = [
    "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.",
    "vfio-pci 0000:c1:00.0: not ready 65535ms after FLR; giving up",
    "nvme 0000:42:00.0: AER: aer_status: 0x00000001",
    "pcieport 0000:00:01.1: AER: Corrected error received: 0000:00:01.1",
    "vfio-pci 0000:41:00.0: vgaarb: VGA decodes changed",
    "EXT4-fs (dm-1): mounted filesystem",
    "systemd[1]: reset failed",
    "",
]


class Script:
    """A machine whose journalctl plays one act after the other, then stays silent."""

    name = "scripted"

    def __init__(self, *acts: tuple[Sequence[bytes], str | None], root: Path = Path("/nowhere")) -> None:
        self.root = root
        self._acts = list(acts)
        self.commands: list[tuple[str, ...]] = []
        self.running = 0
        self.answer = Result(("journalctl",), 0, b"", b"")

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        self.commands.append(tuple(argv))
        return self.answer

    @contextlib.asynccontextmanager
    async def stream(self, argv: Sequence[str]) -> AsyncIterator[Playing]:
        self.commands.append(tuple(argv))
        self.running += 1
        try:
            yield Playing(*(self._acts.pop(0) if self._acts else ((), None)))
        finally:
            self.running -= 1


class Playing:
    """The lines of one act. Without a reason it goes on for ever."""

    def __init__(self, lines: Sequence[bytes], reason: str | None) -> None:
        self._lines = lines
        self._reason = reason
        self.reason: str | None = None

    async def lines(self) -> AsyncIterator[bytes]:
        for line in self._lines:
            yield line
        if self._reason is None:
            await asyncio.sleep(3600)
        self.reason = self._reason


def following(host: Script, **options: Any) -> KernelEvents:
    values: dict[str, Any] = {"clock": lambda: 0.0, "wall": lambda: 5.0, "backoff": (0.0,)}
    return KernelEvents(host, lambda: CARDS, **(values | options))  # type: ignore[arg-type]


async def first(events: KernelEvents, count: int, within: float = 5.0) -> list[CardEvent]:
    """The first events, and the watch ended after them."""
    seen: list[CardEvent] = []
    watch = events.watch()
    try:
        async with asyncio.timeout(within):
            async for event in watch:
                seen.append(event)
                if len(seen) == count:
                    break
    finally:
        await watch.aclose()  # type: ignore[attr-defined]
    return seen


# Lines of the log


@pytest.mark.parametrize(("text", "kind", "grave", "card"), LINES)
def test_a_line_becomes_an_event_of_the_card_it_is_about(text: str, kind: str, grave: bool, card: str | None):
    event = read_kernel_line(text, 7.0, CARDS)
    assert event is not None
    assert (event.kind, event.grave, event.card, event.at) == (kind, grave, card, 7.0)
    assert event.words == text


@pytest.mark.parametrize("text", NOTHING)
def test_other_devices_and_other_words_are_no_events(text: str):
    assert read_kernel_line(text, 7.0, CARDS) is None


async def test_the_log_is_followed_with_the_time_that_it_says():
    host = Script(([entry(1, NOTHING[0]), entry(2, XID), entry(3, LINES[5][0])], None))
    seen = await first(following(host), 2)
    assert [(event.at, event.card, event.kind) for event in seen] == [
        (1_796_000_002.0, THIRD, "lost"),
        (1_796_000_003.0, FOURTH, "reset"),
    ]
    assert {"-k", "-f", "-n", "0"} <= set(host.commands[0]), "from now on"
    assert host.running == 0, "nothing is left running"


async def test_a_log_that_ends_is_told_and_begun_again_where_it_was():
    host = Script(
        ([entry(1, XID), entry(2, "of no interest")], "journalctl: exit status 1"),
        ([entry(3, LINES[5][0])], None),
    )
    one, ended, two = await first(following(host), 3)
    assert (one.kind, two.kind) == ("lost", "reset")
    assert (ended.kind, ended.card, ended.at) == ("source", None, 5.0)
    assert ended.words == "the kernel's log cannot be followed: journalctl: exit status 1"
    assert "--after-cursor=s=1;i=2" in host.commands[1]
    assert "--no-tail" in host.commands[1]


async def test_a_place_in_the_log_that_is_gone_is_forgotten():
    host = Script(
        ([entry(1, XID)], "journalctl: exit status 1"),
        ([], "Failed to seek to cursor: Invalid argument"),
        ([entry(9, LINES[5][0])], None),
    )
    await first(following(host), 4)
    assert not [word for word in host.commands[2] if "cursor" in word]


async def test_a_log_that_cannot_be_followed_is_told_once():
    host = Script(*[((), "journalctl: not found")] * 5, ([entry(1, XID)], None))
    told, event = await first(following(host), 2)
    assert "not found" in told.words
    assert event.kind == "lost"
    assert len(host.commands) == 6


async def test_entries_that_are_no_entries_are_passed_over():
    odd = [b"{", b"\xff\xfe", b"[]", b"null", entry(1, None), entry(2, [78, 255]), entry(3, {"a": 1})]
    (event,) = await first(following(Script(([*odd, entry(4, XID)], None))), 1)
    assert event.kind == "lost"


async def test_a_flood_is_limited_and_what_is_left_out_is_counted():
    now = [0.0]
    host = Script(([entry(number, CORRECTED) for number in range(5000)], "ended"), ([entry(9000, XID)], None))
    events = following(host, clock=lambda: now[0], backoff=(0.05,))
    seen: list[CardEvent] = []
    watch = events.watch()
    async with asyncio.timeout(5.0):
        async for event in watch:
            seen.append(event)
            if event.kind == "bus-error" and len(seen) == 40:
                now[0] = 60.0
            if event.kind == "lost":
                break
    await watch.aclose()  # type: ignore[attr-defined]
    assert len(seen) < 50
    told = next(event for event in seen if "left out" in event.words)
    assert told.kind == "source"
    assert "49" in told.words, "the number of those that were left out"


async def test_a_reader_that_is_slow_gets_the_newest_and_is_told_that_some_are_lost():
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # so slowly that it is no flood
        return now[0]

    host = Script(([entry(number, CORRECTED) for number in range(1, 700)] + [entry(700, XID)], None))
    events = following(host, clock=clock)
    watch = events.watch()
    seen = [await anext(watch)]
    while seen[-1].kind != "lost":
        seen.append(await asyncio.wait_for(anext(watch), 5.0))
    await watch.aclose()  # type: ignore[attr-defined]
    lost = [event for event in seen if event.kind == "source"]
    assert [event.words for event in lost] == ["188 older events about cards were not read in time"]
    assert len(seen) == 512 + 1


async def test_words_are_safe_to_print_and_not_endless():
    text = f"NVRM: Xid (PCI:0000:41:00): 79, \x1b[2J\u202e{'x' * 5000}"
    (event,) = await first(following(Script(([entry(1, text)], None))), 1)
    assert "\x1b" not in event.words
    assert "\u202e" not in event.words
    assert len(event.words) < 400


@settings(deadline=None)
@given(text=st.text(max_size=200), at=st.sampled_from(("", "0000:41:00.0", "Xid (PCI:0000:41:00): ")))
def test_any_line_is_survived(text: str, at: str):
    event = read_kernel_line(f"{text} {at}{text}", 1.0, CARDS)
    assert event is None or event.words == clean(event.words)


# The last day


async def test_what_the_kernel_said_before():
    host = Script()
    lines = [entry(1, LINES[4][0]), entry(2, NOTHING[1]), entry(3, XID), b"cut in the midd"]
    host.answer = Result(("journalctl",), 0, b"\n".join(lines), b"")
    found = await recent_events(host, CARDS, 86_400.0)  # type: ignore[arg-type]
    assert [(event.kind, event.at) for event in found] == [
        ("busy", 1_796_000_001.0),
        ("lost", 1_796_000_003.0),
    ]
    assert "--since=-86400s" in host.commands[0]


async def test_a_log_that_cannot_be_read_says_why():
    host = Script()
    host.answer = Result(("journalctl",), 1, b"", b"Hint: x\nNo journal files were opened\n")
    with pytest.raises(Unavailable, match="No journal files were opened"):
        await recent_events(host, CARDS, 60.0)  # type: ignore[arg-type]


# Events of the device model


def message(action: str, address: str = THIRD, subsystem: str = "pci", **fields: str) -> bytes:
    """As lib/kobject_uevent.c builds it."""
    path = f"/devices/pci0000:40/0000:40:01.1/{address}"
    parts = [
        f"{action}@{path}",
        f"ACTION={action}",
        f"DEVPATH={path}",
        f"SUBSYSTEM={subsystem}",
        f"PCI_SLOT_NAME={address}",
        *(f"{key}={value}" for key, value in fields.items()),
        "SEQNUM=4711",
    ]
    return "\0".join(parts).encode() + b"\0"


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (message("bind", DRIVER="nvidia"), "bind", "0000:41:00.0 bound to nvidia"),
        (message("unbind"), "unbind", "0000:41:00.0 unbound from its driver"),
        (message("add"), "add", "0000:41:00.0 found on the bus"),
        (message("remove", "0000:41:00.1"), "remove", "0000:41:00.1 taken off the bus"),
    ],
)
def test_what_happens_to_a_card(text: bytes, kind: str, words: str):
    event = read_uevent(text, 3.0, CARDS)
    assert event is not None
    assert (event.kind, event.words, event.card, event.at) == (kind, words, THIRD, 3.0)
    assert not event.grave


@pytest.mark.parametrize(
    "text",
    [
        message("bind", "0000:c1:00.0", DRIVER="nvidia"),
        message("change"),
        message("add", subsystem="drm"),
        message("bind").replace(b"PCI_SLOT_NAME", b"OTHER"),
        b"libudev\0\xfe\xed\xca\xfe" + message("bind"),
        b"",
        b"bind@",
        b"\xff" * 300,
    ],
)
def test_what_is_no_event_of_a_card(text: bytes):
    assert read_uevent(text, 3.0, CARDS) is None


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_message_is_survived(data: bytes):
    assert read_uevent(data, 1.0, CARDS) is None
    read_uevent(message("bind") + data, 1.0, CARDS)


class Netlink:
    """Stands in for the socket of the kernel's events: a real one, which the test writes to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        theirs.setblocking(False)
        monkeypatch.setattr(kernel_events, "open_uevents", lambda: theirs)
        self.senders: dict[bytes, int] = {}
        self.problems: list[OSError] = []

    async def receive(self, listening: socket.socket, size: int) -> tuple[bytes, tuple[int, int]]:
        if self.problems:
            raise self.problems.pop(0)
        data = await asyncio.get_running_loop().sock_recv(listening, size)
        return data, (self.senders.get(data, 0), 1)


@pytest.fixture
def netlink(monkeypatch: pytest.MonkeyPatch) -> Netlink:
    return Netlink(monkeypatch)


async def on_this_machine(
    netlink: Netlink, monkeypatch: pytest.MonkeyPatch, count: int, slots: Callable[[], Sequence[Slot]]
) -> list[CardEvent]:
    monkeypatch.setattr(asyncio.get_running_loop(), "sock_recvfrom", netlink.receive, raising=False)
    events = KernelEvents(Script(root=Path("/")), slots, clock=lambda: 0.0, wall=lambda: 5.0, backoff=(0.0,))  # type: ignore[arg-type]
    return await first(events, count)


async def test_only_the_kernels_own_word_counts(netlink: Netlink, monkeypatch: pytest.MonkeyPatch):
    forged = message("bind", DRIVER="forged")
    netlink.senders[forged] = 812  # a process sent it
    for data in (forged, message("unbind"), message("bind", DRIVER="vfio-pci")):
        netlink.ours.send(data)
    seen = await on_this_machine(netlink, monkeypatch, 2, lambda: CARDS)
    assert [event.words for event in seen] == [
        "0000:41:00.0 unbound from its driver",
        "0000:41:00.0 bound to vfio-pci",
    ]


async def test_events_that_were_lost_are_told_and_the_rest_goes_on(
    netlink: Netlink, monkeypatch: pytest.MonkeyPatch
):
    netlink.problems.append(OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)))
    netlink.ours.send(message("unbind"))
    lost, event = await on_this_machine(netlink, monkeypatch, 2, lambda: CARDS)
    assert (lost.kind, "No buffer space" in lost.words) == ("source", True)
    assert event.kind == "unbind"


async def test_a_socket_that_fails_each_time_does_not_stop_the_program(
    netlink: Netlink, monkeypatch: pytest.MonkeyPatch
):
    netlink.problems += [OSError(errno.EBADF, os.strerror(errno.EBADF))] * 1_000_000
    (told,) = await on_this_machine(netlink, monkeypatch, 1, lambda: CARDS)
    assert told.kind == "source"
    assert len(netlink.problems) > 999_000, "it is not asked without end"


async def test_a_socket_that_may_not_be_opened_costs_the_events_only(monkeypatch: pytest.MonkeyPatch):
    def refused() -> socket.socket:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(kernel_events, "open_uevents", refused)
    host = Script(([entry(1, XID)], None), root=Path("/"))
    seen = await first(following(host), 2)
    assert {event.kind for event in seen} == {"source", "lost"}
    assert any("device events cannot be followed: Operation not permitted" in event.words for event in seen)


def test_the_real_socket_opens_or_says_why():
    try:
        listening = open_uevents()
    except OSError as problem:
        assert problem.strerror
    else:
        with listening:
            assert not listening.getblocking()
