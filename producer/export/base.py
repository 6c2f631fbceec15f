"""What every export format is: it reads the fields that it needs and makes one row of them, or says why it cannot."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from app.records import Kind
from producer.turn_lines import TurnLines


class LeftOut(enum.StrEnum):
    """Why a line of a dataset's files is not in an export."""

    UNREADABLE = "unreadable"
    REPEATED = "repeated"
    IN_ANOTHER_DATASET = "in_another_dataset"
    NOT_ACCEPTED = "not_accepted"
    NO_EXACT_IDS = "no_exact_ids"
    NO_PROMPT_IDS = "no_prompt_ids"
    COUNT_DIFFERS = "count_differs"
    TOO_LONG = "too_long"
    NO_ANSWER = "no_answer"
    CONTENT_PARTS = "content_parts"
    UNKNOWN_ROLE = "unknown_role"
    TOOL_CALL = "tool_call"
    TOOL_CALL_ID = "tool_call_id"
    TOOL_ORDER = "tool_order"
    HAS_TOOLS = "has_tools"
    THINK_TAG = "think_tag"
    TURN_MISSING = "turn_missing"

    @property
    def words(self) -> str:
        """Return the reason in words."""
        return _WORDS[self]


_WORDS = {
    LeftOut.UNREADABLE: "the line is not a record",
    LeftOut.REPEATED: "the line repeats an id that another line has",
    LeftOut.IN_ANOTHER_DATASET: "an earlier dataset of the same export has the id already",
    LeftOut.NOT_ACCEPTED: "the record's own verdict is another than that of its file",
    LeftOut.NO_EXACT_IDS: "the server gave no exact token ids of the answer",
    LeftOut.NO_PROMPT_IDS: "the server gave exact token ids of the answer, but none of the prompt",
    LeftOut.COUNT_DIFFERS: "the output ids are not as many as the server's completion_tokens",
    LeftOut.TOO_LONG: "prompt and answer have more tokens than --max-length",
    LeftOut.NO_ANSWER: "nothing of the answer is left in this format",
    LeftOut.CONTENT_PARTS: "a message's content is not a text (images or other parts)",
    LeftOut.UNKNOWN_ROLE: "a message has a role that this format does not know",
    LeftOut.TOOL_CALL: "a tool call has no name, is not a function, or its arguments do not fit this format",
    LeftOut.TOOL_CALL_ID: "a tool call's id does not name its function, and the trainer reads the id alone",
    LeftOut.TOOL_ORDER: "tool results do not follow their calls in order",
    LeftOut.HAS_TOOLS: "the prompt has tools, and --no-tools leaves no column for them",
    LeftOut.THINK_TAG: "the text has think tags of its own, which inline reasoning could not be told from",
    LeftOut.TURN_MISSING: "the turns folder has no line that fits an earlier turn (producer verify names them)",
}


class Reasoning(enum.StrEnum):
    """What becomes of an answer's reasoning in the formats that hold texts."""

    DROP = "drop"
    FIELD = "field"
    """It becomes the message's `reasoning_content`."""
    INLINE = "inline"
    """It stands in the content, between `<think>` and `</think>`."""


@dataclasses.dataclass(frozen=True)
class FormatOptions:
    """What the user chose for a format; None is the format's own default."""

    reasoning: Reasoning | None = None
    status: bool | None = None
    """Whether rows say `"status": "success"`."""
    tools: bool | None = None
    """Whether there is a column for tools."""
    max_length: int | None = None
    """The most tokens that a row may have."""

    def given(self) -> list[str]:
        """Return the names of the options that were given."""
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]


class CannotExpressError(Exception):
    """A record that a format cannot hold without changing what it says; the export leaves it out and counts it."""

    def __init__(self, reason: LeftOut) -> None:
        super().__init__(reason.words)
        self.reason = reason


class Head(msgspec.Struct, kw_only=True):
    """The fields of a record line that every export reads; each format adds its own."""

    id: str
    verdict: str = Kind.ACCEPTED


class Row(NamedTuple):
    """One row of an export."""

    value: msgspec.Struct
    """Its columns in order: a struct that is written as it is."""
    supervised_tokens: int = 0
    """Tokens that a trainer learns from, where the format fixes them."""
    lost_reasoning: bool = False
    """Whether the answer had reasoning that the row does not hold."""
    lost_earlier_reasoning: bool = False
    """Whether a turn before the answer had reasoning that the row does not hold."""
    held_reasoning: bool = False
    """Whether the row holds reasoning as a text, of the answer or of an earlier turn."""
    lost_tools: bool = False
    """Whether the prompt had tools that the row does not hold."""


_Record = TypeVar("_Record", bound=Head)


class Format(abc.ABC, Generic[_Record]):
    """One export format: a fixed set of columns whose types never change within a file or between files."""

    name: ClassVar[str]
    counts_tokens: ClassVar[bool] = False
    """Whether the rows fix which tokens are supervised."""
    words: ClassVar[Mapping[str, str]]
    """The columns in order, each with what it holds."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Which fields of FormatOptions it takes."""
    reasonings: ClassVar[tuple[Reasoning, ...]] = ()
    """What it can do with reasoning, its default first."""

    @abc.abstractmethod
    def read(self, line: bytes) -> _Record:
        """Decode the fields that the format needs; raises msgspec.DecodeError or UnicodeDecodeError."""

    @abc.abstractmethod
    def row(self, record: _Record) -> Row:
        """Make the record's row; raises CannotExpressError."""

    def rows(self, record: _Record, turns: TurnLines) -> Iterator[tuple[str, Row | LeftOut]]:
        """Yield the ids of the record's rows, each with the row or why there is none; most formats have one.

        `turns` reads the earlier turns of a conversation whose turns were all made anew. Raises StoreError.
        """
        del turns
        try:
            yield record.id, self.row(record)
        except CannotExpressError as error:
            yield record.id, error.reason

    @abc.abstractmethod
    def schema(self) -> Any:
        """Return the columns as a `pyarrow.Schema`."""

    def advice(self) -> str:
        """Return what to know about rows that hold reasoning; empty where there is nothing to know."""
        return ""

    def keeps_reasoning_by(self) -> Reasoning | None:
        """Return the choice by which a format that drops reasoning would keep it; None where nothing can be chosen."""
        if Reasoning.DROP not in self.reasonings:
            return None
        return next(one for one in self.reasonings if one is not Reasoning.DROP)

    def columns(self) -> dict[str, str]:
        """Return the columns in order, each with what it holds."""
        return dict(self.words)

    def opening(self, value: Any) -> Any:
        """Return a row as it has to be when it is the first one of a JSONL file."""
        return value

    def table(self, rows: Sequence[Any]) -> Any:
        """Return rows that this format made as a `pyarrow.Table`."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        return pa.Table.from_pylist(msgspec.to_builtins(rows), schema=self.schema())
