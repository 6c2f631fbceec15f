"""How rows become bytes: JSONL (plain, gzip or zstd) or Parquet, as the output path's suffix says."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from app.errors import UsageError
from producer.export.base import Format

PARQUET = ".parquet"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", PARQUET)
"""What an output path may end in."""
_GZIP_LEVEL = 6
_ZSTD_LEVEL = 3


class Sink(Protocol):
    """Where rows go."""

    def write(self, rows: Sequence[msgspec.Struct]) -> None:
        """Write some rows."""

    def close(self) -> None:
        """Write what ends the file, and leave the file itself open."""


def suffix_of(path: Path) -> str:
    """Return which of the suffixes the path has; raises UsageError if none."""
    found = [suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)]
    if not found:
        raise UsageError(f"{path} does not say what to write; let --output end in one of {', '.join(SUFFIXES)}.")
    return found[0]


@contextlib.contextmanager
def open_sink(suffix: str, file: BinaryIO, form: Format[Any]) -> Iterator[Sink]:
    """Yield the sink that writes into `file`, and end it properly when the block ends well.

    Raises UsageError when Parquet is asked for and pyarrow is not installed.
    """
    sink = ParquetSink(file, form) if suffix == PARQUET else JsonlSink(suffix, file)
    try:
        yield sink
    except BaseException:
        # The file is thrown away; its sink must not stay open, and what it cannot write any more does not matter.
        with contextlib.suppress(OSError, ValueError):
            sink.close()
        raise
    sink.close()


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


def _compressor(suffix: str, file: BinaryIO) -> Any:
    if suffix.endswith(".gz"):
        # Neither name nor time goes in, so that equal rows give equal bytes.
        return gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=file, mtime=0)
    if suffix.endswith(".zst"):
        import zstandard  # noqa: PLC0415 heavy

        return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).stream_writer(file, closefd=False)
    return None


class ParquetSink:
    """One row group for each batch of rows."""

    def __init__(self, file: BinaryIO, form: Format[Any]) -> None:
        try:
            import pyarrow.parquet as pq  # noqa: PLC0415 heavy
        except ImportError as error:
            raise UsageError(
                "Parquet needs pyarrow, which is not installed: run `pip install 'promptmill[data]'`, "
                "or let --output end in .jsonl."
            ) from error
        self._table = form.table
        # Texts and token runs hardly repeat as wholes: dictionaries cost time and save nothing.
        self._writer = pq.ParquetWriter(file, form.schema(), compression="zstd", use_dictionary=False)

    def write(self, rows: Sequence[msgspec.Struct]) -> None:
        """Write the rows as one row group."""
        if rows:
            self._writer.write_table(self._table(rows))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()
