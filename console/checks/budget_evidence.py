"""What a budget is judged from: snapshot, engine report, log of the load, host RAM, model files."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from console.model.card_memory import RankMemory
from console.model.host_cache import HostMemory
from console.model.kv_arguments import read_arguments
from console.model.profile import Profile
from console.model.snapshot import Snapshot
from console.sources.connect import Sources
from console.sources.engine.memory import EngineReport, read_report
from console.sources.host_memory import groups_of, read_held, read_host_memory
from console.sources.memory_log import read_load
from console.sources.model_files import ModelFiles, read_model
from console.sources.source import Unavailable

#: Seconds for ``/server_info``, which is a round trip through the scheduler.
REPORT_DEADLINE = 3.0

_NO_MODEL = ModelFiles(path="", problem="no model-path is given")


@dataclass(frozen=True)
class Evidence:
    """Everything a budget is judged from. What could not be read has its reason in ``problems``, by name."""

    snapshot: Snapshot
    profile: Profile | None = None
    report: EngineReport | None = None
    ranks: dict[str, RankMemory] = field(default_factory=dict)  # of the load's log
    host: HostMemory | None = None
    files: ModelFiles = _NO_MODEL
    draft: ModelFiles | None = None
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        unit = self.snapshot.unit.value
        return self.report is not None or (unit is not None and unit.active_state == "active")


async def look(sources: Sources, snapshot: Snapshot, profile: Profile | None) -> Evidence:
    """Read what the snapshot does not hold: the report, the load's log, the host's RAM, the model's files."""
    problems: dict[str, str] = {}
    report, ranks, host = await asyncio.gather(
        _report(sources, problems), _load(sources, snapshot, problems), _host(sources, snapshot, problems)
    )
    chosen = profile if profile is not None or report is not None else snapshot.profile
    flags = report.arguments if profile is None and report is not None else chosen and chosen.args
    arguments, _ = read_arguments(flags or {})
    environment = {} if chosen is None else chosen.env
    files, draft = _NO_MODEL, None
    if arguments.model_path is not None:
        files = await read_model(sources.service, arguments.model_path, environment)
        if arguments.drafts and arguments.draft_path is not None:
            draft = await read_model(sources.service, arguments.draft_path, environment)
    return Evidence(snapshot, profile, report, ranks, host, files, draft, problems)


async def _report(sources: Sources, problems: dict[str, str]) -> EngineReport | None:
    answer = await sources.client.get("/server_info", REPORT_DEADLINE)
    if answer.probe.status == 404:  # its name before 0.5.8
        answer = await sources.client.get("/get_server_info", REPORT_DEADLINE)
    report = read_report(answer.body) if answer.probe.ok else None
    if report is None:
        probe = answer.probe
        status = "" if probe.status is None else f"HTTP {probe.status}"
        problems["report"] = probe.detail or probe.error or status or "an answer without its figures"
    return report


async def _load(sources: Sources, snapshot: Snapshot, problems: dict[str, str]) -> dict[str, RankMemory]:
    unit = snapshot.unit.value
    if unit is None or unit.started_at is None or unit.active_state != "active":
        return {}
    ready = snapshot.load.fired_up_at
    since = unit.started_at
    ranks, problem = await read_load(
        sources.service, unit.id, since, ready if ready is not None and ready > since else None
    )
    if problem is not None:
        problems["log"] = problem
    return ranks


async def _host(sources: Sources, snapshot: Snapshot, problems: dict[str, str]) -> HostMemory | None:
    unit = snapshot.unit.value
    site = snapshot.site
    groups = groups_of(site.container.id, None if unit is None else unit.control_group)
    own = unit is not None and unit.control_group and unit.active_state == "active"

    def read() -> HostMemory:
        held = read_held(sources.host.root, groups[-1]) if own and groups else None
        return read_host_memory(sources.host.root, groups, returned=held or 0)

    try:
        return await asyncio.to_thread(read)
    except Unavailable as problem:
        problems["host"] = str(problem)
        return None
