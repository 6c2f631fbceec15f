"""Nemotron's post-training sets: OpenAI messages whose tools are hidden in the JSON text of `metadata`."""

from __future__ import annotations

import dataclasses
from typing import Any

from producer.adapters.base import Columns, Conversation
from producer.adapters.conversations import MESSAGES
from producer.adapters.literals import NotReadableError, json_value
from producer.refusals import Reason, Refusal


@dataclasses.dataclass(frozen=True)
class Nemotron:
    """Rows with `messages`, no `tools`, and a `metadata` that holds a list of tools."""

    name: str = "nemotron"

    def recognises(self, row: Columns) -> bool:
        """Tell whether the row's tools are in its metadata alone."""
        metadata = row.get("metadata")
        if not metadata or row.get("tools") is not None or row.get("messages") is None:
            return False
        return bool(_tools(metadata))

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the messages with the metadata's tools."""
        if row.get("messages") is None:
            return Refusal(Reason.MISSING_FIELD, "the row has no 'messages'")
        tools = _tools(row.get("metadata"))
        return MESSAGES.convert(row if tools is None else {**row, "tools": tools})


def _tools(metadata: Any) -> Any:
    """Return the list of objects under `tools` in metadata, an object or JSON text of one; None where there is none."""
    if type(metadata) is str:
        if '"tools"' not in metadata:
            return None
        try:
            metadata = json_value(metadata)
        except NotReadableError:
            return None
    tools = metadata.get("tools") if type(metadata) is dict else None
    return tools if type(tools) is list and tools and all(type(tool) is dict for tool in tools) else None


NEMOTRON = Nemotron()
