"""OpenAI's `/v1/chat/completions`, as vLLM, SGLang, llama.cpp and many others serve it."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
import re
import time
import urllib.parse
from typing import TYPE_CHECKING, Any

import msgspec

from workers.clients.answers import decode_answer, parse_chat_answer
from workers.clients.base import Answer, CallFailed, Probe, Request
from workers.faults import Fault, FaultKind, classify_answer, classify_exception, make_fault
from workers.wording import one_line, words_of_body

if TYPE_CHECKING:
    import httpx2
    import openai

    from workers.clients.transport import RawAnswer

PROBE_TIMEOUT_S = 30.0
"""SGLang's /health generates a token and may take 20 s."""

_IDS_FIELD = "return_token_ids"
_NOT_HEADER_SAFE = re.compile(r"[^!-~]+")
_NO_SUCH_PATH = frozenset({404, 405, 501})
_REFUSED = frozenset({401, 403, 404})
_NO_KEY = "none"

# Left out: they tell nobody anything here and cost a fifth of the client's time per call.
_TELEMETRY_HEADERS = (
    "X-Stainless-Lang",
    "X-Stainless-Package-Version",
    "X-Stainless-OS",
    "X-Stainless-Arch",
    "X-Stainless-Runtime",
    "X-Stainless-Runtime-Version",
    "X-Stainless-Async",
    "OpenAI-Organization",
    "OpenAI-Project",
)
_CALL_TELEMETRY_HEADERS = ("x-stainless-retry-count", "x-stainless-read-timeout")


class OpenAIChatClient:
    """Asks one endpoint through the `openai` package: raw answers, no retries of its own, one bounded pool."""

    name = "openai"

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        request_timeout_s: float,
        connect_timeout_s: float,
        max_connections: int,
        max_body_bytes: int,
    ) -> None:
        """Prepare a client for `base_url` (without `/v1`); a name and password in the URL go before `api_key`."""
        import httpx2  # noqa: PLC0415 - openai and what it needs are slow to import
        import openai  # noqa: PLC0415 - same

        from workers.clients.transport import ConnectionPool  # noqa: PLC0415 - same

        self._base_url, login = _split_login(base_url)
        authorization = login or (f"Bearer {api_key}" if api_key else None)
        secrets = [re.escape(secret) for secret in (api_key, login and login.partition(" ")[2]) if secret]
        # Whole words only: a made-up key such as "x" is part of many words.
        self._secret = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(secrets)})(?![A-Za-z0-9])") if secrets else None
        # Whole, so that the SDK need not put it together for each call.
        self._chat_url = f"{self._base_url}/v1/chat/completions"
        self._request_timeout_s = request_timeout_s
        self._server_takes_ids = True
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "promptmill"}
        self._omitted: dict[str, Any] = dict.fromkeys(_CALL_TELEMETRY_HEADERS, openai.Omit())
        if authorization:
            self._headers["Authorization"] = authorization
        else:
            # Said outright, for some proxies refuse a made-up key.
            self._omitted["Authorization"] = openai.Omit()
        self._raw_response = httpx2.Response
        self._status_error, self._connection_error = openai.APIStatusError, openai.APIConnectionError
        self._pool = ConnectionPool(
            max_connections=max_connections, connect_timeout_s=connect_timeout_s, max_body_bytes=max_body_bytes
        )
        # httpx2 logs every request at INFO, which would drown the worker's own log.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        self._sdk = self._make_sdk()

    async def complete(self, request: Request) -> Answer:
        """Ask once within the deadline; connections that went stale and refused token ids are asked again at once."""
        try:
            async with asyncio.timeout(self._request_timeout_s):
                body, latency_s = await self._ask(request)
            return Answer(parse_chat_answer(decode_answer(body)), latency_s)
        except TimeoutError as error:
            message = f"no answer within {self._request_timeout_s:g} s (MILL_REQUEST_TIMEOUT_S)"
            raise CallFailed(make_fault(FaultKind.TIMEOUT, message)) from error
        except CallFailed as failure:
            raise CallFailed(self._without_secrets(failure.fault)) from failure.__cause__

    async def probe(self) -> Probe:
        """Look at `/health` and `/v1/models`; a server without `/health` is judged by its models alone."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                health = await self._pool.fetch("GET", f"{self._base_url}/health", headers=self._headers)
                if health.status >= 300 and health.status not in _NO_SUCH_PATH:
                    return self._not_alive(health)
                models = await self._pool.fetch("GET", f"{self._base_url}/v1/models", headers=self._headers)
        except TimeoutError:
            return Probe(alive=False, words=f"no answer within {PROBE_TIMEOUT_S:g} s")
        except CallFailed as failure:
            return Probe(alive=False, words=self._hide(failure.fault.message))
        if models.status == 200:
            return Probe(alive=True, words="ok", models=_model_names(models.body))
        if models.status in _NO_SUCH_PATH and health.status < 300:
            return Probe(alive=True, words="ok")
        return self._not_alive(models)

    def _not_alive(self, answer: RawAnswer) -> Probe:
        return Probe(alive=False, words=self._status_words(answer), refuses=answer.status in _REFUSED)

    async def close(self) -> None:
        """Close all connections."""
        await self._sdk.close()

    def _make_sdk(self) -> openai.AsyncOpenAI:
        import openai  # noqa: PLC0415 - slow to import

        headers: dict[str, Any] = dict.fromkeys(_TELEMETRY_HEADERS, openai.Omit())
        headers.update(self._headers)
        return openai.AsyncOpenAI(
            base_url=f"{self._base_url}/v1",
            # Our own header says the key; without this the SDK would send one that it finds in the environment.
            api_key=_NO_KEY,
            max_retries=0,
            timeout=self._request_timeout_s,
            default_headers=headers,
            http_client=openai.DefaultAioHttpClient(
                transport=self._pool, trust_env=False, follow_redirects=False, timeout=None
            ),
        )

    async def _ask(self, request: Request) -> tuple[bytes, float]:
        fields = {**request.sampling, "model": request.model, "messages": request.messages}
        if request.tools:
            fields["tools"] = request.tools
        if request.seed is not None:
            fields["seed"] = request.seed
        headers = {"X-Request-Id": _NOT_HEADER_SAFE.sub("_", request.request_id), **self._omitted}
        asks_ids = request.want_token_ids and self._server_takes_ids and _IDS_FIELD not in fields
        response, latency_s = await self._post({**fields, _IDS_FIELD: True} if asks_ids else fields, headers)
        if asks_ids and _refuses_ids(response):
            response, latency_s = await self._post(fields, headers)
            # Only now it is sure that nothing else was wrong with the request.
            self._server_takes_ids = not response.is_success
        if not response.is_success:
            fault = classify_answer(response.status_code, response.headers, response.content, now=time.time())
            raise CallFailed(fault)
        return response.content, latency_s

    async def _post(self, fields: dict[str, Any], headers: dict[str, Any]) -> tuple[httpx2.Response, float]:
        body = msgspec.json.encode(fields)
        try:
            return await self._send(body, headers)
        except CallFailed as failure:
            if failure.fault.kind is not FaultKind.STALE_CONNECTION:
                raise
        try:
            return await self._send(body, headers)
        except CallFailed as failure:
            if failure.fault.kind is not FaultKind.STALE_CONNECTION:
                raise
            # Twice in a row is no coincidence: the server closes its connections instead of answering.
            raise CallFailed(make_fault(FaultKind.CONNECTION_LOST, failure.fault.message)) from failure

    async def _send(self, body: bytes, headers: dict[str, Any]) -> tuple[httpx2.Response, float]:
        started = time.perf_counter()
        try:
            response = await self._sdk.post(
                self._chat_url,
                cast_to=self._raw_response,
                content=body,
                # The key is not sent; without one the SDK draws a random one for each call.
                options={"headers": headers, "idempotency_key": headers["X-Request-Id"]},
            )
        except self._status_error as error:
            response = error.response
        except self._connection_error as error:
            fault = classify_exception(error)
            if fault is None:
                raise
            raise CallFailed(fault) from error
        return response, time.perf_counter() - started

    def _without_secrets(self, fault: Fault) -> Fault:
        """Return the fault with every key that a server repeated taken out of its words."""
        return dataclasses.replace(fault, message=self._hide(fault.message))

    def _hide(self, words: str) -> str:
        return self._secret.sub("***", words) if self._secret else words

    def _status_words(self, answer: RawAnswer) -> str:
        return self._hide(one_line(f"HTTP {answer.status}: {words_of_body(answer.body)[0]}", 200))


def _refuses_ids(response: httpx2.Response) -> bool:
    """Return whether a strict server refuses the request and names its `return_token_ids` field."""
    return response.status_code in {400, 422} and _IDS_FIELD in words_of_body(response.content)[0]


def _split_login(base_url: str) -> tuple[str, str | None]:
    """Return the URL without its user name and password, and these as an Authorization header."""
    parts = urllib.parse.urlsplit(base_url)
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return base_url, None
    token = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), f"Basic {token}"


def _model_names(body: bytes) -> tuple[str, ...]:
    try:
        listed = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return ()
    models = listed.get("data") if isinstance(listed, dict) else None
    names = [model.get("id") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    return tuple(name for name in names if isinstance(name, str))
