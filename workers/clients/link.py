"""What every protocol's client shares: one endpoint's connections, what begins and ends a call, and the looks at it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from app.records import Completion
from app.settings import ServerSettings
from workers.clients import fits
from workers.clients.access import Access
from workers.clients.answers import decode_answer
from workers.clients.backends import MODELS_PATH, UNKNOWN, Backend, identify, model_names
from workers.clients.base import Answer, CallFailed, Probe, Request
from workers.clients.connecting import ON_NEW_CONNECTION
from workers.clients.deadlines import Deadlines, Wait
from workers.clients.exact import Checks
from workers.clients.folding import Fold
from workers.clients.streaming import AnswerStream
from workers.faults import Fault, FaultKind, classify_answer, make_fault
from workers.wording import one_line, words_of_body

if TYPE_CHECKING:
    from workers.clients.transport import RawAnswer, Sink

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
_NOT_HEADER_SAFE = re.compile(r"[^!-~]+")
_NO_SUCH_PATH = frozenset({404, 405, 501})
_REFUSED = frozenset({401, 403, 404})
_NOT_NOW = frozenset({401, 403, 407, 408, 429, 500, 502, 503, 504})
"""Statuses for the list of models that say nothing of what the server is."""
_IDENTIFY_TIMEOUT_S = 5.0
"""Seconds for all the questions about what a server is; one that has not answered by then counts as not recognised."""
_ASK_AGAIN_S = 30.0
"""Seconds after which a server that could not be asked what it is, is asked again."""
_JSON = "application/json"

_Sent = TypeVar("_Sent")


class Link:
    """One endpoint's connections; made and used inside one event loop."""

    def __init__(self, base_url: str, servers: ServerSettings, *, max_connections: int) -> None:
        """Prepare for `base_url` (without `/v1`); a name and password in the URL go before the settings' key."""
        from workers.clients.transport import ConnectionPool  # noqa: PLC0415 - aiohttp is slow to import

        self.access = Access(base_url, servers.api_key)
        self.base_url = self.access.base_url
        self.streams = servers.stream
        self.checks = Checks(self.base_url)
        self._deadlines = Deadlines(servers.request_timeout_s)
        self._stall_timeout_s = servers.stall_timeout_s
        self._max_body_bytes = int(servers.max_body_mb * 2**20)
        self.pool = ConnectionPool(
            max_connections=max_connections,
            connect_timeout_s=servers.connect_timeout_s,
            max_body_bytes=self._max_body_bytes,
        )
        self.backend = UNKNOWN
        self._identified = False
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    # Questions

    async def post(
        self, path: str, fields: Mapping[str, Any], request_id: str, *, sink: Sink | None = None
    ) -> tuple[RawAnswer, float]:
        """Send a JSON body once, again at once if the connection had gone stale; return the answer and its seconds.

        Where the server streams, the answer's body goes into the sink.
        """
        body = msgspec.json.encode(fields)
        headers = {**self.access.headers, "Content-Type": _JSON, REQUEST_ID_HEADER: header_safe(request_id)}

        async def send() -> tuple[RawAnswer, float]:
            started = time.perf_counter()
            answer = await self.pool.fetch("POST", f"{self.base_url}{path}", headers=headers, body=body, sink=sink)
            return answer, time.perf_counter() - started

        return await once_more_if_stale(send)

    async def answer_of(self, path: str, fields: Mapping[str, Any], request_id: str) -> tuple[dict[str, Any], float]:
        """Return a success's JSON object and its seconds; raises CallFailed for every other status."""
        answer, latency_s = await self.post(path, fields, request_id)
        raise_for_status(answer)
        return decode_answer(answer.body), latency_s

    async def stream_of(
        self, path: str, fields: Mapping[str, Any], request_id: str, *, fold: Fold, wait: Wait
    ) -> tuple[dict[str, Any], float]:
        """Return a streamed success, folded into the object that the server would have sent whole, and its seconds.

        Raises CallFailed for every other status. A server that does not stream is understood as well.
        """
        stream = AnswerStream(fold, wait, max_bytes=self._max_body_bytes)
        answer, latency_s = await self.post(path, fields, request_id, sink=stream)
        raise_for_status(answer)
        return decode_answer(answer.body) if answer.body else stream.body(), latency_s

    async def within_deadline(self, request: Request, ask: Callable[[Wait], Awaitable[_Sent]]) -> _Sent:
        """Wait for a call as long as the request may take; what it raises carries no secret of ours."""
        deadline = self._deadlines.of(request.sampling)
        wait = Wait(deadline, stall_s=self._stall_timeout_s, on_token=request.on_token)
        try:
            async with wait:
                return await ask(wait)
        except TimeoutError as error:
            if wait.overdue:
                self._deadlines.missed(started=wait.started)
            raise CallFailed(wait.fault()) from error
        except CallFailed as failure:
            raise CallFailed(self.without_secrets(failure.fault)) from failure.__cause__

    def finish(self, request: Request, completion: Completion, latency_s: float) -> Answer:
        """Return the answer to a call, after its speed and what is odd about it are noted.

        Raises CallFailed (context_overflow) where the prompt left no room for a single token.
        """
        self._deadlines.answered(latency_s, completion.usage)
        self.checks.tell(completion)
        return Answer(fits.with_end_told(completion, request, self.backend.context_of(request.model)), latency_s)

    # Looks

    async def probe(self, *, timeout_s: float) -> Probe:
        """Look at `/health` and `/v1/models`; a server without `/health` is judged by its models alone."""
        try:
            async with asyncio.timeout(timeout_s):
                health = await self._get("/health")
                if health.status >= 300 and health.status not in _NO_SUCH_PATH:
                    return self._not_alive(health)
                models = await self._get("/v1/models")
        except TimeoutError:
            return Probe(alive=False, words=f"no answer within {timeout_s:g} s", timed_out=True)
        except CallFailed as failure:
            return Probe(alive=False, words=self.access.hide(failure.fault.message))
        if models.status == 200:
            return Probe(alive=True, words="ok", models=tuple(model_names(_document(models.body))))
        if models.status in _NO_SUCH_PATH and health.status < 300:
            return Probe(alive=True, words="ok")
        return self._not_alive(models)

    async def read_metrics(self, *, timeout_s: float) -> bytes | None:
        """Return the `/metrics` page that vLLM, SGLang and llama.cpp have beside `/v1`."""
        try:
            async with asyncio.timeout(timeout_s):
                page = await self._get("/metrics")
        except (TimeoutError, CallFailed):
            return None
        return page.body if page.status == 200 else b""

    async def identify(self, *, again: bool = False) -> Backend:
        """Return what the server is, asking it the first time and whenever it may be another one (`again`).

        Never raises: a server that does not answer in time counts as not recognised, and is asked again later.
        """
        if self._identified and not again:
            return self.backend
        async with self._asking:
            asked_before = time.monotonic() - self._asked_at < _ASK_AGAIN_S
            if not again and (self._identified or asked_before):
                return self.backend
            try:
                async with asyncio.timeout(_IDENTIFY_TIMEOUT_S):
                    backend = await identify(self.base_url, self._get_document)
            except (TimeoutError, CallFailed):
                self._asked_at = time.monotonic()
                return self.backend
            if backend.label and backend != self.backend:
                logger.info("the model server at %s is %s", urllib.parse.urlsplit(self.base_url).netloc, backend.told)
            self.backend, self._identified = backend, True
        return backend

    async def close(self) -> None:
        """Close all connections."""
        await self.pool.aclose()

    async def _get(self, path: str) -> RawAnswer:
        return await self.pool.fetch("GET", f"{self.base_url}{path}", headers=self.access.headers)

    async def _get_document(self, path: str) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        answer = await self._get(path)
        headers = {name.decode("latin1").lower(): value.decode("latin1") for name, value in answer.headers}
        if path == MODELS_PATH and answer.status in _NOT_NOW:
            words = f"HTTP {answer.status} for {path}"
            raise CallFailed(make_fault(FaultKind.OVERLOADED, words, status=answer.status))
        return headers, _document(answer.body) if answer.status == 200 else {}

    # Words

    def _not_alive(self, answer: RawAnswer) -> Probe:
        words = self.access.hide(one_line(f"HTTP {answer.status}: {words_of_body(answer.body)[0]}", 200))
        return Probe(alive=False, words=words, refuses=answer.status in _REFUSED)

    def without_secrets(self, fault: Fault) -> Fault:
        """Return the fault with every key that a server repeated taken out of its words."""
        return dataclasses.replace(fault, message=self.access.hide(fault.message))


def raise_for_status(answer: RawAnswer) -> None:
    """Raise CallFailed, the answer's fault, for every status but a success."""
    if not 200 <= answer.status < 300:
        headers = {name.decode("latin1"): value.decode("latin1") for name, value in answer.headers}
        raise CallFailed(classify_answer(answer.status, headers, answer.body, now=time.time()))


async def once_more_if_stale(send: Callable[[], Awaitable[_Sent]]) -> _Sent:
    """Send a request, and again at once where the server had closed the idle connection that it went over.

    Other idle connections may have been closed as well, so it goes over a new one then.
    """
    try:
        return await send()
    except CallFailed as failure:
        if failure.fault.kind is not FaultKind.STALE_CONNECTION:
            raise
    logger.debug("a connection had gone stale; the request is sent again")
    token = ON_NEW_CONNECTION.set(True)
    try:
        return await send()
    except CallFailed as failure:
        if failure.fault.kind not in {FaultKind.CONNECTION_LOST, FaultKind.CONNECT}:
            raise
        # No coincidence: the server closes its connections instead of answering, or it died over the request.
        message = f"the connection was closed without an answer; then: {failure.fault.message}"
        raise CallFailed(make_fault(FaultKind.CONNECTION_LOST, message)) from failure
    finally:
        ON_NEW_CONNECTION.reset(token)


def header_safe(text: str) -> str:
    """Return the text with every run of characters that no HTTP header can carry made one `_`."""
    return _NOT_HEADER_SAFE.sub("_", text)


def _document(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object that a page holds; empty where it holds none."""
    try:
        document = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
