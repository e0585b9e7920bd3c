"""A real SGLang server with a scripted model: start it, talk to it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.rigs.sglang.install import HERE, Installation
from tests.rigs.systemd.machine import Machine

#: Seconds until healthy: 17 to 30 on two idle cores, more beside other work.
START_S = 150.0
#: Seconds the server may take to end what it runs after SIGTERM.
STOP_S = 30.0

MAX_RUNNING = 32
SERVED_NAME = "scripted"
DRAFT_TOKENS = 4


class Launch(NamedTuple):
    """How a server is started.

    ``flags`` go behind the defaults; ``env`` are the model's SCRIPTED_* variables (see scripted.py).
    """

    port: int
    tp: int = 1
    dp: int = 1
    speculative: bool = False
    metrics: bool = True
    flags: Sequence[str] = ()
    env: Mapping[str, str] = {}

    def command(self, installation: Installation) -> list[str]:
        python, model, draft = map(str, installation)
        command = [
            *(
                python,
                "-m",
                "sglang.launch_server",
                "--model-path",
                model,
                "--served-model-name",
                SERVED_NAME,
            ),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--load-format", "dummy", "--device", "cpu", "--attention-backend", "torch_native"),
            *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
            *("--disable-overlap-schedule", "--max-total-tokens", "65536"),
            *("--max-running-requests", str(MAX_RUNNING * self.dp)),
            *("--tp-size", str(self.tp), "--dp-size", str(self.dp)),
        ]
        if self.metrics:
            command.append("--enable-metrics")
        if self.speculative:
            command += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft]
            command += ["--speculative-num-steps", str(DRAFT_TOKENS - 1), "--speculative-eagle-topk", "1"]
            command += ["--speculative-num-draft-tokens", str(DRAFT_TOKENS)]
        return [*command, *self.flags]

    def environment(self) -> dict[str, str]:
        """What SGLang needs to find the scripted model, and to ask no network for anything."""
        variables = {
            "PYTHONPATH": f"{HERE / 'shims'}:{HERE}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "SCRIPTED_FILE": str(HERE / "scripts.json"),
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "scripted_models",
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # compiled kernels would need a C++ compiler here
        }
        ranks = self.tp * self.dp
        if ranks > 1:  # then SGLang wants to be told which core each may use
            cores = sorted(os.sched_getaffinity(0))
            binding = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = binding
        return variables | dict(self.env)


class Reply(NamedTuple):
    """What came back for one chat. Tokens are as the server's ``usage`` counts them."""

    status: int
    text: str
    prompt_tokens: int
    completion_tokens: int


class Client:
    """What a user of the server does: chats, and asks whether it is up."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def healthy(self) -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=25) as http:
                return (await http.get(self.url + "/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def chat(self, text: str, *, max_tokens: int = 4000, **fields: object) -> Reply:
        """One chat, not streamed. A refusal is a Reply with its status and the server's words.

        Raises httpx.TransportError when the connection closes without an answer.
        """
        body = {
            "model": SERVED_NAME,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            **fields,
        }
        async with httpx.AsyncClient(trust_env=False, timeout=None) as http:
            response = await http.post(self.url + "/v1/chat/completions", json=body)
        if response.status_code != 200:
            return Reply(response.status_code, response.text, 0, 0)
        answer = response.json()
        usage = answer["usage"]
        said = answer["choices"][0]["message"]["content"] or ""
        return Reply(200, said, usage["prompt_tokens"], usage["completion_tokens"])

    async def chats(self, texts: Sequence[str], *, max_tokens: int = 4000) -> list[Reply]:
        """All at once. The server admits only as many as fit with most of their ``max_tokens``."""
        return await asyncio.gather(*(self.chat(text, max_tokens=max_tokens) for text in texts))

    async def get(self, path: str) -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            return (await http.get(self.url + path)).text


class EngineServer(Client):
    """One server process with its children, in a process group of its own. It writes to ``log``."""

    def __init__(self, installation: Installation, log: Path, **launch: object) -> None:
        self.launch = Launch(**{"port": free_port(), **launch})  # type: ignore[arg-type]
        super().__init__(self.launch.port)
        self.log = log
        self._installation = installation
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.launch.command(self._installation),
                env=os.environ | self.launch.environment(),
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def wait_ready(self, deadline: float = START_S) -> float:
        """Wait for ``/health`` to answer 200; the seconds it took. AssertionError with the log's tail."""
        began = time.monotonic()
        while not await self.healthy():
            assert self.running, "the server ended:\n" + "\n".join(self.lines()[-30:])
            waited = time.monotonic() - began
            assert waited < deadline, f"not healthy after {waited:.0f} s:\n" + "\n".join(self.lines()[-30:])
            await asyncio.sleep(0.2)
        return time.monotonic() - began

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def lines(self) -> list[str]:
        """The log so far."""
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def stop(self, grace: float = STOP_S) -> None:
        """SIGTERM, and after ``grace`` seconds SIGKILL to the whole group. 0: at once."""
        if self._process is None:
            return
        if self.running and grace > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # workers can outlive their parent
        self._process.wait()


class EngineUnit(Client):
    """The same server as a systemd service of a machine that shares the host's network."""

    unit = "sglang.service"

    def __init__(self, installation: Installation, machine: Machine, **launch: object) -> None:
        self.launch = Launch(**{"port": free_port(), **launch})  # type: ignore[arg-type]
        super().__init__(self.launch.port)
        self.machine = machine
        variables = {"HOME": "/root", "PATH": "/usr/bin:/bin"} | self.launch.environment()
        lines = ["[Unit]", "Description=SGLang", "[Service]", "WorkingDirectory=/root", "TimeoutStopSec=20"]
        lines += [f'Environment="{name}={value}"' for name, value in variables.items()]
        lines.append("ExecStart=" + " ".join(self.launch.command(installation)))
        machine.write_unit(self.unit, "\n".join(lines) + "\n")

    def start(self) -> None:
        """Ask for a start, or a restart; it goes on by itself."""
        self.machine.run("systemctl", "reset-failed", self.unit, check=False)
        self.machine.run("systemctl", "restart", "--no-block", self.unit)

    async def ensure_ready(self) -> None:
        """Start it unless it is healthy, and wait. AssertionError with the journal's tail."""
        if await self.healthy():
            return
        self.start()
        ends = time.monotonic() + START_S
        while not await self.healthy():
            assert time.monotonic() < ends, self.machine.run("journalctl", "-n", "40", "-u", self.unit)
            await asyncio.sleep(0.2)


def folders(installation: Installation) -> list[Path]:
    """What a machine must have bound in so that the server can run there."""
    needed = [installation.model.parent, HERE]
    interpreter = Path(sys.base_prefix)
    if interpreter != Path("/usr"):  # Debian's own Python the machine has itself
        needed.append(interpreter)
    return needed


def free_port() -> int:
    """A port nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
