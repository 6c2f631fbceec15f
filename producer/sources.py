"""Opens what the user named as a stream of rows: a file, a folder of files, or a Hugging Face dataset."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from app.errors import SourceError
from producer.formats import delimited, hub, json_array, json_lines, parquet
from producer.formats.hub import HubReference
from producer.formats.rows import Row
from producer.formats.text import COMPRESSIONS, check_text, reading

__all__ = ["Row", "RowSource", "open_source"]


class _Reader(Protocol):
    """Yields the rows of one file."""

    def __call__(self, path: Path, *, limit: int, name: str | None = None) -> Iterator[Row]: ...


@dataclasses.dataclass(frozen=True)
class _Format:
    """A file format: how to refuse a file before any row, and how to read its rows."""

    check: Callable[[Path], None]
    read: _Reader


_TEXT_FORMATS: dict[str, _Reader] = {
    ".jsonl": json_lines.read,
    ".ndjson": json_lines.read,
    ".json": json_array.read,
    ".csv": delimited.read,
    ".tsv": delimited.read,
}
_FORMATS = {
    **{
        suffix + compression: _Format(check_text, reader)
        for suffix, reader in _TEXT_FORMATS.items()
        for compression in ("", *COMPRESSIONS)
    },
    ".parquet": _Format(parquet.check, parquet.read),
}


@dataclasses.dataclass(frozen=True)
class RowSource:
    """An opened source, whose rows can be read again and again."""

    description: str
    """Where the rows come from: an absolute path or a full hub reference, without credentials."""
    _read: Callable[[], Iterator[Row]] = dataclasses.field(repr=False)
    limit: int | None = None
    """At most so many rows are read; None is all."""

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order, in bounded memory. Raises SourceError where the source breaks off."""
        return itertools.islice(self._read(), self.limit)


def open_source(source: str | HubReference, *, max_row_bytes: int, limit: int | None = None) -> RowSource:
    """Open a file (.jsonl, .ndjson, .json, .csv, .tsv, each also .gz or .zst, or .parquet), a folder, or `hf:...`.

    What is wrong with a source as a whole (missing, unreadable, no UTF-8 text, unknown ending) is found here, before
    any row. Rows larger than `max_row_bytes` come as problems. Raises SourceError.
    """
    if isinstance(source, HubReference):
        return _open_hub(source, max_row_bytes, limit)
    if source.startswith(hub.PREFIX):
        return _open_hub(hub.parse(source), max_row_bytes, limit)
    if re.match(r"[A-Za-z][\w+.-]*://", source):
        shown = re.sub(r"//[^/@\s]*@", "//", source)
        raise SourceError(f"{shown} is a URL, which cannot be read; download it and give the file's path.")
    if not source.strip() or "\0" in source:
        raise SourceError("The source's name is empty or no path; give a file, a folder or hf:org/name.")
    path = Path(source).expanduser()
    with reading(path):
        path = path.resolve()
        is_folder = path.is_dir()
    files: list[tuple[Path, str | None]] = [(path, None)]
    if is_folder:
        files = _files_in(path)
    for file, _ in files:
        _format_of(file).check(file)
    return RowSource(str(path), functools.partial(_rows_of_files, files, limit=max_row_bytes), limit)


def _open_hub(reference: HubReference, max_row_bytes: int, limit: int | None) -> RowSource:
    parts = reference.parts()
    loaded = [(part, hub.load(part)) for part in parts]
    names = [f"{part.config}/{part.split}" if len(parts) > 1 else None for part in parts]

    def read() -> Iterator[Row]:
        for (part, rows), name in zip(loaded, names, strict=True):
            yield from hub.read(part, rows, limit=max_row_bytes, name=name)

    return RowSource(reference.description, read, limit)


def _rows_of_files(files: list[tuple[Path, str | None]], *, limit: int) -> Iterator[Row]:
    for path, name in files:
        yield from _format_of(path).read(path, limit=limit, name=name)


def _ending(path: Path) -> str:
    """Return the file's ending as the table of formats knows it, compression included."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    return "".join(suffixes) if suffixes and suffixes[-1] in COMPRESSIONS else "".join(suffixes[-1:])


def _format_of(path: Path) -> _Format:
    found = _FORMATS.get(_ending(path))
    if found is None:
        with reading(path):
            path.stat()
        known = ", ".join([*_TEXT_FORMATS, ".parquet"])
        raise SourceError(
            f"{path} has no ending that promptmill reads; known are {known}, the text ones also with .gz or .zst."
        )
    return found


def _files_in(folder: Path) -> list[tuple[Path, str | None]]:
    """Return the readable files below a folder with their relative names, sorted by name, hidden ones left out."""
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        raise SourceError(f"{folder} was saved by the datasets library; give it as hf:{folder}.")
    names: list[str] = []
    with reading(folder):
        for parent, folders, files in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            names += [
                Path(parent, name).relative_to(folder).as_posix()
                for name in files
                if not name.startswith(".") and _ending(Path(name)) in _FORMATS
            ]
    if not names:
        raise SourceError(f"{folder} holds no file that promptmill reads ({', '.join(_TEXT_FORMATS)}, .parquet).")
    return [(folder / name, name) for name in sorted(names)]


def _raise(error: OSError) -> None:
    raise error
