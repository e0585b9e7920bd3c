"""One HTTP client for the engine: every outcome is a value, every answer is bounded in time and size."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

from console.model.engine import Probe
from console.model.text import clean

if TYPE_CHECKING:
    import httpx

#: No JSON the engine sends is near this: ``/server_info`` of 0.5.23 has 37 KB.
JSON_LIMIT = 2 * 1024 * 1024

#: ``/metrics`` has 90 KB with one rank and 130 KB with two.
METRICS_LIMIT = 8 * 1024 * 1024

_KEY_LIMIT = 4096

# uvicorn closes a connection idle for 5 s; one kept longer would now and then be
# lost just as it is used, and a healthy engine would look as if it had reset us.
_KEEPALIVE_S = 4.0

_REFUSED = {errno.ECONNREFUSED}
_RESET = {errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED}


class Answer(msgspec.Struct, frozen=True):
    """What came back, and when: ``at`` is the middle of the request on the monotonic clock."""

    probe: Probe
    body: bytes = b""
    at: float = 0.0


class EngineClient:
    """GET requests to one engine, over connections that are kept.

    ``api_key_file`` holds the key sent as a bearer token. It is read for every
    request, so a key that was rotated needs no restart of the console; it never
    stands in a value, an error or a repr.

    ``epoch`` counts how often the engine came to answer after its port had been
    refused. It listens only once the model is loaded, so this is a restart.
    """

    def __init__(
        self,
        url: str,
        api_key_file: Path | None = None,
        *,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url.rstrip("/")
        self._api_key_file = api_key_file
        self._api_key = api_key
        self._clock = clock
        self._http: httpx.AsyncClient | None = None
        self._refused = False
        self._restarted = asyncio.Event()
        self.epoch = 0

    def __repr__(self) -> str:
        return f"<EngineClient {_without_credentials(self._url)}>"

    async def get(self, path: str, deadline: float, *, limit: int = JSON_LIMIT) -> Answer:
        """GET ``path`` within ``deadline`` seconds and ``limit`` bytes; a failure of any kind is a Probe."""
        http = import_httpx()
        began = self._clock()
        status: int | None = None
        error: str | None = None
        detail: str | None = None
        body = b""
        try:
            async with asyncio.timeout(deadline):
                status, error, detail, body = await self._exchange(path, limit)
        except TimeoutError:
            error, detail = "timeout", f"no answer within {deadline:g} s"
        except (http.HTTPError, http.InvalidURL, OSError, ValueError, ExceptionGroup) as problem:
            error, detail = explain(problem, http)
        ended = self._clock()
        self._observe(error)
        probe = Probe(path, status, error, ended - began, detail)
        return Answer(probe, body, (began + ended) / 2)

    def key_warning(self) -> str | None:
        """What is wrong with the key file, in words; None when nothing is, or none is configured."""
        return self._read_key()[1]

    def note_restart(self) -> None:
        """Tell who waits that this is another run of the engine."""
        self.epoch += 1
        self._restarted.set()
        self._restarted = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """Sleep ``seconds``, or less when the engine restarts meanwhile."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._restarted.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Close the kept connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def _exchange(self, path: str, limit: int) -> tuple[int | None, str | None, str | None, bytes]:
        """Status, error, detail and body of one GET."""
        # Plain text also keeps ``:`` in metric names; openmetrics may turn it into ``_``.
        accept = "text/plain" if path.startswith("/metrics") else "application/json"
        headers = {"accept": accept, "accept-encoding": "identity"}
        key, _ = self._read_key()
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        async with self._session().stream("GET", self._url + path, headers=headers) as response:
            status = response.status_code
            if 300 <= status < 400:
                target = clean(response.headers.get("location", ""))[:200]
                return status, "redirect", f"redirects to {_without_credentials(target) or 'nowhere'}", b""
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                return None, "malformed", "the answer is compressed, which was not asked for", b""
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > limit:
                    return None, "too large", f"the answer is larger than {limit // 1024**2} MB; cut off", b""
        return status, None, self._refusal(status), bytes(body)

    def _refusal(self, status: int) -> str | None:
        """What a status of 401 or 403 asks of the operator."""
        if status not in (401, 403):
            return None
        if self._api_key_file is None and self._api_key is None:
            return "unauthorised: the service wants an API key (service.api_key_file)"
        warning = self._read_key()[1]
        return "unauthorised: " + (
            warning or "the service does not accept the API key in service.api_key_file"
        )

    def _session(self) -> httpx.AsyncClient:
        if self._http is None:
            http = import_httpx()
            self._http = http.AsyncClient(
                # A context for TLS costs 27 ms to build; plain http, whose redirects
                # are not followed, never uses one.
                verify=self._url.startswith("https:"),
                trust_env=False,  # a proxy of the login shell must not stand between us and the engine
                follow_redirects=False,
                timeout=None,  # the deadline of the request covers all of it
                limits=http.Limits(
                    max_connections=16, max_keepalive_connections=8, keepalive_expiry=_KEEPALIVE_S
                ),
            )
        return self._http

    def _read_key(self) -> tuple[str | None, str | None]:
        """The key, and what is wrong with its file."""
        if self._api_key_file is None:
            return self._api_key, None
        return read_api_key(self._api_key_file)

    def _observe(self, error: str | None) -> None:
        """Notice that the engine answers again after its port was closed."""
        if error == "refused":
            self._refused = True
        elif error is None and self._refused:
            self._refused = False
            self.note_restart()


def read_api_key(path: Path) -> tuple[str | None, str | None]:
    """The key in a file, and what is wrong with the file in words, which never hold the key."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a FIFO would block the open
            return None, f"API key file {path}: not a regular file"
        with path.open("rb") as file:
            raw = file.read(_KEY_LIMIT + 1)
    except OSError as problem:
        return None, f"API key file {path}: {problem.strerror}"
    key = raw.strip()
    if not key:
        return None, f"API key file {path}: empty"
    if len(raw) > _KEY_LIMIT or not all(0x21 <= byte <= 0x7E for byte in key):
        return None, f"API key file {path}: not one line of printable characters"
    open_to_all = "readable by everyone on this host; chmod 600 it" if mode & stat.S_IROTH else None
    return key.decode("ascii"), open_to_all and f"API key file {path}: {open_to_all}"


def import_httpx() -> ModuleType:
    """Import httpx without its command line, which it loads when click and rich are there.

    Without the guard: 55 ms and 11 MB; with it: 25 ms and 5.5 MB.
    """
    if "httpx" not in sys.modules:
        sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # None: "no such module"
    import httpx

    return httpx


def explain(problem: Exception, http: ModuleType) -> tuple[str, str]:
    """The error of a Probe and its detail, for anything httpx or the network raised."""
    causes = list(_causes(problem))
    text = clean(str(problem))[:200]
    invalid = http.InvalidURL | http.UnsupportedProtocol | UnicodeError | OverflowError
    if any(isinstance(cause, invalid) for cause in causes):
        return "unreachable", "the address of the service (service.url) is not a valid http URL"
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "unreachable", f"TLS failed: {text}"
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return "unreachable", "the name of the host does not resolve"
    numbers = [cause.errno for cause in causes if isinstance(cause, OSError) and cause.errno]
    if _REFUSED.intersection(numbers):
        return "refused", "nothing listens there"
    if _RESET.intersection(numbers) or isinstance(problem, http.ReadError | http.WriteError):
        return "reset", "the connection was reset"
    if isinstance(problem, http.RemoteProtocolError):
        if "disconnected" in text or "closed connection" in text:
            return "reset", f"the connection closed before the answer was complete: {text}"
        return "malformed", f"not a valid HTTP answer: {text}"
    if isinstance(problem, http.ConnectError):
        return "unreachable", os.strerror(numbers[0]) if numbers else text
    return "malformed", f"{type(problem).__name__}: {text}"


def _causes(problem: BaseException) -> Iterator[BaseException]:
    """The exception and everything below it; a host with several addresses fails with a group."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [problem]
    while queue:
        current = queue.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        queue += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            queue += current.exceptions


def _without_credentials(url: str) -> str:
    """The URL without ``user:password@``."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}" if separator else url
