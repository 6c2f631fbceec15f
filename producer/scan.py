"""Reads every line of a dataset folder without its index, into a scratch table of ids that also takes Redis' word."""

from __future__ import annotations

import enum
import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import msgspec

from app import jsonl
from app.places import DatasetFolder
from app.records import Kind

_PAGE = 1000
_BATCH = 5000
_SHOWN_BAD = 20
_BIT = {kind: 1 << place for place, kind in enumerate(Kind)}
"""REFUSED < PENDING < FAILED < REJECTED < ACCEPTED: the highest bit says what an id is."""
_KNOWN = _BIT[Kind.PENDING] | _BIT[Kind.REFUSED]
_RECORDED = _BIT[Kind.FAILED] | _BIT[Kind.REJECTED] | _BIT[Kind.ACCEPTED]
_SCHEMA = """
CREATE TABLE ids (
    id TEXT PRIMARY KEY, kinds INTEGER NOT NULL DEFAULT 0, accepted INTEGER NOT NULL DEFAULT 0,
    waits INTEGER NOT NULL DEFAULT 0, again INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID
"""


class Waits(enum.IntEnum):
    """What Redis says of an id."""

    NOT = 0
    QUEUED = 1
    FLYING = 2
    """A living worker asks it."""
    ORPHANED = 3
    """Its worker died."""
    LOST = 4
    """No ticket will ever ask for it."""


class Question(enum.Enum):
    """Ids that something is to be said of."""

    MISSING = f"kinds & {_RECORDED} = 0 AND kinds & {_BIT[Kind.PENDING]} != 0 AND waits = 0"
    """Taken by enqueue, neither recorded nor in Redis."""
    STALE = f"kinds & {_RECORDED} != 0 AND again = 0 AND waits != 0"
    """Recorded, and still in Redis."""
    FOREIGN = f"kinds & {_KNOWN} = 0 AND (kinds != 0 OR waits != 0)"
    """Recorded or in Redis, and never taken by enqueue."""
    REPEATED = "accepted > 1"
    """On more than one accepted line."""


class Group(NamedTuple):
    """Ids that are alike."""

    kind: Kind
    waits: Waits
    again: bool
    """Whether it is recorded and being asked again."""
    n: int


class Bad(msgspec.Struct, frozen=True):
    """A whole line that is no sound record."""

    file: str
    offset: int
    length: int
    reason: str


class Scan:
    """What the files say, line by line, and what Redis says of the same ids."""

    def __init__(self) -> None:
        self._table = sqlite3.connect("", isolation_level=None)  # a private file that vanishes with the connection
        self._table.execute(_SCHEMA)
        self.bad = list[Bad]()
        """The first bad lines."""
        self.bad_count = 0
        self.torn = list[str]()
        """Files whose last line lacks its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._table.close()

    # Taking in

    def read_files(self, folder: DatasetFolder, sizes: Mapping[Kind, int], *, dataset: str) -> None:
        """Take in every line that begins before its file's given size."""
        for kind, size in sizes.items():
            path = folder.lines(kind)
            lines = _until(size, jsonl.read_lines(path))
            self._upsert(
                "INSERT INTO ids (id, kinds, accepted) VALUES (?1, ?2, ?3) ON CONFLICT (id) DO UPDATE "
                "SET kinds = kinds | ?2, accepted = accepted + ?3",
                ((id_, _BIT[kind], kind is Kind.ACCEPTED) for id_ in self._ids(kind, path.name, lines, dataset)),
            )

    def _ids(self, kind: Kind, file: str, lines: Iterable[jsonl.Line], dataset: str) -> Iterator[str]:
        for line in lines:
            if not line.whole:
                self.torn.append(file)
                return
            id_, reason = _judge(line.data, kind, dataset)
            if reason is None:
                yield id_
                continue
            self.bad_count += 1
            if len(self.bad) < _SHOWN_BAD:
                self.bad.append(Bad(file, line.offset, len(line.data), reason))

    def note_waiting(self, ids: Iterable[str], waits: Waits) -> None:
        """Take Redis' word for these ids; a later word replaces an earlier one."""
        self._upsert(
            "INSERT INTO ids (id, waits) VALUES (?1, ?2) ON CONFLICT (id) DO UPDATE SET waits = ?2",
            ((id_, int(waits)) for id_ in ids),
        )

    def note_progress(self, ids: Iterable[str], waits: Waits) -> None:
        """Say more of ids that were noted as waiting; others are left as they are."""
        self._upsert("UPDATE ids SET waits = ?2 WHERE id = ?1 AND waits != 0", ((id_, int(waits)) for id_ in ids))

    def note_again(self, ids: Iterable[str]) -> None:
        """Note that these ids are asked again, if they wait at all."""
        self._upsert("UPDATE ids SET again = 1 WHERE id = ?1 AND waits != 0", ((id_,) for id_ in ids))

    def forget_waiting(self) -> None:
        """Forget all that Redis said."""
        self._table.execute("UPDATE ids SET waits = 0, again = 0")

    def _upsert(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        iterator = iter(rows)
        while batch := list(itertools.islice(iterator, _BATCH)):
            self._table.execute("BEGIN")
            self._table.executemany(statement, batch)
            self._table.execute("COMMIT")

    # Telling

    def groups(self) -> list[Group]:
        """Return how many ids are alike; ids that only Redis knows are left out."""
        rows = self._table.execute("SELECT kinds, waits, again, count(*) FROM ids WHERE kinds != 0 GROUP BY 1, 2, 3")
        found = []
        for kinds, waits, again, n in rows:
            kind = max((kind for kind in Kind if kinds & _BIT[kind]), key=_BIT.__getitem__)
            found.append(Group(kind, Waits(waits), bool(again) and kind in {Kind.FAILED, Kind.REJECTED}, n))
        return found

    def count(self, question: Question) -> int:
        """Return how many ids the question is about."""
        query = f"SELECT count(*) FROM ids WHERE {question.value}"  # noqa: S608 constants
        return int(self._table.execute(query).fetchone()[0])

    def pages(self, question: Question, *, size: int = _PAGE) -> Iterator[list[str]]:
        """Yield those ids in order, a page at a time."""
        query = f"SELECT id FROM ids WHERE {question.value} AND id > ? ORDER BY id LIMIT ?"  # noqa: S608 constants
        last = ""
        while page := [row[0] for row in self._table.execute(query, (last, size))]:
            yield page
            last = page[-1]

    def first(self, question: Question, n: int) -> list[str]:
        """Return the first `n` of those ids."""
        return next(self.pages(question, size=n), [])


def _until(size: int, lines: Iterable[jsonl.Line]) -> Iterator[jsonl.Line]:
    return itertools.takewhile(lambda line: line.offset < size, lines)


def _judge(data: bytes, kind: Kind, dataset: str) -> tuple[str, str | None]:
    """Return a line's id, and what is wrong with it."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return "", f"not strict JSON: {error}"
    if not isinstance(value, dict):
        return "", "not a JSON object"
    id_ = value.get("id")
    if not isinstance(id_, str) or not id_:
        return "", "it has no id"
    if value.get("verdict", kind) != kind and kind not in {Kind.PENDING, Kind.REFUSED}:
        return id_, f"its verdict is {value['verdict']!r}"
    if value.get("dataset", dataset) != dataset:
        return id_, f"it belongs to the dataset {value['dataset']!r}"
    return id_, None
