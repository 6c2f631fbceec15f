"""vLLM's `/inference/v1/generate`: token ids in, token ids out; the text is decoded here."""

from __future__ import annotations

from typing import Any, ClassVar

from app.records import Usage
from workers.clients.answers import finished, read_ids, read_usage, refuse, string_or_none
from workers.clients.base import Request
from workers.clients.folding import TokensFold
from workers.clients.parameters import NATIVE_VLLM, RENDERED, VLLM_TOP
from workers.clients.tokens import Generated, TokensClient
from workers.rendering import Prompt


class VLLMTokensClient(TokensClient):
    """Asks vLLM's endpoint for clients that render and decode by themselves."""

    name: str = "vllm-tokens"
    _path: ClassVar[str] = "/inference/v1/generate"
    _made_by: ClassVar[str] = "vllm"
    _shown: ClassVar[str] = "vLLM's /inference/v1/generate"
    _known: ClassVar[frozenset[str]] = NATIVE_VLLM

    def _fields(self, request: Request, prompt: Prompt) -> dict[str, Any]:
        params: dict[str, Any] = {}
        fields: dict[str, Any] = {
            "model": request.model,
            "request_id": request.request_id,
            "token_ids": prompt.ids,
            "stream": self._link.streams,
        }
        if self._link.streams:
            fields["stream_options"] = {"include_usage": True}
        for name, value in request.sampling.items():
            if name in VLLM_TOP:
                fields[name] = value
            elif name == "max_completion_tokens":
                params["max_tokens"] = value
            elif name not in RENDERED:
                params.setdefault(name, value)
        if request.seed is not None:
            params["seed"] = request.seed
        return {**fields, "sampling_params": params}

    def _fold(self) -> TokensFold:
        return TokensFold()

    def _read(self, body: dict[str, Any], request: Request) -> Generated:
        choices = body.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            refuse("the answer has no choices", body)
        finish_reason = finished(choice.get("finish_reason"), body)
        given = choice.get("token_ids")
        ids = [] if given == [] else read_ids(given)
        if ids is None:
            refuse("the answer has no token_ids", body)
        usage = body.get("usage")
        return Generated(
            ids=ids,
            text=None,
            finish_reason=finish_reason,
            stop_reason=None,
            # Older versions leave the counts out, which the ids say as well.
            usage=read_usage(usage) if isinstance(usage, dict) else Usage(completion_tokens=len(ids)),
            model=string_or_none(body.get("model")) or request.model,
            response_id=string_or_none(body.get("id")) or string_or_none(body.get("request_id")),
        )
