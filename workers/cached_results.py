"""The tool results that a source's conversation holds, to answer the calls of turns that are made anew."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from app.records import Message, canonical_json


@dataclasses.dataclass(frozen=True)
class CachedResult:
    """A tool's answer in the source."""

    message: Message
    name: str | None
    """The function that gave it; None where nothing tells."""
    arguments: bytes | None
    """What the source called the function with, in canonical form; None where nothing tells."""


class Answered(NamedTuple):
    """The results that the calls of one turn were given."""

    messages: list[Message]
    """One tool message for each call, in the order of the calls."""
    other_arguments: list[str]
    """The functions that were called with other arguments than the source's, once for each such call."""


class CachedResults:
    """The results of one round of a conversation; each is given out once."""

    def __init__(self, replies: Sequence[Message]) -> None:
        """Take the round's assistant and tool messages, in the source's order."""
        self._left = list(_read(replies))
        self.given = 0
        """How many were given out."""

    @property
    def left(self) -> int:
        """How many were not given out yet."""
        return len(self._left)

    def missing(self, calls: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the first function of which there are fewer results left than calls; None if all can be answered."""
        left = [one.name for one in self._left]
        for call in calls:
            name = name_of(call)
            if name not in left:
                return name
            left.remove(name)
        return None

    def answer(self, calls: Sequence[Mapping[str, Any]]) -> Answered:
        """Give each call a result of its function: one for the same arguments, else the next one in order.

        Call it only where none is missing.
        """
        chosen = dict[int, CachedResult]()
        for place, call in enumerate(calls):
            same = (one for one in self._left if (one.name, one.arguments) == (name_of(call), arguments_of(call)))
            if (found := next(same, None)) is not None:
                chosen[place] = self._take(found)
        others = []
        for place, call in enumerate(calls):
            if place not in chosen:
                chosen[place] = self._take(next(one for one in self._left if one.name == name_of(call)))
                others.append(name_of(call))
        return Answered([_as_answer(chosen[place].message, call) for place, call in enumerate(calls)], others)

    def _take(self, result: CachedResult) -> CachedResult:
        self._left = [one for one in self._left if one is not result]
        self.given += 1
        return result


def name_of(call: Mapping[str, Any]) -> str:
    """Return the function that a call names, empty where it names none."""
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def arguments_of(call: Mapping[str, Any]) -> bytes:
    """Return a call's arguments in canonical form: as JSON where they are JSON, else as the text that they are."""
    read, arguments = _arguments(call)
    return canonical_json(arguments) if read else str(arguments).encode("utf-8", "surrogatepass")


def has_arguments(call: Mapping[str, Any]) -> bool:
    """Tell whether a call's arguments are a JSON object, as chat templates and tools need them; none are one, too."""
    return isinstance(_arguments(call)[1], dict)


def _arguments(call: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether the arguments are JSON, and their value or their text."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not arguments:
        return True, {}
    if not isinstance(arguments, str):
        return True, arguments
    try:
        return True, msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return False, arguments


def _read(replies: Iterable[Message]) -> Iterable[CachedResult]:
    """Yield the results, each with its call: by the call's id, else by its own name, else by its position."""
    by_id = dict[str, Mapping[str, Any] | None]()
    calls, position, asked = list[Mapping[str, Any]](), 0, False
    for message in replies:
        if message["role"] == "assistant":
            calls, position = (calls if asked else []), (position if asked else 0)
            calls = [*calls, *(message.get("tool_calls") or ())]
            ids = collections.Counter(str(call["id"]) for call in calls if call.get("id"))
            by_id.update({str(call["id"]): call for call in calls if call.get("id")})
            by_id.update({id_: None for id_, times in ids.items() if times > 1})  # it tells none of them apart
            asked = True
            continue
        own, beside = message.get("name"), calls[position] if position < len(calls) else None
        call = by_id.get(str(message.get("tool_call_id")))
        if call is None and beside is not None and own in {None, "", name_of(beside)}:
            call = beside
        name = name_of(call) if call is not None else own
        yield CachedResult(message, name or None, None if call is None else arguments_of(call))
        position, asked = position + 1, False


def _as_answer(message: Message, call: Mapping[str, Any]) -> Message:
    """Return a result as the answer to a call of another id."""
    answer = {name: value for name, value in message.items() if name != "tool_call_id"}
    return {**answer, "tool_call_id": call["id"]} if call.get("id") else answer
