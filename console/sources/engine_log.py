"""What a line of SGLang's log means, in every wording of 0.5.5 to 0.5.23.

Versions reword and reorder, so batch lines are read as ``key: value`` pairs and
phases by their first words; nothing here depends on one exact sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from console.model.log import LineKind, Phase


class Meaning(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a LogLine that come from its text."""

    kind: LineKind = "plain"
    rank: str | None = None
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    phase: Phase | None = None
    percent: float | None = None
    ends: bool = False


_PLAIN = Meaning()
_NOISY = Meaning(kind="noise")

# "[2026-11-30 00:12:40.123 DP0 TP3] ": milliseconds only with SGLANG_LOG_MS, one tag per dimension > 1.
_PREFIX = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?((?: [A-Z_]+\d+)*)\] ?", re.ASCII)


def split_prefix(text: str) -> tuple[str | None, str]:
    """The rank tags of the engine's own prefix, and the message after it."""
    if not text.startswith("["):
        return None, text
    prefix = _PREFIX.match(text)
    if prefix is None:
        return None, text
    return prefix[1].strip() or None, text[prefix.end() :]


def read_line(text: str) -> Meaning:
    """Read one line, already safe to print. Any text is answered; most is ``plain``."""
    rank, message = split_prefix(text)
    reader = _READERS.get(message.split(" ", 1)[0])
    meaning = reader(message) if reader is not None else None
    if meaning is None:
        meaning = _read_other(message)
    return meaning if rank is None else msgspec.structs.replace(meaning, rank=rank)


def pairs(text: str) -> dict[str, str]:
    """The ``key: value`` pairs of a batch line. Pieces without a colon are no pairs."""
    found = {}
    for piece in text.split(", "):
        key, colon, value = piece.partition(": ")
        if colon:
            found[key.strip()] = value.strip(" ,")
    return found


# Batches ---------------------------------------------------------------------------------------


def _prefill(message: str) -> Meaning | None:
    if not message.startswith("Prefill batch"):
        return None
    fields = pairs(message.partition(", ")[2])
    # A health probe sends one token that no cache holds; a chat always has more.
    probe = (
        fields.get("#new-seq") == "1"
        and fields.get("#new-token") == "1"
        and fields.get("#cached-token") == "0"
    )
    return Meaning(kind="noise" if probe else "prefill", fields=fields)


def _decode(message: str) -> Meaning | None:
    if not message.startswith("Decode batch"):
        return None
    return Meaning(kind="decode", fields=pairs(message.partition(", ")[2]))


# Load phases -----------------------------------------------------------------------------------

# tqdm's own part of a bar, after its description: "  12% Completed | 8/64 [00:10<…" or " 8%|▊  | 3/36 [".
_BAR = re.compile(r"%(?: Completed )?\|(?:[^|]*\|)? *(\d+)/(\d+)")
_BAR_PERCENT = re.compile(r": {1,9}(\d{1,3})%")
_BATCH_SIZE = re.compile(r"\((?:bs|num_tokens)=(\d+)")
_HOST_POOL = re.compile(r"Allocating .*(?:hierarchical|host memory)")


def _phase(phase: Phase, *, ends: bool = False, fields: dict[str, str] | None = None) -> Meaning:
    return Meaning(kind="phase", phase=phase, ends=ends, fields=fields or {})


def _bar(phase: Phase, message: str) -> Meaning:
    """A tqdm bar of a phase: percent, and ``done`` of ``total`` where it shows them."""
    percent = _BAR_PERCENT.search(message)
    fields = {}
    counted = _BAR.search(message)
    if counted is not None:
        fields = {"done": counted[1], "total": counted[2]}
    batch = _BATCH_SIZE.search(message)
    if batch is not None:
        fields["bs"] = batch[1]
    return Meaning(
        kind="phase",
        phase=phase,
        fields=fields,
        percent=None if percent is None else min(100.0, float(percent[1])),
    )


def _init(message: str) -> Meaning | None:
    if message.startswith(("Init torch distributed begin", "Init parallel begin")):
        return _phase("distributed")
    if message.startswith(("Init torch distributed ends", "Init parallel ends")):
        return _phase("distributed", ends=True)
    return None


def _load(message: str) -> Meaning | None:
    if message.startswith("Load weight begin"):
        return _phase("weights", fields=pairs_equal(message))
    if message.startswith("Load weight end"):
        return _phase("weights", ends=True, fields=pairs_equal(message))
    return None


def _loading(message: str) -> Meaning | None:
    # "Loading safetensors checkpoint shards", "Multi-thread loading shards", "Loading safetensors using …"
    if _BAR_PERCENT.search(message) is None:
        return None
    return _bar("weights", message)


def _cache(message: str) -> Meaning | None:
    # "KV Cache is allocated. …", "Draft KV Cache is allocated…", "Mamba Cache is allocated…"
    for sentence in ("Cache is allocated", "Cache VA upper bound"):
        head, found, details = message.partition(sentence)
        if found and len(head) < 40:
            return _phase("kv-cache", fields=pairs(details.lstrip(". ")))
    return None


def _using(message: str) -> Meaning | None:
    return _phase("kv-cache") if message.startswith("Using KV cache dtype") else None


def _memory(message: str) -> Meaning | None:
    if not message.startswith("Memory pool end"):
        return None
    return _phase("kv-cache", ends=True, fields=pairs_equal(message))


def _kv(message: str) -> Meaning | None:
    if message.startswith("KV cache pool is full"):
        return Meaning(kind="warning", fields=pairs(message.partition("requests. ")[2]))
    return _cache(message)


def _post_capture(message: str) -> Meaning | None:
    _, found, details = message.partition(": KV cache allocated. ")
    return Meaning(kind="phase", fields=pairs(details)) if found else None


def _allocating(message: str) -> Meaning | None:
    return _phase("host-cache") if _HOST_POOL.match(message) else None


def _hicache(message: str) -> Meaning | None:
    return _phase("host-cache") if message.startswith("HiCache auto-sizing") else None


# "Capture cuda graph begin.", "Capture draft extend CUDA graph end.", "Capture target decode CUDA graph …"
_CAPTURE = re.compile(r"Capture (.*?)(?:cuda|cpu|npu|musa) graph (begin|end|failed)", re.IGNORECASE)


def _capture(message: str) -> Meaning | None:
    capture = _CAPTURE.match(message)
    if capture is None:
        return None
    if capture[2].lower() == "failed":
        return Meaning(kind="error", phase="graphs")
    name = capture[1].strip()
    fields = pairs_equal(message) | ({"graph": name} if name else {})
    return _phase("graphs", ends=capture[2].lower() == "end", fields=fields)


def _capturing(message: str) -> Meaning | None:
    return _bar("graphs", message)


def pairs_equal(text: str) -> dict[str, str]:
    """The ``name=value`` pairs of a line such as ``Load weight end. elapsed=12.34 s, avail mem=78.50 GB``."""
    found = {}
    for piece in text[:1000].replace(". ", ", ").split(", "):
        key, equals, value = piece.partition("=")
        if equals:
            found[key.strip()] = value.rstrip(".,")
    return found


# The HTTP server -------------------------------------------------------------------------------

_ACCESS = re.compile(r'INFO: {1,9}\S+ - "([A-Z]+) ([^ ?"]{0,99})\S* HTTP/[\d.]+" (\d{3})')

#: Paths that only watchers ask for: their access lines would fill the screen.
_PROBED = frozenset(
    {
        "/health",
        "/health_generate",
        "/ready",
        "/ping",
        "/metrics",
        "/metrics/",
        "/v1/models",
        "/v1/loads",
        "/get_load",
        "/model_info",
        "/get_model_info",
        "/server_info",
        "/get_server_info",
        "/freeze_gc",
    }
)


def _info(message: str) -> Meaning | None:
    access = _ACCESS.match(message)
    if access is not None:
        if access[2] in _PROBED:
            return _NOISY
        return Meaning(kind="warning") if access[3].startswith("5") else _PLAIN
    said = message[5:].lstrip()
    if said.startswith(("Application startup complete", "Uvicorn running on")):
        return _phase("warm-up")
    return _PLAIN


def _uvicorn_error(message: str) -> Meaning | None:
    return Meaning(kind="error")


def _the(message: str) -> Meaning | None:
    if message.startswith("The server is fired up"):
        return Meaning(kind="ready", phase="warm-up", ends=True)
    return None


# What goes wrong -------------------------------------------------------------------------------

_CRASH = re.compile(
    r"\w+ hit an exception:"
    r"|Received sigquit from a child|SIGQUIT received"
    r"|Subprocess \S+ \(pid=\d+\) crashed"
    r"|Rank \d+ scheduler (?:died|is dead)"
    r"|Initialization failed"
    r"|(?:\w+ )?[Ww]atchdog timeout \((?!.{0,80}soft=True)"
    r"|[\w./-]{1,80}(?: serve)?: error: "  # argparse refused the command line
)
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Interrupt|Exit)(?::|\s*$)"
)
_ERROR = re.compile(
    r"Traceback \(most recent|\[Errno \d+\]|\berror: |\bERROR\b|\bXid\b|NaN detected|NaN in the logits"
    r"|[Oo]ut of memory|[Nn]ot enough (?:GPU |host )?memory|leave no GPU memory|NCCL error|CUDA error"
)
_WARNING = re.compile(
    r"[Ww]arn|WARN|deprecated|[Ff]ail|\berror\b|retract|watchdog timeout|Ignore import error"
)
_NOISE = re.compile(
    r"nanobind: | - leaked | - \.\.\. skipped remainder|  warnings\.warn\(|See https://nanobind\.|[ ^~]*$"
)

#: Lines that quote what users sent (--log-requests); their words mean nothing about the engine.
_QUOTES = ("Receive: ", "Finish: ")


def _read_other(message: str) -> Meaning:
    if message.startswith("server_args="):
        return _phase("starting")
    if message.startswith("max_total_num_tokens="):
        return Meaning(kind="phase", fields=pairs_equal(message))
    if message.startswith(_QUOTES):
        return _PLAIN
    if _NOISE.match(message):
        return _NOISY
    if _CRASH.match(message):
        return Meaning(kind="crash")
    head = message[:400]
    if "Cache " in head and (cache := _cache(message)) is not None:
        return cache
    if "oading " in head and (bar := _loading(message)) is not None:
        return bar
    if head.startswith(("  File ", "    ")):  # a traceback's inside: code, not words
        return _PLAIN
    if _WARNING.search(head) and not _EXCEPTION.match(head) and not _ERROR.search(head):
        return Meaning(kind="warning")
    if _EXCEPTION.match(head) or _ERROR.search(head):
        return Meaning(kind="error")
    return _PLAIN


_READERS: dict[str, Callable[[str], Meaning | None]] = {
    "Prefill": _prefill,
    "Decode": _decode,
    "Init": _init,
    "Load": _load,
    "Using": _using,
    "Memory": _memory,
    "KV": _kv,
    "Post-capture": _post_capture,
    "Allocating": _allocating,
    "HiCache": _hicache,
    "Capture": _capture,
    "Capturing": _capturing,
    "INFO:": _info,
    "ERROR:": _uvicorn_error,
    "The": _the,
}


# systemd's own lines ---------------------------------------------------------------------------

_MANAGER_CRASH = re.compile(
    r": Main process exited, code=(?:exited, status=(?!0/)|dumped|killed, status=(?!15/))"
    r"|killed by the OOM killer|Start request repeated too quickly|start operation timed out"
    r"|: Failed at step |: Failed to locate executable|: Failed to load environment files"
)
_MANAGER_BAD = re.compile(r"Failed with result|Failed to |timed out|Killing process|left-over process")


def read_manager_line(text: str) -> Meaning:
    """Read a line that systemd itself wrote about the unit."""
    if _MANAGER_CRASH.search(text):
        return Meaning(kind="crash")
    if text.startswith(("Starting ", "Started ")):
        return _phase("starting")
    if _MANAGER_BAD.search(text):
        return Meaning(kind="error")
    return Meaning(kind="warning") if "Scheduled restart job" in text else _PLAIN
