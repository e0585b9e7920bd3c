"""A small HTTP server that answers, or misbehaves, exactly as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engine"

Reply = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def response(status: int = 200, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Box:
    """One listening address. ``replies`` by path; a path that is not there is 404."""

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *rest = head.strip().split("\r\n")
                path = first.split()[1]
                headers = dict(line.lower().split(": ", 1) for line in rest)
                self.requests.append((path, headers))
                reply = self.replies.get(path, self.replies.get(path.partition("?")[0], response(404)))
                if isinstance(reply, bytes):
                    writer.write(reply)
                else:
                    await reply(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    box = Box()
    await box.start()
    yield box
    await box.stop()


@pytest.fixture
def recorded() -> Callable[[str], bytes]:
    return lambda name: (FIXTURES / name).read_bytes()


@pytest.fixture
def reply() -> Callable[..., bytes]:
    return response
