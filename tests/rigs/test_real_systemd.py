"""The console's eyes on a real systemd and its journal, entered as a container is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
import unicodedata
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from console.model.log import LogLine
from console.model.reading import Reading
from console.model.site import Service, Site
from console.model.snapshot import Snapshot
from console.model.unit import UnitStatus
from console.sources.connect import connect
from console.sources.journal import CUT_MARK, TEXT_LIMIT, JournalSource
from console.sources.monitor import Monitor
from console.sources.unit import UnitSource
from tests.rigs.sglang.server import free_port
from tests.rigs.systemd.machine import UNITS, Machine

pytestmark = pytest.mark.rig


async def unit_until(
    machine: Machine, name: str, seen: Callable[[UnitStatus], bool], within: float = 15
) -> UnitStatus:
    """The first status that fits."""
    source = UnitSource(machine.runner(), name, period=0.1)
    status = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within):
            async for reading in source.watch():
                assert reading.error is None, reading.error
                status = reading.value
                if status is not None and seen(status):
                    return status
    raise AssertionError(f"not seen within {within:g} s; now {status}")


async def eventually(true: Callable[[], object], within: float = 20) -> None:
    """Wait until it holds; AssertionError after ``within`` seconds."""
    ends = time.monotonic() + within
    while not true():
        assert time.monotonic() < ends, f"did not come true within {within:g} s"
        await asyncio.sleep(0.05)


def service(*lines: str) -> str:
    return "\n".join(["[Unit]", "Description=Test", "[Service]", *lines, ""])


async def test_a_unit_that_is_stopped_or_not_there(machine: Machine) -> None:
    machine.write_unit("idle.service", service("ExecStart=/bin/sleep infinity"))
    idle = await unit_until(machine, "idle.service", lambda unit: unit.active_state == "inactive")
    assert (idle.load_state, idle.sub_state, idle.main_pid, idle.invocation_id) == (
        "loaded",
        "dead",
        None,
        None,
    )
    assert idle.fragment_path == f"/{UNITS}/idle.service"
    absent = await unit_until(machine, "absent.service", lambda unit: True)
    assert (absent.load_state, absent.active_state) == ("not-found", "inactive")


async def test_a_unit_that_runs_then_is_stopped(machine: Machine) -> None:
    machine.write_unit("run.service", service("ExecStart=/bin/sleep infinity", "TimeoutStopSec=7"))
    before = time.time()
    machine.run("systemctl", "start", "run.service")
    running = await unit_until(machine, "run.service", lambda unit: unit.sub_state == "running")
    assert running.main_pid is not None
    assert machine.run("cat", f"/proc/{running.main_pid}/comm").strip() == "sleep"
    assert running.started_at is not None
    assert before - 2 < running.started_at < time.time() + 2
    assert running.control_group == "/system.slice/run.service"
    assert running.stop_timeout_s == 7
    machine.run("systemctl", "stop", "run.service")
    stopped = await unit_until(machine, "run.service", lambda unit: unit.active_state == "inactive")
    assert (stopped.result, stopped.main_pid) == ("success", None)


async def test_a_slow_start_shows_what_it_says_of_itself(machine: Machine) -> None:
    script = "sleep 2; systemd-notify --status='Loading shard 2/5'; sleep 3; systemd-notify --ready; sleep 60"
    lines = ("Type=notify", "NotifyAccess=all", f'ExecStart=/bin/sh -c "{script}"')
    machine.write_unit("slow.service", service(*lines))
    began = time.monotonic()
    machine.run("systemctl", "start", "--no-block", "slow.service")
    loading = await unit_until(machine, "slow.service", lambda unit: unit.status_text is not None)
    assert (loading.active_state, loading.sub_state) == ("activating", "start")
    assert loading.status_text == "Loading shard 2/5"
    assert loading.job is not None
    active = await unit_until(machine, "slow.service", lambda unit: unit.active_state == "active")
    assert 4.5 < time.monotonic() - began < 12
    assert active.active_since is not None
    assert active.started_at is not None
    assert active.active_since - active.started_at >= 4
    machine.run("systemctl", "stop", "slow.service")


async def test_a_main_process_that_is_killed(machine: Machine) -> None:
    machine.write_unit("killed.service", service("ExecStart=/bin/sleep infinity"))
    machine.run("systemctl", "start", "killed.service")
    machine.run("systemctl", "kill", "--signal=KILL", "killed.service")
    dead = await unit_until(machine, "killed.service", lambda unit: unit.active_state == "failed")
    assert (dead.result, dead.exit_code, dead.exit_status) == ("signal", "killed", 9)


async def test_drop_ins_and_files_that_changed_since(machine: Machine) -> None:
    machine.write_unit("dropped.service", service("ExecStart=/bin/sleep infinity"))
    machine.write_unit("dropped.service.d/10-gpuops.conf", "[Service]\nEnvironment=NCCL_P2P_LEVEL=SYS\n")
    machine.run("systemctl", "start", "dropped.service")  # what does not run is read afresh each time
    status = await unit_until(machine, "dropped.service", lambda unit: True)
    assert status.drop_in_paths == (f"/{UNITS}/dropped.service.d/10-gpuops.conf",)
    assert not status.need_daemon_reload
    machine.write(f"{UNITS}/dropped.service.d/20-more.conf", "[Service]\nNice=1\n")
    changed = await unit_until(machine, "dropped.service", lambda unit: unit.need_daemon_reload)
    assert changed.drop_in_paths == status.drop_in_paths  # what systemd goes by until it is told
    machine.run("systemctl", "daemon-reload")
    read = await unit_until(machine, "dropped.service", lambda unit: not unit.need_daemon_reload)
    assert len(read.drop_in_paths) == 2


async def test_a_crash_loop_is_called_one_and_says_why(machine: Machine) -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    lines = (f"ExecStart=/bin/sh -c 'echo \"{error}\"; exit 1'", "Restart=always", "RestartSec=300ms")
    limits = "\n[Unit]\nStartLimitBurst=4\nStartLimitIntervalSec=60\n"
    machine.write_unit("loop.service", service(*lines) + limits)
    runner = machine.runner()
    site = Site(service=Service(unit="loop.service", url=f"http://127.0.0.1:{free_port()}"))
    sources = dataclasses.replace(
        connect(site),
        service=runner,
        unit=UnitSource(runner, "loop.service", period=0.2),
        journal=JournalSource(runner, "loop.service"),
    )
    monitor = Monitor(site, sources)
    task = asyncio.create_task(monitor.run())
    try:
        machine.run("systemctl", "start", "loop.service")
        await eventually(lambda: given_up(monitor.snapshot()))
        shown = monitor.snapshot()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await monitor.close()
    assert shown.state.name == "crash-looping"
    assert "CUDA out of memory" in " ".join(shown.state.reasons)
    assert shown.unit.value is not None
    assert (shown.unit.value.restarts or 0) >= 3
    machine.run("systemctl", "reset-failed", "loop.service")
    await unit_until(machine, "loop.service", lambda unit: unit.active_state == "inactive")


def given_up(shown: Snapshot) -> bool:
    """systemd starts it no more, and what the last run said has arrived."""
    unit, load = shown.unit.value, shown.load
    if unit is None or unit.active_state != "failed":
        return False
    return load.crash is not None and load.invocation == unit.invocation_id


# The journal ---------------------------------------------------------------------------------------


class Log:
    """Follows one unit's journal."""

    def __init__(self, machine: Machine, unit: str) -> None:
        self.lines: list[LogLine] = []
        self.errors: list[str] = []
        self.source = JournalSource(machine.runner(), unit, period=0.5, backoff=(0.2,))

    async def follow(self) -> None:
        async for reading in self.source.watch():
            self.take(reading)

    def take(self, reading: Reading[tuple[LogLine, ...]]) -> None:
        if reading.error is not None:
            self.errors.append(reading.error)
        else:
            self.lines += reading.value or ()

    async def until(self, text: str) -> None:
        await eventually(lambda: any(line.text == text for line in self.lines))


@contextlib.asynccontextmanager
async def following(machine: Machine, unit: str) -> AsyncIterator[Log]:
    log = Log(machine, unit)
    task = asyncio.create_task(log.follow())
    try:
        yield log
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def journalctls(machine: Machine) -> list[int]:
    """The journalctl processes in the machine, by the pids of this host."""
    inside = Path(f"/proc/{machine.pid}/ns/pid").readlink()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            named = (process / "comm").read_text().strip()
            if named == "journalctl" and (process / "ns/pid").readlink() == inside:
                found.append(int(process.name))
    return found


# Through stdout, and through journald's own socket, which takes any bytes in a field.
TALK = r"""
import os, socket, struct, sys

def say(message):
    os.write(1, message + b"\n")

def send(message):
    field = b"MESSAGE\n" + struct.pack("<Q", len(message)) + message + b"\nPRIORITY=6\n"
    journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    journal.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    journal.connect("/run/systemd/journal/socket")
    if len(message) < 100000:
        journal.send(field)
        return
    memory = os.memfd_create("entry", os.MFD_ALLOW_SEALING)
    os.write(memory, field)
    import fcntl
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, 0xF)
    journal.sendmsg([], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", memory))])

say(b"plain")
say(b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J\x9b31m end")
say(b"[bold red]markup[/] [link=x]")
say(b"bytes \xff\xfe\x80 end")
say("bidi \u202egnp.exe\u2066 end".encode())
say(b"progress 1%\rprogress 50%\rprogress 100%")
say(b"x" * 200000)
send(b"nul \x00 and \x01 end")
send(b"two\nlines")
send(b"y" * (3 << 20))
send(b"")
say(b"last")
"""


async def test_whatever_is_written_to_the_journal_is_safe_to_print(machine: Machine) -> None:
    machine.write("/opt/talk.py", TALK)
    machine.write_unit("talk.service", service("ExecStart=/usr/bin/python3 /opt/talk.py"))
    async with following(machine, "talk.service") as log:
        machine.run("systemctl", "start", "talk.service")
        await log.until("last")
    assert log.errors == []
    for line in log.lines:
        odd = [
            char for char in line.text if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        ]
        assert odd == [], line.text[:100]
        assert len(line.text) <= TEXT_LIMIT + len(CUT_MARK)
    texts = [line.text for line in log.lines]
    for expected in ("plain", "[bold red]markup[/] [link=x]", "progress 100%", "two lines"):
        assert expected in texts
    # A lone 0x9b is no control sequence in UTF-8, but a byte that is not text.
    for expected in (
        "red  \ufffd31m end",
        "bytes \ufffd\ufffd\ufffd end",
        "bidi gnp.exe end",
        "nul  and  end",
    ):
        assert expected in texts
    assert any(text.startswith("xxx") and text.endswith(CUT_MARK) for text in texts)
    # 3 MB in one entry: shown cut, or named as unreadable, but never lost without a word.
    assert any(text.startswith("yyy") or "is not readable" in text for text in texts)
    spoken = {line.invocation for line in log.lines if line.text in ("plain", "two lines", "last")}
    assert len(spoken) == 1
    assert None not in spoken


COUNT = """
import sys, time
for number in range(400):
    print("number", number, flush=True)
    time.sleep(0.02)
print("counted", flush=True)
"""


async def test_a_journalctl_that_is_killed_costs_no_line(machine: Machine) -> None:
    """It is killed twice and journald restarted once, while 400 lines come in 8 s."""
    machine.write("/opt/count.py", COUNT)
    machine.write_unit("count.service", service("ExecStart=/usr/bin/python3 /opt/count.py"))
    async with following(machine, "count.service") as log:
        machine.run("systemctl", "start", "count.service")
        for seconds in (1.5, 2.0):
            await asyncio.sleep(seconds)
            (pid,) = journalctls(machine)
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(1.5)
        machine.run("systemctl", "restart", "systemd-journald")
        await log.until("counted")
    numbers = [int(line.text.split()[1]) for line in log.lines if line.text.startswith("number ")]
    assert numbers == list(range(400))
    assert len(log.errors) >= 2  # and each end was told
    await eventually(lambda: not journalctls(machine), within=3)  # none outlives its reader


async def test_the_backlog_holds_every_run_and_tells_them_apart(machine: Machine) -> None:
    # journald looks the run up when it takes a line: of a process that is gone by then it is not known.
    lines = ('ExecStart=/bin/sh -c "echo said; sleep 0.3"', "Type=oneshot")
    machine.write_unit("again.service", service(*lines))
    for _ in range(3):
        machine.run("systemctl", "start", "again.service")
    async with following(machine, "again.service") as log:
        await log.until("said")
    said = [line.invocation for line in log.lines if line.text == "said"]
    assert len(set(said)) == 3
    finished = [line.invocation for line in log.lines if line.text.startswith("Finished again.service")]
    assert finished == said  # systemd's own lines name the run they are about
