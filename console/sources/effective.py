"""What one service really runs with: its process, its unit's files, its Python and its engine, read once.

The process is read from the host's /proc, where those of a container are seen, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from console.model.command_line import (
    CommandLine,
    Naming,
    hidden,
    hidden_environment,
    parse_command_line,
    starts_engine,
)
from console.model.configuration import BY_PROCESS, Effective, File, Interpreter, Place
from console.model.profile import FlagValue
from console.model.text import clean
from console.model.unit import UnitStatus
from console.model.unit_file import UnitDefinition, read_unit, split_cat
from console.sources import service_python
from console.sources.connect import Sources
from console.sources.engine.fields import mapping, parse_json
from console.sources.engine.sources import describe
from console.sources.processes import Process, ProcessProblem, engine_process
from console.sources.source import Unavailable
from console.transport.files import FileProblem, read_text

#: Seconds for one command, and for the engine's own word, which is a round trip through its scheduler.
_DEADLINE = 5.0
_ENGINE_DEADLINE = 5.0


async def read_effective(
    sources: Sources, container: int | None, names: Callable[[str | None], Naming]
) -> Effective:
    """One reading of everything. Never raises: what could not be read is named in ``problems``.

    ``names`` gives, for the version that runs (None: unknown), how flags are named there.
    """
    problems: dict[str, str] = {}
    engine = asyncio.create_task(_engine(sources, problems))
    try:
        unit = await sources.unit.read()
    except Unavailable as problem:
        problems["unit"] = str(problem)
        return Effective(basis="none", engine=await engine, problems=problems)
    definition, texts = await _definition(sources, unit, problems)
    process = await _process(sources, unit, container, problems)
    python = await _python(sources, process, problems)
    info = await engine
    naming = names(_version(info))
    planned = parse_command_line(definition.command, naming)
    config_file: str | None = None
    config_flags: dict[str, FlagValue] = {}
    if process is not None:
        config_file, config_flags = await _config(sources, process, naming, problems)
    command, where = _command(process, planned, definition, naming, problems)
    return Effective(
        basis="process" if process is not None else "unit" if definition.command else "none",
        unit=unit,
        command=command,
        command_where=where,
        next_command=planned if definition.command else None,
        next_where=definition.command_where,
        pid=None if process is None else process.pid,
        config_file=config_file,
        config_flags=config_flags,
        environment=_environment(process, definition),
        set_by_unit=_set_by_unit(definition),
        python=python,
        files=await _written(sources, (*(path for path, _ in texts), *_start_up(python)), problems),
        engine=info,
        engine_version=_version(info),
        problems=problems,
    )


def _command(
    process: Process | None,
    planned: CommandLine,
    definition: UnitDefinition,
    naming: Naming,
    problems: dict[str, str],
) -> tuple[CommandLine, str]:
    """The flags: of the process; of its unit when there is none, or when it has overwritten its own."""
    where = definition.command_where or "unit"
    if process is None:
        return planned, where
    command = parse_command_line(process.argv, naming)
    if command.flags or not planned.flags:
        return command, BY_PROCESS
    problems["process"] = "the process has overwritten its argument list; its unit's command is compared"
    return planned, where


# The unit --------------------------------------------------------------------------------------


async def _definition(
    sources: Sources, unit: UnitStatus, problems: dict[str, str]
) -> tuple[UnitDefinition, tuple[tuple[str, str], ...]]:
    """What the unit's files say, and the files; empty with a problem when they cannot be read."""
    if unit.load_state != "loaded":
        problems["unit"] = f"{unit.id} is {unit.load_state}"
        return UnitDefinition(), ()
    result = await sources.service.run(["systemctl", "cat", "--", unit.id], deadline=_DEADLINE)
    if not result.ok:
        problems["files"] = f"the files of {unit.id} cannot be read: {clean(result.reason)}"
        return UnitDefinition(), ()
    known = tuple(path for path in (unit.fragment_path, *unit.drop_in_paths) if path)
    texts = split_cat(result.stdout.decode("utf-8", "backslashreplace"), known)
    named = read_unit(texts, {}).environment_files
    found: dict[str, str] = {}
    for name, _ in named:
        path = name.lstrip("-")
        try:
            text = await read_text(sources.service, path)
        except FileProblem as problem:
            problems["files"] = clean(str(problem))
            continue
        if text is not None:
            found[path] = text
        elif not name.startswith("-"):
            problems["files"] = f"{clean(path)}: named by EnvironmentFile=, and not there"
    return read_unit(texts, found), (*texts, *((path, "") for path in found))


def _set_by_unit(definition: UnitDefinition) -> dict[str, tuple[Place, ...]]:
    places: dict[str, tuple[Place, ...]] = {}
    for one in definition.assignments:
        value = str(hidden(one.name, one.value))
        places[one.name] = (*places.get(one.name, ()), Place(clean(one.where), value))
    return places


async def _written(sources: Sources, paths: tuple[str, ...], problems: dict[str, str]) -> tuple[File, ...]:
    """When each file was last written, following links."""
    if not paths:
        return ()
    result = await sources.service.run(["stat", "-L", "-c", "%Y", "--", *paths], deadline=_DEADLINE)
    lines = result.stdout.decode("ascii", "replace").split()
    if not result.ok or len(lines) != len(paths) or not all(line.isdigit() for line in lines):
        problems["times"] = f"when the files were written is not known: {clean(result.reason)}"
        return tuple(File(clean(path)) for path in paths)
    return tuple(File(clean(path), float(line)) for path, line in zip(paths, lines, strict=True))


# The process -----------------------------------------------------------------------------------


async def _process(
    sources: Sources, unit: UnitStatus, container: int | None, problems: dict[str, str]
) -> Process | None:
    if unit.main_pid is None:
        if "unit" not in problems:
            problems["process"] = f"{unit.id} is {unit.active_state}: no process of it runs"
        return None
    try:
        process = await asyncio.to_thread(
            engine_process, sources.host.root, unit.main_pid, unit.control_group, container, starts_engine
        )
    except ProcessProblem as problem:
        problems["process"] = str(problem)
        return None
    if process.environ is None:
        problems["environment"] = process.problem or "the process's environment cannot be read"
    return process


def _environment(process: Process | None, definition: UnitDefinition) -> dict[str, str] | None:
    """The initial environment of the process; of a unit that does not run, what its files would give it."""
    if process is None:
        return hidden_environment({one.name: one.value for one in definition.assignments})
    return None if process.environ is None else hidden_environment(process.environ)


async def _python(sources: Sources, process: Process | None, problems: dict[str, str]) -> Interpreter | None:
    if process is None or process.environ is None:
        problems["python"] = "the service's Python is asked only while its process runs and can be read"
        return None
    command = parse_command_line(process.argv)
    program = command.program or ""
    if "python" not in program.rpartition("/")[2]:
        problems["python"] = f"the process's program is {clean(program) or 'unknown'}, not a Python"
        return None
    try:
        return await service_python.ask(
            sources.service,
            program=program,
            options=command.interpreter_options,
            pid=process.inner_pid,
            given=process.environ.get(service_python.NO_CARDS),
        )
    except service_python.NoAnswer as problem:
        problems["python"] = clean(str(problem))
        return None


def _start_up(python: Interpreter | None) -> tuple[str, ...]:
    return () if python is None else tuple(python.loaded.values())


async def _config(
    sources: Sources, process: Process, naming: Naming, problems: dict[str, str]
) -> tuple[str | None, dict[str, FlagValue]]:
    """The flags of ``--config FILE``: YAML whose keys are flags (sglang/srt/utils)."""
    given = parse_command_line(process.argv, naming).flags.get("config")
    if not isinstance(given, str):
        return None, {}
    import yaml

    path = given if given.startswith("/") else None
    try:
        if path is None:
            raise FileProblem(f"{given}: a relative path; the process's own folder is not looked in")
        text = await read_text(sources.service, path)
        if text is None:
            raise FileProblem(f"{given}: not there")
        found = yaml.safe_load(text)
        if not isinstance(found, dict) or not all(map(_plain, found.values())):
            raise FileProblem(f"{given}: not a mapping of flags to values")
    except (FileProblem, yaml.YAMLError, RecursionError, ValueError) as problem:
        problems["config"] = clean(f"--config {problem}".replace("\n", " "))
        return clean(given), {}
    words: list[str] = []
    for key, value in found.items():
        words += _as_words(str(key).replace("_", "-"), value)
    return clean(given), parse_command_line(words, naming).flags


def _plain(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return not any(isinstance(one, dict | list) for one in values)


def _as_words(flag: str, value: object) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{flag}"]
    values = value if isinstance(value, list) else [value]
    return [f"--{flag}", *map(str, values)]


# The engine ------------------------------------------------------------------------------------


async def _engine(sources: Sources, problems: dict[str, str]) -> dict[str, Any] | None:
    """``/server_info``: the resolved arguments; ``/get_server_info`` before 0.5.8."""
    for path in ("/server_info", "/get_server_info"):
        answer = await sources.client.get(path, _ENGINE_DEADLINE)
        if answer.probe.status != 404:
            break
    found = dict(mapping(parse_json(answer.body))) if answer.probe.ok else {}
    if not found:
        problems["engine"] = describe(answer.probe) if not answer.probe.ok else f"{path}: no JSON object"
        return None
    return found


def _version(info: dict[str, Any] | None) -> str | None:
    version = None if info is None else info.get("version")
    return clean(version)[:64] if isinstance(version, str) and version else None
