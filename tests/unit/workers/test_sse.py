"""Server-sent events, however their bytes are split."""

from __future__ import annotations

import pytest

from workers.clients.sse import EventParser

STREAM = b': hello\n\ndata: {"a": 1}\n\nevent: x\nid: 7\ndata:{"b": "\xc3\xa9"}\ndata: 2\n\n:c\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b'{"b": "\xc3\xa9"}\n2', b"[DONE]"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 1000])
def test_events_are_the_same_wherever_their_bytes_are_split(line_end: bytes, size: int) -> None:
    """Lines end with LF or CRLF, data of several lines is joined, comments and other fields are no data."""
    stream = STREAM.replace(b"\n", line_end)
    parser = EventParser()
    events = [event for at in range(0, len(stream), size) for event in parser.feed(stream[at : at + size])]
    assert events == EVENTS
    assert parser.comments == 2
    assert parser.waiting == 0


def test_an_event_that_the_end_cuts_off_is_none() -> None:
    """Only an empty line ends an event; what waits for one is counted, so that it can be bounded."""
    parser = EventParser()
    assert parser.feed(b"data: 12\n\ndata: 3") == [b"12"]
    assert parser.waiting == len(b"data: 3")
    assert parser.feed(b"4") == []
    assert parser.feed(b"\n") == []
    assert parser.waiting == len(b"34")
    assert parser.feed(b"\n") == [b"34"]
    assert parser.waiting == 0
