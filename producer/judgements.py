"""What each line of a dataset's answers is worth by other rules, and the lines as they then have to stand."""

from __future__ import annotations

import array
import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from app import jsonl
from app.places import DatasetFolder
from app.records import Kind, Verdict
from app.rejudge import JUDGED, decode, judge_again, relabel
from app.verdict import Rules
from producer.scratch import growing, private_database

_UNSOUND, _GOOD = 0, 1
"""Codes of a line; the other numbers are reasons for rejecting it."""
_STAYS, _MOVES, _CHANGES = 0, 1, 2
"""What becomes of a line: as it is, into the other file, or the same place with another reason."""
_SCHEMA = """
CREATE TABLE rejected (
    id TEXT PRIMARY KEY, last INTEGER NOT NULL, good INTEGER, taken INTEGER NOT NULL, batch INTEGER NOT NULL
) WITHOUT ROWID
"""
_MOST_REASONS = 65_535
_SCRATCH = "of reclassify"


class Line(NamedTuple):
    r"""A line and the file that it belongs into."""

    kind: Kind
    data: bytes
    r"""With its `\n`."""


class _File:
    """The lines of one file by number: 13 bytes each."""

    def __init__(self) -> None:
        self.codes = array.array("H")
        """What each is by the new rules."""
        self.before = array.array("H")
        """What each was rejected for."""
        self.moments = array.array("d")
        """When each was finished; no line is earlier than the one before it."""
        self.actions = array.array("B")
        self.given = 0
        """How many were given out again."""
        self.inode = 0


class _Row(NamedTuple):
    """What is known of an id that has rejected lines."""

    last: int
    """The number of its newest line."""
    good: int | None
    """The number of the newest that is to be accepted."""
    taken: bool
    """Whether it has an accepted line."""
    batch: int


class Judgements:
    """Takes the lines of both files in, decides what becomes of each id, and gives the lines out again.

    An id that has an accepted line which is still good keeps it. Else the newest of its rejected lines that is good
    becomes accepted. Else its newest line says why it is rejected. Lines that do not count, for a later round of their
    sample does, stay as they are, and so do lines that are no sound records.
    """

    def __init__(self, dataset: str, rules: Rules) -> None:
        self._dataset = dataset
        self._rules = rules
        self._files = {kind: _File() for kind in JUDGED}
        self._reasons = ["", ""]  # the places of the other two codes
        self._codes = dict[str, int]()
        self._table = private_database(_SCHEMA, "BEGIN")
        self._changes = Counter[tuple[int, int]]()
        self._batch = 0
        self.changed = False
        """Whether any line moves or changes."""
        self.disturbed = False
        """Whether something came in later that concerns an id which was judged already, or a file is another one."""
        self.unsound = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._table.close()

    # Taking in

    def note_file(self, kind: Kind, path: Path) -> None:
        """Remember which file the lines are of."""
        file, inode = self._files[kind], path.stat().st_ino if path.exists() else 0
        self.disturbed |= file.inode not in {0, inode}
        file.inode = inode

    def take(self, kind: Kind, data: bytes) -> None:
        """Judge the next line of a file; the rejected ones first. Raises DiskFullError."""
        file = self._files[kind]
        number, last = len(file.codes), file.moments[-1] if file.moments else -math.inf
        try:
            answered = decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            answered = None
        if answered is None or answered.verdict is not kind or answered.dataset != self._dataset:
            self.unsound += 1
            self._note(file, _UNSOUND, 0, last)
            return
        reason = judge_again(answered, self._rules).reason
        code = self._code(reason) if reason else _GOOD
        self._note(file, code, self._code(answered.reason or ""), max(last, answered.finished_at or last))
        with growing(_SCRATCH):
            if kind is Kind.REJECTED:
                self._take_rejected(answered.id, number, good=code == _GOOD)
            else:
                self._take_accepted(file, answered.id, number)

    def _note(self, file: _File, code: int, before: int, moment: float) -> None:
        file.codes.append(code)
        file.before.append(before)
        file.moments.append(moment)
        file.actions.append(_STAYS)

    def _code(self, reason: str) -> int:
        """Return the reason's number."""
        if reason not in self._codes:
            self._codes[reason] = min(len(self._reasons), _MOST_REASONS)
            self._reasons.append(reason)
        return self._codes[reason]

    def _take_rejected(self, id_: str, number: int, *, good: bool) -> None:
        row = self._row(id_)
        if row is not None:
            self._reopen(row)
        kept = number if good else (row.good if row else None)
        self._table.execute("INSERT OR REPLACE INTO rejected VALUES (?, ?, ?, 0, ?)", (id_, number, kept, self._batch))

    def _take_accepted(self, file: _File, id_: str, number: int) -> None:
        row, code = self._row(id_), file.codes[number]
        if row is not None:
            self._reopen(row)
            good = None if code == _GOOD else row.good
            self._table.execute("UPDATE rejected SET taken = 1, good = ? WHERE id = ?", (good, id_))
        if code != _GOOD:
            file.actions[number] = _MOVES
            self.changed = True
        stands = code == _GOOD or (row is not None and row.good is not None)
        self._changes[_GOOD, _GOOD if stands else code] += 1

    def _row(self, id_: str) -> _Row | None:
        row = self._table.execute("SELECT last, good, taken, batch FROM rejected WHERE id = ?", (id_,)).fetchone()
        return _Row(*row) if row else None

    def _reopen(self, row: _Row) -> None:
        """Take back what was decided on an id in an earlier batch, of which another line has come."""
        if row.batch == self._batch:
            return
        if row.good is not None:
            self.disturbed = True  # its line may be written as accepted by now
        elif not row.taken:
            file = self._files[Kind.REJECTED]
            self._changes[file.before[row.last], file.codes[row.last]] -= 1

    # Deciding

    def settle(self) -> None:
        """Decide on the rejected lines that were taken in since the last time. Raises DiskFullError."""
        query = "SELECT last, good, taken, batch FROM rejected WHERE batch = ?"
        with growing(_SCRATCH):
            for row in map(_Row._make, self._table.execute(query, (self._batch,))):
                self._settle(self._files[Kind.REJECTED], row)
        self._batch += 1

    def _settle(self, file: _File, row: _Row) -> None:
        now = file.codes[row.last]
        if row.good is not None:
            file.actions[row.good], now = _MOVES, _GOOD
        elif not row.taken and now != file.before[row.last]:
            file.actions[row.last] = _CHANGES
        if not row.taken:
            self._changes[file.before[row.last], now] += 1
        self.changed |= row.good is not None or file.actions[row.last] == _CHANGES

    def changes(self) -> Counter[tuple[str, str]]:
        """Return (verdict before, verdict now) -> samples, in words."""
        words = Counter[tuple[str, str]]()
        for (before, now), n in self._changes.items():
            if n:
                words[self._words(before), self._words(now)] += n
        return words

    def _words(self, code: int) -> str:
        return Kind.ACCEPTED.value if code == _GOOD else f"{Kind.REJECTED}: {self._reasons[code] or 'unknown'}"

    # Giving out

    def lines(self, folder: DatasetFolder, starts: Mapping[Kind, int], ends: Mapping[Kind, int]) -> Iterator[Line]:
        """Yield the lines between two places of the files as they have to stand, in the order of their moments."""
        streams = [self._of_file(folder.lines(kind), kind, starts[kind], ends[kind]) for kind in JUDGED]
        for _moment, line in heapq.merge(*streams, key=_moment_of):
            yield line

    def _of_file(self, path: Path, kind: Kind, start: int, end: int) -> Iterator[tuple[float, Line]]:
        file = self._files[kind]
        for line in jsonl.read_lines(path, start):
            if line.offset >= end:
                return
            number, file.given = file.given, file.given + 1
            yield file.moments[number], self._line(kind, file.actions[number], file.codes[number], line.data)

    def _line(self, kind: Kind, action: int, code: int, data: bytes) -> Line:
        if action == _STAYS:
            return Line(kind, data + b"\n")
        verdict = Verdict(Kind.ACCEPTED) if code == _GOOD else Verdict(Kind.REJECTED, self._reasons[code])
        return Line(verdict.kind, relabel(data, verdict) + b"\n")


def _moment_of(item: tuple[float, Line]) -> float:
    return item[0]
