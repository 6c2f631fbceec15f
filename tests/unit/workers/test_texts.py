"""A model's whole text is taken apart without losing or changing a character."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.clients.answers import derivable
from workers.clients.texts import CLOSING, OPENING, Parts, holds_call_markup, split_channels, take_apart

FINAL = "<|start|>assistant<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}So.<|end|>{FINAL}Yes.", "So.", "Yes."),
        (f"{ANALYSIS}So.<|end|>{FINAL}Yes.<|return|>", "So.", "Yes."),
        (f"{ANALYSIS}One.<|end|><|start|>assistant{ANALYSIS}Two.<|end|>{FINAL}Yes.", "One.\nTwo.", "Yes."),
        ("<|channel|>final<|message|>Yes.", None, "Yes."),
        (f"{ANALYSIS}So", "So", None),
        (f"{ANALYSIS}So.<|end|>{FINAL}Ye", "So.", "Ye"),
        ("<|channel|>commentary<|message|>I will look.<|end|>", "I will look.", None),
    ],
)
def test_channels_come_apart(text: str, reasoning: str | None, content: str | None) -> None:
    """What gpt-oss writes to its final channel is the answer, all else thought; a cut one is kept as far as it goes."""
    assert split_channels(text) == Parts(reasoning, content, None, plain=False)


@pytest.mark.parametrize(
    "text",
    ["", "Yes.", "<|channel|>final", f"Hm. {ANALYSIS}So.<|end|>", f"{ANALYSIS}a<|message|>b<|end|>", "<|message|>x"],
)
def test_what_is_no_channels_is_left_alone(text: str) -> None:
    """Text outside of channels, or marks in the wrong place, are not guessed at."""
    assert split_channels(text) is None


def test_calls_in_channels_are_tool_calls() -> None:
    """A whole message to a function is a call; one that was cut is thought."""
    head = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    whole = split_channels(f'{ANALYSIS}So.<|end|><|start|>assistant{head}{{"city": "Rome"}}<|call|>')
    assert whole is not None
    assert whole.reasoning == "So."
    assert whole.calls == [
        {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    ]
    assert split_channels(f'{head}{{"ci') == Parts('{"ci', None, None, plain=False)


def _calls(*found: tuple[str, Any]) -> list[dict[str, Any]]:
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in found]
    return [{"id": f"call_{at}", "type": "function", "function": one} for at, one in enumerate(functions)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', None, _calls(("f", {"a": 1}))),
        ('Look: <tool_call>{"name": "f", "parameters": {}}</tool_call>', "Look: ", _calls(("f", {}))),
        (
            "\n".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in "fg"),
            None,
            _calls(("f", {}), ("g", {})),
        ),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', None),
        (
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            None,
        ),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", None),
        ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', None),
        ("No call.", "No call.", None),
    ],
)
def test_calls_are_read_or_left(text: str, content: str | None, calls: list[dict[str, Any]] | None) -> None:
    """All calls of an answer are read, or none is: half a call is never a call."""
    parts = take_apart(text, opened=False, tools=True)
    assert (parts.content, parts.calls) == (content, calls)
    assert take_apart(text, opened=False, tools=False).content == text


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("[TOOL_CALLS][{}]", True),
        ("<|python_tag|>f()", True),
        ("<function=f>{}</function>", True),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", True),
        ("<|tool_calls_section_begin|>", True),
        ("a tool call", False),
        ("", False),
        (None, False),
    ],
)
def test_the_markup_of_calls_is_seen(text: str | None, *, markup: bool) -> None:
    """The calls of the known model families are recognised by how they begin."""
    assert holds_call_markup(text) is markup


_PIECES = st.lists(
    st.sampled_from([OPENING, CLOSING, " ", "\n", "q", "é\U0001f305", '"', ANALYSIS, "<|end|>"]), max_size=8
)


@given(pieces=_PIECES, opened=st.booleans(), tools=st.booleans())
def test_nothing_is_lost(pieces: list[str], *, opened: bool, tools: bool) -> None:
    """What is called plain can be put together again from its parts; of the rest the whole text is kept."""
    text = "".join(pieces)
    parts = take_apart(text, opened=opened, tools=tools)
    if parts.plain:
        assert text in derivable(parts)
    said = (parts.reasoning or "") + (parts.content or "")
    assert all(char in text or char == "\n" for char in said), "a line break between two thoughts is all that is added"
    assert said.count("q") == text.count("q")
