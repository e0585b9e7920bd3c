"""The unit's state from real ``systemctl show`` text (systemd 252) and its awkward values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.sources.source import Unavailable
from console.sources.unit import (
    SystemctlShow,
    UnitSource,
    parse_show,
    parse_span,
    parse_timestamp,
    unit_status,
)
from console.transport.runner import Result, Stream

RUNNING = """\
Id=sglang.service
LoadState=loaded
ActiveState=active
SubState=running
Result=success
NRestarts=2
MainPID=4711
ExecMainCode=0
ExecMainStatus=0
ExecMainStartTimestamp=@1796000000
ActiveEnterTimestamp=@1796000001
StateChangeTimestamp=@1796000001
InvocationID=3f0d5b1f6f0f4bb1a4f9d5d0c2e4a6b8
MemoryCurrent=56692736
TasksCurrent=412
UnitFileState=enabled
NeedDaemonReload=yes
FragmentPath=/etc/systemd/system/sglang.service
DropInPaths=/run/systemd/sglang.service.d/10-profile.conf "/etc/systemd/system/sglang.service.d/2 b.conf"
ControlGroup=/system.slice/sglang.service
StatusText=
Restart=on-failure
TimeoutStopUSec=1min 30s
"""

FAILED = """\
Id=sglang.service
LoadState=loaded
ActiveState=failed
SubState=failed
Result=exit-code
NRestarts=3
MainPID=0
ExecMainCode=1
ExecMainStatus=2
ExecMainStartTimestamp=@1796000000
ActiveEnterTimestamp=@0
StateChangeTimestamp=@1796000050
InvocationID=
MemoryCurrent=[not set]
TasksCurrent=18446744073709551615
NeedDaemonReload=no
DropInPaths=
ControlGroup=
Job=981
TimeoutStopUSec=infinity
"""

MISSING = """\
Id=nothere.service
LoadState=not-found
ActiveState=inactive
SubState=dead
MainPID=0
MemoryCurrent=[not set]
NeedDaemonReload=no
"""


class Canned:
    """A machine that answers each command with the next prepared result."""

    name = "canned"
    root = Path("/")

    def __init__(self, *answers: tuple[int, str, str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, ...]] = []

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        self.asked.append(tuple(argv))
        code, out, err = self.answers.pop(0)
        return Result(tuple(argv), code, out.encode(), err.encode())

    def stream(self, argv: Sequence[str]) -> AbstractAsyncContextManager[Stream]:
        raise AssertionError("nothing to follow")


def one(text: str):
    (properties,) = parse_show(text).values()
    return unit_status(properties)


def test_a_running_unit():
    unit = one(RUNNING)
    assert (unit.active_state, unit.sub_state, unit.main_pid, unit.restarts) == ("active", "running", 4711, 2)
    assert (unit.started_at, unit.memory_bytes, unit.tasks) == (1796000000.0, 56692736, 412)
    assert unit.exit_code is None
    assert unit.exit_status is None, "a running process has no exit status, although systemd prints 0"
    assert unit.need_daemon_reload
    assert unit.stop_timeout_s == 90.0
    assert unit.status_text is None
    assert unit.drop_in_paths == (
        "/run/systemd/sglang.service.d/10-profile.conf",
        "/etc/systemd/system/sglang.service.d/2 b.conf",
    )


def test_unset_values_are_none_and_never_zero():
    unit = one(FAILED)
    assert (unit.exit_code, unit.exit_status, unit.result) == ("exited", 2, "exit-code")
    assert unit.main_pid is None
    assert unit.memory_bytes is None
    assert unit.tasks is None
    assert unit.invocation_id is None
    assert unit.active_since is None
    assert unit.job == 981
    assert unit.stop_timeout_s == math.inf


def test_several_units_come_in_one_answer_an_unknown_one_too():
    units = parse_show(f"{RUNNING}\n{MISSING}")
    assert list(units) == ["sglang.service", "nothere.service"]
    unknown = unit_status(units["nothere.service"])
    assert (unknown.load_state, unknown.active_state, unknown.restarts) == ("not-found", "inactive", None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1min 30s", 90.0),
        ("5.2s", 5.2),
        ("250ms", 0.25),
        ("1h 1min 1s", 3661.0),
        ("2w 1d", 1296000.0),
        ("infinity", math.inf),
        ("90000000", 90.0),
        ("", None),
        ("[not set]", None),
        ("soon", None),
        ("3 fortnights", None),
    ],
)
def test_spans(text: str, seconds: float | None):
    assert parse_span(text) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("@1796000000", 1796000000.0),
        ("@1796000000.25", 1796000000.25),
        ("Mon 2026-11-30 00:16:45 UTC", 1795997805.0),
        ("@0", None),
        ("@soon", None),
        ("", None),
        ("n/a", None),
        ("Mon 2026-11-30 00:16:45 CET", None),
    ],
)
def test_timestamps(text: str, seconds: float | None):
    assert parse_timestamp(text) == seconds


async def test_one_call_reads_every_unit_with_arguments_that_are_no_options():
    machine = Canned((0, f"{RUNNING}\n{MISSING}", ""))
    running, missing = await SystemctlShow(machine)(["sglang.service", "nothere.service"], deadline=1)
    assert (running.id, missing.load_state) == ("sglang.service", "not-found")
    assert machine.asked[0][:3] == ("systemctl", "show", "-p")
    assert machine.asked[0][-3:] == ("--", "sglang.service", "nothere.service")


async def test_an_older_systemd_without_unix_times_is_asked_in_utc():
    old = RUNNING.replace("@1796000000", "Mon 2026-11-30 00:53:20 UTC")
    refusal = "Failed to parse timestamp style: unix"
    machine = Canned((1, "", refusal), (0, old, ""), (0, old, ""))
    source = UnitSource(machine, "sglang.service")
    assert (await source.read()).started_at == 1796000000.0
    await source.read()
    assert [argv[0] for argv in machine.asked] == ["systemctl", "env", "env"]
    assert all("--timestamp=unix" not in argv for argv in machine.asked[1:])


async def test_a_refusal_is_told_in_systemctls_own_words():
    machine = Canned((1, "", "Failed to connect to bus: \x1b[31mHost is down\n"))
    with pytest.raises(Unavailable, match="Failed to connect to bus: Host is down"):
        await UnitSource(machine, "sglang.service").read()


async def test_the_first_reading_of_watch_carries_the_unit():
    readings = UnitSource(Canned((0, RUNNING, "")), "sglang.service").watch()
    reading = await anext(readings)
    await readings.aclose()
    assert reading.error is None
    assert reading.value is not None
    assert reading.value.main_pid == 4711


@given(st.text())
def test_any_text_is_read_without_raising(text: str):
    for properties in parse_show(text).values():
        unit_status(properties)


@given(st.dictionaries(st.sampled_from(["MainPID", "Job", "TimeoutStopUSec", "DropInPaths"]), st.text()))
def test_any_value_is_read_without_raising(values: dict[str, str]):
    unit_status(values)


@given(st.text(alphabet="abc =\x1b[2J\u202e\r\x00", max_size=30))
def test_a_status_text_from_the_service_cannot_reach_the_terminal_raw(said: str):
    status = one(f"Id=a.service\nStatusText={said}\n").status_text or ""
    assert status.isprintable()
