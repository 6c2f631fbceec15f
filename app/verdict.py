"""Whether a completion is worth keeping: pure rules, one reason each."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from app.records import Completion, Kind, Record, Turn, Verdict
from app.repetition import is_repetitive

_THINK_TAGS = ("<think>", "</think>")
_LEAKS = (*_THINK_TAGS, "<|channel|>")
"""The last one parts thought and answer in what gpt-oss writes."""
_WHOLE_ANSWERS = frozenset({"stop", "tool_calls"})


class Reason(enum.StrEnum):
    """Why a completion is rejected."""

    TRUNCATED_IN_THINK = "truncated_in_think"
    """Cut at the token limit before the reasoning ended: there is no answer."""
    TRUNCATED = "truncated"
    """Cut at the token limit within the answer."""
    CONTENT_FILTER = "content_filter"
    """Cut or withheld by a filter of the server."""
    UNFINISHED = "unfinished"
    """Ended for a reason that makes no whole answer."""
    EMPTY = "empty"
    """Neither content nor reasoning nor tool calls."""
    ANSWER_IN_REASONING = "answer_in_reasoning"
    """Ended by itself with reasoning but no content: the answer is missing, or the server's parser misplaced it."""
    THINK_LEAK = "think_leak"
    """A think tag, or a channel mark of gpt-oss, stands in the content: reasoning and answer were split in the wrong
    place."""
    UNPARSED_CALLS = "unparsed_calls"
    """Tools were offered, and calls stand as text in the content: the server's tool parser does not fit the model."""
    TOO_SHORT = "too_short"
    """Fewer tokens than the dataset asks for."""
    REPETITION = "repetition"
    """Runs in a loop: more of its end repeats itself than the dataset allows."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What a dataset asks of its completions."""

    min_completion_tokens: int = 0
    keep_truncated: bool = False
    allow_think_leak: bool = False
    max_repetition: float | None = None
    """The share of 16-grams that may be repeated (app/repetition.py); None: any."""


def judge(completion: Completion, rules: Rules, *, earlier_tokens: int | None = 0) -> Verdict:
    """Return ACCEPTED, or REJECTED with the first rule that the completion breaks, in the order of `Reason`.

    Tokens are those the server reported, else the number of exact output ids; where neither is known, the rule for
    short answers is not applied. A conversation is judged by its last turn, and as short by all of them:
    `earlier_tokens` are those of the turns before, None where they are not known. White space alone is nothing. A think
    tag in the content is a leak wherever it stands, also in an answer about think tags: the text is kept, and the rule
    can be changed without asking again. `keep_truncated` accepts cut answers, but never one without an answer.
    Reasoning and content may run in a loop each by itself.
    """
    reason = _ending(completion, keep_truncated=rules.keep_truncated) or _emptiness(completion)
    reason = reason or _text(completion, rules, earlier_tokens)
    return Verdict(Kind.ACCEPTED) if reason is None else Verdict(Kind.REJECTED, reason.value)


def _ending(completion: Completion, *, keep_truncated: bool) -> Reason | None:
    if completion.finish_reason == "length":
        if _cut_in_think(completion):
            return Reason.TRUNCATED_IN_THINK
        return None if keep_truncated else Reason.TRUNCATED
    if completion.finish_reason == "content_filter":
        return Reason.CONTENT_FILTER
    return None if completion.finish_reason in _WHOLE_ANSWERS else Reason.UNFINISHED


def _cut_in_think(completion: Completion) -> bool:
    opening, closing = _THINK_TAGS
    content = (completion.content or "").strip()
    if content.startswith(opening):
        return closing not in content
    return not content and not completion.tool_calls and _says_something(completion.reasoning)


def _emptiness(completion: Completion) -> Reason | None:
    if _says_something(completion.content) or completion.tool_calls:
        return None
    return Reason.ANSWER_IN_REASONING if _says_something(completion.reasoning) else Reason.EMPTY


def earlier_tokens(turns: Iterable[Record | Turn]) -> int | None:
    """Return the completion tokens of a conversation's turns; None where those of one are not known."""
    counts = [turn.usage.completion_tokens for turn in turns]
    return None if None in counts else sum(count or 0 for count in counts)


def _text(completion: Completion, rules: Rules, earlier: int | None) -> Reason | None:
    content = completion.content or ""
    if not rules.allow_think_leak and any(tag in content for tag in _LEAKS):
        return Reason.THINK_LEAK
    if completion.unparsed_calls:
        return Reason.UNPARSED_CALLS
    tokens = _completion_tokens(completion)
    if tokens is not None and earlier is not None and earlier + tokens < rules.min_completion_tokens:
        return Reason.TOO_SHORT
    texts = (content, completion.reasoning or "")
    most = rules.max_repetition
    return Reason.REPETITION if most is not None and any(is_repetitive(text, most) for text in texts) else None


def _says_something(text: str | None) -> bool:
    return bool(text and not text.isspace())


def _completion_tokens(completion: Completion) -> int | None:
    if completion.usage.completion_tokens is not None:
        return completion.usage.completion_tokens
    return None if completion.output_ids is None else len(completion.output_ids)
