"""What every smoke test works with: the target, what the engine says of itself, and ways to ask it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from console.checks.smoke.answer import parse_chat, parse_generated
from console.checks.smoke.rubbish import rubbish
from console.checks.smoke.wire import Exchange, Wire
from console.model.engine import EngineIdentity
from console.model.profile import Profile
from console.model.site import Site
from console.sources.engine.client import Answer as Got
from console.sources.engine.client import EngineClient, read_api_key
from console.sources.engine.fields import items, mapping, number, parse_json
from console.sources.engine.identity import read_identity

#: Requests with the engine at one time: a few of the dozens that it serves, so that its users feel little.
AT_ONCE = 6

#: Tokens of an answer, with and without thinking before it.
SHORT = 96
THINKING = 1024

#: Tokens that are enough once it is known that the engine speaks rubbish.
RUBBISH = 48

#: Reasoning parsers whose models think whatever the chat template is told (their detectors force it).
ALWAYS_THINKING = frozenset(
    {"deepseek-r1", "qwen3-thinking", "minimax", "minimax-append-think", "gpt-oss", "step3", "kimi"}
)

_INFO_S = 4.0


class Target(msgspec.Struct, frozen=True):
    """An engine, and the profile it should be running; None: it is not known. The key is never shown.

    ``key_note`` says what is wrong with the key's file, in words that do not hold the key.
    """

    url: str
    api_key: str | None = None
    profile: Profile | None = None
    key_note: str | None = None

    def __repr__(self) -> str:
        return f"Target(url={self.url!r}, profile={self.profile.name if self.profile else None!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("url", self.url), ("profile", self.profile.name if self.profile else None)]


def target_of(site: Site, profile: Profile | None) -> Target:
    """The engine of a site, with the key that its file holds now."""
    if site.service.api_key_file is None:
        return Target(site.service.url, None, profile)
    key, note = read_api_key(Path(site.service.api_key_file))
    return Target(site.service.url, key, profile, note if key is None else None)


class Session:
    """One run against one engine. ``look`` comes first, ``close`` last."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.models: Got | None = None
        self.identity = EngineIdentity()
        self.server: Mapping[str, Any] = {}  # /server_info
        self.said: bool = False  # the engine said something of itself beside its models
        self._client = EngineClient(target.url, api_key=target.api_key)
        self._wire = Wire(target.url, target.api_key, target.key_note, self._client, AT_ONCE)

    @property
    def profile(self) -> Profile | None:
        return self.target.profile

    @property
    def tool_parser(self) -> str | None:
        """The parser that runs; while that is not known, the one of the profile."""
        asked = self.profile.text("tool-call-parser") if self.profile else None
        return self.identity.tool_call_parser if self.said else asked

    @property
    def reasoning_parser(self) -> str | None:
        asked = self.profile.text("reasoning-parser") if self.profile else None
        return self.identity.reasoning_parser if self.said else asked

    @property
    def expects_reasoning(self) -> bool:
        return self.profile.expect.reasoning if self.profile else self.identity.reasoning_parser is not None

    @property
    def expects_tools(self) -> bool:
        return self.profile.expect.tool_calls if self.profile else self.identity.tool_call_parser is not None

    @property
    def always_thinks(self) -> bool:
        return self.reasoning_parser in ALWAYS_THINKING

    @property
    def average_accept_length(self) -> float | None:
        """Tokens per verify step since the engine started; None: off, or not counted yet."""
        states = map(mapping, items(self.server.get("internal_states")))
        found = [number(state.get("avg_spec_accept_length")) for state in states]
        known = [value for value in found if value]
        return sum(known) / len(known) if known else None

    async def look(self) -> None:
        """What the engine says of itself. Never raises: what it does not say stays unknown."""
        models, server, model = await asyncio.gather(
            self._client.get("/v1/models", _INFO_S),
            self._first(("/server_info", "/get_server_info")),
            self._first(("/model_info", "/get_model_info")),
        )
        self.models = models
        self.server = mapping(parse_json(server.body)) if server.probe.ok else {}
        known = mapping(parse_json(model.body)) if model.probe.ok else {}
        self.said = bool(self.server) or "tool_call_parser" in known
        self.identity = read_identity(
            server.body if server.probe.ok else None,
            models.body if models.probe.ok else None,
            model.body if model.probe.ok else None,
        )

    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        stream: bool = False,
        thinking: bool = False,
        max_tokens: int = SHORT,
        **more: Any,
    ) -> Exchange:
        """One chat at temperature 0; ``more`` goes into the body. A text is one user message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        names = self.identity.served_names
        served = names[0] if names else self.profile.served_name if self.profile else None
        body: dict[str, Any] = {
            "model": served or "default",
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": max(max_tokens, THINKING) if thinking or self.always_thinks else max_tokens,
            "stream": stream,
            # Templates read one or the other: kimi_k2 and deepseek-v3 "thinking", qwen3 and glm45
            # "enable_thinking"; one that reads neither is not disturbed.
            "chat_template_kwargs": {"thinking": thinking, "enable_thinking": thinking},
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **more,
        }
        mode = "streamed" if stream else "whole"
        if self.expects_reasoning:
            mode += ", thinking" if thinking else ", not thinking"
        exchange = await self._wire.send("/v1/chat/completions", body, mode, parse_chat)
        answer = exchange.answer
        if answer is not None:
            cut = answer.finish_reason == "length"
            if rubbish(answer.content, cut=cut) or rubbish(answer.reasoning, cut=cut):
                self._wire.token_cap = RUBBISH
        return exchange

    async def in_each_mode(
        self, messages: str | Sequence[Mapping[str, Any]], *, thinking: bool = True, **more: Any
    ) -> list[Exchange]:
        """The same chat whole and streamed; with ``thinking``, also while the model thinks."""
        switches = (False, True) if thinking and self.expects_reasoning else (False,)
        return await asyncio.gather(
            *(
                self.chat(messages, stream=stream, thinking=thinks, **more)
                for thinks in switches
                for stream in (False, True)
            )
        )

    async def generate(self, text: str, max_tokens: int, mode: str) -> Exchange:
        """One raw generation, whose ``meta_info`` tells what a chat does not."""
        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens}}
        return await self._wire.send("/generate", body, mode, parse_generated)

    def hide(self, text: str) -> str:
        """The text without the API key, should the engine have echoed it."""
        key = self.target.api_key
        return text.replace(key, "(hidden)") if key else text

    @staticmethod
    def nonce() -> str:
        """A word that no prompt before had, so that no cache knows what follows it."""
        return secrets.token_hex(6)

    @property
    def requests_open(self) -> int:
        return self._wire.requests_open

    async def close(self) -> None:
        """Abort what is still with the engine."""
        await self._wire.close()
        await self._client.close()

    async def _first(self, paths: tuple[str, str]) -> Got:
        """The answer of the first path that this version has: the names changed in 0.5.8."""
        got = await self._client.get(paths[0], _INFO_S)
        return got if got.probe.status != 404 else await self._client.get(paths[1], _INFO_S)
