"""Hermes function calling: calls in `<tool_call>`, answers in `<tool_response>`, tools also in the system text."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from producer.adapters.base import Columns, Conversation, is_blank, source_id
from producer.adapters.calls import CallBook
from producer.adapters.literals import NotReadableError, json_values, loose_value
from producer.adapters.roles import role_of
from producer.adapters.tools import as_tools, tools_of
from producer.adapters.turns import parts_of_turn, to_messages, turns_of
from producer.refusals import Reason, Refusal

_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ANSWER = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_FORMAT = re.compile(r"\A\s*You are a function calling AI model\..*?<tools>.*</tools>.*</tool_call>\s*", re.DOTALL)
"""The system text that announces the tools and the form of calls, which `tools` and `tool_calls` replace."""


@dataclasses.dataclass(frozen=True)
class Hermes:
    """Rows with `conversations` whose calls are `<tool_call>` blocks, and `tools` beside or in the system turn."""

    name: str = "hermes"

    def recognises(self, row: Columns) -> bool:
        """Tell whether a system turn holds `<tools>`, or the row has tools and a turn with `<tool_call>`."""
        turns = row.get("conversations")
        if type(turns) is not list or not turns or type(turns[0]) is not dict:
            return False
        first = turns[0].get("value")
        if type(first) is str and "</tools>" in first and role_of(str(turns[0].get("from"))) == "system":
            return True
        return bool(row.get("tools")) and any(
            type(turn) is dict and type(turn.get("value")) is str and "<tool_call>" in turn["value"] for turn in turns
        )

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the turns with calls and answers in OpenAI's form."""
        if row.get("conversations") is None:
            return Refusal(Reason.MISSING_FIELD, "the row has no 'conversations'")
        turns = turns_of(row["conversations"], "conversations")
        if isinstance(turns, Refusal):
            return turns
        tools = tools_of(row) or _tools_in(turns)
        if isinstance(tools, Refusal):
            return tools
        converted = _converted(turns)
        if isinstance(converted, Refusal):
            return converted
        messages = to_messages(converted)
        return messages if isinstance(messages, Refusal) else Conversation(messages, tools, source_id(row))


def _tools_in(turns: list[Any]) -> list[dict[str, Any]] | Refusal | None:
    """Return the tools of a system turn's `<tools>` block."""
    role, text = parts_of_turn(turns[0])
    # The prose names the tags, with nothing between them, before it uses them.
    blocks = [block for block in _TOOLS.findall(text) if not is_blank(block)] if role == "system" and text else []
    if not blocks:
        return None
    try:
        values = _values(blocks[-1])
    except NotReadableError as error:
        return Refusal(Reason.BAD_TOOLS, f"the <tools> of the system turn cannot be read ({error})")
    tools = as_tools(values[0] if len(values) == 1 and type(values[0]) is list else values)
    return tools if tools is not None else Refusal(Reason.BAD_TOOLS, "a tool in <tools> has no function's name")


def _values(block: str) -> list[Any]:
    """Return the tools of a block: JSON, several JSON objects, or a Python literal. Raises NotReadableError."""
    try:
        values, rest = json_values(block)
    except NotReadableError:
        return [loose_value(block)]
    return values if not rest else [loose_value(block)]


def _converted(turns: list[Any]) -> list[Any] | Refusal:
    book = CallBook()
    found: list[Any] = []
    last = max((at for at, turn in enumerate(turns) if parts_of_turn(turn)[0] != "assistant"), default=-1)
    for at, turn in enumerate(turns):
        role, text = parts_of_turn(turn)
        if text is None or role not in {"system", "assistant", "tool"}:
            found.append(turn)
        elif role == "system":
            rest = _FORMAT.sub("", text)
            found += [] if rest != text and is_blank(rest) else [{"role": "system", "content": rest}]
        elif role == "assistant":
            said = _said(book, text)
            if said is None and at < last:
                return Refusal(Reason.BAD_MESSAGES, f"turn {at + 1} has a <tool_call> that cannot be read")
            found.append(said or {"role": "assistant", "content": text})
        else:
            answers = book.answers([_answer(block.strip()) for block in _ANSWER.findall(text)] or [(None, text)])
            if answers is None:
                return Refusal(Reason.BAD_MESSAGES, f"turn {at + 1} answers more calls than there are")
            found += answers
    return found


def _said(book: CallBook, text: str) -> dict[str, Any] | None:
    """Return an assistant turn with its calls; None when one of them cannot be read."""
    functions = []
    for block in _CALL.findall(text):
        try:
            value = loose_value(block)
        except NotReadableError:
            return None
        if type(value) is not dict or type(value.get("name")) is not str:
            return None
        functions.append(value)
    content = _CALL.sub("", text).strip() if functions else text
    return None if functions and "<tool_call>" in content else book.assistant(content, functions)


def _answer(block: str) -> tuple[str | None, str]:
    """Return the function's name in an answer, where it has one, and the answer unchanged."""
    try:
        value = loose_value(block)
    except NotReadableError:
        return None, block
    name = value.get("name") if type(value) is dict else None
    return (name if type(name) is str else None), block


HERMES = Hermes()
