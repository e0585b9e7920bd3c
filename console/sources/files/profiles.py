"""Profile files: one model each, shipped beside the package or written by the operator."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from console.model import profile as rules
from console.model.profile import PROFILE_SCHEMA, Expect, FlagValue, Load, Profile, Reference
from console.model.site import path_rule
from console.sources.files.content import read_bytes
from console.sources.files.document import read_document
from console.sources.files.nodes import Mapping, Node, Refused, Scalar, Sequence
from console.sources.files.problems import FileError, FileProblem, Problems, shown
from console.sources.files.schema import check_schema
from console.sources.files.table import AMBIGUOUS, Table

#: No load takes longer than a day.
LONGEST_S = 86_400.0

_NEGATIVE = re.compile(r"-[0-9]+(\.[0-9]+)?")


class ProfileSet(msgspec.Struct, frozen=True):
    """The profiles of some directories: those with a key first, by key, then the others by name.

    A file with problems is not among them, and hides none of the others.
    ``paths`` are the files by profile name.
    """

    profiles: tuple[Profile, ...] = ()
    problems: tuple[FileProblem, ...] = ()
    paths: dict[str, str] = msgspec.field(default_factory=dict)

    def named(self, name: str) -> Profile | None:
        return next((profile for profile in self.profiles if profile.name == name), None)

    def keyed(self, key: int) -> Profile | None:
        return next((profile for profile in self.profiles if profile.key == key), None)


def shipped_profiles_directory() -> Path:
    """Where the shipped profiles are: inside an installed package, beside it in a source tree."""
    package = Path(__file__).parents[2]
    installed = package / "_data" / "profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def load_profile(path: Path) -> Profile:
    """The profile in a file. Raises FileError with every problem in it."""
    return parse_profile(read_bytes(path), path)


def load_profiles(directories: Iterable[Path]) -> ProfileSet:
    """All profiles (``*.yaml``, ``*.yml``) of the directories, in their order. Never raises.

    Of two profiles with one name the first stays; of two with one key both
    stay, the second without its key. Either is a problem that names both files.
    """
    gathered = _Gathered()
    for directory in directories:
        for path in gathered.files(directory):
            try:
                gathered.take(load_profile(path), path)
            except FileError as error:
                gathered.problems.extend(error.problems)
    return gathered.result()


class _Gathered:
    """Profiles as they come, and what stands between them."""

    def __init__(self) -> None:
        self.problems: list[FileProblem] = []
        self._profiles: dict[str, Profile] = {}
        self._paths: dict[str, str] = {}
        self._seen: set[str] = set()

    def files(self, directory: Path) -> list[Path]:
        """The directory's profile files by name, without any that was met before."""
        try:
            found = sorted(
                path
                for path in directory.iterdir()
                if path.suffix in (".yaml", ".yml") and not path.name.startswith(".")
            )
        except OSError as problem:
            self._tell(directory, f"cannot read this directory of profiles: {problem.strerror}")
            return []
        # Two directories may be one, by a link or by being named twice.
        real = {os.path.realpath(path): path for path in found}
        new = [path for place, path in real.items() if place not in self._seen]
        self._seen.update(real)
        return new

    def take(self, profile: Profile, path: Path) -> None:
        if profile.name in self._profiles:
            other = shown(self._paths[profile.name], 200)
            self._tell(path, f"name: {profile.name} is the name of {other} too; rename one")
            return
        rival = next((p for p in self._profiles.values() if p.key is not None and p.key == profile.key), None)
        if rival is not None:
            other = shown(self._paths[rival.name], 200)
            self._tell(path, f"key: {profile.key} is the key of {other} too; change one")
            profile = msgspec.structs.replace(profile, key=None)
        self._profiles[profile.name] = profile
        self._paths[profile.name] = str(path)

    def result(self) -> ProfileSet:
        ordered = sorted(self._profiles.values(), key=lambda p: (p.key is None, p.key or 0, p.name))
        return ProfileSet(tuple(ordered), tuple(self.problems), self._paths)

    def _tell(self, path: Path, message: str) -> None:
        self.problems.append(FileProblem(str(path), 1, 1, message))


def parse_profile(content: str | bytes, path: Path | str) -> Profile:
    """The profile a text describes; ``path`` is its name in messages. Raises FileError."""
    problems = Problems(path)
    root = Table(read_document(content, problems), problems)
    check_schema(root, PROFILE_SCHEMA)
    root.only(*Profile.__struct_fields__)
    root.require("name", "args")
    name = root.text("name", rules.name_rule) or ""
    args = _args(root)
    profile = Profile(
        name=name,
        title=root.text("title") or name,
        key=root.whole("key", 1, 9),
        python=root.optional_text("python", path_rule),
        sglang=root.optional_text("sglang", rules.versions_rule),
        args=args,
        env=_env(root),
        load=_load(root),
        reference=_reference(root),
        expect=_expect(root, args),
        notes=root.paragraphs("notes"),
    )
    problems.raise_if_any()
    return profile


def _args(root: Table) -> dict[str, FlagValue]:
    table = root.table("args")
    if table is None:
        if isinstance(node := root.node("args"), Scalar) and node.null:
            root.expected("args", node, "flags, model-path among them")
        return {}
    table.require("model-path")
    if isinstance(node := table.node("model-path"), Scalar) and node.plain and node.text == "true":
        table.expected("model-path", node, "a path or a model's name")
    table.text("served-model-name", rules.served_name_rule)
    return _flags(table)


def _flags(table: Table) -> dict[str, FlagValue]:
    table.check_keys(rules.flag_rule)
    return table.gather(_flag_value)


def _flag_value(table: Table, flag: str, node: Node) -> FlagValue | None:
    if isinstance(node, Refused):
        return None
    if rules.holds_secret(flag):
        table.tell(flag, node, _NO_SECRETS)
    elif isinstance(node, Mapping):
        table.tell(flag, node, "expected one value or a list, found a mapping; write JSON in quotes")
    elif isinstance(node, Sequence):
        return _flag_values(table, flag, node)
    elif node.plain and node.text == "true":
        return True
    elif node.plain and node.text == "false":
        table.tell(flag, node, "false would pass nothing; remove the line to leave the flag out")
    elif node.null:
        table.tell(flag, node, "expected a value, found nothing; write true for a bare flag")
    elif node.plain and node.text in AMBIGUOUS:
        found = node.text
        table.tell(flag, node, f'{found} may mean two things; write true for a bare flag, or "{found}"')
    else:
        return _one_value(table, flag, node)
    return None


def _flag_values(table: Table, flag: str, node: Sequence) -> FlagValue | None:
    if not node.items:
        table.expected(flag, node, "at least one value in the list")
    values = tuple(_one_value(table, flag, item) for item in node.items)
    return tuple(value for value in values if value is not None)


def _one_value(table: Table, flag: str, node: Node) -> str | None:
    text = table.text_of(flag, node)
    if text is None or not text.startswith("-") or _NEGATIVE.fullmatch(text):
        return text
    table.tell(flag, node, f"expected a value, found {shown(text)}, which would be read as a flag")
    return None


def _env(table: Table) -> dict[str, str]:
    below = table.table("env")
    if below is None:
        return {}
    below.check_keys(rules.variable_rule)
    return below.gather(_variable)


def _variable(table: Table, variable: str, node: Node) -> str | None:
    if rules.holds_secret(variable) and not isinstance(node, Refused):
        table.tell(variable, node, _NO_SECRETS)
        return None
    return table.text_of(variable, node)


_NO_SECRETS = (
    "a key or password must not stand in this file; keep it in a file only root can read, "
    "and give it to the service with EnvironmentFile= in its unit, to this console with service.api_key_file"
)


def _load(root: Table) -> Load:
    default = Load()
    table = root.table("load", *Load.__struct_fields__)
    if table is None:
        return default
    expect = table.number("expect_s", 1, LONGEST_S)
    timeout, stop = default.timeout_s, default.stop_s
    if "timeout_s" in table.mapping.entries:
        timeout = table.number("timeout_s", 1, LONGEST_S) or LONGEST_S
    if "stop_s" in table.mapping.entries:
        stop = table.number("stop_s", 1, LONGEST_S) or LONGEST_S
    if expect is not None and expect >= timeout:
        node = table.node("expect_s")
        table.tell("expect_s", node, f"expected less than timeout_s, {timeout:g}, found {expect:g}")
    return Load(expect, timeout, stop)


def _reference(root: Table) -> Reference | None:
    table = root.table("reference", *Reference.__struct_fields__)
    if table is None:
        return None
    args, results = table.table("args"), table.table("results")
    return Reference(
        args={} if args is None else _flags(args),
        env=_env(table),
        results={} if results is None else _results(results),
    )


def _results(table: Table) -> dict[str, float]:
    table.check_keys(rules.variable_rule)
    return table.gather(lambda table, name, node: table.number(name))


def _expect(root: Table, args: dict[str, FlagValue]) -> Expect:
    table = root.table("expect", *Expect.__struct_fields__)
    given = args.get("served-model-name")
    if table is None:
        return Expect()
    served = table.optional_text("served_name", rules.served_name_rule)
    if served is not None and isinstance(given, str) and served != given:
        node = table.node("served_name")
        table.tell("served_name", node, f"expected {shown(given)} as in args, found {shown(served)}")
    return Expect(
        tool_calls=table.flag("tool_calls") or False,
        reasoning=table.flag("reasoning") or False,
        accept_length_min=table.number("accept_length_min", 1, 64),
        served_name=served,
    )
