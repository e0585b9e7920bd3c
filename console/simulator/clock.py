"""The two clocks of the box, injected so that tests can set them."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec


class Clock(msgspec.Struct, frozen=True):
    """``wall`` gives Unix seconds, ``mono`` the monotonic seconds that all processes of a host share."""

    wall: Callable[[], float] = time.time
    mono: Callable[[], float] = time.monotonic
