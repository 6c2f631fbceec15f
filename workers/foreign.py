"""The exceptions of openai, httpx2, aiohttp and asyncio, translated into faults; imported only where calls are made."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator

import aiohttp
import httpx2
import msgspec
import openai

from workers.faults import Fault, FaultKind, classify_answer, make_fault

# The rows nearest to the socket come first, and the first match anywhere in the chain wins: the SDK calls every
# timeout "Request timed out.", and its aiohttp transport calls a closed connection a ConnectTimeout.
_KINDS: tuple[tuple[FaultKind, tuple[type[BaseException], ...]], ...] = (
    (FaultKind.CONNECT_TIMEOUT, (aiohttp.ConnectionTimeoutError,)),
    (
        FaultKind.CONNECT,
        (
            aiohttp.ClientConnectorError,
            aiohttp.ServerFingerprintMismatch,
            aiohttp.InvalidURL,
            aiohttp.NonHttpUrlClientError,
            aiohttp.ClientResponseError,  # whoever listens there does not speak HTTP
        ),
    ),
    (FaultKind.TIMEOUT, (aiohttp.ServerTimeoutError,)),
    (FaultKind.CONNECTION_LOST, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)),
    (FaultKind.CONNECT_TIMEOUT, (httpx2.ConnectTimeout, httpx2.PoolTimeout)),
    (FaultKind.CONNECT, (httpx2.ConnectError, httpx2.ProxyError, httpx2.UnsupportedProtocol, httpx2.InvalidURL)),
    (FaultKind.TIMEOUT, (httpx2.TimeoutException,)),
    (FaultKind.BAD_ANSWER, (httpx2.DecodingError, openai.APIResponseValidationError)),
    (FaultKind.CONNECTION_LOST, (httpx2.TransportError,)),
    (FaultKind.CONNECT, (socket.gaierror, ConnectionRefusedError, ssl.SSLError)),
    (FaultKind.CONNECTION_LOST, (ConnectionError,)),
    (FaultKind.TIMEOUT, (TimeoutError, openai.APITimeoutError)),
    (FaultKind.CONNECTION_LOST, (openai.APIConnectionError,)),
    (FaultKind.BAD_ANSWER, (json.JSONDecodeError, msgspec.DecodeError)),
)


def fault_of(error: BaseException, *, now: float) -> Fault | None:
    """Return the fault that an exception stands for, or None for one that no failed call raises.

    `now` is Unix time in seconds.
    """
    chain = list(_causes(error))
    for link in chain:
        if isinstance(link, openai.APIStatusError | httpx2.HTTPStatusError):
            answer = link.response
            return classify_answer(answer.status_code, answer.headers, answer.content, now=now)
    for kind, classes in _KINDS:
        for link in reversed(chain):
            if isinstance(link, classes):
                return make_fault(kind, _words(chain, link))
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and its declared causes; one that merely arose while another was handled is a bug."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _words(chain: list[BaseException], link: BaseException) -> str:
    if isinstance(link, aiohttp.ClientConnectorError):
        why = link.os_error.strerror or str(link.os_error) or type(link.os_error).__name__
        return f"cannot connect to {link.host}:{link.port}: {why}"
    words = next((str(one) for one in (link, *reversed(chain)) if str(one).strip()), "")
    return f"{type(link).__name__}: {words}" if words else type(link).__name__
