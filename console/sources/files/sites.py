"""The site file: where it is, what it says, and a first one to write."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from console.model import site as rules
from console.model.profile import name_rule
from console.model.site import SITE_SCHEMA, Container, Service, Simulated, Site, SwitchTo, Vm
from console.sources.files.content import read_bytes
from console.sources.files.document import read_document
from console.sources.files.nodes import Node, Scalar, Sequence
from console.sources.files.problems import Problems
from console.sources.files.schema import check_schema
from console.sources.files.table import Table, nearest, one_line

SYSTEM_SITE = Path("/etc/gpuops/site.yaml")


def site_candidates(environ: Mapping[str, str], system: Path = SYSTEM_SITE) -> tuple[Path, ...]:
    """Where a site file is looked for, in order. A relative XDG_CONFIG_HOME is not used, as XDG demands."""
    configured = environ.get("XDG_CONFIG_HOME", "")
    home = environ.get("HOME", "")
    if configured.startswith("/"):
        return Path(configured, "gpuops", "site.yaml"), system
    if home.startswith("/"):
        return Path(home, ".config", "gpuops", "site.yaml"), system
    return (system,)


def find_site(explicit: Path | None, environ: Mapping[str, str], system: Path = SYSTEM_SITE) -> Path | None:
    """The site file to load: the explicit one, there or not, or the first that there is; else None."""
    if explicit is not None:
        return explicit
    # A dangling link counts as there: loading it says what is wrong, skipping it would not.
    return next((path for path in site_candidates(environ, system) if os.path.lexists(path)), None)


def load_site(path: Path, actions: Collection[str] = ()) -> Site:
    """The site a file describes. Raises FileError with every problem in it."""
    return parse_site(read_bytes(path), path, actions)


def parse_site(content: str | bytes, path: Path | str, actions: Collection[str] = ()) -> Site:
    """The site a text describes; ``path`` is its name in messages. Raises FileError.

    With ``actions``, the ids that ``keys`` may remap, an unknown id is a problem too.
    """
    problems = Problems(path)
    root = Table(read_document(content, problems), problems)
    check_schema(root, SITE_SCHEMA)
    root.only(*Site.__struct_fields__)
    container = _container(root)
    vm = _vm(root, container)
    site = Site(
        host=root.optional_text("host", rules.host_rule),
        gpus=_gpus(root),
        container=container,
        vm=vm,
        service=_service(root),
        profiles=root.optional_text("profiles", rules.path_rule),
        state=root.optional_text("state", rules.path_rule),
        switch=_switch(root),
        read_only=root.flag("read_only") or False,
        theme=root.optional_text("theme", rules.theme_rule),
        keys=_keys(root, actions),
        simulated=_simulated(root),
    )
    problems.raise_if_any()
    return site


def _gpus(root: Table) -> Literal["auto"] | tuple[str, ...]:
    node = root.node("gpus")
    if node is None or (isinstance(node, Scalar) and node.text == "auto"):
        return "auto"
    if not isinstance(node, Sequence) or not node.items:
        root.expected("gpus", node, "auto or a list of at least one PCI address")
        return "auto"
    addresses: list[str] = []
    for item in node.items:
        address = root.text_of("gpus", item, rules.address_rule)
        if address in addresses:
            root.add(item, f"gpus: {address} stands in the list already; remove one")
        elif address is not None:
            addresses.append(address)
    return tuple(addresses)


def _container(root: Table) -> Container:
    table = root.table("container", *Container.__struct_fields__)
    if table is None:
        return Container()
    kind = table.choice("kind", ("lxc", "none"))
    number = _guest_id(table)
    if kind == "lxc":
        table.require("id")
        return Container("lxc", number)
    if kind == "none" and number is not None:
        table.tell("id", table.node("id"), "expected no id with kind: none, found one; remove it, or say lxc")
    elif kind is None:
        table.require("kind")
    return Container()


def _vm(root: Table, container: Container) -> Vm | None:
    table = root.table("vm", *Vm.__struct_fields__)
    if table is None:
        return None
    table.require("id")
    number = _guest_id(table)
    if number is None:
        return None
    if number == container.id:
        table.tell("id", table.node("id"), f"expected an id of its own, found the container's, {number}")
    return Vm(number)


def _guest_id(table: Table) -> int | None:
    return table.whole("id", rules.GUEST_ID_MIN, rules.GUEST_ID_MAX)


def _service(root: Table) -> Service:
    default = Service()
    table = root.table("service", *Service.__struct_fields__)
    if table is None:
        return default
    url = table.text("url", rules.url_rule) or default.url
    return Service(
        unit=table.text("unit", rules.unit_rule) or default.unit,
        url=url.rstrip("/"),
        api_key_file=_key_file(table),
    )


def _key_file(table: Table) -> str | None:
    """Never quoted in a message: it may be the key itself, put there by mistake."""
    node = table.node("api_key_file")
    if node is None or (isinstance(node, Scalar) and node.null):
        return None
    if isinstance(node, Scalar) and one_line(node.text) is None and rules.path_rule(node.text) is None:
        return node.text
    table.tell("api_key_file", node, "expected the path of a file that holds the key, beginning with /")
    return None


def _keys(root: Table, actions: Collection[str]) -> dict[str, str]:
    table = root.table("keys")
    if table is None:
        return {}
    table.check_keys(rules.action_rule)
    taken: dict[str, str] = {}

    def read(table: Table, action: str, node: Node) -> str | None:
        if actions and action not in actions:
            entry = table.mapping.entries[action]
            table.add(entry.key, f"unknown action {table.name(action)}; {nearest(action, actions)}")
        keys = table.text_of(action, node, rules.keys_rule)
        for key in keys.split(",") if keys else ():
            if taken.setdefault(key, action) != action:
                table.tell(action, node, f"{key} is the key of {taken[key]} already; choose another")
        return keys

    return table.gather(read)


def _switch(root: Table) -> dict[str, SwitchTo]:
    table = root.table("switch")
    if table is None:
        return {}
    table.check_keys(name_rule)

    def read(table: Table, profile: str, node: Node) -> SwitchTo | None:
        options = table.table(profile, *SwitchTo.__struct_fields__)
        return None if options is None else SwitchTo(confirm=options.flag("confirm") is not False)

    return table.gather(read)


def _simulated(root: Table) -> Simulated | None:
    table = root.table("simulated", *Simulated.__struct_fields__)
    if table is None:
        return None
    table.require("directory")
    directory = table.text("directory", rules.path_rule)
    library = table.choice("nvml", ("simulated", "library")) == "library"
    return None if directory is None else Simulated(directory, "library" if library else "simulated")
