"""HTTP/1.1 of the fake model server: one asyncio protocol per connection, able to break every rule on request."""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import http
import socket
import struct
import time
from collections.abc import Mapping
from typing import Protocol

from producer.simulator.rules import Drop

_HEAD_END = b"\r\n\r\n"
_ENDLESS_PIECE = b" " * 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclasses.dataclass(frozen=True)
class HttpRequest:
    """One request as it came over the wire."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpReply:
    """One response and how it is to be spoilt."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    delay_s: float = 0.0
    drop: Drop | None = None
    hang: bool = False
    forget: bool = False
    """Whether it counts no more from now on."""
    endless: bool = False

    def head(self) -> bytes:
        """Return the status line and headers."""
        try:
            phrase = http.HTTPStatus(self.status).phrase
        except ValueError:
            phrase = "Unknown"
        lines = [f"HTTP/1.1 {self.status} {phrase}", "server: uvicorn", f"content-type: {self.content_type}"]
        if not self.endless:
            lines.append(f"content-length: {len(self.body)}")
        lines += [f"{name}: {_header_value(value)}" for name, value in self.headers.items()]
        return "\r\n".join(lines).encode("latin-1") + _HEAD_END


def _header_value(value: str) -> str:
    if value.startswith("@date"):
        return email.utils.formatdate(time.time() + float(value.removeprefix("@date")), usegmt=True)
    return value


class Handler(Protocol):
    """What answers the requests and is told of their fates."""

    @property
    def keep_alive_s(self) -> float:
        """Seconds after which an idle connection is closed."""

    def connected(self, connection: Connection) -> None:
        """Note a new connection."""

    def disconnected(self, connection: Connection) -> None:
        """Note that a connection is gone."""

    def begin(self, request: HttpRequest) -> HttpReply:
        """Decide the reply to a request that has just arrived."""

    def finish(self, request: HttpRequest, reply: HttpReply, *, sent: bool) -> None:
        """Note that the reply was sent, or that the client went away before."""


class Connection(asyncio.Protocol):
    """One client's connection; requests are answered one after the other."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._head: tuple[str, str, dict[str, str]] | None = None
        self._current: tuple[HttpRequest, HttpReply] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writable = True
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the idle clock."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a server's connection has a transport that can be written to")
        self.transport = transport
        self._handler.connected(self)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what is being answered, as vLLM does when a client goes away."""
        del exc
        self._cancel_timer()
        if self._current is not None:
            request, reply = self._current
            self._current = None
            self._handler.finish(request, reply, sent=False)
        self._handler.disconnected(self)

    def data_received(self, data: bytes) -> None:
        """Collect bytes and serve the next whole request."""
        self._buffer += data
        if self._current is None:
            self._serve_next()

    def pause_writing(self) -> None:
        """Hold an endless body back while the client does not read."""
        self._writable = False

    def resume_writing(self) -> None:
        """Go on with an endless body."""
        self._writable = True
        if self._current is not None and self._current[1].endless:
            self._write_endless()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expect_request(self) -> None:
        self._timer = self._loop.call_later(self._handler.keep_alive_s, self.transport.close)

    def _serve_next(self) -> None:
        try:
            request = self._take_request()
        except ValueError:
            self.transport.write(HttpReply(status=400, body=b"Invalid HTTP request received.").head())
            self.transport.close()
            return
        if request is None or self.transport.is_closing():
            return
        self._cancel_timer()
        reply = self._handler.begin(request)
        self._current = (request, reply)
        if reply.hang:
            return
        if reply.delay_s > 0:
            self._timer = self._loop.call_later(reply.delay_s, self._send)
        else:
            self._send()

    def _take_request(self) -> HttpRequest | None:
        if self._head is None:
            end = self._buffer.find(_HEAD_END)
            if end < 0:
                return None
            self._head = _parse_head(bytes(self._buffer[:end]))
            del self._buffer[: end + len(_HEAD_END)]
            if self._head[2].get("expect", "").lower() == "100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        method, path, headers = self._head
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = _take_chunked(self._buffer)
        else:
            body = _take_sized(self._buffer, int(headers.get("content-length", 0)))
        if body is None:
            return None
        self._head = None
        return HttpRequest(method, path, headers, body)

    def _send(self) -> None:
        if self._current is None:
            return
        request, reply = self._current
        if reply.drop == "reset":
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        elif reply.endless:
            self.transport.write(reply.head())
            self._write_endless()
            return
        elif reply.drop == "headers":
            self.transport.write(reply.head())
        elif reply.drop == "middle":
            self.transport.write(reply.head() + reply.body[: len(reply.body) // 2])
        elif reply.drop != "before":
            self.transport.write(reply.head() + reply.body)
        self._current = None
        self._handler.finish(request, reply, sent=True)
        if reply.drop is not None or request.headers.get("connection", "").lower() == "close":
            self.transport.close()
            return
        self._expect_request()
        if self._buffer:
            self._loop.call_soon(self._serve_next)

    def _write_endless(self) -> None:
        if self._writable and not self.transport.is_closing():
            self.transport.write(_ENDLESS_PIECE)
            self._loop.call_soon(self._write_endless)


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _version = first.split(" ")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return method, target.partition("?")[0], headers


def _take_sized(buffer: bytearray, size: int) -> bytes | None:
    if len(buffer) < size:
        return None
    body = bytes(buffer[:size])
    del buffer[:size]
    return body


def _take_chunked(buffer: bytearray) -> bytes | None:
    """Return the body once its last chunk is there; raises ValueError for a size that is no number."""
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
