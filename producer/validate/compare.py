"""Compares training files with the datasets that they came from: ids, token ids, and whether reasoning was lost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from app.ledger import Ledger
from app.records import ANSWERED, Kind, split_turn
from producer.export.base import Format, FormatOptions, LeftOut, Reasoning
from producer.export.chat import ChatRecord
from producer.export.chat import reasoning_of as thought_of
from producer.export.claims import Claims
from producer.export.formats import make_format
from producer.export.tokens import TokenRecord
from producer.turn_lines import TurnLines, WholeConversation
from producer.validate.problems import Problem
from producer.validate.shapes import Conversation, Shape, reasoning_of, shape_of

_PAGE = 500
_TOKENS = "tokens"


@dataclasses.dataclass(frozen=True)
class Seen:
    """A row of a file, to be compared with its record."""

    number: int
    id: str
    row: Mapping[str, Any]
    conversation: Conversation | None


class Comparison:
    """The records of some datasets."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = ledgers

    def differences(self, batch: Sequence[Seen]) -> Iterator[tuple[Seen, Problem, str]]:
        """Yield the rows that no answer stands behind, or that contradict their record.

        Of a row of tokens the ids are compared, of a conversation only whether its answer has lost the reasoning.
        """
        lines = dict[str, bytes]()
        for ledger in self._ledgers:
            records = {split_turn(seen.id)[0]: None for seen in batch}
            answered = {id_: entry for id_, entry in ledger.look_up(records).items() if entry.kind in ANSWERED}
            with TurnLines(ledger) as turns:
                for seen in batch:
                    id_ = split_turn(seen.id)[0]
                    if seen.id not in lines and id_ in answered:
                        line = _line_of(seen, ledger.read(answered[id_], id_), turns)
                        lines |= {seen.id: line} if line is not None else {}
        for seen in batch:
            if seen.id not in lines:
                yield seen, Problem.UNKNOWN_ID, ""
            elif (found := _difference(seen, lines[seen.id])) is not None:
                yield seen, *found

    def missing(self, claims: Claims, forms: Sequence[Format[Any]]) -> Iterator[tuple[Path, str, LeftOut | None]]:
        """Yield the accepted ids that are not in the files, and why their format leaves them out, if it does."""
        for ledger in self._ledgers:
            entries, path = ledger.entries(Kind.ACCEPTED), ledger.folder.lines(Kind.ACCEPTED)
            with TurnLines(ledger) as turns:
                while page := list(itertools.islice(entries, _PAGE)):
                    there = claims.known([id_ for id_, _ in page])
                    absent = [(id_, entry) for id_, entry in page if id_ not in there]
                    for id_, entry in absent:
                        rows = dict(_rows_of(id_, ledger.read(entry, id_), forms, turns))
                        known = claims.known(list(rows))
                        yield from ((path, row, reason) for row, reason in rows.items() if row not in known)


def forms_of(row: Mapping[str, Any], max_length: int | None) -> list[Format[Any]]:
    """Return the formats that may have made a file with such rows."""
    if not row:
        return []
    forms = list[Format[Any]]()
    for name in _names(row):
        if name == _TOKENS:
            forms.append(make_format(name, FormatOptions(max_length=max_length)))
            continue
        tools = False if name == "specforge" and "tools" not in row else None
        for reasoning in Reasoning:
            if reasoning in type(make_format(name)).reasonings:
                forms.append(make_format(name, FormatOptions(reasoning=reasoning, tools=tools)))
    return forms


def _names(row: Mapping[str, Any]) -> list[str]:
    shape = shape_of(row)
    if shape is Shape.TOKENS:
        return [_TOKENS]
    if shape is Shape.PROMPTS:
        return ["trl"]
    if shape is Shape.MESSAGES:
        return ["modelopt" if "conversation_id" in row else "openai"]
    turns = row["conversations"]
    if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "from" in turns[0]:
        return ["sharegpt"]
    return ["specforge"] if "tools" in row else ["specforge", "torchspec-kimi"]


def _difference(seen: Seen, line: bytes) -> tuple[Problem, str] | None:
    """Return how a row contradicts its record."""
    if "input_ids" in seen.row:
        record = msgspec.json.decode(line, type=TokenRecord)
        exact = [*(record.prompt_token_ids or ()), *(record.output_ids or ())]
        return None if seen.row["input_ids"] == exact else (Problem.DIFFERS, "")
    if seen.conversation is None:
        return None
    return _lost_reasoning(seen, seen.conversation, msgspec.json.decode(line, type=ChatRecord))


def _lost_reasoning(seen: Seen, conversation: Conversation, record: ChatRecord) -> tuple[Problem, str] | None:
    """Tell whether a turn that the model wrote has reasoning in the record and none in the row."""
    rows = [reasoning_of(message) for message in conversation.messages if message["role"] == "assistant"]
    thoughts = [
        thought_of(message) if place in record.generated else ""
        for place, message in enumerate(record.messages)
        if message.get("role") == "assistant"
    ]
    lost = [bool(thought.strip()) and not kept for thought, kept in zip(thoughts, rows[:-1], strict=False)]
    if (record.reasoning or "").strip() and not reasoning_of(conversation.messages[-1]):
        return Problem.LOST_REASONING, "the record has reasoning, the row has none"
    if any(lost) and not _holds_the_last_thought_alone(seen.row, conversation):
        return Problem.LOST_REASONING, "the record has reasoning in an earlier turn, the row has none there"
    return None


def _holds_the_last_thought_alone(row: Mapping[str, Any], conversation: Conversation) -> bool:
    """Tell whether the format may leave out the reasoning of earlier turns, as its reader would do."""
    with_field = any("reasoning_content" in message for message in conversation.messages)
    return "torchspec-kimi" in _names(row) and not with_field


def _line_of(seen: Seen, line: bytes, turns: TurnLines) -> bytes | None:
    """Return the line that stands behind a row: its record's, or that of a turn; None where there is no such turn."""
    if split_turn(seen.id)[1] is None:
        return line
    try:
        record = msgspec.json.decode(line, type=WholeConversation)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    turn = next((turn for turn in record.turns if turn.id == seen.id), None)
    if turn is None:
        return None
    return line if turn is record.turns[-1] else turns.read(record, turn)[0]


def _rows_of(
    id_: str, line: bytes, forms: Sequence[Format[Any]], turns: TurnLines
) -> Iterator[tuple[str, LeftOut | None]]:
    """Yield the ids of the rows that a record should have, and why the format leaves one out, if it does."""
    rows = dict[str, LeftOut | None]()
    for form in forms:
        try:
            for row_id, row in form.rows(form.read(line), turns):
                rows[row_id] = rows.get(row_id) or (row if isinstance(row, LeftOut) else None)
        except (msgspec.DecodeError, UnicodeDecodeError):
            rows[id_] = LeftOut.UNREADABLE
    yield from rows.items() if rows else [(id_, None)]
