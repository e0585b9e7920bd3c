"""What the engine answered to one chat or generation, whole or streamed, in one shape.

The shapes are those of SGLang's ``entrypoints/openai/protocol.py`` and of ``/generate``, 0.5.9 to 0.5.23.
Text stays as it came; whoever shows it cleans it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from console.checks.smoke.events import Events, Malformed
from console.sources.engine.fields import integer, items, mapping, text


class Refused(Exception):
    """The engine answered with an error in its own words. ``code`` is an HTTP status, when it gave one."""

    def __init__(self, words: str, code: int | None = None) -> None:
        super().__init__(words)
        self.code = code


class Call(msgspec.Struct, frozen=True):
    """One tool call. ``arguments`` is the JSON text as the engine gave it."""

    id: str | None
    name: str
    arguments: str


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the engine counted them. None: it did not say."""

    prompt: int | None = None
    completion: int | None = None
    total: int | None = None
    cached: int | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """``logprobs`` are natural logarithms, one a token, with None or NaN where there is no number.

    ``events`` counts the events of a stream; ``meta`` is ``meta_info`` of ``/generate``.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    usage: Usage | None = None
    logprobs: tuple[float | None, ...] | None = None
    events: int = 0
    meta: Mapping[str, Any] = {}


def parse_chat(body: bytes) -> Answer:
    """A whole chat answer. Raises Malformed or Refused."""
    document = _document(body)
    choice = _choice(document)
    message = mapping(choice.get("message"))
    if not message:
        raise Malformed("JSON, but not a chat answer: it has no message")
    return Answer(
        content=_string(message.get("content")),
        reasoning=_string(message.get("reasoning_content")),
        calls=tuple(map(_call, items(message.get("tool_calls")))),
        finish_reason=text(choice.get("finish_reason")),
        matched_stop=_matched(choice),
        usage=_usage(document),
        logprobs=None if (said := _logprobs(choice)) is None else tuple(said),
    )


def parse_generated(body: bytes) -> Answer:
    """A whole answer of ``/generate``. Raises Malformed or Refused."""
    document = _document(body)
    meta = mapping(document.get("meta_info"))
    if not isinstance(document.get("text"), str) or not meta:
        raise Malformed("JSON, but not an answer of /generate: it has no text with meta_info")
    return Answer(
        content=document["text"],
        finish_reason=text(mapping(meta.get("finish_reason")).get("type")),
        usage=Usage(
            prompt=integer(meta.get("prompt_tokens")),
            completion=integer(meta.get("completion_tokens")),
            cached=integer(meta.get("cached_tokens")),
        ),
        meta=meta,
    )


class ChatStream:
    """Puts a streamed chat answer together, event by event."""

    def __init__(self) -> None:
        self._events = Events()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Growing] = {}
        self._finish: str | None = None
        self._matched: str | int | None = None
        self._usage: Usage | None = None
        self._logprobs: list[float | None] | None = None
        self.events = 0
        self.tokens_seen = False
        self.done = False

    def feed(self, chunk: bytes) -> None:
        """Take a chunk in. Raises Malformed or Refused."""
        for payload in self._events.feed(chunk):
            if payload.strip() == b"[DONE]":
                self.done = True
                return
            self.events += 1
            self._take(_document(payload))

    def answer(self) -> Answer:
        """The whole answer. Raises Malformed when the stream ended before its last event."""
        if not self.done:
            cut = " in the middle of an event" if self._events.pending else ""
            raise Malformed(f"the stream ended{cut} after {self.events} events, without its end mark [DONE]")
        calls = tuple(
            Call(one.id, "".join(one.name), "".join(one.arguments)) for _, one in sorted(self._calls.items())
        )
        return Answer(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            calls=calls,
            finish_reason=self._finish,
            matched_stop=self._matched,
            usage=self._usage,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            events=self.events,
        )

    def _take(self, document: Mapping[str, Any]) -> None:
        self._usage = _usage(document) or self._usage
        for choice in map(mapping, items(document.get("choices"))):
            delta = mapping(choice.get("delta"))
            self._content.append(_string(delta.get("content")))
            self._reasoning.append(_string(delta.get("reasoning_content")))
            for position, call in enumerate(map(mapping, items(delta.get("tool_calls")))):
                index = integer(call.get("index"))
                grown = self._calls.setdefault(position if index is None else index, _Growing())
                function = mapping(call.get("function"))
                grown.id = grown.id or text(call.get("id"))
                grown.name.append(_string(function.get("name")))
                grown.arguments.append(_string(function.get("arguments")))
            said = _logprobs(choice)
            if said is not None:
                self._logprobs = [*(self._logprobs or []), *said]
            self._finish = text(choice.get("finish_reason")) or self._finish
            found = _matched(choice)
            self._matched = self._matched if found is None else found
            self.tokens_seen = self.tokens_seen or bool(
                delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls")
            )


class _Growing:
    def __init__(self) -> None:
        self.id: str | None = None
        self.name: list[str] = []
        self.arguments: list[str] = []


def error_words(body: bytes) -> tuple[str, int | None] | None:
    """The message and code of an error document of SGLang's or OpenAI's; None when the bytes are none."""
    try:
        document = mapping(json.loads(body))
    except (ValueError, RecursionError):
        return None
    error = document.get("error")
    inner = error if isinstance(error, dict) else document
    words = text(inner.get("message")) or text(error) or text(document.get("detail"))
    return None if words is None else (words, integer(inner.get("code")))


def _document(body: bytes) -> Mapping[str, Any]:
    """One JSON object. Python's own parser, since msgspec refuses the NaN that a broken engine writes."""
    try:
        value = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise Malformed("the answer is not valid UTF-8") from None
    except RecursionError:
        raise Malformed("the answer is JSON nested past any sense") from None
    except ValueError:
        start = body.lstrip()[:1]
        kind = "an HTML or XML page" if start == b"<" else "empty" if not start else "not valid JSON"
        raise Malformed(f"the answer is {kind}") from None
    if not isinstance(value, dict):
        raise Malformed("the answer is JSON, but not an object")
    if value.get("object") == "error" or value.get("error"):
        words = error_words(body)
        raise Refused(*(words or ("an error without a message", None)))
    return value


def _choice(document: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = items(document.get("choices"))
    if not choices:
        raise Malformed("JSON, but not a chat answer: it has no choices")
    return mapping(choices[0])


def _call(value: Any) -> Call:
    call = mapping(value)
    function = mapping(call.get("function"))
    return Call(text(call.get("id")), _string(function.get("name")), _string(function.get("arguments")))


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _matched(choice: Mapping[str, Any]) -> str | int | None:
    found = choice.get("matched_stop")
    return found if isinstance(found, str | int) and not isinstance(found, bool) else None


def _usage(document: Mapping[str, Any]) -> Usage | None:
    usage = document.get("usage")
    if not isinstance(usage, dict):
        return None
    return Usage(
        prompt=integer(usage.get("prompt_tokens")),
        completion=integer(usage.get("completion_tokens")),
        total=integer(usage.get("total_tokens")),
        cached=integer(mapping(usage.get("prompt_tokens_details")).get("cached_tokens")),
    )


def _logprobs(choice: Mapping[str, Any]) -> list[float | None] | None:
    content = mapping(choice.get("logprobs")).get("content")
    if not isinstance(content, list):
        return None
    values = [mapping(token).get("logprob") for token in content]
    return [
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        for value in values
    ]
