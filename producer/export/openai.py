"""The `openai` format: `{"id", "messages", "tools"}` with messages in OpenAI's form, the answer as the last one.

The columns are always these three. `tools` is JSON text (`null` without tools), since the schemas of functions have no
common type. A message always has `role` and a text `content`; `tool_calls`, `tool_call_id` and `name` are there only
where they mean something, because chat templates test for the key. Every assistant message has `weight`, OpenAI's own
sign of what is trained on: 1 for the answer, 0 for the prompt's earlier turns. It also makes the keys of messages
differ from the first row on, so that Hugging Face's JSON loader (datasets 4.7 or later) reads each message as it is:
with equal keys at first, a first tool call after some 10 MB ends its run with an error. With `reasoning=field` every
assistant message also has `reasoning_content`, always a text. In Parquet, absent keys are null, as Arrow has it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from producer.export.base import CannotExpressError, Format, LeftOut, Reasoning, Row
from producer.export.chat import (
    ChatRecord,
    ToolCall,
    answer_of,
    calls_of,
    reasoning_of,
    role_of,
    text_of,
    tools_text,
)


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message; a key that is None is not written."""

    role: str
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    weight: int | None = None


class ChatRow(msgspec.Struct):
    """One conversation."""

    id: str
    messages: list[ChatMessage]
    tools: str
    """JSON text."""


class OpenAI(Format[ChatRecord]):
    """Conversations for supervised fine-tuning."""

    name: ClassVar[str] = "openai"

    def __init__(self, reasoning: Reasoning = Reasoning.DROP) -> None:
        self._keeps_reasoning = reasoning is Reasoning.FIELD
        self._decoder = msgspec.json.Decoder(ChatRecord)

    def read(self, line: bytes) -> ChatRecord:
        """Decode the conversation alone."""
        return self._decoder.decode(line)

    def row(self, record: ChatRecord) -> Row:
        """Append the answer to the prompt; leaves out an answer of which nothing would remain."""
        kept = record.reasoning if self._keeps_reasoning else None
        if not (record.content or record.tool_calls or kept):
            raise CannotExpressError(LeftOut.NO_ANSWER)
        messages = [self._message(message, reasoning_of(message), weight=0) for message in record.messages]
        messages.append(self._message(answer_of(record), record.reasoning or "", weight=1))
        value = ChatRow(record.id, messages, tools_text(record.tools))
        return Row(value, lost_reasoning=bool(record.reasoning) and not self._keeps_reasoning)

    def _message(self, message: dict[str, Any], reasoning: str, *, weight: int) -> ChatMessage:
        made = ChatMessage(
            role_of(message),
            text_of(message),
            tool_calls=calls_of(message) or None,
            tool_call_id=_text_or_none(message, "tool_call_id"),
            name=_text_or_none(message, "name"),
        )
        if made.role == "assistant":
            made.weight = weight
            made.reasoning_content = reasoning if self._keeps_reasoning else None
        return made

    def schema(self) -> Any:
        """Return the three columns; a message is a struct in which absent keys are null."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        text = pa.string()
        function = pa.struct([("name", text), ("arguments", text)])
        call = pa.struct([("id", text), ("type", text), ("function", function)])
        reasoning = [("reasoning_content", text)] if self._keeps_reasoning else []
        message = pa.struct(
            [
                ("role", text),
                ("content", text),
                *reasoning,
                ("tool_calls", pa.list_(call)),
                ("tool_call_id", text),
                ("name", text),
                ("weight", pa.int64()),
            ]
        )
        return pa.schema([("id", text), ("messages", pa.list_(message)), ("tools", text)])


def _text_or_none(message: dict[str, Any], key: str) -> str | None:
    value = message.get(key)
    return value if isinstance(value, str) and value else None
