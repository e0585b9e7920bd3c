"""Server-sent events as they come off the wire, however the network cut them (WHATWG HTML, section 9.2)."""

from __future__ import annotations

_FIELDS = (b"data", b"event", b"id", b"retry")


class Malformed(Exception):
    """What came back is not what the engine's protocol says; the message tells what is wrong."""


class Events:
    """Turns chunks of bytes into the payloads of ``data:`` lines. Holds no more than one unfinished event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads that this chunk completes. Raises Malformed for a line that no event stream has."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                    self._data = []
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif name and name not in _FIELDS:  # an empty name is a comment, which keeps a connection open
                raise Malformed("not an event stream: a line that is neither data nor a comment")
        return found

    @property
    def pending(self) -> bool:
        """Whether the stream stopped in the middle of an event."""
        return bool(self._rest.strip() or self._data)
