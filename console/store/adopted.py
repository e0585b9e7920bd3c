"""Which units gpuops may overwrite: its own, and those an operator gave it, exactly as they were then."""

from __future__ import annotations

import hashlib
import os
from typing import Literal

import msgspec

from console.model.managed_unit import MARKER, parse
from console.store.state import State, StateProblem

ADOPTED_SCHEMA = 1

#: ``managed``: as gpuops wrote it. ``managed-edited``: changed by hand since. ``adopted``: not of gpuops,
#: but given to it with this very text. ``foreign``: never to be overwritten.
Ownership = Literal["managed", "managed-edited", "adopted", "foreign", "missing"]


class Adopted(msgspec.Struct, frozen=True):
    """One unit as it was when it was adopted."""

    profile: str
    sha256: str
    at: float  # Unix seconds


class _File(msgspec.Struct, frozen=True):
    schema: int = ADOPTED_SCHEMA
    units: dict[str, Adopted] = msgspec.field(default_factory=dict)


def ownership(text: str | None, state: State, unit: str) -> Ownership:
    """Whose a unit's text is. StateProblem when what was adopted cannot be read."""
    if text is None:
        return "missing"
    record = adopted(state).get(unit)
    if record is not None and record.sha256 == _digest(text):
        return "adopted"
    if not text.startswith(MARKER):
        return "foreign"
    return "managed-edited" if parse(text).edited else "managed"


def adopted(state: State) -> dict[str, Adopted]:
    """The adopted units by name; empty when there is none. StateProblem when the file cannot be used."""
    path = state.directory / "adopted.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return {}
    except OSError as problem:
        raise StateProblem(f"{path}: {problem.strerror}") from None
    except msgspec.DecodeError as problem:
        raise StateProblem(f"{path}: {problem}; remove the file and adopt the unit again") from None
    if found.schema != ADOPTED_SCHEMA:
        raise StateProblem(f"{path}: written by another version of gpuops (schema {found.schema})")
    return found.units


def adopt(state: State, unit: str, text: str, profile: str, at: float) -> None:
    """Note that ``unit`` with exactly this text may be overwritten. StateProblem when it cannot be noted."""
    state.create()
    units = {**adopted(state), unit: Adopted(profile, _digest(text), at)}
    path = state.directory / "adopted.json"
    unfinished = path.with_name("adopted.json.new")
    try:
        with unfinished.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_File(units=units)), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as problem:
        raise StateProblem(f"{path}: {problem.strerror}") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
