"""Lines of the service's journal, and what the engine's own lines mean."""

from __future__ import annotations

from typing import Literal

import msgspec

LineKind = Literal["plain", "phase", "prefill", "decode", "warning", "error", "crash", "noise", "ready"]

#: Order in which a load passes through its phases; the first is silent (imports). The scheduler makes its
#: tree cache, and with it the host cache, once the model worker has captured its graphs.
PHASES = (
    "starting",
    "distributed",
    "weights",
    "kv-cache",
    "graphs",
    "host-cache",
    "warm-up",
)
Phase = Literal["starting", "distributed", "weights", "kv-cache", "host-cache", "graphs", "warm-up"]


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One journal entry, safe to print: control, escape and bidi characters are gone.

    ``at`` is Unix seconds as journald recorded it.
    """

    at: float
    text: str
    kind: LineKind = "plain"
    cursor: str | None = None
    invocation: str | None = None
    pid: int | None = None
    rank: str | None = None  # "TP0", "DP1 TP0", None for the main process
    fields: dict[str, str] = msgspec.field(default_factory=dict)  # of a batch line, by its own names
    phase: Phase | None = None  # the phase this line opens, moves or ends
    percent: float | None = None  # 0..100 within that phase
    ends: bool = False  # the line ends its phase


class PhaseTime(msgspec.Struct, frozen=True):
    """When one phase of a load began and ended, in Unix seconds."""

    phase: Phase
    began: float
    ended: float | None = None
    percent: float | None = None
    detail: str | None = None  # "shard 31/64", "bs=160"
    percent_at: float | None = None  # Unix seconds of the line that said so
    through_at: float | None = None  # when every rank was first through it; a draft model may follow


class Crash(msgspec.Struct, frozen=True):
    """Why the engine died, from its own lines.

    ``reason`` is the root cause in one line; ``lines`` are the journal lines
    that show it, oldest first; ``remedy`` is what to do, when it is known.
    """

    signature: str  # stable id: "cuda-oom", "port-in-use", "nccl", "killed-oom", "bad-flag", …
    reason: str
    at: float
    lines: tuple[str, ...] = ()
    remedy: str | None = None


class LoadProgress(msgspec.Struct, frozen=True):
    """What the journal of the current invocation shows of its load."""

    invocation: str | None
    phases: tuple[PhaseTime, ...] = ()
    fired_up_at: float | None = None  # "The server is fired up…"; alone no proof of readiness
    crash: Crash | None = None
    kv_tokens: int | None = None
    last_progress_at: float | None = None  # Unix seconds of the newest prefill or decode line
    retractions: int = 0  # "KV cache pool is full" lines seen
    prefilling: int | None = None  # prompt tokens of the newest batch, when that is a prefill
    stop_asked: bool = False  # systemd stops it, or it received SIGTERM
    paused: bool = False  # its last word was POST /pause_generation, not /continue_generation

    @property
    def phase(self) -> PhaseTime | None:
        return self.phases[-1] if self.phases else None
