"""Plans a conversation of which every assistant turn is made anew: what is asked next, and where it ends.

A conversation is a row of rounds: what is said to the model, then its turns with the tool results between them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

from app.records import Completion, Message, Record
from workers.cached_results import CachedResults, has_arguments, name_of


class End(enum.StrEnum):
    """Why a conversation ended before the source's did."""

    TOOL_RESULT_MISSING = "tool_result_missing"
    """The model called a tool for which the source has no result left in this round."""
    BAD_ARGUMENTS = "bad_arguments"
    """The model called a tool with arguments that are no JSON object, which nobody can answer."""
    TOOL_NOT_CALLED = "tool_not_called"
    """The source has tool results in this round, and the model answered without a call."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next turn does not fit into the model's context."""
    TURN_REJECTED = "turn_rejected"
    """The last turn broke a rule."""


@dataclasses.dataclass(frozen=True)
class _Round:
    """What is said to the model, and what the source has of its turns until the next is said."""

    opening: list[Message]
    replies: list[Message]

    @property
    def is_answered(self) -> bool:
        """Whether the source's model speaks after the last tool result."""
        return bool(self.replies) and self.replies[-1]["role"] == "assistant"


class Conversation:
    """How far a conversation has come; `take` is told of each generated turn."""

    def __init__(self, messages: Sequence[Message]) -> None:
        """Take the source's messages, which end where the model is to speak."""
        self._rounds = list(_rounds(messages))
        self._place = 0
        self._results = CachedResults(self._rounds[0].replies)
        self.history = list(self._rounds[0].opening)
        """The messages that the next turn answers; a new list after each turn."""
        self.number = 1
        """The next turn's number."""
        self.over = False
        """Whether there is no next turn."""
        self.ended: End | None = None
        """Why it ended before the source's did, if it did."""
        self.notes = list[str]()
        """What was odd about it, a sentence each."""

    def take(self, message: Message) -> None:
        """Go on after the generated turn: with tool results, with what is said next, or not at all."""
        turn, last = self.number, self._place == len(self._rounds) - 1
        self.number += 1
        if calls := message.get("tool_calls"):
            self._take_calls(message, calls, turn, last=last)
        elif self._results.left and not self._results.given:
            self.end(End.TOOL_NOT_CALLED, f"the source has tool results after turn {turn}, which called no tool")
        elif last:
            self.over = True
        else:
            self._next_round(message)

    def reject(self, reason: str) -> None:
        """End it at a turn that broke a rule."""
        self.number += 1
        if self._place == len(self._rounds) - 1 and not self._results.left:
            self.over = True  # it was the last one anyway
        else:
            self.end(End.TURN_REJECTED, f"turn {self.number - 1} was rejected as {reason}")

    def end(self, reason: End, why: str) -> None:
        """End it here; `why` is the reason in words."""
        self.over, self.ended = True, reason
        self.notes.append(f"The conversation ended before the source's did: {why}.")

    def _take_calls(self, message: Message, calls: list[Message], turn: int, *, last: bool) -> None:
        results = self._results
        if last and not (results.left or results.given):
            self.over = True  # the source has no more than that either
            return
        if (name := results.missing(calls)) is not None:
            self.end(End.TOOL_RESULT_MISSING, f"turn {turn} calls {name!r}, of which the source has no result left")
            return
        if (bad := next((call for call in calls if not has_arguments(call)), None)) is not None:
            self.end(End.BAD_ARGUMENTS, f"turn {turn} calls {name_of(bad)!r} with arguments that are no JSON object")
            return
        answered = results.answer(calls)
        self.notes += [
            f"The result of {other!r} after turn {turn} is that of a call with other arguments."
            for other in answered.other_arguments
        ]
        if last or results.left or self._rounds[self._place].is_answered:
            self.history = [*self.history, message, *answered.messages]
        else:
            self._next_round(message, *answered.messages)

    def _next_round(self, *messages: Message) -> None:
        if unused := self._results.left:
            results = "1 tool result" if unused == 1 else f"{unused} tool results"
            self.notes.append(f"{results} of the source before turn {self.number} had no call.")
        self._place += 1
        current = self._rounds[self._place]
        self._results = CachedResults(current.replies)
        self.history = [*self.history, *messages, *current.opening]


def assistant_message(said: Completion | Record) -> Message:
    """Return a generated turn as the next request's history holds it; templates decide what they render of it."""
    message: Message = {"role": "assistant", "content": said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = said.tool_calls
    return message


def _rounds(messages: Sequence[Message]) -> Iterator[_Round]:
    """Yield the rounds; assistant turns before the first user turn, and results without a call, are said to the model.

    Assistant turns that follow each other are one turn.
    """
    first_user = next((place for place, message in enumerate(messages) if message["role"] == "user"), 0)
    opening, replies = list[Message](), list[Message]()
    for place, message in enumerate(messages):
        role = message["role"]
        if (role == "assistant" and place > first_user) or (role == "tool" and replies):
            replies.append(message)
            continue
        if replies:
            yield _Round(opening, replies)
            opening, replies = [], []
        opening.append(message)
    yield _Round(opening, replies)
