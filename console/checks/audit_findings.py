"""What the audit finds: each a verdict with its evidence and what to do about it, the worst first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from console.model.command_line import hidden, same_value, shown
from console.model.configuration import Effective, Item, Place
from console.model.engine_facts import (
    DEFAULT_CHANGES,
    FIELDS,
    RENAMED_VALUES,
    SPECULATION_MAX_RUNNING,
    DefaultChange,
    read_by_engine,
)
from console.model.finding import Finding, Verdict
from console.model.profile import FlagValue, Profile

_ORDER: tuple[Verdict, ...] = ("fail", "unknown", "warn", "pass", "skipped")

#: systemd tells when the process began in whole seconds.
_CLOCK_S = 1.0

#: Resolved otherwise on purpose, or of no interest: the address is the site's to know.
_NOT_RESOLVED = frozenset({"host", "port", "config", "api-key", "admin-api-key"})

_RUNNING = "effective_max_running_requests_per_dp"


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
        _version(effective, profile),
        _defaults(effective, profile),
        _resolved(effective, items),
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


# The engine ------------------------------------------------------------------------------------


def _version(effective: Effective, profile: Profile) -> Finding:
    title = "SGLang version"
    version = effective.engine_version
    if version is None:
        reason = effective.problems.get("engine", "the engine does not tell its version")
        return Finding("version", title, "unknown", reason, "audit again when the engine answers")
    if profile.sglang is None:
        return Finding("version", title, "pass", f"{version}; the profile fits any")
    fits = profile.fits(version)
    told = f"{version} runs, the profile is written for {profile.sglang}"
    if fits is None:
        return Finding("version", title, "unknown", f"{told}: the version cannot be read")
    if not fits:
        remedy = "install a version of that range, or try the profile with this one and widen its range"
        return Finding("version", title, "fail", told, remedy)
    return Finding("version", title, "pass", told)


def _defaults(effective: Effective, profile: Profile) -> Finding:
    """Defaults that are not the same in all versions the profile may run with."""
    title = "Changed defaults"
    version = effective.engine_version
    if version is None:
        return Finding("defaults", title, "skipped", "the version is not known")
    told: list[str] = []
    harmless: list[str] = []
    written_for = lowest(profile.sglang)
    for change in DEFAULT_CHANGES:
        if change.only_with is None or change.only_with in effective.flags:
            words, grave = _changed(change, effective, version, written_for)
            if words is not None:
                (told if grave else harmless).append(words)
    if told:
        remedy = "write the value you want into the profile, so that no version decides it"
        return Finding("defaults", title, "warn", "; ".join((*told, *harmless)), remedy)
    return Finding("defaults", title, "pass", "; ".join(harmless) or "none that matters here")


def lowest(versions: str | None) -> str | None:
    """The version that a range such as ``>=0.5.9,<0.5.20`` begins with; None when it is open below."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    begins = [one.version for one in SpecifierSet(versions or "") if one.operator in (">=", "==", "~=")]
    return max(begins, key=lambda text: Version(text.removesuffix(".*")), default=None)


def _changed(
    change: DefaultChange, effective: Effective, version: str, written_for: str | None
) -> tuple[str | None, bool]:
    """What is to say of one, and whether it needs a decision."""
    from packaging.version import InvalidVersion

    given: FlagValue | None = (
        effective.flags.get(change.name)
        if change.kind == "flag"
        else (effective.variables or effective.environment or {}).get(change.name)
    )
    label = f"--{change.name}" if change.kind == "flag" else change.name
    try:
        default = change.at(version)
        before = default if written_for is None else change.at(written_for.removesuffix(".*"))
    except (KeyError, InvalidVersion):
        return None, False
    if default is None:
        if given is None:
            return None, False
        off = not same_value(change.kind, change.name, given, "True")
        return f"{label} is {shown(given)}, and not read by {version}: {change.gone}", off
    if given is not None or before == default:
        return None, False
    return (
        f"{label} is not given; its default is {default} in {version} and was {before} in {written_for}",
        True,
    )


def _resolved(effective: Effective, items: tuple[Item, ...]) -> Finding:
    """What the engine made of what it was asked for (``/server_info``).

    The benchmark's own flags were altered in the benchmark, too: they are told, and no more.
    """
    title = "Asked and in force"
    info = effective.engine
    if info is None:
        reason = effective.problems.get("engine", "the engine was not asked")
        return Finding("resolved", title, "unknown", reason, "audit again when the engine answers")
    told: list[str] = []
    notes: list[str] = []
    measured = {item.name for item in items if item.reference is not None and item.verdict == "same"}
    for name, asked in effective.flags.items():
        words = _altered(name, asked, info)
        if words is not None:
            (notes if name in measured else told).append(words)
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    running = first.get(_RUNNING) or info.get("max_running_requests")
    asked_running = effective.flags.get("max-running-requests")
    if asked_running is None and running == SPECULATION_MAX_RUNNING and info.get("speculative_algorithm"):
        notes.append(
            f"at most {running} requests at once: --max-running-requests is not given, "
            "and with speculation SGLang takes that"
        )
    elif asked_running is not None and isinstance(running, int) and str(running) != str(asked_running):
        told.append(f"--max-running-requests {shown(asked_running)} was asked for, {running} a replica count")
    if told:
        remedy = "ask for what the engine can do, so that profile and production say the same"
        return Finding("resolved", title, "warn", "; ".join((*told, *notes)), remedy)
    return Finding("resolved", title, "pass", "; ".join(notes) or "the engine took every value as given")


def _altered(name: str, asked: FlagValue, info: dict[str, Any]) -> str | None:
    """In words, when the engine has another value than it was given."""
    field = FIELDS.get(name, name.replace("-", "_"))
    if field not in info or name in _NOT_RESOLVED:
        return None
    value = info[field]
    if value is None or isinstance(value, dict):
        return None  # resolved later, or into a structure of its own
    text = _text_of(value)
    hides = hidden(name, text)
    if text == "" or same_value("flag", name, asked, hides) or hides == asked:
        return None
    if isinstance(asked, str) and (isinstance(text, bool) or RENAMED_VALUES.get((name, asked)) == text):
        return None
    return f"--{name} {shown(asked)} was asked for, {shown(hides)} is in force"


def _text_of(value: object) -> FlagValue:
    if isinstance(value, bool):
        return value
    if isinstance(value, list):
        return tuple(map(str, value)) if len(value) != 1 else str(value[0])
    return str(value)
