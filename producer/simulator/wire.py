"""The wire of the fake model server: one asyncio protocol per connection, able to break every rule on request."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Protocol

from producer.simulator.messages import (
    HEAD_END,
    HttpReply,
    HttpRequest,
    Pending,
    Stream,
    chunk,
    parse_head,
    take_chunked,
    take_sized,
)

_ENDLESS_PIECE = b" " * 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


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
        self._timer: Pending | None = None
        self._comments: asyncio.TimerHandle | None = None
        self._writable = True
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the connection; as in uvicorn, its idle clock starts with its first answer."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a server's connection has a transport that can be written to")
        self.transport = transport
        self._handler.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what is being answered, as vLLM does when a client goes away."""
        del exc
        self._cancel_timer()
        self._stop_comments()
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
        streams = reply.stream is not None and reply.drop not in {"before", "reset"}
        if streams:
            # Before anything was generated, as servers do.
            self.transport.write(reply.head())
            self._comment()
        if reply.begin is not None:
            self._timer = reply.begin(self._send)
        elif reply.delay_s > 0:
            self._timer = self._loop.call_later(reply.delay_s, self._send_events if streams else self._send)
        elif streams:
            self._send_events()
        else:
            self._send()

    def _take_request(self) -> HttpRequest | None:
        if self._head is None:
            end = self._buffer.find(HEAD_END)
            if end < 0:
                return None
            self._head = parse_head(bytes(self._buffer[:end]))
            del self._buffer[: end + len(HEAD_END)]
            if self._head[2].get("expect", "").lower() == "100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        method, path, headers = self._head
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = take_chunked(self._buffer)
        else:
            body = take_sized(self._buffer, int(headers.get("content-length", 0)))
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
        self._end(request, reply)

    def _end(self, request: HttpRequest, reply: HttpReply) -> None:
        self._current = None
        self._handler.finish(request, reply, sent=True)
        if reply.drop is not None or request.headers.get("connection", "").lower() == "close":
            self.transport.close()
            return
        self._expect_request()
        if self._buffer:
            self._loop.call_soon(self._serve_next)

    def _send_events(self, number: int = 0) -> None:
        """Send a stream from its event `number` on, one after the other where there is a gap between them."""
        if self._current is None:
            return
        request, reply = self._current
        stream = reply.stream or Stream(())
        if number in {stream.cut_after, 0 if reply.drop == "headers" else None}:
            self._current = None
            self._handler.finish(request, reply, sent=True)
            self.transport.close()
            return
        if number == stream.stall_after:
            self._comment()
            return
        self._stop_comments()
        stops = [stop for stop in (stream.stall_after, stream.cut_after) if stop is not None]
        end = number + 1 if stream.gap_s else min([len(stream.events), *stops])
        self.transport.write(b"".join(map(chunk, stream.events[number:end])))
        if end < len(stream.events) or end in stops:
            self._timer = self._loop.call_later(stream.gap_s, self._send_events, end)
            return
        self.transport.write(chunk(b""))
        self._end(request, reply)

    def _comment(self) -> None:
        """Keep a stream alive that has nothing to say."""
        every_s = self._current[1].stream.comment_every_s if self._current and self._current[1].stream else None
        if every_s is not None:
            self._comments = self._loop.call_later(every_s, self._write_comment)

    def _write_comment(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(chunk(b": keep-alive\n\n"))
            self._comment()

    def _stop_comments(self) -> None:
        if self._comments is not None:
            self._comments.cancel()
            self._comments = None

    def _write_endless(self) -> None:
        if self._writable and not self.transport.is_closing():
            self.transport.write(_ENDLESS_PIECE)
            self._loop.call_soon(self._write_endless)
