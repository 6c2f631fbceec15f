"""Adapters: every row shape becomes exactly the messages, tools and id that it should, or says why not."""

from __future__ import annotations

import json

import pytest

from app.errors import UsageError
from producer.adapters.base import ID_COLUMNS, Conversation, is_blank, source_id
from producer.adapters.registry import ADAPTERS, choose, names
from producer.adapters.roles import CALL, role_of
from producer.refusals import Reason, Refusal

AUTO = choose("auto")
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}


def messages(row: dict[str, object]) -> list[dict[str, object]]:
    """Return the messages of a row that must be convertible."""
    found = AUTO.convert(row)
    assert isinstance(found, Conversation), found
    return found.messages


def refusal(row: dict[str, object], adapter: str = "auto") -> Refusal:
    """Return the refusal of a row that must have one."""
    found = choose(adapter).convert(row)
    assert isinstance(found, Refusal), found
    return found


def test_openai_messages_stay_as_they_are() -> None:
    """Roles and texts of OpenAI messages are sent unchanged."""
    turns = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "  spaces kept \u2028 "},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]

    assert messages({"messages": turns}) == turns
    assert messages({"messages": json.dumps(turns)}) == turns
    assert messages({"prompt": turns}) == turns
    assert messages({"input": turns, "output": "x"}) == turns


def test_sharegpt_in_both_spellings() -> None:
    """from/value and role/content are read under either column's name."""
    expected = [USER, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "c"}]
    sharegpt = [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "yo", "weight": 0},
        {"from": "User ", "value": "c"},
    ]

    assert messages({"conversations": sharegpt}) == expected
    assert messages({"conversation": sharegpt}) == expected
    assert messages({"messages": sharegpt}) == expected
    assert messages({"conversations": expected}) == expected
    assert messages({"conversations": [{**turn, "role": None, "content": None} for turn in sharegpt]}) == expected


def test_an_object_of_lists_is_a_list_of_turns() -> None:
    """The column-by-column form of older dataset libraries is read."""
    assert messages({"conversations": {"from": ["human"], "value": ["hi"]}}) == [USER]


@pytest.mark.parametrize(
    ("role", "aliases"),
    [
        ("system", ["system", "System", "developer"]),
        ("user", ["user", "human", "HUMAN", " User ", "prompter"]),
        ("assistant", ["assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "Assistant"]),
        ("tool", ["tool", "function", "function_response", "function-response", "observation", "tool_response"]),
        (CALL, ["function_call", "Function Call", "tool_call"]),
        (None, ["narrator", "", "gpt4", "userr"]),
    ],
)
def test_role_aliases(role: str | None, aliases: list[str]) -> None:
    """Each alias is mapped by name; nothing else is guessed."""
    assert {alias: role_of(alias) for alias in aliases} == dict.fromkeys(aliases, role)


def test_a_function_call_and_its_observation() -> None:
    """A ShareGPT call becomes an assistant turn with tool_calls, its answer a tool turn with the call's id."""
    call = {"name": "add", "arguments": {"b": 2, "a": 2}}
    row = {
        "conversations": [
            {"from": "human", "value": "2+2?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "four"},
            {"from": "function_call", "value": json.dumps([call, {"name": "x", "parameters": {}}])},
            {"from": "observation", "value": "4"},
            {"from": "tool", "value": "5"},
        ]
    }

    found = messages(row)

    def called(number: int, name: str, arguments: str) -> dict[str, object]:
        return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}

    assert found[1] == {"role": "assistant", "tool_calls": [called(1, "add", '{"a":2,"b":2}')]}
    assert found[2] == {"role": "tool", "content": "4", "tool_call_id": "call_1"}
    assert found[4]["tool_calls"] == [called(2, "add", '{"a":2,"b":2}'), called(3, "x", "{}")]
    assert [turn.get("tool_call_id") for turn in found[5:]] == ["call_2", "call_3"]


def test_openai_tool_calls_keep_their_ids() -> None:
    """Calls in OpenAI's form keep ids and argument texts; answers keep the id that they name."""
    call = {"id": "c9", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}, "index": None}
    row = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "r", "tool_call_id": "c9", "name": "f", "tool_calls": None},
        ]
    }

    assert messages(row)[1:] == [
        {"role": "assistant", "tool_calls": [{key: call[key] for key in ("id", "type", "function")}]},
        {"role": "tool", "content": "r", "tool_call_id": "c9", "name": "f"},
    ]


def test_legacy_function_call_and_reasoning() -> None:
    """OpenAI's older function_call form is read, and earlier reasoning goes along."""
    row = {
        "messages": [
            USER,
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}, "reasoning_content": "hm"},
            {"role": "function", "name": "f", "content": "r"},
        ]
    }

    found = messages(row)

    assert found[1]["reasoning_content"] == "hm"
    assert found[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}  # type: ignore[index]
    assert found[2] == {"role": "tool", "content": "r", "name": "f", "tool_call_id": "call_1"}


def test_text_calls_may_be_answered_without_ids() -> None:
    """A tool turn after an assistant's text (calls written inside it) is kept without an invented id."""
    row = {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "<tool_call>{}</tool_call>"},
            {"from": "tool", "value": "r"},
        ]
    }

    assert messages(row)[2] == {"role": "tool", "content": "r"}


def test_content_parts_go_through_without_their_nulls() -> None:
    """Text and image parts are kept; fields that a table filled with null are left out."""
    parts = [{"type": "text", "text": "what?", "image_url": None}, {"type": "image_url", "image_url": {"url": "data:"}}]

    assert messages({"messages": [{"role": "user", "content": parts}]})[0]["content"] == [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:"}},
    ]


def test_a_system_column_stands_before_a_conversation_without_one() -> None:
    """System and system_prompt are used unless they are blank or the conversation has a system turn."""
    system = {"role": "system", "content": "be brief"}
    for column in ("system", "system_prompt"):
        assert messages({column: "be brief", "conversations": [USER]}) == [system, USER]
        assert messages({column: "be brief", "question": "hi"}) == [system, USER]
    assert messages({"system": "other", "messages": [system, USER]}) == [system, USER]
    assert messages({"system": " ", "messages": [USER]}) == [USER]
    assert messages({"system": None, "system_prompt": "be brief", "messages": [USER]}) == [system, USER]
    assert refusal({"system": 3, "messages": [USER]}).reason == Reason.NOT_A_STRING


@pytest.mark.parametrize("column", ["prompt", "instruction", "question", "problem", "query", "input", "text"])
def test_text_columns(column: str) -> None:
    """The text of a prompt column is one user turn, unchanged."""
    assert messages({"id": 1, column: " two \n spaces "}) == [{"role": "user", "content": " two \n spaces "}]
    assert choose(column).convert({column: "hi", "messages": "x"}) == Conversation([USER])


def test_precedence() -> None:
    """Whole conversations win over texts, and texts over one another in the documented order."""
    row: dict[str, object] = {
        "text": "text",
        "input": "below",
        "query": "query",
        "problem": "problem",
        "question": "question",
        "instruction": "instruction",
        "prompt": "prompt",
        "conversations": [{"from": "human", "value": "sharegpt"}],
        "messages": [{"role": "user", "content": "messages"}],
    }
    seen = []
    for column in ("messages", "conversations", "prompt", "instruction", "question", "problem", "query", "input"):
        seen.append(messages(row)[0]["content"])
        row[column] = None
        if column == "instruction":
            del row[column]  # beside a null instruction, input is half a prompt
    seen.append(messages(row)[0]["content"])

    above = ["messages", "sharegpt", "prompt", "instruction\n\nbelow", "question", "problem", "query", "below", "text"]
    assert seen == above


def test_instruction_with_input() -> None:
    """A non-blank input stands below the instruction, behind an empty line."""
    assert messages({"instruction": "Add.", "input": "1, 2"})[0]["content"] == "Add.\n\n1, 2"
    assert messages({"instruction": "Add.", "input": " \u200b"})[0]["content"] == "Add."
    assert messages({"instruction": "Add.", "input": None})[0]["content"] == "Add."
    assert refusal({"instruction": "Add.", "input": 3}).reason == Reason.NOT_A_STRING


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        [FUNCTION],
        FUNCTION,
        TOOL,
        [{"function": FUNCTION}],
        [{"type": "function", **FUNCTION}],
        json.dumps([FUNCTION]),
        json.dumps(TOOL),
        [json.dumps(FUNCTION)],
        [{**FUNCTION, "parameters": json.dumps(FUNCTION["parameters"])}],
        [{**TOOL, "strict": None, "function": {**FUNCTION, "returns": None}}],
    ],
)
def test_tools_in_every_form(tools: object) -> None:
    """Lists, objects, JSON text, bare and wrapped functions all become OpenAI's form."""
    for column in ("tools", "functions"):
        assert AUTO.convert({"prompt": "hi", column: tools}) == Conversation([USER], [TOOL])


@pytest.mark.parametrize("tools", [None, [], "", "  ", "[]", "null"])
def test_no_tools(tools: object) -> None:
    """Every way to say "no tools" gives none."""
    assert AUTO.convert({"messages": [USER], "tools": tools}) == Conversation([USER])


@pytest.mark.parametrize("tools", ["search", 3, ["search"], [{"description": "x"}], [None], [{"function": "f"}], [[]]])
def test_bad_tools_are_refused(tools: object) -> None:
    """Tools that cannot be sent refuse the row."""
    assert refusal({"prompt": "hi", "tools": tools}).reason == Reason.BAD_TOOLS


def test_tool_schemas_lose_only_nulls() -> None:
    """Nulls that a table filled into a schema are left out at every depth; other values stay."""
    filled = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "enum": ["x"]}, "b": None}, "n": 0}}
    plain = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "enum": ["x"]}}, "n": 0}}

    found = AUTO.convert({"prompt": "hi", "tools": [filled]})

    assert found == Conversation([USER], [{"type": "function", "function": plain}])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", "a"),
        (" a ", " a "),
        (7, "7"),
        (0, "0"),
        (1.5, "1.5"),
        (True, None),
        (None, None),
        ("", None),
        (" ", None),
        ([], None),
        ({"$oid": "x"}, None),
    ],
)
def test_source_ids(value: object, expected: str | None) -> None:
    """Texts and numbers are ids; everything else is none."""
    for column in ID_COLUMNS:
        assert source_id({column: value}) == expected
    assert source_id({"id": value, "uuid": "next"}) == (expected or "next")


def test_source_ids_are_looked_for_in_order() -> None:
    """The first id column that holds an id wins, whatever the order of the row's keys."""
    row = {column: column for column in reversed(ID_COLUMNS)}
    for column in ID_COLUMNS:
        assert source_id(row) == column
        row[column] = ""
    assert source_id({}) is None


@pytest.mark.parametrize(
    ("row", "reason", "words"),
    [
        ({"messages": []}, Reason.BAD_MESSAGES, "empty list"),
        ({"messages": None}, Reason.BAD_MESSAGES, "'messages' is null"),
        ({"messages": "hello"}, Reason.BAD_MESSAGES, "not a JSON list"),
        ({"messages": '{"role": "user"}'}, Reason.BAD_MESSAGES, "an object"),
        ({"messages": 5}, Reason.BAD_MESSAGES, "a number"),
        ({"messages": ["hi"]}, Reason.BAD_MESSAGES, "turn 1 is text"),
        ({"messages": [{"content": "x"}]}, Reason.MISSING_FIELD, "neither 'role' nor 'from'; it has content"),
        ({"messages": [{"role": "user"}]}, Reason.MISSING_FIELD, "neither 'content' nor 'value'; it has role"),
        ({"messages": [USER, {"from": "human", "text": "x"}]}, Reason.MISSING_FIELD, "turn 2 (human)"),
        ({"messages": [{"role": "user", "content": None}]}, Reason.NOT_A_STRING, "'content' is null"),
        ({"messages": [{"role": "user", "content": 42}]}, Reason.NOT_A_STRING, "a number"),
        ({"messages": [{"role": "user", "content": {}}]}, Reason.NOT_A_STRING, "an object"),
        ({"messages": [{"role": "system", "content": None}, USER]}, Reason.NOT_A_STRING, "turn 1 (system)"),
        ({"messages": [{"role": "user", "content": []}]}, Reason.EMPTY_PROMPT, "no content part holds text"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, Reason.BAD_MESSAGES, "a content part is text"),
        (
            {"messages": [{"role": "narrator", "content": "x"}]},
            Reason.UNKNOWN_ROLE,
            "turn 1 has the unknown role 'narra",
        ),
        ({"messages": [{"role": ["user"], "content": "x"}]}, Reason.UNKNOWN_ROLE, "turn 1"),
        ({"messages": [USER, {"from": "tool_response", "value": "x"}]}, Reason.BAD_MESSAGES, "turn 2 (tool_response)"),
        ({"messages": [{"role": "tool", "content": "x"}]}, Reason.BAD_MESSAGES, "before it stands nothing"),
        ({"messages": [USER, {"from": "function_call", "value": "add"}]}, Reason.BAD_MESSAGES, "not a JSON call"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [3]}]}, Reason.BAD_MESSAGES, "'tool_calls'"),
        ({"prompt": 42}, Reason.NOT_A_STRING, "'prompt' is a number"),
        ({"prompt": ["a", "b"]}, Reason.NOT_A_STRING, "'prompt' is a list"),
        ({"id": 1, "prompt": None}, Reason.NOT_A_STRING, "'prompt' is null"),
        ({"id": 1, "Prompt": "x"}, Reason.MISSING_FIELD, "it has id, Prompt"),
        ({}, Reason.MISSING_FIELD, "it has none"),
    ],
)
def test_refusals(row: dict[str, object], reason: Reason, words: str) -> None:
    """What cannot be asked is refused with one word and the place, and never becomes text."""
    found = refusal(row)

    assert found.reason == reason
    assert words in found.detail


def test_input_without_its_instruction_is_no_prompt() -> None:
    """A row whose instruction is null is refused, and its input is not taken for the prompt."""
    found = refusal({"instruction": None, "input": "3, 4", "output": "7"})

    assert (found.reason, found.detail) == (Reason.NOT_A_STRING, "the column 'instruction' is null, not text")
    assert messages({"input": "3, 4"}) == [{"role": "user", "content": "3, 4"}]


def test_a_named_adapter_reads_only_its_columns() -> None:
    """A chosen shape refuses rows of another, and says what it missed."""
    assert refusal({"prompt": "hi"}, "messages").detail == "the row has no 'messages'"
    assert refusal({"prompt": "hi"}, "sharegpt").reason == Reason.MISSING_FIELD
    assert refusal({"messages": [USER]}, "question").detail == "the row has no 'question'"


def test_choose_refuses_what_it_does_not_know() -> None:
    """An unknown name is refused with the nearest one and the list of all."""
    assert names() == ["auto", *(adapter.name for adapter in ADAPTERS)]
    with pytest.raises(UsageError, match="did you mean sharegpt") as caught:
        choose("sharegtp")
    for name in names():
        assert name in str(caught.value)
    assert choose("auto").name == "auto"


@pytest.mark.parametrize(
    "text", ["", " ", "\n\t", "\u200b\u2060 ", "\ufeff", "\xa0", "\u3164", "\u2800", "\x00", "\ufe0f"]
)
def test_blank_texts(text: str) -> None:
    """White space, zero-width and other invisible characters alone are blank; with one visible one they are not."""
    assert is_blank(text)
    assert not is_blank(text + "x" + text)
    assert not is_blank(text + "。")
