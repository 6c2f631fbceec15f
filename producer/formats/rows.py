"""A source row as it was read, or why it could not be read."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import msgspec

from producer.refusals import Reason, Refusal, kind_of

START_CHARS = 200
HEAD_BYTES = 4 * START_CHARS
"""Enough bytes for START_CHARS characters of UTF-8."""
MIB = 1024 * 1024

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="sorted", enc_hook=lambda _: None).encode


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a source."""

    number: int
    """1-based: the physical line for text files, the row elsewhere."""
    value: dict[str, Any] | None = None
    problem: Refusal | None = None
    """Why the row itself cannot be read; exactly one of `value` and `problem` is given."""
    name: str | None = None
    """The file inside a folder, or the split; None for a single file."""
    size: int = 0
    """The row's size in bytes, exact for text files."""
    head: bytes = b""
    """The first bytes as read; empty for rows that never were text."""
    digest: bytes = b""
    """For unreadable rows: a digest of what was read."""

    @property
    def start(self) -> str:
        """The first characters on one line, control characters escaped."""
        head = self.head if self.head or self.value is None else self.content()[:HEAD_BYTES]
        return visible(head)

    def content(self) -> bytes:
        """Return the bytes that stand for the row's content, whatever its position and the order of its keys."""
        return self.digest if self.value is None else _encode(self.value)


def visible(head: bytes) -> str:
    """Return at most START_CHARS characters of UTF-8 bytes on one line, escaping what cannot be seen."""
    text = head.decode("utf-8", "backslashreplace")[:START_CHARS]
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def problem_row(refusal: Refusal, data: bytes, *, number: int, name: str | None = None, size: int | None = None) -> Row:
    """Return a row that cannot be read; `size` is given where `data` is only its beginning."""
    total = len(data) if size is None else size
    digest = hashlib.blake2b(data, digest_size=16, salt=total.to_bytes(8, "big")).digest()
    return Row(number=number, problem=refusal, name=name, size=total, head=data[:HEAD_BYTES], digest=digest)


def too_large(data: bytes, *, number: int, size: int, limit: int, name: str | None = None) -> Row:
    """Return the row for one that is larger than `limit` bytes, of which `data` is the beginning."""
    detail = f"the row has {size:,} bytes, more than the limit of {limit:,} (MILL_MAX_ROW_MB={limit / MIB:g})"
    return problem_row(Refusal(Reason.TOO_LARGE, detail), data, number=number, name=name, size=size)


def json_row(data: bytes, *, number: int, name: str | None = None) -> Row:
    """Return the row that one JSON text holds."""
    try:
        value = _decode(data)
    except (ValueError, RecursionError):
        found = _explain(data)
        if isinstance(found, Refusal):
            return problem_row(found, data, number=number, name=name)
        value = found
    if type(value) is not dict:
        refusal = Refusal(Reason.NOT_AN_OBJECT, f"the row is {kind_of(value)}, not an object with named columns")
        return problem_row(refusal, data, number=number, name=name)
    return Row(number=number, value=value, name=name, size=len(data), head=data[:HEAD_BYTES])


def table_row(value: dict[str, Any], *, number: int, name: str | None, limit: int) -> Row:
    """Return the row of a table that never was text; a column that is NaN or Infinity is read as null.

    Tables write NaN for "nothing here" (pandas does), so a column of its own is no reason to refuse the row; inside
    a list or an object it is.
    """
    kept = {key: None if type(item) is float and not math.isfinite(item) else item for key, item in value.items()}
    try:
        encoded = _encode(kept)
    except UnicodeEncodeError:
        refusal = Refusal(Reason.LONE_SURROGATE, "a text holds half of a surrogate pair")
        return problem_row(refusal, repr(value).encode("ascii", "backslashreplace"), number=number, name=name)
    if len(encoded) > limit:
        return too_large(encoded[:HEAD_BYTES], number=number, size=len(encoded), limit=limit, name=name)
    if has_non_finite(kept):
        refusal = Refusal(Reason.NON_FINITE, "a list or an object holds NaN or Infinity, which JSON has no word for")
        return problem_row(refusal, encoded, number=number, name=name)
    return Row(number=number, value=kept, name=name, size=len(encoded))


def has_non_finite(value: Any) -> bool:
    """Tell whether a float anywhere inside is NaN or infinite."""
    if type(value) is float:
        return not math.isfinite(value)
    if type(value) is dict:
        return any(has_non_finite(item) for item in value.values())
    return type(value) is list and any(has_non_finite(item) for item in value)


def _has_surrogate(value: Any) -> bool:
    if type(value) is str:
        return not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value)
    if type(value) is dict:
        return any(_has_surrogate(key) or _has_surrogate(item) for key, item in value.items())
    return type(value) is list and any(_has_surrogate(item) for item in value)


def _explain(data: bytes) -> Any:
    """Return the Refusal that says what is wrong with a text the fast decoder refused, or its value after all."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return Refusal(Reason.NOT_UTF8, f"byte {error.start + 1} of the row is not UTF-8")
    try:
        return _read_slowly(text)
    except RecursionError:
        detail = "the row is nested too deeply"
    except json.JSONDecodeError as error:
        detail = f"the row is not JSON: {error.msg} at character {error.pos + 1}"
    except ValueError as error:
        detail = f"the row is not JSON that can be read: {error}"
    return Refusal(Reason.NOT_JSON, detail)


def _read_slowly(text: str) -> Any:
    """Return the value of a JSON text, or a Refusal for what JSON allows but nothing behind it can carry."""
    words: list[str] = []
    value = json.loads(text, parse_constant=words.append, parse_float=lambda word: _finite(word, words))
    if words:
        return Refusal(Reason.NON_FINITE, f"the row holds {words[0][:40]}, which is no finite number")
    if _has_surrogate(value):
        return Refusal(Reason.LONE_SURROGATE, "a text holds half of a surrogate pair, written as \\ud800 to \\udfff")
    return value


def _finite(word: str, words: list[str]) -> float:
    number = float(word)
    if not math.isfinite(number):
        words.append(word)
    return number
