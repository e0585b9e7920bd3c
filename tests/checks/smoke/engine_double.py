"""An engine for one test: speaks SGLang's HTTP, answers our prompts well, and can be spoiled in any way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from console.checks.smoke import Target, prompts
from console.checks.smoke.session import AT_ONCE
from console.model.profile import Expect, Profile, Reference
from console.simulator.web import Call, Reply, WebServer

FIXTURES = Path(__file__).parents[2] / "fixtures"

Said = dict[str, Any]
Spoil = Callable[[dict[str, Any], Said], None]
Raw = Callable[[asyncio.StreamWriter], Awaitable[None]]

PROSE = (
    "A graphics card turns data into the pictures that a screen shows. It has thousands of small "
    "processors that work side by side. Today it also computes what language models need."
)


def profile(**changed: Any) -> Profile:
    """What the double serves when it is healthy."""
    args = {
        "model-path": "/models/k",
        "served-model-name": "kimi-k2.5",
        "tool-call-parser": "kimi_k2",
        "reasoning-parser": "kimi_k2",
        "speculative-algorithm": "EAGLE3",
    }
    expect = changed.pop("expect", Expect(tool_calls=True, reasoning=True, accept_length_min=1.2))
    args |= changed.pop("args", {})
    reference = Reference(results=changed.pop("results", {}))
    return Profile(name="kimi", title="Kimi", args=args, expect=expect, reference=reference)


class EngineDouble:
    """``spoil`` changes an answer before it is sent; ``raw`` writes bytes instead of any answer at all."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {
            "version": "0.5.18",
            "speculative_algorithm": "EAGLE3",
            "disable_radix_cache": False,
            "internal_states": [{"avg_spec_accept_length": 2.4}],
        }
        self.model: dict[str, Any] = {"tool_call_parser": "kimi_k2", "reasoning_parser": "kimi_k2"}
        self.names = ["kimi-k2.5"]
        self.spoil: Spoil = lambda body, said: None
        self.raw: Raw | None = None
        self.status: tuple[int, bytes] | None = None
        self.delay = 0.0
        self.used_tokens: Callable[[], int] = lambda: 7
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.open = self.most_open = 0
        self.full = asyncio.Event()  # as many requests are here as ever come at once
        self._web = WebServer(self._handle)

    async def start(self) -> str:
        return f"http://127.0.0.1:{await self._web.open(0)}"

    async def stop(self) -> None:
        await self._web.close()

    async def _handle(self, call: Call, reply: Reply) -> None:
        self.headers.append(call.headers)
        match call.path:
            case "/v1/models":
                data = [{"id": name, "object": "model", "max_model_len": 4096} for name in self.names]
                self._send(reply, {"object": "list", "data": data})
            case "/server_info":
                self._send(reply, self.info)
            case "/model_info":
                self._send(reply, self.model)
            case "/v1/loads":
                load = {"num_running_reqs": 1, "num_waiting_reqs": 0, "num_used_tokens": self.used_tokens()}
                reply.send(200, json.dumps({"loads": [load]}).encode())
            case "/abort_request":
                self.aborted.append(json.loads(call.body)["rid"])
                reply.send(200)
            case "/v1/chat/completions" | "/generate":
                await self._counted(call, reply)
            case _:
                reply.send(404, b'{"detail":"Not Found"}')

    def _send(self, reply: Reply, document: Any) -> None:
        if self.status is not None:
            reply.send(*self.status)
        else:
            reply.send(200, json.dumps(document).encode())

    async def _counted(self, call: Call, reply: Reply) -> None:
        body = json.loads(call.body)
        self.asked.append(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.open >= AT_ONCE:
            self.full.set()
        try:
            if self.status is not None:
                reply.send(*self.status)
            elif self.raw is not None:
                await self.raw(reply._writer)
                raise ConnectionResetError
            else:
                await asyncio.sleep(self.delay)
                await (self._generate if call.path == "/generate" else self._chat)(body, reply)
        finally:
            self.open -= 1

    async def _generate(self, body: dict[str, Any], reply: Reply) -> None:
        seen = [one["text"] for one in self.asked[:-1] if "text" in one]
        limit = body["sampling_params"]["max_new_tokens"]
        meta = {
            "prompt_tokens": 900,
            "completion_tokens": limit,
            "cached_tokens": 896 if body["text"] in seen else 0,
            "finish_reason": {"type": "length"},
            "spec_verify_ct": limit / 2,
        }
        said: Said = {"text": "Rome.", "meta": meta}
        self.spoil(body, said)
        reply.send(200, json.dumps({"text": said["text"], "meta_info": said["meta"]}).encode())

    async def _chat(self, body: dict[str, Any], reply: Reply) -> None:
        said = healthy(body)
        self.spoil(body, said)
        if body["stream"]:
            await stream(said, reply)
        else:
            reply.send(200, json.dumps(whole(said)).encode())


def healthy(body: dict[str, Any]) -> Said:
    """What a good model says to each of our prompts."""
    messages = body["messages"]
    question = next(one["content"] for one in reversed(messages) if one["role"] == "user")
    said: Said = {"content": "", "reasoning": "", "calls": [], "finish": "stop", "logprobs": None}
    if body["chat_template_kwargs"]["thinking"]:
        said["reasoning"] = "The user asks for something simple."
    known = next((wanted for asked, wanted in prompts.KNOWN if asked == question), None)
    if messages[-1]["role"] == "tool":
        said["content"] = "It is clear in Paris, at 31.4 degrees."
    elif known is not None:
        said["content"] = known.capitalize()
    elif "tools" in body:
        said["finish"] = "tool_calls"
        said["calls"] = [
            {"id": f"functions.{name}:{number}", "name": name, "arguments": json.dumps(given)}
            for number, (name, given) in enumerate(_calls(body, question))
        ]
    elif "response_format" in body:
        city = {"name": "Paris", "country": "France", "population_millions": 2.1, "landmarks": ["Louvre"]}
        said["content"] = json.dumps(city)
    elif question == prompts.COUNTING:
        said["content"] = "1, 2, 3, 4, 5, 6, "
        said["matched"] = "7"
    else:
        said["content"] = PROSE
    words = len(said["content"].split()) + len(said["reasoning"].split())
    if words > body["max_tokens"]:
        words, said["finish"] = body["max_tokens"], "length"
        said["content"] = " ".join(said["content"].split()[: body["max_tokens"]])
    words = max(1, words)
    prompt = 30 + len(question) // 4
    said["usage"] = {"prompt_tokens": prompt, "completion_tokens": words, "total_tokens": prompt + words}
    if body.get("logprobs"):
        said["logprobs"] = [-0.1, -0.2]
    return said


def _calls(body: dict[str, Any], question: str) -> list[tuple[str, Any]]:
    if "tool_choice" in body:
        return [(body["tool_choice"]["function"]["name"], {"zone": "Berlin"})]
    if question == prompts.TWO_CALLS:
        return [("get_weather", {"city": city, "unit": "celsius"}) for city in ("Paris", "Tokyo")]
    if question == prompts.ONE_CALL:
        return [("get_weather", {"city": "Paris", "unit": "celsius"})]
    return [("save_record", prompts.RECORD)]


def whole(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": said["content"] or None,
        "reasoning_content": said["reasoning"] or None,
    }
    if said["calls"]:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "index": index,
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for index, call in enumerate(said["calls"])
        ]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": said["finish"],
        "matched_stop": said.get("matched"),
        "logprobs": _logprobs(said),
    }
    return {"object": "chat.completion", "choices": [choice], "usage": said["usage"]}


async def stream(said: Said, reply: Reply) -> None:
    """In pieces of seven characters, so that markers lie across their edges."""
    reply.begin()

    async def send(delta: Said, **more: Any) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": None, **more}
        await reply.chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    await send({"role": "assistant", "content": ""}, logprobs=_logprobs(said))
    for field, text in (("reasoning_content", said["reasoning"]), ("content", said["content"])):
        for start in range(0, len(text), 7):
            await send({field: text[start : start + 7]})
    for index, call in enumerate(said["calls"]):
        head = {"index": index, "id": call["id"], "function": {"name": call["name"], "arguments": ""}}
        await send({"tool_calls": [head]})
        for start in range(0, len(call["arguments"]), 7):
            piece = {"arguments": call["arguments"][start : start + 7], "name": None}
            await send({"tool_calls": [{"index": index, "id": None, "function": piece}]})
    await send({}, finish_reason=said["finish"], matched_stop=said.get("matched"))
    if said["usage"] is not None:
        usage = json.dumps({"choices": [], "usage": said["usage"]}).encode()
        await reply.chunk(b"data: " + usage + b"\n\n")
    await reply.chunk(b"data: [DONE]\n\n")
    reply.end()


def _logprobs(said: Said) -> Said | None:
    if said["logprobs"] is None:
        return None
    return {"content": [{"token": "x", "logprob": value} for value in said["logprobs"]]}


@contextlib.asynccontextmanager
async def serving(engine: EngineDouble | None = None) -> AsyncIterator[tuple[EngineDouble, Target]]:
    """A double on a port of its own, and the target that it is."""
    engine = engine or EngineDouble()
    url = await engine.start()
    try:
        yield engine, Target(url, None, profile())
    finally:
        await engine.stop()
