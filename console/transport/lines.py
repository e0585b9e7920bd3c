"""Bytes as they arrive, cut into lines of bounded length."""

from __future__ import annotations

from console.transport.runner import LINE_LIMIT


class LineSplitter:
    """Holds the one unfinished line, never more than ``limit`` bytes of it.

    A longer line is cut at ``limit``; its rest is dropped up to the next newline.
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their newline."""
        if b"\n" not in data:
            self._keep(data)
            return []
        first, *middle, rest = data.split(b"\n")
        self._keep(first)
        lines = [bytes(self._rest), *(line[: self._limit] for line in middle)]
        self._rest.clear()
        self._keep(rest)
        return lines

    def finish(self) -> list[bytes]:
        """The last line when the stream ended without a newline: none or one."""
        if not self._rest:
            return []
        last = bytes(self._rest)
        self._rest.clear()
        return [last]

    def _keep(self, data: bytes) -> None:
        room = self._limit - len(self._rest)
        if room > 0:
            self._rest += data[:room]
