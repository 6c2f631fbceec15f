"""HTTP/1.1 messages of the fake model server: requests, replies, how a reply is to be spoilt, and their bytes."""

from __future__ import annotations

import dataclasses
import email.utils
import http
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from producer.simulator.rules import Drop

HEAD_END = b"\r\n\r\n"


@dataclasses.dataclass(frozen=True)
class HttpRequest:
    """One request as it came over the wire."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


@dataclasses.dataclass(frozen=True)
class Stream:
    """A body that is sent piece by piece."""

    events: tuple[bytes, ...]
    _: dataclasses.KW_ONLY
    gap_s: float = 0.0
    """Seconds between two pieces."""
    stall_after: int | None = None
    cut_after: int | None = None
    comment_every_s: float | None = None


class Pending(Protocol):
    """Something under way that can be given up, such as a timer."""

    def cancel(self) -> None:
        """Give it up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpReply:
    """One response and how it is to be spoilt."""

    status: int = 200
    body: bytes = b""
    stream: Stream | None = None
    """Sent instead of the body."""
    content_type: str = "application/json"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    delay_s: float = 0.0
    drop: Drop | None = None
    hang: bool = False
    forget: bool = False
    """Whether it counts no more from now on."""
    endless: bool = False
    begin: Callable[[Callable[[], None]], Pending] | None = None
    """Makes the body in its own time, in place of `delay_s`, and calls what it is given when the body may be sent."""

    def head(self) -> bytes:
        """Return the status line and headers."""
        try:
            phrase = http.HTTPStatus(self.status).phrase
        except ValueError:
            phrase = "Unknown"
        lines = [f"HTTP/1.1 {self.status} {phrase}", "server: uvicorn", f"content-type: {self.content_type}"]
        if self.stream is not None:
            lines.append("transfer-encoding: chunked")
        elif not self.endless:
            lines.append(f"content-length: {len(self.body)}")
        lines += [f"{name}: {_header_value(value)}" for name, value in self.headers.items()]
        return "\r\n".join(lines).encode("latin-1") + HEAD_END


def _header_value(value: str) -> str:
    if value.startswith("@date"):
        return email.utils.formatdate(time.time() + float(value.removeprefix("@date")), usegmt=True)
    return value


def chunk(data: bytes) -> bytes:
    """Return bytes as a chunk of a chunked body; none end it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return method, path and headers; raises ValueError for a first line that is none."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _version = first.split(" ")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return method, target.partition("?")[0], headers


def take_sized(buffer: bytearray, size: int) -> bytes | None:
    """Take a body of so many bytes out of the buffer once it is there."""
    if len(buffer) < size:
        return None
    body = bytes(buffer[:size])
    del buffer[:size]
    return body


def take_chunked(buffer: bytearray) -> bytes | None:
    """Take a chunked body out of the buffer once it is whole; raises ValueError for a size that is no number."""
    pieces = []
    at = 0
    while (line_end := buffer.find(b"\r\n", at)) >= 0:
        size = int(bytes(buffer[at:line_end]).partition(b";")[0], 16)
        start = line_end + 2
        if len(buffer) < start + size + 2:
            return None
        pieces.append(bytes(buffer[start : start + size]))
        at = start + size + 2
        if size == 0:
            del buffer[:at]
            return b"".join(pieces)
    return None
