"""Where in its file each flag and variable of a profile stands."""

from __future__ import annotations

from pathlib import Path

from console.sources.files.content import read_bytes
from console.sources.files.document import read_document
from console.sources.files.nodes import Entry, Mapping
from console.sources.files.problems import FileError, Problems, shown

#: ``path:line:column`` by section and key; a section alone by "" .
Places = dict[tuple[str, str], str]

_SECTIONS = ("args", "env")


def places_of(path: str | Path | None) -> Places:
    """The places in a profile's file; none when there is no file, or it can no longer be read."""
    if path is None:
        return {}
    problems = Problems(path)
    try:
        root = read_document(read_bytes(Path(path)), problems)
    except FileError:
        return {}
    found: Places = {}

    def note(section: str, key: str, entry: Entry) -> None:
        found[section, key] = f"{shown(str(path), 4096)}:{entry.key.line}:{entry.key.column}"

    for section, entry in root.entries.items():
        note(section, "", entry)
        if section in _SECTIONS and isinstance(entry.value, Mapping):
            for key, below in entry.value.entries.items():
                note(section, key, below)
    return found
