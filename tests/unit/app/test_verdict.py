"""Verdicts: which completions are kept, and the one reason for each that is not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.records import Completion, Kind, Usage, Verdict
from app.verdict import Reason, Rules, judge


def verdict(*, min_tokens: int = 0, keep_truncated: bool = False, **fields: Any) -> Verdict:
    """Return the verdict on a good answer with what is given changed."""
    completion = Completion(**{"content": "An answer.", "finish_reason": "stop", **fields})
    return judge(completion, Rules(min_completion_tokens=min_tokens, keep_truncated=keep_truncated))


CALL = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reasoning": "thought"},
        {"content": None, "tool_calls": CALL, "finish_reason": "tool_calls"},
        {"content": "", "tool_calls": CALL},
        {"content": "smile \U0001f600 \x00 nul"},
        {"content": "a < b, think > c"},
    ],
)
def test_whole_answers_are_accepted(fields: dict[str, Any]) -> None:
    """An answer that ended by itself and says or calls something is kept."""
    assert verdict(**fields) == Verdict(Kind.ACCEPTED)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"finish_reason": "length"}, Reason.TRUNCATED),
        ({"finish_reason": "length", "content": ""}, Reason.TRUNCATED),
        ({"finish_reason": "length", "content": None, "reasoning": "thought"}, Reason.TRUNCATED_IN_THINK),
        ({"finish_reason": "length", "content": "", "reasoning": "thought"}, Reason.TRUNCATED_IN_THINK),
        ({"finish_reason": "length", "content": "<think>on and on"}, Reason.TRUNCATED_IN_THINK),
        ({"finish_reason": "length", "content": "half an ans", "reasoning": "thought"}, Reason.TRUNCATED),
        ({"finish_reason": "content_filter"}, Reason.CONTENT_FILTER),
        ({"finish_reason": "abort"}, Reason.UNFINISHED),
        ({"finish_reason": None}, Reason.UNFINISHED),
        ({"content": None}, Reason.EMPTY),
        ({"content": ""}, Reason.EMPTY),
        ({"content": " \n"}, Reason.EMPTY),
        ({"content": "", "reasoning": "\n\n"}, Reason.EMPTY),
        ({"content": None, "finish_reason": "tool_calls"}, Reason.EMPTY),
        ({"content": None, "reasoning": "the answer"}, Reason.ANSWER_IN_REASONING),
        ({"content": "\n", "reasoning": "the answer"}, Reason.ANSWER_IN_REASONING),
        ({"content": "so</think>yes", "reasoning": "thought"}, Reason.THINK_LEAK),
        ({"content": "<think>so"}, Reason.THINK_LEAK),
        ({"content": "<|channel|>final<|message|>yes"}, Reason.THINK_LEAK),
        ({"content": "<tool_call>f()", "unparsed_calls": True}, Reason.UNPARSED_CALLS),
    ],
)
def test_each_broken_rule_has_its_reason(fields: dict[str, Any], reason: Reason) -> None:
    """What is not kept says in one word why."""
    assert verdict(**fields) == Verdict(Kind.REJECTED, reason.value)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"usage": Usage(completion_tokens=49)}, Kind.REJECTED),
        ({"usage": Usage(completion_tokens=50)}, Kind.ACCEPTED),
        ({"output_ids": [1] * 49}, Kind.REJECTED),
        ({"output_ids": [1] * 50}, Kind.ACCEPTED),
        ({"usage": Usage(completion_tokens=50), "output_ids": [1]}, Kind.ACCEPTED),
        ({}, Kind.ACCEPTED),
    ],
)
def test_short_answers(fields: dict[str, Any], kind: Kind) -> None:
    """The server's count decides, else the exact ids; an answer of unknown length is not called short."""
    result = verdict(min_tokens=50, **fields)
    assert result.kind is kind
    assert result.reason == (None if kind is Kind.ACCEPTED else "too_short")


def test_cut_answers_can_be_kept() -> None:
    """With keep_truncated a cut answer is kept, but not a cut thought, which has no answer."""
    assert verdict(finish_reason="length", keep_truncated=True).kind is Kind.ACCEPTED
    cut = verdict(finish_reason="length", content=None, reasoning="thought", keep_truncated=True)
    assert cut.reason == Reason.TRUNCATED_IN_THINK
    assert verdict(finish_reason="length", content="", keep_truncated=True).reason == Reason.EMPTY


TEXTS = st.none() | st.text(max_size=20) | st.sampled_from(["<think>a", "a</think>b"])


@given(
    content=TEXTS,
    reasoning=TEXTS,
    finish_reason=st.none() | st.sampled_from(["stop", "length", "tool_calls", "abort", "x"]),
    keep_truncated=st.booleans(),
)
def test_accepted_means_usable(
    content: str | None, reasoning: str | None, finish_reason: str | None, *, keep_truncated: bool
) -> None:
    """Whatever comes, an accepted completion ended properly, has content, and leaks no think tag."""
    result = verdict(content=content, reasoning=reasoning, finish_reason=finish_reason, keep_truncated=keep_truncated)
    if result.kind is Kind.ACCEPTED:
        assert content is not None
        assert content.strip()
        assert "think>" not in content
        assert finish_reason in {"stop", "tool_calls"} or (finish_reason == "length" and keep_truncated)
    else:
        assert result.reason in set(Reason)


def test_a_think_leak_may_be_allowed() -> None:
    """With allow_think_leak a think tag in the content is no fault, and the other rules still count."""
    leak = Completion(content="<think>a</think>b", finish_reason="stop", usage=Usage(completion_tokens=5))
    assert judge(leak, Rules()).reason == Reason.THINK_LEAK
    assert judge(leak, Rules(allow_think_leak=True)) == Verdict(Kind.ACCEPTED)
    assert judge(leak, Rules(allow_think_leak=True, min_completion_tokens=6)).reason == Reason.TOO_SHORT


@pytest.mark.parametrize("field", ["content", "reasoning"])
def test_a_loop_is_rejected_where_it_is_forbidden(field: str) -> None:
    """Content and reasoning may each run in a loop; without the rule both are let be."""
    loop = Completion(**{"content": "x", "finish_reason": "stop", field: "and so on, " * 500})
    assert judge(loop, Rules(max_repetition=0.5)).reason == Reason.REPETITION
    assert judge(loop, Rules()) == Verdict(Kind.ACCEPTED)
    assert judge(loop, Rules(max_repetition=1.0)) == Verdict(Kind.ACCEPTED)
