"""What one version of SGLang accepts, and the tables of the versions that are shipped.

A table is shipped as ``tables/VERSION.json.gz``, one a version, made from what the released package says
of itself; ``keep.py`` writes it there.
"""

from __future__ import annotations

import functools
import gzip
from pathlib import Path

import msgspec

from console.model.engine_facts import ALIASES

TABLES = Path(__file__).parent / "tables"


class Flag(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One option of the command line, as argparse has it.

    ``names`` are with their dashes. ``arity`` is ``0`` for a bare flag, ``1``, ``?``, ``*``, ``+`` or a
    number. ``type`` is none, text, int, float, count (``1k``, ``1Ki``), json, object (of JSON), or
    the name of a converter that is not judged. ``default`` is Python's repr of it. A ``deprecated`` flag
    still works; ``instead`` names the one that takes its place. A flag with ``refused`` ends the start with
    these words.
    """

    names: tuple[str, ...]
    dest: str
    arity: str = "1"
    type: str = "text"
    default: str = "None"
    choices: tuple[str, ...] | None = None
    deprecated: bool = False
    instead: str | None = None
    refused: str | None = None

    @property
    def name(self) -> str:
        """Its one name without dashes, the same in every version: tp-size, however it is called besides."""
        own = f"--{self.dest.replace('_', '-')}"
        chosen = own if own in self.names else next((n for n in self.names if n[:2] == "--"), self.names[0])
        bare = chosen.lstrip("-")
        other = ALIASES.get(bare, bare)
        return other if f"--{other}" in self.names else bare


class FlagTable(msgspec.Struct, frozen=True, dict=True):
    """Every flag of a version, the SGLANG_… variables its source names, and its speculative algorithms."""

    version: str
    flags: tuple[Flag, ...]
    variables: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()

    @functools.cached_property
    def by_name(self) -> dict[str, Flag]:
        """Flags by each of their names, without dashes."""
        return {name.lstrip("-"): flag for flag in self.flags for name in flag.names if name[:2] == "--"}

    def beginning(self, name: str) -> tuple[str, ...]:
        """The names that begin with this one, in the table's order: what argparse takes it for."""
        return tuple(known for known in self.by_name if known.startswith(name))

    def find(self, name: str) -> Flag | None:
        """The flag that argparse takes a name for: its own, or the only one that begins with it."""
        if name in self.by_name:
            return self.by_name[name]
        longer = self.beginning(name)
        return self.by_name[longer[0]] if len(longer) == 1 else None


def canonical(flag: str, table: FlagTable) -> str:
    """The one name of a flag, without dashes: aliases and abbreviations resolved as argparse would.

    A name that the version does not know, or that may mean several, stays as it is.
    """
    found = table.find(flag.lstrip("-"))
    return flag.lstrip("-") if found is None else found.name


def shipped_versions() -> tuple[str, ...]:
    """The versions whose tables are shipped, oldest first."""
    from packaging.version import Version

    found = (path.name.removesuffix(".json.gz") for path in TABLES.glob("*.json.gz"))
    return tuple(sorted(found, key=Version))


@functools.lru_cache(maxsize=16)
def shipped(version: str) -> FlagTable:
    """The shipped table of a version. KeyError when there is none."""
    try:
        content = (TABLES / f"{version}.json.gz").read_bytes()
    except FileNotFoundError:
        raise KeyError(version) from None
    return msgspec.json.decode(gzip.decompress(content), type=FlagTable)


def nearest_version(version: str | None, versions: str | None) -> str:
    """Which shipped table to use instead.

    For a known ``version`` the newest that is not newer than it, else the oldest. Without one the newest
    that fits the range ``versions``, else the newest of all.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    all_versions = shipped_versions()
    try:
        wanted = None if version is None else Version(version)
    except InvalidVersion:
        wanted = None
    if wanted is not None:
        return next((one for one in reversed(all_versions) if Version(one) <= wanted), all_versions[0])
    fits = SpecifierSet(versions or "")
    return next((one for one in reversed(all_versions) if one in fits), all_versions[-1])


class Past(msgspec.Struct, frozen=True):
    """When a flag that is not known now was: the first and the last shipped version that has it."""

    first: str
    last: str
    flag: Flag  # as the last had it


def past(name: str) -> Past | None:
    """Where else a name is known; None: in no shipped version."""
    known = [version for version in shipped_versions() if name in shipped(version).by_name]
    return Past(known[0], known[-1], shipped(known[-1]).by_name[name]) if known else None
