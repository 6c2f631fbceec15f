"""The `modelopt` format: `{"conversation_id", "messages"}`, as NVIDIA Model Optimizer's speculative decoding reads.

It names its hidden-state files after `conversation_id`, and passes no tools to the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from producer.export.chat import ChatRecord
from producer.export.messages import ChatMessage, MessageFormat


class ModelOptRow(msgspec.Struct):
    """One conversation."""

    conversation_id: str
    messages: list[ChatMessage]


class ModelOpt(MessageFormat):
    """Conversations for Model Optimizer."""

    name: ClassVar[str] = "modelopt"
    words: ClassVar[Mapping[str, str]] = {
        "conversation_id": "the sample's id",
        "messages": "the messages, with `role` and `content`; the answer is the last one",
    }
    keeps_tools: ClassVar[bool] = False

    def value(self, record: ChatRecord, messages: list[ChatMessage]) -> msgspec.Struct:
        """Return the row."""
        return ModelOptRow(record.id, messages)

    def schema(self) -> Any:
        """Return the two columns."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        return pa.schema([("conversation_id", pa.string()), ("messages", pa.list_(self.message_type()))])
