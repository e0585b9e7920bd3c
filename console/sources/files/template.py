"""A first site file, written from what was found on this host."""

from __future__ import annotations

import json
import re

from console.model.site import Container, Site, SwitchTo

#: Text that YAML takes as written wherever it stands.
_SAFE = re.compile(r"[A-Za-z/][A-Za-z0-9/._-]*")


def site_template(found: Site) -> str:
    """A commented site file that reads back as ``found``; what was not found stands there as an example."""
    parts = [
        "# The site file of gpuops: which host, cards, guests and service this console looks after.",
        "# Everything but schema may be left out. After a change: gpuops config validate",
        "schema: 1",
        "",
        "# How this host is called on the screen; without it, by its own host name.",
        _line("host", found.host, example="pve1"),
        "",
        "# auto: every NVIDIA card on the bus. Or a list of PCI addresses, as lspci -D shows them.",
        _gpus(found),
        "",
        "# Where the service runs. kind: none when it runs on this host itself.",
        _container(found.container),
        "",
        "# The guest that sometimes takes the cards.",
        "# vm: {id: 100}" if found.vm is None else f"vm: {{id: {found.vm.id}}}",
        "",
        "service:",
        f"  unit: {_scalar(found.service.unit)}",
        f"  url: {_scalar(found.service.url)}",
        "  # A file that holds the API key, when the service wants one. The key itself never stands here.",
        f"  api_key_file: {_scalar(found.service.api_key_file)}",
        "",
        "# A directory of your own profiles, beside the shipped ones.",
        _line("profiles", found.profiles, example="/etc/gpuops/profiles"),
        "",
        "# Where jobs, their audit trail and load times are kept.",
        _line("state", found.state, example="/var/lib/gpuops"),
        "",
        "# A profile whose key switches at once, without a y.",
        *_switch(found.switch),
        "",
        "# true: nothing that changes anything has a key. --read-only does the same for one session.",
        f"read_only: {'true' if found.read_only else 'false'}",
        "",
        "# The colours of the screen.",
        _line("theme", found.theme, example="textual-dark"),
        "",
        "# Other keys for actions, by the action's id as the help screen shows it.",
        *_keys(found.keys),
        *_simulated(found),
    ]
    return "\n".join(parts) + "\n"


def _line(key: str, value: str | None, example: str) -> str:
    return f"# {key}: {example}" if value is None else f"{key}: {_scalar(value)}"


def _gpus(found: Site) -> str:
    if found.gpus == "auto":
        return "gpus: auto"
    return "\n".join(["gpus:", *(f"  - {_scalar(address)}" for address in found.gpus)])


def _container(container: Container) -> str:
    if container.id is None:
        return f"container: {{kind: {container.kind}}}"
    return f"container: {{kind: {container.kind}, id: {container.id}}}"


def _keys(keys: dict[str, str]) -> list[str]:
    if not keys:
        return ["# keys:", "#   restart: ctrl+r"]
    return ["keys:", *(f"  {_scalar(action)}: {_scalar(key)}" for action, key in keys.items())]


def _switch(switch: dict[str, SwitchTo]) -> list[str]:
    if not switch:
        return ["# switch:", "#   kimi-k2.5-int4: {confirm: false}"]
    flags = ((profile, "true" if how.confirm else "false") for profile, how in switch.items())
    return ["switch:", *(f"  {_scalar(profile)}: {{confirm: {flag}}}" for profile, flag in flags)]


def _simulated(found: Site) -> list[str]:
    if found.simulated is None:
        return []
    return [
        "",
        "# The simulated box that stands in for this host.",
        "simulated:",
        f"  directory: {_scalar(found.simulated.directory)}",
        f"  nvml: {found.simulated.nvml}",
    ]


def _scalar(text: str | None) -> str:
    """A text as YAML: as it is where that is safe, else in double quotes; None as null."""
    if text is None:
        return "null"
    return text if _SAFE.fullmatch(text) and text != "null" else json.dumps(text, ensure_ascii=False)
