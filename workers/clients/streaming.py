"""One streamed answer on its way: its bytes become events, the events become a body, and each is a sign of life."""

from __future__ import annotations

from typing import Any

from workers.clients.base import CallFailed
from workers.clients.deadlines import Wait
from workers.clients.folding import Fold
from workers.clients.sse import DONE, EventParser
from workers.faults import FaultKind, make_fault


class AnswerStream:
    """Takes the bytes of a stream; what is kept of them is bounded."""

    def __init__(self, fold: Fold, wait: Wait, *, max_bytes: int) -> None:
        self._fold = fold
        self._wait = wait
        self._max_bytes = max_bytes
        self._parser = EventParser()
        self.done = False
        """Whether the server has said that nothing more comes."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises CallFailed for an error inside the stream, for data that is no JSON, and for more than the bound.
        """
        comments = self._parser.comments
        came = False
        for event in self._parser.feed(data):
            if event == DONE:
                self.done = True
                break
            came = self._fold.add(event) or came
        if self._parser.waiting + self._fold.held > self._max_bytes:
            words = f"the streamed answer is larger than {self._max_bytes} bytes (MILL_MAX_BODY_MB)"
            raise CallFailed(make_fault(FaultKind.BAD_ANSWER, words, status=200))
        if came:
            self._wait.token()
        elif self._parser.comments > comments:
            self._wait.comment()

    def body(self) -> dict[str, Any]:
        """Return the whole answer; whether it is one is for its parser to say."""
        return self._fold.body()
