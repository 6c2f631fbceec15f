"""What an export did, as numbers and as sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from app.errors import IncompleteError
from producer.export.base import LeftOut, Reasoning
from producer.export.outputs import OutputFile
from producer.texts import counted

_MEGABYTE = 1_000_000
_KILOBYTE = 1_000
_SHOWN_FILES = 8


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What one export did."""

    format: str
    path: Path
    """The output as it was asked for; with splits or shards no file has this name."""
    files: Sequence[OutputFile]
    left_out: Mapping[LeftOut, int]
    """Lines that gave no row, by reason."""
    supervised_tokens: int | None
    """Tokens with loss mask 1; None for formats whose trainer decides that."""
    lost_reasoning: int
    """Rows whose answer had reasoning that the format, or the choice to drop it, left behind."""
    lost_earlier_reasoning: int
    """Rows of which a turn before the answer had reasoning that was left behind."""
    keeps_reasoning_by: Reasoning | None
    """The choice that keeps reasoning in this format; None where it has no such choice."""
    advice: str
    """What to know about the reasoning that the rows hold; empty where there is nothing."""
    lost_tools: int
    """Rows whose prompt had tools, in a format without a column for them."""
    limited: bool
    """Whether the limit ended the export before all records were read."""
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Each column's name and type."""

    @property
    def exported(self) -> int:
        """Rows written."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """Length of the output files together."""
        return sum(file.bytes for file in self.files)

    def sentences(self) -> list[str]:
        """Say it for a person, one fact a line."""
        said = [
            f"{counted(self.exported, 'record')} exported as {self.format} to {self.path} ({size_words(self.bytes)})."
        ]
        if len(self.files) > 1 or self.files[0].path.name != self.path.name:
            said += [
                f"  {file.path}: {counted(file.rows, 'row')} ({size_words(file.bytes)})"
                for file in self.files[:_SHOWN_FILES]
            ]
            if len(self.files) > _SHOWN_FILES:
                said.append(f"  and {len(self.files) - _SHOWN_FILES:,} files more")
        if self.supervised_tokens is not None:
            said.append(f"{self.supervised_tokens:,} tokens are supervised.")
        if self.limited:
            said.append("The limit ended the export; the records after it were not read.")
        said += self._lost_thoughts()
        if self.advice:
            said.append(self.advice)
        if self.lost_tools:
            said.append(
                f"{self.lost_tools:,} of the prompts had tools, for which {self.format} has no column; "
                "--format tokens keeps them as the model saw them."
            )
        return said + left_out_sentences(self.left_out)

    def _lost_thoughts(self) -> Iterator[str]:
        """Say how much reasoning was left behind, and what keeps it."""
        choice = self.keeps_reasoning_by
        if self.lost_reasoning:
            yield (
                f"{self.lost_reasoning:,} of the answers had reasoning that this file does not hold; "
                f"--reasoning {choice} or --format tokens keeps it."
            )
        if self.lost_earlier_reasoning:
            why = f"; --reasoning {choice} keeps it." if choice else f": {self.format} holds the answer's alone."
            yield (
                f"{self.lost_earlier_reasoning:,} of the conversations had reasoning in earlier turns that this file "
                f"does not hold{why}"
            )


class NothingExportedError(IncompleteError):
    """No record could be exported, and no file was written or replaced."""

    def __init__(self, message: str, left_out: Mapping[LeftOut, int]) -> None:
        super().__init__(message)
        self.left_out = left_out


def left_out_sentences(left_out: Mapping[LeftOut, int]) -> list[str]:
    """Say what was left out, the most frequent reason first."""
    ordered = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    return [f"{count:,} left out: {reason.words} ({reason})." for reason, count in ordered if count]


def size_words(count: int) -> str:
    """Return a number of bytes in words."""
    if count >= _MEGABYTE:
        return f"{count / _MEGABYTE:,.1f} MB"
    return f"{count / _KILOBYTE:,.1f} kB"
