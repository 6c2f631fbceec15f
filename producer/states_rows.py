"""Writes the rows that speculators reads beside its files of hidden states: row i belongs to `hs_i.safetensors`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from app import jsonl
from app.errors import StoreError, UsageError
from app.extraction import Sequence, decode_source, exact_sequence
from app.ledger import Ledger
from app.records import Kind, KnownSample

_decode_known = msgspec.json.Decoder(KnownSample).decode


def require_datasets() -> None:
    """Raise UsageError with what to install, where the `datasets` package is missing."""
    try:
        import datasets  # noqa: F401, PLC0415 heavy
    except ImportError as error:
        message = "--layout speculators writes rows beside the states, with the package datasets; pip install "
        raise UsageError(f"{message}'promptmill[data]'.") from error


def write_rows(source: Ledger, target: Ledger, folder: Path) -> int:
    """Write every sample's `input_ids`, `loss_mask` and `seq_len` in the order of the numbers; return how many.

    It is what `speculators prepare-data` would write, less its shuffling, by which no file could be found again.
    Raises StoreError where the source has lost a record.
    """
    import datasets  # noqa: PLC0415 heavy
    from datasets.arrow_writer import ArrowWriter  # noqa: PLC0415 heavy

    numbers = datasets.Sequence(datasets.Value("int64"))
    features = datasets.Features(input_ids=numbers, loss_mask=numbers, seq_len=datasets.Value("int64"))
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".rows-") as scratch, jsonl.translated(folder):
        file = str(Path(scratch) / "rows.arrow")
        with ArrowWriter(path=file, features=features) as writer:
            for sequence in _sequences(source, target):
                writer.write({"input_ids": sequence.ids, "loss_mask": sequence.mask, "seq_len": len(sequence)})
            writer.finalize()
        made = datasets.Dataset.from_file(file)
        for old in folder.glob("data-*-of-*.arrow"):
            old.unlink()
        made.save_to_disk(str(folder))
        count = len(made)
        del made
    state = folder / "state.json"
    # Its reader wants tensors. Saying so through datasets would need torch here.
    document = {**json.loads(state.read_text(encoding="utf-8")), "_format_type": "torch"}
    jsonl.replace_file(state, json.dumps(document, indent=2).encode() + b"\n")
    return count


def _sequences(source: Ledger, target: Ledger) -> Iterator[Sequence]:
    """Yield the ids of every sample that the extraction ever took, in the order of their numbers.

    A repair may have written lines of samples.jsonl in another order.
    """
    lines = jsonl.read_lines(target.folder.lines(Kind.PENDING))
    known = [_decode_known(line.data) for line in lines if line.whole]
    for place, (number, id_) in enumerate(sorted((sample.row or 0, sample.id) for sample in known), start=1):
        if number != place:
            raise StoreError(
                f"{target.folder.lines(Kind.PENDING)} has lost or doubled the sample number {min(number, place)}, and "
                "rows are found by their numbers; extract into another dataset, with --into NAME.hidden."
            )
        entry = source.look_up([id_]).get(id_)
        found = exact_sequence(decode_source(source.read(entry, id_))) if entry is not None else None
        if not isinstance(found, Sequence):
            raise StoreError(f"{source.folder.path} has lost the record of {id_}; the rows cannot be written.")
        yield found
