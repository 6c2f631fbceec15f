"""xLAM: one query, its tools as bare functions, and the calls that answer it, the latter two as JSON text."""

from __future__ import annotations

import dataclasses
from typing import Any

from producer.adapters.base import Columns, Conversation, source_id
from producer.adapters.tools import calls_of, tools_of, with_json_schemas
from producer.adapters.turns import to_messages
from producer.refusals import Reason, Refusal, kind_of


@dataclasses.dataclass(frozen=True)
class Xlam:
    """Rows with `query`, `tools` and `answers`."""

    name: str = "xlam"

    def recognises(self, row: Columns) -> bool:
        """Tell whether the row has all three columns."""
        return "answers" in row and row.get("query") is not None and row.get("tools") is not None

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the query and the calls that answer it, with the tools' parameters as JSON Schema."""
        query = row.get("query")
        if query is None:
            return Refusal(Reason.MISSING_FIELD, "the row has no 'query'")
        if type(query) is not str:
            return Refusal(Reason.NOT_A_STRING, f"the column 'query' is {kind_of(query)}, not text")
        tools = tools_of(row)
        if isinstance(tools, Refusal):
            return tools
        turns: list[dict[str, Any]] = [{"role": "user", "content": query}]
        answers = row.get("answers")
        if answers:
            calls = calls_of(answers, first=1)
            answer = {"tool_calls": calls} if calls else {"content": answers}  # it is never sent
            turns.append({"role": "assistant", **answer})
        messages = to_messages(turns)
        if isinstance(messages, Refusal):
            return messages
        return Conversation(messages, with_json_schemas(tools), source_id(row))


XLAM = Xlam()
