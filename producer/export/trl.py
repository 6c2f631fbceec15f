"""The `trl` format: `{"id", "prompt", "completion", "tools"}`, conversational prompt-completion rows for TRL.

TRL computes the loss on `completion` alone, without a template that marks the assistant's turns. Here the first row of
a JSONL file carries `weight` in each message: neither column mixes roles for certain, and Hugging Face's JSON loader
must meet two sets of keys to read each message as it is. `tools` is JSON text, `null` without tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from producer.export.chat import ChatRecord, tools_text
from producer.export.messages import ASSISTANT, ChatMessage, MessageFormat


class TrlRow(msgspec.Struct):
    """One prompt and its answer."""

    id: str
    prompt: list[ChatMessage]
    completion: list[ChatMessage]
    tools: str
    """JSON text."""


class Trl(MessageFormat):
    """Prompts and completions for TRL's SFT trainer."""

    name: ClassVar[str] = "trl"
    words: ClassVar[Mapping[str, str]] = {
        "id": "the sample's id",
        "prompt": "the messages that were sent",
        "completion": "the answer, as one message",
        "tools": "the tools as JSON text, `null` without tools",
    }
    roles: ClassVar[frozenset[str] | None] = None

    def value(self, record: ChatRecord, messages: list[ChatMessage]) -> msgspec.Struct:
        """Return the row."""
        for message in messages:
            message.weight = None
        return TrlRow(record.id, messages[:-1], messages[-1:], tools_text(record.tools))

    def opening(self, value: TrlRow) -> TrlRow:
        """Give the first row's messages a key that the next row's lack."""
        for message in (*value.prompt, *value.completion):
            message.weight = int(message.role == ASSISTANT and message is value.completion[-1])
        return value

    def schema(self) -> Any:
        """Return the four columns."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        message = pa.struct([field for field in self.message_type() if field.name != "weight"])
        turns = pa.list_(message)
        return pa.schema([("id", pa.string()), ("prompt", turns), ("completion", turns), ("tools", pa.string())])
