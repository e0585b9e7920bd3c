"""What the audit finds: each a verdict with its evidence and what to do about it, the worst first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from console.checks.audit_engine import defaults_finding, resolved_finding, version_finding
from console.model.command_line import same_value, shown
from console.model.configuration import Effective, Item, Place
from console.model.engine_facts import read_by_engine
from console.model.finding import Finding, Verdict
from console.model.profile import Profile

_ORDER: tuple[Verdict, ...] = ("fail", "unknown", "warn", "pass", "skipped")

#: systemd tells when the process began in whole seconds.
_CLOCK_S = 1.0


def examine(effective: Effective, profile: Profile, items: tuple[Item, ...]) -> tuple[Finding, ...]:
    """All findings, the worst first, else in the order below."""
    found = [
        _service(effective),
        *_seen(effective),
        *_benchmark(profile, items),
        _profile(effective, profile, items),
        _added(profile, items),
        _twice(effective),
        _reload(effective),
        _edited(effective),
        version_finding(effective, profile),
        defaults_finding(effective, profile),
        resolved_finding(effective, items),
    ]
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.verdict)))


def _service(effective: Effective) -> Finding:
    unit = effective.unit
    title = "What runs"
    if unit is None or effective.basis == "none":
        words = "; ".join(effective.problems.values()) or "nothing was read"
        return Finding("service", title, "unknown", words, "gpuops doctor tells what is in the way")
    if "process" in effective.problems:
        remedy = "start it, then audit again: what a process really runs with is seen only then"
        if unit.main_pid is not None:
            remedy = "run gpuops as root on the host that runs the container"
        return Finding("service", title, "unknown", effective.problems["process"], remedy)
    python = "" if effective.python is None else f", Python {effective.python.version}"
    engine = "" if effective.engine_version is None else f", SGLang {effective.engine_version}"
    return Finding("service", title, "pass", f"process {effective.pid} of {unit.id}{python}{engine}")


def _seen(effective: Effective) -> Iterator[Finding]:
    """What could not be looked at; the Python's start-up files when they could."""
    problems = effective.problems
    for part, title in (("environment", "Environment"), ("files", "Unit files"), ("config", "Flags file")):
        if part in problems:
            remedy = "run gpuops as root" if part == "environment" else None
            yield Finding(part, title, "unknown", problems[part], remedy)
    if effective.basis == "process" and "environment" not in problems:
        if effective.python is None:
            yield Finding(
                "python",
                "Start-up files",
                "unknown",
                problems.get("python", "not read"),
                "variables that sitecustomize.py sets are not known; run its Python by hand to see why",
            )
        else:
            yield _start_up(effective)


def _start_up(effective: Effective) -> Finding:
    title = "Start-up files"
    assert effective.python is not None
    loaded = effective.python.loaded.values()
    own = effective.python.own
    if not loaded and not own:
        return Finding("python", title, "pass", "none sets anything")
    where = ", ".join(loaded) or "a .pth file"
    names = ", ".join(sorted(own)) or "nothing that the engine reads"
    return Finding("python", title, "pass", f"{names} set by {where}")


# Comparisons -----------------------------------------------------------------------------------


def _benchmark(profile: Profile, items: tuple[Item, ...]) -> Iterator[Finding]:
    title = "Benchmark"
    if profile.reference is None:
        yield Finding(
            "benchmark", title, "skipped", f"the profile {profile.name} has no reference; only it is compared"
        )
        return
    asked = [item for item in items if item.reference is not None]
    wrong = [item for item in asked if item.verdict in ("missing", "different") and item.allowed is None]
    if wrong:
        remedy = "its measured speed does not hold for what runs; set these and restart"
        yield Finding("benchmark", title, "fail", _told(wrong, "reference"), remedy)
        return
    blind = [item for item in asked if item.verdict == "unknown"]
    if blind:
        yield Finding("benchmark", title, "unknown", f"not seen: {_names(blind)}")
        return
    tolerated = [item for item in asked if item.verdict == "different"]
    told = f"all {len(asked)} flags and variables"
    if tolerated:
        told += f"; allowed to differ: {_told(tolerated, 'reference')}"
    yield Finding("benchmark", title, "pass", told)


def _profile(effective: Effective, profile: Profile, items: tuple[Item, ...]) -> Finding:
    title = "Profile"
    asked = [item for item in items if item.profile is not None]
    wrong = [item for item in asked if not item.as_profile and item.verdict != "unknown"]
    graver = [item for item in wrong if item.allowed is None]
    beyond = [item for item in items if item.kind == "flag" and item.profile is None and item.effective]
    parts = []
    if wrong:
        parts.append(_told(wrong, "profile"))
    if beyond:
        parts.append(f"not in the profile: {_names(beyond)}")
    if not parts:
        blind = [item for item in asked if item.verdict == "unknown"]
        if blind:
            return Finding("profile", title, "unknown", f"not seen: {_names(blind)}")
        return Finding("profile", title, "pass", f"all {len(asked)} flags and variables of {profile.name}")
    remedy = "switch to the profile, or write into it what is wanted"
    verdict: Verdict = "fail" if graver and profile.reference is None else "warn"
    if not graver and not beyond:
        return Finding("profile", title, "pass", f"allowed to differ: {'; '.join(parts)}")
    return Finding("profile", title, verdict, "; ".join(parts), remedy)


def _added(profile: Profile, items: tuple[Item, ...]) -> Finding:
    title = "Added"
    added = [item for item in items if item.verdict == "added"]
    known = [item for item in added if item.effect == "numbers" and item.profile is None]
    doubtful = [item for item in added if item.allowed is None and item not in known]
    allowed = [item for item in added if item.allowed is not None]
    parts = []
    if known:
        parts.append(f"changes the numbers: {_with_values(known)}")
    if doubtful:
        parts.append(f"may change the numbers: {_with_values(doubtful)}")
    memory = [item for item in allowed if item.effect == "memory"]
    if memory:
        parts.append(f"allowed, with a note ({memory[0].allowed}): {_names(memory)}")
    rest = [item for item in allowed if item.effect != "memory"]
    if rest:
        parts.append(f"allowed: {_names(rest)}")
    base = "benchmark" if profile.reference is not None else "profile"
    if not parts:
        return Finding("added", title, "pass", f"nothing beyond the {base}")
    verdict: Verdict = "fail" if known else "warn" if doubtful else "pass"
    remedy = f"take it out, or measure again with it and write it into the {base}"
    return Finding("added", title, verdict, "; ".join(parts), remedy if known or doubtful else None)


def _told(items: Iterable[Item], base: str) -> str:
    return "; ".join(_one(item, getattr(item, base)) for item in items)


def _one(item: Item, expected: str | None) -> str:
    if item.effective is None:
        return f"{item.label} is missing (expected {expected})"
    return f"{item.label} is {item.effective}, not {expected}"


def _names(items: Iterable[Item]) -> str:
    return ", ".join(item.label for item in items)


def _with_values(items: Iterable[Item]) -> str:
    return ", ".join(
        item.label if item.effective == "set" else f"{item.label}={item.effective}" for item in items
    )


# Places ----------------------------------------------------------------------------------------


def _twice(effective: Effective) -> Finding:
    """Flags that stand there twice, and variables that two places set to two values."""
    title = "Set more than once"
    told = [
        f"--{name} is given {len(values)} times ({', '.join(str(shown(one)) for one in values)}): "
        "the last counts"
        for name, values in effective.command.repeated.items()
    ]
    told += [
        f"--{name} is in {effective.config_file} and on the command line, which counts"
        for name in effective.config_flags
        if name in effective.command.flags
        and not same_value("flag", name, effective.config_flags[name], effective.command.flags[name])
    ]
    told += [
        _places(name, places)
        for name, places in ((one, effective.places(one)) for one in sorted(_all_names(effective)))
        if len({place.value for place in places}) > 1
    ]
    if not told:
        return Finding("twice", title, "pass", "nothing has two values")
    return Finding("twice", title, "warn", "; ".join(told), "keep the one that is wanted, remove the other")


def _all_names(effective: Effective) -> set[str]:
    names = set(effective.set_by_unit) | set(effective.environment or ())
    if effective.python is not None:
        names |= set(effective.python.environment) | set(effective.python.own)
    # Of the others Python and its libraries change some at every start.
    return {name for name in names if read_by_engine(name)}


def _places(name: str, places: tuple[Place, ...]) -> str:
    lost = ", ".join(f"{shown(place.value)} in {place.where}" for place in places[:-1])
    last = places[-1]
    return f"{name} is {lost}, and {shown(last.value)} in {last.where}, which counts"


def _reload(effective: Effective) -> Finding:
    title = "Unit as loaded"
    unit = effective.unit
    if unit is None:
        return Finding("daemon-reload", title, "skipped", "there is no unit to ask about")
    if unit.need_daemon_reload:
        told = f"the files of {unit.id} changed since systemd read them: the next start is not what they say"
        return Finding("daemon-reload", title, "warn", told, "systemctl daemon-reload")
    return Finding("daemon-reload", title, "pass", "systemd has read its files as they are")


def _edited(effective: Effective) -> Finding:
    """Files newer than the process: what they say is not what runs."""
    title = "Files and process"
    unit = effective.unit
    if effective.basis != "process" or unit is None or unit.started_at is None:
        return Finding("edited", title, "skipped", "no process to compare with")
    newer = [
        file.path
        for file in effective.files
        if file.modified_at is not None and file.modified_at > unit.started_at + _CLOCK_S
    ]
    parts = []
    start_up = () if effective.python is None else tuple(effective.python.loaded.values())
    if newer:
        parts.append(f"written after the process started: {', '.join(newer)}")
    if any(path in start_up for path in newer):
        parts.append("what the process itself got from the Python file cannot be seen any more")
    next_start = _next_start(effective)
    if next_start:
        parts.append(f"the next start will have {next_start}")
    if parts:
        remedy = "restart to run what the files say, or put them back"
        return Finding("edited", title, "warn", "; ".join(parts), remedy)
    if "times" in effective.problems:
        return Finding("edited", title, "unknown", effective.problems["times"])
    return Finding("edited", title, "pass", "the process started after its files were written")


def _next_start(effective: Effective) -> str:
    """How the command of the unit's files differs from the one that runs."""
    command = effective.next_command
    if command is None or not command.flags or "process" in effective.problems:
        return ""
    now, then = effective.command.flags, command.flags
    if not now:
        return ""
    # A wrapper script has a command of its own: then the flags are not in the unit.
    if not set(now) & set(then):
        return ""
    told = []
    for name in dict.fromkeys((*then, *now)):
        before, after = now.get(name), then.get(name)
        if before is None:
            told.append(f"--{name} {shown(after)}")
        elif after is None:
            told.append(f"no --{name}")
        elif not same_value("flag", name, before, after) and "$" not in str(after) and "%" not in str(after):
            told.append(f"--{name} {shown(after)} instead of {shown(before)}")
    for name, places in sorted(effective.set_by_unit.items()):
        given = None if effective.environment is None else effective.environment.get(name)
        if effective.environment is None or places[-1].value == given or "%" in places[-1].value:
            continue
        told.append(f"{name}={shown(places[-1].value)} instead of {shown(given) or 'nothing'}")
    return ", ".join(told)
