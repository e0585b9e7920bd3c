"""The files of the service's unit where it runs: their text as it is, and where a new one goes."""

from __future__ import annotations

import msgspec

from console.model.managed_unit import UnitText, parse
from console.model.text import clean
from console.sources.source import Unavailable
from console.sources.unit import SystemctlShow
from console.transport.files import FileProblem, read_text
from console.transport.runner import Runner

#: Where the administrator's units are (systemd.unit(5)); they win over those of packages.
UNITS = "/etc/systemd/system"

#: Seconds for one systemctl show.
DEADLINE = 10.0


class UnitFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one unit. ``text`` None: there is no such unit, and ``fragment`` is None with it.

    ``drop_ins`` are paths with their texts, in the order in which they apply.
    """

    unit: str
    fragment: str | None = None
    text: str | None = None
    drop_ins: tuple[tuple[str, str], ...] = ()
    load_state: str = "not-found"
    unit_file_state: str | None = None  # enabled, disabled, …
    need_daemon_reload: bool = False
    stop_timeout_s: float | None = None  # as systemd has it now

    @property
    def path(self) -> str:
        """Where the unit that gpuops writes goes."""
        return f"{UNITS}/{self.unit}"

    @property
    def before(self) -> str | None:
        """What is at ``path`` now; None also when the unit's text is a package's, elsewhere."""
        return self.text if self.fragment == self.path else None

    @property
    def python(self) -> str | None:
        """The interpreter of the present command; None when it names none."""
        return self.own.python or self.effective.python

    @property
    def own(self) -> UnitText:
        """The unit file alone: what a new one keeps settings of."""
        return parse(self.text or "")

    @property
    def effective(self) -> UnitText:
        """The unit file with its drop-ins: what systemd runs after a daemon-reload."""
        return parse(self.text or "", [text for _, text in self.drop_ins])


async def read_unit_files(runner: Runner, unit: str) -> UnitFiles:
    """The unit's files, read now. Raises Unavailable when systemd or a file cannot be read."""
    (status,) = await SystemctlShow(runner)([unit], deadline=DEADLINE)
    try:
        text = await read_text(runner, status.fragment_path) if status.fragment_path else None
        if text is None:
            # systemd knows a unit only after a daemon-reload; the file may be there already.
            path = f"{UNITS}/{unit}"
            text = await read_text(runner, path)
            fragment = path if text is not None else None
        else:
            fragment = status.fragment_path
        drop_ins = [(path, await read_text(runner, path)) for path in status.drop_in_paths]
    except FileProblem as problem:
        raise Unavailable(clean(str(problem))) from None
    return UnitFiles(
        unit=unit,
        fragment=fragment,
        text=text,
        drop_ins=tuple((path, found) for path, found in drop_ins if found is not None),
        load_state=status.load_state,
        unit_file_state=status.unit_file_state,
        need_daemon_reload=status.need_daemon_reload,
        stop_timeout_s=status.stop_timeout_s,
    )
