"""A private temporary database for what a pass has to remember, in memory that does not grow with it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from app.errors import DiskFullError

_CACHE_KIB = 16 * 1024


def private_database(*statements: str) -> sqlite3.Connection:
    """Open a database in a file without a name that disappears with the connection, and run the statements in it.

    It is for one thread, and not durable. Transactions are the caller's.
    """
    database = sqlite3.connect("", isolation_level=None)
    for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
        database.execute(f"PRAGMA {pragma}")
    for statement in statements:
        database.execute(statement)
    return database


@contextlib.contextmanager
def growing(what: str) -> Iterator[None]:
    """Turn a refusal to grow into a DiskFullError; `what` names the file as the middle of a sentence."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise DiskFullError(
            f"The temporary file {what} cannot grow ({error}); free space in the temporary folder, or name another one "
            "with SQLITE_TMPDIR."
        ) from error
