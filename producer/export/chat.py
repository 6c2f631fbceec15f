"""What the conversation formats share: the texts, tool calls and thoughts of a record, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from producer.export.base import CannotExpressError, Head, LeftOut
from producer.turn_lines import TurnPlace

_REASONING_KEYS = ("reasoning_content", "reasoning")
NO_TOOLS = "null"
"""The `tools` column of a prompt without tools: JSON text, so that json.loads gives the None that templates expect."""


class ChatRecord(Head, kw_only=True):
    """The conversation of a record and its answer."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    turns: list[TurnPlace] | None = None
    """Of a conversation whose turns were all made anew: each of them, the answer included."""

    @property
    def generated(self) -> set[int]:
        """The places of the model's own turns in the conversation; that of the answer is behind the messages."""
        return {turn.messages for turn in self.turns or ()} | {len(self.messages)}

    @property
    def thought_earlier(self) -> bool:
        """Whether a turn before the answer has reasoning, whoever wrote it."""
        return any(message.get("role") == "assistant" and reasoning_of(message) for message in self.messages)


class Function(msgspec.Struct):
    """Which function a tool call names, and with what."""

    name: str
    arguments: str
    """JSON text."""


class ToolCall(msgspec.Struct):
    """One call in OpenAI's form, with every key always there."""

    id: str
    type: str
    function: Function


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text, empty for null."""
    content = message.get("content")
    if content is None:
        return ""
    if not isinstance(content, str):
        raise CannotExpressError(LeftOut.CONTENT_PARTS)
    return content


def role_of(message: Mapping[str, Any]) -> str:
    """Return a message's role."""
    role = message.get("role")
    if not isinstance(role, str):
        raise CannotExpressError(LeftOut.UNKNOWN_ROLE)
    return role


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return an earlier turn's reasoning under either of its names, empty where it has none."""
    found = next((message[key] for key in _REASONING_KEYS if message.get(key)), "")
    return found if isinstance(found, str) else ""


def calls_of(message: Mapping[str, Any]) -> list[ToolCall]:
    """Return a message's tool calls in one shape; argument texts stay as they are, objects become JSON text."""
    if message.get("function_call"):
        raise CannotExpressError(LeftOut.TOOL_CALL)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise CannotExpressError(LeftOut.TOOL_CALL)
    return [_call(call) for call in calls]


def _call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise CannotExpressError(LeftOut.TOOL_CALL)
    name, arguments, id_ = function.get("name"), function.get("arguments"), call.get("id")
    if not (isinstance(name, str) and name):
        raise CannotExpressError(LeftOut.TOOL_CALL)
    if arguments is None:
        arguments = {}
    if isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode("utf-8")
    if not isinstance(arguments, str):
        raise CannotExpressError(LeftOut.TOOL_CALL)
    return ToolCall(id_ if isinstance(id_, str) else "", "function", Function(name, arguments))


def tools_text(tools: list[dict[str, Any]] | None) -> str:
    """Return the tools as JSON text."""
    return msgspec.json.encode(tools).decode("utf-8") if tools else NO_TOOLS


def answer_of(record: ChatRecord) -> dict[str, Any]:
    """Return the record's answer as an assistant message."""
    return {"role": "assistant", "content": record.content, "tool_calls": record.tool_calls}
