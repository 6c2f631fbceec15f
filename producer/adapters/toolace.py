"""ToolACE: tools as a JSON list inside the system prose, calls as `[Name(key="value")]`."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import msgspec

from producer.adapters.base import Columns, Conversation, is_blank, source_id
from producer.adapters.brackets import bracket_calls
from producer.adapters.calls import CallBook
from producer.adapters.literals import NotReadableError, json_value, json_values
from producer.adapters.tools import as_tools, with_json_schemas
from producer.adapters.turns import parts_of_turn, to_messages, turns_of
from producer.refusals import Reason, Refusal

_ANNOUNCEMENT = re.compile(r"Here is a list of functions in JSON format that you can invoke:?\s*")
_FORM_OF_CALLS = re.compile(
    r"You should only return the function calls? in (?:your response|(?:the )?tools? calls? sections?)\.\s*"
    r"|Should you decide to return the function call\(s\)\.\s*"
    r"|Put it in the format of \[func1\(params_name=params_value.*?func2\(params\)\]\.?\s*"
    r"|NO other text MUST be included\.\s*",
    re.DOTALL,
)
"""Sentences that ask for calls as text, which `tool_calls` replace."""


@dataclasses.dataclass(frozen=True)
class ToolAce:
    """Rows with `system`, whose prose holds the tools, and `conversations` with calls in brackets."""

    name: str = "toolace"

    def recognises(self, row: Columns) -> bool:
        """Tell whether `system` announces a list of functions."""
        system = row.get("system")
        return type(system) is str and _ANNOUNCEMENT.search(system) is not None and "conversations" in row

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the turns with calls and answers in OpenAI's form, and the list as tools with JSON Schema."""
        system = row.get("system")
        if row.get("conversations") is None or type(system) is not str:
            return Refusal(Reason.MISSING_FIELD, "the row has no text in 'system' beside 'conversations'")
        turns = turns_of(row["conversations"], "conversations")
        if isinstance(turns, Refusal):
            return turns
        told = _system(system)
        if isinstance(told, Refusal):
            return told
        tools, text = told
        converted = _converted(turns)
        if isinstance(converted, Refusal):
            return converted
        messages = to_messages([*([] if is_blank(text) else [{"role": "system", "content": text}]), *converted])
        return messages if isinstance(messages, Refusal) else Conversation(messages, tools, source_id(row))


def _system(text: str) -> tuple[list[dict[str, Any]] | None, str] | Refusal:
    """Return the tools in the prose, and what else it says."""
    announced = _ANNOUNCEMENT.search(text)
    if announced is None:
        return None, text
    try:
        values, rest = json_values(text[announced.end() :])
    except NotReadableError as error:
        return Refusal(Reason.BAD_TOOLS, f"the list of functions in 'system' is not JSON ({error})")
    if len(values) != 1 or type(values[0]) is not list:
        return Refusal(Reason.BAD_TOOLS, "'system' announces functions, but no JSON list follows")
    tools = as_tools(values[0])
    if tools is None:
        return Refusal(Reason.BAD_TOOLS, "the list in 'system' holds an object that is no function with a name")
    said = text[: announced.start()] + rest.removeprefix(".").lstrip()
    return with_json_schemas(tools) or None, _FORM_OF_CALLS.sub("", said).strip()


def _converted(turns: list[Any]) -> list[Any] | Refusal:
    book = CallBook()
    found: list[Any] = []
    last = max((at for at, turn in enumerate(turns) if parts_of_turn(turn)[0] != "assistant"), default=-1)
    for at, turn in enumerate(turns):
        role, text = parts_of_turn(turn)
        if text is None or role not in {"assistant", "tool"}:
            found.append(turn)
        elif role == "tool":
            answers = book.answers(_answers(text))
            if answers is None:
                return Refusal(Reason.BAD_MESSAGES, f"turn {at + 1} answers more calls than there are")
            found += answers
        else:
            try:
                calls = bracket_calls(text)
            except NotReadableError as error:
                if at < last:
                    return Refusal(Reason.BAD_MESSAGES, f"turn {at + 1} has calls that cannot be read ({error})")
                calls = []  # it is never sent
            found.append(book.assistant("" if calls else text, calls))
    return found


def _answers(text: str) -> list[tuple[str | None, str]]:
    """Return the (name, text) of each answer in a tool turn: a JSON list of `{name, results}`, or any text."""
    try:
        items = json_value(text)
    except NotReadableError:
        return [(None, text)]
    if type(items) is not list or not items or not all(type(item) is dict and "name" in item for item in items):
        return [(None, text)]
    if len(items) == 1:
        return [(str(items[0]["name"]), text)]
    return [(str(item["name"]), msgspec.json.encode(item).decode()) for item in items]


TOOLACE = ToolAce()
