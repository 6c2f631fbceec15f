"""The shapes that hold one prompt as text: a prompt, question or instruction column."""

from __future__ import annotations

import dataclasses

from producer.adapters.base import Columns, Conversation, conversation_of, is_blank
from producer.refusals import Reason, Refusal, kind_of


@dataclasses.dataclass(frozen=True)
class ColumnAdapter:
    """Rows whose prompt is the text of one column, with a second one below it where that is not blank."""

    name: str
    """The column's name, and the adapter's."""
    below: str | None = None
    """A column whose text is put behind an empty line."""
    unless: str | None = None
    """A column beside which this one is half a prompt, even where that is null."""

    def recognises(self, row: Columns) -> bool:
        """Tell whether the column holds something."""
        return row.get(self.name) is not None and (self.unless is None or self.unless not in row)

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the text as one user turn, unchanged."""
        text = row.get(self.name)
        if type(text) is not str:
            if self.name not in row:
                return Refusal(Reason.MISSING_FIELD, f"the row has no {self.name!r}")
            return Refusal(Reason.NOT_A_STRING, f"the column {self.name!r} is {kind_of(text)}, not text")
        below = row.get(self.below) if self.below else None
        if below is not None:
            if type(below) is not str:
                return Refusal(Reason.NOT_A_STRING, f"the column {self.below!r} is {kind_of(below)}, not text")
            text = text if is_blank(below) else f"{text}\n\n{below}"
        return conversation_of(row, [{"role": "user", "content": text}])


COLUMNS = (
    ColumnAdapter("prompt"),
    ColumnAdapter("instruction", below="input"),
    ColumnAdapter("question"),
    ColumnAdapter("problem"),
    ColumnAdapter("query"),
    ColumnAdapter("input", unless="instruction"),
    ColumnAdapter("text"),
)
"""In order of precedence: a row with several of them is read by the first that is not null."""
