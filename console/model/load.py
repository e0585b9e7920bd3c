"""Follows a load, line by line: its phases, what it allocated, and why it died when it did."""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

from console.model.crash_signatures import Signature, signature_of
from console.model.log import PHASES, Crash, LoadProgress, LogLine, Phase, PhaseTime

#: Lines of the past that are kept as evidence.
RING = 300

#: Characters of a line that are kept; ``server_args=`` alone can be tens of thousands.
_KEPT = 400

#: A cause older than this, in seconds before the engine's death, is another story (unless still loading).
_CAUSE_WINDOW = 120.0

#: An exception of no known kind is believed to be the cause only this near to the death.
_NEAR = 5.0

_CANDIDATES = 48
_EVIDENCE_BEFORE = 8
_EVIDENCE_TOTAL = 20
_PAST_INVOCATIONS = 4
_PASSAGES = 4 * len(PHASES)

_RANK = {phase: order for order, phase in enumerate(PHASES)}
_PREFIX = re.compile(r"\[\d{4}-\d\d-\d\d [^\]]{0,80}\] ?")
_STOPS = re.compile(r"^(?:Stopping |SIGTERM received)")
_PAUSES = re.compile(r'INFO: {1,9}\S+ - "POST /(pause|continue)_generation\S* HTTP/[\d.]+" 200')


class LoadWatch:
    """Accumulates ``LoadProgress`` from the lines of one unit, oldest first.

    A new invocation starts it afresh; what was known of the one before stays in
    ``previous``. Ranks run side by side: a phase begins with its first rank and
    has ended when every rank that began it has. A draft model passes through
    phases again: a phase may occur twice, in the order in which it happened.
    """

    def __init__(self) -> None:
        self.previous: LoadProgress | None = None
        self._run = _Run(None)
        self._past: deque[str] = deque(maxlen=_PAST_INVOCATIONS)
        self._progress: LoadProgress | None = None

    @property
    def progress(self) -> LoadProgress:
        if self._progress is None:
            self._progress = self._run.progress()
        return self._progress

    def feed(self, line: LogLine) -> None:
        if self._belongs(line):
            self._run.feed(line)
            self._progress = None

    def _belongs(self, line: LogLine) -> bool:
        """Whether the line is of the invocation that is followed; a newer one is followed from here."""
        followed = self._run.invocation
        if line.invocation is None:
            # Without systemd a run is told by its first line.
            if followed is None and self._run.under_way and "server_args=" in line.text[:80]:
                self._turn_to(None)
            return True
        if line.invocation in self._past:
            return False
        if line.invocation != followed:
            self._turn_to(line.invocation)
        return True

    def _turn_to(self, invocation: str | None) -> None:
        if self._run.invocation is not None:
            self._past.append(self._run.invocation)
        if self._run.fed:
            self.previous = self.progress
        self._run = _Run(invocation)
        self._progress = None


class _Run:
    """What the lines of one invocation have shown so far."""

    def __init__(self, invocation: str | None) -> None:
        self.invocation = invocation
        self.fed = False
        self._passages: list[_Passage] = []
        self._fired_up_at: float | None = None
        self._kv_tokens: int | None = None
        self._last_progress_at: float | None = None
        self._retractions = 0
        self._prefilling: int | None = None
        self._paused = False
        self._joined_late = False
        self._deaths = _Deaths()

    @property
    def under_way(self) -> bool:
        return len(self._passages) > 1 or self._joined_late or self._deaths.seen

    def progress(self) -> LoadProgress:
        return LoadProgress(
            invocation=self.invocation,
            phases=tuple(passage.time() for passage in self._passages),
            fired_up_at=self._fired_up_at,
            crash=self._deaths.crash(still_loading=self._fired_up_at is None),
            kv_tokens=self._kv_tokens,
            last_progress_at=self._last_progress_at,
            retractions=self._retractions,
            prefilling=self._prefilling,
            stop_asked=self._deaths.stop_asked,
            paused=self._paused,
        )

    def feed(self, line: LogLine) -> None:
        self.fed = True
        if line.kind in ("prefill", "decode") or (line.kind == "noise" and line.fields):
            self._note_batch(line)
        elif line.kind == "warning" and "KV cache pool is full" in line.text:
            self._retractions += 1
        elif line.kind == "phase":
            self._note_tokens(line)
        elif "_generation" in line.text and (pause := _PAUSES.search(line.text)):
            self._paused = pause[1] == "pause"
        if not self._passages and not self._joined_late:
            self._passages.append(_Passage("starting", line.at))
        if line.phase is not None:
            self._pass(line, line.phase)
        if line.kind == "ready":
            self._fired_up_at = line.at
        self._deaths.feed(line)

    def _note_batch(self, line: LogLine) -> None:
        self._last_progress_at = line.at
        tokens = line.fields.get("#new-token", "") if line.kind == "prefill" else ""
        self._prefilling = int(tokens[:9]) if tokens.isascii() and tokens.isdigit() else None
        if all(passage.phase == "starting" for passage in self._passages):
            # The first lines we saw are of an engine that had long been up: its load is not in sight.
            self._passages.clear()
            self._joined_late = True

    def _note_tokens(self, line: LogLine) -> None:
        said = line.fields.get("max_total_num_tokens")
        if said is None and (self._kv_tokens is None or line.phase is None):
            said = line.fields.get("#tokens")
        if said is not None and said.isascii() and said.isdigit():
            self._kv_tokens = int(said)

    def _pass(self, line: LogLine, phase: Phase) -> None:
        passage = self._passage_of(line, phase)
        if passage is None:
            if self._passages and self._passages[-1].ended is None:
                self._passages[-1].ended = line.at
            passage = _Passage(phase, line.at)
            self._passages.append(passage)
            del self._passages[:-_PASSAGES]
        passage.note(line, current=passage is self._passages[-1])

    def _passage_of(self, line: LogLine, phase: Phase) -> _Passage | None:
        """The passage that the line is about; None when it begins one."""
        same = [passage for passage in self._passages if passage.phase == phase]
        if not same:
            return None
        if line.ends:
            return next((passage for passage in reversed(same) if passage.has_inside(line)), same[-1])
        last = self._passages[-1]
        if last.phase == phase:
            return last
        behind = _RANK[phase] < _RANK[last.phase]
        # A rank behind the others is still in the phase; one that is through it begins it anew.
        return same[-1] if behind and not same[-1].is_through(line) else None


class _Passage:
    """One phase while ranks pass through it."""

    def __init__(self, phase: Phase, began: float) -> None:
        self.phase = phase
        self.ended: float | None = None
        self._began = began
        self._percent: float | None = None
        self._percent_at: float | None = None
        self._through_at: float | None = None
        self._detail: str | None = None
        self._inside: set[str] = set()
        self._done: set[str] = set()

    def has_inside(self, line: LogLine) -> bool:
        return (line.rank or "") in self._inside

    def is_through(self, line: LogLine) -> bool:
        return (line.rank or "") in self._done

    def note(self, line: LogLine, *, current: bool) -> None:
        if line.ends:
            self._leave(line)
        elif line.percent is not None:
            if current and self.ended is None:
                self._percent = line.percent
                self._percent_at = line.at
                self._detail = _detail(line) or self._detail
        else:
            self._enter(line, current)

    def _enter(self, line: LogLine, current: bool) -> None:
        rank = line.rank or ""
        if current:
            self.ended = None
            self._detail = line.fields.get("graph") or self._detail
            if rank in self._done:  # the next capture, or the draft model's weights
                self._percent = None
        self._inside.add(rank)

    def _leave(self, line: LogLine) -> None:
        rank = line.rank or ""
        self._inside.discard(rank)
        self._done.add(rank)
        if not self._inside:
            self.ended = line.at
            self._through_at = self._through_at or line.at
            self._percent = None if self._percent is None else 100.0

    def time(self) -> PhaseTime:
        return PhaseTime(
            self.phase,
            self._began,
            self.ended,
            self._percent,
            self._detail,
            self._percent_at,
            self._through_at,
        )


def _detail(line: LogLine) -> str | None:
    if "bs" in line.fields:
        return f"bs={line.fields['bs']}"
    if "done" in line.fields and "total" in line.fields:
        return f"shard {line.fields['done']}/{line.fields['total']}"
    return None


class _Candidate:
    """A line that may say why: with the lines before it from the same process, as evidence."""

    def __init__(self, signature: Signature, at: float, message: str, evidence: tuple[_Kept, ...]) -> None:
        self.signature = signature
        self.at = at
        self.message = message
        self.evidence = evidence


class _Kept(NamedTuple):
    """A line as it is kept: numbered in the order of the log."""

    number: int
    pid: int | None
    text: str


class _Deaths:
    """The lines that say that the engine died, and those that may say why."""

    def __init__(self) -> None:
        self._count = 0
        self._ring: deque[_Kept] = deque(maxlen=RING)
        self._candidates: deque[_Candidate] = deque(maxlen=_CANDIDATES)
        self._died_at: float | None = None
        self._announcements: list[_Kept] = []
        self._stopping = False

    @property
    def stop_asked(self) -> bool:
        return self._stopping

    @property
    def seen(self) -> bool:
        return self._died_at is not None

    def feed(self, line: LogLine) -> None:
        message = _PREFIX.sub("", line.text, count=1) if line.text.startswith("[") else line.text
        self._count += 1
        kept = _Kept(self._count, line.pid, line.text[:_KEPT])
        if _STOPS.match(message) and (message.startswith("SIGTERM") or line.pid in (None, 1)):
            self._stopping = True
        if line.kind == "crash" and not self._stopping:
            if self._died_at is None:
                self._died_at = line.at
            if len(self._announcements) < _EVIDENCE_TOTAL // 2:
                self._announcements.append(kept)
        if line.kind in ("error", "crash", "warning"):
            self._consider(line, message, kept)
        if line.kind != "noise" and not message.startswith("server_args="):
            self._ring.append(kept)

    def crash(self, *, still_loading: bool) -> Crash | None:
        if self._died_at is None:
            return None
        since = float("-inf") if still_loading else self._died_at - _CAUSE_WINDOW
        known = [candidate for candidate in self._candidates if candidate.at >= since]
        if not known:
            first = self._announcements[0].text
            return Crash("unknown", first, self._died_at, tuple(kept.text for kept in self._announcements))
        cause = max(known, key=self._weigh)  # the first of the heaviest
        evidence = sorted({*cause.evidence, *self._announcements})
        return Crash(
            signature=cause.signature.id,
            reason=cause.message[:_KEPT].strip(),
            at=self._died_at,
            lines=tuple(kept.text for kept in evidence[:_EVIDENCE_TOTAL]),
            remedy=cause.signature.remedy,
        )

    def _consider(self, line: LogLine, message: str, kept: _Kept) -> None:
        signature = signature_of(message)
        if signature is None or (line.kind == "warning" and signature.weight < 3):
            return
        if self._died_at is not None and len(self._candidates) >= _CANDIDATES:
            return  # what comes after is the fall of the others
        same = [earlier for earlier in self._ring if earlier.pid == line.pid][-_EVIDENCE_BEFORE:]
        self._candidates.append(_Candidate(signature, line.at, message, (*same, kept)))

    def _weigh(self, candidate: _Candidate) -> int:
        weight = candidate.signature.weight
        near = self._died_at is not None and candidate.at >= self._died_at - _NEAR
        return weight if near or weight == 3 else -1
