"""The seam of all row shapes: what an adapter is and what it gives."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from app.records import Message
from producer.adapters.tools import tools_of
from producer.refusals import Reason, Refusal, kind_of

ID_COLUMNS = (
    "id",
    "uuid",
    "prompt_id",
    "conversation_id",
    "sample_id",
    "example_id",
    "question_id",
    "task_id",
    "trajectory_id",
    "traj_id",
)
"""Where a source's own id is looked for; the first that holds one wins."""

SYSTEM_COLUMNS = ("system", "system_prompt")
"""Where a system prompt beside the conversation is looked for; the first that is not null wins."""

_INVISIBLE_CATEGORIES = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
_INVISIBLE_CHARS = frozenset("\u034f\u115f\u1160\u2800\u3164\uffa0") | {chr(code) for code in range(0xFE00, 0xFE10)}

Columns = Mapping[str, Any]
"""A row's value: column name -> JSON value."""


class Conversation(msgspec.Struct, frozen=True):
    """A row in OpenAI's form, its own last answer still in place."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    source_id: str | None = None


class Adapter(Protocol):
    """Turns rows of one shape into conversations."""

    @property
    def name(self) -> str:
        """The word for `--adapter`."""

    def recognises(self, row: Columns) -> bool:
        """Tell whether the row has this shape."""

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the row's conversation, or why there is none."""


def conversation_of(row: Columns, messages: list[Message]) -> Conversation | Refusal:
    """Return messages with what stands beside them in the row: a system prompt, tools and the source's id."""
    framed = with_system(row, messages)
    if isinstance(framed, Refusal):
        return framed
    tools = tools_of(row)
    if isinstance(tools, Refusal):
        return tools
    return Conversation(framed, tools, source_id(row))


def source_id(row: Columns) -> str | None:
    """Return the source's own id as text; null, booleans, empty texts, lists and objects are no ids."""
    for column in ID_COLUMNS:
        value = row.get(column)
        if type(value) is str:
            if value.strip():
                return value
        elif type(value) is int or type(value) is float:
            return str(value)
    return None


def with_system(row: Columns, messages: list[Message]) -> list[Message] | Refusal:
    """Put the row's system column before a conversation that has no system turn of its own.

    A blank column is no system prompt.
    """
    for column in SYSTEM_COLUMNS:
        value = row.get(column)
        if value is None:
            continue
        if type(value) is not str:
            return Refusal(Reason.NOT_A_STRING, f"the column {column!r} is {kind_of(value)}, not text")
        return messages if is_blank(value) else add_system(value, messages)
    return messages


def add_system(text: str, messages: list[Message]) -> list[Message]:
    """Put a system turn first unless the conversation has one anywhere."""
    if any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": text}, *messages]


def is_blank(text: str) -> bool:
    """Tell whether a text is empty or holds nothing but white space, control and other invisible characters."""
    return all(_is_invisible(char) for char in text)


def _is_invisible(char: str) -> bool:
    return char in _INVISIBLE_CHARS or unicodedata.category(char) in _INVISIBLE_CATEGORIES
