"""The SQLite index of a dataset folder: id -> kind, place and tokens; a cache that can be deleted at any time."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from app.errors import UnwritableError
from app.file_state import FileState
from app.records import Kind

INDEX_VERSION = 1
"""Raised with the schema; an index of another version is rebuilt."""
CHUNK = 500
"""Ids per SQL statement."""

_RANK = {Kind.REFUSED: 0, Kind.PENDING: 1, Kind.FAILED: 2, Kind.REJECTED: 3, Kind.ACCEPTED: 4}
_CODE = {kind: code for code, kind in enumerate(Kind)}
_KIND = dict(enumerate(Kind))
_COLUMNS = "id, kind, reason, round, offset, length, tokens"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id TEXT PRIMARY KEY, kind INTEGER NOT NULL, reason TEXT NOT NULL, round INTEGER NOT NULL,
    offset INTEGER NOT NULL, length INTEGER NOT NULL, tokens INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tallies (
    kind INTEGER NOT NULL, reason TEXT NOT NULL, n INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (kind, reason)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (
    kind INTEGER PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, inode INTEGER NOT NULL,
    tail BLOB NOT NULL, duplicates INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS bad_lines (
    kind INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, PRIMARY KEY (kind, offset)) WITHOUT ROWID;
"""


class Entry(NamedTuple):
    """What the index knows of an id."""

    kind: Kind
    reason: str
    """Why it was refused, rejected or failed; empty otherwise."""
    round: int
    """The newest round that is on disk."""
    offset: int
    length: int
    tokens: int
    """Completion tokens; 0 where unknown."""

    def settles(self, round_: int) -> bool:
        """Tell whether a sample that waits in that round is recorded, in it or for good."""
        if self.kind in {Kind.PENDING, Kind.REFUSED}:
            return False
        return self.kind is Kind.ACCEPTED or self.round >= round_


class Tally(NamedTuple):
    """Samples of one kind, and their completion tokens."""

    n: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Totals:
    """How many ids are of which kind."""

    by_kind: Mapping[Kind, Tally]
    by_reason: Mapping[tuple[Kind, str], int]

    def count(self, kind: Kind) -> int:
        """Return the number of ids of `kind`."""
        return self.by_kind.get(kind, Tally()).n

    @property
    def samples(self) -> int:
        """Ids that enqueue took or that are recorded."""
        return sum(tally.n for kind, tally in self.by_kind.items() if kind is not Kind.REFUSED)

    @property
    def recorded(self) -> int:
        """Ids that are accepted, rejected or failed."""
        return self.samples - self.count(Kind.PENDING)


class Index:
    """One index file; reads are safe from any thread, writes only under the dataset folder's lock.

    Reading raises sqlite3.OperationalError where there is no index, another DatabaseError where it is damaged.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """`shared`: several machines use the file, so that it must do without a write-ahead log."""
        self.path = path
        self._reading = threading.Lock()
        self._reader = _Connection(path, makes_file=False, shared=shared)
        self._writer = _Connection(path, makes_file=True, shared=shared)

    def close(self) -> None:
        """Close both connections."""
        with self._reading:
            self._reader.close()
        self._writer.close()

    def make(self) -> None:
        """Make an empty index where there is none, or none that can be read; changes go into it until the next call.

        If it is deleted in between, they are lost with it: a new one with them alone would be taken for a whole one.
        """
        try:
            self._writer.get()
        except sqlite3.DatabaseError:
            self.forget()
            self._writer.get()

    def forget(self) -> None:
        """Delete the index file; the JSONL files hold everything."""
        self.close()
        _unlink(self.path)

    # Reading

    def look_up(self, ids: Iterable[str]) -> dict[str, Entry]:
        """Return the entries of those ids that have one."""
        wanted = list(ids)
        with self._reading:
            return _select(self._reader.get(), wanted)

    def totals(self) -> Totals:
        """Return the counts by kind and by reason."""
        by_kind: dict[Kind, Tally] = {}
        by_reason: dict[tuple[Kind, str], int] = {}
        for code, reason, n, tokens in self._fetch("SELECT kind, reason, n, tokens FROM tallies WHERE n > 0"):
            kind = _KIND[code]
            before = by_kind.get(kind, Tally())
            by_kind[kind] = Tally(before.n + n, before.tokens + tokens)
            if reason:
                by_reason[kind, reason] = n
        return Totals(by_kind, by_reason)

    def page(self, after: str, *kinds: Kind) -> list[tuple[str, Entry]]:
        """Return at most 1,000 entries of those kinds (of all without one) in id order, from behind `after` on."""
        codes = ",".join(str(_CODE[kind]) for kind in kinds or tuple(Kind))
        query = f"SELECT {_COLUMNS} FROM entries WHERE id > ? AND kind IN ({codes}) ORDER BY id LIMIT 1000"  # noqa: S608 integers
        return [(row[0], _entry(row)) for row in self._fetch(query, after)]

    def bad_lines(self) -> list[tuple[Kind, int, int]]:
        """Return kind, offset and length of each whole line that is not a record."""
        rows = self._fetch("SELECT kind, offset, length FROM bad_lines ORDER BY kind, offset")
        return [(_KIND[code], offset, length) for code, offset, length in rows]

    def duplicates(self) -> int:
        """Return how many accepted lines repeat an id that an earlier line has."""
        rows = self._fetch("SELECT duplicates FROM files WHERE kind = ?", _CODE[Kind.ACCEPTED])
        return int(rows[0][0]) if rows else 0

    def files(self) -> dict[Kind, FileState]:
        """Return each file as it was when it was last indexed."""
        rows = self._fetch("SELECT kind, size, mtime_ns, inode, tail FROM files")
        return {_KIND[row[0]]: FileState(*row[1:]) for row in rows}

    def _fetch(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.get().execute(query, values).fetchall()

    # Writing

    @contextlib.contextmanager
    def transaction(self) -> Iterator[IndexTransaction]:
        """Change the index all at once."""
        connection = self._writer.pinned()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield IndexTransaction(connection)
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


class IndexTransaction:
    """Changes that become visible together."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def clear(self) -> None:
        """Forget everything."""
        for table in ("entries", "tallies", "files", "bad_lines"):
            self._connection.execute(f"DELETE FROM {table}")  # noqa: S608 constants

    def merge(self, rows: Sequence[tuple[str, Entry]]) -> int:
        """Take lines in, in file order; return how many repeat an accepted id."""
        before = _select(self._connection, [row[0] for row in rows])
        after, duplicates = dict(before), 0
        for id_, entry in rows:
            old = after.get(id_)
            duplicates += bool(old and old.kind is Kind.ACCEPTED and entry.kind is Kind.ACCEPTED)
            after[id_] = merged(old, entry)
        self._connection.executemany(
            "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(id_, _CODE[entry.kind], *entry[1:]) for id_, entry in after.items() if before.get(id_) != entry],
        )
        self._tally(before.values(), after.values())
        return duplicates

    def _tally(self, before: Iterable[Entry], after: Iterable[Entry]) -> None:
        changes: dict[tuple[int, str], list[int]] = {}
        for sign, entries in ((-1, before), (1, after)):
            for entry in entries:
                change = changes.setdefault((_CODE[entry.kind], entry.reason), [0, 0])
                change[0] += sign
                change[1] += sign * entry.tokens
        self._connection.executemany(
            "INSERT INTO tallies VALUES (?, ?, ?, ?) ON CONFLICT (kind, reason) DO UPDATE SET n = n + excluded.n, "
            "tokens = tokens + excluded.tokens",
            [(*key, *change) for key, change in changes.items() if change != [0, 0]],
        )

    def add_bad_line(self, kind: Kind, offset: int, length: int) -> None:
        """Note a whole line that is not a record."""
        self._connection.execute("INSERT OR REPLACE INTO bad_lines VALUES (?, ?, ?)", (_CODE[kind], offset, length))

    def set_file(self, kind: Kind, state: FileState, *, duplicates: int) -> None:
        """Remember how a file looks now, and count duplicates found since."""
        self._connection.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (kind) DO UPDATE SET size = excluded.size, "
            "mtime_ns = excluded.mtime_ns, inode = excluded.inode, tail = excluded.tail, "
            "duplicates = duplicates + excluded.duplicates",
            (_CODE[kind], *state, duplicates),
        )


class _Connection:
    """A connection that notices when the index file was deleted or replaced."""

    def __init__(self, path: Path, *, makes_file: bool, shared: bool) -> None:
        self._path = path
        self._shared = shared
        self._makes_file = makes_file
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def get(self) -> sqlite3.Connection:
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            inode = 0
        if self._connection is None or inode != self._inode:
            self.close()
            if not inode:
                if not self._makes_file:
                    raise sqlite3.OperationalError(f"there is no {self._path}")
                _unlink(self._path)  # a write-ahead log that outlived its file would be replayed into the new one
            self._connection = _connect(self._path, new=not inode, makes_file=self._makes_file, shared=self._shared)
            # As it was before, where it was there, so that a file which is replaced meanwhile is noticed.
            self._inode = inode or self._path.stat().st_ino
        return self._connection

    def pinned(self) -> sqlite3.Connection:
        """Return the connection that `get` has made, even if its file was deleted since."""
        if self._connection is None:
            raise sqlite3.OperationalError("the index was closed")
        return self._connection


def _connect(path: Path, *, new: bool, makes_file: bool, shared: bool) -> sqlite3.Connection:
    connection: sqlite3.Connection | None = None
    try:
        # SQLite must not make a file that has just gone, beside whatever is left of the old one's log.
        place = f"{path.absolute().as_uri()}?mode={'rwc' if new else 'rw'}"
        connection = sqlite3.connect(place, uri=True, timeout=60, isolation_level=None, check_same_thread=False)
        _prepare(connection, makes_file=makes_file, shared=shared)
    except sqlite3.DatabaseError as error:
        if connection is not None:
            connection.close()
        if makes_file and isinstance(error, sqlite3.OperationalError):
            raise UnwritableError(f"{path} cannot be used: {error}; check the folder's rights.") from error
        raise
    return connection


def _prepare(connection: sqlite3.Connection, *, makes_file: bool, shared: bool) -> None:
    if shared:
        connection.execute("PRAGMA mmap_size = 0")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in {0, INDEX_VERSION}:
        raise sqlite3.DatabaseError(f"it has version {version}, this promptmill writes {INDEX_VERSION}")
    if makes_file:
        # A write-ahead log needs memory that all users share, so they must be on one machine. A rollback journal needs
        # file locks alone, and an fsync before each change, or a power failure could leave half of one.
        connection.execute(f"PRAGMA journal_mode = {'TRUNCATE' if shared else 'WAL'}")
        connection.execute(f"PRAGMA synchronous = {'FULL' if shared else 'NORMAL'}")
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA user_version = {INDEX_VERSION}")
    elif version == 0:
        raise sqlite3.OperationalError("the index is being made")


def _unlink(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _entry(row: Sequence[Any]) -> Entry:
    return Entry(_KIND[row[1]], *row[2:])


def _select(connection: sqlite3.Connection, ids: Sequence[str]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for begin in range(0, len(ids), CHUNK):
        chunk = ids[begin : begin + CHUNK]
        query = f"SELECT {_COLUMNS} FROM entries WHERE id IN ({','.join('?' * len(chunk))})"  # noqa: S608 marks only
        found.update((row[0], _entry(row)) for row in connection.execute(query, chunk))
    return found


def merged(old: Entry | None, new: Entry) -> Entry:
    """Return what an id is after one more line: the higher kind wins, of equals the later, of accepted the first.

    The order in which the files are read makes no difference, so a rebuilt index equals a grown one.
    """
    if old is None:
        return new
    wins = _RANK[new.kind] > _RANK[old.kind] or (new.kind is old.kind and new.kind is not Kind.ACCEPTED)
    return (new if wins else old)._replace(round=max(old.round, new.round))
