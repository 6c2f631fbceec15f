"""The one pool of connections to an endpoint: bounded answers, TCP keep-alive, and every failure a classified fault.

It is the transport under the `openai` package as well; imported only where calls are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp
import httpx2

from workers.clients.base import CallFailed
from workers.faults import FaultKind, make_fault
from workers.foreign import fault_of
from workers.wording import quote_start

KEEPALIVE_EXPIRY_S = 2.0
"""Below every server's own expiry (5 s for vLLM and SGLang), so that the server does not close a connection at the
moment of its reuse."""

STALE_WINDOW_S = 2.0
"""A reused connection that breaks later than this after the request was sent was not stale: the server broke."""

SPARE_CONNECTIONS = 2
"""Room for probes beside a full house of calls."""

MAX_CONNECTING = 64
"""Connections that are opened at once. A thousand at once would starve each other of the loop, and a busy machine would
let them run into the connect timeout; a request that waits for its turn here has not begun to connect."""

_NAP_SHARE, _LONGEST_NAP_S, _SHORTEST_NAP_S = 1 / 8, 0.25, 0.002
"""Between two looks at a stream nothing is read for this share of its age, within bounds: tokens collect in the
system's buffer and come in one piece, which is what makes streams cheap."""
_LAST_WORDS_S = 1.0
"""Seconds for a server to end its body after it has said that nothing more comes."""

# A silent call of half an hour must survive NAT gateways, which forget idle connections after two to six minutes.
_KEEPALIVE_OPTIONS = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 8))

# The pool has decoded the body already, which httpx2 must not try again.
_ENCODING = b"content-encoding"


@dataclasses.dataclass(frozen=True, slots=True)
class RawAnswer:
    """An HTTP answer as it came."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Sink(Protocol):
    """Takes a streamed body."""

    @property
    def done(self) -> bool:
        """Whether the server has said that nothing more comes."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes; raises CallFailed for what cannot be an answer."""


@dataclasses.dataclass
class _Passage:
    """What is known of one request's connection."""

    reused: bool = False
    connecting: bool = False


class ConnectionPool(httpx2.AsyncBaseTransport):
    """Keeps the connections to one endpoint; belongs to the event loop of its first use."""

    def __init__(self, *, max_connections: int, connect_timeout_s: float, max_body_bytes: int) -> None:
        self._max_connections = max_connections
        self._connect_timeout_s = connect_timeout_s
        self._max_body_bytes = max_body_bytes
        self._session: aiohttp.ClientSession | None = None
        self._connecting = asyncio.Semaphore(MAX_CONNECTING)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one of httpx2's requests; there is no deadline but the connection's."""
        answer = await self.fetch(request.method, str(request.url), headers=request.headers, body=request.content)
        headers = [(name, value) for name, value in answer.headers if name.lower() != _ENCODING]
        return httpx2.Response(answer.status, headers=headers, content=answer.body)

    async def fetch(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        sink: Sink | None = None,
    ) -> RawAnswer:
        """Send one request and return its whole answer, whatever its status.

        The body of an event stream goes into the sink instead, where one is given. Raises CallFailed for connections
        that fail, for bodies over the bound, which are not read to their end, and what the sink raises.
        """
        loop = asyncio.get_running_loop()
        passage = _Passage()
        answered = False
        started = loop.time()
        try:
            async with self._get_session().request(
                method, url, headers=headers, data=body, allow_redirects=False, trace_request_ctx=passage
            ) as response:
                answered = True
                if sink is not None and _is_event_stream(response):
                    await _pass_on(response, sink)
                    return RawAnswer(response.status, response.raw_headers, b"")
                content = await self._read(response)
                return RawAnswer(response.status, response.raw_headers, content)
        except (aiohttp.ClientError, OSError) as error:
            fault = fault_of(error, now=0)
            if fault is None:
                raise
            lost = fault.kind is FaultKind.CONNECTION_LOST
            if lost and passage.reused and not answered and loop.time() - started < STALE_WINDOW_S:
                fault = make_fault(FaultKind.STALE_CONNECTION, fault.message)
            raise CallFailed(fault) from error
        finally:
            if passage.connecting:
                self._connecting.release()

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        chunks: list[bytes] = []
        left = self._max_body_bytes
        while chunk := await response.content.readany():
            left -= len(chunk)
            if left < 0:
                response.close()
                words = f"the answer is larger than {self._max_body_bytes} bytes (MILL_MAX_BODY_MB); it starts"
                message = f"{words}: {quote_start(b''.join([*chunks, chunk][:8]))}"
                raise CallFailed(make_fault(FaultKind.BAD_ANSWER, message, status=response.status))
            chunks.append(chunk)
        return b"".join(chunks)

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_reuseconn.append(_note_reuse)
            tracing.on_connection_create_start.append(self._begin_to_connect)
            tracing.on_connection_create_end.append(self._end_to_connect)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._max_connections + SPARE_CONNECTIONS,
                    keepalive_timeout=KEEPALIVE_EXPIRY_S,
                    socket_factory=_make_socket,
                ),
                # aiohttp's own default ends every call after five minutes.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[tracing],
                trust_env=False,
            )
        return self._session

    async def _begin_to_connect(self, _session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
        await self._connecting.acquire()
        context.trace_request_ctx.connecting = True

    async def _end_to_connect(self, _session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
        context.trace_request_ctx.connecting = False
        self._connecting.release()


def _is_event_stream(response: aiohttp.ClientResponse) -> bool:
    return response.status == 200 and response.headers.get("Content-Type", "").startswith("text/event-stream")


async def _pass_on(response: aiohttp.ClientResponse, sink: Sink) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while data := await response.content.readany():
        sink.feed(data)
        if sink.done:
            await _hear_out(response)
            return
        nap_s = min(_LONGEST_NAP_S, (loop.time() - began) * _NAP_SHARE)
        if nap_s >= _SHORTEST_NAP_S:
            await _let_collect(response, nap_s)


async def _let_collect(response: aiohttp.ClientResponse, seconds: float) -> None:
    transport = response.connection.transport if response.connection else None
    if transport is None:
        return  # all has come
    transport.pause_reading()
    try:
        await asyncio.sleep(seconds)
    finally:
        transport.resume_reading()


async def _hear_out(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last event, so that the connection can be used again; the answer is whole without it."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_LAST_WORDS_S):
            while await response.content.readany():
                pass


async def _note_reuse(_session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
    context.trace_request_ctx.reused = True


def _make_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_rest = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_OPTIONS:
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
