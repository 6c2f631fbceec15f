"""The `torchspec-kimi` format: `{"id", "conversations"}` with inline thoughts, as TorchSpec's Kimi parser reads.

That parser reads no `reasoning_content`, strips the thoughts of all but the last assistant turn, and renders of a tool
call its id and arguments alone, so that the id must be Kimi's own (`functions.NAME:N`). It has no column for tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from producer.export.base import CannotExpressError, LeftOut, Reasoning
from producer.export.chat import ChatRecord, ToolCall
from producer.export.messages import CLOSE, OPEN, ChatMessage, MessageFormat


class KimiRow(msgspec.Struct):
    """One conversation."""

    id: str
    conversations: list[ChatMessage]


class TorchSpecKimi(MessageFormat):
    """Conversations for TorchSpec's Kimi K2.5 template."""

    name: ClassVar[str] = "torchspec-kimi"
    words: ClassVar[Mapping[str, str]] = {
        "id": "the sample's id",
        "conversations": "the messages; the answer is the last one, its reasoning between think tags in `content`",
    }
    reasonings: ClassVar[tuple[Reasoning, ...]] = (Reasoning.INLINE,)
    brackets: ClassVar[tuple[str, str]] = (OPEN, CLOSE)
    keeps_tools: ClassVar[bool] = False
    inlines_history: ClassVar[bool] = False

    def value(self, record: ChatRecord, messages: list[ChatMessage]) -> msgspec.Struct:
        """Return the row."""
        return KimiRow(record.id, messages)

    def check_calls(self, calls: Sequence[ToolCall]) -> None:
        """Leave out calls whose id does not name their function."""
        if any(not call.id.startswith(f"functions.{call.function.name}:") for call in calls):
            raise CannotExpressError(LeftOut.TOOL_CALL_ID)

    def schema(self) -> Any:
        """Return the two columns."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        return pa.schema([("id", pa.string()), ("conversations", pa.list_(self.message_type()))])
