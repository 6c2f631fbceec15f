"""The one pool of connections to an endpoint: bounded answers, TCP keep-alive, and every failure a classified fault.

It is the transport under the `openai` package as well; imported only where calls are made.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

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


class ConnectionPool(httpx2.AsyncBaseTransport):
    """Keeps the connections to one endpoint; belongs to the event loop of its first use."""

    def __init__(self, *, max_connections: int, connect_timeout_s: float, max_body_bytes: int) -> None:
        self._max_connections = max_connections
        self._connect_timeout_s = connect_timeout_s
        self._max_body_bytes = max_body_bytes
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one of httpx2's requests; there is no deadline but the connection's."""
        answer = await self.fetch(request.method, str(request.url), headers=request.headers, body=request.content)
        headers = [(name, value) for name, value in answer.headers if name.lower() != _ENCODING]
        return httpx2.Response(answer.status, headers=headers, content=answer.body)

    async def fetch(self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None) -> RawAnswer:
        """Send one request and return its whole answer, whatever its status.

        Raises CallFailed for connections that fail and for bodies over the bound, which are not read to their end.
        """
        loop = asyncio.get_running_loop()
        trace = SimpleNamespace(reused=False)
        answered = False
        started = loop.time()
        try:
            async with self._get_session().request(
                method, url, headers=headers, data=body, allow_redirects=False, trace_request_ctx=trace
            ) as response:
                answered = True
                content = await self._read(response)
                return RawAnswer(response.status, response.raw_headers, content)
        except (aiohttp.ClientError, OSError) as error:
            fault = fault_of(error, now=0)
            if fault is None:
                raise
            lost = fault.kind is FaultKind.CONNECTION_LOST
            if lost and trace.reused and not answered and loop.time() - started < STALE_WINDOW_S:
                fault = make_fault(FaultKind.STALE_CONNECTION, fault.message)
            raise CallFailed(fault) from error

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
