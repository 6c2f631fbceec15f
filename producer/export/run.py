"""Write the accepted records of datasets as training files."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from app.errors import UsageError
from app.ledger import Ledger
from app.places import FILE_OF_KIND, DatasetFolder
from producer.export.base import Format, FormatOptions, LeftOut, Reasoning, Row
from producer.export.claims import Claims
from producer.export.formats import make_format
from producer.export.outputs import OutputFile, Outputs, ShardSize
from producer.export.report import ExportReport, NothingExportedError, left_out_sentences
from producer.export.selection import Batch, Selection, select
from producer.export.sinks import suffix_of
from producer.export.split import Split
from producer.turn_lines import TurnLines


def export(
    *ledgers: Ledger,
    format: str,  # noqa: A002 the option's own name
    output: Path,
    overwrite: bool = False,
    limit: int | None = None,
    options: FormatOptions | None = None,
    selection: Selection | None = None,
    split: Split | None = None,
    shard: ShardSize | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write each chosen record once to `output`, or to files named after it, whole or not at all.

    The suffix of `output` chooses JSONL (.jsonl, .jsonl.gz, .jsonl.zst), Parquet or Arrow. `limit` bounds the rows
    written. An id that several datasets have is written for the first of them. `on_progress` is told how many bytes of
    how many were read, after each batch. It may run while workers go on recording; what they append after the start
    is not read.

    Raises UsageError for a wrong option or an existing output, StoreError when the output cannot be written,
    NothingExportedError (and leaves the output as it was) when there is no row to write.
    """
    form = make_format(format, options)
    suffix_of(output)
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit} would export nothing; give a number of rows of at least 1.")
    path = real_path(output)
    with contextlib.ExitStack() as stack:
        outputs = stack.enter_context(Outputs(path, form, split=split, shard=shard, overwrite=overwrite))
        claims = stack.enter_context(Claims()) if len(ledgers) > 1 else None
        turns = {ledger: stack.enter_context(TurnLines(ledger)) for ledger in ledgers}
        tally = _Tally(form, limit, claims, turns)
        for batch in select(ledgers, form.read, selection or Selection()):
            tally.take(batch, outputs)
            if on_progress is not None:
                on_progress(batch.read_bytes, batch.total_bytes)
            if tally.limited:
                break
        if not tally.exported:
            raise _nothing(ledgers, form, output, tally.left_out)
        files = outputs.publish()
    return tally.report(output, files)


class _Tally:
    """The counts of a running export."""

    def __init__(
        self, form: Format[Any], limit: int | None, claims: Claims | None, turns: Mapping[Ledger, TurnLines]
    ) -> None:
        self._form = form
        self._limit = limit
        self._claims = claims
        self._turns = turns
        self.exported = 0
        self.left_out = Counter[LeftOut]()
        self.supervised_tokens = 0
        self.lost_reasoning = 0
        self.lost_earlier_reasoning = 0
        self.held_reasoning = 0
        self.lost_tools = 0
        self.limited = False

    def take(self, batch: Batch[Any], outputs: Outputs) -> None:
        """Write the batch's rows, up to the limit."""
        self.left_out.update(batch.left_out)
        made = list[tuple[str, list[Row]]]()
        for record, source in zip(batch.records, batch.sources, strict=True):
            id_, rows = record.id, list[Row]()
            for _, row in self._form.rows(record, self._turns[source]):
                if isinstance(row, LeftOut):
                    self.left_out[row] += 1
                else:
                    rows.append(row)
            if rows:
                made.append((id_, rows))
        fresh = self._claims.claim([id_ for id_, _ in made]) if self._claims else [True] * len(made)
        values = list[tuple[str, msgspec.Struct]]()
        for new, (id_, rows) in zip(fresh, made, strict=True):
            if not new:
                self.left_out[LeftOut.IN_ANOTHER_DATASET] += 1
                continue
            room = len(rows) if self._limit is None else self._limit - self.exported
            values += [(id_, self._counted(row)) for row in rows[:room]]
            if room < len(rows):
                self.limited = True
                break
        outputs.write(values)

    def _counted(self, row: Row) -> msgspec.Struct:
        self.exported += 1
        self.supervised_tokens += row.supervised_tokens
        self.lost_reasoning += row.lost_reasoning
        self.lost_earlier_reasoning += row.lost_earlier_reasoning
        self.held_reasoning += row.held_reasoning
        self.lost_tools += row.lost_tools
        return row.value

    def report(self, output: Path, files: Sequence[OutputFile]) -> ExportReport:
        """Return what was written to `output`, in these files behind all links."""
        form = self._form
        return ExportReport(
            format=form.name,
            path=output,
            files=[file._replace(path=output.with_name(file.path.name)) for file in files],
            left_out=dict(self.left_out),
            supervised_tokens=self.supervised_tokens if form.counts_tokens else None,
            lost_reasoning=self.lost_reasoning,
            lost_earlier_reasoning=self.lost_earlier_reasoning,
            keeps_reasoning_by=form.keeps_reasoning_by(),
            advice=form.advice() if self.held_reasoning else "",
            lost_tools=self.lost_tools,
            limited=self.limited,
            columns=form.columns(),
        )


def parse_reasoning(text: str) -> Reasoning:
    """Read a value of `--reasoning`; raises UsageError."""
    try:
        return Reasoning(text)
    except ValueError:
        raise UsageError(f"--reasoning {text!r} is not known; choose one of {', '.join(Reasoning)}.") from None


def real_path(output: Path) -> Path:
    """Return the output behind all links; raises UsageError for a dataset folder's files, the truth of a run."""
    path = Path(os.path.realpath(output))
    folder = DatasetFolder(path.parent)
    own = {*FILE_OF_KIND.values(), folder.torn.name, folder.quarantine.name, folder.progress_log.name}
    if path.name.lower() in own:
        raise UsageError(f"{path.name} is the name of a dataset's own file; choose another --output.")
    return path


def _nothing(
    ledgers: Sequence[Ledger], form: Format[Any], output: Path, left_out: Counter[LeftOut]
) -> NothingExportedError:
    why = (
        " ".join(left_out_sentences(left_out))
        or f"{'it has' if len(ledgers) == 1 else 'they have'} no accepted records yet."
    )
    of = ", ".join(str(ledger.folder.path) for ledger in ledgers)
    message = f"Nothing of {of} could be exported as {form.name}, and {output} was not written: {why}"
    return NothingExportedError(message, dict(left_out))
