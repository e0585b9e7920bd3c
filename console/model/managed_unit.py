"""The unit that serves a profile: written, read back, and known again when a hand has changed it.

``render`` writes it, ``parse`` reads any service's unit as systemd would, so that what was written can
be compared with what was meant.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence

import msgspec

from console.model.profile import Profile
from console.model.text import clean
from console.model.unit_syntax import (
    Setting,
    UnitProblem,
    assignment,
    check_text,
    expanded,
    line,
    quote,
    quote_argument,
    settings,
    split_command,
    split_words,
    without_specifiers,
)

MARKER = "# Managed by gpuops"

#: What starts the engine, after the interpreter; every version up to 0.5.23 knows it.
LAUNCH = ("-m", "sglang.launch_server")

#: Seconds between a crash and the next start, and how many starts before systemd gives up.
RESTART_S = 15
STARTS = 3

_MARKED = re.compile(
    re.escape(MARKER) + r": profile (?P<profile>[a-z0-9][a-z0-9._-]*), sha256 (?P<digest>[0-9a-f]{16})\."
)
_HINT = "# Do not edit it: a change by hand is found and refused. A drop-in may change it."
_REFUSED_IN_PROGRAM = re.compile(r"[\"'\\$]")

#: What this file writes itself. All other settings of the unit before are kept as they were.
WRITTEN = {
    "Unit": frozenset({"Description", "StartLimitIntervalSec", "StartLimitInterval", "StartLimitBurst"}),
    "Service": frozenset(
        {
            "Type", "Environment", "ExecStart", "Restart", "RestartSec", "TimeoutStopSec", "KillMode",
            "StartLimitInterval", "StartLimitBurst",  # their place before systemd 230
        }
    ),
    "Install": frozenset(),
}  # fmt: skip

#: What would go against Type=exec, or wait for words the engine never says: not kept.
DROPPED = frozenset(
    {"PIDFile", "BusName", "NotifyAccess", "WatchdogSec", "RemainAfterExit", "GuessMainPID", "TimeoutSec",
     "TimeoutStartSec", "KillSignal", "SendSIGKILL", "FinalKillSignal"}
)  # fmt: skip


class UnitText(msgspec.Struct, frozen=True, kw_only=True):
    """A service's unit as systemd understands its text.

    ``argv`` and ``environment`` are those of the process, as far as the text alone tells:
    ``unknown`` names the specifiers (``%h``) and variables (``$NAME``) that it does not, which stand
    in ``argv`` as they are or are empty. ``environment_files`` are as written, ``-`` in front when they
    may be missing; what is in them comes over ``environment``. ``ignored`` says what systemd leaves out.
    ``edited``: the text is not as gpuops wrote it.
    """

    argv: tuple[str, ...] = ()
    prefix: str = ""  # "-", "@", ":", "+", "!" before the program
    commands: int = 0  # how many ExecStart remain; a service has one
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    environment_files: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    managed: bool = False
    profile: str | None = None
    edited: bool = False
    settings: tuple[Setting, ...] = ()

    @property
    def python(self) -> str | None:
        """The interpreter that ExecStart names; None when it names another program."""
        program = self.argv[0] if self.argv else ""
        return program if re.fullmatch(r"/(.*/)?python[0-9.]*", program) else None

    def values(self, section: str, key: str) -> tuple[str, ...]:
        """The values of one setting, those before an empty assignment left out."""
        found: list[str] = []
        for one in self.settings:
            if (one.section, one.key) == (section, key):
                found = [*found, one.value] if one.value else []
        return tuple(found)

    def value(self, section: str, key: str) -> str | None:
        """The last value of one setting; None when there is none."""
        found = self.values(section, key)
        return found[-1] if found else None


# Reading ---------------------------------------------------------------------------------------


def parse(text: str, drop_ins: Sequence[str] = ()) -> UnitText:
    """The service of a unit file and the texts of its drop-ins, in systemd's order. Never fails."""
    found: list[Setting] = []
    ignored: list[str] = []
    for each in (text, *drop_ins):
        of_this, stopped = settings(each)
        found += of_this
        ignored += [stopped] if stopped else []
    unit = UnitText(settings=tuple(found))
    unknown: list[str] = []
    environment = _environment(unit.values("Service", "Environment"), ignored, unknown)
    prefix, argv, commands = _command(unit.values("Service", "ExecStart"), environment, ignored, unknown)
    profile, edited = _marked(text)
    return msgspec.structs.replace(
        unit,
        argv=argv,
        prefix=prefix,
        commands=commands,
        environment=environment,
        environment_files=unit.values("Service", "EnvironmentFile"),
        unknown=tuple(dict.fromkeys(unknown)),
        ignored=tuple(ignored),
        managed=text.startswith(MARKER),
        profile=profile,
        edited=edited,
    )


def _environment(values: Iterable[str], ignored: list[str], unknown: list[str]) -> dict[str, str]:
    environment: dict[str, str] = {}
    for value in values:
        try:
            for word in split_words(value):
                text, specifiers = without_specifiers(word)
                unknown.extend(specifiers)
                if (pair := assignment(text)) is None:
                    ignored.append(f"Environment=: {clean(text)} is not NAME=value")
                else:
                    environment[pair[0]] = pair[1]
        except UnitProblem as problem:
            ignored.append(f"Environment=: {problem}")
    return environment


def _command(
    values: Sequence[str], environment: dict[str, str], ignored: list[str], unknown: list[str]
) -> tuple[str, tuple[str, ...], int]:
    """Prefixes, words and number of the commands."""
    prefix, commands = "", 0
    argv: tuple[str, ...] = ()
    for value in values:
        try:
            prefix, words, more = split_command(value)
        except UnitProblem as problem:
            ignored.append(f"ExecStart=: {problem}")
            continue
        commands += 2 if more else 1
        argv = _arguments(words, {} if ":" in prefix else environment, ":" in prefix, unknown)
    return prefix, argv, commands


def _arguments(
    words: Sequence[str], environment: dict[str, str], literal: bool, unknown: list[str]
) -> tuple[str, ...]:
    argv: list[str] = []
    for place, word in enumerate(words):
        text, specifiers = without_specifiers(word)
        unknown.extend(specifiers)
        if literal or place == 0:  # the program itself cannot be a variable
            argv.append(text)
            continue
        filled, names = expanded(text, environment)
        argv.extend(filled)
        unknown.extend(f"${name}" for name in names)
    return tuple(argv)


def _marked(text: str) -> tuple[str | None, bool]:
    """The profile that the first line names, and whether the text is another than was written."""
    if not text.startswith(MARKER):
        return None, False
    first, _, rest = text.partition("\n")
    found = _MARKED.match(first)
    if found is None:
        return None, True
    return found["profile"], first != _first_line(found["profile"], rest)


def _first_line(profile: str, rest: str) -> str:
    digest = hashlib.sha256(f"{profile}\n{rest}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"{MARKER}: profile {profile}, sha256 {digest[:16]}."


# Writing ---------------------------------------------------------------------------------------


def render(
    profile: Profile,
    *,
    python: str,
    description: str | None = None,
    environment_files: Sequence[str] = (),
    keep: UnitText | None = None,
) -> str:
    """The unit that serves ``profile`` with the interpreter ``python`` (absolute path).

    ``keep`` is the unit before, whose settings stay, except those in WRITTEN and DROPPED: user, limits,
    working directory, environment files, mounts it waits for, commands before and after, [Install].
    ``environment_files`` are added to its own. UnitProblem names what cannot be written.
    """
    keep = keep or UnitText()
    files = dict.fromkeys((*keep.environment_files, *(name.replace("%", "%%") for name in environment_files)))
    sections = {
        "Unit": _unit_section(profile, description, keep),
        "Service": [
            "Type=exec",
            *(_environment_line(name, value) for name, value in profile.env.items()),
            *(line("EnvironmentFile", name) for name in files),
            _command_lines(profile, python),
            # The engine's main process lets requests end and its workers give the cards' memory back
            # (tokenizer_manager.py, sigterm_watchdog). A SIGTERM to the workers as well, as with
            # control-group, would end them at once. What outlives the main process is killed by mixed, too.
            "KillMode=mixed",
            f"TimeoutStopSec={math.ceil(profile.load.stop_s)}",
            "Restart=on-failure",
            f"RestartSec={RESTART_S}",
            *_kept(keep, "Service", {"EnvironmentFile"}),
        ],
        "Install": _kept(keep, "Install", set()) or ["WantedBy=multi-user.target"],
    }
    for section in dict.fromkeys(one.section for one in keep.settings):
        if section not in sections:
            sections[section] = _kept(keep, section, set())
    rest = f"{_HINT}\n" + "".join(
        "\n".join(("", f"[{name}]", *lines, "")) for name, lines in sections.items()
    )
    return f"{_first_line(profile.name, rest)}\n{rest}"


def launch_argv(profile: Profile, python: str) -> tuple[str, ...]:
    """The command that serves the profile. UnitProblem for a flag set to False."""
    try:
        return (python, *LAUNCH, *profile.argv())
    except ValueError as problem:
        raise UnitProblem(str(problem)) from None


def _unit_section(profile: Profile, description: str | None, keep: UnitText) -> list[str]:
    words = clean(description or f"SGLang: {profile.title}")
    network = "network-online.target"
    ordered = {key: dict.fromkeys([network]) for key in ("Wants", "After")}
    for key, targets in ordered.items():
        targets.update(dict.fromkeys(word for value in keep.values("Unit", key) for word in value.split()))
    # A load that dies at its very end takes all of timeout_s: STARTS of them must fit, or it never stops.
    slowest = STARTS * (profile.load.timeout_s + RESTART_S)
    return [
        line("Description", words.replace("%", "%%")),
        *(f"{key}={' '.join(targets)}" for key, targets in ordered.items()),
        f"StartLimitIntervalSec={max(3600, math.ceil(slowest * 1.2))}",
        f"StartLimitBurst={STARTS}",
        *_kept(keep, "Unit", set(ordered)),
    ]


def _environment_line(name: str, value: str) -> str:
    check_text(f"env {name}", value)
    return line("Environment", quote(f"{name}={value}"))


def _command_lines(profile: Profile, python: str) -> str:
    """ExecStart with one flag a line, so that a difference is a line."""
    check_text("python", python)
    if not python.startswith("/") or _REFUSED_IN_PROGRAM.search(python):
        raise UnitProblem(
            f"python: expected an absolute path without quotes, backslashes and $, found {clean(python)}"
        )
    lines = [" ".join(map(quote_argument, (python, *LAUNCH)))]
    for flag, value in profile.args.items():
        if value is False:
            raise UnitProblem(f"{flag}: false; leave the flag out instead")
        words = () if value is True else (value,) if isinstance(value, str) else value
        for word in words:
            check_text(flag, word)
        lines.append(" ".join(map(quote_argument, (f"--{flag}", *words))))
    return "ExecStart=" + " \\\n    ".join(lines)


def _kept(keep: UnitText, section: str, besides: set[str]) -> list[str]:
    """The settings of the unit before that stay, in their order and as they were written."""
    gone = WRITTEN.get(section, frozenset()) | besides | (DROPPED if section == "Service" else frozenset())
    return [
        line(one.key, one.value) for one in keep.settings if one.section == section and one.key not in gone
    ]


def dropped(keep: UnitText) -> tuple[str, ...]:
    """The settings of the unit before that would be lost because they do not fit, as ``Key=value``."""
    return tuple(
        clean(f"{one.key}={one.value}")
        for one in keep.settings
        if one.section == "Service" and one.key in DROPPED and one.value
    )
