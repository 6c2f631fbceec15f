"""Reads every line of a dataset folder without its index, into a scratch table of ids that also takes Redis' word."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgspec

from app import jsonl
from app.places import DatasetFolder
from app.records import ASKED_AGAIN, RECORDED, Kind
from producer.scratch import growing, private_database
from producer.soundness import Judgement, judge

_PAGE = 1000
_BATCH = 5000
_SHOWN_BAD = 20
_TELL_EVERY = 1000
_BIT = {kind: 1 << place for place, kind in enumerate(Kind)}
"""REFUSED < PENDING < FAILED < REJECTED < ACCEPTED: the highest bit says what an id is."""
_KNOWN = _BIT[Kind.PENDING] | _BIT[Kind.REFUSED]
_RECORDED = sum(_BIT[kind] for kind in RECORDED)
_ONE_LINE = sum(bit for kind, bit in _BIT.items() if kind not in ASKED_AGAIN)
"""Kinds of which an id has one line; of the others it may have one per round."""
_IDS = """
CREATE TABLE ids (
    id TEXT PRIMARY KEY, kinds INTEGER NOT NULL DEFAULT 0, repeats INTEGER NOT NULL DEFAULT 0,
    waits INTEGER NOT NULL DEFAULT 0, again INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID
"""
_ROUNDS = """
CREATE TABLE rounds (
    id TEXT NOT NULL, bit INTEGER NOT NULL, round INTEGER NOT NULL, n INTEGER NOT NULL DEFAULT 1,
    PRIMARY KEY (id, bit, round)) WITHOUT ROWID
"""
_SCRATCH = "of verify"


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
    STALE = f"waits != 0 AND (kinds & {_BIT[Kind.ACCEPTED]} != 0 OR (kinds & {_RECORDED} != 0 AND again = 0))"
    """Recorded, and still in Redis."""
    AGAIN_LOST = f"waits = 0 AND again != 0 AND kinds & {_BIT[Kind.ACCEPTED]} = 0 AND kinds & {_RECORDED} != 0"
    """Failed or rejected, to be asked again as Redis says, and no longer there."""
    NOT_AGAIN = f"again != 0 AND kinds & {_BIT[Kind.ACCEPTED]} != 0"
    """Accepted, and Redis still calls it one that is asked again."""
    IN_REDIS = "waits != 0"
    """In Redis, whatever the files say."""
    TAKEN = f"kinds & {_KNOWN} != 0"
    """Taken by enqueue."""
    LOST = f"waits = {Waits.LOST.value}"
    """In Redis without a ticket."""
    FOREIGN = f"kinds & {_KNOWN} = 0 AND (kinds != 0 OR waits != 0)"
    """Recorded or in Redis, and never taken by enqueue."""


@dataclasses.dataclass
class Flaws:
    """How many lines of a file a repair would move."""

    bad: int = 0
    """Lines that are no sound records; those of other datasets are among them."""
    foreign: int = 0
    """Lines that belong to another dataset."""
    repeated: int = 0
    """Ids that more than one line has (of the same round, for failed and rejected ones)."""
    torn: bool = False
    """Whether the last line lacks its end."""

    def __bool__(self) -> bool:
        """Tell whether the file needs to be written anew."""
        return bool(self.bad or self.repeated)


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
    """What the files say, line by line, and what Redis says of the same ids, in a private temporary file.

    Everything raises DiskFullError when that cannot grow.
    """

    def __init__(self) -> None:
        self._table = private_database(_IDS, _ROUNDS)
        self.bad = list[Bad]()
        """The first bad lines."""
        self.flaws = {kind: Flaws() for kind in Kind}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._table.close()

    # Taking in

    def read_files(
        self,
        folder: DatasetFolder,
        sizes: Mapping[Kind, int],
        *,
        dataset: str,
        on_progress: Callable[[str], None],
    ) -> None:
        """Take in every line that begins before its file's given size; hear how far it is, in words."""
        for kind, size in sizes.items():
            path = folder.lines(kind)
            bit, lines = _BIT[kind], _watched(path.name, size, jsonl.read_lines(path), on_progress)
            found = self._judged(kind, path.name, lines, dataset)
            while batch := list(itertools.islice(found, _BATCH)):
                self._take(kind, bit, batch)
            query = f"SELECT count(*) FROM ids WHERE repeats & {bit} != 0"  # noqa: S608 an integer
            self.flaws[kind].repeated = int(self._rows(query)[0][0])

    def _take(self, kind: Kind, bit: int, lines: Sequence[Judgement]) -> None:
        self._upsert(
            "INSERT INTO ids (id, kinds) VALUES (?1, ?2) ON CONFLICT (id) DO UPDATE SET "
            "repeats = repeats | (kinds & ?2 & ?3), kinds = kinds | ?2",
            ((line.id, bit, _ONE_LINE) for line in lines),
        )
        if kind not in ASKED_AGAIN:
            return
        self._upsert(
            "INSERT INTO rounds (id, bit, round) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET n = n + 1",
            ((line.id, bit, line.round) for line in lines),
        )
        self._upsert(
            "UPDATE ids SET repeats = repeats | ?2 WHERE id = ?1 AND EXISTS "
            "(SELECT 1 FROM rounds WHERE id = ?1 AND bit = ?2 AND n > 1)",
            ((line.id, bit) for line in lines),
        )

    def _judged(self, kind: Kind, file: str, lines: Iterable[jsonl.Line], dataset: str) -> Iterator[Judgement]:
        flaws = self.flaws[kind]
        for line in lines:
            if not line.whole:
                flaws.torn = True
                return
            judgement = judge(line.data, kind, dataset)
            if judgement.fault is None:
                yield judgement
                continue
            flaws.bad += 1
            flaws.foreign += judgement.foreign is not None
            if len(self.bad) < _SHOWN_BAD:
                self.bad.append(Bad(file, line.offset, len(line.data), judgement.fault))

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
        """Note that these ids are asked again, as Redis says."""
        self._upsert(
            "INSERT INTO ids (id, again) VALUES (?1, 1) ON CONFLICT (id) DO UPDATE SET again = 1",
            ((id_,) for id_ in ids),
        )

    def forget_files(self) -> None:
        """Forget all that the files said."""
        self._rows("DELETE FROM rounds")
        self._rows("DELETE FROM ids WHERE waits = 0 AND again = 0")
        self._rows("UPDATE ids SET kinds = 0, repeats = 0")
        self.bad.clear()
        self.flaws = {kind: Flaws() for kind in Kind}

    def forget_waiting(self) -> None:
        """Forget all that Redis said."""
        self._rows("UPDATE ids SET waits = 0, again = 0")

    def _upsert(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        iterator = iter(rows)
        while batch := list(itertools.islice(iterator, _BATCH)):
            with growing(_SCRATCH):
                self._table.execute("BEGIN")
                self._table.executemany(statement, batch)
                self._table.execute("COMMIT")

    def _rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        # Reading may write too: what was changed last is still in memory, and makes room.
        with growing(_SCRATCH):
            return self._table.execute(statement, values).fetchall()

    # Telling

    def groups(self) -> list[Group]:
        """Return how many ids are alike; ids that only Redis knows are left out."""
        rows = self._rows("SELECT kinds, waits, again, count(*) FROM ids WHERE kinds != 0 GROUP BY 1, 2, 3")
        found = []
        for kinds, waits, again, n in rows:
            kind = max((kind for kind in Kind if kinds & _BIT[kind]), key=_BIT.__getitem__)
            found.append(Group(kind, Waits(waits), bool(again) and kind in ASKED_AGAIN, n))
        return found

    def count(self, question: Question) -> int:
        """Return how many ids the question is about."""
        query = f"SELECT count(*) FROM ids WHERE {question.value}"  # noqa: S608 constants
        return int(self._rows(query)[0][0])

    def holds(self, question: Question, id_: str) -> bool:
        """Tell whether the question is about that id."""
        query = f"SELECT 1 FROM ids WHERE id = ? AND {question.value}"  # noqa: S608 constants
        return bool(self._rows(query, id_))

    def pages(self, question: Question, *, size: int = _PAGE) -> Iterator[list[str]]:
        """Yield those ids in order, a page at a time."""
        query = f"SELECT id FROM ids WHERE {question.value} AND id > ? ORDER BY id LIMIT ?"  # noqa: S608 constants
        last = ""
        while page := [row[0] for row in self._rows(query, last, size)]:
            yield page
            last = page[-1]

    def repeated(self, kind: Kind, n: int) -> list[str]:
        """Return the first `n` ids that more than one line of that kind has."""
        query = "SELECT id FROM ids WHERE repeats & ? != 0 ORDER BY id LIMIT ?"
        return [row[0] for row in self._rows(query, _BIT[kind], n)]

    def first(self, question: Question, n: int) -> list[str]:
        """Return the first `n` of those ids."""
        return next(self.pages(question, size=n), [])


def _watched(
    file: str, size: int, lines: Iterable[jsonl.Line], on_progress: Callable[[str], None]
) -> Iterator[jsonl.Line]:
    """Yield the lines that begin before byte `size`, and tell now and then how far it is."""
    for number, line in enumerate(lines):
        if line.offset >= size:
            return
        if not number % _TELL_EVERY:
            on_progress(f"reading {file}: {line.offset / 1e6:,.0f} of {size / 1e6:,.0f} MB")
        yield line
