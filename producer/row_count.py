"""How many rows a source has, where that is cheap to find out."""

from __future__ import annotations

from pathlib import Path

from app.errors import SourceError
from producer import sources

_CHEAP_BYTES = 64 * 2**20
"""As much as is read through for a count."""
_CHEAP_LINES_BYTES = 4 * 2**30
"""As much as lines are counted in."""
_LINES = frozenset({".jsonl", ".ndjson"})
_CHUNK = 2**20


def count(source: str, *, max_row_bytes: int) -> int | None:
    """Return the rows of a file or folder; None where they would have to be downloaded, or read for long."""
    path = Path(source).expanduser()
    if not path.exists():
        return None
    if path.suffix == ".parquet":
        import pyarrow.parquet  # noqa: PLC0415  slow to import

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if size <= _CHEAP_BYTES:
        try:
            return sum(1 for _row in sources.open_source(source, max_row_bytes=max_row_bytes).rows())
        except SourceError:
            return None  # what breaks off is told by whoever reads on
    return _lines(path) if path.suffix in _LINES and size <= _CHEAP_LINES_BYTES else None


def _lines(path: Path) -> int:
    lines, last = 0, b"\n"
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            lines += chunk.count(b"\n")
            last = chunk[-1:]
    return lines + (last != b"\n")
