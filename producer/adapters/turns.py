"""A list of turns in any common form -> messages in OpenAI's form."""

from __future__ import annotations

from typing import Any

import msgspec

from app.records import Message
from producer.adapters.roles import CALL, role_of
from producer.adapters.tools import calls_of
from producer.refusals import Reason, Refusal, kind_of

_ROLE_KEYS = ("role", "from")
_TEXT_KEYS = ("content", "value")
_KEPT_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")
"""Further fields of a turn that are sent where they are texts; all others stay behind."""


def turns_of(value: Any, column: str) -> list[Any] | Refusal:
    """Return the list of turns in a column: a list, JSON text of one, or an object of equally long lists."""
    if type(value) is str:
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError):
            return Refusal(Reason.BAD_MESSAGES, f"the column {column!r} is text that is not a JSON list of turns")
    if type(value) is dict and value and all(type(item) is list for item in value.values()):
        # Older versions of the datasets library give a list of objects column by column.
        value = [dict(zip(value, items, strict=False)) for items in zip(*value.values(), strict=False)]
    if type(value) is not list:
        return Refusal(Reason.BAD_MESSAGES, f"the column {column!r} is {kind_of(value)}, not a list of turns")
    if not value:
        return Refusal(Reason.BAD_MESSAGES, f"the column {column!r} is an empty list")
    return value


def to_messages(turns: list[Any]) -> list[Message] | Refusal:
    """Return the turns in OpenAI's form, or what is wrong with the first that has none.

    A turn has `role` and `content`, or `from` and `value`. Texts and content parts stay as they are. A function call
    becomes an assistant turn with tool_calls, and the tool turns behind it answer its calls in order.
    """
    reader = _Reader()
    messages: list[Message] = []
    for position, turn in enumerate(turns, start=1):
        message = _plain(turn) or reader.read(turn, position)
        if isinstance(message, Refusal):
            return message
        refusal = reader.follow(message, turn, position)
        if refusal is not None:
            return refusal
        messages.append(message)
    return messages


def parts_of_turn(turn: Any) -> tuple[str | None, str | None]:
    """Return a turn's role as one of promptmill's words and its text; None for what is missing or no text."""
    if type(turn) is not dict:
        return None, None
    name, text = _first(turn, _ROLE_KEYS), _first(turn, _TEXT_KEYS)
    return role_of(name) if type(name) is str else None, text if type(text) is str else None


_PLAIN_ROLES = frozenset({"system", "user", "assistant"})


def _plain(turn: Any) -> Message | None:
    """Return a turn that already is what would be sent; the quick way through for nearly all rows."""
    if type(turn) is dict and len(turn) == 2 and type(turn.get("content")) is str:
        role = turn.get("role")
        return turn if type(role) is str and role in _PLAIN_ROLES else None
    return None


class _Reader:
    """Reads one conversation's turns and remembers which calls wait for an answer."""

    def __init__(self) -> None:
        self._calls = 0
        self._open: list[str] = []
        self._before: str | None = None

    def read(self, turn: Any, position: int) -> Message | Refusal:
        """Return one turn's message."""
        if type(turn) is not dict:
            return Refusal(Reason.BAD_MESSAGES, f"turn {position} is {kind_of(turn)}, not an object")
        name = _first(turn, _ROLE_KEYS)
        if name is None:
            return Refusal(Reason.MISSING_FIELD, f"turn {position} has neither 'role' nor 'from'; it has {_keys(turn)}")
        role = role_of(name) if type(name) is str else None
        if role is None:
            return Refusal(Reason.UNKNOWN_ROLE, f"turn {position} has the unknown role {str(name)[:40]!r}")
        where = f"turn {position} ({str(name)[:40].strip()})"
        if role == CALL:
            return self._call_turn(_first(turn, _TEXT_KEYS), where)
        return self._text_turn(turn, role, where)

    def _text_turn(self, turn: dict[str, Any], role: str, where: str) -> Message | Refusal:
        message: Message = {"role": role}
        if role == "assistant":
            refusal = self._add_calls(message, turn, where)
            if refusal is not None:
                return refusal
        content = _content(turn, where)
        if isinstance(content, Refusal):
            # An answer may be only calls; one that is nothing at all is found when the prompt is cut.
            if role != "assistant" or _first(turn, _TEXT_KEYS) is not None:
                return content
        else:
            message["content"] = content
        for key in _KEPT_TEXTS:
            if type(turn.get(key)) is str:
                message[key] = turn[key]
        return message

    def _call_turn(self, value: Any, where: str) -> Message | Refusal:
        calls = calls_of(value, first=self._calls + 1)
        if calls is None:
            return Refusal(Reason.BAD_MESSAGES, f"{where} is not a JSON call with a name and arguments")
        self._calls += len(calls)
        return {"role": "assistant", "tool_calls": calls}

    def _add_calls(self, message: Message, turn: dict[str, Any], where: str) -> Refusal | None:
        for key in ("tool_calls", "function_call"):
            value = turn.get(key)
            if value is None or value in ([], ""):
                continue
            calls = calls_of(value, first=self._calls + 1)
            if calls is None:
                return Refusal(Reason.BAD_MESSAGES, f"{where}: {key!r} is not a list of calls with names")
            self._calls += len(calls)
            message["tool_calls"] = calls
            return None
        return None

    def follow(self, message: Message, turn: dict[str, Any], position: int) -> Refusal | None:
        """Check a message against the one before it, and give a tool's answer the id of its call."""
        role = message["role"]
        if role == "tool":
            if self._before not in {"assistant", "tool"}:
                before = f"a {self._before} turn" if self._before else "nothing"
                name = _first(turn, _ROLE_KEYS)
                detail = f"turn {position} ({name}) answers no call: before it stands {before}"
                return Refusal(Reason.BAD_MESSAGES, detail)
            own_id = message.get("tool_call_id")
            if own_id in self._open:
                self._open.remove(own_id)
            elif own_id is None and self._open:
                message["tool_call_id"] = self._open.pop(0)
        elif role == "assistant":
            self._open = [call["id"] for call in message.get("tool_calls", ())]
        self._before = role
        return None


def _content(turn: dict[str, Any], where: str) -> Any:
    """Return a turn's text or parts, or the Refusal that says what else it is."""
    value = _first(turn, _TEXT_KEYS)
    if type(value) is str:
        return value
    if type(value) is list:
        return _parts(value, where)
    if value is None and not any(key in turn for key in _TEXT_KEYS):
        return Refusal(Reason.MISSING_FIELD, f"{where} has neither 'content' nor 'value'; it has {_keys(turn)}")
    key = next(key for key in _TEXT_KEYS if turn.get(key) is value and key in turn)
    return Refusal(Reason.NOT_A_STRING, f"{where}: {key!r} is {kind_of(value)}, not text")


def _parts(parts: list[Any], where: str) -> list[dict[str, Any]] | Refusal:
    """Return content parts without their null fields; at least one must be a text."""
    kept = []
    for part in parts:
        if type(part) is not dict:
            return Refusal(Reason.BAD_MESSAGES, f"{where}: a content part is {kind_of(part)}, not an object")
        kept.append({key: item for key, item in part.items() if item is not None})
    if not any(type(part.get("text")) is str for part in kept):
        return Refusal(Reason.EMPTY_PROMPT, f"{where}: no content part holds text")
    return kept


def _first(turn: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the first of the fields that is not null."""
    for key in keys:
        value = turn.get(key)
        if value is not None:
            return value
    return None


def _keys(turn: dict[str, Any]) -> str:
    return ", ".join(sorted(turn))[:120] or "no fields"
