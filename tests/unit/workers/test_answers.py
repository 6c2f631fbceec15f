"""Chat answers: every server's dialect becomes one completion, and what is no answer becomes a fault."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.records import Completion, Usage
from workers.clients.answers import SPLIT_FROM_CONTENT, decode_answer, parse_chat_answer, split_think
from workers.clients.base import CallFailed
from workers.faults import Fault

USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def answer(message: Any = None, *, choice: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """Return a chat answer as vLLM sends it, with what is given changed."""
    message = {"role": "assistant", "content": "Hello."} if message is None else message
    whole = {"index": 0, "message": message, "finish_reason": "stop", **(choice or {})}
    return {"id": "c1", "object": "chat.completion", "model": "m", "choices": [whole], "usage": USAGE, **top}


def fault_of(body: dict[str, Any] | bytes) -> Fault:
    """Return the fault that an answer is."""
    with pytest.raises(CallFailed) as failure:
        parse_chat_answer(decode_answer(body if isinstance(body, bytes) else json.dumps(body).encode()))
    return failure.value.fault


def test_plain_answer() -> None:
    """An ordinary answer gives all that it says, and null for what it does not say."""
    assert parse_chat_answer(answer()) == Completion(
        content="Hello.",
        finish_reason="stop",
        usage=Usage(prompt_tokens=3, completion_tokens=5),
        model="m",
        response_id="c1",
    )


@pytest.mark.parametrize(
    ("message", "reasoning", "field"),
    [
        ({"content": "A", "reasoning": "R"}, "R", "reasoning"),
        ({"content": "A", "reasoning_content": "R"}, "R", "reasoning_content"),
        ({"content": "A", "reasoning": None, "reasoning_content": "R"}, "R", "reasoning_content"),
        ({"content": "A", "reasoning": "R", "reasoning_details": [{"text": "R"}]}, "R", "reasoning"),
        (
            {"content": "A", "reasoning_details": [{"text": "R"}, {"summary": "S"}, {"data": "secret"}]},
            "RS",
            "reasoning_details",
        ),
        ({"content": "A", "reasoning": ""}, None, None),
        ({"content": "A", "reasoning_details": []}, None, None),
        ({"content": "<think>R</think>A"}, "R", SPLIT_FROM_CONTENT),
        ({"content": "R</think>A"}, "R", SPLIT_FROM_CONTENT),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "R"}]},
                    {"type": "text", "text": "A"},
                ]
            },
            "R",
            SPLIT_FROM_CONTENT,
        ),
    ],
)
def test_reasoning_under_every_name(message: dict[str, Any], reasoning: str | None, field: str | None) -> None:
    """The reasoning is found wherever a server puts it, and the record says where that was."""
    completion = parse_chat_answer(answer(message))
    assert (completion.content, completion.reasoning, completion.reasoning_field) == ("A", reasoning, field)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("<think>\nso\n</think>\n\nyes", ("\nso\n", "\n\nyes")),
        ("\n<think>so</think>yes", ("so", "yes")),
        ("so</think>", ("so", "")),
        ("no tags", None),
        ("<think>never closed", None),
        ("first <think>so</think>yes", None),
        ("a</think>b</think>c", None),
        ("a</think>b<think>c", None),
        ("The tag `</think>` closes it.", None),
    ],
)
def test_splitting_think_tags(content: str, parts: tuple[str, str] | None) -> None:
    """Text is split at the closing tag without changing a character of it, and left alone where that is unclear."""
    assert split_think(content) == parts


def test_think_tags_beside_parsed_reasoning_stay() -> None:
    """Where the server has split off the reasoning itself, a tag in the content is left for the verdict."""
    completion = parse_chat_answer(answer({"content": "so</think>yes", "reasoning": "R"}))
    assert (completion.content, completion.reasoning) == ("so</think>yes", "R")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("smile \U0001f600 \x00 nul", "smile \U0001f600 \x00 nul"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        (["a", "b"], "ab"),
    ],
)
def test_content_forms(content: Any, text: str) -> None:
    """Content may be text or a list of parts; every character comes through."""
    body = json.dumps(answer({"content": content})).encode()
    completion = parse_chat_answer(decode_answer(body))
    assert completion.content == text
    assert msgspec.json.decode(msgspec.json.encode(completion), type=Completion) == completion


def test_null_content_cut_in_thought() -> None:
    """Reasoning without content that was cut at the limit is a completion; the verdict decides."""
    completion = parse_chat_answer(answer({"content": None, "reasoning": "R"}, choice={"finish_reason": "length"}))
    assert (completion.content, completion.reasoning, completion.finish_reason) == (None, "R", "length")


def test_tool_calls_are_kept() -> None:
    """Tool calls come through as they are; an empty list is none."""
    message = {"content": None, "tool_calls": [CALL]}
    completion = parse_chat_answer(answer(message, choice={"finish_reason": "tool_calls"}))
    assert (completion.tool_calls, completion.finish_reason) == ([CALL], "tool_calls")
    assert parse_chat_answer(answer({"content": "A", "tool_calls": []})).tool_calls is None


def test_arguments_that_are_an_object_become_json_text() -> None:
    """A server that sends a call's arguments as an object gives the same call as one that sends them as text."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"où": [1, None]}}}
    (kept,) = parse_chat_answer(answer({"content": None, "tool_calls": [call]})).tool_calls or []
    assert kept == {**call, "function": {"name": "f", "arguments": '{"où": [1, null]}'}}


@pytest.mark.parametrize(
    ("choice", "top"),
    [
        ({"token_ids": [7, 8]}, {"prompt_token_ids": [1, 2]}),
        ({"response_token_ids": [7, 8], "prompt_token_ids": [1, 2]}, {}),
    ],
)
def test_exact_token_ids(choice: dict[str, Any], top: dict[str, Any]) -> None:
    """The exact ids are found where vLLM and where SGLang put them."""
    completion = parse_chat_answer(answer(choice=choice, **top))
    assert (completion.prompt_token_ids, completion.output_ids) == ([1, 2], [7, 8])


def test_exact_token_ids_of_llama_cpp() -> None:
    """llama.cpp's verbose tokens are output ids; its empty list, sent unasked, is none."""
    assert parse_chat_answer(answer(__verbose={"tokens": [7], "prompt": "p"})).output_ids == [7]
    assert parse_chat_answer(answer(__verbose={"tokens": []})).output_ids is None


@pytest.mark.parametrize("count", [-1, 2**31, 2**63 - 1, 10**400])
def test_counts_that_no_answer_can_have_are_unknown(count: int) -> None:
    """A token count below zero or beyond all reason is null, so that it spoils no sum and no index."""
    usage = {"prompt_tokens": count, "completion_tokens": count}
    assert parse_chat_answer(answer(usage=usage)).usage == Usage()


@pytest.mark.parametrize("bad", [-5, 2**31, 2**70])
def test_ids_that_no_vocabulary_has_are_unknown(bad: int) -> None:
    """A list with such a token id is no list of token ids."""
    body = answer()
    body["choices"][0]["token_ids"] = [1, bad]
    assert parse_chat_answer(body).output_ids is None


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, Usage()),
        ([], Usage()),
        ({"completion_tokens": "5"}, Usage()),
        ({"completion_tokens": True, "prompt_tokens": -1}, Usage()),
        ({"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 2}}, Usage(None, 5, 2)),
        ({"completion_tokens": 5, "completion_tokens_details": None, "reasoning_tokens": 2}, Usage(None, 5, 2)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}, Usage(3, cached_tokens=1)),
        ({"prompt_tokens": 3, "prompt_tokens_details": None}, Usage(3)),
    ],
)
def test_usage_forms(usage: Any, expected: Usage) -> None:
    """Token counts are taken where a server reports them, and are null where it does not or reports nonsense."""
    assert parse_chat_answer(answer(usage=usage)).usage == expected


@pytest.mark.parametrize(("choice", "stop"), [({"stop_reason": "END"}, "END"), ({"matched_stop": 2}, 2), ({}, None)])
def test_stop_reason_names(choice: dict[str, Any], stop: str | int | None) -> None:
    """What stopped the answer is read under vLLM's and SGLang's name."""
    assert parse_chat_answer(answer(choice=choice)).stop_reason == stop


def test_odd_side_facts_are_unknown() -> None:
    """A wrong type in what does not decide the answer costs no answer."""
    completion = parse_chat_answer(answer(choice={"stop_reason": [], "token_ids": ["a"]}, id=1, model=None))
    assert completion == Completion(content="Hello.", finish_reason="stop", usage=Usage(3, 5))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"error": {"message": "engine dead", "code": 500}}, "bad_answer"),
        ({"error": "it failed"}, "bad_answer"),
        ({"object": "error", "message": "no", "code": 404}, "not_found"),
        (answer(choice={"error": {"message": "upstream", "code": 502}}), "bad_answer"),
        ({"id": "x", "object": "chat.completion", "choices": []}, "bad_answer"),
        ({"choices": None}, "bad_answer"),
        ({}, "bad_answer"),
        (answer(choice={"finish_reason": "abort"}), "aborted"),
        (answer(choice={"finish_reason": "error"}), "unfinished"),
        (answer(choice={"finish_reason": "repetition"}), "unfinished"),
        (answer(choice={"finish_reason": None}), "unfinished"),
        (answer(choice={"finish_reason": "eos"}), "unfinished"),
        (answer({"content": None, "reasoning": None}), "empty_answer"),
        (answer({"content": ""}), "empty_answer"),
        (b"<html>busy</html>", "bad_answer"),
        (b"<!DOCTYPE html><html></html>", "bad_answer"),
        (b"", "bad_answer"),
        (b" \n", "bad_answer"),
        (b"[]", "bad_answer"),
        (b"null", "bad_answer"),
        (b'"text"', "bad_answer"),
        (b'{"choices":[{"message":{"content":"cut', "bad_answer"),
        (b"data: {}\n\n", "bad_answer"),
        (b"[" * 100_000, "bad_answer"),
    ],
)
def test_what_is_no_answer_is_a_fault(body: dict[str, Any] | bytes, kind: str) -> None:
    """Error bodies, empty choices, aborted and broken answers are faults that can be retried or explained."""
    assert fault_of(body).kind == kind


@pytest.mark.parametrize(
    "body",
    [
        {"choices": {"0": 1}},
        {"choices": [None]},
        {"choices": [{"message": "text", "finish_reason": "stop"}]},
        answer([]),
        answer({"content": 5}),
        answer({"content": [5]}),
        answer({"content": [{"type": "image_url"}]}),
        answer({"content": "A", "reasoning": {"text": "R"}}),
        answer({"content": "A", "reasoning_details": "R"}),
        answer({"content": "A", "tool_calls": "f()"}),
        answer({"content": "A", "tool_calls": ["f()"]}),
        answer({"content": "A", "tool_calls": [{"id": "call_1"}]}),
        answer({"content": "A", "tool_calls": [{"id": None, "function": {"name": 5, "arguments": {}}}]}),
        answer({"content": "A", "tool_calls": [{"function": {"name": "", "arguments": "{}"}}]}),
        answer({"content": "A", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}),
        answer(choice={"finish_reason": {"type": "stop"}}),
    ],
)
def test_wrong_types_are_faults_that_quote_the_answer(body: dict[str, Any]) -> None:
    """A field of the wrong type never crashes the worker; the fault shows how the answer starts."""
    fault = fault_of(body)
    assert fault.kind == "bad_answer"
    assert msgspec.json.encode(body).decode()[:100] in fault.message


def test_one_token_may_be_nothing() -> None:
    """An answer of one token and no text is the model's own silence, for the verdict to judge."""
    assert parse_chat_answer(answer({"content": ""}, usage={"completion_tokens": 1})).content == ""


def test_not_quite_json() -> None:
    """NaN becomes null and unpaired surrogates U+FFFD, so that a record is always strict JSON."""
    raw = rb"""{"choices":[{"finish_reason":"stop","message":{"content":"a\ud800b","tool_calls":
        [{"x":NaN,"y":1e999,"z\udc00":-Infinity,"function":{"name":"f","arguments":{"n":NaN}}}]},"logprobs":{"mean":NaN}}],"usage":null}"""
    completion = parse_chat_answer(decode_answer(raw))
    assert completion.content == "a\ufffdb"
    function = {"name": "f", "arguments": '{"n": null}'}
    assert completion.tool_calls == [{"x": None, "y": None, "z\ufffd": None, "function": function}]
    assert msgspec.json.decode(msgspec.json.encode(completion), type=Completion) == completion


def test_broken_utf8_is_marked() -> None:
    """Bytes that are no UTF-8 become U+FFFD instead of losing the answer; a byte order mark is skipped."""
    raw = b'\xef\xbb\xbf{"choices":[{"finish_reason":"stop","message":{"content":"a\xffb"}}]}'
    assert parse_chat_answer(decode_answer(raw)).content == "a\ufffdb"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("content", "reasoning", "reasoning_content", "reasoning_details", "tool_calls")


@given(
    message=st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON)) | JSON,
    choice=st.fixed_dictionaries({}, optional=dict.fromkeys(("finish_reason", "stop_reason", "token_ids"), JSON)),
    top=st.fixed_dictionaries({}, optional=dict.fromkeys(("usage", "error", "id", "prompt_token_ids"), JSON)),
)
def test_nothing_crashes_the_parser(message: Any, choice: dict[str, Any], top: dict[str, Any]) -> None:
    """Whatever JSON comes gives a completion that can be written, or a fault."""
    body = {**answer(choice=choice), **top}
    body["choices"][0]["message"] = message
    try:
        completion = parse_chat_answer(decode_answer(json.dumps(body).encode()))
    except CallFailed:
        pass
    else:
        assert msgspec.json.decode(msgspec.json.encode(completion), type=Completion) == completion
