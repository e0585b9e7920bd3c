"""Which card the host's own console is drawn on."""

from __future__ import annotations

import re

from console.model.card import Address
from console.model.text import clean

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RANGE = re.compile(r"( *)[0-9a-f]+-[0-9a-f]+ : (.*)")

#: What the kernel calls memory in which firmware left a picture (drivers/firmware/sysfb*.c,
#: drivers/gpu/drm/sysfb, arch/x86 setup).
_FIRMWARE = ("BOOTFB", "simplefb", "simpledrm", "efifb", "vesafb", "efidrm", "vesadrm", "simple-framebuffer")


def framebuffer_names(text: str) -> dict[str, str]:
    """``/proc/fb``: by number, such as ``0``, the driver's name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isascii() and number.isdigit():
            found[number] = clean(name.strip())
    return found


def firmware_pictures(text: str) -> dict[Address, str]:
    """``/proc/iomem``: by the card inside whose memory it lies, what the firmware's picture is called.

    What lies inside a range is indented below it. Without root every address reads as
    zero, but the names are there.
    """
    found: dict[Address, str] = {}
    above: list[tuple[int, str]] = []  # indentation and name of the ranges that this line lies in
    for line in text.splitlines():
        parts = _RANGE.fullmatch(line)
        if parts is None:
            continue
        depth, name = len(parts[1]), parts[2].strip()
        while above and above[-1][0] >= depth:
            above.pop()
        if name.startswith(_FIRMWARE):
            owner = next((outer for _, outer in reversed(above) if _ADDRESS.fullmatch(outer)), None)
            if owner is not None:
                found[owner] = clean(name)
        above.append((depth, name))
    return found
