"""Glaive's function calling sets: a whole chat as one text, with calls inside the text."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from producer.adapters.base import Columns, Conversation, is_blank, source_id
from producer.adapters.literals import NotReadableError, json_value, json_values
from producer.adapters.tools import as_tools
from producer.adapters.turns import to_messages
from producer.refusals import Reason, Refusal, kind_of

_END = "<|endoftext|>"
"""Stands behind every answer; it is a special token of many models, so that it is never sent."""
_CALL = "<functioncall>"
_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_MARK = r"(USER|ASSISTANT|FUNCTION RESPONSE):"
_AFTER_BLANK_LINE = re.compile(rf"(?:\A\s*|\n\s*\n\s*){_MARK}")
_AT_LINE_START = re.compile(rf"(?:\A\s*|\n\s*){_MARK}")
_SYSTEM = re.compile(r"\s*SYSTEM:\s*")
_ANNOUNCEMENT = re.compile(r"You are an? helpful assistant,? (?:with|who has) access to the following functions[^\n{]*")
"""The sentence that only announces the tools."""
_QUOTED_CALL = re.compile(
    r'\{\s*"name"\s*:\s*"(?P<name>[^"]+)"\s*,\s*"arguments"\s*:\s*\'(?P<arguments>.*)\'\s*\}', re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class GlaiveV2:
    """Rows with two texts: `system` holds the tools, `chat` the turns, each behind a blank line."""

    name: str = "glaive-v2"

    def recognises(self, row: Columns) -> bool:
        """Tell whether `chat` is a text of turns."""
        return type(row.get("chat")) is str and _AFTER_BLANK_LINE.match(row["chat"]) is not None

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the turns, with the functions of `system` as tools."""
        chat, system = row.get("chat"), row.get("system")
        if chat is None:
            return Refusal(Reason.MISSING_FIELD, "the row has no 'chat'")
        for column, text in (("chat", chat), ("system", system)):
            if type(text) is not str and text is not None:
                return Refusal(Reason.NOT_A_STRING, f"the column {column!r} is {kind_of(text)}, not text")
        return _conversation(row, system or "", chat, _AFTER_BLANK_LINE)


@dataclasses.dataclass(frozen=True)
class GlaiveV1:
    """Rows with one text, `sample`: SYSTEM with the tools, then the turns, each on a line of its own."""

    name: str = "glaive-v1"

    def recognises(self, row: Columns) -> bool:
        """Tell whether `sample` is a text that begins with SYSTEM: or USER:."""
        text = row.get("sample")
        return type(text) is str and (_SYSTEM.match(text) or _AT_LINE_START.match(text)) is not None

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the turns, with the functions of the system text as tools."""
        text = row.get("sample")
        if text is None:
            return Refusal(Reason.MISSING_FIELD, "the row has no 'sample'")
        if type(text) is not str:
            return Refusal(Reason.NOT_A_STRING, f"the column 'sample' is {kind_of(text)}, not text")
        first = _AT_LINE_START.search(text)
        if first is None:
            return Refusal(Reason.NO_USER_TURN, "the text has no USER: at the beginning of a line")
        return _conversation(row, text[: first.start()], text[first.start() :], _AT_LINE_START)


def _conversation(row: Columns, system: str, chat: str, mark: re.Pattern[str]) -> Conversation | Refusal:
    told = _system(system)
    if isinstance(told, Refusal):
        return told
    tools, text = told
    turns = _turns(chat, mark)
    if isinstance(turns, Refusal):
        return turns
    messages = to_messages([*([] if is_blank(text) else [{"role": "system", "content": text}]), *turns])
    return messages if isinstance(messages, Refusal) else Conversation(messages, tools, source_id(row))


def _system(text: str) -> tuple[list[dict[str, Any]] | None, str] | Refusal:
    """Return the tools in a system text, and what else it says."""
    begun = _SYSTEM.match(text)
    text = text[begun.end() :] if begun else text
    announced = _ANNOUNCEMENT.search(text)
    at = text.find("{", announced.end()) if announced else -1
    if announced is None or at < 0:
        return None, text.replace(_END, "").strip()
    try:
        values, rest = json_values(text[at:])
    except NotReadableError as error:
        return Refusal(Reason.BAD_TOOLS, f"the functions in the system text are not JSON ({error})")
    tools = as_tools(values)
    if tools is None:
        return Refusal(Reason.BAD_TOOLS, "the system text holds an object that is no function with a name")
    said = [text[: announced.start()], text[announced.end() : at], rest.replace(_END, "")]
    return tools, "\n\n".join(part.strip() for part in said if part.strip())


def _turns(chat: str, mark: re.Pattern[str]) -> list[dict[str, Any]] | Refusal:
    pieces = mark.split(chat)
    if pieces[0].strip():
        return Refusal(Reason.BAD_MESSAGES, f"the chat begins with {pieces[0].strip()[:40]!r}, not with USER:")
    turns = []
    for position, (name, text) in enumerate(zip(pieces[1::2], pieces[2::2], strict=True), start=1):
        is_last = 2 * position + 1 >= len(pieces)
        turn = _turn(_ROLES[name], text.replace(_END, "").strip(), position, keep_text=is_last)
        if isinstance(turn, Refusal):
            return turn
        turns.append(turn)
    return turns


def _turn(role: str, text: str, position: int, *, keep_text: bool) -> dict[str, Any] | Refusal:
    """Return one turn; `keep_text` leaves a call that cannot be read as text, where it is never sent."""
    before, called, call = text.partition(_CALL)
    if role != "assistant" or not called:
        return {"role": role, "content": text}
    function = _function(call.strip())
    if function is None:
        if keep_text:
            return {"role": role, "content": text}
        return Refusal(Reason.BAD_MESSAGES, f"turn {position} (ASSISTANT) has a {_CALL} that cannot be read")
    turn: dict[str, Any] = {"role": role, "tool_calls": [function]}
    return {**turn, "content": before.strip()} if before.strip() else turn


def _function(call: str) -> dict[str, Any] | None:
    """Return a call's name and arguments: JSON, or JSON whose arguments are JSON between single quotes."""
    quoted = _QUOTED_CALL.fullmatch(call)
    if quoted is None:
        try:
            value = json_value(call)
        except NotReadableError:
            return None
        return value if type(value) is dict and type(value.get("name")) is str else None
    # Apostrophes inside are written as they are or with a backslash, which JSON does not know.
    for arguments in (quoted["arguments"], quoted["arguments"].replace("\\'", "'")):
        try:
            if type(json_value(arguments)) is dict:
                return {"name": quoted["name"], "arguments": arguments}
        except NotReadableError:
            continue
    return None


GLAIVE_V2 = GlaiveV2()
GLAIVE_V1 = GlaiveV1()
