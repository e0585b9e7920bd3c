"""For the tests of the screen: one time zone, no colours taken away, and the signals given back."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is drawn depends on neither the machine's zone nor the terminal that runs the tests."""
    monkeypatch.setenv("TZ", "UTC")
    for name in ("NO_COLOR", "TEXTUAL", "TEXTUAL_COLOR_SYSTEM", "TEXTUAL_FILTERS", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    monkeypatch.undo()
    time.tzset()
