"""What the audit finds with the engine's own word: its version, changed defaults, what is in force."""

from __future__ import annotations

from typing import Any

from console.model.command_line import hidden, same_value, shown
from console.model.configuration import Effective, Item
from console.model.engine_facts import (
    DEFAULT_CHANGES,
    FIELDS,
    RENAMED_VALUES,
    SPECULATION_MAX_RUNNING,
    DefaultChange,
)
from console.model.finding import Finding
from console.model.profile import FlagValue, Profile

#: Resolved otherwise on purpose, or of no interest: the address is the site's to know.
_NOT_RESOLVED = frozenset({"host", "port", "config", "api-key", "admin-api-key"})

_RUNNING = "effective_max_running_requests_per_dp"


def version_finding(effective: Effective, profile: Profile) -> Finding:
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


def defaults_finding(effective: Effective, profile: Profile) -> Finding:
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


def resolved_finding(effective: Effective, items: tuple[Item, ...]) -> Finding:
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
