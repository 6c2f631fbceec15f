"""A strict reader of result files: every byte must be what any JSONL reader of any language can read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

_BOM = b"\xef\xbb\xbf"
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class JsonlCheck:
    """What a result file holds."""

    records: tuple[dict[str, Any], ...]
    """The good lines, in order."""
    ids: tuple[str, ...]
    """The `id` of each good line that has one, in order."""
    duplicates: tuple[str, ...]
    """Ids that more than one line has, sorted."""
    problems: tuple[str, ...]
    """One sentence for each thing that is wrong, with its line number."""


def check_jsonl(path: Path) -> JsonlCheck:
    r"""Read a file whose lines end in the byte 0x0A and in nothing else.

    A line is good when it is UTF-8 and one JSON object without NaN, infinities, repeated keys or lone surrogates.
    """
    data = path.read_bytes()
    *lines, tail = data.split(b"\n")
    problems = []
    if tail:
        problems.append(f"line {len(lines) + 1} has no final newline")
        lines.append(tail)
    if data.startswith(_BOM):
        problems.append("the file begins with a byte order mark")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_strict(line))
        except ValueError as error:
            problems.append(f"line {number}: {error} in {line[:80]!r}")
    ids = tuple(str(record["id"]) for record in records if "id" in record)
    duplicates = sorted(id_ for id_, count in Counter(ids).items() if count > 1)
    return JsonlCheck(tuple(records), ids, tuple(duplicates), tuple(problems))


def parse_strict(line: bytes) -> dict[str, Any]:
    """Return the one JSON object of a line; raises ValueError saying what is wrong."""
    if not line.strip():
        raise ValueError("blank line")
    if b"\0" in line:
        raise ValueError("NUL byte")
    if line.endswith(b"\r"):
        raise ValueError("carriage return before the newline")
    value = json.loads(
        line.decode("utf-8"),
        parse_constant=_refuse_constant,
        parse_float=_finite,
        object_pairs_hook=_without_repeats,
    )
    if not isinstance(value, dict):
        raise ValueError("not an object")  # noqa: TRY004  one class for every kind of bad line
    _refuse_lone_surrogates(value)
    return value


def assert_strict(
    path: Path,
    *,
    count: int | None = None,
    ids: Collection[str] | None = None,
    allow_duplicates: bool = False,
) -> JsonlCheck:
    """Assert that a file is strict, and has `count` distinct ids, or exactly these `ids`, if given."""
    if count == 0 and not path.exists():
        return JsonlCheck((), (), (), ())
    check = check_jsonl(path)
    assert not check.problems, f"{path.name}: " + "; ".join(check.problems[:_SHOWN])
    assert len(check.ids) == len(check.records), f"{path.name}: {len(check.records) - len(check.ids)} lines have no id"
    assert allow_duplicates or not check.duplicates, f"{path.name}: repeated ids {check.duplicates[:_SHOWN]}"
    distinct = set(check.ids)
    if count is not None:
        assert len(distinct) == count, f"{path.name}: {len(distinct)} distinct ids, not {count}"
    if ids is not None:
        missing, extra = sorted(set(ids) - distinct)[:_SHOWN], sorted(distinct - set(ids))[:_SHOWN]
        assert not missing, f"{path.name}: missing {missing}"
        assert not extra, f"{path.name}: unexpected {extra}"
    return check


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a number")
    return number


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("an object repeats a key")
    return value


def _refuse_lone_surrogates(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("lone surrogate") from None
    elif isinstance(value, dict):
        for name, item in value.items():
            _refuse_lone_surrogates(name)
            _refuse_lone_surrogates(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_lone_surrogates(item)
