"""Write a dataset's accepted records as one training file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from app.errors import UsageError
from app.ledger import Ledger
from app.places import FILE_OF_KIND, DatasetFolder
from producer.export.atomic import refuse_existing, whole_file
from producer.export.base import CannotExpressError, Format, LeftOut, Reasoning
from producer.export.formats import make_format
from producer.export.report import ExportReport, NothingExportedError, left_out_sentences
from producer.export.selection import Batch, accepted
from producer.export.sinks import Sink, open_sink, suffix_of


def export(
    ledger: Ledger,
    *,
    format: str,  # noqa: A002 the option's own name
    output: Path,
    overwrite: bool = False,
    limit: int | None = None,
    reasoning: str = Reasoning.DROP,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write each accepted record once, in file order, to `output`, whole or not at all.

    The suffix of `output` chooses JSONL (.jsonl, .jsonl.gz, .jsonl.zst) or Parquet. `limit` bounds the rows written.
    `reasoning` is "drop" or "field". `on_progress` is told how many bytes of how many were read, after each batch.
    It may run while workers go on recording; what they append after the start is not read.

    Raises UsageError for a wrong option or an existing output, StoreError when the output cannot be written,
    NothingExportedError (and leaves the output as it was) when there is no row to write.
    """
    form = make_format(format, reasoning=_reasoning(reasoning))
    suffix = suffix_of(output)
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit} would export nothing; give a number of rows of at least 1.")
    path = Path(os.path.realpath(output))
    _refuse_own_files(path)
    refuse_existing(path, overwrite=overwrite)
    tally = _Tally(form, limit)
    with whole_file(path, overwrite=overwrite) as file:
        with open_sink(suffix, file, form) as sink:
            for batch in accepted(ledger, form.read):
                tally.take(batch, sink)
                if on_progress is not None:
                    on_progress(batch.read_bytes, batch.total_bytes)
                if tally.limited:
                    break
        if not tally.exported:
            raise _nothing(ledger, form, output, tally.left_out)
        length = file.tell()
    return ExportReport(
        format=form.name,
        path=output,
        exported=tally.exported,
        left_out=dict(tally.left_out),
        supervised_tokens=tally.supervised_tokens if form.counts_tokens else None,
        lost_reasoning=tally.lost_reasoning,
        bytes=length,
        limited=tally.limited,
    )


class _Tally:
    """The counts of a running export."""

    def __init__(self, form: Format[Any], limit: int | None) -> None:
        self._form = form
        self._limit = limit
        self.exported = 0
        self.left_out = Counter[LeftOut]()
        self.supervised_tokens = 0
        self.lost_reasoning = 0
        self.limited = False

    def take(self, batch: Batch[Any], sink: Sink) -> None:
        """Write the batch's rows, up to the limit."""
        values = list[msgspec.Struct]()
        self.left_out.update(batch.left_out)
        for record in batch.records:
            if self._limit is not None and self.exported >= self._limit:
                self.limited = True
                break
            try:
                row = self._form.row(record)
            except CannotExpressError as error:
                self.left_out[error.reason] += 1
                continue
            values.append(row.value)
            self.exported += 1
            self.supervised_tokens += row.supervised_tokens
            self.lost_reasoning += row.lost_reasoning
        sink.write(values)


def _reasoning(text: str) -> Reasoning:
    try:
        return Reasoning(text)
    except ValueError:
        raise UsageError(f"--reasoning {text!r} is not known; choose one of {', '.join(Reasoning)}.") from None


def _refuse_own_files(path: Path) -> None:
    """Refuse to replace a dataset folder's files, which are the truth of a run."""
    folder = DatasetFolder(path.parent)
    own = {*FILE_OF_KIND.values(), folder.torn.name, folder.progress_log.name}
    if path.name.lower() in own:
        raise UsageError(f"{path.name} is the name of a dataset's own file; choose another --output.")


def _nothing(ledger: Ledger, form: Format[Any], output: Path, left_out: Counter[LeftOut]) -> NothingExportedError:
    why = " ".join(left_out_sentences(left_out)) or "it has no accepted records yet."
    message = f"Nothing of {ledger.folder.path} could be exported as {form.name}, and {output} was not written: {why}"
    return NothingExportedError(message, dict(left_out))
