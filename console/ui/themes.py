"""The themes: dark, light, high contrast, and the terminal's own sixteen colours."""

from __future__ import annotations

from collections.abc import Mapping

from textual.theme import Theme

# Colours of the 256-colour palette, exactly: each then travels as 38;5;n, half the bytes of an RGB triple,
# and a terminal without true colour shows the same.

DARK = Theme(
    name="dark",
    primary="#87afff",
    secondary="#5fd7d7",
    accent="#87d7ff",
    success="#87d787",
    warning="#ffaf5f",
    error="#ff5f87",
    foreground="#d0d0d0",
    background="#121212",
    surface="#121212",
    panel="#262626",
    dark=True,
    variables={"quiet": "#8a8a8a", "faint": "#3a3a3a", "on-block": "#121212"},
)

LIGHT = Theme(
    name="light",
    primary="#005fd7",
    secondary="#008787",
    accent="#005faf",
    success="#005f00",
    warning="#875f00",
    error="#af0000",
    foreground="#1c1c1c",
    background="#ffffff",
    surface="#ffffff",
    panel="#e4e4e4",
    dark=False,
    variables={"quiet": "#626262", "faint": "#d0d0d0", "on-block": "#ffffff"},
)

HIGH_CONTRAST = Theme(
    name="high-contrast",
    primary="#ffffff",
    secondary="#00ffff",
    accent="#00ffff",
    success="#00ff00",
    warning="#ffff00",
    error="#ff5f5f",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#262626",
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
    variables={
        "quiet": "ansi_default",
        "faint": "ansi_default",
        "on-block": "ansi_black",
        # Textual's own widgets ask for these of a theme with ansi=True.
        "ansi-background": "ansi_default",
        "ansi-foreground": "ansi_default",
        "border-blurred": "ansi_default",
        "block-cursor-foreground": "ansi_black",
        "block-cursor-background": "ansi_cyan",
        "input-cursor-background": "ansi_default",
        "input-cursor-foreground": "ansi_default",
        "input-cursor-text-style": "reverse",
        "input-selection-background": "ansi_cyan",
        "input-selection-foreground": "ansi_black",
        "screen-selection-background": "ansi_cyan",
        "screen-selection-foreground": "ansi_black",
    },
)

THEMES = (DARK, LIGHT, HIGH_CONTRAST, ANSI)


def problems(wanted: str | None) -> list[str]:
    """What is wrong with the site file's theme, in words."""
    names = [theme.name for theme in THEMES]
    if wanted is None or wanted in names:
        return []
    return [f"theme: there is no theme {wanted}; there are {', '.join(names)}"]


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
