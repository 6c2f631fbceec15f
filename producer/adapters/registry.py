"""Which row shapes there are, and which one reads a row."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence

from app.errors import UsageError
from producer.adapters import user
from producer.adapters.agents import AGENT_TRACE
from producer.adapters.base import Adapter, Columns, Conversation
from producer.adapters.columns import COLUMNS
from producer.adapters.conversations import MESSAGES, SHAREGPT
from producer.adapters.glaive import GLAIVE_V1, GLAIVE_V2
from producer.adapters.hermes import HERMES
from producer.adapters.nemotron import NEMOTRON
from producer.adapters.renamed import RenamedColumns
from producer.adapters.toolace import TOOLACE
from producer.adapters.xlam import XLAM
from producer.refusals import Reason, Refusal

AUTO = "auto"

_DATASETS: tuple[Adapter, ...] = (GLAIVE_V2, GLAIVE_V1, TOOLACE, HERMES, XLAM, NEMOTRON)
"""Shapes of one family of datasets, which hide calls or tools inside texts."""

ADAPTERS: tuple[Adapter, ...] = (*_DATASETS, MESSAGES, SHAREGPT, AGENT_TRACE, *COLUMNS)
"""In order of precedence: special shapes first, whole conversations before single texts."""

_TEXT_COLUMNS = [adapter.name for adapter in COLUMNS]
_COLUMNS = [*MESSAGES.columns, *SHAREGPT.columns, "trajectory", "chat", "sample", *_TEXT_COLUMNS]


@dataclasses.dataclass(frozen=True)
class AutoAdapter:
    """Reads each row by the first shape that recognises it, so that files of mixed shapes work."""

    name: str = AUTO

    def recognises(self, row: Columns) -> bool:
        """Tell whether any shape recognises the row."""
        return self.pick(row) is not None

    def pick(self, row: Columns) -> Adapter | None:
        """Return the first shape that recognises the row."""
        for adapter in ADAPTERS:
            if adapter.recognises(row):
                return adapter
        return None

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return the conversation that the first fitting shape finds."""
        adapter = self.pick(row)
        if adapter is not None:
            return adapter.convert(row)
        for adapter in ADAPTERS:
            refusal = adapter.convert(row)
            if isinstance(refusal, Refusal) and refusal.reason is not Reason.MISSING_FIELD:
                return refusal
        return Refusal(Reason.MISSING_FIELD, f"the row has no known prompt column; it has {columns_of([row])}")


def names() -> list[str]:
    """Return every word that `--adapter` takes."""
    return [AUTO, *(adapter.name for adapter in ADAPTERS)]


def choose(name: str, columns: Mapping[str, str] | None = None) -> Adapter:
    """Return the adapter of that name, or the user's function `module:function`, with `columns` under other names.

    Raises UsageError for an unknown one.
    """
    if ":" in name:
        adapter: Adapter | None = user.load(name)
    else:
        adapter = AutoAdapter() if name == AUTO else next((one for one in ADAPTERS if one.name == name), None)
    if adapter is None:
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(
            f"There is no adapter {name!r}{hint}; --adapter takes {', '.join(names())}, or your own module:function."
        )
    return RenamedColumns(adapter, columns, frozenset(_COLUMNS)) if columns else adapter


def shape_of(adapter: Adapter, row: Columns) -> str | None:
    """Return the name of the shape that reads the row; None when none does."""
    if isinstance(adapter, RenamedColumns):
        return shape_of(adapter.inner, adapter.view(row))
    if isinstance(adapter, AutoAdapter):
        picked = adapter.pick(row)
        return picked.name if picked else None
    return adapter.name if adapter.recognises(row) else None


def check_columns(adapter: Adapter, rows: Sequence[Columns]) -> None:
    """Refuse `--columns` with a column that none of the first rows has. Raises UsageError."""
    if not isinstance(adapter, RenamedColumns) or not rows:
        return
    for target, column in adapter.columns.items():
        if not any(column in row for row in rows):
            raise UsageError(
                f"--columns {target}={column}: no row has the column {column!r}; the columns are {columns_of(rows)}."
            )


def unrecognised(adapter: Adapter, rows: Sequence[Columns]) -> UsageError:
    """Return the error for a source whose first rows (one at least) do not have the adapter's shape."""
    if isinstance(adapter, RenamedColumns):
        return unrecognised(adapter.inner, rows)
    if adapter.name == AUTO:
        wanted = f"none of the prompt columns that promptmill knows ({', '.join(_COLUMNS)}; --columns names others)"
    else:
        wanted = f"nothing that --adapter {adapter.name} reads (others are {', '.join(names())})"
    if isinstance(adapter, user.UserAdapter):
        refusal = adapter.convert(rows[0])
        why = f" ({refusal.detail})" if isinstance(refusal, Refusal) else ""
        wanted = f"nothing that becomes a prompt{why}"
    return UsageError(f"The rows have {wanted}; their columns are {columns_of(rows)}.")


def columns_of(rows: Iterable[Columns]) -> str:
    """Return the names of all columns that the rows have, in the order in which they come, bounded."""
    names = dict.fromkeys(str(name) for row in rows for name in row)
    return ", ".join(names)[:300] or "none"
