"""Units as systemd knows them on one machine, and ``systemctl show``'s text of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

#: systemd's "no value" for sizes.
NOT_SET = "[not set]"


class Unit:
    """One unit's properties, by systemd's names. Times are Unix seconds, 0 for never."""

    def __init__(self, unit_id: str, description: str, **properties: str) -> None:
        self.id = unit_id
        self.description = description
        self.load_state = "loaded"
        self.active_state = "inactive"
        self.sub_state = "dead"
        self.result = "success"
        self.main_pid = 0
        self.exec_pid = 0
        self.exit_code = 0  # waitid's CLD_*: 1 exited, 2 killed
        self.exit_status = 0
        self.restarts = 0
        self.invocation = ""
        self.started_at = 0.0
        self.exited_at = 0.0
        self.active_since = 0.0
        self.inactive_since = 0.0
        self.changed_at = 0.0
        self.memory_bytes: int | None = None
        self.tasks: int | None = None
        self.cpu_s: float | None = None
        self.job = 0
        self.need_daemon_reload = False
        self.properties = properties

    def state(self, active: str, sub: str, at: float) -> None:
        """Change state at a time."""
        if active == "active" and self.active_state != "active":
            self.active_since = at
        if active in ("inactive", "failed") and self.active_state not in ("inactive", "failed"):
            self.inactive_since = at
        self.active_state, self.sub_state, self.changed_at = active, sub, at


class Manager:
    """The units of one machine. ``running`` brings a unit's moving numbers up to date before it is shown."""

    def __init__(self, units: Iterable[Unit], refresh: Callable[[Unit], None] = lambda unit: None) -> None:
        self.units = {unit.id: unit for unit in units}
        self._refresh = refresh

    def get(self, name: str) -> Unit | None:
        return self.units.get(name if "." in name else f"{name}.service")

    def show(self, names: Iterable[str], wanted: frozenset[str] | None, unix_times: bool) -> str:
        """``systemctl show``: blocks with a blank line between, properties in systemd's own order."""
        blocks = []
        for name in names:
            unit = self.get(name)
            if unit is None:
                unit = Unit(name, name)
                unit.load_state = "not-found"
            else:
                self._refresh(unit)
            properties = _properties(unit, unix_times)
            lines = [f"{key}={value}" for key, value in properties.items() if wanted is None or key in wanted]
            blocks.append("".join(f"{line}\n" for line in lines))
        return "\n".join(blocks)


def _properties(unit: Unit, unix_times: bool) -> Mapping[str, str]:
    def moment(at: float) -> str:
        return timestamp(at, unix_times)

    not_found = unit.load_state == "not-found"
    extra = unit.properties
    return {
        "Type": extra.get("Type", "exec"),
        "ExitType": "main",
        "Restart": extra.get("Restart", "no"),
        "NotifyAccess": "none",
        "RestartUSec": extra.get("RestartUSec", "100ms"),
        "TimeoutStartUSec": extra.get("TimeoutStartUSec", "1min 30s"),
        "TimeoutStopUSec": extra.get("TimeoutStopUSec", "1min 30s"),
        "MainPID": str(unit.main_pid),
        "ControlPID": "0",
        "StatusText": "",
        "Result": unit.result,
        "NRestarts": str(unit.restarts),
        "ExecMainStartTimestamp": moment(unit.started_at),
        "ExecMainExitTimestamp": moment(unit.exited_at),
        "ExecMainPID": str(unit.exec_pid),
        "ExecMainCode": str(unit.exit_code),
        "ExecMainStatus": str(unit.exit_status),
        **({"ExecStart": extra["ExecStart"]} if "ExecStart" in extra else {}),
        "Slice": "system.slice",
        "ControlGroup": f"/system.slice/{unit.id}" if unit.active_state in ("active", "deactivating") else "",
        "MemoryCurrent": NOT_SET if unit.memory_bytes is None else str(unit.memory_bytes),
        "MemoryMax": "infinity",
        "CPUUsageNSec": NOT_SET if unit.cpu_s is None else str(int(unit.cpu_s * 1e9)),
        "TasksCurrent": NOT_SET if unit.tasks is None else str(unit.tasks),
        **({"Environment": extra["Environment"]} if "Environment" in extra else {}),
        **({"WorkingDirectory": extra["WorkingDirectory"]} if "WorkingDirectory" in extra else {}),
        "Id": unit.id,
        "Names": unit.id,
        "Description": unit.description,
        "LoadState": unit.load_state,
        "ActiveState": unit.active_state,
        "FreezerState": "running",
        "SubState": unit.sub_state,
        **(
            {}
            if not_found
            else {
                "FragmentPath": extra.get("FragmentPath", f"/lib/systemd/system/{unit.id}"),
                "DropInPaths": extra.get("DropInPaths", ""),
                "UnitFileState": extra.get("UnitFileState", "enabled"),
                "UnitFilePreset": "enabled",
            }
        ),
        "StateChangeTimestamp": moment(unit.changed_at),
        "InactiveExitTimestamp": moment(unit.active_since),
        "ActiveEnterTimestamp": moment(unit.active_since),
        "ActiveExitTimestamp": moment(unit.inactive_since),
        "InactiveEnterTimestamp": moment(unit.inactive_since),
        "CanStart": "no" if not_found else "yes",
        "CanStop": "yes",
        **({"Job": str(unit.job)} if unit.job else {}),
        "NeedDaemonReload": "yes" if unit.need_daemon_reload else "no",
        "StartLimitIntervalUSec": extra.get("StartLimitIntervalUSec", "10s"),
        "StartLimitBurst": extra.get("StartLimitBurst", "5"),
        **({"InvocationID": unit.invocation} if unit.invocation else {}),
    }


def timestamp(at: float, unix: bool) -> str:
    """``@1795996714`` or ``Mon 2026-11-30 04:18:34 UTC``; nothing for never."""
    if not at:
        return "" if not unix else "@0"
    if unix:
        return f"@{int(at)}"
    return time.strftime("%a %Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def span(seconds: float) -> str:
    """``1min 30s`` as systemd writes it; fractions of a second in ms."""
    if seconds < 1:
        return f"{max(1, round(seconds * 1000))}ms"
    whole = round(seconds)
    parts = ((whole // 3600, "h"), (whole % 3600 // 60, "min"), (whole % 60, "s"))
    return " ".join(f"{value}{name}" for value, name in parts if value)
