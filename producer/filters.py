"""Which rows are read at all: `--filter` expressions such as `lang=python` or `score>=0.9`."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from app.errors import UsageError

_EXPRESSION = re.compile(r"\s*(?P<column>[^=!~<>]+?)\s*(?P<word>!=|!~|>=|<=|==?|~|>|<)\s*(?P<value>.*?)\s*", re.DOTALL)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclasses.dataclass(frozen=True)
class Filter:
    """One condition on a column; nothing in it is evaluated as code.

    `=` and `!=` compare text, numbers and true, false, null; `~` and `!~` search a regular expression; `<`, `<=`, `>`
    and `>=` compare numbers, also those written as text. In a list one item that fits is enough.
    """

    text: str
    """The condition as it was written."""
    column: str
    """A column, or the way to a field inside one, with dots."""
    _holds: Callable[[Any], bool] = dataclasses.field(repr=False)
    _negated: bool = False

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Tell whether the row fulfils the condition; a missing column counts as null."""
        value = self.value(row)
        items = value if type(value) is list else (value,)
        return any(map(self._holds, items)) is not self._negated

    def value(self, row: Mapping[str, Any]) -> Any:
        """Return what the row holds in the column."""
        if self.column in row:
            return row[self.column]
        found: Any = row
        for name in self.column.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def is_known_to(self, row: Mapping[str, Any]) -> bool:
        """Tell whether the row has the column at all."""
        return self.column in row or self.column.partition(".")[0] in row


def parse(text: str) -> Filter:
    """Read one condition. Raises UsageError."""
    found = _EXPRESSION.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--filter {text!r} cannot be understood; write it as COLUMN=VALUE, with =, !=, ~ or !~ (a regular "
            "expression), <, <=, > or >= (numbers) between them."
        )
    word, value = found["word"], found["value"]
    if word in _COMPARE:
        holds = _comparison(text, _COMPARE[word], value)
    elif word.endswith("~"):
        holds = _search(text, value)
    else:
        holds = _equality(value)
    return Filter(text, found["column"], holds, word.startswith("!"))


def _equality(wanted: str) -> Callable[[Any], bool]:
    number = _number(wanted)

    def holds(value: Any) -> bool:
        if type(value) is int or type(value) is float:
            return number is not None and value == number
        return _word(value) == wanted

    return holds


def _search(text: str, pattern: str) -> Callable[[Any], bool]:
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise UsageError(f"--filter {text!r} holds no regular expression: {error}.") from error

    def holds(value: Any) -> bool:
        word = _word(value)
        return value is not None and word is not None and search(word) is not None

    return holds


def _comparison(text: str, compare: Callable[[float, float], bool], value: str) -> Callable[[Any], bool]:
    bound = _number(value)
    if bound is None:
        raise UsageError(f"--filter {text!r} compares with {value!r}, which is no number; for texts there are = and ~.")

    def holds(found: Any) -> bool:
        number = _number(found)
        return number is not None and compare(number, bound)

    return holds


def _number(value: Any) -> float | None:
    """Return the number in a value or in its text; None where there is none."""
    if type(value) is int or type(value) is float:
        return value
    if type(value) is not str:
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _word(value: Any) -> str | None:
    """Return a value as it is compared with text; None for lists and objects."""
    if type(value) is str:
        return value
    if value is None:
        return "null"
    if type(value) is bool:
        return "true" if value else "false"
    return f"{value:g}" if type(value) is float else str(value) if type(value) is int else None
