"""The site: which host, cards, guests and service this console looks after."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

import msgspec

SITE_SCHEMA = 1

_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
#: As nvidia-smi and lspci write it: eight digits of domain, or none, and capitals.
_LOOSE_ADDRESS = re.compile(r"((0000)?[0-9a-f]{4}:)?[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", re.IGNORECASE)
_UNIT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9:_.\\@-]{0,246}\.service")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_THEME = re.compile(r"[a-z][a-z0-9-]{0,63}")
_ACTION = re.compile(r"[a-z][a-z0-9._-]{0,63}")
_KEYS = re.compile(r"[^\s,]+(,[^\s,]+)*")

#: Proxmox numbers its guests from 100; those below are reserved.
GUEST_ID_MIN = 100
GUEST_ID_MAX = 999_999_999


class Container(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the service runs. ``none``: on this host itself."""

    kind: Literal["lxc", "none"] = "none"
    id: int | None = None


class Vm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The guest that sometimes takes the cards."""

    id: int


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's unit and address. The key itself never stands in this file."""

    unit: str = "sglang.service"
    url: str = "http://127.0.0.1:30000"
    api_key_file: str | None = None


class SwitchTo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one profile is switched to. Without ``confirm`` its key alone does it."""

    confirm: bool = True


class Simulated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The embedded box that stands in for this host, and where it listens.

    ``nvml: library`` reads cards through the installed libnvidia-ml instead of the box.
    """

    directory: str
    nvml: Literal["simulated", "library"] = "simulated"


class Site(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole site file. Every key has a default but ``schema``."""

    schema: Literal[1] = 1
    host: str | None = None
    gpus: Literal["auto"] | tuple[str, ...] = "auto"
    container: Container = Container()
    vm: Vm | None = None
    service: Service = Service()
    profiles: str | None = None
    state: str | None = None
    switch: dict[str, SwitchTo] = msgspec.field(default_factory=dict)
    read_only: bool = False
    theme: str | None = None
    keys: dict[str, str] = msgspec.field(default_factory=dict)
    simulated: Simulated | None = None


# Rules: each says in words what was expected, or None when the text will do.


def address_rule(text: str) -> str | None:
    if _ADDRESS.fullmatch(text):
        return None
    if _LOOSE_ADDRESS.fullmatch(text):
        address = ("0000:" + text.lower())[-len("0000:41:00.0") :]
        return f"a PCI address as the kernel writes it: {address}"
    return "a PCI address as the kernel writes it, such as 0000:41:00.0"


def unit_rule(text: str) -> str | None:
    """The characters systemd.unit(5) allows; a leading ``-`` or ``.`` is refused."""
    return None if _UNIT.fullmatch(text) else "the name of a systemd service such as sglang.service"


def url_rule(text: str) -> str | None:
    """Scheme, host, optional port and path prefix; no user, query or fragment."""
    wanted = "an address such as http://127.0.0.1:30000"
    if not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        return wanted
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return wanted
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return wanted
    if "@" in parts.netloc:
        return "an address without a user or password; the key goes in a file named by api_key_file"
    if "?" in text or "#" in text:
        return "an address without '?' or '#', such as http://127.0.0.1:30000"
    return None


def host_rule(text: str) -> str | None:
    return None if _HOST.fullmatch(text) else "a host name such as pve1"


def path_rule(text: str) -> str | None:
    return None if text.startswith("/") else "a path that begins with /"


def theme_rule(text: str) -> str | None:
    """The shape only: which themes there are is the screen's to know."""
    return None if _THEME.fullmatch(text) else "the name of a theme such as textual-dark"


def action_rule(text: str) -> str | None:
    return None if _ACTION.fullmatch(text) else "the id of an action"


def keys_rule(text: str) -> str | None:
    return None if _KEYS.fullmatch(text) else "a key, or several with commas between, such as ctrl+r,f5"
