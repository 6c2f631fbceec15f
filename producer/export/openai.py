"""The `openai` format: `{"id", "messages", "tools"}` with messages in OpenAI's form, the answer as the last one.

The columns are always these three. `tools` is JSON text (`null` without tools), since the schemas of functions have no
common type. Here every assistant message has `weight`, also beside `reasoning_content`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from producer.export.base import Reasoning
from producer.export.chat import ChatRecord, tools_text
from producer.export.messages import ChatMessage, MessageFormat


class ChatRow(msgspec.Struct):
    """One conversation."""

    id: str
    messages: list[ChatMessage]
    tools: str
    """JSON text."""


class OpenAI(MessageFormat):
    """Conversations for supervised fine-tuning."""

    name: ClassVar[str] = "openai"
    words: ClassVar[Mapping[str, str]] = {
        "id": "the sample's id",
        "messages": "the conversation in OpenAI's form, the answer last; the model's own turns have weight 1",
        "tools": "the tools as JSON text, `null` without tools",
    }
    reasonings: ClassVar[tuple[Reasoning, ...]] = (Reasoning.DROP, Reasoning.FIELD, Reasoning.INLINE)
    roles: ClassVar[frozenset[str] | None] = None
    always_weighs: ClassVar[bool] = True

    def value(self, record: ChatRecord, messages: list[ChatMessage]) -> msgspec.Struct:
        """Return the row."""
        return ChatRow(record.id, messages, tools_text(record.tools))

    def schema(self) -> Any:
        """Return the three columns."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        message = pa.struct({**{field.name: field.type for field in self.message_type()}, "weight": pa.int64()})
        return pa.schema([("id", pa.string()), ("messages", pa.list_(message)), ("tools", pa.string())])
