"""The formats `specforge` and `speculators`: `{"id", "conversations", "tools"}` of role/content messages.

SpecForge hands every other column to the chat template as an argument, so a row holds nothing else: no metadata, and
`status` (which its own check of regenerated data asks for) only on request. Its gpt-oss parser takes no column at all
beside the conversation, which is what the choice to have no `tools` is for. speculators takes any unknown role for the
assistant's, so roles are the four that both know. `tools` is JSON text, `null` without tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from producer.export.base import CannotExpressError, FormatOptions, LeftOut, Reasoning
from producer.export.chat import ChatRecord, tools_text
from producer.export.messages import ChatMessage, MessageFormat

_SUCCESS = "success"


class ConversationRow(msgspec.Struct):
    """One conversation."""

    id: str
    conversations: list[ChatMessage]
    tools: str | msgspec.UnsetType = msgspec.UNSET
    """JSON text; not written where there is no such column."""
    status: str | msgspec.UnsetType = msgspec.UNSET


class Speculators(MessageFormat):
    """Conversations that speculators renders at its endpoint."""

    name: ClassVar[str] = "speculators"
    words: ClassVar[Mapping[str, str]] = {
        "id": "the sample's id",
        "conversations": "the messages, with `role` and `content`; the answer is the last one",
        "tools": "the tools as JSON text, `null` without tools",
        "status": "`success`, which SpecForge's check of regenerated data asks for",
    }
    _has_tools = True
    _has_status = False

    def value(self, record: ChatRecord, messages: list[ChatMessage]) -> msgspec.Struct:
        """Return the row."""
        row = ConversationRow(record.id, messages)
        if self._has_tools:
            row.tools = tools_text(record.tools)
        elif record.tools:
            raise CannotExpressError(LeftOut.HAS_TOOLS)
        if self._has_status:
            row.status = _SUCCESS
        return row

    def columns(self) -> dict[str, str]:
        """Return the columns that the options leave."""
        there = {"tools": self._has_tools, "status": self._has_status}
        return {name: words for name, words in self.words.items() if there.get(name, True)}

    def schema(self) -> Any:
        """Return the columns."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        columns = [("id", pa.string()), ("conversations", pa.list_(self.message_type()))]
        columns += [("tools", pa.string())] if self._has_tools else []
        columns += [("status", pa.string())] if self._has_status else []
        return pa.schema(columns)


class SpecForge(Speculators):
    """Conversations that SpecForge renders with one of its own templates."""

    name: ClassVar[str] = "specforge"
    options: ClassVar[frozenset[str]] = frozenset({"reasoning", "status", "tools"})

    def __init__(self, options: FormatOptions = FormatOptions()) -> None:  # noqa: B008 it is frozen
        super().__init__(options)
        self._has_tools = options.tools is not False
        self._has_status = bool(options.status)

    def advice(self) -> str:
        """Tell that the field is read by some of SpecForge's parsers alone."""
        if self.reasoning is not Reasoning.FIELD:
            return ""
        return (
            "SpecForge's parser `general` (templates such as qwen) drops reasoning_content without a word; its parser "
            "`thinking` reads it. With either, --reasoning inline keeps it where the model's template keeps it."
        )
