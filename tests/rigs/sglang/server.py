"""A real SGLang server with a scripted model: start it, talk to it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.rigs.sglang.install import HERE, Installation

#: Seconds until healthy: 17 to 25 on two idle cores, more beside other work.
START_S = 150.0
#: Seconds the server may take to end what it runs after SIGTERM.
STOP_S = 30.0

MAX_RUNNING = 32
SERVED_NAME = "scripted"


class Reply(NamedTuple):
    """What came back for one chat. Tokens are as the server's ``usage`` counts them."""

    status: int
    text: str
    prompt_tokens: int
    completion_tokens: int


class EngineServer:
    """One server process with its children, in a process group of its own.

    ``flags`` go behind the defaults; ``env`` are the model's SCRIPTED_* variables
    (see scripted.py). Output goes to ``log``, as it would to the journal.
    """

    def __init__(
        self,
        installation: Installation,
        log: Path,
        *,
        port: int | None = None,
        tp: int = 1,
        dp: int = 1,
        speculative: bool = False,
        metrics: bool = True,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.installation = installation
        self.log = log
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._argv = self._command(tp, dp, speculative, metrics, flags)
        self._env = environment(installation) | _threads(tp * dp) | dict(env or {})

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self._argv,
                env=self._env,
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def wait_ready(self, deadline: float = START_S) -> float:
        """Wait for ``/health`` to answer 200; the seconds it took. AssertionError with the log's tail."""
        began = time.monotonic()
        async with httpx.AsyncClient(trust_env=False) as http:
            while time.monotonic() - began < deadline:
                assert self.running, f"the server ended:\n{self.tail()}"
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(self.url + "/health", timeout=25)).status_code == 200:
                        return time.monotonic() - began
                await asyncio.sleep(0.2)
        raise AssertionError(f"the server is not healthy after {deadline:g} s:\n{self.tail()}")

    async def chat(self, text: str, *, max_tokens: int = 4000, **fields: object) -> Reply:
        """One chat, not streamed. A refusal is a Reply with its status and the server's words."""
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

    async def get(self, path: str) -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            return (await http.get(self.url + path)).text

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def lines(self) -> list[str]:
        """The log so far."""
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def tail(self, count: int = 30) -> str:
        return "\n".join(self.lines()[-count:])

    def stop(self, grace: float = STOP_S) -> None:
        """SIGTERM, and after ``grace`` seconds SIGKILL to the whole group. 0: at once."""
        if self.process is None:
            return
        if self.running and grace > 0:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # workers can outlive their parent
        self.process.wait()

    def _command(self, tp: int, dp: int, speculative: bool, metrics: bool, flags: Sequence[str]) -> list[str]:
        python, model, draft = (str(path) for path in self.installation)
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
            *("--max-running-requests", str(MAX_RUNNING * dp)),
            *("--tp-size", str(tp), "--dp-size", str(dp)),
        ]
        if metrics:
            command.append("--enable-metrics")
        if speculative:
            command += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft]
            command += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
            command += ["--speculative-num-draft-tokens", "4"]
        return [*command, *flags]


def environment(installation: Installation) -> dict[str, str]:
    """The environment in which that SGLang finds the scripted model and needs no network."""
    return os.environ | {
        "PYTHONPATH": f"{HERE / 'shims'}:{HERE}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SCRIPTED_FILE": str(HERE / "scripts.json"),
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "scripted_models",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{installation.python.parent}:{os.environ['PATH']}",
    }


def _threads(ranks: int) -> dict[str, str]:
    """With several ranks SGLang wants to be told which core each may use."""
    if ranks == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))}


def free_port() -> int:
    """A port nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
