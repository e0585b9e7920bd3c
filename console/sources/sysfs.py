"""Small reads from /sys and /proc: a file that is not there, or that refuses, is None."""

from __future__ import annotations

from pathlib import Path

from console.model.text import clean

LIMIT = 4096


def text_of(path: Path, limit: int = LIMIT) -> str | None:
    """One value, safe to print."""
    content = content_of(path, limit)
    return None if content is None else clean(content.strip())


def content_of(path: Path, limit: int = LIMIT) -> str | None:
    """The file's lines as they are, up to ``limit`` bytes."""
    try:
        with path.open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def number_of(path: Path, base: int = 10) -> int | None:
    text = text_of(path)
    try:
        return None if text is None else int(text, base)
    except ValueError:
        return None


def flag_of(path: Path) -> bool | None:
    """``1``, ``Y``: True; ``0``, ``N``: False."""
    return {"1": True, "Y": True, "0": False, "N": False}.get(text_of(path) or "")


def link_name(path: Path) -> str | None:
    """The last part of what a link points to."""
    try:
        return clean(path.readlink().name)
    except OSError:
        return None


def names_in(folder: Path) -> tuple[str, ...]:
    """Sorted; none when the folder is not there."""
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()
