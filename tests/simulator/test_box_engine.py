"""The engine on the box over HTTP, held against answers of real servers."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from box_lab import Lab, OpenBox, eventually

from console.simulator.spec import VERSION
from console.sources.engine.client import EngineClient
from console.sources.engine.sources import RatesSource, read_once

FIXTURES = Path(__file__).parents[1] / "fixtures"

#: Of a real one, in the version before the label came.
NEWER_LABELS = {"cache_source"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["location", "unit"],
        },
    },
}


def series(text: str) -> dict[str, tuple[set[str], set[str]]]:
    """By sample name: the labels it has, and its buckets."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for name, inside in re.findall(r"(?m)^([a-z_:]+)\{(.*)\} \S+$", text):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', inside))
        names, buckets = found.setdefault(name, (set(), set()))
        buckets |= {labels.pop("le")} if "le" in labels else set()
        names |= set(labels) - NEWER_LABELS
    return found


async def test_every_metric_has_the_name_labels_and_buckets_of_a_real_server(lab: Lab) -> None:
    await lab.chat("What is 2+2?")
    answer = await lab.http.get("/metrics")
    ours = series(answer.text)
    real: dict[str, tuple[set[str], set[str]]] = {}
    for name in ("speculation", "load"):
        real |= series((FIXTURES / f"engine/metrics-0.5.23-{name}.txt").read_text())
    shared = set(ours) & set(real)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert {name: ours[name] for name in shared} == {name: real[name] for name in shared}
    # What only an engine with a host cache, or one that retracts or evicts, writes: named by its source.
    assert set(ours) - set(real) <= {
        "sglang:evicted_tokens_total",
        "sglang:hicache_host_total_tokens",
        "sglang:hicache_host_used_tokens",
        "sglang:num_retracted_input_tokens_total",
        "sglang:num_retracted_output_tokens_total",
        "sglang:num_retracted_requests_total",
    }
    assert len(shared) >= 50


async def test_types_are_those_of_a_real_server(lab: Lab) -> None:
    def types(text: str) -> dict[str, str]:
        return dict(re.findall(r"(?m)^# TYPE (\S+) (\w+)$", text))

    ours = types((await lab.http.get("/metrics")).text)
    real = types((FIXTURES / "engine/metrics-0.5.23-load.txt").read_text())
    assert {name: kind for name, kind in ours.items() if name in real} == {
        name: real[name] for name in ours if name in real
    }


@pytest.mark.parametrize(
    ("path", "fixture"),
    [
        ("/server_info", "server_info-0.5.23-speculation"),
        ("/v1/models", "models-0.5.23"),
        ("/v1/loads", "loads-0.5.23"),
    ],
)
async def test_json_answers_have_no_key_that_a_real_one_lacks(lab: Lab, path: str, fixture: str) -> None:
    def paths(value: Any, prefix: str = "") -> set[str]:
        if isinstance(value, dict):
            return {f"{prefix}.{key}" for key in value} | {
                inner for key, item in value.items() for inner in paths(item, f"{prefix}.{key}")
            }
        if isinstance(value, list):
            return {inner for item in value for inner in paths(item, f"{prefix}[]")}
        return set()

    ours = paths((await lab.http.get(path)).json())
    real = paths(json.loads((FIXTURES / f"engine/{fixture}.json").read_text()))
    # cuda_graph_max_bs is gone in 0.5.20; the recorded load had no speculation.
    allowed = {".cuda_graph_max_bs", ".internal_states[].cuda_graph_max_bs", ".kv_events"}
    allowed |= {f".loads[].speculative{key}" for key in ("", ".accept_length", ".accept_rate")}
    assert ours - real <= allowed


async def test_the_console_reads_all_it_wants_to_know(lab: Lab) -> None:
    client = EngineClient(str(lab.http.base_url))
    rates, identity, _ = await read_once(client, 2.0)
    assert identity.version == VERSION
    assert identity.served_names == ("kimi-k2.5",)
    assert (identity.tp_size, identity.speculative_algorithm, identity.speculative_steps) == (8, "EAGLE3", 2)
    assert (identity.tool_call_parser, identity.reasoning_parser) == ("kimi_k2", "kimi_k2")
    assert rates.kv_total_tokens == identity.kv_token_capacity
    assert rates.accept_length is not None and 2.3 < rates.accept_length <= 3.0
    assert rates.hicache_total_tokens == 4 * rates.kv_total_tokens
    readings = []
    async for reading in RatesSource(client, lambda: identity).watch():
        readings.append(reading)
        if len(readings) == 2:
            break
    last = readings[-1].value
    assert readings[-1].error is None and last is not None
    assert last.decode_tokens_per_s is not None and 20 < last.decode_tokens_per_s < 3000


async def test_health_takes_a_token_and_so_a_second(lab: Lab) -> None:
    began = time.monotonic()
    answer = await lab.http.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")
    assert 0.9 < time.monotonic() - began < 3
    probes = [text for text in await lab.messages() if "#new-seq: 1, #new-token: 1, #cached-token: 0" in text]
    assert probes


async def test_ready_is_not_there_before_0_5_20(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await lab.http.get("/ready")).status_code == 404
    monkeypatch.setattr("console.simulator.engine.VERSION", "0.5.20")
    assert (await lab.http.get("/ready")).status_code == 200


async def test_paths_and_methods_that_are_not_there(lab: Lab) -> None:
    assert (await lab.http.get("/nope")).json() == {"detail": "Not Found"}
    assert (await lab.http.get("/generate")).status_code == 405
    missing = await lab.http.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_a_connection_is_kept_for_the_next_request(lab: Lab) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", lab.box.service.port)
    for _ in range(2):
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        length = int(re.findall(rb"content-length: (\d+)", head)[0])
        assert json.loads(await reader.readexactly(length))["object"] == "list"
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


async def test_nonsense_instead_of_http_harms_nobody(lab: Lab) -> None:
    for nonsense in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\ncontent-length: -4\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", lab.box.service.port)
        writer.write(nonsense)
        assert await reader.read() == b""
        writer.close()
    assert (await lab.http.get("/v1/models")).status_code == 200


# Chat ------------------------------------------------------------------------------------------


def shape(value: Any) -> Any:
    """Keys and types, not values."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


async def test_a_tool_call_looks_like_a_real_servers(lab: Lab) -> None:
    ours = await lab.chat("What is the weather in Paris, in celsius?", tools=[WEATHER])
    real = json.loads((FIXTURES / "chat/kimi.json").read_text())
    message = ours["choices"][0]["message"]
    assert message["tool_calls"] == real["choices"][0]["message"]["tool_calls"]
    assert ours["choices"][0]["finish_reason"] == "tool_calls"
    assert message["reasoning_content"]
    assert shape(message) == shape(real["choices"][0]["message"])
    assert set(ours) == set(real)
    assert set(ours["usage"]) <= set(real["usage"])
    assert (
        ours["usage"]["total_tokens"] == ours["usage"]["prompt_tokens"] + ours["usage"]["completion_tokens"]
    )


async def streamed(lab: Lab, **body: Any) -> list[dict[str, Any]]:
    events = []
    async with lab.http.stream("POST", "/v1/chat/completions", json={"stream": True, **body}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                events.append({})
            elif line:
                events.append(json.loads(line.removeprefix("data: ")))
    assert events.pop() == {}  # [DONE] is the last
    return events


async def test_a_streamed_tool_call_comes_in_the_pieces_of_a_real_server(lab: Lab) -> None:
    events = await streamed(
        lab,
        messages=[{"role": "user", "content": "What is the weather in Paris, in celsius?"}],
        tools=[WEATHER],
        stream_options={"include_usage": True},
    )
    lines = (FIXTURES / "chat/kimi-stream.txt").read_text().splitlines()
    real = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def kinds(chunks: list[dict[str, Any]]) -> set[str]:
        return {
            key
            for chunk in chunks
            for choice in chunk["choices"]
            for key, value in choice["delta"].items()
            if value
        }

    def calls(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        return [call for delta in deltas for call in delta.get("tool_calls") or []]

    assert kinds(events) == kinds(real) - {"content"}  # this model says nothing beside the call
    assert calls(events)[0] == calls(real)[0]
    assert [shape(call) for call in calls(events)[1:2]] == [shape(call) for call in calls(real)[1:2]]
    arguments = "".join(call["function"]["arguments"] for call in calls(events))
    assert json.loads(arguments) == {"location": "Paris", "unit": "celsius"}
    assert events[0]["choices"][0]["delta"] == real[0]["choices"][0]["delta"]
    assert [event["choices"][0]["finish_reason"] for event in events[-2:-1]] == ["tool_calls"]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 10


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is 17 * 23? Answer with the number only.", "391"),
        ("What is the capital of France?", "Paris"),
        ('Reply with exactly "pong".', "pong"),
        ("Count from 1 to 5.", "1, 2, 3, 4, 5"),
    ],
)
async def test_known_answers(lab: Lab, question: str, expected: str) -> None:
    answer = await lab.chat(question, temperature=0)
    message = answer["choices"][0]["message"]
    assert message["content"] == expected
    assert message["reasoning_content"] and "<think>" not in message["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_without_thinking_there_is_no_reasoning(lab: Lab) -> None:
    answer = await lab.chat("What is 2+2?", chat_template_kwargs={"thinking": False})
    assert answer["choices"][0]["message"]["reasoning_content"] is None
    assert answer["usage"]["reasoning_tokens"] == 0


async def test_limits_and_stops(lab: Lab) -> None:
    short = await lab.chat("Tell me about experts.", max_tokens=9)
    assert short["choices"][0]["finish_reason"] == "length"
    assert short["usage"]["completion_tokens"] == 9
    stopped = await lab.chat("Count from 1 to 9.", stop=["4"])
    assert stopped["choices"][0]["message"]["content"] == "1, 2, 3, "
    assert stopped["choices"][0]["matched_stop"] == "4"


async def test_two_cities_are_two_calls_and_a_tools_result_is_told(lab: Lab) -> None:
    both = await lab.chat("Compare the weather in Paris and Tokyo.", tools=[WEATHER])
    calls = both["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.get_weather:0", "functions.get_weather:1"]
    assert [json.loads(call["function"]["arguments"])["location"] for call in calls] == ["Paris", "Tokyo"]
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "21 degrees, clear"},
    ]
    answer = await lab.http.post("/v1/chat/completions", json={"messages": messages, "tools": [WEATHER]})
    assert "21 degrees, clear" in answer.json()["choices"][0]["message"]["content"]


async def test_requests_are_counted_token_by_token(lab: Lab) -> None:
    def counted(name: str, **labels: str) -> float:
        return lab.box.engine.counters.value(name, **labels)

    before = counted("num_requests_total"), counted("generation_tokens_total"), counted("prompt_tokens_total")
    lab.box.engine.traffic._next_arrival = lab.box.engine.traffic._next_burst = float("inf")
    lab.box.engine.traffic.running.clear()
    answer = await lab.chat("What is 2+2?")
    after = counted("num_requests_total"), counted("generation_tokens_total"), counted("prompt_tokens_total")
    usage = answer["usage"]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert grown == [1, usage["completion_tokens"], usage["prompt_tokens"]]


async def test_generate_tells_the_acceptance_of_its_request(lab: Lab) -> None:
    body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 40, "temperature": 0}}
    answer = (await lab.http.post("/generate", json=body)).json()
    meta = answer["meta_info"]
    assert "Paris" in answer["text"]
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / meta["spec_verify_ct"])
    assert 0 <= meta["spec_accept_rate"] <= 1


async def test_an_aborted_request_ends_as_aborted(lab: Lab) -> None:
    asked = asyncio.create_task(lab.chat("Tell me everything.", rid="abc", max_tokens=4000))

    async def served() -> bool:
        return "abc" in lab.box.engine._chat._active

    await eventually(served)
    assert (await lab.http.post("/abort_request", json={"rid": "abc"})).status_code == 200
    assert (await asked)["choices"][0]["finish_reason"] == "abort"
    assert (await lab.http.post("/abort_request", json={"rid": "unknown"})).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"messages": 3}', b'{"messages": ["x"]}', b'{"messages": [], "max_tokens": "x"}'],
)
async def test_a_request_that_is_none_is_refused_in_words(lab: Lab, body: bytes) -> None:
    answer = await lab.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["object"] == "error" and answer.json()["message"]


async def test_a_prompt_that_was_seen_before_is_cached(lab: Lab) -> None:
    body = {"text": "word " * 60, "sampling_params": {"max_new_tokens": 1}}
    first = (await lab.http.post("/generate", json=body)).json()["meta_info"]
    again = (await lab.http.post("/generate", json=body)).json()["meta_info"]
    assert first["cached_tokens"] == 0
    assert again["cached_tokens"] == again["prompt_tokens"] - 1


async def test_a_client_that_leaves_its_stream_aborts_its_request(lab: Lab) -> None:
    body = {
        "stream": True,
        "messages": [{"role": "user", "content": "Tell me everything."}],
        "max_tokens": 900,
    }
    async with lab.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        await anext(aiter(answer.aiter_lines()))

    async def aborted() -> bool:
        return lab.box.engine.counters.value("num_aborted_requests_total") == 1

    await eventually(aborted)
    assert not lab.box.engine._chat._active


async def test_a_defect_costs_one_request(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr("console.simulator.chat.answer", broken)
        body = {"messages": [{"role": "user", "content": "hello"}]}
        assert (await lab.http.post("/v1/chat/completions", json=body)).status_code == 500
    assert (await lab.chat("What is 2+2?"))["choices"][0]["message"]["content"] == "4"


async def test_flush_is_refused_while_requests_run(open_box: OpenBox) -> None:
    async with open_box() as lab:
        traffic = lab.box.engine.traffic
        assert traffic is not None
        assert traffic.running
        assert (await lab.http.post("/flush_cache")).status_code == 400
        traffic.running.clear()
        traffic.waiting.clear()
        assert (await lab.http.post("/flush_cache")).text.startswith("Cache flushed.")


# A load as the port shows it -------------------------------------------------------------------


async def test_refused_then_503_then_200(open_box: OpenBox) -> None:
    async with open_box(speed=400.0) as lab:
        await lab.inside("systemctl", "stop", "sglang.service")
        await lab.inside("systemctl", "start", "sglang.service")
        seen: list[int | str] = []
        async with asyncio.timeout(15):
            while 200 not in seen:
                answer = await EngineClient(str(lab.http.base_url)).get("/health", 5.0)
                word = answer.probe.status or answer.probe.error
                if word not in seen:
                    seen.append(word)
                if word == 503:
                    assert (await lab.http.get("/model_info")).status_code == 200
                await asyncio.sleep(0.01)
    assert seen == ["refused", 503, 200]
