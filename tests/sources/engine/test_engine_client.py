"""Every way an engine can misbehave over HTTP is a clear value, in time."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from console.sources.engine.client import METRICS_LIMIT, EngineClient


@pytest.fixture
async def client(box):
    client = EngineClient(box.url)
    yield client
    await client.close()


async def test_an_answer_has_status_body_and_duration(box, client, reply):
    box.replies["/v1/models"] = reply(200, b'{"data": []}')
    answer = await client.get("/v1/models", 2.0)
    assert answer.probe.ok
    assert answer.probe.error is None
    assert answer.body == b'{"data": []}'
    assert 0 < answer.probe.seconds < 2


async def test_a_503_is_an_answer_not_an_error(box, client, reply):
    box.replies["/health"] = reply(503)
    probe = (await client.get("/health", 2.0)).probe
    assert (probe.status, probe.error, probe.ok) == (503, None, False)


async def test_nothing_listening_is_refused(box):
    await box.stop()
    probe = (await EngineClient(box.url).get("/health", 2.0)).probe
    assert (probe.status, probe.error) == (None, "refused")


async def test_refused_on_every_address_of_a_name(box):
    """localhost is ::1 and 127.0.0.1: the failure is then a group of two."""
    await box.stop()
    probe = (await EngineClient(f"http://localhost:{box.port}").get("/health", 2.0)).probe
    assert probe.error == "refused"


async def test_silence_ends_at_the_deadline(box, client):
    async def never(writer):
        await asyncio.sleep(60)

    box.replies["/health"] = never
    began = time.monotonic()
    probe = (await client.get("/health", 0.3)).probe
    assert probe.error == "timeout"
    assert "0.3 s" in probe.detail
    assert time.monotonic() - began < 0.6


async def test_a_dripping_answer_ends_at_the_deadline(box, client):
    async def drip(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.02)

    box.replies["/metrics"] = drip
    answer = await client.get("/metrics", 0.3)
    assert answer.probe.error == "timeout"
    assert answer.body == b""


async def test_one_that_never_answers_does_not_hold_up_the_others(box, client, reply):
    async def never(writer):
        await asyncio.sleep(60)

    box.replies.update({"/health": never, "/ready": reply(200)})
    health = asyncio.create_task(client.get("/health", 0.5))
    await asyncio.sleep(0.05)
    probe = (await client.get("/ready", 0.4)).probe
    assert probe.ok
    assert (await health).probe.error == "timeout"


async def test_a_redirect_is_reported_and_not_followed(box, client, reply):
    box.replies["/v1/models"] = reply(302, Location="http://admin:secret@elsewhere/login")
    box.replies["/login"] = reply(200)
    probe = (await client.get("/v1/models", 2.0)).probe
    assert (probe.status, probe.error) == (302, "redirect")
    assert probe.detail == "redirects to http://elsewhere/login"
    assert box.paths == ["/v1/models"]


async def test_a_reset_connection(box, client):
    async def reset(writer):
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.transport.abort()

    box.replies["/health"] = reset
    assert (await client.get("/health", 2.0)).probe.error == "reset"


async def test_half_a_body_is_no_body(box, client):
    async def half(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.close()

    box.replies["/metrics"] = half
    answer = await client.get("/metrics", 2.0)
    assert answer.probe.error == "reset"
    assert "before the answer was complete" in answer.probe.detail
    assert answer.body == b""


@pytest.mark.parametrize(
    "junk", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x16\x03\x01\x00\x05hello\r\n\r\n", b"\r\n\r\n"]
)
async def test_another_protocol_is_malformed(box, client, junk):
    async def speak(writer):
        writer.write(junk)
        await writer.drain()
        writer.close()

    box.replies["/health"] = speak
    assert (await client.get("/health", 2.0)).probe.error in ("malformed", "reset")


async def test_fifty_megabytes_of_metrics_are_cut_off_with_memory_flat(box, client):
    sent = 0

    async def flood(writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"sglang:num_running_reqs 1.0\n" * 2340
        for _ in range(800):
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await writer.drain()
            sent += len(chunk)

    box.replies["/metrics"] = flood
    await client.get("/none", 2.0)
    tracemalloc.start()
    answer = await client.get("/metrics", 5.0, limit=METRICS_LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer.probe.error == "too large"
    assert answer.probe.detail == "the answer is larger than 8 MB; cut off"
    assert answer.body == b""
    assert sent < 20e6
    assert peak < 3 * METRICS_LIMIT


async def test_a_bomb_in_gzip_is_not_unpacked(box, client, reply):
    box.replies["/metrics"] = reply(200, b"\x1f\x8b", Content_Encoding="gzip")
    assert (await client.get("/metrics", 2.0)).probe.error == "malformed"


@pytest.mark.parametrize(
    "url",
    [
        "http://no-such-host.invalid:1",
        "http://[::bad",
        "ftp://127.0.0.1/",
        "nonsense",
        "http://127.0.0.1:99999",
    ],
)
async def test_an_address_that_leads_nowhere_is_unreachable(url):
    probe = (await EngineClient(url).get("/health", 3.0)).probe
    assert probe.error == "unreachable"
    assert probe.detail


async def test_the_proxy_of_the_login_shell_is_ignored(box, client, reply, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    box.replies["/ready"] = reply(200)
    assert (await client.get("/ready", 2.0)).probe.ok


async def test_metrics_are_asked_for_as_plain_text(box, client):
    await client.get("/metrics", 2.0)
    assert box.requests[0][1]["accept"] == "text/plain"


class TestKey:
    def client(self, box, tmp_path: Path, text: str = "s3cret-key\n", mode: int = 0o600) -> EngineClient:
        file = tmp_path / "key"
        file.write_text(text)
        file.chmod(mode)
        return EngineClient(box.url, file)

    async def test_it_is_sent_as_a_bearer_and_shown_nowhere(self, box, tmp_path, reply):
        client = self.client(box, tmp_path)
        box.replies["/v1/models"] = reply(401, b'{"error":"Unauthorized"}')
        answer = await client.get("/v1/models", 2.0)
        assert box.requests[0][1]["authorization"] == "bearer s3cret-key"
        assert "s3cret" not in repr(client) + repr(answer) + repr(vars(client)["_http"])
        assert (
            answer.probe.detail
            == "unauthorised: the service does not accept the API key in service.api_key_file"
        )

    async def test_a_rotated_key_is_used_at_once(self, box, tmp_path):
        client = self.client(box, tmp_path)
        await client.get("/a", 2.0)
        (tmp_path / "key").write_text("other")
        await client.get("/b", 2.0)
        assert box.requests[1][1]["authorization"] == "bearer other"

    async def test_without_one_a_401_says_what_to_configure(self, box, reply):
        box.replies["/v1/models"] = reply(401)
        probe = (await EngineClient(box.url).get("/v1/models", 2.0)).probe
        assert probe.status == 401
        assert probe.detail == "unauthorised: the service wants an API key (service.api_key_file)"

    async def test_a_world_readable_file_is_a_warning_and_still_used(self, box, tmp_path):
        client = self.client(box, tmp_path, mode=0o644)
        await client.get("/a", 2.0)
        assert "authorization" in box.requests[0][1]
        assert "readable by everyone" in client.key_warning()

    async def test_a_private_file_is_no_warning(self, box, tmp_path):
        assert self.client(box, tmp_path).key_warning() is None

    @pytest.mark.parametrize("text", ["", "two\nlines", "sch\u00f6n", "x" * 5000])
    async def test_a_useless_file_is_a_warning_without_its_content(self, box, tmp_path, text):
        client = self.client(box, tmp_path, text)
        await client.get("/a", 2.0)
        assert "authorization" not in box.requests[0][1]
        warning = client.key_warning()
        assert warning.startswith("API key file")
        assert not text or text not in warning

    async def test_a_missing_file_is_named(self, box, tmp_path, reply):
        box.replies["/v1/models"] = reply(401)
        client = EngineClient(box.url, tmp_path / "absent")
        probe = (await client.get("/v1/models", 2.0)).probe
        assert probe.detail == f"unauthorised: API key file {tmp_path / 'absent'}: No such file or directory"


async def test_an_engine_that_answers_after_its_port_was_closed_is_another_run(box, client, reply):
    box.replies["/ready"] = reply(200)
    await client.get("/ready", 2.0)
    assert client.epoch == 0
    await box.stop()
    await client.get("/ready", 2.0)
    await client.get("/ready", 2.0)
    waiting = asyncio.create_task(client.sleep(5.0))
    await asyncio.sleep(0)
    await box.start()
    await client.get("/ready", 2.0)
    assert client.epoch == 1
    await asyncio.wait_for(waiting, 0.5)


async def test_a_timeout_alone_is_not_a_restart(box, client, reply):
    async def never(writer):
        await asyncio.sleep(60)

    box.replies["/ready"] = never
    await client.get("/ready", 0.1)
    box.replies["/ready"] = reply(200)
    await client.get("/ready", 2.0)
    assert client.epoch == 0
