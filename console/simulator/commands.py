"""The programs that the box knows: what each prints for its arguments, and its exit status."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from console.simulator import file_programs, flag_program, python_program
from console.simulator.clients import Clients
from console.simulator.journal import Entry, Journal
from console.simulator.kernel import Kernel
from console.simulator.machine import CONTAINER, KERNEL
from console.simulator.nvml import NvmlStream
from console.simulator.proxmox import Proxmox
from console.simulator.service import EngineService
from console.simulator.systemd import Manager, Unit, timestamp

#: What a shell answers for a program that is not there.
NOT_FOUND = 127


class Output(Protocol):
    """Where a command speaks, and what it reads."""

    stdin: str

    async def out(self, text: str) -> None: ...

    async def err(self, text: str) -> None: ...


class Machine(msgspec.Struct, frozen=True):
    """The host or the container: its systemd, its journal, its files."""

    hostname: str
    manager: Manager
    journal: Journal
    files: Path
    service: EngineService | None = None  # the engine's unit, where it is


class Host(msgspec.Struct, frozen=True):
    """All that commands can reach."""

    host: Machine
    container: Machine
    nvml: NvmlStream
    proxmox: Proxmox
    clients: Clients
    kernel: Kernel
    kill: Callable[[int], bool]  # a process that is none of the engine's


Program = Callable[[Host, Machine, Sequence[str], Output], Awaitable[int]]


async def run(box: Host, argv: Sequence[str], output: Output) -> int:
    """Run a command on the host; its exit status."""
    if any(word.endswith("nvml_worker.py") for word in argv):
        worker = box.clients.worker(time.time())
        try:
            return await box.nvml.run(output)
        finally:
            box.clients.worker_ended(worker)
    return await _run(box, box.host, argv, output)


async def _run(box: Host, machine: Machine, argv: Sequence[str], output: Output) -> int:
    words = list(argv)
    if words and words[0].rpartition("/")[2] == "env":
        words = words[1:]
        while words and "=" in words[0]:
            words = words[1:]
    if not words:
        return 0
    name = words[0].rpartition("/")[2]
    if machine is box.host and name in ("dd", "cat"):
        written = await box.kernel.program(name, words[1:], output.stdin, output)
        if written is not None:
            return written
    filed = file_programs.answer(name, words[1:], machine.files, output.stdin)
    if filed is not None:
        status, out, err = filed
        await output.out(out)
        await output.err(err)
        return status
    program = _PROGRAMS.get(name)
    if program is None or (machine is box.container and name in _HOST_ONLY):
        await output.err(f"{words[0]}: command not found\n")
        return NOT_FOUND
    return await program(box, machine, words[1:], output)


# systemctl -------------------------------------------------------------------------------------


async def _systemctl(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    options, rest = _options(
        words, frozenset({"-p", "--property", "-t", "--type", "-n", "-o", "--output", "-P"})
    )
    if not rest:
        await output.err("systemctl: a command is wanted\n")
        return 1
    verb, names = rest[0], rest[1:]
    quiet = "--no-block" in options
    match verb:
        case "show":
            return await _show(machine, names, options, output)
        case "start" | "stop" | "restart" | "try-restart":
            return await _job(box, machine, verb, names, quiet, output)
        case "is-system-running":
            await output.out("running\n")
            return 0
        case "daemon-reload":
            return await _reload(machine, output)
        case "reset-failed":
            return await _reset_failed(machine, names, output)
        case "is-active" | "is-failed" | "is-enabled":
            return await _is(machine, verb, names, output)
        case "enable" | "disable":
            return await _enable(machine, verb, names, output)
        case "cat":
            return await _cat_unit(machine, names, output)
    await output.err(f"Unknown command verb '{verb}'.\n")
    return 1


async def _reset_failed(machine: Machine, names: Sequence[str], output: Output) -> int:
    """systemd keeps no unit in memory that has ended well and that nothing wants."""
    for name in names:
        unit = machine.manager.get(name)
        if unit is None or (
            unit.active_state == "inactive" and unit.properties.get("UnitFileState") == "disabled"
        ):
            await output.err(f"Failed to reset failed state of unit {name}: Unit {name} not loaded.\n")
            return 1
    if machine.service is not None:
        machine.service.reset_failed()
    return 0


async def _reload(machine: Machine, output: Output) -> int:
    if machine.service is None:
        return 0
    try:
        machine.service.reload()
    except (OSError, UnicodeDecodeError) as problem:
        await output.err(f"Failed to reload daemon: {problem}\n")
        return 1
    return 0


async def _show(machine: Machine, names: Sequence[str], options: dict[str, list[str]], output: Output) -> int:
    asked = [*options.get("-p", []), *options.get("--property", [])]
    wanted = frozenset(name for value in asked for name in value.split(",")) if asked else None
    unix_times = options.get("--timestamp", ["pretty"])[-1] == "unix"
    await output.out(machine.manager.show(names, wanted, unix_times))
    return 0


async def _job(
    box: Host, machine: Machine, verb: str, names: Sequence[str], no_block: bool, output: Output
) -> int:
    status = 0
    for name in names:
        unit = machine.manager.get(name)
        if unit is None:
            await output.err(f"Failed to {verb} {_full(name)}: Unit {_full(name)} not found.\n")
            status = 5
            continue
        service = machine.service
        if service is None or service.unit is not unit:
            _switch(unit, verb)
            if machine is box.host:
                box.clients.switched(unit, verb)
            continue
        task = {"start": service.start, "stop": service.stop}.get(verb, service.restart)()
        if no_block:
            continue
        code, words = await asyncio.shield(task)
        if words:
            await output.err(words)
        status = status or code
    return status


def _switch(unit: Unit, verb: str) -> None:
    """A unit with nothing behind it changes its state at once."""
    now = time.time()
    if verb == "stop":
        unit.state("inactive", "dead", now)
        unit.main_pid = 0
        return
    if verb == "restart" or unit.active_state != "active":
        unit.exec_pid += 4_001
        unit.main_pid, unit.started_at = unit.exec_pid, now
        unit.state("active", "running", now)


async def _is(machine: Machine, verb: str, names: Sequence[str], output: Output) -> int:
    good = False
    for name in names:
        unit = machine.manager.get(name)
        if verb == "is-enabled":
            word = unit.properties.get("UnitFileState", "enabled") if unit else "not-found"
            good = good or word == "enabled"
        else:
            word = unit.active_state if unit else "inactive"
            good = good or word == ("active" if verb == "is-active" else "failed")
        await output.out(f"{word}\n")
    return 0 if good else {"is-active": 3, "is-failed": 1}.get(verb, 1)


async def _enable(machine: Machine, verb: str, names: Sequence[str], output: Output) -> int:
    for name in names:
        unit = machine.manager.get(name)
        if unit is None:
            await output.err(f"Failed to {verb} unit: Unit file {_full(name)} does not exist.\n")
            return 1
        unit.properties["UnitFileState"] = f"{verb}d"
    return 0


async def _cat_unit(machine: Machine, names: Sequence[str], output: Output) -> int:
    for name in names:
        unit = machine.manager.get(name)
        paths = [] if unit is None else [unit.properties.get("FragmentPath", "")]
        if unit is not None:
            paths += unit.properties.get("DropInPaths", "").split()
        found = [path for path in paths if path and (machine.files / path.lstrip("/")).is_file()]
        if not found:
            await output.err(f"No files found for {_full(name)}.\n")
            return 1
        for place, path in enumerate(found):
            text = (machine.files / path.lstrip("/")).read_text(encoding="utf-8")
            await output.out(f"{'' if place == 0 else chr(10)}# {path}\n{text}")
    return 0


def _full(name: str) -> str:
    return name if "." in name else f"{name}.service"


# journalctl ------------------------------------------------------------------------------------

_JOURNAL_VALUES = frozenset(
    {
        "-o",
        "--output",
        "-n",
        "--lines",
        "-u",
        "--unit",
        "--output-fields",
        "--after-cursor",
        "--cursor",
        "-c",
        "--since",
        "-S",
        "--until",
        "-U",
        "-t",
        "--identifier",
        "-p",
        "--priority",
        "-g",
        "--grep",
    }
)


async def _journalctl(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    options, matches = _options(words, _JOURNAL_VALUES, optional=frozenset({"-n", "--lines"}))

    def last(*names: str) -> str | None:
        return next((options[name][-1] for name in names if name in options), None)

    journal = machine.journal
    wanted = _filter(machine, options, matches)
    render = _renderer(journal, last("-o", "--output") or "short", last("--output-fields"))
    if render is None:
        await output.err(f"Unknown output format '{last('-o', '--output')}'.\n")
        return 1
    cursor = last("--after-cursor") or last("--cursor", "-c")
    after = 0
    if cursor is not None:
        found = journal.sequence_of(cursor)
        if found is None:
            await output.err("Failed to seek to cursor: Invalid argument\n")
            return 1
        after = found if "--after-cursor" in options else found - 1
    since = last("--since", "-S")
    if since is not None:
        moment = _moment(since)
        if moment is None:
            await output.err(f"Failed to parse timestamp: {since}\n")
            return 1
        entries = [entry for entry in journal if entry.at >= moment]
        after = max(after, entries[0].sequence - 1 if entries else journal.last)
    follow = "-f" in options or "--follow" in options
    lines = _line_count(
        last("-n", "--lines"), follow and cursor is None and since is None and "--no-tail" not in options
    )
    past = [entry for entry in journal.since(after) if wanted(entry)]
    if lines is not None and cursor is None:
        past = past[len(past) - min(lines, len(past)) :]
    elif lines is not None:
        past = past[:lines]
    end = journal.last
    for start in range(0, len(past), 256):
        await output.out("".join(map(render, past[start : start + 256])))
    if not past and not follow:
        await output.err("-- No entries --\n")
    if follow:
        async for entry in journal.follow(end, wanted):
            await output.out(render(entry))
    return 0


def _line_count(value: str | None, tail: bool) -> int | None:
    if value is None:
        return 10 if tail else None
    if value == "all":
        return None
    return int(value.lstrip("+")) if value.lstrip("+").isdigit() else 10


def _filter(
    machine: Machine, options: dict[str, list[str]], matches: Sequence[str]
) -> Callable[[Entry], bool]:
    units = {_full(name) for key in ("-u", "--unit") for name in options.get(key, [])}
    identifiers = {name for key in ("-t", "--identifier") for name in options.get(key, [])}
    kernel = "-k" in options or "--dmesg" in options
    priority = next((int(v) for k in ("-p", "--priority") for v in options.get(k, []) if v.isdigit()), 7)
    fields = [match.partition("=")[::2] for match in matches if "=" in match]
    journal = machine.journal

    def wanted(entry: Entry) -> bool:
        if units and entry.unit not in units and entry.about not in units:
            return False
        if kernel != (entry.transport == "kernel") and kernel:
            return False
        if identifiers and entry.identifier not in identifiers:
            return False
        if entry.priority > priority:
            return False
        if fields:
            found = journal.fields(entry)
            return all(str(found.get(name)) == value for name, value in fields)
        return True

    return wanted


def _renderer(journal: Journal, kind: str, chosen: str | None) -> Callable[[Entry], str] | None:
    always = ("__CURSOR", "__REALTIME_TIMESTAMP", "__MONOTONIC_TIMESTAMP", "_BOOT_ID")
    keep = frozenset((*always, *chosen.split(","))) if chosen else None

    def as_json(entry: Entry) -> str:
        fields = journal.fields(entry)
        if keep is not None:
            fields = {name: value for name, value in fields.items() if name in keep}
        return msgspec.json.encode(fields).decode() + "\n"

    def as_text(entry: Entry) -> str:
        stamp = time.strftime("%b %d %H:%M:%S", time.gmtime(entry.at))
        source = entry.identifier if entry.transport == "kernel" else f"{entry.identifier}[{entry.pid}]"
        return f"{stamp} {journal.hostname} {source}: {entry.message}\n"

    def as_cat(entry: Entry) -> str:
        return f"{entry.message}\n"

    return {"json": as_json, "short": as_text, "cat": as_cat}.get(kind)


def _moment(text: str) -> float | None:
    """Unix seconds of ``@1795996714.5``, ``-5min`` (and s, h, d) or ``2026-11-30 00:12:40``."""
    if re.fullmatch(r"@\d+(\.\d+)?", text):
        return float(text[1:])
    relative = re.fullmatch(r"-(\d+)\s*(s|sec|m|min|h|hour|hours|d|day|days)?(?: ago)?", text)
    if relative is not None:
        unit = {"m": 60, "h": 3600, "d": 86400}.get((relative[2] or "s")[0], 1)
        return time.time() - int(relative[1]) * unit
    try:
        return time.mktime(time.strptime(text.removesuffix(" UTC"), "%Y-%m-%d %H:%M:%S")) - time.timezone
    except ValueError:
        return None


# Guests ----------------------------------------------------------------------------------------


async def _lxc_attach(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    head = list(words)
    command: list[str] = []
    if "--" in head:
        place = head.index("--")
        head, command = head[:place], head[place + 1 :]
    options, _ = _options(head, frozenset({"-n", "--name", "-P", "-s", "-u", "-g"}))
    name = next((options[key][-1] for key in ("-n", "--name") if key in options), None)
    if name != str(CONTAINER):
        await output.err(
            f"lxc-attach: {name}: ../src/lxc/attach.c: get_attach_context: 406 Connection refused - "
        )
        await output.err("Failed to get init pid\n")
        return 1
    return await _run(box, box.container, command, output)


async def _pct(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    if len(words) >= 2 and words[0] == "exec" and words[1] == str(CONTAINER):
        command = list(words[2:])
        return await _run(box, box.container, command[1:] if command[:1] == ["--"] else command, output)
    return await box.proxmox.pct(words, output)


async def _qm(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    return await box.proxmox.qm(words, output)


async def _pvesh(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    return await box.proxmox.pvesh(words, output)


async def _nvidia_smi(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    return await _told(box.clients.nvidia_smi(words), output)


async def _nvidia_modprobe(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    return await _told(box.clients.nvidia_modprobe(words), output)


async def _modprobe(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    return await _told(box.kernel.modprobe(words), output)


async def _told(answer: tuple[int, str, str], output: Output) -> int:
    status, out, err = answer
    await output.out(out)
    await output.err(err)
    return status


# Small ones ------------------------------------------------------------------------------------


async def _hostname(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    await output.out(f"{machine.hostname}\n")
    return 0


async def _uname(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    await output.out(f"{KERNEL}\n" if "-r" in words else "Linux\n")
    return 0


async def _kill(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    status = 0
    for word in words:
        if not word.startswith("-") and not (word.isdigit() and box.kill(int(word))):
            await output.err(f"kill: ({word}) - No such process\n")
            status = 1
    return status


async def _python(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    """The engine's own interpreter, asked about the engine's main process or about its SGLang."""
    if flag_program.asks(words, output.stdin):
        status, out, err = flag_program.answer(words[-1], machine is box.container)
        await output.out(out)
        await output.err(err)
        return status
    run = box.container.service.processes() if box.container.service is not None else None
    asked = run is not None and str(run.inner_main) in words
    process = box.host.files / "proc" / str(run.main) if run is not None and asked else None
    status, out, err = python_program.answer(words, machine.files, process)
    await output.out(out)
    await output.err(err)
    return status


async def _true(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    return 0


async def _date(box: Host, machine: Machine, words: Sequence[str], output: Output) -> int:
    await output.out(f"{timestamp(time.time(), False)}\n")
    return 0


_PROGRAMS: dict[str, Program] = {
    "systemctl": _systemctl,
    "journalctl": _journalctl,
    "lxc-attach": _lxc_attach,
    "pct": _pct,
    "qm": _qm,
    "pvesh": _pvesh,
    "nvidia-smi": _nvidia_smi,
    "nvidia-modprobe": _nvidia_modprobe,
    "modprobe": _modprobe,
    "hostname": _hostname,
    "uname": _uname,
    "kill": _kill,
    "python": _python,
    "true": _true,
    "date": _date,
}

_HOST_ONLY = frozenset({"lxc-attach", "pct", "qm", "pvesh", "nvidia-modprobe", "modprobe"})


def _options(
    words: Sequence[str], with_value: frozenset[str], optional: frozenset[str] = frozenset()
) -> tuple[dict[str, list[str]], list[str]]:
    """Options with their values, and the other words. ``--`` ends the options.

    ``optional`` ones take the next word only when it is a number or ``all``.
    """
    options: dict[str, list[str]] = {}
    rest: list[str] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if word == "--":
            return options, [*rest, *pending]
        if not word.startswith("-") or word == "-":
            rest.append(word)
            continue
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            name, value, equals = word[:2], word[2:], word[2:]
        if equals:
            options.setdefault(name, []).append(value)
        elif (
            name in with_value
            and pending
            and (name not in optional or re.fullmatch(r"\+?\d+|all", pending[0]))
        ):
            options.setdefault(name, []).append(pending.pop(0))
        else:
            options.setdefault(name, []).append("")
    return options, rest
