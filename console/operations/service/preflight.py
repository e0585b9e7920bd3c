"""What is looked at before anything changes: each finding with what was seen and what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from console.model.card import CardView, Holder, Owner
from console.model.finding import Finding, Verdict
from console.model.kv_arguments import read_arguments
from console.model.profile import Profile
from console.model.site import Site
from console.model.snapshot import Snapshot
from console.model.text import clean
from console.operations.service.following import port_of
from console.operations.service.request import Orphan
from console.operations.service.stopping import SMALL_BYTES, start_ticks
from console.operations.step import Context
from console.sources.listeners import listeners
from console.sources.monitor import HOLDERS_COUNT_S
from console.transport.files import FileProblem, exists

#: Free space below which nothing is written, bytes: a unit is a few kB, a journal a few MB.
DISK_BYTES = 16 * 1024**2

#: Seconds for one small command.
_DEADLINE = 10.0


async def guarded(id: str, title: str, look: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
    """The findings of one look; a defect in it is told, and costs that look only."""
    try:
        return await look()
    except Exception as defect:  # noqa: BLE001  it is told as a finding
        evidence = clean(f"defect in check {id}: {type(defect).__name__}: {defect}")
        return [Finding(id, title, "unknown", evidence)]


# Model files -----------------------------------------------------------------------------------


async def model_findings(context: Context, profile: Profile) -> list[Finding]:
    """Whether the model and its draft can be read where the service runs."""
    arguments, _ = read_arguments(profile.args)
    found = [await _model(context, "model", "Model files", arguments.model_path)]
    if arguments.draft_path is not None:
        found.append(await _model(context, "draft", "Draft model files", arguments.draft_path))
    return found


async def _model(context: Context, id: str, title: str, path: str | None) -> Finding:
    if path is None:
        return Finding(id, title, "fail", "the profile names none", "set model-path under args")
    flag = "model-path" if id == "model" else "speculative-draft-model-path"
    if not path.startswith("/"):
        return Finding(
            id,
            title,
            "warn",
            f"{path} is a name on the model hub: the engine takes it from its cache, or downloads it",
            f"name a folder in {flag} so that a load needs no network",
        )
    try:
        there = await exists(context.service, path)
        readable = there and await exists(context.service, f"{path}/config.json", "-r")
    except FileProblem as problem:
        return Finding(id, title, "unknown", clean(str(problem)))
    where = context.service.name
    if not there:
        return Finding(
            id,
            title,
            "fail",
            f"{path} is not there on {where}",
            f"mount it, or correct {flag} in the profile",
        )
    if not readable:
        return Finding(
            id,
            title,
            "fail",
            f"{path}/config.json is not there or not readable on {where}",
            f"complete the download, or correct {flag} in the profile",
        )
    return Finding(id, title, "pass", f"{path} is readable on {where}")


# Cards -----------------------------------------------------------------------------------------


def service_owner(context: Context) -> Owner:
    """Who has the cards that the service may use."""
    container = context.site.container
    if container.kind == "lxc" and container.id is not None:
        return Owner("ct", container.id)
    return Owner("host")


def usable_cards(snapshot: Snapshot, owner: Owner) -> tuple[CardView, ...]:
    """The cards on the service's side that its driver can reach, in PCI order."""
    return tuple(card for card in snapshot.cards if card.owner == owner)


def cards_for(profile: Profile | None, usable: tuple[CardView, ...]) -> tuple[CardView, ...]:
    """The cards that the profile's ranks take: the first ones, from base-gpu-id on, in its steps.

    All of them when CUDA_VISIBLE_DEVICES or the flags are not plain numbers: nothing may then be in the way.
    """
    if profile is None:
        return usable
    if profile.text("device") == "cpu":
        return ()
    arguments, problems = read_arguments(profile.args)
    base, step = profile.text("base-gpu-id") or "0", profile.text("gpu-id-step") or "1"
    if problems or "CUDA_VISIBLE_DEVICES" in profile.env or not (base.isdigit() and step.isdigit()):
        return usable
    places = range(int(base), int(base) + max(1, int(step)) * arguments.ranks, max(1, int(step)))
    return tuple(usable[place] for place in places if place < len(usable))


def cards_finding(snapshot: Snapshot, profile: Profile, owner: Owner) -> Finding:
    """Enough cards on the service's side, none of them lost."""
    id, title = "cards", "Cards"
    if profile.text("device") == "cpu":
        return Finding(id, title, "skipped", "the profile runs on the CPU")
    arguments, _ = read_arguments(profile.args)
    usable = usable_cards(snapshot, owner)
    told = (
        f"{len(usable)} of {len(snapshot.cards)} cards on the side of {owner.words}; {arguments.ranks} ranks"
    )
    others = [card for card in snapshot.cards if card.owner != owner]
    where = ", ".join(f"card {card.index} ({card.pci.address}): {card.owner.words}" for card in others)
    if len(usable) >= arguments.ranks:
        return Finding(id, title, "pass", f"{told}; {where}" if others else told)
    evidence = f"{told}; {where}" if others else told
    vm = any(card.owner.kind == "vm" for card in others)
    remedy = "gpuops rebind --to container" if vm else "gpuops doctor tells what became of the others"
    return Finding(id, title, "fail", evidence, f"{remedy}, or lower tp-size in the profile")


async def holders_finding(
    context: Context, snapshot: Snapshot, cards: tuple[CardView, ...]
) -> tuple[Finding, tuple[Orphan, ...]]:
    """Processes that hold memory on these cards and are not the service's; those that the plan would end."""
    id, title = "holders", "Other processes on the cards"
    if not cards:
        return Finding(id, title, "skipped", "no card is used"), ()
    age = None if snapshot.holders_at is None else snapshot.now - snapshot.holders_at
    if age is None or age > HOLDERS_COUNT_S:
        return Finding(id, title, "unknown", "who holds the cards has not been read", "gpuops doctor"), ()
    addresses = {card.pci.address: card.index for card in cards}
    foreign = [one for one in snapshot.holders if one.orphan and set(one.memory_bytes) & set(addresses)]
    ended: list[Orphan] = []
    words: list[str] = []
    unsure: list[str] = []
    for holder in foreign:
        said = _holder_words(holder, addresses)
        sizes = [holder.memory_bytes[address] for address in holder.memory_bytes if address in addresses]
        if all(held is not None and held < SMALL_BYTES for held in sizes):
            words.append(f"{said}: so little that it is left alone")
            continue
        ticks = start_ticks(context.host.root, holder.pid)
        if ticks is None:
            unsure.append(said)
            continue
        ended.append(Orphan(holder.pid, ticks, holder.name, _where(holder)))
        words.append(f"{said}: THIS PLAN ENDS IT")
    if unsure:
        evidence = "; ".join(
            [*words, *(f"{said}: it cannot be told apart from later ones" for said in unsure)]
        )
        return Finding(id, title, "fail", evidence, "end it by hand, then plan again"), ()
    if ended:
        remedy = "end them yourself, or confirm the plan, which ends them with SIGTERM, then SIGKILL"
        return Finding(id, title, "warn", "; ".join(words), remedy), tuple(ended)
    return Finding(id, title, "pass", "; ".join(words) or "none but the service's own"), ()


def _holder_words(holder: Holder, addresses: dict[str, int]) -> str:
    held = {address: size for address, size in holder.memory_bytes.items() if address in addresses}
    cards = ", ".join(str(addresses[address]) for address in held)
    known = [size for size in held.values() if size is not None]
    size = f"{sum(known) / 1e9:.1f} GB" if len(known) == len(held) else "memory of unknown size"
    return f"{holder.name} (pid {holder.pid}, {_where(holder)}) holds {size} on card {cards}"


def _where(holder: Holder) -> str:
    place = "this host" if holder.container is None else f"CT {holder.container}"
    return f"{place}, {holder.unit}" if holder.unit else place


# Port and disk ---------------------------------------------------------------------------------


async def port_finding(context: Context, profile: Profile | None) -> Finding:
    """The port the console asks is the port the profile opens, and nobody else has it."""
    id, title = "port", "Port"
    site = context.site
    port = port_of(site.service.url)
    if profile is not None and site.simulated is None:  # the box serves on a port of its own
        opened = profile.text("port") or "30000"
        if opened != str(port):
            return Finding(
                id,
                title,
                "fail",
                f"the profile opens port {opened}, the site's service.url asks port {port}",
                f"set port: {port} in the profile, or service.url in the site file",
            )
    container = site.container.id if site.container.kind == "lxc" else None
    found = await asyncio.to_thread(
        listeners, context.host.root, port, container=container, unit=site.service.unit
    )
    strangers = [one for one in found if not one.own]
    if strangers:
        who = "; ".join(one.name if one.pid is None else f"{one.name} (pid {one.pid})" for one in strangers)
        return Finding(
            id, title, "fail", f"port {port} belongs to {who}", "end it, or give the profile another port"
        )
    if found:
        return Finding(id, title, "pass", f"port {port} belongs to {site.service.unit}, which stops first")
    return Finding(id, title, "pass", f"port {port} is free")


async def disk_finding(context: Context, folder: str) -> Finding:
    """Room for the unit's file and for the job's journal."""
    id, title = "disk", "Disk space"
    free: list[tuple[str, int]] = []
    result = await context.service.run(("df", "--output=avail", "-B1", "--", folder), deadline=_DEADLINE)
    words = result.stdout.decode("ascii", "replace").split() if result.ok else []
    if not words or not words[-1].isdigit():
        return Finding(id, title, "unknown", f"{folder}: {clean(result.reason)}")
    free.append((f"{folder} on {context.service.name}", int(words[-1])))
    try:
        context.state.create()
        status = await asyncio.to_thread(_statvfs, str(context.state.directory))
    except OSError as problem:
        return Finding(
            id, title, "fail", f"{context.state.directory}: {problem.strerror}", "see state: in the site"
        )
    free.append((str(context.state.directory), status))
    short = [f"{name} has {size / 1024**2:.0f} MiB left" for name, size in free if size < DISK_BYTES]
    verdict: Verdict = "fail" if short else "pass"
    told = "; ".join(short) or "; ".join(f"{name}: {size / 1e9:.1f} GB free" for name, size in free)
    return Finding(id, title, verdict, told, "free some space first" if short else None)


def _statvfs(path: str) -> int:
    import os

    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


# Flags and memory ------------------------------------------------------------------------------


async def flag_findings(context: Context, profile: Profile, python: str | None) -> list[Finding]:
    """The flags against the installed SGLang, each with its place in the remedy."""
    from console.checks.flags import validate_profile

    path = await asyncio.to_thread(_file_of, context.site, profile)
    return list(await validate_profile(profile, context.service, context.state, python=python, path=path))


def _file_of(site: Site, profile: Profile) -> str | None:
    """The file that holds this very profile, for the places in it; None when it is in none of the site's."""
    from console.sources.here import profiles_of

    known = profiles_of(site, None)
    # Another file, or a later text, may have the name: its lines would mislead.
    return known.paths.get(profile.name) if known.named(profile.name) == profile else None


async def memory_findings(
    context: Context, snapshot: Snapshot, profile: Profile, *, freed: bool
) -> list[Finding]:
    """What the budget says of this profile: host RAM for the hierarchical cache, and whatever cannot fit.

    ``freed``: the plan ends what else holds the cards, so their memory now says little.
    """
    if profile.text("device") == "cpu":
        return []
    from console.checks.budget import examine

    budget = await examine(context.monitor.sources, snapshot, profile)
    own = {"model-files", "draft-files"}  # looked at here already, with their own remedies
    decisive = [
        one
        for one in budget.findings
        if one.id == "host-cache" or (one.verdict == "fail" and one.id not in own and not freed)
    ]
    return [msgspec.structs.replace(one, id=f"memory-{one.id}") for one in decisive]
