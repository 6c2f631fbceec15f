"""The files that an export writes: one, one for each split, or shards of them, which appear together at its end."""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from app import jsonl
from app.errors import UsageError
from producer.export.atomic import PendingFile, refuse_existing, sweep
from producer.export.base import Format
from producer.export.sinks import JsonlSink, Sink, make_sink, suffix_of
from producer.export.split import Split

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"([0-9][0-9_]*)\s*([a-z]*)", re.IGNORECASE)
_ALL = ""
"""The name of the only part of an output without splits."""


@dataclasses.dataclass(frozen=True)
class ShardSize:
    """How large a file may grow before the next one is begun; one of the two is None."""

    rows: int | None = None
    bytes: int | None = None
    """A file ends with the batch of records (some 4 MB) that reaches it."""


def parse_shard_size(text: str) -> ShardSize:
    """Read `50000` (rows) or `500MB` (bytes); raises UsageError."""
    found = _SIZE.fullmatch(text.strip())
    number = int(found.group(1)) if found else 0
    unit = found.group(2).lower() if found else ""
    if number < 1 or unit not in _UNITS:
        raise UsageError(f"--shard-size {text!r} cannot be used; give rows (50000) or bytes (500MB, 2GiB).")
    return ShardSize(bytes=number * _UNITS[unit]) if unit else ShardSize(rows=number)


class OutputFile(NamedTuple):
    """A file that an export has written."""

    path: Path
    split: str
    """Empty without splits."""
    rows: int
    bytes: int


class _Open:
    """A file that is being written, and its sink."""

    def __init__(self, pending: PendingFile, sink: Sink) -> None:
        self.pending = pending
        self.sink: Sink | None = sink
        self.rows = 0
        self.bytes = 0


class Outputs:
    """Writes rows to the files of one export; use it as a context manager.

    All files are written under temporary names, fsynced, and renamed together by `publish`, so that nothing half
    appears under a final name. Older shards of the same name that the new ones do not replace are removed then.
    """

    def __init__(
        self, path: Path, form: Format[Any], *, split: Split | None, shard: ShardSize | None, overwrite: bool
    ) -> None:
        self._path = path
        self._form = form
        self._split = split
        self._shard = shard
        self._overwrite = overwrite
        self._suffix = suffix_of(path)
        self._parts: dict[str, list[_Open]] = {name: [] for name in (split.names if split else (_ALL,))}
        self._refuse_existing()

    def __enter__(self) -> Self:
        if self._shard is not None:
            for base in map(self._base, self._parts):
                sweep(self._path.parent, f".{glob.escape(base)}-[0-9]*{self._suffix}.tmp")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in self._parts.values():
            for one in part:
                if one.sink is not None:
                    one.sink.abandon()
                one.pending.discard()

    def write(self, rows: Sequence[tuple[str, msgspec.Struct]]) -> None:
        """Write rows, each with its id."""
        with jsonl.translated(self._path):
            if self._split is None:
                self._write(_ALL, [value for _, value in rows])
                return
            sorted_out: dict[str, list[msgspec.Struct]] = {name: [] for name in self._parts}
            for id_, value in rows:
                sorted_out[self._split.of(id_)].append(value)
            for name, values in sorted_out.items():
                self._write(name, values)

    def publish(self) -> list[OutputFile]:
        """Give all files their names; return them in order. Parts without rows have no file."""
        with jsonl.translated(self._path):
            for part in self._parts.values():
                if part:
                    self._finish(part[-1])
            self._refuse_existing()
            files = []
            for path, split, one in list(self._named()):
                one.pending.rename(path)
                files.append(OutputFile(path, split, one.rows, one.bytes))
            for part in self._parts.values():
                part.clear()
            self._remove_older({file.path for file in files})
            jsonl.fsync_folder(self._path.parent)
        return files

    def _write(self, name: str, values: list[msgspec.Struct]) -> None:
        while values:
            current = self._current(name)
            room = len(values)
            if self._shard is not None and self._shard.rows is not None:
                room = self._shard.rows - current.rows
            taken, values = values[:room], values[room:]
            if isinstance(current.sink, JsonlSink) and not current.rows:
                taken[0] = self._form.opening(taken[0])
            assert current.sink is not None  # noqa: S101 `_current` gives open files alone
            current.sink.write(taken)
            current.rows += len(taken)

    def _current(self, name: str) -> _Open:
        """Return the file that the next row of a part goes to."""
        part = self._parts[name]
        if not part or self._is_full(part[-1]):
            if part:
                self._finish(part[-1])
            number = f"-{len(part):05d}" if self._shard else ""
            pending = PendingFile.open(self._path.with_name(f"{self._base(name)}{number}{self._suffix}"))
            try:
                part.append(_Open(pending, make_sink(self._suffix, pending.file, self._form)))
            except BaseException:
                pending.discard()
                raise
        return part[-1]

    def _is_full(self, one: _Open) -> bool:
        if self._shard is None:
            return False
        if self._shard.rows is not None:
            return one.rows >= self._shard.rows
        return one.pending.file.tell() >= (self._shard.bytes or 0)

    def _finish(self, one: _Open) -> None:
        if one.sink is not None:
            one.sink.close()
            one.sink = None
            one.bytes = one.pending.sync()

    def _base(self, name: str) -> str:
        stem = self._path.name[: -len(self._suffix)]
        return f"{stem}-{name}" if name else stem

    def _named(self) -> Iterator[tuple[Path, str, _Open]]:
        """Yield each file's final path and split; shards are named as the Hugging Face hub names them."""
        for name, part in self._parts.items():
            for number, one in enumerate(part):
                place = f"-{number:05d}-of-{len(part):05d}" if self._shard else ""
                yield self._path.with_name(f"{self._base(name)}{place}{self._suffix}"), name, one

    def _older(self) -> Iterator[Path]:
        """Yield the files that this export replaces."""
        for base in map(self._base, self._parts):
            if self._shard is None:
                yield self._path.with_name(f"{base}{self._suffix}")
                continue
            shard = re.compile(rf"{re.escape(base)}-\d{{5}}-of-\d{{5}}{re.escape(self._suffix)}")
            if self._path.parent.is_dir():
                yield from (path for path in sorted(self._path.parent.iterdir()) if shard.fullmatch(path.name))

    def _refuse_existing(self) -> None:
        for path in self._older():
            refuse_existing(path, overwrite=self._overwrite)

    def _remove_older(self, kept: set[Path]) -> None:
        if self._shard is not None or self._split is not None:
            for path in list(self._older()):
                if path not in kept:
                    path.unlink(missing_ok=True)
