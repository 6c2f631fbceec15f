"""Accounts for every input id of a dataset, out of the files themselves and Redis, and names each difference."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import redis.exceptions

from app import jsonl, manifest
from app.broker import text
from app.errors import StoreError
from app.index import Totals
from app.ledger import Ledger
from app.queue import Queue
from app.records import Kind
from producer.scan import Bad, Question, Scan, Waits

LOOK_AGAIN_S = 1.0
"""Seconds between the two looks that tell a lost ticket from one that moves."""
_SHOWN = 5
_TRIES = 20


class Counts(msgspec.Struct, kw_only=True):
    """How many ids are what; what only Redis knows is null without it."""

    read: int = 0
    refused: int = 0
    samples: int = 0
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    queued: int | None = 0
    """With a payload in Redis, a ticket and no living worker; orphaned ones are among them."""
    in_flight: int | None = 0
    orphaned: int | None = 0
    without_ticket: int | None = 0
    """With a payload in Redis that no ticket, queued or delivered, will ever ask for."""
    missing: int = 0
    """Neither recorded nor in Redis; without Redis, simply not recorded."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found; complete means that every sample is accepted or rejected, once, in sound files."""

    dataset: str
    at: float
    """Unix seconds."""
    counts: Counts
    problems: list[str]
    """One sentence each: what is wrong, how much of it, and what to do."""
    notes: list[str]
    """Sentences that need nothing done."""
    missing: list[str]
    """The first ids that are neither recorded nor in Redis."""
    duplicates: list[str]
    """The first ids that more than one accepted line has."""
    bad_lines: list[Bad]
    """The first lines that are no sound records."""

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do or to mend."""
        return not self.problems

    def render(self) -> str:
        """Return the report as plain text."""
        counts = ", ".join(
            f"{name.replace('_', ' ')} {'unknown' if n is None else format(n, ',')}"
            for name, n in msgspec.structs.asdict(self.counts).items()
        )
        lines = [f"{self.dataset}: {'complete' if self.complete else 'NOT complete'}", counts]
        lines += [f"! {problem}" for problem in self.problems]
        lines += [f"  {bad.file}, byte {bad.offset}: {bad.reason}" for bad in self.bad_lines]
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def document(self) -> dict[str, Any]:
        """Return the report's fields for JSON, with `complete` before them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"complete": self.complete, **fields}


def as_json(reports: Mapping[str, Report]) -> bytes:
    """Return reports by dataset as strict, indented JSON."""
    documents = {dataset: report.document() for dataset, report in reports.items()}
    return msgspec.json.format(msgspec.json.encode(documents), indent=2) + b"\n"


def verify(queue: Queue, ledger: Ledger, dataset: str, *, look_again_s: float = LOOK_AGAIN_S) -> Report:
    """Account for each id, out of every file of the dataset and what Redis holds of it.

    The files are read afresh, up to the last whole line at the start, without the index, in bounded memory.
    Where Redis does not answer, whatever is not recorded counts as missing.
    """
    with Scan() as found:
        return _Audit(ledger, dataset, found).run(queue, look_again_s)


class _Audit:
    """Collects what one pass finds."""

    def __init__(self, ledger: Ledger, dataset: str, found: Scan) -> None:
        self.ledger = ledger
        self.dataset = dataset
        self.found = found
        self.counts = Counts()
        self.problems = list[str]()
        self.notes = list[str]()
        self.sizes: dict[Kind, int] = {}
        """How long each file was when it was read."""

    def run(self, books: Queue, look_again_s: float) -> Report:
        # Redis first: an id is in samples.jsonl before it is there, and recorded before it leaves.
        queue = self._ask_redis(books, look_again_s)
        self.sizes, totals = self._still_point()
        self.found.read_files(self.ledger.folder, self.sizes, dataset=self.dataset)
        missing = self._account(queue)
        self._say_what_is_left(missing, reached=queue is not None)
        self._check_files()
        self._check_manifest()
        if totals is not None:
            self._check_index(totals)
        return Report(
            dataset=self.dataset,
            at=time.time(),
            counts=self.counts,
            problems=self.problems,
            notes=self.notes,
            missing=missing,
            duplicates=self.found.first(Question.REPEATED, _SHOWN),
            bad_lines=self.found.bad,
        )

    def _ask_redis(self, queue: Queue, look_again_s: float) -> Queue | None:
        """Take down what waits; return None when Redis does not answer."""
        try:
            _note_waiting(queue, self.dataset, self.found)
            lost = queue.without_ticket(self.dataset)
            if lost:
                time.sleep(look_again_s)
                lost &= queue.without_ticket(self.dataset)
        except redis.exceptions.RedisError as error:
            self.found.forget_waiting()
            self.notes.append(f"Redis could not be asked: {type(error).__name__}.")
            return None
        self.found.note_progress(lost, Waits.LOST)
        return queue

    def _still_point(self) -> tuple[dict[Kind, int], Totals | None]:
        """Return the files' lengths at a moment when nobody writes, and what the index said at that moment."""
        try:
            self.notes += [str(mending) for mending in self.ledger.catch_up()]
            for _ in range(_TRIES):
                before = self.ledger.totals()
                with self.ledger.locked():
                    sizes = self._sizes()
                if self.ledger.totals() == before:
                    return sizes, before
        except StoreError as error:
            self.notes.append(f"{error} Its files were read as they are, and the index was not compared.")
            return self._sizes(), None
        self.notes.append("Records came in too fast to compare the index with the files.")
        return sizes, None

    def _sizes(self) -> dict[Kind, int]:
        paths = {kind: self.ledger.folder.lines(kind) for kind in Kind}
        return {kind: path.stat().st_size for kind, path in paths.items() if path.exists()}

    def _account(self, queue: Queue | None) -> list[str]:
        """Fill in the counts; return the first missing ids."""
        counts, waiting = self.counts, dict.fromkeys(Waits, 0)
        for kind, waits, again, n in self.found.groups():
            if kind is Kind.REFUSED:
                counts.refused += n
                continue
            counts.samples += n
            if kind is Kind.PENDING or again:
                waiting[waits] += n
            else:
                setattr(counts, kind.value, getattr(counts, kind.value) + n)
        counts.read = counts.refused + counts.samples
        missing = self._missing(queue)
        if queue is None:
            counts.queued = counts.in_flight = counts.orphaned = counts.without_ticket = None
            return missing
        counts.in_flight = waiting[Waits.FLYING]
        counts.orphaned = waiting[Waits.ORPHANED]
        counts.without_ticket = waiting[Waits.LOST]
        # What looked missing and came in while the files were read is queued.
        late = waiting[Waits.NOT] - counts.missing
        counts.queued = waiting[Waits.QUEUED] + counts.orphaned + late
        stale = sum(len(queue.waiting_ids(self.dataset, ids)) for ids in self.found.pages(Question.STALE))
        if stale:
            self.notes.append(f"{stale:,} payloads of recorded samples are still in Redis; their tickets drop them.")
        return missing

    def _missing(self, queue: Queue | None) -> list[str]:
        first = list[str]()
        for ids in self.found.pages(Question.MISSING):
            gone = set(ids) - (queue.waiting_ids(self.dataset, ids) if queue else set())
            if queue and gone:
                # Queued after Redis was read, and recorded after the files were.
                known = self.ledger.look_up(gone)
                gone -= {id_ for id_, entry in known.items() if entry.offset >= self.sizes.get(entry.kind, 0)}
            self.counts.missing += len(gone)
            first += sorted(gone)[: _SHOWN - len(first)]
        return first

    def _say_what_is_left(self, missing: Sequence[str], *, reached: bool) -> None:
        counts, going = self.counts, (self.counts.queued or 0) + (self.counts.in_flight or 0)
        gone = (
            f"neither done nor queued ({_examples(missing, counts.missing)}); run producer enqueue again"
            if reached
            else "not recorded, and without Redis nobody can tell whether they are queued"
        )
        died = f", {counts.orphaned:,} of them with a worker that died" if counts.orphaned else ""
        ticketless = "in Redis without a ticket; a running worker queues them again within minutes"
        for n, what in (
            (counts.missing, gone),
            (counts.without_ticket or 0, ticketless),
            (going, f"still queued or in flight{died}"),
            (counts.failed, f"failed; ask again with producer retry {self.dataset}"),
        ):
            if n:
                self.problems.append(f"{_times(n, 'sample')} {what}.")
        if not counts.samples:
            self.notes.append("There are no samples.")

    def _check_files(self) -> None:
        found = self.found
        for question, what, where in (
            (Question.REPEATED, "id", "on more than one line of raw_responses.jsonl"),
            (Question.FOREIGN, "recorded or queued id", "in no samples.jsonl"),
        ):
            n = found.count(question)
            if n:
                self.problems.append(f"{_times(n, what)} {where}: {_examples(found.first(question, _SHOWN), n)}.")
        if found.bad_count:
            self.problems.append(f"{_times(found.bad_count, 'line')} no sound record.")
        self.problems += [
            f"The last line of {file} is torn; the next worker or enqueue mends it." for file in found.torn
        ]
        cut = sum(1 for _line in jsonl.read_lines(self.ledger.folder.torn))
        if cut:
            self.notes.append(f"{_times(cut, 'torn line')} kept in torn.jsonl.")

    def _check_manifest(self) -> None:
        try:
            known = manifest.read(self.ledger)
        except StoreError as error:
            self.problems.append(str(error))
            return
        if known is None:
            self.notes.append("There is no manifest.json.")
        elif known.dataset != self.dataset:
            self.problems.append(f"{self.ledger.folder.manifest} belongs to the dataset {known.dataset!r}.")
        else:
            self.problems += manifest.unread_inputs(known)

    def _check_index(self, totals: Totals) -> None:
        in_files = dict.fromkeys(Kind, 0)
        for group in self.found.groups():
            in_files[group.kind] += group.n
        differing = [
            f"{kind}: {totals.count(kind):,} in the index, {n:,} in the files"
            for kind, n in in_files.items()
            if totals.count(kind) != n
        ]
        if differing:
            where = self.ledger.folder.index
            self.problems.append(f"{where} differs from the files ({'; '.join(differing)}); delete it, it is rebuilt.")


def _note_waiting(queue: Queue, dataset: str, found: Scan) -> None:
    keys, client = queue.keys, queue.client
    found.note_waiting(map(text, cast("list[bytes]", client.hkeys(keys.prompts(dataset)))), Waits.QUEUED)
    flights = cast("dict[bytes, bytes]", client.hgetall(keys.flights(dataset)))
    owners = {text(id_): text(value).rpartition("|")[0] for id_, value in flights.items()}
    alive = queue.living(set(owners.values()))
    found.note_progress((id_ for id_, owner in owners.items() if owner in alive), Waits.FLYING)
    found.note_progress((id_ for id_, owner in owners.items() if owner not in alive), Waits.ORPHANED)
    for kind in (Kind.FAILED, Kind.REJECTED):
        found.note_again(map(text, cast("set[bytes]", client.smembers(keys.again(dataset, kind)))))


def _times(n: int, what: str) -> str:
    return f"1 {what} is" if n == 1 else f"{n:,} {what}s are"


def _examples(ids: Sequence[str], n: int) -> str:
    return ", ".join(ids) + (", ..." if n > len(ids) else "")
