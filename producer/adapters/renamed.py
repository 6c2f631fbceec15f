"""Columns under other names: `--columns prompt=question,id=uid`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from app.errors import UsageError
from producer.adapters.base import ID_COLUMNS, SYSTEM_COLUMNS, Adapter, Columns, Conversation
from producer.adapters.tools import TOOL_COLUMNS
from producer.refusals import Refusal

TARGETS = ("prompt", "messages", "system", "tools", "id")
"""What a column can be named as."""

_BESIDE: dict[str, tuple[str, ...]] = {"system": SYSTEM_COLUMNS, "tools": TOOL_COLUMNS, "id": ID_COLUMNS}
"""Columns that a named one takes the place of."""


def parse(text: str) -> dict[str, str]:
    """Return target -> column of a text such as `prompt=question,id=uid`. Raises UsageError."""
    names: dict[str, str] = {}
    for pair in text.split(","):
        target, equals, column = (part.strip() for part in pair.partition("="))
        if not equals or not column or target not in TARGETS or target in names:
            raise UsageError(
                f"--columns {text!r} cannot be used at {pair.strip()!r}; write it as prompt=COLUMN,id=COLUMN with "
                f"each of {', '.join(TARGETS)} at most once."
            )
        names[target] = column
    if "prompt" in names and "messages" in names:
        raise UsageError("--columns names both prompt and messages; a row has one prompt, so name one of them.")
    return names


@dataclasses.dataclass(frozen=True)
class RenamedColumns:
    """Shows rows to another adapter with the named columns in the place of those that it would look for."""

    inner: Adapter
    columns: Mapping[str, str]
    """Target -> column."""
    shapes: frozenset[str] = frozenset()
    """Columns that hold prompts; a named prompt hides them."""

    @property
    def name(self) -> str:
        """The other adapter's word."""
        return self.inner.name

    def recognises(self, row: Columns) -> bool:
        """Tell whether the other adapter recognises the row as it is shown."""
        return self.inner.recognises(self.view(row))

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return what the other adapter finds in the row as it is shown."""
        return self.inner.convert(self.view(row))

    def view(self, row: Columns) -> dict[str, object]:
        """Return the row as it is shown."""
        hidden = {column for target in self.columns for column in _BESIDE.get(target, ())}
        if "prompt" in self.columns or "messages" in self.columns:
            hidden |= self.shapes
        named = {target: row[column] for target, column in self.columns.items() if column in row}
        return {**{column: value for column, value in row.items() if column not in hidden}, **named}
