"""Server-sent events out of the bytes of a stream, wherever these are split."""

from __future__ import annotations

from typing import Final

DONE: Final = b"[DONE]"
"""The data of the event that ends most streams; no proof that the answer in them is whole."""


class EventParser:
    """Collects bytes and returns the data of whole events; other fields (event, id, retry) are passed over.

    Lines may end with LF or CRLF. An event that the stream's end cuts off is none, as the standard says.
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        """The pieces of a line whose end has not come."""
        self._data: list[bytes] = []
        """The data lines of an event whose end has not come."""
        self.waiting = 0
        """Bytes of lines and events whose ends have not come."""
        self.comments = 0
        """Comment lines so far; servers send some to keep the connection alive."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes and return the data of the events that they complete; several lines are joined by LF."""
        if b"\n" not in data:
            self._begun.append(data)
            self.waiting += len(data)
            return []
        lines = b"".join([*self._begun, data]).split(b"\n")
        rest = lines.pop()
        self._begun = [rest] if rest else []
        events: list[bytes] = []
        for line in lines:
            self._take(line, events)
        self.waiting = len(rest) + sum(map(len, self._data))
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if line.endswith(b"\r"):
            line = line[:-1]
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b" ", 5) else line[5:])
        elif not line:
            if self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        elif line.startswith(b":"):
            self.comments += 1
