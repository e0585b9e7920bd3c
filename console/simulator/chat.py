"""Requests of clients: chat and raw generation, whole or streamed, counted like any other request."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from console.simulator.answers import Said, ToolCall, answer, complete, fill, raw_calls, text_of, tokens
from console.simulator.clock import Clock
from console.simulator.faults import Faults
from console.simulator.spec import EngineSpec
from console.simulator.traffic import SCALING, SINGLE_TOKENS_PER_S, Request, Traffic
from console.simulator.web import Call, Reply

#: The token that ends a turn of Kimi-K2, ``<|im_end|>``.
_END_OF_TURN = 163_586

_PROMPTS_KEPT = 64
_DEFAULT_LIMIT = 4096
_RAW_LIMIT = 128


class _Aborted(Exception):
    """The request was aborted by its id."""


class Piece(msgspec.Struct, frozen=True):
    """One token and where it belongs. ``call`` is the index of a tool call."""

    kind: str  # reasoning, content, call-name, call-arguments
    text: str
    call: int = 0


class Output(msgspec.Struct, frozen=True):
    """All that will be said, cut to the limit."""

    pieces: tuple[Piece, ...]
    finish_reason: str
    matched_stop: int | str | None
    hidden: int  # tokens that are not text: think tags, tool markers, the end of the turn

    @property
    def tokens(self) -> int:
        return len(self.pieces) + self.hidden

    @property
    def reasoning_tokens(self) -> int:
        return sum(piece.kind == "reasoning" for piece in self.pieces)

    def text(self, kind: str, call: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == kind and piece.call == call)

    @property
    def calls(self) -> list[ToolCall]:
        indices = sorted({piece.call for piece in self.pieces if piece.kind == "call-name"})
        return [ToolCall(self.text("call-name", i), self.text("call-arguments", i)) for i in indices]


class ChatDesk:
    """Takes requests over HTTP and lets the scheduler serve them."""

    def __init__(
        self, spec: EngineSpec, traffic: Traffic, faults: Faults, rng: random.Random, clock: Clock
    ) -> None:
        self._spec = spec
        self._traffic = traffic
        self._faults = faults
        self._rng = rng
        self._clock = clock
        self._prompts: list[list[str]] = []
        self._active: dict[str, Request] = {}
        self._aborted: set[str] = set()

    async def chat(self, call: Call, reply: Reply) -> None:
        """``/v1/chat/completions``."""
        try:
            body = msgspec.json.decode(call.body)
            messages = body["messages"]
            if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
                raise TypeError("messages must be a list of objects")
            limit = _limit(body.get("max_completion_tokens") or body.get("max_tokens"), _DEFAULT_LIMIT)
        except (msgspec.DecodeError, KeyError, TypeError) as problem:
            reply.send(400, _error(f"{type(problem).__name__}: {problem}"))
            return
        tools = body.get("tools") or []
        tools = (
            [] if body.get("tool_choice") == "none" else [tool for tool in tools if isinstance(tool, Mapping)]
        )
        prompt = self._chat_prompt(messages, tools)
        if len(prompt) + limit > self._spec.model.context_length:
            words = (
                "Requested token count exceeds the model's maximum context length of "
                f"{self._spec.model.context_length} tokens. You requested a total of "
                f"{len(prompt) + limit} tokens: {len(prompt)} tokens from the input messages and {limit} "
                "tokens for the completion."
            )
            reply.send(400, _error(words))
            return
        output = self._chat_output(body, messages, tools, limit)
        stream = bool(body.get("stream"))
        request = self._request(prompt, output, stream, body)
        model = body.get("model") or self._spec.served_name
        if stream:
            await self._stream_chat(reply, body, request, output, str(model))
        else:
            await self._whole_chat(reply, body, request, output, str(model))

    async def generate(self, call: Call, reply: Reply) -> None:
        """``/generate``."""
        try:
            body = msgspec.json.decode(call.body)
            text = body.get("text")
            ids = body.get("input_ids")
            if not isinstance(text, str) and not isinstance(ids, list):
                raise TypeError("Either text, input_ids or input_embeds should be provided.")
            sampling = body.get("sampling_params") or {}
            limit = _limit(sampling.get("max_new_tokens"), _RAW_LIMIT)
        except (msgspec.DecodeError, AttributeError, TypeError) as problem:
            reply.send(400, _error(str(problem)))
            return
        prompt = tokens(text) if isinstance(text, str) else [str(token) for token in ids]
        said = Said(complete(text or ""))
        if "nan" in self._faults:
            said = Said("!" * limit)
        output = self._cut(said, limit, _stops(sampling.get("stop")))
        request = self._request(prompt, output, bool(body.get("stream")), body)
        began = self._clock.wall()
        try:
            async with contextlib.aclosing(self._serve(request, output)) as steps:
                async for _ in steps:
                    pass
        except _Aborted:
            reply.send(
                200, msgspec.json.encode({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}})
            )
            return
        finish: dict[str, object] = {"type": output.finish_reason}
        if output.finish_reason == "length":
            finish["length"] = limit
        else:
            finish["matched"] = output.matched_stop
        meta: dict[str, object] = {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": request.prompt,
            "weight_version": "default",
            "total_retractions": 0,
            "completion_tokens": output.tokens,
            "cached_tokens": request.cached,
            "e2e_latency": self._clock.wall() - began,
        }
        if body.get("return_logprob"):
            broken = "nan" in self._faults
            meta["output_token_logprobs"] = [
                [None if broken else -0.0231, 1000 + index, None] for index in range(output.tokens)
            ]
        if self._spec.speculates:
            accept = self._traffic.accept_now
            verify = max(1, round(output.tokens / accept))
            meta["spec_accept_rate"] = (output.tokens / verify - 1) / self._spec.steps
            meta["spec_accept_length"] = output.tokens / verify
            meta["spec_verify_ct"] = verify
            meta["spec_num_correct_drafts"] = max(0, output.tokens - verify)
            meta["spec_num_proposed_drafts"] = verify * self._spec.steps
        answer_body = {
            "text": output.text("content"),
            "output_ids": [1000 + index for index in range(output.tokens)],
            "meta_info": meta,
        }
        if body.get("stream"):
            reply.begin()
            await reply.chunk(b"data: " + msgspec.json.encode(answer_body) + b"\n\n")
            await reply.chunk(b"data: [DONE]\n\n")
            reply.end()
        else:
            reply.send(200, msgspec.json.encode(answer_body))

    def abort(self, body: bytes) -> None:
        """``/abort_request``: one request by id, or all. An unknown id is no error."""
        try:
            wanted = msgspec.json.decode(body) if body else {}
        except msgspec.DecodeError:
            return
        if not isinstance(wanted, Mapping):
            return
        if wanted.get("abort_all"):
            self._aborted.update(self._active)
            for request in [*self._traffic.running, *self._traffic.waiting]:
                if not request.served:
                    self._traffic.finish(request, aborted=True)
        elif isinstance(wanted.get("rid"), str):
            self._aborted.add(wanted["rid"])

    # What is said ------------------------------------------------------------------------------

    def _chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[object]) -> list[str]:
        prompt: list[str] = tokens(msgspec.json.encode(tools).decode()) if tools else []
        for message in messages:
            prompt += ["<|im_start|>", str(message.get("role")), "<|im_middle|>"]
            prompt += tokens(text_of(message.get("content")))
            prompt.append("<|im_end|>")
        return [*prompt, "<|im_assistant|>", "assistant", "<|im_middle|>"]

    def _chat_output(
        self,
        body: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        limit: int,
    ) -> Output:
        if "nan" in self._faults:
            return self._cut(Said("!" * limit), limit, ())
        switches = body.get("chat_template_kwargs") or {}
        thinking = switches.get("thinking", switches.get("enable_thinking", True)) is not False
        said = answer(messages, tools, thinking, body.get("tool_choice"))
        wanted = body.get("response_format")
        if isinstance(wanted, Mapping) and wanted.get("type") == "json_object":
            said = Said(msgspec.json.encode({"answer": said.content}).decode(), said.reasoning)
        elif isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
            form = wanted.get("json_schema")
            schema = form.get("schema") if isinstance(form, Mapping) else None
            said = Said(fill(schema if isinstance(schema, Mapping) else {}, messages), said.reasoning)
        leaks = "leak" in self._faults or (said.calls and self._spec.tool_call_parser is None)
        if leaks and said.calls:
            kimi = self._spec.model.model_type.startswith("kimi")
            said = Said(said.content + raw_calls(said.calls, kimi), said.reasoning)
        if said.reasoning is not None and self._spec.reasoning_parser is None:
            said = Said(f"<think>{said.reasoning}</think>{said.content}", None, said.calls)
        return self._cut(said, limit, _stops(body.get("stop")))

    def _cut(self, said: Said, limit: int, stops: Sequence[str]) -> Output:
        content, matched = said.content, None
        for stop in stops:
            head, found, _ = content.partition(stop)
            if found:
                content, matched = head, stop
        pieces = [Piece("reasoning", token) for token in tokens(said.reasoning or "")]
        content_tokens = list(content) if content and not content.strip("!") else tokens(content)
        pieces += [Piece("content", token) for token in content_tokens]
        for index, call in enumerate(said.calls):
            pieces.append(Piece("call-name", call.name, index))
            pieces += [Piece("call-arguments", token, index) for token in tokens(call.arguments)]
        hidden = 1 + (2 if said.reasoning else 0) + (2 + 4 * len(said.calls) if said.calls else 0)
        if len(pieces) + hidden > limit:
            return Output(tuple(pieces[:limit]), "length", None, 0)
        if said.calls:
            return Output(tuple(pieces), "tool_calls", _END_OF_TURN, hidden)
        return Output(tuple(pieces), "stop", matched or _END_OF_TURN, hidden)

    # How it is served --------------------------------------------------------------------------

    def _request(self, prompt: list[str], output: Output, stream: bool, body: Mapping[str, Any]) -> Request:
        cached = min(len(prompt) - 1, max((_common(prompt, other) for other in self._prompts), default=0))
        self._prompts = [*self._prompts[1 - _PROMPTS_KEPT :], prompt]
        request = self._traffic.new_request(max(1, len(prompt)), max(0, cached), output.tokens, stream)
        request.arrived = self._clock.wall()
        if isinstance(body.get("rid"), str):
            request.rid = body["rid"]
        return request

    async def _serve(self, request: Request, output: Output) -> AsyncGenerator[tuple[Piece, ...], None]:
        """The pieces as verify steps bring them. _Aborted when somebody aborts the request."""
        traffic = self._traffic
        self._active[request.rid] = request
        traffic.submit(request)
        done = False
        try:
            while request not in traffic.running:
                await asyncio.sleep(0.02)
                self._check(request)
            place = 0
            while place < len(output.pieces):
                while traffic.frozen:
                    await asyncio.sleep(0.1)
                    self._check(request)
                step = self._step()
                await asyncio.sleep(step * len(traffic.running) ** (1 - SCALING) / SINGLE_TOKENS_PER_S)
                self._check(request)
                traffic.produce(request, min(step, len(output.pieces) - place))
                yield output.pieces[place : place + step]
                place += step
            traffic.produce(request, output.hidden)
            done = True
        finally:
            self._active.pop(request.rid, None)
            self._aborted.discard(request.rid)
            traffic.finish(request, aborted=not done)

    def _step(self) -> int:
        """Tokens that one verify step brings: up to the steps and the bonus token."""
        if not self._spec.speculates:
            return 1
        mean = self._traffic.accept_now
        return 1 + sum(self._rng.random() < (mean - 1) / self._spec.steps for _ in range(self._spec.steps))

    def _check(self, request: Request) -> None:
        if request.rid in self._aborted:
            raise _Aborted

    def _logprobs(self, body: Mapping[str, Any], pieces: Sequence[Piece]) -> dict[str, object] | None:
        """One entry a token, when the request asked for them; null where the model computes NaN."""
        if not body.get("logprobs"):
            return None
        value = None if "nan" in self._faults else -0.0231
        return {
            "content": [
                {
                    "token": piece.text,
                    "bytes": list(piece.text.encode()),
                    "logprob": value,
                    "top_logprobs": [],
                }
                for piece in pieces
            ]
        }

    async def _whole_chat(
        self, reply: Reply, body: Mapping[str, Any], request: Request, output: Output, model: str
    ) -> None:
        finish = output.finish_reason
        try:
            async with contextlib.aclosing(self._serve(request, output)) as steps:
                async for _ in steps:
                    if reply.gone:
                        raise ConnectionResetError
        except _Aborted:
            output, finish = Output((), "abort", None, 0), "abort"
        content = output.text("content")
        message: dict[str, object] = {
            "role": "assistant",
            "content": content if content or not output.calls else "",
            "reasoning_content": output.text("reasoning") or None,
            "tool_calls": [
                {
                    "id": self._call_id(call.name, index),
                    "index": index,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(output.calls)
            ]
            or None,
        }
        document = {
            "id": request.rid,
            "object": "chat.completion",
            "created": int(request.arrived),
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": self._logprobs(body, output.pieces),
                    "finish_reason": finish,
                    "matched_stop": output.matched_stop,
                }
            ],
            "usage": _usage(request, output),
            "metadata": {"weight_version": "default"},
        }
        reply.send(200, msgspec.json.encode(document))

    async def _stream_chat(
        self, reply: Reply, body: Mapping[str, Any], request: Request, output: Output, model: str
    ) -> None:
        def event(
            delta: Mapping[str, object],
            finish: str | None = None,
            matched: object = None,
            logprobs: object = None,
        ) -> bytes:
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": logprobs,
                "finish_reason": finish,
                "matched_stop": matched,
            }
            return _event(request, model, [choice])

        reply.begin()
        finish = output.finish_reason
        await reply.chunk(event({"role": "assistant", "content": "", "reasoning_content": None}))
        try:
            async with contextlib.aclosing(self._serve(request, output)) as steps:
                async for pieces in steps:
                    said = self._logprobs(body, pieces)  # with the first delta of the step, as SGLang does
                    for delta in self._deltas(pieces):
                        await reply.chunk(event(delta, logprobs=said))
                        said = None
        except _Aborted:
            finish = "abort"
        await reply.chunk(event({"reasoning_content": None}, finish, output.matched_stop))
        options = body.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            await reply.chunk(_event(request, model, [], _usage(request, output)))
        await reply.chunk(b"data: [DONE]\n\n")
        reply.end()

    def _deltas(self, pieces: Sequence[Piece]) -> list[dict[str, object]]:
        """The deltas of one step: text of one kind together, a call's name alone."""
        deltas: list[dict[str, object]] = []
        empty: dict[str, object] = {"role": None, "content": None, "reasoning_content": None}
        last: tuple[str, int] | None = None
        for piece in pieces:
            key = (piece.kind, piece.call)
            if piece.kind == "call-name":
                function: dict[str, object] = {"name": piece.text, "arguments": ""}
                call_id = self._call_id(piece.text, piece.call)
                deltas.append({**empty, "tool_calls": [_fragment(piece.call, call_id, function)]})
            elif piece.kind == "call-arguments":
                function = {"name": None, "arguments": piece.text}
                deltas.append({**empty, "tool_calls": [_fragment(piece.call, None, function)]})
            else:
                field = "reasoning_content" if piece.kind == "reasoning" else "content"
                if last == key:
                    deltas[-1][field] = str(deltas[-1][field]) + piece.text
                else:
                    deltas.append({**empty, field: piece.text})
            last = key
        return deltas

    def _call_id(self, name: str, index: int) -> str:
        if self._spec.tool_call_parser == "kimi_k2":
            return f"functions.{name}:{index}"
        return f"call_{self._rng.getrandbits(96):024x}"


def _fragment(index: int, call_id: str | None, function: Mapping[str, object]) -> dict[str, object]:
    return {"id": call_id, "index": index, "type": "function", "function": function}


def _usage(request: Request, output: Output) -> dict[str, object]:
    return {
        "prompt_tokens": request.prompt,
        "total_tokens": request.prompt + output.tokens,
        "completion_tokens": output.tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": output.reasoning_tokens,
    }


def _event(
    request: Request, model: str, choices: Sequence[object], usage: Mapping[str, object] | None = None
) -> bytes:
    chunk = {
        "id": request.rid,
        "object": "chat.completion.chunk",
        "created": int(request.arrived),
        "model": model,
        "choices": choices,
        "usage": usage,
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _error(message: str) -> bytes:
    return msgspec.json.encode(
        {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
    )


def _limit(value: object, default: int) -> int:
    """TypeError for a limit that is no count."""
    if value is None or value == 0:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError("a limit of new tokens must be a positive integer")
    return value


def _stops(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(stop for stop in value if isinstance(stop, str)) if isinstance(value, list) else ()


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))
