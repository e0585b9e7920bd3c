"""HTTP/1.1 in small: requests with a body, keep-alive, answers in one piece or in chunks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import msgspec

_HEAD_LIMIT = 64 * 1024
_BODY_LIMIT = 64 * 1024 * 1024

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    422: "Unprocessable Entity",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Call(msgspec.Struct, frozen=True):
    """One request. Header names are in lower case; ``client`` is ``address:port``."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    client: str


class Reply:
    """How a handler answers: ``send`` for a whole answer, ``begin`` and ``chunk`` for a stream."""

    def __init__(self, writer: asyncio.StreamWriter, keep_alive: bool) -> None:
        self._writer = writer
        self._keep_alive = keep_alive
        self.status = 0
        self.streaming = False

    def send(self, status: int, body: bytes = b"", content_type: str = "application/json") -> None:
        self.status = status
        type_line = f"content-type: {content_type}\r\n" if body else ""
        self._writer.write(
            f"{self._head(status)}{type_line}content-length: {len(body)}\r\n\r\n".encode() + body
        )

    def begin(self) -> None:
        """Server-sent events follow."""
        self.status = 200
        self.streaming = True
        fields = "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        self._writer.write(f"{self._head(200)}{fields}".encode())

    async def chunk(self, data: bytes) -> None:
        """ConnectionError when the client has gone."""
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self._writer.drain()

    def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")

    @property
    def gone(self) -> bool:
        return self._writer.is_closing()

    def _head(self, status: int) -> str:
        connection = "" if self._keep_alive else "connection: close\r\n"
        return f"HTTP/1.1 {status} {REASONS.get(status, '')}\r\nserver: uvicorn\r\n{connection}"


Handler = Callable[[Call, Reply], Awaitable[None]]


class WebServer:
    """Serves ``handler`` on a loopback port while it is open."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, port: int) -> int:
        """Bind and listen; the port in use. OSError (EADDRINUSE) when it is taken."""
        # Bound and kept before the first wait: an open that is cancelled half way leaves no listener
        # behind that ``close`` does not know, and that keeps the port from the next run.
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError as problem:
                raise OSError(problem.errno, f"127.0.0.1:{port}: {problem.strerror}") from None
            self._server = await asyncio.start_server(
                self._connected, sock=listener, backlog=2048, start_serving=False
            )
        except BaseException:
            listener.close()
            raise
        await self._server.start_serving()
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening and hang up on everybody."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in tuple(self._tasks):
            task.cancel()
        for writer in tuple(self._connections):
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # the client hung up, or does not speak HTTP: that ends the connection
        except asyncio.CancelledError:
            pass  # the server closes
        finally:
            self._tasks.discard(task)
            self._connections.discard(writer)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False when the connection is over."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        if len(head) > _HEAD_LIMIT:
            raise ValueError("request head too long")
        lines = head.decode("latin-1").split("\r\n")
        method, target, version = lines[0].split(" ", 2)
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        keep_alive = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        length = int(headers.get("content-length", "0"))
        if not 0 <= length <= _BODY_LIMIT:
            raise ValueError("request body too long")
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(length) if length else b""
        path, _, query = target.partition("?")
        pairs = dict(part.partition("=")[::2] for part in query.split("&") if part)
        peer = writer.get_extra_info("peername") or ("127.0.0.1", 0)
        call = Call(method, path, pairs, headers, body, f"{peer[0]}:{peer[1]}")
        reply = Reply(writer, keep_alive)
        await self._handler(call, reply)
        await writer.drain()
        return keep_alive
