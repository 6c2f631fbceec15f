"""Whether prompt and answer fit into the model's context: said before a call where it is known, and seen after it.

A server that cuts an answer down to the room that its prompt has left says `length` like one that was cut at
max_tokens. Such an answer is no record: whoever asked would take it for an answer as long as was allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.records import Completion
from workers.clients.base import CallFailed, Request
from workers.faults import FaultKind, make_fault

_LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict")
"""The request fields that bound an answer, the one that servers heed first."""
_SLACK = 4
"""Tokens that servers leave free at the end of their context (llama.cpp one or two)."""
_TEMPLATE_BYTES = 8192
"""What a chat template adds to a conversation, generously."""


def asked_tokens(sampling: Mapping[str, Any]) -> int | None:
    """Return how many tokens an answer may have as a request asks; None: as many as fit."""
    values = (sampling.get(name) for name in _LIMITS)
    return next((value for value in values if type(value) is int and value > 0), None)


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


def may_overflow(request: Request, context: int | None) -> bool:
    """Tell whether the prompt is long enough that its tokens are worth counting before the call.

    A token is at least one byte of the prompt, so that a short text needs no tokenizer.
    """
    asked = asked_tokens(request.sampling)
    if context is None or asked is None:
        return False
    return _size(request.messages) + _size(request.tools) + _TEMPLATE_BYTES + asked > context


def check_prompt(prompt_tokens: int, request: Request, context: int | None) -> None:
    """Raise CallFailed (context_overflow) with the numbers where a prompt leaves its answer no room."""
    asked = asked_tokens(request.sampling)
    if context is not None and prompt_tokens + (asked or 1) > context:
        message = (
            f"prompt {prompt_tokens} + max_tokens {asked or 1} > context {context} tokens of {request.model}; "
            "it was not sent"
        )
        raise CallFailed(make_fault(FaultKind.CONTEXT_OVERFLOW, message))


def check_answer(completion: Completion, request: Request, context: int | None) -> None:
    """Raise CallFailed (context_overflow) with the numbers where the end of the context cut an answer.

    That is one which ended with `length` before it had the tokens that were asked for, although its prompt and the
    answer fill the context: servers cut max_tokens down in silence, to nothing where the prompt alone fills it.
    """
    asked, usage = asked_tokens(request.sampling), completion.usage
    if context is None or completion.finish_reason != "length" or usage.prompt_tokens is None:
        return
    made = usage.completion_tokens or 0
    if (asked is not None and made >= asked) or usage.prompt_tokens + made < context - _SLACK:
        return
    wanted = "" if asked is None else f" + max_tokens {asked} > context {context} tokens of {request.model}"
    message = f"prompt {usage.prompt_tokens}{wanted}: the server cut the answer after {made} tokens"
    raise CallFailed(make_fault(FaultKind.CONTEXT_OVERFLOW, message, status=200))


def _size(value: Any) -> int:
    """Return about how many bytes of text a JSON value holds, keys included."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return sum(_size(key) + _size(one) for key, one in value.items())
    if isinstance(value, list):
        return sum(map(_size, value)) + len(value)
    return 0 if value is None else len(str(value))
