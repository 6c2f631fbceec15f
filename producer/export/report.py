"""What an export did, as numbers and as sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from app.errors import IncompleteError
from producer.export.base import LeftOut

_MEGABYTE = 1_000_000
_KILOBYTE = 1_000


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What one export did."""

    format: str
    path: Path
    exported: int
    """Rows written."""
    left_out: Mapping[LeftOut, int]
    """Lines that gave no row, by reason."""
    supervised_tokens: int | None
    """Tokens with loss mask 1; None for formats whose trainer decides that."""
    lost_reasoning: int
    """Rows whose answer had reasoning that the format, or the choice to drop it, left behind."""
    bytes: int
    """Length of the output file."""
    limited: bool
    """Whether the limit ended the export before all records were read."""

    def sentences(self) -> list[str]:
        """Say it for a person, one fact a line."""
        said = [f"{self.exported:,} records exported as {self.format} to {self.path} ({_size(self.bytes)})."]
        if self.supervised_tokens is not None:
            said.append(f"{self.supervised_tokens:,} tokens are supervised.")
        if self.limited:
            said.append("The limit ended the export; the records after it were not read.")
        if self.lost_reasoning:
            said.append(
                f"{self.lost_reasoning:,} of the answers had reasoning that this file does not hold; "
                "--format openai --reasoning field or --format tokens keeps it."
            )
        return said + left_out_sentences(self.left_out)


class NothingExportedError(IncompleteError):
    """No record could be exported, and no file was written or replaced."""

    def __init__(self, message: str, left_out: Mapping[LeftOut, int]) -> None:
        super().__init__(message)
        self.left_out = left_out


def left_out_sentences(left_out: Mapping[LeftOut, int]) -> list[str]:
    """Say what was left out, the most frequent reason first."""
    ordered = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    return [f"{count:,} left out: {reason.words} ({reason})." for reason, count in ordered if count]


def _size(count: int) -> str:
    if count >= _MEGABYTE:
        return f"{count / _MEGABYTE:,.1f} MB"
    return f"{count / _KILOBYTE:,.1f} kB"
