"""What the service's own Python sees after sitecustomize: asked of that interpreter, in its own machine.

Variables that Python code sets do not show in /proc/PID/environ, which keeps the process's initial
ones (proc_pid_environ(5)). So the interpreter is started once more as the process was: its options,
its initial environment, its user and its working directory, and no card.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import msgspec

from console.model.command_line import hidden_environment
from console.model.configuration import Interpreter
from console.model.engine_facts import ENGINE_VARIABLES
from console.model.text import clean
from console.transport.runner import Result, Runner

#: Seconds for one start of the interpreter. Without packages it takes 0.02; a sitecustomize may import some.
DEADLINE = 10.0

#: No card for whoever imports torch at the start, and no question of which are there.
NO_CARDS = "CUDA_VISIBLE_DEVICES"

# The first program runs isolated and without site, so nothing of the service's is imported by it. It takes
# the process's environment from /proc, where it is, so that no key stands on a command line; becomes the
# process's user, whose files the start-up files may be; and turns into the interpreter that is asked.
# Its words: pid, mark, names to leave out (their beginnings, with commas), program, the options.
_BECOME = """
import os, sys
pid, mark, without, program = sys.argv[1:5]
with open("/proc/%s/environ" % pid, "rb") as file:
    pairs = [pair.partition(b"=") for pair in file.read().split(b"\\0") if b"=" in pair]
given = {name: value for name, _, value in pairs}
left_out = tuple(word.encode() for word in without.split(",") if word)
if left_out:
    given = {name: value for name, value in given.items() if not name.startswith(left_out)}
given[b"CUDA_VISIBLE_DEVICES"] = b""
with open("/proc/%s/status" % pid) as file:
    status = dict(line.split(":", 1) for line in file if ":" in line)
try:
    os.chdir(os.readlink("/proc/%s/cwd" % pid))
except OSError:
    pass
user, group = int(status["Uid"].split()[1]), int(status["Gid"].split()[1])
if os.geteuid() == 0 and user != 0:
    os.setgroups([int(word) for word in status["Groups"].split()])
    os.setgid(group)
    os.setuid(user)
os.execvpe(program, [program, *sys.argv[5:]], given)
"""

# The second says what it sees, between two marks: what start-up files print stands outside of them.
_TELL = """
import json, os, sys
mark = MARK
names = ("sitecustomize", "usercustomize")
found = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
told = {
    "environment": {
        os.fsencode(name).decode("utf-8", "backslashreplace"):
        os.fsencode(value).decode("utf-8", "backslashreplace")
        for name, value in os.environ.items()
    },
    "loaded": {name: path for name, path in found.items() if path},
    "version": "%d.%d.%d" % sys.version_info[:3],
}
words = (mark + json.dumps(told) + mark + "\\n").encode()
while words:
    words = words[os.write(1, words):]
"""


class NoAnswer(Exception):
    """The interpreter did not say what it sees; the message says why."""


class _Told(msgspec.Struct, frozen=True):
    environment: dict[str, str]
    loaded: dict[str, str]
    version: str


async def ask(
    runner: Runner, *, program: str, options: Sequence[str], pid: int, given: str | None
) -> Interpreter:
    """What the interpreter ``program`` sees when it starts as process ``pid`` of that machine did.

    ``given`` is the process's own CUDA_VISIBLE_DEVICES, which the question itself hides. Raises NoAnswer.
    """
    # Both to their end, whatever becomes of one: a command that is left alone outlives its reader.
    both = await asyncio.gather(
        _start(runner, program, options, pid, ""),
        _start(runner, program, options, pid, ",".join(ENGINE_VARIABLES)),
        return_exceptions=True,
    )
    for one in both:
        if isinstance(one, BaseException):
            raise one
    whole, own = (one for one in both if isinstance(one, _Told))
    if whole.environment.get(NO_CARDS) == "":  # ours, not the start-up files'
        whole.environment.pop(NO_CARDS)
        if given is not None:
            whole.environment[NO_CARDS] = given
    if own.environment.get(NO_CARDS) == "":
        own.environment.pop(NO_CARDS)
    alone = {name: value for name, value in own.environment.items() if name.startswith(ENGINE_VARIABLES)}
    return Interpreter(
        environment=hidden_environment(whole.environment),
        own=hidden_environment(alone),
        loaded={name: clean(path) for name, path in whole.loaded.items()},
        version=clean(whole.version),
    )


async def _start(runner: Runner, program: str, options: Sequence[str], pid: int, without: str) -> _Told:
    mark = f"gpuops-{secrets.token_hex(12)}"
    tell = _TELL.replace("MARK", repr(mark))
    command = (program, "-I", "-S", "-c", _BECOME, str(pid), mark, without, program, *options, "-c", tell)
    result = await runner.run(command, deadline=DEADLINE)
    _, begun, rest = result.stdout.decode("utf-8", "replace").rpartition(mark)[0].rpartition(mark)
    if not begun:
        raise NoAnswer(_why(program, result))
    try:
        return msgspec.json.decode(rest, type=_Told)
    except msgspec.DecodeError as problem:
        raise NoAnswer(f"{program} answered nonsense: {problem}") from None


def _why(program: str, result: Result) -> str:
    if result.error == "deadline passed":
        return (
            f"{program} did not get past its start-up files (sitecustomize.py and .pth files) "
            f"within {DEADLINE:g} s"
        )
    if result.ok:
        return f"{program} ended, or lost its output, in its start-up files"
    return f"{program}: {clean(result.reason)}"
