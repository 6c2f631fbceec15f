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
        whole = b"".join([*self._begun, data])
        if b"\r\n" in whole:
            whole = whole.replace(b"\r\n", b"\n")
        lines = whole.split(b"\n")
        rest = lines.pop()
        self._begun = [rest] if rest else []
        events: list[bytes] = []
        begun = self._data
        for line in lines:
            if line.startswith(b"data:"):
                begun.append(line[6:] if line.startswith(b" ", 5) else line[5:])
            elif not line:
                if begun:
                    events.append(begun[0] if len(begun) == 1 else b"\n".join(begun))
                    begun.clear()
            elif line.startswith(b":"):
                self.comments += 1
        self.waiting = len(rest) + sum(map(len, begun))
        return events
