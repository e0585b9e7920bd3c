"""The audit: does production run with what won the benchmark, and what does it add?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from console.checks.audit_findings import examine
from console.checks.flags.table import canonical as of_version
from console.checks.flags.table import nearest_version, shipped
from console.model.audit_report import Audit
from console.model.command_line import Naming, canonical
from console.model.configuration import Effective, Item, compare
from console.model.finding import Finding, overall
from console.model.profile import Profile
from console.model.site import Site
from console.sources.connect import Sources, connect
from console.sources.effective import read_effective
from console.sources.engine.identity import read_identity
from console.sources.monitor import profile_of


async def audit(
    site: Site,
    profiles: tuple[Profile, ...],
    profile: Profile | None = None,
    sources: Sources | None = None,
) -> Audit:
    """Read the service and compare it with ``profile``, or with the one whose model it runs.

    Takes a few seconds at most, twice the deadline of a command, and raises nothing for what it finds.
    """
    watched = connect(site) if sources is None else sources
    versions = None if profile is None else profile.sglang
    try:
        effective = await read_effective(
            watched, site.container.id, lambda version: naming(version, versions)
        )
    finally:
        await watched.client.close()
    chosen = profile or _profile_of(effective, profiles)
    return judge(effective, chosen, profiles)


def judge(effective: Effective, profile: Profile | None, profiles: tuple[Profile, ...] = ()) -> Audit:
    """What the reading says of the profile."""
    if profile is None:
        return _nothing_to_compare(effective, profiles)
    profile = _renamed(profile, naming(effective.engine_version, profile.sglang))
    items = compare(effective, profile) if effective.basis != "none" else ()
    findings = examine(effective, profile, items)
    return Audit(
        answer=answer(effective, profile, items),
        verdict=overall(findings),
        findings=findings,
        items=items,
        profile=profile.name,
    )


def naming(version: str | None, versions: str | None) -> Naming:
    """How flags are named in this SGLang, by the shipped table that is nearest: no alias, no abbreviation.

    ``versions`` is the range of a profile, for when the version that runs is not known.
    """
    table = shipped(nearest_version(version, versions))
    return lambda name: canonical(of_version(name, table))


def _renamed(profile: Profile, names: Naming) -> Profile:
    """The profile with the one name of each flag, whatever it was written with."""
    args = {names(name): value for name, value in profile.args.items()}
    reference = profile.reference
    if reference is not None:
        known = {names(name): value for name, value in reference.args.items()}
        reference = msgspec.structs.replace(reference, args=known)
    return msgspec.structs.replace(profile, args=args, reference=reference)


def _profile_of(effective: Effective, profiles: tuple[Profile, ...]) -> Profile | None:
    """The profile of the model that runs, by path, else by served name."""
    flags = effective.flags
    told = {
        "model_path": flags.get("model-path"),
        "served_model_name": flags.get("served-model-name"),
    }
    identity = read_identity(msgspec.json.encode(told), None, None)
    return profile_of(identity, profiles)


def _nothing_to_compare(effective: Effective, profiles: tuple[Profile, ...]) -> Audit:
    names = ", ".join(one.name for one in profiles) or "there is none"
    model = effective.flags.get("model-path")
    if effective.basis == "none":
        words = "; ".join(effective.problems.values()) or "nothing was read"
        finding = Finding("service", "Service", "unknown", words, "gpuops doctor tells what is in the way")
        return Audit(answer=f"nothing to compare: {words}", verdict="unknown", findings=(finding,))
    evidence = f"no profile has the model {model or '(none named)'}; profiles: {names}"
    finding = Finding("profile", "Profile", "unknown", evidence, "name one: gpuops audit PROFILE")
    return Audit(answer="no profile fits what runs", verdict="unknown", findings=(finding,))


# The answer ------------------------------------------------------------------------------------


def answer(effective: Effective, profile: Profile, items: tuple[Item, ...]) -> str:
    """In words, what an operator wants to know first."""
    if effective.basis == "none":
        return "nothing to compare: " + ("; ".join(effective.problems.values()) or "nothing was read")
    benchmark = profile.reference is not None
    asked = [item for item in items if _expected(item, benchmark)]
    other = [item for item in asked if item.verdict in ("missing", "different") and item.allowed is None]
    unknown = [item for item in asked if item.verdict == "unknown"]
    running = effective.basis == "process"
    subject = "production" if running else "the unit"
    whose = "the benchmark's" if benchmark else f"the {profile.name} profile's"
    if other:
        against = "the benchmark" if benchmark else f"the profile {profile.name}"
        told = f"{subject} differs from {against}: {_differences(other, asked)}"
    elif unknown:
        told = f"{_seen_of(asked, 'flag', whose)} and {_seen_of(asked, 'variable', 'its')} could be seen"
    else:
        verb = "runs" if running else "would start"
        told = f"{subject} {verb} {whose} {_counted(asked)}"
    return told + _more(items, asked, benchmark) + ("" if running else "; it does not run")


def _expected(item: Item, benchmark: bool) -> bool:
    return (item.reference if benchmark else item.profile) is not None


def _differences(other: list[Item], asked: list[Item]) -> str:
    parts = []
    for kind, word in (("flag", "flag"), ("variable", "variable")):
        count = sum(item.kind == kind for item in asked)
        for verdict in ("missing", "different"):
            wrong = sum(item.kind == kind and item.verdict == verdict for item in other)
            if wrong:
                parts.append(f"{wrong} of {_plural(count, word)} {verdict}")
    return ", ".join(parts)


def _seen_of(asked: list[Item], kind: str, whose: str) -> str:
    of_kind = [item for item in asked if item.kind == kind]
    seen = sum(item.verdict != "unknown" for item in of_kind)
    return f"{seen} of {whose} {_plural(len(of_kind), kind)}"


def _counted(items: Iterable[Item]) -> str:
    counts = Counter(item.kind for item in items)
    return f"{_plural(counts['flag'], 'flag')} and {_plural(counts['variable'], 'variable')}"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _more(items: tuple[Item, ...], asked: list[Item], benchmark: bool) -> str:
    """What it adds, and what differs where that is allowed."""
    added = [item for item in items if item.verdict == "added"]
    told = f"; it adds {len(added)}" if added else "; it adds nothing"
    doubtful = sum(item.allowed is None for item in added)
    if doubtful:
        told += f", {doubtful} of which may change the numbers"
    tolerated = [item for item in asked if item.verdict == "different" and item.allowed is not None]
    if len(tolerated) == 1:
        told += f"; {tolerated[0].label} differs ({tolerated[0].allowed})"
    elif tolerated:
        told += f"; {len(tolerated)} differ where that is allowed"
    if benchmark:
        return told
    return told + "; there is no benchmark to compare with"
