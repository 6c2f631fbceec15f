"""Whether each column, and each key inside it, has one type from the first row to the last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NAMES = {type(None): "null", bool: "true/false", int: "integer", float: "number", str: "text", dict: "object"}
_MOST_PATHS = 10_000


class Types:
    """Remembers the type at each path, such as `messages[].content`, and tells what changes it."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._columns: frozenset[str] | None = None

    def other_columns(self, row: Mapping[str, Any]) -> str | None:
        """Return how the row's columns differ from the first row's, if they do."""
        columns = frozenset(row)
        if self._columns is None:
            self._columns = columns
        if columns == self._columns:
            return None
        more, fewer = sorted(columns - self._columns), sorted(self._columns - columns)
        words = [f"has {', '.join(more)} too"] if more else []
        words += [f"lacks {', '.join(fewer)}"] if fewer else []
        return " and ".join(words)

    def change(self, row: Mapping[str, Any]) -> str | None:
        """Return the first value that has another type than before, if one has."""
        for path, kind in _kinds("", row):
            known = self._kinds.get(path)
            if known is None:
                if len(self._kinds) < _MOST_PATHS:
                    self._kinds[path] = kind
            elif known != kind:
                return f"{path} is {kind}, and was {known}"
        return None


def _kinds(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        if path:
            yield path, "object"
        for key, item in value.items():
            yield from _kinds(f"{path}.{key}" if path else key, item)
    elif isinstance(value, list):
        yield path, "list"
        # Of long lists of numbers the first stands for all; token rows are checked one by one elsewhere.
        scalars = bool(value) and not isinstance(value[0], dict | list)
        for item in value[:1] if scalars else value:
            yield from _kinds(f"{path}[]", item)
    else:
        yield path, _NAMES.get(type(value), type(value).__name__)
