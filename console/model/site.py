"""The site: which host, cards, guests and service this console looks after."""

from __future__ import annotations

from typing import Literal

import msgspec

SITE_SCHEMA = 1


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
    read_only: bool = False
    theme: str | None = None
    keys: dict[str, str] = msgspec.field(default_factory=dict)
    simulated: Simulated | None = None
