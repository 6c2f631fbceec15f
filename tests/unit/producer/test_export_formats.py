"""The rows that each export format makes of a record, and the records that it leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import UsageError
from app.records import Kind, Usage
from producer.export.base import FormatOptions, LeftOut, Reasoning
from producer.export.report import NothingExportedError
from producer.export.run import export, parse_reasoning
from tests.support.exports import LOOK_UP, TOOL, USER, ledger_with, record, rows_of

RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "look_up"}


def _row(tmp_path: Path, name: str, keep: str | None = None, /, **fields: Any) -> dict[str, Any]:
    """Export one record and return its row."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", [record("a", **fields)]) as ledger:
        export(ledger, format=name, output=output, options=FormatOptions(reasoning=Reasoning(keep) if keep else None))
    (row,) = rows_of(output)
    return row


def _reason(tmp_path: Path, name: str, options: FormatOptions | None = None, /, **fields: Any) -> LeftOut:
    """Export one record that the format leaves out, and return why."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", [record("a", **fields)]) as ledger, pytest.raises(NothingExportedError) as caught:
        export(ledger, format=name, output=output, options=options)
    ((reason, count),) = caught.value.left_out.items()
    assert count == 1
    assert reason.words in str(caught.value)
    assert not output.exists()
    return reason


# tokens


def test_tokens_are_the_servers_own(tmp_path: Path) -> None:
    """A row holds prompt and output ids as the server gave them, and supervises the output alone."""
    assert _row(tmp_path, "tokens") == {"id": "a", "input_ids": [1, 2, 3, 7, 8], "loss_mask": [0, 0, 0, 1, 1]}


def test_tokens_without_a_known_count(tmp_path: Path) -> None:
    """Exact ids are exported even when the server did not count the completion."""
    assert _row(tmp_path, "tokens", usage=Usage())["input_ids"] == [1, 2, 3, 7, 8]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_token_ids": None}, LeftOut.NO_PROMPT_IDS),
        ({"prompt_token_ids": []}, LeftOut.NO_PROMPT_IDS),
        ({"output_ids": None}, LeftOut.NO_EXACT_IDS),
        ({"output_ids": None, "prompt_token_ids": None}, LeftOut.NO_EXACT_IDS),
        ({"usage": Usage(3, 3)}, LeftOut.COUNT_DIFFERS),
        ({"output_ids": []}, LeftOut.COUNT_DIFFERS),
        ({"output_ids": [], "usage": Usage()}, LeftOut.NO_ANSWER),
        ({"output_ids": [7, -1]}, LeftOut.UNREADABLE),
        ({"output_ids": [7] * 7, "usage": Usage(3, 7)}, LeftOut.TOO_LONG),
    ],
)
def test_tokens_never_guess(tmp_path: Path, fields: dict[str, Any], reason: LeftOut) -> None:
    """A record without exact, counted ids gives no row, and the reason is named."""
    assert _reason(tmp_path, "tokens", FormatOptions(max_length=9), **fields) is reason


def test_tokens_up_to_the_longest(tmp_path: Path) -> None:
    """A row of exactly --max-length tokens is kept."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        export(ledger, format="tokens", output=output, options=FormatOptions(max_length=5))
    assert rows_of(output)[0]["input_ids"] == [1, 2, 3, 7, 8]


# openai


def test_openai_plain_row(tmp_path: Path) -> None:
    """The answer is the last message and alone has weight 1; tools are JSON text even where there are none."""
    history = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes?"}, USER]
    assert _row(tmp_path, "openai", messages=history, reasoning="Hm.") == {
        "id": "a",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?", "weight": 0},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello.", "weight": 1},
        ],
        "tools": "null",
    }


def test_openai_tools(tmp_path: Path) -> None:
    """Tools, calls and results keep OpenAI's form; argument texts are byte for byte the server's."""
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [LOOK_UP]}, RESULT]
    row = _row(tmp_path, "openai", messages=messages, tools=[TOOL], content=None, tool_calls=[LOOK_UP])
    assert json.loads(row["tools"]) == [TOOL]
    assert row["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [LOOK_UP], "weight": 0}
    assert row["messages"][2] == RESULT
    assert row["messages"][3] == {"role": "assistant", "content": "", "tool_calls": [LOOK_UP], "weight": 1}


def test_openai_calls_have_one_shape(tmp_path: Path) -> None:
    """Calls without an id, with object arguments or with extra keys come out with the same keys and types."""
    calls = [
        {"function": {"name": "f", "arguments": {"n": 1}}, "index": 0},
        {"id": "x", "type": "function", "function": {"name": "g"}},
    ]
    answer = _row(tmp_path, "openai", tool_calls=calls)["messages"][-1]
    assert answer["tool_calls"] == [
        {"id": "", "type": "function", "function": {"name": "f", "arguments": '{"n":1}'}},
        {"id": "x", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_openai_reasoning_as_a_field(tmp_path: Path) -> None:
    """With reasoning=field each assistant message, and no other, has the text `reasoning_content`."""
    history = [USER, {"role": "assistant", "content": "Yes?", "reasoning": "Early."}, USER]
    history += [{"role": "assistant", "content": "So?"}, USER]
    row = _row(tmp_path, "openai", "field", messages=history, reasoning="Hm.")
    assert [one.get("reasoning_content") for one in row["messages"]] == [None, "Early.", None, "", None, "Hm."]


def test_openai_answer_of_reasoning_alone(tmp_path: Path) -> None:
    """An answer that is nothing but reasoning is kept where reasoning is, and left out where it is dropped."""
    assert _row(tmp_path, "openai", "field", content=None, reasoning="Hm.")["messages"][-1]["content"] == ""
    assert _reason(tmp_path / "2", "openai", content=None, reasoning="Hm.") is LeftOut.NO_ANSWER


@pytest.mark.parametrize("name", ["openai", "sharegpt"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, LeftOut.CONTENT_PARTS),
        ({"messages": [{"content": "Hi"}]}, LeftOut.UNKNOWN_ROLE),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, LeftOut.TOOL_CALL),
        ({"messages": [{"role": "assistant", "tool_calls": "f()"}]}, LeftOut.TOOL_CALL),
        ({"tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}, LeftOut.TOOL_CALL),
        ({"tool_calls": [{"id": "c", "type": "function", "function": {"name": ""}}]}, LeftOut.TOOL_CALL),
        ({"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": 3}}]}, LeftOut.TOOL_CALL),
        ({"content": None}, LeftOut.NO_ANSWER),
        ({"verdict": Kind.REJECTED}, LeftOut.NOT_ACCEPTED),
    ],
)
def test_conversations_leave_out_what_they_cannot_say(
    tmp_path: Path, name: str, fields: dict[str, Any], reason: LeftOut
) -> None:
    """A record that would have to be changed to fit is left out, and the reason is named."""
    assert _reason(tmp_path, name, **fields) is reason


# sharegpt


def test_sharegpt_plain_row(tmp_path: Path) -> None:
    """Turns have from and value alone, with the roles system, human and gpt."""
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert _row(tmp_path, "sharegpt", messages=messages) == {
        "id": "a",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello."},
        ],
        "tools": "null",
    }


def test_sharegpt_tools(tmp_path: Path) -> None:
    """Calls are blocks behind the text, and the results of one round are one tool turn in the order of the calls."""
    second = {**LOOK_UP, "id": "c2"}
    messages = [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [LOOK_UP, second]},
        RESULT,
        {"role": "tool", "content": "rain", "tool_call_id": "c2"},
    ]
    row = _row(tmp_path, "sharegpt", messages=messages, tools=[TOOL])
    block = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert [(turn["from"], turn["value"]) for turn in row["conversations"]] == [
        ("human", "Hi"),
        ("gpt", f"Let me see.\n{block}\n{block}"),
        ("tool", "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response>"),
        ("gpt", "Hello."),
    ]
    assert json.loads(row["tools"]) == [TOOL]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "developer", "content": "Be brief."}, USER], LeftOut.UNKNOWN_ROLE),
        ([USER, RESULT], LeftOut.TOOL_ORDER),
        ([USER, {"role": "assistant", "tool_calls": [{**LOOK_UP, "id": "c9"}]}, RESULT], LeftOut.TOOL_ORDER),
        ([USER, {"role": "assistant", "tool_calls": [LOOK_UP]}, RESULT, RESULT], LeftOut.TOOL_ORDER),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{'a"}}]}], "tool_call"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}], "tool_call"),
    ],
)
def test_sharegpt_leaves_out_what_turns_cannot_say(tmp_path: Path, messages: list[dict[str, Any]], reason: str) -> None:
    """Roles without a ShareGPT name, unlinked results and arguments that are no object are left out by name."""
    assert _reason(tmp_path, "sharegpt", messages=messages) == reason


def test_sharegpt_inline_reasoning(tmp_path: Path) -> None:
    """With reasoning=inline the thoughts stand between think tags before each gpt turn's text and calls."""
    history = [USER, {"role": "assistant", "content": "Yes?", "reasoning_content": "Early."}, USER]
    row = _row(tmp_path, "sharegpt", "inline", messages=history, reasoning="Hm.", content=None, tool_calls=[LOOK_UP])
    block = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert [turn["value"] for turn in row["conversations"]] == [
        "Hi",
        "<think>\nEarly.\n</think>\n\nYes?",
        "Hi",
        f"<think>\nHm.\n</think>\n\n\n{block}",
    ]


# options


def test_formats_are_refused_by_name(tmp_path: Path) -> None:
    """An unknown format, and an option that the format does not have, are refused before anything is read."""
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        for name, options, words in [
            ("xml", FormatOptions(), "no export format 'xml'; choose one of tokens, specforge, speculators"),
            ("sharegpt", FormatOptions(reasoning=Reasoning.FIELD), "cannot hold reasoning as field.*drop or inline"),
            ("torchspec-kimi", FormatOptions(reasoning=Reasoning.DROP), "--reasoning may be inline there"),
            ("tokens", FormatOptions(reasoning=Reasoning.FIELD), "The format tokens has no --reasoning; these"),
            ("speculators", FormatOptions(status=True), "no --status; these formats have: specforge"),
            ("openai", FormatOptions(tools=False), "no --no-tools; these formats have: specforge"),
            ("trl", FormatOptions(max_length=9), "no --max-length; these formats have: tokens"),
        ]:
            with pytest.raises(UsageError, match=words):
                export(ledger, format=name, output=tmp_path / "out.jsonl", options=options)
    with pytest.raises(UsageError, match="'x' is not known; choose one of drop, field, inline"):
        parse_reasoning("x")
