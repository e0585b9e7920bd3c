"""Makes the plans: reads the world once, judges it, and writes down every step with its way back."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from console.model.finding import Finding
from console.model.managed_unit import render
from console.model.operation import FileChange, Plan
from console.model.profile import Profile
from console.model.snapshot import Snapshot
from console.model.text import clean
from console.model.unit import UnitStatus
from console.model.unit_syntax import UnitProblem
from console.operations.service import preflight, preflight_unit
from console.operations.service.costs import load_cost, traffic_costs
from console.operations.service.request import Orphan, ServiceRequest
from console.operations.service.route import steps_for
from console.operations.service.starting import ready_limit
from console.operations.service.world import RUNNING
from console.operations.step import Context, Refused
from console.sources.source import Unavailable
from console.sources.unit_file import UnitFiles, read_unit_files

_ENABLED = frozenset({"enabled", "enabled-runtime"})

#: States in which what runs does not serve, so that the way back does not start it again.
_BROKEN = frozenset({"crashed", "crash-looping"})

#: Where the service's Python is not known, a stop has this long before SIGKILL, seconds (systemd's default).
_STOP_S = 90.0

#: Seconds that the first list of processes on the cards is waited for.
PROCESSES_S = 4.0


class _World(msgspec.Struct, frozen=True):
    """One reading of everything that a plan is made from."""

    snapshot: Snapshot
    unit: UnitStatus
    files: UnitFiles
    active: Profile | None  # the profile of the present unit

    @property
    def running(self) -> bool:
        return self.unit.active_state in RUNNING and not self.unit.sub_state.startswith("auto-restart")

    @property
    def serves(self) -> bool:
        return self.running and self.snapshot.state.name not in _BROKEN

    @property
    def enabled(self) -> bool:
        return self.unit.unit_file_state in _ENABLED


async def plan_switch(context: Context, name: str) -> Plan:
    """Another profile takes the service over. Refused without such a profile, or a unit that can be read."""
    profile = next((one for one in context.profiles if one.name == name), None)
    if profile is None:
        known = ", ".join(one.name for one in context.profiles) or "none"
        raise Refused(f"there is no profile {clean(name)}; there are: {known}")
    world = await _look(context)
    files, findings = world.files, list[Finding]()
    python = profile.python or files.own.python or files.effective.python
    text = None
    if python is None:
        findings.append(
            Finding(
                "python",
                "Service's Python",
                "fail",
                f"neither the profile nor {files.unit} names one",
                "set python: /path/to/bin/python in the profile",
            )
        )
    else:
        try:
            text = render(profile, python=python, keep=files.own)
        except UnitProblem as problem:
            findings.append(Finding("render", "New unit", "fail", clean(str(problem)), "correct the profile"))
    secret = preflight_unit.secret_finding(files)
    findings += _unit_findings(context, world, profile, text, python, secret)
    more, orphans, cards = await _surroundings(context, world, profile)
    findings += await _about_profile(context, world, profile, python, freed=bool(orphans))
    findings += more
    before = None if secret else files.before
    request = ServiceRequest(
        unit=files.unit,
        path=files.path,
        invocation=world.unit.invocation_id,
        was_running=world.serves,
        was_enabled=world.enabled,
        enable=world.enabled or files.text is None,
        old_text=before,
        new_text=text,
        old=world.active,
        new=profile,
        cards=cards,
        orphans=orphans,
        stop_timeout_s=_stop_timeout(world.unit),
        old_ready_s=ready_limit(world.active),
    )
    change = FileChange(context.service.name, files.path, before, text)
    costs = [load_cost(context, profile), *traffic_costs(world.snapshot)]
    if world.running and not world.serves:
        costs.append(f"{files.unit} does not serve now: should the switch fail, it stays stopped")
    if not request.enable:
        costs.append(f"{files.unit} does not start with the machine now, and will not afterwards")
    return _plan(
        context,
        "switch",
        f"switch to {profile.name}",
        profile.name,
        request,
        findings,
        costs,
        () if text is None or secret else (change,),
    )


async def plan_restart(context: Context) -> Plan:
    """The same unit once more. There is no way back: what fails is said, and left as it is."""
    world = await _look(context)
    _need_unit(world)
    findings = [*_loads(world), *preflight_unit.drop_in_findings(world.files, None)]
    more, orphans, cards = await _surroundings(context, world, world.active)
    request = _same_unit(world, cards, orphans)
    costs = [load_cost(context, world.active), *traffic_costs(world.snapshot)]
    if world.snapshot.state.name in ("ready", "busy"):
        costs.insert(0, "it is healthy: a restart takes it away for the time of a load")
    costs.append("a restart has no earlier state to go back to")
    title = f"restart {world.files.unit}" + (f" ({world.active.name})" if world.active else "")
    return _plan(context, "restart", title, world.files.unit, request, [*findings, *more], costs)


async def plan_stop(context: Context) -> Plan:
    """The service ends, and its cards are free."""
    world = await _look(context)
    _need_unit(world)
    ended = world.unit.active_state in ("inactive", "failed") and not world.unit.tasks
    findings = [
        Finding(
            "running", "Running", "fail", f"{world.files.unit} is {world.unit.active_state}: nothing to stop"
        )
        if ended
        else Finding("running", "Running", "pass", f"{world.files.unit} is {world.unit.active_state}")
    ]
    owner = preflight.service_owner(context)
    cards = preflight.cards_for(world.active, preflight.usable_cards(world.snapshot, owner))
    costs = list(traffic_costs(world.snapshot))
    if world.enabled:
        costs.append("its auto-start stays on: it comes back with the machine")
    request = _same_unit(world, tuple(card.pci.address for card in cards), ())
    return _plan(context, "stop", f"stop {world.files.unit}", world.files.unit, request, findings, costs)


async def plan_start(context: Context) -> Plan:
    """The unit as it is starts; a start that fails is stopped again."""
    world = await _look(context)
    _need_unit(world)
    findings = _loads(world)
    if world.running:
        evidence = f"{world.files.unit} is {world.unit.active_state} already: nothing to start"
        findings.insert(
            0, Finding("running", "Running", "fail", evidence, "gpuops restart, when that is meant")
        )
    more, orphans, cards = await _surroundings(context, world, world.active)
    request = _same_unit(world, cards, orphans)
    title = f"start {world.files.unit}" + (f" ({world.active.name})" if world.active else "")
    costs = [load_cost(context, world.active)]
    return _plan(context, "start", title, world.files.unit, request, [*findings, *more], costs)


async def service_as_it_is(context: Context) -> tuple[ServiceRequest, UnitStatus]:
    """The service, for a plan that stops and starts it and leaves its unit alone. Refused as the others."""
    world = await _look(context)
    _need_unit(world)
    owner = preflight.service_owner(context)
    cards = preflight.cards_for(world.active, preflight.usable_cards(world.snapshot, owner))
    return _same_unit(world, tuple(card.pci.address for card in cards), ()), world.unit


# Parts -----------------------------------------------------------------------------------------


async def _look(context: Context) -> _World:
    """Refused when systemd cannot be asked: nothing can be planned blindly."""
    sources, unit = context.monitor.sources, context.site.service.unit
    try:
        status, files = await asyncio.gather(sources.unit.read(), read_unit_files(sources.service, unit))
    except Unavailable as problem:
        raise Refused(f"{unit} cannot be read on {context.service.name}: {problem}") from None
    await _heard_of_processes(context)
    return _World(context.monitor.snapshot(), status, files, active_profile(files, context.profiles))


async def _heard_of_processes(context: Context) -> None:
    """NVML lists processes after the cards: the first list is waited for, as long as NVML answers."""
    ends = context.clock() + PROCESSES_S
    monitor = context.monitor
    while context.clock() < ends and monitor.nvml.error is None:
        if monitor.nvml.value is not None and monitor.nvml.value.processes_at is not None:
            break
        await asyncio.sleep(0.05)
    await monitor.read_holders()


def active_profile(files: UnitFiles, profiles: tuple[Profile, ...]) -> Profile | None:
    """The profile that the unit's text serves: by its first line, else by what its command serves."""
    unit = files.own
    if unit.profile is not None and not unit.edited:
        return next((one for one in profiles if one.name == unit.profile), None)
    return next((one for one in profiles if unit.argv and unit.argv[-len(one.argv()) :] == one.argv()), None)


def _need_unit(world: _World) -> None:
    if world.files.text is None:
        raise Refused(f"there is no {world.files.unit}: gpuops switch PROFILE makes it")


def _unit_findings(
    context: Context,
    world: _World,
    profile: Profile,
    text: str | None,
    python: str | None,
    secret: Finding | None,
) -> list[Finding]:
    files = world.files
    found = [preflight_unit.owner_finding(files, context.state)]
    if secret is not None:
        found.append(secret)
    found += preflight_unit.drop_in_findings(files, profile)
    if text is not None and python is not None:
        found += preflight_unit.render_findings(text, profile, python, files.own)
    if text is not None and text == files.before:
        remedy = "gpuops restart" if world.running else "gpuops start"
        found.insert(
            0,
            Finding(
                "active", "Active profile", "fail", f"{profile.name} is the unit's profile already", remedy
            ),
        )
    return found


async def _about_profile(
    context: Context, world: _World, profile: Profile, python: str | None, *, freed: bool
) -> list[Finding]:
    snapshot = world.snapshot
    looks = (
        ("flags", "Flags", partial(preflight.flag_findings, context, profile, python)),
        ("model", "Model files", partial(preflight.model_findings, context, profile)),
        ("memory", "Memory", partial(preflight.memory_findings, context, snapshot, profile, freed=freed)),
    )
    answers = await asyncio.gather(*(preflight.guarded(*look) for look in looks))
    return [finding for answer in answers for finding in answer]


async def _surroundings(
    context: Context, world: _World, profile: Profile | None
) -> tuple[list[Finding], tuple[Orphan, ...], tuple[str, ...]]:
    """Cards, who holds them, port and disk; the processes that the plan ends; the cards' addresses."""
    snapshot = world.snapshot
    owner = preflight.service_owner(context)
    cards = preflight.cards_for(profile, preflight.usable_cards(snapshot, owner))
    found: list[Finding] = []
    if profile is not None:
        found.append(preflight.cards_finding(snapshot, profile, owner))
    holders, orphans = await preflight.holders_finding(context, snapshot, cards)
    found.append(holders)

    async def port() -> list[Finding]:
        return [await preflight.port_finding(context, profile)]

    async def disk() -> list[Finding]:
        return [await preflight.disk_finding(context, world.files.path.rpartition("/")[0])]

    for answer in await asyncio.gather(
        preflight.guarded("port", "Port", port), preflight.guarded("disk", "Disk space", disk)
    ):
        found += answer
    return found, orphans, tuple(card.pci.address for card in cards)


def _loads(world: _World) -> list[Finding]:
    """Whether systemd has a unit that it can start, and the one that is on the disk."""
    files, unit = world.files, world.unit
    if unit.load_state != "loaded":
        return [
            Finding(
                "unit", "Unit", "fail", f"{files.unit} is {unit.load_state}", f"systemctl status {files.unit}"
            )
        ]
    effective = files.effective
    if effective.commands != 1:
        evidence = f"{files.fragment} with its drop-ins has {effective.commands} commands, a service has one"
        return [Finding("unit", "Unit", "fail", evidence, f"systemctl cat {files.unit}")]
    if files.need_daemon_reload:
        evidence = (
            f"the files of {files.unit} changed since systemd read them: this would start the older ones"
        )
        return [Finding("unit", "Unit", "fail", evidence, "systemctl daemon-reload, then plan again")]
    return [Finding("unit", "Unit", "pass", f"{files.fragment} is loaded")]


def _same_unit(world: _World, cards: tuple[str, ...], orphans: tuple[Orphan, ...]) -> ServiceRequest:
    """A request that leaves the unit's file alone. The text itself is not needed to start it."""
    return ServiceRequest(
        unit=world.files.unit,
        path=world.files.path,
        invocation=world.unit.invocation_id,
        was_running=world.serves,
        was_enabled=world.enabled,
        old=world.active,
        new=world.active,
        cards=cards,
        orphans=orphans,
        stop_timeout_s=_stop_timeout(world.unit),
        old_ready_s=ready_limit(world.active),
    )


def _stop_timeout(unit: UnitStatus) -> float:
    known = unit.stop_timeout_s
    return known if known is not None and known != float("inf") else _STOP_S


def _plan(
    context: Context,
    action: str,
    title: str,
    target: str,
    request: ServiceRequest,
    findings: list[Finding],
    costs: list[str],
    changes: tuple[FileChange, ...] = (),
) -> Plan:
    return Plan(
        action=action,
        title=title,
        target=target,
        made_at=context.wall_clock(),
        request=msgspec.Raw(msgspec.json.encode(request)),
        steps=tuple(step.planned() for step in steps_for(action, request)),
        changes=changes,
        findings=tuple(findings),
        costs=tuple(costs),
    )
