"""The `sharegpt` format: `{"id", "conversations": [{"from", "value"}], "tools"}` in the layout of Hermes' public sets.

The roles are system, human, gpt and tool; a system prompt is the first turn. A gpt turn's tool calls follow its text as
`<tool_call>` blocks that hold `{"name": ..., "arguments": {...}}`, and the results of one round are one tool turn of
`<tool_response>` blocks in the order of the calls, which is all that links them. `tools` is JSON text (`null` without
tools). The form has no field for reasoning; by option it stands in the gpt turn's text between think tags.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from producer.export.base import CannotExpressError, Format, FormatOptions, LeftOut, Reasoning, Row
from producer.export.chat import ChatRecord, ToolCall, answer_of, calls_of, reasoning_of, role_of, text_of, tools_text
from producer.export.messages import inline

_FROM = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


class Turn(msgspec.Struct, rename={"sender": "from"}):
    """One turn of a conversation."""

    sender: str
    value: str


class ConversationRow(msgspec.Struct):
    """One conversation."""

    id: str
    conversations: list[Turn]
    tools: str
    """JSON text."""


class ShareGPT(Format[ChatRecord]):
    """Conversations of from/value turns."""

    name: ClassVar[str] = "sharegpt"
    words: ClassVar[Mapping[str, str]] = {
        "id": "the sample's id",
        "conversations": "the turns as `from` (system, human, gpt, tool) and `value`",
        "tools": "the tools as JSON text, `null` without tools",
    }
    options: ClassVar[frozenset[str]] = frozenset({"reasoning"})
    reasonings: ClassVar[tuple[Reasoning, ...]] = (Reasoning.DROP, Reasoning.INLINE)

    def __init__(self, options: FormatOptions = FormatOptions()) -> None:  # noqa: B008 it is frozen
        self._inlines = options.reasoning is Reasoning.INLINE
        self._decoder = msgspec.json.Decoder(ChatRecord)

    def read(self, line: bytes) -> ChatRecord:
        """Decode the conversation alone."""
        return self._decoder.decode(line)

    def row(self, record: ChatRecord) -> Row:
        """Append the answer to the prompt; leaves out what from/value turns cannot say."""
        kept = record.reasoning if self._inlines else None
        if not (record.content or record.tool_calls or kept):
            raise CannotExpressError(LeftOut.NO_ANSWER)
        answer = {**answer_of(record), "reasoning": record.reasoning}
        turns = list(_turns([*record.messages, answer], inlines=self._inlines))
        value = ConversationRow(record.id, turns, tools_text(record.tools))
        return Row(
            value,
            lost_reasoning=bool(record.reasoning) and not kept,
            lost_earlier_reasoning=record.thought_earlier and not self._inlines,
        )

    def schema(self) -> Any:
        """Return the three columns."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        turn = pa.struct([("from", pa.string()), ("value", pa.string())])
        return pa.schema([("id", pa.string()), ("conversations", pa.list_(turn)), ("tools", pa.string())])


def _turns(messages: Sequence[dict[str, Any]], *, inlines: bool) -> Iterator[Turn]:
    """Yield the turns, one for all the results that follow each other."""
    waiting, results = list[ToolCall](), list[str]()
    for message in messages:
        role, text, calls = role_of(message), text_of(message), calls_of(message)
        if role not in _FROM:
            raise CannotExpressError(LeftOut.UNKNOWN_ROLE)
        if role == "tool":
            _answers(message, waiting, len(results))
            results.append(f"<tool_response>\n{text}\n</tool_response>")
            continue
        if results:
            yield Turn("tool", "\n".join(results))
            results = []
        waiting = calls
        if inlines and role == "assistant" and (reasoning := reasoning_of(message)):
            text = inline(reasoning, text)
        yield Turn(_FROM[role], "\n".join([*([text] if text else []), *map(_call_block, calls)]))


def _answers(message: dict[str, Any], calls: Sequence[ToolCall], position: int) -> None:
    """Refuse a result whose call's id says that it belongs to another place."""
    id_ = message.get("tool_call_id")
    if position >= len(calls) or (id_ and calls[position].id and id_ != calls[position].id):
        raise CannotExpressError(LeftOut.TOOL_ORDER)


def _call_block(call: ToolCall) -> str:
    try:
        arguments = msgspec.json.decode(call.function.arguments)
    except msgspec.DecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise CannotExpressError(LeftOut.TOOL_CALL)
    body = json.dumps({"name": call.function.name, "arguments": arguments}, ensure_ascii=False, allow_nan=False)
    return f"<tool_call>\n{body}\n</tool_call>"
