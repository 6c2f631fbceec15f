"""Which tokens the answers use, and the draft vocabulary that EAGLE-3 trainers cut out of the model's with it.

`d2t[i]` is the difference between the target id of draft id i and i; `t2d[j]` tells whether target id j is in the draft
vocabulary. The draft vocabulary holds the most frequent ids of the answers (of equals the smaller id), filled up with
the smallest ids that are left, in ascending order. Only tokens that the model wrote are counted, as loss mask 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from app.errors import UsageError
from app.ledger import Ledger
from producer.export.atomic import refuse_existing, whole_file
from producer.export.base import LeftOut
from producer.export.claims import Claims
from producer.export.formats import FREQUENCIES
from producer.export.report import NothingExportedError, left_out_sentences, size_words
from producer.export.run import real_path
from producer.export.selection import Selection, select
from producer.export.tokens import Tokens, written_ids
from producer.turn_lines import TurnLines

SAFETENSORS, TORCH, NUMPY = ".safetensors", ".pt", ".npz"
SUFFIXES = (SAFETENSORS, TORCH, NUMPY)
"""What the output of `vocab` and `token-freq` may end in."""


@dataclasses.dataclass(frozen=True)
class DraftVocabulary:
    """Which of the target's ids the draft model knows."""

    ids: Sequence[int]
    """Target ids in ascending order; the place of an id is its draft id."""
    target_size: int
    covered: int
    """Tokens of the answers that are in it."""
    total: int
    """Tokens of the answers."""


@dataclasses.dataclass(frozen=True)
class VocabularyReport:
    """What an export of token counts or of a vocabulary did."""

    path: Path
    records: int
    distinct: int
    """Ids that occur in the answers."""
    total: int
    vocabulary: DraftVocabulary | None
    left_out: Mapping[LeftOut, int]
    bytes: int

    def sentences(self) -> list[str]:
        """Say it for a person, one fact a line."""
        counted = f"{self.total:,} output tokens of {self.records:,} records counted, {self.distinct:,} different ones"
        said = [f"{counted}; {self.path} written ({size_words(self.bytes)})."]
        if self.vocabulary is not None:
            share = 100 * self.vocabulary.covered / self.vocabulary.total
            said.append(
                f"{len(self.vocabulary.ids):,} of {self.vocabulary.target_size:,} ids cover {share:.2f} % of them."
            )
        return said + left_out_sentences(self.left_out)


def draft_vocabulary(counts: Mapping[int, int], *, draft_size: int, target_size: int) -> DraftVocabulary:
    """Choose the draft vocabulary; raises UsageError when the sizes contradict the counts or each other."""
    if not 0 < draft_size <= target_size:
        raise UsageError(f"--draft-vocab-size {draft_size} must be at least 1 and at most --vocab-size {target_size}.")
    largest = max(counts)
    if largest >= target_size:
        raise UsageError(
            f"The answers hold token id {largest}, which a vocabulary of {target_size} does not have; "
            "give the model's own --vocab-size (vocab_size in its config.json)."
        )
    chosen = set(heapq.nsmallest(draft_size, counts, key=lambda id_: (-counts[id_], id_)))
    for id_ in range(target_size):
        if len(chosen) == draft_size:
            break
        chosen.add(id_)
    covered = sum(counts.get(id_, 0) for id_ in chosen)
    return DraftVocabulary(sorted(chosen), target_size, covered, sum(counts.values()))


def export_vocabulary(
    *ledgers: Ledger,
    format: str,  # noqa: A002 the option's own name
    output: Path,
    vocab_size: int | None,
    draft_vocab_size: int | None = None,
    overwrite: bool = False,
    selection: Selection | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VocabularyReport:
    """Count the answers' tokens and write the counts (`token-freq`) or the draft vocabulary with them (`vocab`).

    Raises UsageError for wrong options or a missing library, NothingExportedError without any exact ids.
    """
    check_vocabulary(format, output, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size)
    suffix = _suffix_of(output)
    _load_library(suffix)
    path = real_path(output)
    refuse_existing(path, overwrite=overwrite)
    counts, records, left_out = _count(ledgers, selection or Selection(), on_progress)
    if not counts:
        why = " ".join(left_out_sentences(left_out)) or "there are no accepted records yet."
        raise NothingExportedError(f"No output ids could be counted, and {output} was not written: {why}", left_out)
    vocabulary = None
    if format != FREQUENCIES:
        vocabulary = draft_vocabulary(counts, draft_size=draft_vocab_size or 0, target_size=vocab_size or 0)
    with whole_file(path, overwrite=overwrite) as file:
        _write(suffix, file, counts, vocab_size or max(counts) + 1, vocabulary)
        length = file.tell()
    return VocabularyReport(output, records, len(counts), counts.total(), vocabulary, dict(left_out), length)


def _suffix_of(output: Path) -> str:
    suffix = output.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"{output} does not say what to write; let --output end in one of {', '.join(SUFFIXES)}.")
    return suffix


def check_vocabulary(format_: str, output: Path, *, vocab_size: int | None, draft_vocab_size: int | None) -> None:
    """Refuse options that the format does not take or lacks, and an output that says no form. Raises UsageError."""
    _suffix_of(output)
    if format_ == FREQUENCIES:
        if draft_vocab_size is not None:
            raise UsageError(f"The format {FREQUENCIES} has no --draft-vocab-size; --format vocab has.")
    elif vocab_size is None or draft_vocab_size is None:
        raise UsageError(f"--format {format_} needs --vocab-size (the model's) and --draft-vocab-size (such as 32000).")


def _load_library(suffix: str) -> None:
    """Find out before the records are read whether the output can be written."""
    if suffix == TORCH:
        _torch()
    elif suffix == SAFETENSORS:
        _safetensors()
    else:
        _numpy()


def _count(
    ledgers: Sequence[Ledger], selection: Selection, on_progress: Callable[[int, int], None] | None
) -> tuple[Counter[int], int, Counter[LeftOut]]:
    form, counts, left_out, records = Tokens(), Counter[int](), Counter[LeftOut](), 0
    with contextlib.ExitStack() as stack:
        claims = stack.enter_context(Claims())
        turns = {ledger: stack.enter_context(TurnLines(ledger)) for ledger in ledgers}
        for batch in select(ledgers, form.read, selection):
            left_out.update(batch.left_out)
            fresh = claims.claim([record.id for record in batch.records]) if len(ledgers) > 1 else None
            for place, record in enumerate(batch.records):
                if fresh is not None and not fresh[place]:
                    left_out[LeftOut.IN_ANOTHER_DATASET] += 1
                    continue
                for _, row in form.rows(record, turns[batch.sources[place]]):
                    if isinstance(row, LeftOut):
                        left_out[row] += 1
                        continue
                    counts.update(written_ids(row))
                    records += 1
            if on_progress is not None:
                on_progress(batch.read_bytes, batch.total_bytes)
    return counts, records, left_out


def _write(
    suffix: str, file: BinaryIO, counts: Mapping[int, int], size: int, vocabulary: DraftVocabulary | None
) -> None:
    if suffix == TORCH:
        _write_torch(file, counts, vocabulary)
        return
    np = _numpy()
    if max(counts) >= size:
        raise UsageError(f"The answers hold token id {max(counts)}, which a vocabulary of {size} does not have.")
    frequencies = np.zeros(size, dtype=np.int64)
    frequencies[list(counts)] = list(counts.values())
    arrays = {"token_freq": frequencies}
    if vocabulary is not None:
        ids = np.asarray(vocabulary.ids, dtype=np.int64)
        arrays["d2t"] = ids - np.arange(len(ids), dtype=np.int64)
        arrays["t2d"] = np.zeros(size, dtype=np.bool_)
        arrays["t2d"][ids] = True
    if suffix == NUMPY:
        np.savez(file, **arrays)
    else:
        file.write(_safetensors().save(arrays))


def _write_torch(file: BinaryIO, counts: Mapping[int, int], vocabulary: DraftVocabulary | None) -> None:
    """Write what the trainers' own scripts write: a dict of counts, or of the two tensors."""
    torch = _torch()
    if vocabulary is None:
        torch.save(dict(counts), file)
        return
    ids = torch.tensor(list(vocabulary.ids), dtype=torch.long)
    t2d = torch.zeros(vocabulary.target_size, dtype=torch.bool)
    t2d[ids] = True
    torch.save({"d2t": ids - torch.arange(len(ids), dtype=torch.long), "t2d": t2d}, file)


def _numpy() -> Any:
    try:
        import numpy as np  # noqa: PLC0415 heavy
    except ImportError as error:
        raise _missing("numpy", "train") from error
    return np


def _safetensors() -> Any:
    _numpy()
    try:
        import safetensors.numpy as st  # noqa: PLC0415 heavy
    except ImportError as error:
        raise _missing("safetensors", "train") from error
    return st


def _torch() -> Any:
    try:
        import torch  # noqa: PLC0415 heavy
    except ImportError as error:
        raise _missing("torch", "torch") from error
    return torch


def _missing(library: str, extra: str) -> UsageError:
    return UsageError(
        f"This output needs {library}, which is not installed: run `pip install 'promptmill[{extra}]'`, or choose "
        f"another ending ({', '.join(SUFFIXES)})."
    )
