"""The chunks of a streamed answer, folded into the body that the same server would have sent whole."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import msgspec

from workers.clients.answers import decode_answer
from workers.clients.base import CallFailed
from workers.clients.plain_chunks import PLAIN_CHUNKS, PlainChoice
from workers.faults import classify_error_body

_Object = dict[str, Any]


class Fold(Protocol):
    """Takes an answer's events one after the other."""

    @property
    def held(self) -> int:
        """About how many bytes of the answer are kept."""

    def add(self, data: bytes) -> bool:
        """Take one event's data; return whether it brought tokens.

        Raises CallFailed for data that is no JSON object, and for an error that the server sent instead of a chunk.
        """

    def body(self) -> _Object:
        """Return the whole answer, as far as it has come."""


_MOST_OTHERS = 32
"""Chunks of other kinds in one answer, after which it is not tried any more whether one is plain."""


class ChatFold:
    """Folds the chunks of chat completions; of several choices only the first is kept."""

    def __init__(self, *, has_null: bool = True) -> None:
        """Take whether the server says null of a content that is missing beside thought or calls (else it is "")."""
        self.held = 0
        self._has_null = has_null
        self._top: _Object = {}
        self._usual: AbstractSet[str] = frozenset()
        """The top-level fields of the chunk before."""
        self._choice: _Object | None = None
        self._ids: list[Any] = []
        self._fields: dict[str, list[Any]] = {}
        """By the message's field, its pieces."""
        self._calls: dict[int, _Object] = {}
        self._arguments: dict[int, list[str]] = {}
        self._others = 0
        """Chunks that were not plain."""

    def add(self, data: bytes) -> bool:
        """Take one chunk (see Fold)."""
        self.held += len(data)
        if self._choice is not None and self._others < _MOST_OTHERS:
            try:
                choice = PLAIN_CHUNKS.decode(data).choices[0]
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self._others += 1
            else:
                return self._add_plain(choice)
        chunk = _decoded(data)
        choices = chunk.pop("choices", None)
        if chunk.keys() != self._usual or chunk.get("usage"):
            self._usual = chunk.keys()
            self._top.update(_told(chunk))
        came = False
        if isinstance(choices, list):
            for choice in choices:
                if isinstance(choice, dict) and not choice.get("index"):
                    came = self._add_choice(choice) or came
        return came

    def body(self) -> _Object:
        """Return the whole answer (see Fold)."""
        if self._choice is None:
            return self._top
        message = {name: _joined(pieces) for name, pieces in self._fields.items()}
        if self._calls:
            message["tool_calls"] = [self._call(number) for number in sorted(self._calls)]
        if "content" not in message:
            beside = any(name.startswith("reasoning") for name in message) or self._calls
            message["content"] = None if beside and self._has_null else ""
        choice = {"message": message, **self._choice, **({"token_ids": self._ids} if self._ids else {})}
        return {"choices": [choice], **self._top, "object": "chat.completion"}

    def _add_plain(self, choice: PlainChoice) -> bool:
        delta = choice.delta
        if choice.token_ids:
            self._ids += choice.token_ids
        if delta.content:
            self._add_field("content", delta.content)
        if delta.reasoning:
            self._add_field("reasoning", delta.reasoning)
        if delta.reasoning_content:
            self._add_field("reasoning_content", delta.reasoning_content)
        return bool(choice.token_ids or delta.content or delta.reasoning or delta.reasoning_content)

    def _add_choice(self, choice: _Object) -> bool:
        delta, ids = choice.pop("delta", None), choice.pop("token_ids", None)
        if self._choice is None or choice.get("finish_reason") is not None or "error" in choice:
            if choice.get("error"):
                raise CallFailed(classify_error_body(choice, streamed=True))
            self._choice = {**(self._choice or choice), **_told(choice)}
        came = False
        if ids and isinstance(ids, list):
            self._ids += ids
            came = True
        if isinstance(delta, dict):
            for name, value in delta.items():
                if value and name != "role":
                    self._add_field(name, value)
                    came = True
        return came

    def _add_field(self, name: str, value: Any) -> None:
        if name != "tool_calls" or not isinstance(value, list):
            pieces = self._fields.get(name)
            if pieces is None:
                self._fields[name] = [value]
            else:
                pieces.append(value)
            return
        for call in value:
            self._add_call(call)

    def _add_call(self, piece: Any) -> None:
        if not isinstance(piece, dict):
            self._calls[len(self._calls)] = piece  # nonsense, which the parser refuses
            return
        number = piece.get("index")
        if not isinstance(number, int):
            # A server that numbers nothing sends whole calls.
            number = len(self._calls)
        call = self._calls.setdefault(number, {})
        piece.pop("index", None)
        function = piece.pop("function", None)
        call.update((name, value) for name, value in piece.items() if value is not None)
        if not isinstance(function, dict):
            return
        arguments = function.pop("arguments", None)
        known = call.setdefault("function", {})
        known.update((name, value) for name, value in function.items() if value)
        if isinstance(arguments, str):
            self._arguments.setdefault(number, []).append(arguments)
        elif arguments is not None:
            known["arguments"] = arguments

    def _call(self, number: int) -> Any:
        call = self._calls[number]
        if told := self._arguments.get(number):
            call["function"]["arguments"] = "".join(told)
        return call


class TokensFold:
    """Folds the chunks of vLLM's `/inference/v1/generate`."""

    def __init__(self) -> None:
        self.held = 0
        self._top: _Object = {}
        self._choice: _Object | None = None
        self._ids: list[Any] = []

    def add(self, data: bytes) -> bool:
        """Take one chunk (see Fold)."""
        self.held += len(data)
        chunk = _decoded(data)
        choices = chunk.pop("choices", None)
        self._top.update(_told(chunk))
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return False
        ids = choice.pop("token_ids", None)
        if self._choice is None or choice.get("finish_reason") is not None:
            self._choice = {**(self._choice or choice), **_told(choice)}
        if not ids or not isinstance(ids, list):
            return False
        self._ids += ids
        return True

    def body(self) -> _Object:
        """Return the whole answer (see Fold)."""
        if self._choice is None:
            return self._top
        return {**self._top, "choices": [{**self._choice, "token_ids": self._ids}]}


class GenerateFold:
    """Folds the events of SGLang's `/generate`, each of which says all so far or, with a server's option, what is new.

    Where all is said again and again, only the last event is read.
    """

    def __init__(self) -> None:
        self.held = 0
        self._last: bytes | None = None
        """The last event, not read yet, where each says all."""
        self._says_all: bool | None = None
        self._whole: _Object = {}

    def add(self, data: bytes) -> bool:
        """Take one event (see Fold)."""
        if self._says_all and not data.startswith(b'{"error"'):
            self._last, self.held = data, len(data)
            return True
        self.held += len(data)
        event = _decoded(data)
        if not self._whole:
            self._whole = event
            return bool(_ids(event) or event.get("text"))
        if self._says_all is None and _ids(self._whole):
            self._says_all = _says_all(event, self._whole)
        if self._says_all is not False:
            self._whole = event
            return True
        self._whole = {
            **self._whole,
            **event,
            "text": f"{_text(self._whole)}{_text(event)}",
            "output_ids": _ids(self._whole) + _ids(event),
        }
        return True

    def body(self) -> _Object:
        """Return the whole answer (see Fold)."""
        return self._whole if self._last is None else _decoded(self._last)


def _says_all(event: _Object, before: _Object) -> bool:
    """Tell whether the second event with tokens repeats those of the first: by its count, else by its text."""
    meta = event.get("meta_info")
    count = meta.get("completion_tokens") if isinstance(meta, dict) else None
    if count == len(_ids(event)):
        return True
    if count == len(_ids(before)) + len(_ids(event)):
        return False
    return _text(event).startswith(_text(before))


def _ids(event: _Object) -> list[Any]:
    ids = event.get("output_ids")
    return ids if isinstance(ids, list) else []


def _text(event: _Object) -> str:
    text = event.get("text")
    return text if isinstance(text, str) else ""


def _told(fields: _Object) -> _Object:
    return {name: value for name, value in fields.items() if value is not None}


def _decoded(data: bytes) -> _Object:
    chunk = decode_answer(data)
    if chunk.get("error") or chunk.get("object") == "error":
        raise CallFailed(classify_error_body(chunk, streamed=True))
    return chunk


def _joined(pieces: list[Any]) -> Any:
    """Return a field's pieces as one text or one list; what is neither is kept as it is, for the parser to judge."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(pieces)
    if all(isinstance(piece, list | str) for piece in pieces):
        return [part for piece in pieces for part in (piece if isinstance(piece, list) else [piece])]
    return pieces[-1]
