"""How a command speaks to whoever reads it: JSON, lines with or without colour, warnings on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from console.model.report import Line

_COLOURS: dict[str, dict[str, Any]] = {
    "good": {"fg": "green", "bold": True},
    "warn": {"fg": "yellow"},
    "bad": {"fg": "red", "bold": True},
    "dim": {"dim": True},
}


def print_json(document: Any) -> None:
    """One document on one line."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    sys.stdout.flush()


def print_lines(lines: tuple[Line, ...]) -> None:
    """Coloured only for a terminal, and never where NO_COLOR is set (no-color.org)."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for line in lines:
        text = safe(line.text)
        if coloured and text and line.tone in _COLOURS:
            text = click.style(text, **_COLOURS[line.tone])
        sys.stdout.write(text + "\n")
    sys.stdout.flush()


def warn(message: str) -> None:
    click.echo(f"gpuops: {safe(message)}", err=True)


def safe(text: str) -> str:
    """``console.model.text.clean``, imported when there is something to clean."""
    from console.model.text import clean

    return clean(text)


def forgive_characters() -> None:
    """What the terminal's character set lacks is printed as ``?`` instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it is gone, or its disk is full: nobody is left to be told.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
