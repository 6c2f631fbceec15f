"""OpenAI's `/v1/chat/completions`, as vLLM, SGLang, llama.cpp and many others serve it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from app.records import Completion
from workers.clients import fits
from workers.clients.answers import all_thought, decode_answer, parse_chat_answer
from workers.clients.backends import Backend
from workers.clients.base import PROBE_TIMEOUT_S, Answer, CallFailed, Probe, Request
from workers.clients.deadlines import Wait
from workers.clients.exact import stop_ids_of, with_check, with_sure_ids
from workers.clients.folding import ChatFold
from workers.clients.link import REQUEST_ID_HEADER, Link, header_safe, once_more_if_stale
from workers.clients.parameters import Allowance
from workers.faults import Fault, classify_answer, classify_exception
from workers.rendering import PromptRefusedError, Tokenizer, Tokenizers
from workers.wording import words_of_body

if TYPE_CHECKING:
    import httpx2
    import openai

_PATH = "/v1/chat/completions"
_NO_KEY = "none"

_NO_IDS = "no ids: {}'s chat completions give none in a stream{}"

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

    def __init__(self, link: Link, tokenizers: Tokenizers, *, allow_unknown: bool, asks_backend: bool) -> None:
        """Prepare a client; a tokenizer that was named checks the ids of some answers.

        `allow_unknown`: send parameters that the server does not know. `asks_backend`: find out what it is, and keep
        to its dialect; else it is asked as any other.
        """
        import httpx2  # noqa: PLC0415 - openai and what it needs are slow to import
        import openai  # noqa: PLC0415 - same

        self._link = link
        self._asks_backend = asks_backend
        self._allowance = Allowance(everything=allow_unknown)
        self._tokenizers = tokenizers
        # Whole, so that the SDK need not put it together for each call.
        self._chat_url = f"{self._link.base_url}{_PATH}"
        self._server_takes_ids = True
        self._server_counts = True
        self._omitted: dict[str, Any] = dict.fromkeys(_CALL_TELEMETRY_HEADERS, openai.Omit())
        if not self._link.access.authorization:
            # Said outright, for some proxies refuse a made-up key.
            self._omitted["Authorization"] = openai.Omit()
        self._raw_response = httpx2.Response
        self._status_error, self._connection_error = openai.APIStatusError, openai.APIConnectionError
        # httpx2 logs every request at INFO, which would drown the worker's own log.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        self._sdk = self._make_sdk()

    @property
    def backend(self) -> Backend:
        """What the server was found to be."""
        return self._link.backend

    async def identify(self, *, again: bool = False) -> Backend:
        """Return what the server is (see Client)."""
        return await self._link.identify(again=again) if self._asks_backend else self._link.backend

    def refusal(self, request: Request) -> str | None:
        """Return what of the request cannot fit, or which of its parameters the server would not act on."""
        return self.refuses(self._link.backend, request, self._allowance)

    @staticmethod
    def refuses(backend: Backend, request: Request, allowance: Allowance) -> str | None:
        """Return the same of any backend."""
        return fits.refusal(request, backend.context_of(request.model)) or allowance.refusal(
            request.parameters, backend.parameters, shown=backend.shown, strict=backend.dialect.strict
        )

    async def complete(self, request: Request) -> Answer:
        """Ask once within the deadline; connections that went stale and refused token ids are asked again at once."""
        tokenizer = None
        if self._tokenizers.given:
            # Before the call: an answer must not be lost because there is no such tokenizer.
            tokenizer = await self._tokenizers.of(request.model)
            await self._check_room(request, tokenizer)
        answer, latency_s = await self._link.within_deadline(
            request, lambda wait: self._stream(request, wait) if self._link.streams else self._ask(request)
        )
        try:
            completion = parse_chat_answer(answer, tools=bool(request.tools))
        except CallFailed as failure:
            raise CallFailed(self._link.without_secrets(failure.fault)) from failure.__cause__
        end_ids = () if tokenizer is None else tokenizer.end_ids
        keeps_end = self._link.backend.dialect.keeps_end
        stop_ids = stop_ids_of(request.sampling)
        completion = with_sure_ids(completion, keeps_end=keeps_end, stop_ids=stop_ids, end_ids=end_ids)
        if tokenizer is not None:
            completion = await self._checked(completion, tokenizer)
        backend = self._link.backend
        if self._link.streams and request.want_token_ids and not backend.dialect.streams_ids:
            hint = "; MILL_PROTOCOL=sglang does" if backend.name == "sglang" else ""
            note = _NO_IDS.format(backend.dialect.shown, hint)
            completion = msgspec.structs.replace(completion, notes=[*completion.notes, note])
        return self._link.finish(request, completion, latency_s)

    async def _check_room(self, request: Request, tokenizer: Tokenizer) -> None:
        """Raise CallFailed (context_overflow) before the call where the prompt cannot be answered."""
        backend = self._link.backend
        if not fits.may_overflow(request, backend):
            return
        try:
            prompt = await asyncio.to_thread(tokenizer.render, request.messages, request.tools, request.sampling)
        except PromptRefusedError:
            return  # the server's template decides
        fits.check_prompt(len(prompt.ids), request, backend)

    async def _checked(self, completion: Completion, tokenizer: Tokenizer) -> Completion:
        """Return the completion with what the ids prove: whether it is all thought, and, of some, whether they fit."""
        prompt = completion.prompt_token_ids
        if prompt and tokenizer.opens_thought(prompt):
            completion = all_thought(completion)
        if completion.output_ids is None or not self._link.checks.chosen():
            return completion
        return await asyncio.to_thread(with_check, completion, lambda ids: tokenizer.decode(ids, skip_special=True))

    async def probe(self, *, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
        """Look at the server (see Client)."""
        return await self._link.probe(timeout_s=timeout_s)

    async def read_metrics(self, *, timeout_s: float) -> bytes | None:
        """Return its `/metrics` page (see Client)."""
        return await self._link.read_metrics(timeout_s=timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._sdk.close()

    def _make_sdk(self) -> openai.AsyncOpenAI:
        import openai  # noqa: PLC0415 - slow to import

        headers: dict[str, Any] = dict.fromkeys(_TELEMETRY_HEADERS, openai.Omit())
        headers.update(self._link.access.headers)
        return openai.AsyncOpenAI(
            base_url=f"{self._link.base_url}/v1",
            # Our own header says the key; without this the SDK would send one that it finds in the environment.
            api_key=_NO_KEY,
            max_retries=0,
            timeout=None,  # the deadline is our own
            default_headers=headers,
            http_client=openai.DefaultAioHttpClient(
                transport=self._link.pool, trust_env=False, follow_redirects=False, timeout=None
            ),
        )

    async def _ask(self, request: Request) -> tuple[dict[str, Any], float]:
        fields = _fields(request)
        headers = {REQUEST_ID_HEADER: header_safe(request.request_id), **self._omitted}
        ask_ids = self._ids_to_ask(request, fields)
        asks = bool(ask_ids)
        response, latency_s = await self._post({**dict.fromkeys(ask_ids, True), **fields} if asks else fields, headers)
        if asks and _refuses(response, ask_ids):
            response, latency_s = await self._post(fields, headers)
            # Only now it is sure that nothing else was wrong with the request.
            self._server_takes_ids = not response.is_success
        if not response.is_success:
            fault = classify_answer(response.status_code, response.headers, response.content, now=time.time())
            raise CallFailed(fault)
        return decode_answer(response.content), latency_s

    async def _stream(self, request: Request, wait: Wait) -> tuple[dict[str, Any], float]:
        """Ask for a stream, without the SDK, whose objects would cost more than all the rest."""
        dialect = self._link.backend.dialect
        fields = {**_fields(request), "stream": True}
        more: dict[str, Any] = dict.fromkeys(self._ids_to_ask(request, fields) if dialect.streams_ids else (), True)
        if dialect.counts_streams and self._server_counts:
            more["stream_options"] = {"include_usage": True}

        async def ask() -> tuple[dict[str, Any], float]:
            fold = ChatFold(has_null=dialect.has_null)
            return await self._link.stream_of(_PATH, {**more, **fields}, request.request_id, fold=fold, wait=wait)

        try:
            return await ask()
        except CallFailed as failure:
            refused = [name for name in more if _names(failure.fault, name)]
            if not refused:
                raise
        for name in refused:
            del more[name]
        answered = await ask()
        # Only now it is sure that nothing else was wrong with the request.
        self._server_counts &= "stream_options" not in refused
        self._server_takes_ids &= refused in ([], ["stream_options"])
        return answered

    def _ids_to_ask(self, request: Request, fields: dict[str, Any]) -> frozenset[str]:
        """Return the fields that make the server tell the ids, where they are wanted and not asked for already."""
        ask_ids = self._link.backend.dialect.ask_ids
        asks = request.want_token_ids and self._server_takes_ids and not ask_ids <= fields.keys()
        return ask_ids if asks else frozenset()

    async def _post(self, fields: dict[str, Any], headers: dict[str, Any]) -> tuple[httpx2.Response, float]:
        body = msgspec.json.encode(fields)
        return await once_more_if_stale(lambda: self._send(body, headers))

    async def _send(self, body: bytes, headers: dict[str, Any]) -> tuple[httpx2.Response, float]:
        started = time.perf_counter()
        try:
            response = await self._sdk.post(
                self._chat_url,
                cast_to=self._raw_response,
                content=body,
                # The key is not sent; without one the SDK draws a random one for each call.
                options={"headers": headers, "idempotency_key": headers[REQUEST_ID_HEADER]},
            )
        except self._status_error as error:
            response = error.response
        except self._connection_error as error:
            fault = classify_exception(error)
            if fault is None:
                raise
            raise CallFailed(fault) from error
        return response, time.perf_counter() - started


def _fields(request: Request) -> dict[str, Any]:
    fields = {**request.sampling, "model": request.model, "messages": request.messages}
    if request.tools:
        fields["tools"] = request.tools
    if request.seed is not None:
        fields["seed"] = request.seed
    return fields


def _names(fault: Fault, field: str) -> bool:
    """Return whether a strict server refuses the request and names a field."""
    return fault.status in {400, 422} and field in fault.message


def _refuses(response: httpx2.Response, ask_ids: frozenset[str]) -> bool:
    """Return whether a strict server refuses the request and names a field that asks for ids."""
    if response.status_code not in {400, 422}:
        return False
    words = words_of_body(response.content)[0]
    return any(name in words for name in ask_ids)
