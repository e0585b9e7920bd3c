"""One request to the engine: bounded in time and in memory, known by its id, aborted when it is given up."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from console.checks.smoke.answer import Answer, ChatStream, Refused
from console.checks.smoke.events import Malformed
from console.checks.smoke.trouble import Trouble, network, refusal
from console.model.text import clean
from console.sources.engine.client import EngineClient, explain, import_httpx
from console.sources.engine.sources import fetch_loads

if TYPE_CHECKING:
    import httpx

#: Every request of ours bears an id that begins so: in the engine's log, and to be aborted by.
RID_PREFIX = "gpuops-smoke-"

#: Bytes of one answer. A stream of a thousand tokens has some 300 KB.
ANSWER_LIMIT = 2 * 1024 * 1024

#: Seconds in which a stream must bring its first token, and any request its whole answer.
FIRST_TOKEN_S = 15.0
WHOLE_S = 30.0

#: Seconds for the abort of what is left: SGLang answers it without its scheduler.
_ABORT_S = 1.5

#: Three looks at the engine's load, so many seconds apart, tell whether it moves.
_LOOK_S = 0.5

#: More events than tokens were asked for: the stream has no end.
_EVENTS_BEYOND = 64

_ERROR_LIMIT = 64 * 1024
_RAW_KEPT = 4096


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent, and what came back: an answer or a trouble. Times in seconds.

    ``capped``: it was given fewer tokens than the check asked for.
    ``raw`` is the start of the bytes that came, cleaned. ``first_token_s`` is None for a whole answer.
    """

    mode: str
    path: str
    request: Mapping[str, Any]
    answer: Answer | None = None
    trouble: Trouble | None = None
    capped: bool = False
    raw: str = ""
    seconds: float = 0.0
    first_token_s: float | None = None


class Wire:
    """The requests of one run of smoke tests. At most ``at_once`` of them are with the engine."""

    def __init__(
        self, url: str, api_key: str | None, key_note: str | None, client: EngineClient, at_once: int
    ) -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._key_note = key_note
        self._client = client
        self._places = asyncio.Semaphore(at_once)
        self._http: httpx.AsyncClient | None = None
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._open: set[str] = set()
        self._scopes: set[asyncio.Timeout] = set()
        self._judging = asyncio.Lock()
        self._stuck: Trouble | None = None
        #: Once the engine has spoken rubbish it may do so up to any limit: this one is kept lower.
        self.token_cap: int | None = None

    def __repr__(self) -> str:
        return f"<Wire {self._url}>"

    async def send(
        self, path: str, body: Mapping[str, Any], mode: str, parse: Callable[[bytes], Answer]
    ) -> Exchange:
        """POST ``body`` and read the answer; every failure is a Trouble. ``body["stream"]`` decides how."""
        async with self._places:
            rid = f"{RID_PREFIX}{self._run}-{next(self._numbers)}"
            body = {**body, "rid": rid}
            capped = self.token_cap is not None and body.get("max_tokens", 0) > self.token_cap
            if capped:
                body["max_tokens"] = self.token_cap
            if self._stuck is not None:
                words = "not asked: the engine did not answer the requests before"
                return Exchange(mode=mode, path=path, request=body, trouble=Trouble("not-asked", words))
            one = _Request(self, path, body, parse)
            self._open.add(rid)
            began = time.monotonic()
            trouble = await one.run()
            if trouble is not None:
                await self._abort({rid})
            self._open.discard(rid)
            return Exchange(
                mode=mode,
                path=path,
                request=body,
                answer=one.answer,
                trouble=trouble,
                capped=capped,
                raw=clean(bytes(one.raw).decode("utf-8", "replace")),
                seconds=time.monotonic() - began,
                first_token_s=None if one.first_at is None else one.first_at - began,
            )

    async def close(self) -> None:
        """Abort what is still with the engine, and hang up."""
        await self._abort(set(self._open))
        self._open.clear()
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    @property
    def requests_open(self) -> int:
        return len(self._open)

    async def _abort(self, rids: set[str]) -> None:
        """Ask the engine to drop these requests. When it does not listen, hanging up is all that is left."""
        http = import_httpx()

        async def one(rid: str) -> None:
            try:
                async with asyncio.timeout(_ABORT_S):
                    await self._session().post(
                        self._url + "/abort_request", content=_encode({"rid": rid}), headers=self._headers()
                    )
            except (TimeoutError, OSError, ValueError, http.HTTPError, http.InvalidURL, ExceptionGroup):
                pass  # the trouble of the request itself says what the engine is like

        await asyncio.gather(*map(one, rids))

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        return headers

    def _session(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = import_httpx().AsyncClient(
                verify=self._url.startswith("https:"),
                trust_env=False,  # a proxy of the login shell must not stand between us and the engine
                follow_redirects=False,
                timeout=None,
                # uvicorn closes a connection idle for 5 s; one used just then would look like a crash.
                limits=import_httpx().Limits(keepalive_expiry=4.0),
            )
        return self._http

    async def _silent(self, waited: float) -> Trouble:
        """Busy or hung, when a request brought nothing in ``waited`` seconds: does anything else move?"""
        async with self._judging:
            if self._stuck is not None:
                return self._stuck
            seen = set()
            for look in range(3):
                if look:
                    await asyncio.sleep(_LOOK_S)
                loads, _ = await fetch_loads(self._client, 2.0)
                if loads is None:
                    break
                seen.add((loads.used_tokens, loads.running))
            if len(seen) > 1:
                return Trouble("busy", f"busy: no token within {waited:.0f} s, though the engine is at work")
            self._stuck = Trouble("hung", f"hangs: no token within {waited:.0f} s, and nothing moves")
            for scope in self._scopes:  # what waits beside us would only wait longer
                scope.reschedule(asyncio.get_running_loop().time())
            return self._stuck


class _Request:
    """One request on its way."""

    def __init__(
        self, wire: Wire, path: str, body: Mapping[str, Any], parse: Callable[[bytes], Answer]
    ) -> None:
        self._wire = wire
        self._path = path
        self._body = body
        self._parse = parse
        self._stream = ChatStream() if body.get("stream") else None
        self.answer: Answer | None = None
        self.raw = bytearray()
        self.first_at: float | None = None
        self._last_at = time.monotonic()

    async def run(self) -> Trouble | None:
        wire, http = self._wire, import_httpx()
        began = time.monotonic()
        patience = WHOLE_S if self._stream is None else FIRST_TOKEN_S
        try:
            async with asyncio.timeout(patience) as scope:
                wire._scopes.add(scope)
                try:
                    return await self._exchange(scope)
                finally:
                    wire._scopes.discard(scope)
        except TimeoutError:
            return await self._late(time.monotonic() - began)
        except Malformed as problem:
            return self._malformed(str(problem))
        except Refused as problem:
            code = problem.code or 400
            return refusal(code, _encode({"message": str(problem)}), wire._api_key is not None)
        except (http.HTTPError, http.InvalidURL, OSError, ValueError, ExceptionGroup) as problem:
            return network(*explain(problem, http))

    async def _exchange(self, scope: asyncio.Timeout) -> Trouble | None:
        wire, stream = self._wire, self._stream
        ends = asyncio.get_running_loop().time() + WHOLE_S
        async with wire._session().stream(
            "POST", wire._url + self._path, content=_encode(self._body), headers=wire._headers()
        ) as response:
            if response.status_code != 200:
                async for chunk in response.aiter_raw():
                    self.raw += chunk[: _ERROR_LIMIT - len(self.raw)]
                    if len(self.raw) >= _ERROR_LIMIT:
                        break
                if 300 <= response.status_code < 400:
                    return Trouble("malformed", f"redirects elsewhere (HTTP {response.status_code})")
                body = bytes(self.raw)
                return refusal(response.status_code, body, wire._api_key is not None, wire._key_note)
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                return Trouble("malformed", "the answer is compressed, which was not asked for")
            if "html" in response.headers.get("content-type", ""):
                return Trouble("malformed", "answered with an HTML page instead of JSON")
            whole = bytearray()
            size = 0
            async for chunk in response.aiter_raw():
                size += len(chunk)
                self._last_at = time.monotonic()
                self.raw += chunk[: max(0, _RAW_KEPT - len(self.raw))]
                if size > ANSWER_LIMIT:
                    return Trouble(
                        "endless", f"the answer is larger than {ANSWER_LIMIT // 1024**2} MB; cut off"
                    )
                if stream is None:
                    whole += chunk
                    continue
                stream.feed(chunk)
                if stream.tokens_seen and self.first_at is None:
                    self.first_at = self._last_at
                    scope.reschedule(ends)
                if stream.done:
                    break
                if stream.events > self._limit + _EVENTS_BEYOND:
                    words = f"{stream.events} events, though at most {self._limit} tokens were asked for"
                    return Trouble("endless", f"streams without end: {words}")
            self.answer = self._parse(bytes(whole)) if stream is None else stream.answer()
        return None

    @property
    def _limit(self) -> int:
        limit = self._body.get("max_tokens")
        return limit if isinstance(limit, int) else 0

    def _malformed(self, words: str) -> Trouble:
        return Trouble("died" if "without its end mark" in words else "malformed", words)

    async def _late(self, waited: float) -> Trouble:
        if self.first_at is None or self._wire._stuck is not None:
            return await self._wire._silent(waited)
        silence = time.monotonic() - self._last_at
        if silence > 5:
            return Trouble("hung", f"fell silent in the middle: no token for {silence:.0f} s")
        events = 0 if self._stream is None else self._stream.events
        return Trouble("slow", f"still streaming after {waited:.0f} s, {events} events")


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()
