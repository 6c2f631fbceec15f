"""Compares training files with the datasets that they came from: ids, token ids, and whether reasoning was lost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from app.index import Entry
from app.ledger import Ledger
from app.records import ANSWERED, Kind
from producer.export.base import CannotExpressError, Format, FormatOptions, LeftOut, Reasoning
from producer.export.chat import ChatRecord
from producer.export.claims import Claims
from producer.export.formats import make_format
from producer.export.tokens import TokenRecord
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
            for id_, entry in ledger.look_up([seen.id for seen in batch]).items():
                if entry.kind in ANSWERED and id_ not in lines:
                    lines[id_] = ledger.read(entry, id_)
        for seen in batch:
            if seen.id not in lines:
                yield seen, Problem.UNKNOWN_ID, ""
            elif (found := _difference(seen, lines[seen.id])) is not None:
                yield seen, *found

    def missing(self, claims: Claims, forms: Sequence[Format[Any]]) -> Iterator[tuple[Path, str, LeftOut | None]]:
        """Yield the accepted ids that are not in the files, and why their format leaves them out, if it does."""
        for ledger in self._ledgers:
            entries = ledger.entries(Kind.ACCEPTED)
            while page := list(itertools.islice(entries, _PAGE)):
                there = claims.known([id_ for id_, _ in page])
                for id_, entry in page:
                    if id_ not in there:
                        yield ledger.folder.lines(Kind.ACCEPTED), id_, _why_left_out(ledger, entry, forms)


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
    if seen.conversation is not None and not reasoning_of(seen.conversation.messages[-1]):
        thought = msgspec.json.decode(line, type=ChatRecord).reasoning
        if thought and thought.strip():
            return Problem.LOST_REASONING, "the record has reasoning, the row has none"
    return None


def _why_left_out(ledger: Ledger, entry: Entry, forms: Sequence[Format[Any]]) -> LeftOut | None:
    line = ledger.read(entry)
    for form in forms:
        try:
            form.row(form.read(line))
        except CannotExpressError as error:
            return error.reason
        except (msgspec.DecodeError, UnicodeDecodeError):
            return LeftOut.UNREADABLE
    return None
