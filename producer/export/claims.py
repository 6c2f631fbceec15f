"""Which ids an export over several datasets has written already, in memory that does not grow with them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from app.errors import DiskFullError

_CACHE_KIB = 16 * 1024


class Claims:
    """A set of ids in a private temporary SQLite file, which disappears with it. Use it as a context manager."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._db.execute("CREATE TABLE claimed (id TEXT PRIMARY KEY) WITHOUT ROWID")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def claim(self, ids: Sequence[str]) -> list[bool]:
        """Return for each id whether it is new, also within `ids`, and remember all.

        Raises DiskFullError when the temporary file cannot grow.
        """
        known = self.known(ids)
        fresh = list[bool]()
        added = list[tuple[str]]()
        for id_ in ids:
            fresh.append(id_ not in known)
            if fresh[-1]:
                known.add(id_)
                added.append((id_,))
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO claimed VALUES (?)", sorted(added))
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise DiskFullError(
                f"The temporary file that tells repeated ids apart cannot grow ({error}); "
                "free space in the temporary folder, or name another one with SQLITE_TMPDIR."
            ) from error
        return fresh

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return those of the ids that were claimed."""
        found = self._db.execute(
            "SELECT id FROM claimed WHERE id IN (SELECT value FROM json_each(?))", (msgspec.json.encode(ids).decode(),)
        )
        return {row[0] for row in found}
