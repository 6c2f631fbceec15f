"""Traces of coding agents: `trajectory`, a long list of turns with calls and their answers."""

from __future__ import annotations

import dataclasses
from typing import Any

from producer.adapters.base import Columns, Conversation, conversation_of
from producer.adapters.turns import to_messages, turns_of
from producer.refusals import Reason, Refusal


@dataclasses.dataclass(frozen=True)
class AgentTrace:
    """Rows whose turns are in `trajectory`, as OpenAI messages or as SWE-agent's `{role, text, system_prompt}`."""

    name: str = "trajectory"

    def recognises(self, row: Columns) -> bool:
        """Tell whether `trajectory` holds something."""
        return row.get("trajectory") is not None

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return all turns; what the agent said last is cut off later, as of every conversation."""
        if row.get("trajectory") is None:
            return Refusal(Reason.MISSING_FIELD, "the row has no 'trajectory'")
        turns = turns_of(row["trajectory"], "trajectory")
        if isinstance(turns, Refusal):
            return turns
        messages = to_messages([_turn(turn) for turn in turns])
        return messages if isinstance(messages, Refusal) else conversation_of(row, messages)


def _turn(turn: Any) -> Any:
    """Return SWE-agent's turns with their text in `content`; others as they are."""
    if type(turn) is not dict or turn.get("content") is not None or turn.get("value") is not None:
        return turn
    text = turn.get("text")
    if text is None and turn.get("role") == "system":
        text = turn.get("system_prompt")
    return {"role": turn.get("role"), "content": text} if "text" in turn else turn


AGENT_TRACE = AgentTrace()
