"""The `tokens` format: exact token ids with a loss mask, as the server gave them and never re-tokenised.

A row is `{"id": str, "input_ids": [int], "loss_mask": [0 | 1]}`: the prompt's ids with mask 0, then the output's ids
with mask 1. Trainers that take pre-tokenised rows (speculators, SpecForge) need no chat template for it, so neither a
thought nor a tool call can get lost in one. A conversation whose turns were all made anew has one row for each turn,
`ID#turnN`, with the ids that this very turn was asked and answered with. Both lists are 64-bit in Parquet, which is
what loaders infer from JSON.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from producer.export.base import CannotExpressError, Format, FormatOptions, Head, LeftOut, Row
from producer.turn_lines import TurnLines, TurnPlace, WholeConversation

_decode_messages = msgspec.json.Decoder(list[dict[str, Any]]).decode
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0)]]


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class TokenRecord(Head, kw_only=True):
    """The exact ids of a record."""

    prompt_token_ids: _TokenIds | None = None
    output_ids: _TokenIds | None = None
    usage: _Usage | None = None
    settings: str = ""
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    """Decoded for conversations alone."""
    turns: list[TurnPlace] | None = None
    """Of a conversation whose turns were all made anew: each of them; the ids above are the last one's."""


class TokenRow(msgspec.Struct):
    """One pre-tokenised training row."""

    id: str
    input_ids: list[int]
    loss_mask: list[int]
    """As long as `input_ids`: 1 where the model wrote the token."""


class Tokens(Format[TokenRecord]):
    """Pre-tokenised rows."""

    name: ClassVar[str] = "tokens"
    counts_tokens: ClassVar[bool] = True
    words: ClassVar[Mapping[str, str]] = {
        "id": "the sample's id; for a turn of a conversation whose turns were all made anew `ID#turnN`",
        "input_ids": "the token ids of prompt and answer, as the server gave them",
        "loss_mask": "1 where the model wrote the token, 0 in the prompt; as long as `input_ids`",
    }
    options: ClassVar[frozenset[str]] = frozenset({"max_length"})

    def __init__(self, options: FormatOptions = FormatOptions()) -> None:  # noqa: B008 it is frozen
        self._max_length = options.max_length
        self._decoder = msgspec.json.Decoder(TokenRecord)

    def read(self, line: bytes) -> TokenRecord:
        """Decode the ids alone."""
        return self._decoder.decode(line)

    def row(self, record: TokenRecord) -> Row:
        """Join prompt and output ids; leaves out what has no exact ids or whose count contradicts the server's."""
        prompt, output = record.prompt_token_ids, record.output_ids
        if output is None:
            raise CannotExpressError(LeftOut.NO_EXACT_IDS)
        if not prompt:
            raise CannotExpressError(LeftOut.NO_PROMPT_IDS)
        expected = record.usage.completion_tokens if record.usage else None
        if expected is not None and expected != len(output):
            raise CannotExpressError(LeftOut.COUNT_DIFFERS)
        if not output:
            raise CannotExpressError(LeftOut.NO_ANSWER)
        if self._max_length is not None and len(prompt) + len(output) > self._max_length:
            raise CannotExpressError(LeftOut.TOO_LONG)
        mask = [0] * len(prompt) + [1] * len(output)
        return Row(TokenRow(record.id, prompt + output, mask), supervised_tokens=len(output))

    def rows(self, record: TokenRecord, turns: TurnLines) -> Iterator[tuple[str, Row | LeftOut]]:
        """Yield a row for each turn of a conversation whose turns were all made anew, in order; else the one row."""
        if not record.turns:
            yield from super().rows(record, turns)
            return
        ids = [turn.id for turn in record.turns]
        conversation = WholeConversation(record.settings, _decode_messages(record.messages), record.turns)
        for id_, line in zip(ids[:-1], turns.read(conversation), strict=True):
            try:
                turn = None if line is None else self.read(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                turn = None
            if turn is None:
                yield id_, LeftOut.TURN_MISSING
            else:
                yield from super().rows(turn, turns)
        yield from super().rows(msgspec.structs.replace(record, id=ids[-1]), turns)

    def schema(self) -> Any:
        """Return the three columns."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        ids = pa.list_(pa.int64())
        return pa.schema([("id", pa.string()), ("input_ids", ids), ("loss_mask", ids)])

    def table(self, rows: Sequence[TokenRow]) -> Any:
        """Return the rows as a table, three times as fast as from one Python list per row."""
        import pyarrow as pa  # noqa: PLC0415 heavy

        lists = (_list_array([row.input_ids for row in rows]), _list_array([row.loss_mask for row in rows]))
        return pa.Table.from_arrays([pa.array([row.id for row in rows], pa.string()), *lists], schema=self.schema())


def written_ids(row: Row) -> list[int]:
    """Return the ids that the model wrote, of a row of this format."""
    assert isinstance(row.value, TokenRow)  # noqa: S101 the format makes no others
    return row.value.input_ids[len(row.value.input_ids) - row.supervised_tokens :]


def _list_array(lists: Sequence[list[int]]) -> Any:
    """Return lists of integers as one Arrow list<int64> array."""
    import pyarrow as pa  # noqa: PLC0415 heavy

    offsets, values = array.array("i", [0]), array.array("q")
    offsets.extend(itertools.accumulate(map(len, lists)))
    for numbers in lists:
        values.extend(array.array("q", numbers))  # much faster than from the list itself
    return pa.ListArray.from_arrays(_integers(offsets, pa.int32()), _integers(values, pa.int64()))


def _integers(numbers: array.array[int], kind: Any) -> Any:
    import pyarrow as pa  # noqa: PLC0415 heavy

    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])
