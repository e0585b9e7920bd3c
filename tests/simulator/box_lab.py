"""A box in this process and the clients that talk to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx

from console.simulator.box import Box
from console.transport.box import BoxRunner
from console.transport.container import ContainerRunner, lxc
from console.transport.runner import Result


class Lab:
    """A box, its HTTP client, and runners on the host and in the container."""

    def __init__(self, box: Box, http: httpx.AsyncClient) -> None:
        self.box = box
        self.http = http
        self.host = BoxRunner(box.directory)
        self.container: ContainerRunner = lxc(self.host, 129)

    async def on_host(self, *argv: str) -> Result:
        return await self.host.run(argv, deadline=10)

    async def inside(self, *argv: str) -> Result:
        return await self.container.run(argv, deadline=10)

    async def properties(self, unit: str = "sglang.service") -> dict[str, str]:
        shown = await self.inside("systemctl", "show", unit)
        return dict(line.partition("=")[::2] for line in shown.stdout.decode().splitlines())

    async def state(self) -> str:
        properties = await self.properties()
        return f"{properties['ActiveState']}/{properties['SubState']}"

    async def until(self, wanted: str, within: float = 10.0) -> None:
        """Until the engine's unit is in this state, such as ``failed/failed``."""
        await eventually(lambda: self._is(wanted), within)

    async def until_ready(self, within: float = 10.0) -> None:
        """Until the engine of the run that now loads answers as ready."""
        await eventually(self._is_up, within)

    async def _is(self, wanted: str) -> bool:
        return await self.state() == wanted

    async def _is_up(self) -> bool:
        return self.box.engine.state == "up"

    async def messages(self, *words: str) -> list[str]:
        """What the unit's journal says, progress bars in their last state."""
        shown = await self.inside(
            "journalctl", "-o", "json", "-u", "sglang.service", "--no-pager", "-n", "5000", *words
        )
        return [message_of(json.loads(line)) for line in shown.stdout.splitlines()]

    async def chat(self, text: str, **more: Any) -> dict[str, Any]:
        body = {"model": "kimi-k2.5", "messages": [{"role": "user", "content": text}], **more}
        answer = await self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def nvml(self, seconds: float = 0.08) -> list[dict[str, Any]]:
        """What the card library's process says in its first moments."""
        said = []
        async with self.host.stream(["python", "/opt/x/nvml_worker.py", "--period", "1"]) as stream:
            try:
                async with asyncio.timeout(seconds):
                    async for line in stream.lines():
                        said.append(json.loads(line))
            except TimeoutError:
                pass
        return said


async def eventually(holds: Callable[[], Awaitable[bool]], within: float = 5.0) -> None:
    """Until ``holds``; TimeoutError when it does not come true."""
    async with asyncio.timeout(within):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.02)


def message_of(entry: dict[str, Any]) -> str:
    message = entry["MESSAGE"]
    text = bytes(message).decode() if isinstance(message, list) else message
    return str(text).rpartition("\r")[2]


OpenBox = Callable[..., AbstractAsyncContextManager[Lab]]
