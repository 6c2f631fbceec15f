"""Which row shapes there are, and which one reads a row."""

from __future__ import annotations

import dataclasses
import difflib

from app.errors import UsageError
from producer.adapters.base import Adapter, Columns, Conversation
from producer.adapters.columns import COLUMNS
from producer.adapters.conversations import MESSAGES, SHAREGPT
from producer.refusals import Reason, Refusal

AUTO = "auto"

ADAPTERS: tuple[Adapter, ...] = (MESSAGES, SHAREGPT, *COLUMNS)
"""In order of precedence: whole conversations before single texts."""

_COLUMNS = [*MESSAGES.columns, *SHAREGPT.columns, *(adapter.name for adapter in COLUMNS)]


@dataclasses.dataclass(frozen=True)
class AutoAdapter:
    """Reads each row by the first shape that recognises it, so that files of mixed shapes work."""

    name: str = AUTO

    def recognises(self, row: Columns) -> bool:
        """Tell whether any shape recognises the row."""
        return any(adapter.recognises(row) for adapter in ADAPTERS)

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the conversation that the first fitting shape finds."""
        for adapter in ADAPTERS:
            if adapter.recognises(row):
                return adapter.convert(row)
        for adapter in ADAPTERS:
            refusal = adapter.convert(row)
            if isinstance(refusal, Refusal) and refusal.reason is not Reason.MISSING_FIELD:
                return refusal
        return Refusal(Reason.MISSING_FIELD, f"the row has no known prompt column; it has {columns_of(row)}")


def names() -> list[str]:
    """Return every word that `--adapter` takes."""
    return [AUTO, *(adapter.name for adapter in ADAPTERS)]


def choose(name: str) -> Adapter:
    """Return the adapter of that name; raises UsageError for an unknown one."""
    adapter = AutoAdapter() if name == AUTO else next((one for one in ADAPTERS if one.name == name), None)
    if adapter is None:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"There is no adapter {name!r}{hint}; --adapter takes {', '.join(names())}.")
    return adapter


def unrecognised(adapter: Adapter, row: Columns) -> UsageError:
    """Return the error for a source whose rows do not have the adapter's shape."""
    if adapter.name == AUTO:
        wanted = f"none of the prompt columns that promptmill knows ({', '.join(_COLUMNS)})"
    else:
        wanted = f"nothing that --adapter {adapter.name} reads (others are {', '.join(names())})"
    return UsageError(f"The rows have {wanted}; their columns are {columns_of(row)}.")


def columns_of(row: Columns) -> str:
    """Return the row's column names, bounded."""
    return ", ".join(map(str, row))[:300] or "none"
