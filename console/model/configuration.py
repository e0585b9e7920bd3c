"""The effective configuration of a service beside its profile and its benchmark, item by item. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from console.model.command_line import CommandLine, hidden, same_value, shown
from console.model.engine_facts import Allowance, allowance, read_by_engine
from console.model.profile import FlagValue, Profile
from console.model.unit import UnitStatus

Kind = Literal["flag", "variable"]

#: ``unknown``: the place where it would be seen could not be read.
Sameness = Literal["same", "missing", "different", "added", "unknown"]

#: How an operator wants to read them: what is wrong first.
ORDER: tuple[Sameness, ...] = ("missing", "different", "unknown", "added", "same")

_ADDRESS = ("host", "port")

BY_PROCESS = "command line of the process"
BY_ENVIRONMENT = "environment of the process"


class Place(msgspec.Struct, frozen=True):
    """A value and where it is set."""

    where: str
    value: str


class File(msgspec.Struct, frozen=True):
    """A file that makes the configuration, and when it was last written (Unix seconds; None: unknown)."""

    path: str
    modified_at: float | None = None


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """What the service's own Python sees once it has started.

    ``environment`` is what ``os.environ`` holds after sitecustomize; ``own`` what it holds when the
    engine's variables are not given to it: what sitecustomize sets by itself. ``loaded`` are the paths of
    sitecustomize and usercustomize, as far as there are any.
    """

    environment: dict[str, str]
    own: dict[str, str]
    loaded: dict[str, str] = msgspec.field(default_factory=dict)
    version: str = ""


class Effective(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was read of one service. Keys and passwords are hidden already.

    ``basis`` says what the flags are from: the running process, or, while there is none, what its unit
    would start. ``environment`` is the initial one of the process; None with a word in ``problems`` when
    it could not be read. ``problems`` are by part: unit, files, process, environment, python, engine,
    config.
    """

    basis: Literal["process", "unit", "none"]
    unit: UnitStatus | None = None
    command: CommandLine = CommandLine()
    command_where: str = BY_PROCESS
    next_command: CommandLine | None = None  # what the unit's files would start now
    next_where: str | None = None
    pid: int | None = None  # as this host counts
    config_file: str | None = None  # of --config, and its flags below those of the command line
    config_flags: dict[str, FlagValue] = msgspec.field(default_factory=dict)
    environment: dict[str, str] | None = None
    set_by_unit: dict[str, tuple[Place, ...]] = msgspec.field(default_factory=dict)
    python: Interpreter | None = None
    files: tuple[File, ...] = ()
    engine: dict[str, Any] | None = None  # /server_info
    engine_version: str | None = None
    problems: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def flags(self) -> dict[str, FlagValue]:
        """Every flag that counts: the command line's over the configuration file's."""
        return {**self.config_flags, **self.command.flags}

    def flag_where(self, name: str) -> str:
        if name in self.command.flags or self.config_file is None:
            return self.command_where
        return self.config_file

    @property
    def variables(self) -> dict[str, str] | None:
        """What the engine's Python sees; without an answer of it, only what the process was given."""
        if self.python is not None:
            return self.python.environment
        return None

    def places(self, name: str) -> tuple[Place, ...]:
        """Where a variable is set, the one that counts last. Empty: nowhere that was read."""
        found = list(self.set_by_unit.get(name, ()))
        given = None if self.environment is None else self.environment.get(name)
        if given is not None and (not found or found[-1].value != given):
            found.append(Place(BY_ENVIRONMENT, given))
        if self.python is None:
            return tuple(found)
        final, own = self.python.environment.get(name), self.python.own.get(name)
        mine = self.python.loaded.get("sitecustomize") or self.python.loaded.get("usercustomize")
        place = mine or "start-up files of the service's Python"
        if final is not None and final != given:
            found.append(Place(place, final))
        elif own is not None and own != final:
            found.insert(0, Place(place, own))  # a setdefault that came too late
        elif own is not None and not found:
            found.append(Place(place, own))
        return tuple(found)


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One flag or variable. Values are texts to show; None: not there (or, effective, not known).

    ``verdict`` is against the benchmark where that has it, else against the profile. ``allowed``
    says why it may be there or differ; None when nobody has said. ``effect`` is what the difference does.
    """

    kind: Kind
    name: str
    profile: str | None
    reference: str | None
    effective: str | None
    verdict: Sameness
    allowed: str | None = None
    where: str | None = None
    effect: str | None = None
    as_profile: bool = True  # the profile says the same

    @property
    def label(self) -> str:
        return f"--{self.name}" if self.kind == "flag" else self.name


def compare(effective: Effective, profile: Profile) -> tuple[Item, ...]:
    """Every flag and variable that the benchmark, the profile or the service has; what is wrong first."""
    items = [
        *_compared(
            "flag",
            effective.flags,
            profile.args,
            None if profile.reference is None else profile.reference.args,
            effective,
        ),
        *_compared(
            "variable",
            _seen_variables(effective, profile),
            profile.env,
            None if profile.reference is None else profile.reference.env,
            effective,
        ),
    ]
    return tuple(sorted(items, key=_rank))


def _rank(item: Item) -> tuple[int, bool]:
    return ORDER.index(item.verdict), item.allowed is not None


def _seen_variables(effective: Effective, profile: Profile) -> dict[str, str]:
    """The engine's variables that are in force, as far as they are known."""
    seen = effective.variables if effective.variables is not None else effective.environment or {}
    asked = {*profile.env, *(profile.reference.env if profile.reference is not None else ())}
    return {name: value for name, value in sorted(seen.items()) if name in asked or read_by_engine(name)}


def _compared(
    kind: Kind,
    seen: Mapping[str, FlagValue],
    profile: Mapping[str, FlagValue],
    reference: Mapping[str, FlagValue] | None,
    effective: Effective,
) -> list[Item]:
    names = dict.fromkeys((*(reference or ()), *profile, *seen))
    return [_item(kind, name, seen, profile, reference, effective) for name in names]


def _item(
    kind: Kind,
    name: str,
    seen: Mapping[str, FlagValue],
    profile: Mapping[str, FlagValue],
    reference: Mapping[str, FlagValue] | None,
    effective: Effective,
) -> Item:
    value = seen.get(name)
    wanted = profile.get(name)
    benchmark = None if reference is None else reference.get(name)
    expected = benchmark if benchmark is not None else wanted
    beyond = benchmark is None and (reference is not None or wanted is None)
    may: Allowance | None = allowance(kind, name)
    verdict: Sameness
    if value is None and _hidden_from_us(kind, effective):
        verdict = "unknown"
    elif value is None:
        verdict = "missing"
    elif expected is None or (beyond and same_value(kind, name, value, expected)):
        verdict = "added"
    elif same_value(kind, name, value, expected):
        verdict = "same"
    else:
        verdict = "different"
    agrees = (wanted is None and value is None) or (
        wanted is not None and value is not None and same_value(kind, name, value, wanted)
    )
    # What changes no numbers may differ from a benchmark, which measured nothing else; from the profile
    # only the address may: another parser than it names breaks answers.
    free = verdict == "added" or (verdict == "different" and (benchmark is not None or name in _ADDRESS))
    tolerated = free and may is not None and may.allowed
    return Item(
        kind=kind,
        name=name,
        profile=shown(None if wanted is None else hidden(name, wanted)),
        reference=shown(None if benchmark is None else hidden(name, benchmark)),
        effective=shown(value),
        verdict=verdict,
        allowed=may.why if tolerated and may is not None else None,
        where=None if value is None else _where(kind, name, effective),
        effect=may.effect if may is not None and verdict != "same" else None,
        as_profile=agrees or (kind == "variable" and wanted is None),
    )


def _hidden_from_us(kind: Kind, effective: Effective) -> bool:
    """Whether what is not seen may be there all the same."""
    if kind == "flag":
        return effective.basis == "none" or "config" in effective.problems
    return effective.variables is None


def _where(kind: Kind, name: str, effective: Effective) -> str | None:
    if kind == "flag":
        return effective.flag_where(name)
    places = effective.places(name)
    return places[-1].where if places else None
