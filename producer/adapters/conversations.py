"""The two shapes that hold whole conversations: OpenAI's `messages` and ShareGPT's `conversations`."""

from __future__ import annotations

import dataclasses
from typing import Any

from producer.adapters.base import Columns, Conversation, conversation_of
from producer.adapters.turns import to_messages, turns_of
from producer.refusals import Reason, Refusal


@dataclasses.dataclass(frozen=True)
class ConversationAdapter:
    """Rows with a column that is a list of turns, in either spelling (role/content or from/value)."""

    name: str
    columns: tuple[str, ...]
    """Columns that hold the turns, as a list or as JSON text; the first that is not null wins."""
    list_columns: tuple[str, ...] = ()
    """Columns that usually are plain text, and hold the turns where they are a list of objects."""

    def recognises(self, row: Columns) -> bool:
        """Tell whether one of the columns holds something."""
        return self._column(row) is not None

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the turns in OpenAI's form, the `system` column before them and the `tools` column beside them."""
        column = self._column(row)
        if column is None:
            return self._missing(row)
        turns = turns_of(row[column], column)
        if isinstance(turns, Refusal):
            return turns
        messages = to_messages(turns)
        if isinstance(messages, Refusal):
            return messages
        return conversation_of(row, messages)

    def _missing(self, row: Columns) -> Refusal:
        empty = next((column for column in self.columns if column in row), None)
        if empty is not None:
            return Refusal(Reason.BAD_MESSAGES, f"the column {empty!r} is null")
        return Refusal(Reason.MISSING_FIELD, f"the row has no {' or '.join(map(repr, self.columns))}")

    def _column(self, row: Columns) -> str | None:
        for column in self.columns:
            if row.get(column) is not None:
                return column
        for column in self.list_columns:
            if _is_turns(row.get(column)):
                return column
        return None


def _is_turns(value: Any) -> bool:
    return type(value) is list and bool(value) and type(value[0]) is dict


MESSAGES = ConversationAdapter("messages", ("messages",), ("prompt", "input"))
SHAREGPT = ConversationAdapter("sharegpt", ("conversations", "conversation"))
