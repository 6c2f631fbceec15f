"""Token ids are kept only where they are certain, and some answers are decoded to prove it."""

from __future__ import annotations

from typing import Any

import pytest

from app.records import Completion, Usage
from producer.simulator.tokens import decode, encode
from workers.clients.exact import CHECK_EVERY, Checks, with_check, with_sure_ids


def answer(ids: list[int], **fields: Any) -> Completion:
    """Return an answer with output ids."""
    return Completion(**{"content": "x", "finish_reason": "stop", "output_ids": ids, **fields})


@pytest.mark.parametrize(
    ("fields", "facts", "end"),
    [
        ({}, {"keeps_end": True}, "eos"),
        ({}, {"keeps_end": None}, None),
        ({}, {"keeps_end": None, "end_ids": {2}}, "eos"),
        ({}, {"keeps_end": True, "end_ids": {9}}, "none"),
        ({}, {"keeps_end": True, "stop_ids": [2]}, "stop"),
        ({"finish_reason": "length"}, {"keeps_end": True}, "none"),
        ({"finish_reason": "length"}, {"keeps_end": True, "end_ids": {2}}, "eos"),
        ({"finish_reason": "tool_calls"}, {"keeps_end": True}, "eos"),
        ({"stop_reason": "END"}, {"keeps_end": True, "end_ids": {9}}, "stop"),
        ({"stop_reason": 2}, {"keeps_end": None}, "eos"),
        ({"stop_reason": 3}, {"keeps_end": True}, "none"),
    ],
)
def test_how_ids_end_is_told(fields: dict[str, Any], facts: dict[str, Any], end: str | None) -> None:
    """The last id decides where the tokenizer is known, else what the server says ended the answer."""
    assert with_sure_ids(answer([1, 2], **fields), **facts).ids_end == end


def test_a_number_that_does_not_fit_leaves_no_ids() -> None:
    """Ids whose number is not the counted one are null, with a note; the others stay."""
    usage = Usage(prompt_tokens=1, completion_tokens=3)
    sure = with_sure_ids(answer([1, 2], prompt_token_ids=[7], usage=usage), keeps_end=True)
    assert (sure.prompt_token_ids, sure.output_ids, sure.ids, sure.ids_end) == ([7], None, "server", None)
    assert sure.notes == ["output_ids left out: the server gave 2 ids and counted 3 tokens"]
    usage = Usage(prompt_tokens=2, completion_tokens=3)
    none = with_sure_ids(answer([1, 2], prompt_token_ids=[7], usage=usage), keeps_end=True)
    assert (none.ids, len(none.notes)) == (None, 2)


def test_without_ids_nothing_changes() -> None:
    """An answer without ids is left as it is."""
    said = Completion(content="x", usage=Usage(completion_tokens=3))
    assert with_sure_ids(said, keeps_end=True) is said
    assert with_check(said, decode) is said


@pytest.mark.parametrize(
    ("fields", "text", "check"),
    [
        ({"reasoning": "So.", "content": "Yes."}, "<think>\nSo.\n</think>\n\nYes.<|im_end|>", "ok"),
        ({"content": "Yes."}, "Yes.", "ok"),
        ({"content": "Yes \U0001f305"}, "Yes \U0001f305", "ok"),
        ({"content": "Yes!"}, "Yes.", "mismatch"),
        ({"reasoning": "No.", "content": "Yes."}, "<think>So.</think>Yes.", "mismatch"),
        ({"content": None, "tool_calls": [{}]}, "<tool_call>", None),
    ],
)
def test_what_a_servers_parser_left_is_found_in_the_ids(fields: dict[str, Any], text: str, check: str | None) -> None:
    """Reasoning and content stand in the decoded ids, whatever tags and white space a parser took out."""
    assert with_check(answer(encode(text), **fields), decode).ids_check == check


_LIMIT = {"finish_reason": "length", "ids_end": "none"}
_STOP = {"stop_reason": "END", "ids_end": "stop"}
_EOS = {"stop_reason": 257, "ids_end": "eos"}


@pytest.mark.parametrize(
    ("ids", "fields", "text", "check"),
    [
        (encode("Yes.<|im_end|>"), _EOS, "Yes.", "ok"),
        (encode("Yes."), {"ids_end": "none"}, "Yes.", "ok"),
        (encode("Yes.END"), _STOP, "Yes.", "ok"),
        (encode("Yes.END!"), _STOP, "Yes.", "ok"),
        (encode("Yes.END"), _STOP, "Yes.END", "ok"),
        (encode("Yes \U0001f305")[:-1], _LIMIT, "Yes \ufffd", "ok"),
        (encode("Yes \U0001f305")[:-1], _LIMIT, "Yes ", "ok"),
        (encode("Yes<|im_end|>"), _EOS, "Yes.", "mismatch"),
        (encode("No.<|im_end|>"), _EOS, "Yes.", "mismatch"),
        (encode("Yes. And more.<|im_end|>"), _EOS, "Yes.", "mismatch"),
        (encode("Yes. And more."), _LIMIT, "Yes.", "mismatch"),
        (encode("Yes. And moreEND"), _STOP, "Yes.", "mismatch"),
        (encode("Yes \U0001f305")[:-1], {}, "Yes ", "mismatch"),
    ],
)
def test_a_whole_text_is_compared_to_the_letter(ids: list[int], fields: dict[str, Any], text: str, check: str) -> None:
    """Only what ended the answer may follow its text in the ids, and a character that a limit cut."""
    assert with_check(answer(ids, **fields), decode, exact_text=text).ids_check == check


def test_the_first_answer_and_then_a_few_are_checked() -> None:
    """The first answer is checked, for a wrong tokenizer shows there, and one of every hundred after it."""
    checks = Checks("http://server")
    chosen = [number for number in range(2 * CHECK_EVERY + 1) if checks.chosen()]
    assert chosen == [0, CHECK_EVERY, 2 * CHECK_EVERY]


def test_trouble_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A server whose ids do not fit is warned of once for each kind of trouble; sound answers say nothing."""
    checks = Checks("http://server")
    checks.tell(answer([1], ids_check="ok"))
    assert caplog.text == ""
    for _ in range(3):
        checks.tell(answer([1], notes=["output_ids left out: 1 and 2"]))
        checks.tell(answer([1], ids_check="mismatch"))
    assert caplog.text.count("http://server: output_ids left out: 1 and 2") == 1
    assert caplog.text.count("is MILL_TOKENIZER the model's own?") == 1
