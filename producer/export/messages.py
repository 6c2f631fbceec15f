"""Conversations as OpenAI messages: what every format that holds roles and contents makes of a record.

A message always has `role` and a text `content`; `tool_calls`, `tool_call_id` and `name` are there only where they mean
something, because chat templates test for the key. Every assistant message has one key that the others lack: with
reasoning as a field `reasoning_content` (always a text), else `weight`, OpenAI's own sign of what is trained on (1 for
what the model wrote, 0 for the prompt's own turns). Because of it the keys of messages differ from the first row on,
so that Hugging Face's JSON loader (datasets 4.7 or later) reads each message as it is: with equal keys at first, a
first tool call after some 10 MB ends its run with an error. In Parquet and Arrow, absent keys are null.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from producer.export.base import CannotExpressError, Format, FormatOptions, LeftOut, Reasoning, Row
from producer.export.chat import (
    ChatRecord,
    ToolCall,
    answer_of,
    calls_of,
    reasoning_of,
    role_of,
    text_of,
)

OPEN, CLOSE = "<think>", "</think>"
SPACED = (f"{OPEN}\n", f"\n{CLOSE}\n\n")
"""What stands before and after inline reasoning, as Qwen3 and DeepSeek-R1 write it."""
ASSISTANT = "assistant"


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message; a key that is None is not written."""

    role: str
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    weight: int | None = None


class MessageFormat(Format[ChatRecord]):
    """A format whose rows hold messages."""

    options: ClassVar[frozenset[str]] = frozenset({"reasoning"})
    reasonings: ClassVar[tuple[Reasoning, ...]] = (Reasoning.FIELD, Reasoning.INLINE, Reasoning.DROP)
    roles: ClassVar[frozenset[str] | None] = frozenset({"system", "user", "assistant", "tool"})
    """The roles that its reader knows; None for any."""
    brackets: ClassVar[tuple[str, str]] = SPACED
    keeps_tools: ClassVar[bool] = True
    inlines_history: ClassVar[bool] = True
    """Whether the thoughts of earlier turns are written inline too."""
    always_weighs: ClassVar[bool] = False
    """Whether messages have a weight beside a field of reasoning, too."""

    def __init__(self, options: FormatOptions = FormatOptions()) -> None:  # noqa: B008 it is frozen
        self.reasoning = options.reasoning or self.reasonings[0]
        self._decoder = msgspec.json.Decoder(ChatRecord)

    def read(self, line: bytes) -> ChatRecord:
        """Decode the conversation alone."""
        return self._decoder.decode(line)

    def row(self, record: ChatRecord) -> Row:
        """Append the answer to the prompt; leaves out an answer of which nothing would remain."""
        drops = self.reasoning is Reasoning.DROP
        kept = None if drops else record.reasoning
        keeps_earlier = self.inlines_history and not drops
        if not (record.content or record.tool_calls or kept):
            raise CannotExpressError(LeftOut.NO_ANSWER)
        generated = record.generated
        messages = [
            self._message(message, reasoning_of(message), answers=False, generated=place in generated)
            for place, message in enumerate(record.messages)
        ]
        messages.append(self._message(answer_of(record), record.reasoning or "", answers=True, generated=True))
        return Row(
            self.value(record, messages),
            lost_reasoning=bool(record.reasoning) and drops,
            lost_earlier_reasoning=record.thought_earlier and not keeps_earlier,
            held_reasoning=bool(kept) or (record.thought_earlier and keeps_earlier),
            lost_tools=bool(record.tools) and not self.keeps_tools,
        )

    @abc.abstractmethod
    def value(self, record: ChatRecord, messages: list[ChatMessage]) -> msgspec.Struct:
        """Return the row of a conversation whose last message is the answer."""

    def check_calls(self, calls: Sequence[ToolCall]) -> None:
        """Raise CannotExpressError for tool calls that the format's reader would not understand."""

    def _message(self, message: dict[str, Any], reasoning: str, *, answers: bool, generated: bool) -> ChatMessage:
        role, calls = role_of(message), calls_of(message)
        if self.roles is not None and role not in self.roles:
            raise CannotExpressError(LeftOut.UNKNOWN_ROLE)
        self.check_calls(calls)
        made = ChatMessage(
            role,
            text_of(message),
            tool_calls=calls or None,
            tool_call_id=_text_or_none(message, "tool_call_id"),
            name=_text_or_none(message, "name"),
        )
        if role != ASSISTANT:
            return made
        if self.reasoning is Reasoning.FIELD:
            made.reasoning_content = reasoning
        if self.reasoning is not Reasoning.FIELD or self.always_weighs:
            made.weight = int(generated)
        if self.reasoning is Reasoning.INLINE and reasoning and (answers or self.inlines_history):
            made.content = inline(reasoning, made.content, self.brackets)
        return made

    def message_type(self) -> Any:
        """Return a message as a `pyarrow` struct type."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        text = pa.string()
        function = pa.struct([("name", text), ("arguments", text)])
        call = pa.struct([("id", text), ("type", text), ("function", function)])
        own = ("reasoning_content", text) if self.reasoning is Reasoning.FIELD else ("weight", pa.int64())
        others = [("tool_calls", pa.list_(call)), ("tool_call_id", text), ("name", text)]
        return pa.struct([("role", text), ("content", text), *others, own])


def inline(reasoning: str, content: str, brackets: tuple[str, str] = SPACED) -> str:
    """Return the content with the reasoning before it; raises CannotExpressError if either has think tags itself."""
    if any(tag in text for tag in (OPEN, CLOSE) for text in (reasoning, content)):
        raise CannotExpressError(LeftOut.THINK_TAG)
    return f"{brackets[0]}{reasoning}{brackets[1]}{content}"


def _text_or_none(message: dict[str, Any], key: str) -> str | None:
    value = message.get(key)
    return value if isinstance(value, str) and value else None
