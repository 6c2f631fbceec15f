"""The one pool of connections to an endpoint: bounded answers, TCP keep-alive, and every failure a classified fault.

It is the transport under the `openai` package as well; imported only where calls are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import urllib.parse
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp
import httpx2

from workers.clients.base import CallFailed
from workers.clients.connecting import MAX_CONNECTING, ON_NEW_CONNECTION, Passage, make_socket
from workers.faults import FaultKind, make_fault
from workers.foreign import fault_of
from workers.wording import quote_start

KEEPALIVE_EXPIRY_S = 2.0
"""Below every server's own expiry (5 s for vLLM and SGLang), so that the server does not close a connection at the
moment of its reuse."""

SPARE_CONNECTIONS = 2
"""Room for probes beside a full house of calls."""

_NAP_SHARE, _SHORTEST_NAP_S, _LONGEST_NAP_S = 1 / 8, 1 / 8, 1 / 2
"""Between two looks at a stream nothing is read for about this share of its age, within bounds: tokens collect in the
system's buffer and come in one piece, which is what makes streams cheap."""
_MUCH = 64 * 1024
"""Bytes after which more is read at once: the system's buffer may have been full."""
_LAST_WORDS_S = 1.0
"""Seconds for a server to end its body after it has said that nothing more comes."""

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


class ConnectionPool(httpx2.AsyncBaseTransport):
    """Keeps the connections to one endpoint; belongs to the event loop of its first use."""

    def __init__(self, *, max_connections: int, connect_timeout_s: float, max_body_bytes: int) -> None:
        self._max_connections = max_connections
        self._connect_timeout_s = connect_timeout_s
        self._max_body_bytes = max_body_bytes
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        """By whether each request has a connection of its own."""
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
        passage = Passage(self._connecting, self._connect_timeout_s)
        answered = False
        try:
            async with (
                passage.limit,
                self._session(alone=ON_NEW_CONNECTION.get()).request(
                    method, url, headers=headers, data=body, allow_redirects=False, trace_request_ctx=passage
                ) as response,
            ):
                answered = True
                if sink is not None and _is_event_stream(response):
                    await _pass_on(response, sink)
                    return RawAnswer(response.status, response.raw_headers, b"")
                content = await self._read(response)
                return RawAnswer(response.status, response.raw_headers, content)
        except (aiohttp.ClientError, OSError) as error:
            if passage.limit.expired():
                words = f"no connection to {urllib.parse.urlsplit(url).netloc} within {self._connect_timeout_s:g} s"
                message = f"{words} (MILL_CONNECT_TIMEOUT_S)"
                raise CallFailed(make_fault(FaultKind.CONNECT_TIMEOUT, message)) from error
            fault = fault_of(error, now=0)
            if fault is None:
                raise
            lost = fault.kind is FaultKind.CONNECTION_LOST
            if lost and not answered and passage.may_be_stale:
                fault = make_fault(FaultKind.STALE_CONNECTION, fault.message)
            raise CallFailed(fault) from error
        finally:
            passage.end()

    async def aclose(self) -> None:
        """Close all connections."""
        for session in self._sessions.values():
            await session.close()

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

    def _session(self, *, alone: bool) -> aiohttp.ClientSession:
        if alone not in self._sessions:
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_reuseconn.append(_note_reuse)
            tracing.on_connection_create_start.append(_begin_to_connect)
            tracing.on_connection_create_end.append(_note_connection)
            kept: dict[str, Any] = {"force_close": True} if alone else {"keepalive_timeout": KEEPALIVE_EXPIRY_S}
            self._sessions[alone] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._max_connections + SPARE_CONNECTIONS, socket_factory=make_socket, **kept
                ),
                # aiohttp's own default ends every call after five minutes.
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[tracing],
                trust_env=False,
            )
        return self._sessions[alone]


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
        if len(data) < _MUCH:
            now = loop.time()
            await _let_collect(response, _next_look(now, age_s=now - began) - now)


def _next_look(now: float, *, age_s: float) -> float:
    """Return when to look at a stream again: naps are powers of two and end together, so that streams share looks."""
    nap_s = max(_SHORTEST_NAP_S, min(_LONGEST_NAP_S, age_s * _NAP_SHARE))
    nap_s = 2.0 ** math.floor(math.log2(nap_s))
    return (now // nap_s + 1) * nap_s


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
    context.trace_request_ctx.reused()


async def _begin_to_connect(_session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
    await context.trace_request_ctx.connect()


async def _note_connection(_session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
    context.trace_request_ctx.connected()
