"""What answers there is broken, busy, foreign or gone: a finding with the right words, never a traceback."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket

import pytest

from console.checks.smoke import Target, run_smoke, summary
from console.checks.smoke.wire import RID_PREFIX
from console.model.finding import Finding
from tests.checks.smoke.engine_double import EngineDouble, Raw, Said, profile, serving

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a "},"finish_reason":null}]}\n\n'
PAGE = b"<html><body><h1>Bad Gateway</h1></body></html>"
QUEUE = b'{"object":"error","message":"The request queue is full.","type":"BadRequestError","code":503}'


def sends(*parts: bytes) -> Raw:
    async def raw(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return raw


async def ask(engine: EngineDouble, *only: str, deadline: float = 20.0) -> dict[str, Finding]:
    async with serving(engine) as (_, target):
        found = await run_smoke(target, only=only, deadline=deadline)
    return {finding.id: finding for finding in found}


@pytest.mark.parametrize(
    ("status", "body", "verdict", "words"),
    [
        (401, b'{"error":"Unauthorized"}', "fail", "unauthorised (HTTP 401: Unauthorized)"),
        (403, b'{"error":"Forbidden"}', "fail", "unauthorised (HTTP 403: Forbidden)"),
        (429, b"", "unknown", "busy (HTTP 429)"),
        (503, QUEUE, "unknown", "busy (HTTP 503: The request queue is full.)"),
        (503, b"", "fail", "not ready (HTTP 503)"),
        (500, b"Internal Server Error", "fail", "refused the request (HTTP 500)"),
        (400, b'{"message":"context too long"}', "fail", "refused the request (HTTP 400: context too long)"),
        (502, PAGE, "fail", "not an engine's answer (HTTP 502: an HTML page)"),
        (504, b"", "fail", "a proxy answered that the engine does not"),
        (307, b"", "fail", "redirects"),
        (500, b'{"message":"\x1b[31mred\x1b[0m\\u202e"}', "fail", "HTTP 500"),
    ],
)
async def test_a_status_is_told_in_words(status: int, body: bytes, verdict: str, words: str) -> None:
    engine = EngineDouble()
    engine.status = (status, body)
    found = await ask(engine, "served-name", "sanity", "tools-call")
    sanity = found["sanity"]
    assert (sanity.verdict, found["served-name"].verdict) == (verdict, verdict)
    assert words in summary(sanity)
    assert "\x1b" not in repr(found) and "\u202e" not in repr(found)
    if verdict == "unknown":
        assert sanity.remedy is not None and "try again" in sanity.remedy
    if status == 401:
        assert sanity.remedy is not None and "service.api_key_file" in sanity.remedy


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (sends(HEAD + b"content-length: 9\r\n\r\n{nonsense"), "not valid JSON"),
        (sends(HEAD + b"content-length: 2\r\n\r\n[]"), "not an object"),
        (sends(HEAD + b"content-length: 2\r\n\r\n{}"), "has no choices"),
        (sends(HEAD + b"content-length: 0\r\n\r\n"), "the answer is empty"),
        (sends(HEAD + b'content-length: 11\r\n\r\n{"a":"\xff\xfe\xff"}'), "not valid UTF-8"),
        (sends(HEAD + b"content-length: 400\r\n\r\n{" + b'"a":' * 20), "died while answering"),
        (sends(HEAD + b"content-length: %d\r\n\r\n" % len(PAGE) + PAGE), "an HTML or XML page"),
        (sends(HEAD + b"content-length: 400000\r\n\r\n" + b"[" * 400_000), "nested past any sense"),
        (sends(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "not HTTP"),
        (sends(b""), "died while answering"),
        (
            sends(HEAD + b"content-encoding: gzip\r\ncontent-length: 33\r\n\r\n" + gzip.compress(b"{}")),
            "compressed",
        ),
        (sends(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 5\r\n\r\n<html"), "HTML page"),
    ],
)
async def test_an_answer_that_is_none_is_told_in_words(raw: Raw, words: str) -> None:
    engine = EngineDouble()
    engine.raw = raw
    found = (await ask(engine, "sanity"))["sanity"]
    assert found.verdict == "fail"
    assert words in summary(found)
    assert "Traceback" not in found.evidence and "defect" not in found.evidence


@pytest.mark.parametrize(
    ("parts", "verdict", "words"),
    [
        ((TOKEN, b"data: [DO"), "fail", "in the middle of an event"),
        ((TOKEN, TOKEN), "fail", "without its end mark [DONE]"),
        ((TOKEN, b'data: {"choices": [{"del'), "fail", "in the middle of an event"),
        ((TOKEN, b"this is no event\n\n"), "fail", "not an event stream"),
        ((TOKEN, b"data: {broken\n\n"), "fail", "not valid JSON"),
        ((TOKEN, b'data: {"a":"\xff"}\n\n'), "fail", "not valid UTF-8"),
        ((b'data: {"error":' + QUEUE + b"}\n\n",), "unknown", "busy (HTTP 503: The request queue is full.)"),
        ((TOKEN * 400,), "fail", "streams without end"),
        ((b": keep-alive\n\n" * 300_000,), "fail", "larger than 2 MB"),
    ],
)
async def test_a_stream_that_goes_wrong_is_told_in_words(
    parts: tuple[bytes, ...], verdict: str, words: str
) -> None:
    engine = EngineDouble()
    engine.raw = sends(EVENTS, *parts)
    found = (await ask(engine, "burst"))["burst"]  # which only streams
    assert found.verdict == verdict
    assert words in summary(found)


async def test_a_huge_answer_is_cut_off_and_its_request_aborted() -> None:
    sent = 0

    async def raw(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD + b"content-length: 100000000\r\n\r\n")
        for _ in range(1000):
            writer.write(b" " * 100_000)
            await writer.drain()
            sent += 100_000

    engine = EngineDouble()
    engine.raw = raw
    found = (await ask(engine, "degenerate"))["degenerate"]
    assert "larger than 2 MB; cut off" in summary(found)
    assert sent < 30_000_000  # what the sockets hold, of twice 100 MB
    assert sorted(engine.aborted) == sorted(body["rid"] for body in engine.asked)


async def test_nothing_listens_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        found = await run_smoke(Target(url, None, profile()))
    asked = [one for one in found if one.id != "parsers"]
    assert {one.verdict for one in asked} == {"fail"}
    assert {summary(one).partition(":")[0] for one in asked} == {"refused the connection"}
    assert all(one.remedy for one in found)


# Silence -----------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become tenths, so that silence need not be waited for."""
    monkeypatch.setattr("console.checks.smoke.wire.FIRST_TOKEN_S", 0.3)
    monkeypatch.setattr("console.checks.smoke.wire.WHOLE_S", 0.8)
    monkeypatch.setattr("console.checks.smoke.wire._LOOK_S", 0.02)


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_stands_still_hangs_and_is_not_asked_again_and_again() -> None:
    engine = EngineDouble()
    engine.delay = 60.0
    found = await ask(engine)
    assert summary(found["sanity"]).startswith("hangs: no token within")
    assert (found["sanity"].verdict, found["burst"].verdict) == ("fail", "unknown")
    assert "not asked" in summary(found["burst"])
    assert len(engine.asked) <= 8
    assert sorted(engine.aborted) == sorted(body["rid"] for body in engine.asked)
    assert found["served-name"].verdict == "pass"


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_works_for_others_is_busy_and_not_hung() -> None:
    engine = EngineDouble()
    engine.delay = 60.0
    used = iter(range(1000, 100_000))
    engine.used_tokens = lambda: next(used)
    found = await ask(engine, "burst")
    assert (found["burst"].verdict, summary(found["burst"])[:5]) == ("unknown", "busy:")
    assert found["burst"].remedy is not None


@pytest.mark.usefixtures("impatient")
async def test_a_stream_that_drips_for_ever_is_slow() -> None:
    async def raw(writer: asyncio.StreamWriter) -> None:
        writer.write(EVENTS)
        while not writer.is_closing():
            writer.write(TOKEN)
            await writer.drain()
            await asyncio.sleep(0.05)

    engine = EngineDouble()
    engine.raw = raw
    found = (await ask(engine, "burst"))["burst"]
    assert found.verdict == "unknown"
    assert "still streaming after" in summary(found)
    assert sorted(engine.aborted) == sorted(body["rid"] for body in engine.asked)


async def test_at_the_deadline_the_rest_is_unknown_and_aborted() -> None:
    engine = EngineDouble()
    engine.delay = 60.0
    found = await ask(engine, deadline=3.4)
    assert found["served-name"].verdict == "pass"
    assert (found["sanity"].verdict, summary(found["sanity"])) == ("unknown", "not finished within 3.4 s")
    assert sorted(engine.aborted) == sorted(body["rid"] for body in engine.asked)
    assert engine.aborted


async def test_a_cancelled_run_aborts_what_is_under_way() -> None:
    engine = EngineDouble()
    engine.delay = 60.0
    async with serving(engine) as (_, target):
        run = asyncio.create_task(run_smoke(target))
        await asyncio.wait_for(engine.full.wait(), 5)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert len(engine.aborted) == 6
    assert all(rid.startswith(RID_PREFIX) for rid in engine.aborted)


async def test_a_request_that_is_done_is_not_aborted() -> None:
    engine = EngineDouble()
    await ask(engine, "sanity", "burst")
    assert engine.asked and engine.aborted == []


async def test_an_engine_that_speaks_rubbish_is_asked_for_less() -> None:
    def spoil(body: dict[str, object], said: Said) -> None:
        said.update(content="!" * 500, calls=[], finish="length")

    engine = EngineDouble()
    engine.spoil = spoil
    engine.delay = 0.01
    found = await ask(engine)
    limits = [body["max_tokens"] for body in engine.asked if "max_tokens" in body]
    assert max(limits[6:]) <= 48
    assert found["tools-call"].verdict == "fail" and "nothing but '!'" in summary(found["tools-call"])


async def test_a_defect_of_ours_costs_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("console.checks.smoke.plain.model_list", broken)
    found = await ask(EngineDouble(), "served-name", "sanity")
    assert (found["served-name"].verdict, found["sanity"].verdict) == ("unknown", "pass")
    assert "defect in the check served-name: ZeroDivisionError" in summary(found["served-name"])


def test_the_queues_words_are_those_of_the_engine() -> None:
    assert json.loads(QUEUE)["message"] == "The request queue is full."
