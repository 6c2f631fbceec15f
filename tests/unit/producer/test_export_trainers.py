"""The rows of the formats that draft-model and fine-tuning trainers read, each exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.records import Record
from producer.export.base import FormatOptions, LeftOut, Reasoning
from producer.export.run import export
from tests.support.exports import TOOL, USER, ledger_with, record, rows_of

CALL = {
    "id": "functions.look_up:0",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"city": "Zürich"}'},
}
RESULT = {"role": "tool", "content": "sonnig ☀", "tool_call_id": "functions.look_up:0", "name": "look_up"}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": None, "reasoning": "Early.", "tool_calls": [CALL]},
    RESULT,
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "Grüße, 你好"},
]
ANSWERS = [
    record("a"),
    record("b", messages=HISTORY, tools=[TOOL], reasoning="Hm.", content="你好!"),
    record("c", reasoning="Hm.", content=None, tool_calls=[CALL]),
]
"""A plain answer with nulls, one after many turns with everything, and a call for a tool without text."""
TOOLS = json.dumps([TOOL], separators=(",", ":"))


def _rows(tmp_path: Path, name: str, options: FormatOptions | None = None) -> list[dict[str, Any]]:
    """Export the three answers and return the rows."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", ANSWERS) as ledger:
        report = export(ledger, format=name, output=output, options=options)
    rows = rows_of(output)
    assert all(list(row) == list(report.columns) for row in rows)
    assert not report.left_out
    return rows


def _thoughts(early: str, none: str) -> list[list[dict[str, Any]]]:
    """Return the three conversations with the reasoning as a field."""
    return [
        [USER, {"role": "assistant", "content": "Hello.", "reasoning_content": none}],
        [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "", "reasoning_content": early, "tool_calls": [CALL]},
            RESULT,
            {"role": "assistant", "content": "Sunny.", "reasoning_content": none},
            {"role": "user", "content": "Grüße, 你好"},
            {"role": "assistant", "content": "你好!", "reasoning_content": "Hm."},
        ],
        [USER, {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]}],
    ]


@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_conversation_rows(tmp_path: Path, name: str) -> None:
    """SpecForge and speculators get id, conversations and tools, reasoning as a text of every assistant turn."""
    conversations = _thoughts("Early.", "")
    assert _rows(tmp_path, name) == [
        {"id": id_, "conversations": turns, "tools": tools}
        for id_, turns, tools in zip("abc", conversations, ["null", TOOLS, "null"], strict=True)
    ]


def test_specforge_with_status_and_inline_reasoning(tmp_path: Path) -> None:
    """By option a row says its status and holds its thoughts inline; nothing else is added."""
    rows = _rows(tmp_path, "specforge", FormatOptions(reasoning=Reasoning.INLINE, status=True))
    assert rows[1] == {
        "id": "b",
        "conversations": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "<think>\nEarly.\n</think>\n\n", "tool_calls": [CALL], "weight": 0},
            RESULT,
            {"role": "assistant", "content": "Sunny.", "weight": 0},
            {"role": "user", "content": "Grüße, 你好"},
            {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n你好!", "weight": 1},
        ],
        "tools": TOOLS,
        "status": "success",
    }


def test_specforge_says_who_reads_reasoning(tmp_path: Path) -> None:
    """Rows with reasoning in a field come with the warning that some parsers drop it; others with none."""
    with ledger_with(tmp_path / "d", ANSWERS) as ledger:
        for name, reasoning, told in [
            ("specforge", None, True),
            ("specforge", Reasoning.INLINE, False),
            ("speculators", None, False),
        ]:
            options = FormatOptions(reasoning=reasoning)
            report = export(ledger, format=name, output=tmp_path / "x.jsonl", options=options, overwrite=True)
            assert any("drops reasoning_content without a word" in one for one in report.sentences()) is told
    with ledger_with(tmp_path / "e", ANSWERS[:1]) as ledger:
        report = export(ledger, format="specforge", output=tmp_path / "x.jsonl", overwrite=True)
    assert report.advice == ""


def test_specforge_without_a_tools_column(tmp_path: Path) -> None:
    """With --no-tools a row is id and conversations alone, and prompts that had tools are left out by name."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", ANSWERS) as ledger:
        report = export(ledger, format="specforge", output=output, options=FormatOptions(tools=False))
    assert [list(row) for row in rows_of(output)] == [["id", "conversations"]] * 2
    assert report.left_out == {LeftOut.HAS_TOOLS: 1}


def test_torchspec_rows(tmp_path: Path) -> None:
    """TorchSpec's Kimi parser gets the answer's thoughts inline without line breaks, and none of earlier turns."""
    assert _rows(tmp_path, "torchspec-kimi") == [
        {"id": "a", "conversations": [USER, {"role": "assistant", "content": "Hello.", "weight": 1}]},
        {
            "id": "b",
            "conversations": [
                {"role": "system", "content": "Be brief."},
                USER,
                {"role": "assistant", "content": "", "tool_calls": [CALL], "weight": 0},
                RESULT,
                {"role": "assistant", "content": "Sunny.", "weight": 0},
                {"role": "user", "content": "Grüße, 你好"},
                {"role": "assistant", "content": "<think>Hm.</think>你好!", "weight": 1},
            ],
        },
        {
            "id": "c",
            "conversations": [
                USER,
                {"role": "assistant", "content": "<think>Hm.</think>", "tool_calls": [CALL], "weight": 1},
            ],
        },
    ]


def test_torchspec_says_that_tools_are_lost(tmp_path: Path) -> None:
    """Rows whose prompt had tools are counted, because the format has no place for them."""
    with ledger_with(tmp_path / "d", ANSWERS) as ledger:
        report = export(ledger, format="torchspec-kimi", output=tmp_path / "out.jsonl")
    assert report.lost_tools == 1
    assert any(
        "1 of the prompts had tools, for which torchspec-kimi has no column" in one for one in report.sentences()
    )


def test_modelopt_rows(tmp_path: Path) -> None:
    """Model Optimizer gets conversation_id and messages alone."""
    assert _rows(tmp_path, "modelopt") == [
        {"conversation_id": id_, "messages": turns} for id_, turns in zip("abc", _thoughts("Early.", ""), strict=True)
    ]


def test_trl_rows(tmp_path: Path) -> None:
    """TRL gets prompt and completion; only the first row's messages have a weight, which makes their keys differ."""
    rows = _rows(tmp_path, "trl")
    assert rows[0] == {
        "id": "a",
        "prompt": [{**USER, "weight": 0}],
        "completion": [{"role": "assistant", "content": "Hello.", "reasoning_content": "", "weight": 1}],
        "tools": "null",
    }
    for row, turns, tools in zip(rows[1:], _thoughts("Early.", "")[1:], [TOOLS, "null"], strict=True):
        assert (row["prompt"], row["completion"], row["tools"]) == (turns[:-1], turns[-1:], tools)


def _reason(tmp_path: Path, name: str, one: Record, options: FormatOptions | None = None) -> dict[LeftOut, int]:
    with ledger_with(tmp_path / "d", [one, record("kept")]) as ledger:
        report = export(ledger, format=name, output=tmp_path / "out.jsonl", options=options)
    assert report.exported == 1
    return dict(report.left_out)


@pytest.mark.parametrize("name", ["specforge", "speculators", "modelopt", "torchspec-kimi"])
def test_roles_that_a_reader_would_misread(tmp_path: Path, name: str) -> None:
    """A role that the trainer does not know (and would take for the assistant's) keeps the record out."""
    odd = record("a", messages=[{"role": "developer", "content": "Be brief."}, USER])
    assert _reason(tmp_path, name, odd) == {LeftOut.UNKNOWN_ROLE: 1}


def test_calls_that_torchspec_would_not_name(tmp_path: Path) -> None:
    """A call whose id does not name its function is left out, since the trainer renders the id alone."""
    assert _reason(tmp_path, "torchspec-kimi", record("a", tool_calls=[{**CALL, "id": "call_1"}])) == {
        LeftOut.TOOL_CALL_ID: 1
    }


@pytest.mark.parametrize(
    "fields", [{"reasoning": "a </think> b"}, {"reasoning": "Hm.", "content": "the tag <think> opens"}]
)
def test_think_tags_inside_texts(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Texts that hold think tags cannot be told from inline reasoning, and are left out there alone."""
    options = FormatOptions(reasoning=Reasoning.INLINE)
    assert _reason(tmp_path, "specforge", record("a", **fields), options) == {LeftOut.THINK_TAG: 1}
    with ledger_with(tmp_path / "e", [record("a", **fields)]) as ledger:
        assert export(ledger, format="specforge", output=tmp_path / "field.jsonl").exported == 1
