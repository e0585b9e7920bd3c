"""The service's unit, as ``systemctl show`` prints it where the service runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator, Sequence

from console.model.reading import Reading
from console.model.text import clean
from console.model.unit import UnitStatus
from console.sources.source import Unavailable, poll
from console.transport.runner import Result, Runner

PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "NRestarts",
    "MainPID",
    "ExecMainCode",
    "ExecMainStatus",
    "ExecMainStartTimestamp",
    "ActiveEnterTimestamp",
    "StateChangeTimestamp",
    "InvocationID",
    "MemoryCurrent",
    "TasksCurrent",
    "UnitFileState",
    "NeedDaemonReload",
    "FragmentPath",
    "DropInPaths",
    "ControlGroup",
    "StatusText",
    "Restart",
    "Job",
    "TimeoutStopUSec",
)

#: What systemd prints for "no value"; the number is UINT64_MAX, its "not accounted".
_UNSET = frozenset({"", "[not set]", "[no data]", "n/a", "18446744073709551615"})

#: How the last main process ended: waitid's CLD_* numbers.
_EXIT_CODES = {"1": "exited", "2": "killed", "3": "dumped"}

_SPAN_SECONDS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "days": 86400.0,
    "w": 604800.0,
    "month": 2629800.0,
    "months": 2629800.0,
    "y": 31557600.0,
    "year": 31557600.0,
    "years": 31557600.0,
}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?\s*[a-z]+\s*)+\Z", re.ASCII)
_SPAN_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.ASCII)


class UnitSource:
    """Watches one unit. A unit that is not found is a value (``load_state``), not a failure."""

    name = "unit"

    def __init__(self, runner: Runner, unit: str, period: float = 2.0) -> None:
        self.period = period
        self.deadline = max(3.0, period)
        self._units = (unit,)
        self._show = SystemctlShow(runner)

    def watch(self) -> AsyncIterator[Reading[UnitStatus]]:
        return poll(self.name, self.period, self.deadline, self.read)

    async def read(self) -> UnitStatus:
        """The unit now. Raises Unavailable with systemctl's own words."""
        return (await self._show(self._units, deadline=self.deadline))[0]


class SystemctlShow:
    """One ``systemctl show`` for any number of units on one machine."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._unix_times = True

    async def __call__(self, units: Sequence[str], *, deadline: float) -> tuple[UnitStatus, ...]:
        """The status of each unit, in the order asked. Raises Unavailable."""
        result = await self._ask(units, deadline)
        if not result.ok and self._unix_times and b"timestamp" in result.stderr:
            # systemd before 251 has no unix style; UTC is one we can read as well.
            self._unix_times = False
            result = await self._ask(units, deadline)
        if not result.ok:
            raise Unavailable(clean(result.reason))
        blocks = tuple(parse_show(result.stdout.decode("utf-8", "replace")).values())
        if len(blocks) != len(units):
            raise Unavailable(f"systemctl show answered for {len(blocks)} of {len(units)} units")
        return tuple(unit_status(block) for block in blocks)

    async def _ask(self, units: Sequence[str], deadline: float) -> Result:
        show = ["systemctl", "show", "-p", ",".join(PROPERTIES)]
        if self._unix_times:
            show.append("--timestamp=unix")
        else:
            show = ["env", "TZ=UTC", *show]
        return await self._runner.run([*show, "--", *units], deadline=deadline)


def parse_show(text: str) -> dict[str, dict[str, str]]:
    """Properties by unit id. Units are separated by a blank line; values are safe to print."""
    units: dict[str, dict[str, str]] = {}
    for block in text.split("\n\n"):
        properties: dict[str, str] = {}
        for line in block.splitlines():
            name, equals, value = line.partition("=")
            if equals:
                properties[name] = clean(value)
        if properties:
            units[properties.get("Id", "")] = properties
    return units


def unit_status(properties: dict[str, str]) -> UnitStatus:
    """One unit's properties, typed. What is absent, unset or unreadable is None."""

    def text(name: str) -> str | None:
        value = properties.get(name, "")
        return None if value in _UNSET else value

    def number(name: str) -> int | None:
        value = text(name)
        return int(value) if value is not None and value.isascii() and value.isdigit() else None

    def moment(name: str) -> float | None:
        return parse_timestamp(properties.get(name, ""))

    exit_code = _EXIT_CODES.get(properties.get("ExecMainCode", ""))
    return UnitStatus(
        id=properties.get("Id", ""),
        load_state=properties.get("LoadState", "unknown"),
        active_state=properties.get("ActiveState", "unknown"),
        sub_state=properties.get("SubState", "unknown"),
        result=text("Result") or "success",
        main_pid=number("MainPID") or None,
        exit_status=number("ExecMainStatus") if exit_code else None,
        exit_code=exit_code,
        restarts=number("NRestarts"),
        invocation_id=text("InvocationID"),
        started_at=moment("ExecMainStartTimestamp"),
        active_since=moment("ActiveEnterTimestamp"),
        changed_at=moment("StateChangeTimestamp"),
        memory_bytes=number("MemoryCurrent"),
        tasks=number("TasksCurrent"),
        unit_file_state=text("UnitFileState"),
        need_daemon_reload=properties.get("NeedDaemonReload") == "yes",
        fragment_path=text("FragmentPath"),
        drop_in_paths=_paths(properties.get("DropInPaths", "")),
        control_group=text("ControlGroup"),
        status_text=text("StatusText"),
        restart_policy=text("Restart"),
        job=number("Job") or None,
        stop_timeout_s=parse_span(properties.get("TimeoutStopUSec", "")),
    )


def parse_timestamp(value: str) -> float | None:
    """Unix seconds of ``@1764460800`` or ``Sun 2025-11-30 00:00:00 UTC``; None when unset or neither."""
    if value.startswith("@"):
        whole, _, fraction = value[1:].partition(".")
        if whole.isascii() and whole.isdigit() and (not fraction or fraction.isdigit()):
            return float(value[1:]) or None
        return None
    if value in _UNSET or not value.endswith(" UTC"):
        return None
    from datetime import UTC, datetime

    try:
        moment = datetime.strptime(value[:-4].partition(" ")[2], "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC).timestamp()


def parse_span(value: str) -> float | None:
    """Seconds of ``1min 30s``; ``infinity`` is inf, a bare number is microseconds; None when unset."""
    if value in _UNSET:
        return None
    if value == "infinity":
        return float("inf")
    if value.isascii() and value.isdigit():
        return int(value) * 1e-6
    if not _SPAN.match(value):
        return None
    seconds = 0.0
    for amount, unit in _SPAN_PART.findall(value):
        if unit not in _SPAN_SECONDS:
            return None
        seconds += float(amount) * _SPAN_SECONDS[unit]
    return seconds


def _paths(value: str) -> tuple[str, ...]:
    """Paths as systemctl lists them; it quotes one that has a space."""
    try:
        return tuple(shlex.split(value))
    except ValueError:
        return tuple(value.split())
