"""Which ids an export over several datasets has written already, in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from producer.scratch import growing, private_database


class Claims:
    """A set of ids in a private temporary SQLite file, which disappears with it. Use it as a context manager."""

    def __init__(self) -> None:
        self._db = private_database("CREATE TABLE claimed (id TEXT PRIMARY KEY) WITHOUT ROWID")

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
        with growing("that tells repeated ids apart"):
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO claimed VALUES (?)", sorted(added))
            self._db.execute("COMMIT")
        return fresh

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return those of the ids that were claimed."""
        found = self._db.execute(
            "SELECT id FROM claimed WHERE id IN (SELECT value FROM json_each(?))", (msgspec.json.encode(ids).decode(),)
        )
        return {row[0] for row in found}
