"""What earlier loads tell of the one under way: what is left, what is late, what never took so long.

Pure. All durations are seconds. A phase lasts until the next one begins, so that the
phases of a load add up to the whole of it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from console.model.log import PHASES, LoadProgress, PhaseTime
from console.model.unit import UnitStatus
from console.model.words import about, span

#: A load is seen whole when its first line came this soon after the main process was executed.
BEGAN_S = 5.0

#: Of a phase's median: what may come after the bar of the weights is full (a draft model), or is chance.
SLACK = 0.05

#: Of a phase's median, and in seconds: how much longer it takes before it is late.
LATE = 0.1
LATE_AT_LEAST_S = 5.0

#: From this per cent on the bar of the weights says how fast they are read today.
_TRUSTED_PERCENT = 25.0

#: A phase is called slower than ever when it is so by more than noise, and with something to compare.
_NOISE_S = 2.0
_COMPARABLE = 2

#: The slowest load seen stretches what is left by at most so much of the median.
_STRETCH = 1.3

#: Past its usual time a phase has this share left of what remains until it counts as late.
_TAIL = 0.2

_RANK = {phase: order for order, phase in enumerate(PHASES)}


class PhaseExpected(msgspec.Struct, frozen=True):
    """What is known of one phase."""

    median_s: float
    slowest_s: float


class Expected(msgspec.Struct, frozen=True):
    """What a load of a profile took so far, from its start to ``The server is fired up``.

    ``fastest_s`` to ``slowest_s`` is the spread of ``loads`` loads; without one, ``loads`` is 0
    and the rest is what the profile says.
    """

    loads: int
    median_s: float
    fastest_s: float
    slowest_s: float
    phases: dict[str, PhaseExpected]

    def slower_than_ever(self, phase: str, seconds: float) -> bool:
        known = self.phases.get(phase)
        return known is not None and seconds > known.slowest_s


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """When the load under way will be through. One of ``eta_s`` and ``over_s`` is None, or both.

    ``over_s``: it, or the phase it is in, is past its time by so much; ``late`` says past what.
    """

    expected_s: float  # the whole load: the median here, or what the profile says
    loads: int  # loads of this host behind it; 0: the profile's word
    eta_s: float | None = None
    spread_s: float | None = None  # half of what lies between fastest and slowest, of what is left
    over_s: float | None = None
    late: str | None = None
    slow: tuple[str, ...] = ()  # phases that took longer than in any load before

    @property
    def complaints(self) -> tuple[str, ...]:
        """What there is to say against it, for a line each."""
        slow = [phase for phase in self.slow if self.late is None or phase not in self.late.split()]
        told = (f"slower than ever: {', '.join(slow)}",) if slow else ()
        return told if self.late is None else (self.late, *told)

    @property
    def basis(self) -> str:
        """What the time left is judged from: ``±30s, 6 loads``."""
        if self.loads == 0:
            return f"of {span(self.expected_s)} by the profile"
        if self.loads == 1 or self.spread_s is None:
            return f"{self.loads} load known" if self.loads == 1 else f"{self.loads} loads"
        return f"±{about(self.spread_s)}, {self.loads} loads"


def by_profile(seconds: float) -> Expected:
    """What a profile expects, as long as this host has not seen a load of it."""
    return Expected(0, seconds, seconds, seconds, {})


def seen_whole(load: LoadProgress, unit: UnitStatus | None) -> bool:
    """Whether a load is in sight from its start until the engine was up: its times are then worth keeping."""
    if unit is None or unit.started_at is None or load.fired_up_at is None or load.crash is not None:
        return False
    if load.invocation is None or load.invocation != unit.invocation_id or not load.phases:
        return False
    first = load.phases[0]
    return first.phase == "starting" and first.began <= unit.started_at + BEGAN_S


def phase_seconds(load: LoadProgress, until: float | None = None) -> dict[str, float]:
    """Seconds of each phase; one that was passed twice (a draft model) counts as a sum.

    ``until`` (Unix seconds) ends the last one: now, or by itself when the engine was up.
    """
    seconds: dict[str, float] = {}
    ends = [phase.began for phase in load.phases[1:]]
    last = until if until is not None else load.fired_up_at
    for phase, end in zip(load.phases, [*ends, last], strict=False):
        over = end if end is not None else phase.ended
        if over is not None:
            seconds[phase.phase] = seconds.get(phase.phase, 0.0) + max(0.0, over - phase.began)
    return seconds


def forecast(known: Expected, load: LoadProgress, elapsed: float, started: float) -> Forecast:
    """What is to be expected of a load that began ``elapsed`` seconds ago, at ``started`` (Unix seconds).

    What is left: the rest of the phase under way, and the medians of those to come.
    """
    phase = load.phase
    whole = _Stretch("the load", elapsed, known.median_s, known.median_s, known.slowest_s)
    if phase is None or not known.phases:
        return _told(known, whole)
    now = load.phases[0].began + elapsed  # on the load's own clock: the wall's may have jumped since
    joined_late = load.phases[0].began > started + BEGAN_S
    spent = {} if joined_late else phase_seconds(load, now)
    rank = _RANK[phase.phase]
    to_come = sum(
        max(0.0, one.median_s - spent.get(name, 0.0))
        for name, one in known.phases.items()
        if _RANK.get(name, -1) > rank
    )
    usual = known.phases.get(phase.phase)
    if usual is None or joined_late:
        through = [one for name, one in known.phases.items() if _RANK.get(name, -1) <= rank]
        median, slowest = (sum(getattr(one, what) for one in through) for what in ("median_s", "slowest_s"))
        return _told(
            known, _Stretch("the load", elapsed, median, median, slowest), to_come, _slow(known, spent)
        )
    here = spent[phase.phase]
    total = _pace(phase, usual.median_s, here - max(0.0, now - phase.began))
    stretch = _Stretch(phase.phase, here, total, usual.median_s, usual.slowest_s)
    return _told(known, stretch, to_come, _slow(known, spent))


class _Stretch(NamedTuple):
    """What is under way: a phase, or the load as a whole, and how long it is expected to take in all."""

    name: str
    spent: float
    total: float
    median: float
    slowest: float


def _pace(phase: PhaseTime, median: float, before: float) -> float:
    """Seconds that a phase is expected to take; ``before`` of them in an earlier passage.

    The weights come from a disk or from the page cache: their bar tells how fast, and is
    believed the more the further it is. Elsewhere the median says more than a bar.
    """
    if phase.phase != "weights":
        return median
    slack = SLACK * median
    if phase.through_at is not None:
        spent = before + phase.through_at - phase.began
        return spent + min(max(0.0, median - spent), slack)
    if not phase.percent or phase.percent_at is None:
        return median
    by_bar = before + max(0.0, phase.percent_at - phase.began) * 100 / phase.percent
    off = by_bar - median
    off = max(0.0, off - slack) if off > 0 else min(0.0, off + slack)  # within it the bar says: as usual
    return median + min(1.0, phase.percent / _TRUSTED_PERCENT) ** 2 * off


def _told(known: Expected, stretch: _Stretch, to_come: float = 0.0, slow: tuple[str, ...] = ()) -> Forecast:
    spent, total = stretch.spent, stretch.total
    limit = total
    if known.loads:
        limit += max(LATE_AT_LEAST_S, LATE * total)
        limit = max(limit, min(stretch.slowest, _STRETCH * total))
    if spent > limit:
        over, late = _lateness(known, stretch)
        return Forecast(expected_s=known.median_s, loads=known.loads, over_s=over, late=late, slow=slow)
    # Towards the usual time and past it what is left shrinks slowly, until it is late: it never stands still.
    rest = max(total - spent, (limit - spent) * _TAIL)
    eta = rest + to_come
    spread = None
    if known.loads >= _COMPARABLE:
        spread = (known.slowest_s - known.fastest_s) / 2 * min(1.0, eta / max(1.0, known.median_s))
    return Forecast(expected_s=known.median_s, loads=known.loads, eta_s=eta, spread_s=spread, slow=slow)


def _lateness(known: Expected, stretch: _Stretch) -> tuple[float, str]:
    """By how much it is late, and than what."""
    name = stretch.name
    if known.loads == 0:
        over = stretch.spent - stretch.total
        return over, f"{over:.0f} s longer than the profile expects"
    if stretch.spent > stretch.slowest:
        over = stretch.spent - stretch.slowest
        if known.loads < _COMPARABLE:
            return over, f"{name} {span(over)} over the one load known ({span(stretch.slowest)})"
        slowest = f"the slowest of {known.loads} loads ({span(stretch.slowest)})"
        return over, f"later than ever: {name} {span(over)} over {slowest}"
    over = stretch.spent - stretch.median
    return over, f"later than usual: {name} {span(over)} over {span(stretch.median)}"


def _slow(known: Expected, spent: dict[str, float]) -> tuple[str, ...]:
    """The phases that took longer than in any load before, by more than noise."""
    if known.loads < _COMPARABLE:
        return ()
    return tuple(
        phase
        for phase, seconds in spent.items()
        if known.slower_than_ever(phase, seconds - max(_NOISE_S, SLACK * seconds))
    )
