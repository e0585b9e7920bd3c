"""The themes: dark, light, high contrast, and the terminal's own sixteen colours."""

from __future__ import annotations

from collections.abc import Mapping

from textual.theme import Theme

DARK = Theme(
    name="dark",
    primary="#7aa2f7",
    secondary="#2ac3de",
    accent="#7dcfff",
    success="#9ece6a",
    warning="#e0af68",
    error="#f7768e",
    foreground="#c8d0e0",
    background="#10131a",
    surface="#10131a",
    panel="#1b2030",
    dark=True,
    variables={"quiet": "#77819a", "faint": "#343b4f", "on-block": "#10131a"},
)

LIGHT = Theme(
    name="light",
    primary="#1d4ed8",
    secondary="#0e7490",
    accent="#0f5fa8",
    success="#256d1b",
    warning="#8f5600",
    error="#b3162b",
    foreground="#1c2330",
    background="#fbfbf8",
    surface="#fbfbf8",
    panel="#eceef2",
    dark=False,
    variables={"quiet": "#5c6675", "faint": "#c9ced8", "on-block": "#ffffff"},
)

HIGH_CONTRAST = Theme(
    name="high-contrast",
    primary="#ffffff",
    secondary="#00ffff",
    accent="#00ffff",
    success="#00ff00",
    warning="#ffff00",
    error="#ff6060",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#202020",
    dark=True,
    variables={"quiet": "#d0d0d0", "faint": "#808080", "on-block": "#000000"},
)

#: Uses the palette of the operator's own terminal, so it fits light and dark alike.
ANSI = Theme(
    name="ansi",
    primary="ansi_blue",
    secondary="ansi_cyan",
    accent="ansi_cyan",
    success="ansi_green",
    warning="ansi_yellow",
    error="ansi_red",
    foreground="ansi_default",
    background="ansi_default",
    surface="ansi_default",
    panel="ansi_default",
    boost="ansi_default",
    dark=True,
    ansi=True,
    variables={"quiet": "ansi_default", "faint": "ansi_default", "on-block": "ansi_black"},
)

THEMES = (DARK, LIGHT, HIGH_CONTRAST, ANSI)


def choose(wanted: str | None, environ: Mapping[str, str]) -> str:
    """The site file's theme; without one, what the terminal can show.

    NO_COLOR (no-color.org) means the terminal's own colours, from which Textual
    then takes the colour away.
    """
    if environ.get("NO_COLOR"):
        return ANSI.name
    if wanted in {theme.name for theme in THEMES}:
        return str(wanted)
    rich_colour = environ.get("COLORTERM", "") in ("truecolor", "24bit") or "256" in environ.get("TERM", "")
    return DARK.name if rich_colour else ANSI.name
