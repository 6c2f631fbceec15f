"""What the protocols share that take a prompt's token ids and answer with token ids."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from app.records import Completion, Usage
from workers.clients import fits
from workers.clients.answers import SPLIT_FROM_CONTENT, derivable, refuse_silence
from workers.clients.backends import Backend
from workers.clients.base import PROBE_TIMEOUT_S, Answer, CallFailed, Probe, Request
from workers.clients.deadlines import Wait
from workers.clients.exact import stop_ids_of, with_check, with_sure_ids
from workers.clients.folding import Fold
from workers.clients.link import Link
from workers.clients.parameters import Allowance
from workers.clients.texts import holds_call_markup, take_apart
from workers.faults import FaultKind, classify_error_body, make_fault
from workers.rendering import Prompt, PromptRefusedError, Tokenizer, Tokenizers

_STILL_RUNNING = frozenset({FaultKind.TIMEOUT, FaultKind.STALLED, FaultKind.DUPLICATE_ID})
"""Faults after which the server may go on with the request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What a server made of a prompt."""

    ids: list[int] | None
    text: str | None
    """The text as the server decoded it, without what ended it; None where it does not decode."""
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    model: str | None
    response_id: str | None


class TokensClient(abc.ABC):
    """Renders a prompt with the model's own tokenizer and chat template, sends its ids, takes the answer apart."""

    name: str
    _path: ClassVar[str]
    _made_by: ClassVar[str]
    """The backend that has this path."""
    _shown: ClassVar[str]
    _known: ClassVar[frozenset[str]]
    """The parameters that can be sent, by their names in OpenAI's protocol or the server's own."""

    def __init__(self, link: Link, tokenizers: Tokenizers, *, allow_unknown: bool) -> None:
        self._link = link
        self._tokenizers = tokenizers
        self._allowance = Allowance(everything=allow_unknown)

    @abc.abstractmethod
    def _fields(self, request: Request, prompt: Prompt) -> dict[str, Any]:
        """Return the request's body."""

    @abc.abstractmethod
    def _read(self, body: dict[str, Any], request: Request) -> Generated:
        """Return what an answer says; raises CallFailed for one that was broken off."""

    @abc.abstractmethod
    def _fold(self) -> Fold:
        """Return what puts the events of a stream together."""

    def _given_up(self, request: Request) -> None:  # noqa: B027 - most servers abort when the connection closes
        """Note that nobody waits for the request's answer any more."""

    @property
    def backend(self) -> Backend:
        """What the server was found to be."""
        return self._link.backend

    async def identify(self, *, again: bool = False) -> Backend:
        """Return what the server is (see Client)."""
        return await self._link.identify(again=again)

    def refusal(self, request: Request) -> str | None:
        """Return why this protocol does not fit the server, or what it does not know of the request."""
        return self.refuses(self._link.backend, request, self._allowance)

    @classmethod
    def refuses(cls, backend: Backend, request: Request, allowance: Allowance) -> str | None:
        """Return the same of any backend."""
        if backend.name not in {"", cls._made_by}:
            return f"{backend.shown} has no {cls._path}; start the workers with MILL_PROTOCOL=auto"
        return fits.refusal(request, backend.context_of(request.model)) or allowance.refusal(
            request.parameters, cls._known, shown=cls._shown, strict=False
        )

    async def complete(self, request: Request) -> Answer:
        """Render, ask once and take the answer apart; raises as Client says."""
        tokenizer = await self._tokenizers.of(request.model)
        try:
            prompt = await asyncio.to_thread(tokenizer.render, request.messages, request.tools, request.sampling)
        except PromptRefusedError as error:
            message = f"the chat template does not take the conversation: {error}"
            raise CallFailed(make_fault(FaultKind.BAD_REQUEST, message)) from error
        fits.check_prompt(len(prompt.ids), request, self._link.backend)
        fields = self._fields(request, prompt)
        try:
            answer, latency_s = await self._link.within_deadline(
                request, lambda wait: self._ask(fields, request.request_id, wait)
            )
        except asyncio.CancelledError:
            self._given_up(request)
            raise
        except CallFailed as failure:
            if failure.fault.kind in _STILL_RUNNING:
                self._given_up(request)
            raise
        if answer.get("error") or answer.get("object") == "error":
            raise CallFailed(classify_error_body(answer))
        generated = self._read(answer, request)
        if generated.text is None:  # thousands of ids are decoded
            completion = await asyncio.to_thread(self._completion, generated, request, prompt, tokenizer)
        else:
            completion = self._completion(generated, request, prompt, tokenizer)
        return self._link.finish(request, completion, latency_s)

    async def _ask(self, fields: dict[str, Any], request_id: str, wait: Wait) -> tuple[dict[str, Any], float]:
        if self._link.streams:
            return await self._link.stream_of(self._path, fields, request_id, fold=self._fold(), wait=wait)
        return await self._link.answer_of(self._path, fields, request_id)

    def _completion(self, generated: Generated, request: Request, prompt: Prompt, tokenizer: Tokenizer) -> Completion:
        stop_ids = stop_ids_of(request.sampling)
        text, stop_reason = generated.text, generated.stop_reason
        if text is None:
            text, stop_reason = _spoken(generated, request.sampling, tokenizer, stop_ids)
        finish_reason = generated.finish_reason
        parts = take_apart(text, opened=prompt.opens_thought, tools=bool(request.tools))
        if not text:
            refuse_silence(generated.usage.completion_tokens, {"output_ids": generated.ids})
        completion = with_sure_ids(
            Completion(
                content=parts.content,
                reasoning=parts.reasoning,
                reasoning_field=None if parts.reasoning is None else SPLIT_FROM_CONTENT,
                tool_calls=parts.calls,
                finish_reason="tool_calls" if parts.calls and finish_reason == "stop" else finish_reason,
                stop_reason=stop_reason,
                unparsed_calls=bool(request.tools) and parts.calls is None and holds_call_markup(parts.content),
                prompt_token_ids=prompt.ids,
                output_ids=generated.ids or None,
                raw=None if text in derivable(parts) else text,
                template=tokenizer.fingerprint,
                usage=generated.usage,
                model=generated.model,
                response_id=generated.response_id,
            ),
            keeps_end=True,
            stop_ids=stop_ids,
            end_ids=tokenizer.end_ids,
        )
        if generated.text is None or not self._link.checks.chosen():
            return completion
        skipped = bool(request.sampling.get("skip_special_tokens"))
        return with_check(
            completion, lambda ids: tokenizer.decode(ids, skip_special=skipped), exact_text=generated.text
        )

    async def probe(self, *, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
        """Look at the server (see Client)."""
        return await self._link.probe(timeout_s=timeout_s)

    async def read_metrics(self, *, timeout_s: float) -> bytes | None:
        """Return its `/metrics` page (see Client)."""
        return await self._link.read_metrics(timeout_s=timeout_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._link.close()


def _spoken(
    generated: Generated, sampling: Mapping[str, Any], tokenizer: Tokenizer, stop_ids: Collection[int]
) -> tuple[str, str | int | None]:
    """Return the text of output ids without the end token or the stop string that ended it, and that stop."""
    ids = generated.ids or []
    if generated.finish_reason != "stop":
        return tokenizer.decode(ids), None
    if ids and (ids[-1] in tokenizer.end_ids or ids[-1] in stop_ids):
        return tokenizer.decode(ids[:-1]), ids[-1] if ids[-1] in stop_ids else None
    text = tokenizer.decode(ids)
    stops = sampling.get("stop") or ()
    found = [(text.find(stop), stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
    if not found:
        return text, None
    at, stop = min(found)
    return text if sampling.get("include_stop_str_in_output") else text[:at], stop
