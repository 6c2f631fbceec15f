"""Which kind of training row a file holds, and its conversation in one form."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Collection, Mapping
from typing import Any

from app.errors import SourceError

_ROLE_OF_SENDER = {"human": "user", "gpt": "assistant"}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_OPEN, _CLOSE = "<think>", "</think>"
ID_COLUMNS = ("id", "conversation_id", "uuid")


class Shape(enum.StrEnum):
    """A set of columns that trainers read."""

    TOKENS = "tokens"
    MESSAGES = "messages"
    CONVERSATIONS = "conversations"
    PROMPTS = "prompts with completions"


_COLUMNS = {
    Shape.TOKENS: {"input_ids", "loss_mask"},
    Shape.PROMPTS: {"prompt", "completion"},
    Shape.MESSAGES: {"messages"},
    Shape.CONVERSATIONS: {"conversations"},
}


def shape_of(columns: Collection[str]) -> Shape:
    """Return the shape of rows with these columns; raises SourceError if it is none that trainers read."""
    found = next((shape for shape, needed in _COLUMNS.items() if needed <= set(columns)), None)
    if found is None:
        raise SourceError(
            f"The columns {', '.join(sorted(columns))} are those of no training file; there must be input_ids and "
            "loss_mask, messages, conversations, or prompt and completion."
        )
    return found


class BadRowError(Exception):
    """A row that holds no conversation, or no tools; the words say what is wrong."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A row's messages with role and content, and its tools."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


def conversation_of(row: Mapping[str, Any], shape: Shape) -> Conversation:
    """Return the conversation of a row; raises BadRowError."""
    columns = ("prompt", "completion") if shape is Shape.PROMPTS else (shape.value,)
    messages = [_message(turn) for column in columns for turn in _list(row[column])]
    return Conversation(messages, tools_of(row.get("tools")))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise BadRowError("there is no list of messages")
    return value


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRowError("a message is no object")
    message: dict[str, Any] = turn
    if "from" in turn:
        sender = turn["from"]
        role = _ROLE_OF_SENDER.get(sender, sender) if isinstance(sender, str) else None
        message = {"role": role, "content": turn.get("value")}
    if not (isinstance(message.get("role"), str) and message["role"]):
        raise BadRowError("a message has no role")
    if not isinstance(message.get("content"), str):
        raise BadRowError(f"the content of a message ({message['role']}) is no text")
    return message


def tools_of(value: Any) -> list[Any] | None:
    """Return the tools of a row, also where they are JSON text; raises BadRowError."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value else None
        except ValueError as error:
            raise BadRowError(f"tools: {error}") from error
    if value is not None and not isinstance(value, list):
        raise BadRowError("tools: they are no list")
    return value or None


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return an answer's reasoning, from its field or from between think tags in its content."""
    field = next((message[key] for key in _REASONING_KEYS if isinstance(message.get(key), str) and message[key]), "")
    if field:
        return field
    content = message["content"].lstrip()
    if content.startswith(_OPEN) and _CLOSE in content:
        return str(content[len(_OPEN) : content.index(_CLOSE)])
    return ""


def content_of(message: Mapping[str, Any]) -> str:
    """Return an answer's content without inline reasoning."""
    content = str(message["content"])
    if content.lstrip().startswith(_OPEN) and _CLOSE in content:
        return content[content.index(_CLOSE) + len(_CLOSE) :]
    return content
