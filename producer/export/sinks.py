"""How rows become bytes: JSONL (plain, gzip or zstd), Parquet or Arrow, as the output path's suffix says."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from app.errors import UsageError
from producer.export.base import Format

PARQUET, ARROW = ".parquet", ".arrow"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", PARQUET, ARROW)
"""What an output path may end in."""
_GZIP_LEVEL = 6
_ZSTD_LEVEL = 3


class Sink(Protocol):
    """Where rows go."""

    def write(self, rows: Sequence[msgspec.Struct]) -> None:
        """Write some rows."""

    def close(self) -> None:
        """Write what ends the file, and leave the file itself open."""

    def abandon(self) -> None:
        """Let go of a file that is thrown away."""


def suffix_of(path: Path) -> str:
    """Return which of the suffixes the path has, as it is written there; raises UsageError if none."""
    found = [suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)]
    if not found:
        raise UsageError(f"{path} does not say what to write; let --output end in one of {', '.join(SUFFIXES)}.")
    return path.name[-len(found[0]) :]


def make_sink(suffix: str, file: BinaryIO, form: Format[Any]) -> Sink:
    """Return the sink that writes into `file`.

    Raises UsageError when Parquet or Arrow is asked for and pyarrow is not installed.
    """
    kind = suffix.lower()
    return TableSink(kind, file, form) if kind in {PARQUET, ARROW} else JsonlSink(kind, file)


class JsonlSink:
    """One line a row, strict JSON."""

    def __init__(self, suffix: str, file: BinaryIO) -> None:
        self._encoder = msgspec.json.Encoder()
        self._compressor = _compressor(suffix, file)
        self._file = self._compressor or file

    def write(self, rows: Sequence[msgspec.Struct]) -> None:
        """Write a line for each row."""
        self._file.write(self._encoder.encode_lines(rows))

    def close(self) -> None:
        """End the compressed stream."""
        if self._compressor is not None:
            self._compressor.close()

    def abandon(self) -> None:
        """End the compressed stream; what cannot be written any more does not matter."""
        with contextlib.suppress(OSError, ValueError):
            self.close()


def _compressor(suffix: str, file: BinaryIO) -> Any:
    if suffix.endswith(".gz"):
        # Neither name nor time goes in, so that equal rows give equal bytes.
        return gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=file, mtime=0)
    if suffix.endswith(".zst"):
        import zstandard  # noqa: PLC0415 heavy

        return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).stream_writer(file, closefd=False)
    return None


class TableSink:
    """One row group (Parquet) or record batch (Arrow) for each batch of rows.

    Arrow files are IPC streams, which `datasets.Dataset.from_file` maps into memory and `load_dataset` reads.
    """

    def __init__(self, kind: str, file: BinaryIO, form: Format[Any]) -> None:
        try:
            import pyarrow as pa  # noqa: PLC0415 heavy
            import pyarrow.parquet as pq  # noqa: PLC0415 heavy
        except ImportError as error:
            raise UsageError(
                "Parquet and Arrow need pyarrow, which is not installed: run `pip install 'promptmill[data]'`, "
                "or let --output end in .jsonl."
            ) from error
        self._table = form.table
        schema = form.schema()
        if kind == ARROW:
            self._writer: Any = pa.ipc.new_stream(file, schema)
        else:
            # Texts and token runs hardly repeat as wholes: dictionaries cost time and save nothing.
            self._writer = pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=False)

    def write(self, rows: Sequence[msgspec.Struct]) -> None:
        """Write the rows as one group."""
        if rows:
            self._writer.write_table(self._table(rows))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()

    def abandon(self) -> None:
        """Write the footer; what cannot be written any more does not matter."""
        with contextlib.suppress(OSError, ValueError):
            self.close()
