"""Stands in for journalctl: ``flood.py LINES_A_SECOND TALLY`` prints entries of a busy engine for ever, as
``journalctl -f -o json`` does: a MESSAGE with control characters is an array of its bytes. How many
lines were taken from it stands in the file TALLY."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
import uuid
from pathlib import Path

#: Batches a second in which the lines come.
BEATS = 20

#: How many different messages there are; they come again and again.
MESSAGES = 4000


def message(chance: random.Random) -> str:
    """One line of the engine's log, each kind about as often as under a heavy load."""
    at = f"[2026-11-30 07:{chance.randrange(60):02}:{chance.randrange(60):02}"
    running, tokens = chance.randrange(1, 48), chance.randrange(1000, 270_000)
    kind = chance.random()
    if kind < 0.35:
        return (
            f"{at} TP0] Decode batch, #running-req: {running}, #token: {tokens}, "
            f"token usage: {tokens / 273_000:.2f}, accept len: {chance.uniform(1.8, 3):.2f}, "
            f"accept rate: {chance.uniform(0.4, 0.8):.2f}, cuda graph: True, "
            f"gen throughput (token/s): {chance.uniform(100, 900):.2f}, #queue-req: 0"
        )
    if kind < 0.55:
        return (
            f"{at} TP0] Prefill batch, #new-seq: {chance.randrange(1, 5)}, "
            f"#new-token: {chance.randrange(8192)}, #cached-token: {chance.randrange(8192)}, "
            f"token usage: {tokens / 273_000:.2f}, #running-req: {running}, #queue-req: 0, cuda graph: False"
        )
    if kind < 0.80:
        path, port = chance.choice(("/health", "/metrics", "/v1/models")), chance.randrange(32768, 61000)
        return f'INFO:     127.0.0.1:{port} - "GET {path} HTTP/1.1" 200 OK'
    if kind < 0.94:
        return (
            f"{at}] Received request {uuid.UUID(int=chance.getrandbits(128))}: «Grüße, 世界» " + "x" * running
        )
    if kind < 0.97:
        done = chance.randrange(65)
        share = f"{done * 100 // 64:3}% Completed | {done}/64"
        return f"\rMulti-thread loading shards: {share} [00:01<00:03, 15.2it/s]"
    return f"{at}] \x1b[1;33mThe request was aborted by the client after {tokens} tokens.\x1b[0m"


def entry(text: str, run: str) -> str:
    """The entry as a template: it lacks the number in its cursor, and its time."""
    printable = text.isprintable()
    fields = {
        "__CURSOR": "s=8d1c;i=%x;b=5f2e",
        "__REALTIME_TIMESTAMP": "%d",
        "__MONOTONIC_TIMESTAMP": "12000000000",
        "_BOOT_ID": run,
        "_PID": "1449",
        "_SYSTEMD_INVOCATION_ID": run,
        "MESSAGE": (text if printable else list(text.encode())),
    }
    head, _, tail = json.dumps(fields, ensure_ascii=False).partition('"MESSAGE"')
    return head + '"MESSAGE"' + tail.replace("%", "%%") + "\n"


def main() -> None:
    per_beat, tally = int(sys.argv[1]) // BEATS, Path(sys.argv[2])
    chance, run = random.Random(1), "3f0d5b1f6f0f4bb1a4f9d5d0c2e4a6b8"
    entries = itertools.cycle([entry(message(chance), run) for _ in range(MESSAGES)])
    number = 0
    beat = time.monotonic()
    while True:
        now = time.time_ns() // 1000
        batch = itertools.islice(entries, per_beat)
        sys.stdout.write("".join(one % (number + place, now) for place, one in enumerate(batch)))
        sys.stdout.flush()  # waits while the reader lags
        number += per_beat
        tally.write_text(str(number))
        beat += 1 / BEATS
        time.sleep(max(0.0, beat - time.monotonic()))


if __name__ == "__main__":
    main()
