"""SGLang's own `/generate`: a prompt's ids in, text and ids out, and requests that can be aborted by name."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from workers.clients.answers import finished, read_ids, read_usage, refuse, string_or_none
from workers.clients.base import CallFailed, Request
from workers.clients.folding import GenerateFold
from workers.clients.parameters import NATIVE_SGLANG, RENDERED, SGLANG_NAMES, SGLANG_TOP
from workers.clients.tokens import Generated, TokensClient
from workers.faults import FaultKind, make_fault
from workers.rendering import Prompt
from workers.wording import quote_start

_ABORT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 2.0
_ENDS = {"stop": "stop", "length": "length"}


class SGLangClient(TokensClient):
    """Asks `/generate`, each attempt under a request id (`rid`) of its own."""

    name: str = "sglang"
    _path: ClassVar[str] = "/generate"
    _made_by: ClassVar[str] = "sglang"
    _shown: ClassVar[str] = "SGLang's /generate"
    _known: ClassVar[frozenset[str]] = NATIVE_SGLANG

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._aborts = set[asyncio.Task[None]]()

    def _fields(self, request: Request, prompt: Prompt) -> dict[str, Any]:
        # Special tokens stay in the text, for calls and channels are marked by them in some models.
        params: dict[str, Any] = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        fields: dict[str, Any] = {"input_ids": prompt.ids, "rid": request.request_id, "stream": self._link.streams}
        for name, value in request.sampling.items():
            if name in SGLANG_TOP:
                fields[name] = value
            elif name not in RENDERED:
                params[SGLANG_NAMES.get(name, name)] = value
        if request.seed is not None:
            params["sampling_seed"] = request.seed
        return {**fields, "sampling_params": params}

    def _read(self, body: dict[str, Any], request: Request) -> Generated:
        del request
        text, meta = body.get("text"), body.get("meta_info")
        if not isinstance(text, str) or not isinstance(meta, dict):
            refuse("the answer has no text or no meta_info", body)
        reason = meta.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind == "abort":
            said = reason.get("message") if isinstance(reason, dict) else None
            words = f"the server aborted the request: {said or quote_start(body)}"
            raise CallFailed(make_fault(FaultKind.ABORTED, words, status=200))
        matched = reason.get("matched") if isinstance(reason, dict) else None
        details = {"cached_tokens": meta.get("cached_tokens")}
        return Generated(
            ids=read_ids(body.get("output_ids")),
            text=text,
            finish_reason=finished(_ENDS.get(kind, kind) if isinstance(kind, str) else kind, body),
            stop_reason=matched if isinstance(matched, str) or type(matched) is int else None,
            usage=read_usage({**meta, "prompt_tokens_details": details}),
            model=None,
            response_id=string_or_none(meta.get("id")),
        )

    def _fold(self) -> GenerateFold:
        return GenerateFold()

    def _given_up(self, request: Request) -> None:
        """Abort the request: the server would notice that nobody listens only seconds later."""
        task = asyncio.get_running_loop().create_task(self._abort(request.request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await self._link.post("/abort_request", {"rid": request_id}, request_id)
        except (TimeoutError, CallFailed):
            return  # it is gone, and so is the request; or it finds out by itself

    async def close(self) -> None:
        """Send the aborts that are under way, and close all connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_CLOSE_TIMEOUT_S)
        await super().close()
