"""A host with a container in which a real SGLang is the service, changed by the real ``gpuops``.

As on Proxmox: the command, its jobs and its state are on the host; the service, its unit and its Python
are in the container, which is entered by ``lxc-attach``. Here that is a program of two lines, and the
container the systemd rig in a control group ``lxc/ID``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from console.sources.unit import parse_show
from tests.rigs.sglang.install import HERE, Installation
from tests.rigs.sglang.persona import persona
from tests.rigs.sglang.server import Launch, folders, free_port
from tests.rigs.systemd.machine import UNITS, Machine

TREE = Path(__file__).parents[3]
UNIT = "sglang.service"

#: Seconds for a switch with a load there and a load back: a load takes 15 to 30 on two cores.
SWITCH_S = 180.0

# Its words: -n ID -- COMMAND...
_ATTACH = """#!/bin/sh
test "$1 $2 $3" = "-n {id} --" || {{ echo "lxc-attach: no container $2" >&2; exit 1; }}
shift 3
exec {prefix} "$@"
"""


class Container(Machine):
    """The systemd rig as Proxmox's container ``id``: its control groups are ``lxc/ID``.

    It shares the host's network; ``lent`` are folders of the host that it can read and not write.
    """

    def __init__(self, root: Path, scratch: Path, id: int, *, lent: Sequence[Path]) -> None:
        super().__init__(root, scratch, f"ct{id}", host_network=True, folders=lent)
        self.id = id
        self._groups = [group.parent / "lxc" / str(id) for group in self._groups]

    def start(self) -> None:
        for group in self._groups:
            group.parent.mkdir(exist_ok=True)
        super().start()
        for folder in self._folders:
            self.run("mount", "-o", "remount,bind,ro", str(folder))

    def stop(self) -> None:
        super().stop()
        for group in self._groups:
            with contextlib.suppress(OSError):  # another container is there
                group.parent.rmdir()

    def lend_attach(self, folder: Path) -> None:
        """The program that enters it, in a folder for PATH."""
        folder.mkdir(exist_ok=True)
        program = folder / "lxc-attach"
        program.write_text(_ATTACH.format(id=self.id, prefix=shlex.join(self.prefix)))
        program.chmod(0o755)


class Ended:
    """A command of gpuops that has ended: its exit status and all that it said."""

    def __init__(self, exit_code: int, words: str) -> None:
        self.exit_code = exit_code
        self.words = words

    @property
    def flat(self) -> str:
        """What it said, with lines that were broken to fit a terminal put together again."""
        return " ".join(self.words.split())


class Line:
    """A command on a terminal line that can be hung up, as by a connection that is lost."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        self._said = b""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *argv],  # execs: this process becomes the program
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "dumb"},
            cwd=TREE,
        )
        os.close(slave)

    def until(self, words: str, within: float) -> str:
        """Read until it has said ``words``: all that it said. AssertionError after ``within`` seconds."""
        ends = time.monotonic() + within
        while words not in (said := self._said.decode("utf-8", "replace")):
            assert time.monotonic() < ends, said
            if select.select([self._master], [], [], 0.1)[0]:
                self._said += os.read(self._master, 65536)
        return said

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def hang_up(self) -> None:
        """The kernel sends SIGHUP to the session's leader; what it writes goes nowhere from now on."""
        os.close(self._master)


class Host:
    """The host: its site and profile files, its commands, and what its users and systemd see."""

    def __init__(self, container: Container, installation: Installation, folder: Path, shared: Path) -> None:
        self.container = container
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._installation = installation
        self._profiles = folder / "profiles"
        self._profiles.mkdir()
        self.state = folder / "state"
        self.site = folder / "site.yaml"
        self.site.write_text(
            json.dumps(
                {
                    "schema": 1,
                    "host": "rig",
                    "container": {"kind": "lxc", "id": container.id},
                    "service": {"unit": UNIT, "url": self.url},
                    "profiles": str(self._profiles),
                    "state": str(self.state),
                }
            )
        )
        self._answers = shared / "answers.json"
        self.speaks()
        container.lend_attach(folder / "bin")
        self._environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def speaks(self, **instead: str) -> None:
        """What the model answers from now on: a healthy one, but for ``instead`` (see persona)."""
        self._answers.write_text(json.dumps(persona("kimi_k2", **instead)))

    # Profiles ----------------------------------------------------------------------------------

    def profile(self, name: str, **changed: str) -> None:
        """A profile that serves the scripted model under its own name. ``changed``: flags, with _ for -.

        Two profiles differ in nothing but the served name, and in that.
        """
        flags: dict[str, str | bool | list[str]] = {}
        word: str | None = None
        for said in Launch(self.port).command(self._installation)[3:]:
            if said.startswith("--"):
                word = said[2:]
                flags[word] = True
            else:
                assert word is not None
                flags[word] = said
        flags |= {"served-model-name": name, "tool-call-parser": "kimi_k2", "reasoning-parser": "kimi_k2"}
        flags |= {flag.replace("_", "-"): value for flag, value in changed.items()}
        variables = {"HOME": "/root", "PATH": "/usr/bin:/bin", "SCRIPTED_ANSWERS": str(self._answers)}
        document = {
            "schema": 1,
            "name": name,
            "title": f"Scripted {name}",
            "python": str(self._installation.python),
            "args": flags,
            "env": Launch(self.port).environment() | variables,
            "load": {"expect_s": 20, "timeout_s": 150, "stop_s": 20},
            "expect": {"served_name": name, "tool_calls": True, "reasoning": True},
        }
        (self._profiles / f"{name}.yaml").write_text(json.dumps(document, indent=1))

    # Commands ----------------------------------------------------------------------------------

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "console", *words, "--site", str(self.site)]

    @property
    def environment(self) -> Mapping[str, str]:
        """The command's: the container can be entered from it."""
        return self._environment

    def gpuops(self, *words: str, within: float = SWITCH_S) -> Ended:
        done = subprocess.run(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(self._environment),
            cwd=TREE,
            timeout=within,
        )
        return Ended(done.returncode, done.stdout.decode("utf-8", "replace"))

    def job(self, *id: str) -> dict[str, Any]:
        """The newest job, or that of the id, as ``gpuops jobs show --json`` says it."""
        found: dict[str, Any] = json.loads(self.gpuops("jobs", "show", *id, "--json", within=60).words)
        return found

    def jobs(self) -> list[str]:
        """The ids of all jobs, newest first."""
        told = json.loads(self.gpuops("jobs", "list", "--json", within=60).words)
        return [job["id"] for job in told["jobs"]]

    def job_until(
        self, id: str, seen: Callable[[dict[str, Any]], object], within: float = SWITCH_S
    ) -> dict[str, Any]:
        ends = time.monotonic() + within
        while not seen(job := self.job(id)):
            assert time.monotonic() < ends, job
            time.sleep(0.3)
        return job

    # What is there -----------------------------------------------------------------------------

    def served(self) -> str | None:
        """The name under which the engine serves; None while it does not answer."""
        try:
            with httpx.Client(trust_env=False, timeout=10) as http:
                return str(http.get(f"{self.url}/v1/models").json()["data"][0]["id"])
        except httpx.TransportError:
            return None

    def answer(self, name: str) -> str:
        """What the model of that name says to a user."""
        question = {"role": "user", "content": "[[say]]<think>Asked.</think>Here I am."}
        body = {"model": name, "messages": [question], "max_tokens": 50, "temperature": 0}
        with httpx.Client(trust_env=False, timeout=60) as http:
            reply = http.post(f"{self.url}/v1/chat/completions", json=body).raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"])

    def unit(self) -> dict[str, str]:
        """Properties of the unit as systemd has them."""
        names = "Id,ActiveState,SubState,MainPID,InvocationID,UnitFileState,NeedDaemonReload,LoadState"
        return parse_show(self.container.run("systemctl", "show", "-p", names, UNIT))[UNIT]

    def unit_text(self) -> str:
        return (self.container.root / UNITS / UNIT).read_text()

    def end(self) -> None:
        """Kill what is left of the host's jobs. The container has to be stopped besides."""
        for id in self.jobs():
            job = self.job(id)
            if job["state"] == "running" and job["pid"] is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job["pid"], signal.SIGKILL)


def lent_folders(installation: Installation, shared: Path) -> list[Path]:
    """What the container needs of the host: the engine with its Python and models, and ``shared``."""
    return [*dict.fromkeys([*folders(installation), HERE, shared])]
