"""What makes a line of a dataset's file a sound record, and which whole records a damaged line still holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from app.extraction import Extracted, decode_extracted
from app.jsonl import Line
from app.places import is_extraction
from app.records import LARGEST_COUNT, Kind, KnownSample, Record, RefusedRow, Sample, sample_id

_BEGINNING = re.compile(r'\{\s*"id"\s*:')
_MOST_BEGINNINGS = 1000
_COPY = re.compile(r"\.(\d+)$")
_NO_RECORDS = frozenset({Kind.PENDING, Kind.REFUSED})
_FORMS: dict[Kind, type[msgspec.Struct]] = {Kind.PENDING: KnownSample, Kind.REFUSED: RefusedRow}
"""Of the other kinds it is Record, or Extracted in a dataset of hidden states."""

_decode_record = msgspec.json.Decoder(Record).decode


class Judgement(NamedTuple):
    """What a line says, and what is wrong with it."""

    id: str
    round: int
    fault: str | None
    """Why it is no sound record of its file; None for one that is."""
    foreign: str | None = None
    """The other dataset that it names."""


class Piece(NamedTuple):
    """Bytes of a line: a sound record, or something that is none."""

    offset: int
    data: bytes
    judgement: Judgement


def judge(data: bytes, kind: Kind, dataset: str) -> Judgement:
    """Judge the bytes of a line, without its end, of the file of that kind."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _bad(f"not strict JSON: {error}")
    if not isinstance(value, dict):
        return _bad("not a JSON object")
    id_, round_ = value.get("id"), value.get("round", 0)
    return _judge_fields(value, id_, round_, kind, dataset) if isinstance(id_, str) and id_ else _bad("it has no id")


def _judge_fields(value: dict[str, Any], id_: str, round_: Any, kind: Kind, dataset: str) -> Judgement:
    if (field := _mistyped(value)) is not None:
        return Judgement(id_, 0, f"its {field} is {value[field]!r}")
    verdict, owner = value.get("verdict", kind), value.get("dataset", dataset)
    if verdict != kind and kind not in _NO_RECORDS:
        return Judgement(id_, round_, f"its verdict is {verdict!r}")
    if owner != dataset:
        return Judgement(id_, round_, f"it belongs to the dataset {owner!r}", foreign=str(owner))
    return Judgement(id_, round_, None)


def _mistyped(value: dict[str, Any]) -> str | None:
    """Return the field that the index cannot take, if there is one."""
    round_, reason, usage = value.get("round", 0), value.get("reason"), value.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else usage
    if type(round_) is not int or not 0 <= round_ <= LARGEST_COUNT:
        return "round"
    if not isinstance(reason, str | None):
        return "reason"
    return None if tokens is None or type(tokens) is int else "usage"


def _bad(fault: str) -> Judgement:
    return Judgement("", 0, fault)


def pieces(line: Line, kind: Kind, dataset: str) -> Iterator[Piece]:
    """Yield a line as one piece, or a damaged one as the whole records that it holds and what is left between them.

    Together the pieces are the line. A record whose newline was lost, or that follows torn bytes or NULs, is whole.
    """
    judgement = judge(line.data, kind, dataset)
    if judgement.fault is None or judgement.id:
        yield Piece(line.offset, line.data, judgement)
        return
    done = 0
    for begin, end in _whole_records(line.data, kind, dataset):
        if begin > done:
            yield _rest(line, done, begin, judgement)
        data = line.data[begin:end]
        yield Piece(line.offset + begin, data, judge(data, kind, dataset))
        done = end
    if done < len(line.data) or not line.data:
        yield _rest(line, done, len(line.data), judgement)


def _rest(line: Line, begin: int, end: int, judgement: Judgement) -> Piece:
    return Piece(line.offset + begin, line.data[begin:end], judgement)


def _whole_records(data: bytes, kind: Kind, dataset: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each whole record of the dataset and kind inside bytes that are no line.

    A record begins at a raw `{"id":`, which cannot stand inside a JSON text (its quotes are escaped there).
    """
    text, done, done_bytes = data.decode("utf-8", "surrogateescape"), 0, 0
    decoder = json.JSONDecoder()
    for number, found in enumerate(_BEGINNING.finditer(text)):
        if number >= _MOST_BEGINNINGS:
            return
        if found.start() < done:
            continue
        try:
            _value, end = decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            continue
        whole = _encode(text[found.start() : end])
        if _has_form(whole, kind, dataset):
            begin = done_bytes + len(_encode(text[done : found.start()]))
            done, done_bytes = end, begin + len(whole)
            yield begin, done_bytes


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _has_form(data: bytes, kind: Kind, dataset: str) -> bool:
    """Tell whether bytes are a line just as promptmill writes it: every field is known and of its type."""
    form = _form(kind, dataset)
    try:
        msgspec.json.decode(data, type=form)
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    known = {field.encode_name for field in msgspec.structs.fields(form)}
    return set(value) <= known and judge(data, kind, dataset).fault is None


def _form(kind: Kind, dataset: str) -> type[msgspec.Struct]:
    return _FORMS.get(kind, Extracted if is_extraction(dataset) else Record)


def record_of(data: bytes, id_: str, dataset: str) -> Record | Extracted | None:
    """Return a line's record if it is whole and rightly named, as `is_named_rightly` says; else None."""
    try:
        record = decode_extracted(data) if is_extraction(dataset) else _decode_record(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if record.id == id_ and is_named_rightly(record, dataset) else None


def is_named_rightly(sample: Record | Extracted | Sample, dataset: str) -> bool:
    """Tell whether the id of a record or sample is the one that its messages, tools and source give.

    One of a dataset of hidden states has no prompt, and its source's id: it must say the source and its own number.
    """
    if isinstance(sample, Extracted) or is_extraction(dataset):
        return bool(sample.source.name) and (sample.source.row or 0) > 0
    return sample.id in _names_of(sample)


def true_names(data: bytes) -> set[str]:
    """Return the ids that a record's prompt has where it bears none of them; empty for one that is rightly named."""
    try:
        record = _decode_record(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return set()
    names = _names_of(record)
    return set() if record.id in names else names


def _names_of(sample: Record | Sample) -> set[str]:
    copy = _COPY.search(sample.id)
    copies = {1, int(copy.group(1)) if copy else 1}
    own = sample.source_messages if isinstance(sample, Record) else None
    messages = own or sample.messages
    return {sample_id(messages, sample.tools, source_id=sample.source.id, copy=copy) for copy in copies}
