"""Whether prompt and answer fit into the model's context: said before a call where it is known, and seen after it.

A server that cuts an answer down to the room that its prompt has left says `length` like one that was cut at
max_tokens. Whoever asked would take it for an answer as long as was allowed, so its record has the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.records import Completion
from workers.clients.backends import Backend
from workers.clients.base import CallFailed, Request
from workers.faults import FaultKind, make_fault

_LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict")
"""The request fields that bound an answer, the one that servers heed first."""
_SLACK = 4
"""Tokens that servers leave free at the end of their context (llama.cpp one or two)."""
CUT = "the end of the context cut the answer "
"""How the note about such an answer begins."""
_TEMPLATE_BYTES = 8192
"""What a chat template adds to a conversation, generously."""


def limits(sampling: Mapping[str, Any]) -> list[int]:
    """Return what a request says of the tokens that an answer may have, first what servers heed first."""
    values = (sampling.get(name) for name in _LIMITS)
    return [value for value in values if type(value) is int and value > 0]


def asked_tokens(sampling: Mapping[str, Any]) -> int | None:
    """Return how many tokens an answer may have as a request asks; None: as many as fit."""
    return next(iter(limits(sampling)), None)


def refusal(request: Request, context: int | None) -> str | None:
    """Return a sentence where the answer alone fills the context (in tokens; None: not known), so that none can fit."""
    finding = lack_of_room(request, context)
    if finding is None or context is None:
        return None
    return (
        f"{finding}; enqueue again with --max-tokens {fitting(context)} or less and --new-settings, or start the "
        "server with a larger context; then resume the dataset"
    )


def lack_of_room(request: Request, context: int | None) -> str | None:
    """Return the start of that sentence, which says what does not fit into what."""
    asked = asked_tokens(request.sampling)
    if context is None or asked is None or asked < context:
        return None
    return f"max_tokens {asked} does not fit into the context of {context} tokens of {request.model}"


def fitting(context: int) -> int:
    """Return an answer's length in tokens that leaves a prompt as much room."""
    return max(1, context // 2)


def may_overflow(request: Request, backend: Backend) -> bool:
    """Tell whether the prompt is long enough that its tokens are worth counting before the call.

    A token is at least one byte of the prompt, so that a short text needs no tokenizer.
    """
    context = backend.context_of(request.model)
    if context is None:
        return False
    answer = asked_tokens(request.sampling) or 1 if backend.dialect.refuses_overlong else 1
    return _size(request.messages) + _size(request.tools) + _TEMPLATE_BYTES + answer > context


def check_prompt(prompt_tokens: int, request: Request, backend: Backend) -> None:
    """Raise CallFailed (context_overflow) with the numbers where a prompt cannot be answered.

    A server that would only cut the answer is asked: most answers end before they are cut.
    """
    context, asked = backend.context_of(request.model), asked_tokens(request.sampling) or 1
    needed = asked if backend.dialect.refuses_overlong else 1
    if context is not None and prompt_tokens + needed > context:
        message = f"prompt {prompt_tokens} + max_tokens {asked} > context {context} tokens of {request.model}"
        raise CallFailed(make_fault(FaultKind.CONTEXT_OVERFLOW, f"{message}; it was not sent"))


def with_end_told(completion: Completion, request: Request, context: int | None) -> Completion:
    """Return an answer, with the numbers in its notes where the end of the context cut it.

    That is one which ended with `length` before it had the tokens that were asked for, although its prompt and the
    answer fill the context: servers cut max_tokens down in silence. What a server does not count proves nothing, and
    who asked for as many tokens as fit has got them. Raises CallFailed (context_overflow) where the prompt left no
    room for a single token.
    """
    asked, usage = asked_tokens(request.sampling), completion.usage
    prompt, made = usage.prompt_tokens, usage.completion_tokens
    if context is None or completion.finish_reason != "length" or asked is None or prompt is None or made is None:
        return completion
    if made >= asked or prompt + made < context - _SLACK:
        return completion
    message = f"prompt {prompt} + max_tokens {asked} > context {context} tokens of {request.model}"
    if not made:
        raise CallFailed(make_fault(FaultKind.CONTEXT_OVERFLOW, f"{message}: no token came", status=200))
    return msgspec.structs.replace(completion, notes=[*completion.notes, f"{CUT}after {made} tokens: {message}"])


def is_cut(completion: Completion) -> bool:
    """Tell whether the end of the context cut an answer."""
    return any(note.startswith(CUT) for note in completion.notes)


def _size(value: Any) -> int:
    """Return about how many bytes of text a JSON value holds, keys included."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return sum(_size(key) + _size(one) for key, one in value.items())
    if isinstance(value, list):
        return sum(map(_size, value)) + len(value)
    return 0 if value is None else len(str(value))
