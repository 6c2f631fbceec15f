"""A dataset folder's memory: the JSONL files are the truth, `index.sqlite` is their rebuildable index."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import msgspec

from app import exchange, jsonl
from app.errors import DiskFullError, StoreError, UnwritableError
from app.file_state import FileState
from app.head import decode_head, is_record
from app.index import CHUNK, Entry, Index, IndexTransaction, Totals
from app.lock import FolderLock
from app.mounts import is_shared
from app.places import DatasetFolder
from app.records import Kind

_HEAD_BYTES = 256
"""How far from its line's start an id ends at most, beside its own length."""
_TOO_LITTLE_BYTES = 1024 * 1024
"""Free space below which whatever goes wrong is taken for want of space."""
_Result = TypeVar("_Result")


class Pen(NamedTuple):
    """One line to be written."""

    kind: Kind
    id: str
    line: bytes
    r"""The encoded line, `\n` included."""
    reason: str = ""
    round: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Committed:
    """What became of a group of lines."""

    new: list[bool]
    """Whether each line was written; False for one whose id was recorded already."""
    mended: list[jsonl.Mending]
    pens: Sequence[Pen]
    """The lines as they were written, or would have been."""


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A whole line that is not a record."""

    path: Path
    offset: int
    length: int


class Ledger:
    """One dataset folder, opened for reading and appending by any number of threads and processes.

    Every change happens under the folder's lock (flock); reads of the index need none. Processes of several machines
    may share a folder on a network disk, which has an index without a write-ahead log (app/mounts.py tells which).
    """

    def __init__(self, folder: DatasetFolder, *, patience_s: float | None = None) -> None:
        """Whoever needs the lock raises LockedError after `patience_s`, or waits for ever without it."""
        self.folder = folder
        self._shared = is_shared(folder.path)
        self._index = Index(folder.shared_index if self._shared else folder.index, shared=self._shared)
        self._lock = FolderLock(folder.lock, patience_s=patience_s)

    @classmethod
    def open(cls, folder: DatasetFolder, *, patience_s: float | None = None) -> Self:
        """Open the folder, creating it where it does not exist, and prove that it can be written.

        Raises UnwritableError or DiskFullError.
        """
        ledger = cls(folder, patience_s=patience_s)
        with jsonl.translated(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
        ledger.check_writable()
        return ledger

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def check_writable(self, *, min_free_bytes: int = 0) -> None:
        """Prove that every file of the folder can be appended to.

        Raises UnwritableError, or DiskFullError when less than `min_free_bytes` are free.
        """
        probe = self.folder.path / f".probe-{os.getpid()}-{threading.get_ident()}"
        with jsonl.translated(self.folder.path):
            try:
                probe.write_bytes(b"ok\n")
            finally:
                probe.unlink(missing_ok=True)
            disk = os.statvfs(self.folder.path)
        free = disk.f_bavail * disk.f_frsize
        if free < min_free_bytes:
            raise DiskFullError(
                f"{self.folder.path} has {free // 2**20} MiB free, and at least {min_free_bytes // 2**20} MiB are "
                "needed; free some space first."
            )
        for path in [
            *map(self.folder.lines, Kind),
            self.folder.lock,
            self.folder.torn,
            self.folder.quarantine,
            self._index.path,
            self.folder.manifest,
        ]:
            if path.is_symlink() and not path.exists():
                raise UnwritableError(f"{path} is a link to nothing; remove the link or create its target.")
            # Never open the index beside SQLite: closing it drops this process's locks on it, and the next process
            # that closes it deletes the write-ahead log under the connections that are still open here.
            can_write = _may_write if path == self._index.path else _can_append
            if path.exists() and not (path.is_file() and can_write(path)):
                raise UnwritableError(f"{path} is not a file that can be written; check it and its rights.")

    @property
    def index_path(self) -> Path:
        """The index, which has another name on a network disk."""
        return self._index.path

    # Reading

    def look_up(self, ids: Iterable[str]) -> dict[str, Entry]:
        """Return what is known of those ids; unknown ids are left out."""
        wanted = list(ids)
        return self._reading(lambda: self._index.look_up(wanted))

    def totals(self) -> Totals:
        """Return the counts by kind and by reason."""
        return self._reading(self._index.totals)

    def entries(self, *kinds: Kind) -> Iterator[tuple[str, Entry]]:
        """Yield the ids of those kinds (of all without one) in id order, in bounded memory."""
        last = ""
        while page := self._reading(functools.partial(self._index.page, last, *kinds)):
            yield from page
            last = page[-1][0]

    def starting_with(self, beginning: str) -> list[str]:
        """Return the first ids that begin so, at most 1,000, in order."""
        page = self._reading(functools.partial(self._index.page, beginning))
        return [id_ for id_, _entry in page if id_.startswith(beginning)]

    def bad_lines(self) -> list[BadLine]:
        """Return the whole lines that are not records."""
        rows = self._reading(self._index.bad_lines)
        return [BadLine(self.folder.lines(kind), offset, length) for kind, offset, length in rows]

    def duplicates(self) -> int:
        """Return how many accepted lines repeat an id that an earlier line has."""
        return self._reading(self._index.duplicates)

    def read(self, entry: Entry, id_: str | None = None) -> bytes:
        r"""Return an entry's line without its `\n`; with its id, also if it was moved since it was looked up."""
        path = self.folder.lines(entry.kind)
        if id_ is None:
            return jsonl.read_span(path, entry.offset, entry.length)
        data = jsonl.read_span(path, entry.offset, entry.length + 1) if path.exists() else b""
        is_there = msgspec.json.encode(id_) in data[: len(id_) * 6 + _HEAD_BYTES]
        if is_there and data.find(b"\n") == entry.length:
            return data[:-1]
        self.catch_up()
        now = self.look_up([id_]).get(id_, entry)
        return jsonl.read_span(self.folder.lines(now.kind), now.offset, now.length)

    def _reading(self, read: Callable[[], _Result]) -> _Result:
        try:
            return read()
        except sqlite3.DatabaseError:
            with self._locked():
                self._catch_up()  # it may only have been missing, and somebody else may have made it meanwhile
                try:
                    return read()
                except sqlite3.OperationalError:
                    raise
                except sqlite3.DatabaseError:
                    self._index.forget()
                    self._index.make()
                    self._catch_up()
                    return read()

    # Writing

    def catch_up(self) -> list[jsonl.Mending]:
        """Index what others appended and mend torn tails; return what was mended."""
        with self._locked():
            return self._catch_up()

    def rebuild(self) -> list[jsonl.Mending]:
        """Index every file anew; return what was mended."""
        with self._locked():
            return self._rebuild()

    def commit(
        self,
        pens: Sequence[Pen],
        *,
        known_too: bool = False,
        revise: Callable[[Sequence[Pen]], Sequence[Pen]] | None = None,
    ) -> Committed:
        """Write lines durably, one fsync per file, and index them.

        A line whose id is recorded already (or, for a retry, recorded in its round) is not written, unless
        `known_too` says so, for lines that their file has lost. `revise` has the last word on the lines under the
        lock, one for one.
        Raises StoreError when nothing, or only the lines of another kind, could be written; call it again then.
        """
        with self._locked():
            mended = self._catch_up()
            pens = revise(pens) if revise else pens
            known = self._index.look_up([pen.id for pen in pens])
            new, groups = [], dict[Kind, list[Pen]]()
            for pen in pens:
                fresh = known_too or _is_new(known.get(pen.id), pen)
                new.append(fresh)
                if fresh:
                    groups.setdefault(pen.kind, []).append(pen)
                    known[pen.id] = Entry(pen.kind, pen.reason, pen.round, 0, 0, 0)
            for kind, group in groups.items():
                self._write(kind, group)
            return Committed(new, mended, pens)

    def _write(self, kind: Kind, group: Sequence[Pen]) -> None:
        path = self.folder.lines(kind)
        try:
            data = b"".join([pen.line for pen in group])
            appended = jsonl.append(path, data)
        except StoreError:
            # The failed write was taken back, which changed the file's time but not its lines.
            with contextlib.suppress(OSError, sqlite3.Error), self._index.transaction() as change:
                if path.stat().st_size == self._index.files().get(kind, FileState()).size:
                    change.set_file(kind, FileState.of(path), duplicates=0)
            raise
        rows, offset = [], appended.offset
        for pen in group:
            rows.append((pen.id, Entry(kind, pen.reason, pen.round, offset, len(pen.line) - 1, pen.tokens)))
            offset += len(pen.line)
        try:
            with self._index.transaction() as change:
                change.merge(rows)
                change.set_file(kind, FileState.after(path, appended, data), duplicates=0)
        except sqlite3.Error:
            self._index.close()  # the lines are durable; whoever looks next indexes them

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, for files beside the lines (the manifest); an exchange of files is ended first.

        Raises LockedError when patience ends.
        """
        with self._lock.held():
            exchange.finish(self.folder, shared=self._shared)
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self.locked():
            try:
                self._index.make()
                yield
            except sqlite3.OperationalError as error:
                self._index.close()  # a new connection may do what this one cannot any more
                raise self._index_trouble(error) from error
            except sqlite3.DatabaseError as error:
                self._index.forget()
                raise StoreError(f"{self._index.path} was damaged ({error}); it is rebuilt at the next use.") from error

    def _index_trouble(self, error: sqlite3.OperationalError) -> StoreError:
        # On a full disk SQLite also says "disk I/O error", where its shared memory cannot grow.
        with contextlib.suppress(OSError):
            disk = os.statvfs(self.folder.path)
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL or disk.f_bavail * disk.f_frsize < _TOO_LITTLE_BYTES:
                return DiskFullError(f"{self._index.path} cannot grow: {error}; free some space and the work goes on.")
        return StoreError(f"{self._index.path} cannot be used: {error}; check the disk.")

    def _catch_up(self) -> list[jsonl.Mending]:
        try:
            seen = self._index.files()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            self._index.forget()
            self._index.make()
            seen = {}
        mended = list[jsonl.Mending]()
        if self._shared:
            list(self.folder.path.iterdir())  # a network disk may remember for seconds that a file is not there
        for kind in Kind:
            path, before = self.folder.lines(kind), seen.get(kind, FileState())
            try:
                now = self._stat(path)
            except FileNotFoundError:
                if kind in seen:
                    return self._rebuild()
                continue
            if before.is_still(now):
                continue
            if before.size and not before.only_grew(path, now):
                # Cut, edited or replaced by hand: nothing that the index says of it can be trusted.
                return self._rebuild()
            with self._index.transaction() as change:
                mended += self._index_from(change, kind, before.size)
        return mended

    def _stat(self, path: Path) -> os.stat_result:
        if not self._shared:
            return path.stat()
        # A network disk tells the true size of a file that is being opened, and else that of seconds ago.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def _rebuild(self) -> list[jsonl.Mending]:
        mended = list[jsonl.Mending]()
        with self._index.transaction() as change:
            change.clear()
            for kind in Kind:
                if self.folder.lines(kind).exists():
                    mended += self._index_from(change, kind, 0)
        return mended

    def _index_from(self, change: IndexTransaction, kind: Kind, start: int) -> list[jsonl.Mending]:
        """Index the lines of one file from byte `start` on, mending its tail."""
        path, mended = self.folder.lines(kind), list[jsonl.Mending]()
        rows, duplicates = list[tuple[str, Entry]](), 0
        for line in jsonl.read_lines(path, start):
            data = line.data
            if not line.whole:
                follows = self.folder.torn_words(kind)
                mended.append(jsonl.mend_tail(path, self.folder.torn, line, is_record=is_record, follows=follows))
                data = data.rstrip(b"\0")
                if mended[-1].cut:
                    break
            try:
                head = decode_head(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                change.add_bad_line(kind, line.offset, len(data))
                continue
            entry = Entry(kind, head.reason or "", head.round, line.offset, len(data), head.tokens)
            rows.append((head.id, entry))
            if len(rows) >= 10 * CHUNK:
                duplicates += change.merge(rows)
                rows.clear()
        duplicates += change.merge(rows)
        change.set_file(kind, FileState.of(path), duplicates=duplicates)
        return mended


def _is_new(old: Entry | None, pen: Pen) -> bool:
    if old is None:
        return True
    if old.kind is Kind.REFUSED and pen.kind is not Kind.REFUSED:
        return True  # what was refused under other limits is taken now
    if old.kind is Kind.ACCEPTED or pen.kind in {Kind.PENDING, Kind.REFUSED}:
        return False
    return old.kind is Kind.PENDING or pen.round > old.round


def _can_append(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
