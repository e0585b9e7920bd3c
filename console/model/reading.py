"""A value together with when it was read, and why it is missing when it is.

Nothing reaches the screen without one of these around it: an unknown value and
a zero are different things, and an old value says how old it is.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

#: A reading older than this many periods is shown as stale.
STALE_PERIODS = 3.0


class Reading(msgspec.Struct, Generic[T], frozen=True):
    """One source's latest word.

    ``taken_at`` is in seconds on the monotonic clock, which all processes of a
    host share, so a wall clock that jumps cannot make a reading look fresh.
    When an attempt fails, the last good value stays with its own ``taken_at``
    and ``error`` says in plain words why there is no newer one.
    """

    source: str
    period: float
    value: T | None = None
    taken_at: float | None = None
    error: str | None = None

    def fresh(self, value: T, now: float) -> Reading[T]:
        return Reading(self.source, self.period, value, now, None)

    def failed(self, reason: str) -> Reading[T]:
        return Reading(self.source, self.period, self.value, self.taken_at, reason)

    def age(self, now: float) -> float | None:
        """Seconds since the value was read; None when there never was one."""
        return None if self.taken_at is None else max(0.0, now - self.taken_at)

    def stale(self, now: float) -> bool:
        """True when the value is older than three periods, or was never read."""
        age = self.age(now)
        return age is None or age > STALE_PERIODS * self.period

    def current(self, now: float) -> T | None:
        """The value while it is fresh, else None."""
        return None if self.stale(now) else self.value
