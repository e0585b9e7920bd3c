"""The sources of one site: where each of them looks, and through which runner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from console.model.site import Site
from console.sources.engine.client import EngineClient
from console.sources.engine.sources import (
    HealthSource,
    IdentitySource,
    ModelsSource,
    RatesSource,
    ReadySource,
)
from console.sources.journal import JournalSource
from console.sources.nvml import NvmlSource
from console.sources.pci import PciSource
from console.sources.unit import UnitSource
from console.transport.box import BoxRunner
from console.transport.container import lxc
from console.transport.local import LocalRunner
from console.transport.runner import Runner


@dataclass(frozen=True)
class Sources:
    """Everything that is watched at one site, and the runners that reach it."""

    host: Runner
    service: Runner  # where the service's systemd is
    pci: PciSource
    nvml: NvmlSource
    unit: UnitSource
    journal: JournalSource
    client: EngineClient
    health: HealthSource
    ready: ReadySource
    models: ModelsSource
    identity: IdentitySource
    rates: RatesSource


def connect(site: Site) -> Sources:
    """The sources of a site. Nothing is opened or asked yet."""
    host: Runner = LocalRunner()
    cards: Runner = host
    if site.simulated is not None:
        host = BoxRunner(Path(site.simulated.directory))
        cards = LocalRunner() if site.simulated.nvml == "library" else host
    service = host
    if site.container.kind == "lxc" and site.container.id is not None:
        service = lxc(host, site.container.id)
    key_file = site.service.api_key_file
    client = EngineClient(site.service.url, Path(key_file) if key_file else None)
    identity = IdentitySource(client)
    return Sources(
        host=host,
        service=service,
        pci=PciSource(host.root, None if site.gpus == "auto" else site.gpus),
        nvml=NvmlSource(cards),
        unit=UnitSource(service, site.service.unit),
        journal=JournalSource(service, site.service.unit),
        client=client,
        health=HealthSource(client),
        ready=ReadySource(client),
        models=ModelsSource(client),
        identity=identity,
        rates=RatesSource(client, identity.latest),
    )
