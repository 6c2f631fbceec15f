"""Accounts for every input id of a dataset, out of the files themselves and Redis, and names each difference."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence

import redis.exceptions

from app import jsonl, manifest
from app.errors import StoreError
from app.index import Totals
from app.ledger import Ledger
from app.places import FILE_OF_KIND, is_extraction
from app.queue import Queue
from app.records import Kind
from producer.accounts import Counts, Report
from producer.scan import Question, Scan, Waits
from producer.states import check_files
from producer.texts import subject
from producer.turns import missing_turns
from producer.waiting import note_redis

LOOK_AGAIN_S = 1.0
"""Seconds between the two looks that tell a lost ticket from one that moves."""
_SHOWN = 5
_TRIES = 20


def verify(
    queue: Queue,
    ledger: Ledger,
    dataset: str,
    *,
    look_again_s: float = LOOK_AGAIN_S,
    on_progress: Callable[[str], None] = lambda _words: None,
) -> Report:
    """Account for each id, out of every file of the dataset and what Redis holds of it.

    The files are read afresh, up to the last whole line at the start, without the index, in bounded memory.
    Where Redis does not answer, nobody can tell whether what is not recorded is queued.
    """
    with Scan() as found:
        audit = Audit(ledger, dataset, found)
        audit.look(queue, look_again_s=look_again_s, on_progress=on_progress)
        return audit.report()


class Audit:
    """Collects what one pass finds: first look, then report."""

    def __init__(self, ledger: Ledger, dataset: str, found: Scan) -> None:
        self.ledger = ledger
        self.dataset = dataset
        self.found = found
        self.queue: Queue | None = None
        """None while Redis does not answer."""
        self.sizes: dict[Kind, int] = {}
        """How long each file was when it was read."""
        self._redis_error = ""
        self._totals: Totals | None = None
        self._manifest: manifest.Manifest | None = None
        self._counts = Counts()
        self._problems = list[str]()
        self.notes = list[str]()
        """Sentences that need nothing done."""

    def look(self, queue: Queue, *, look_again_s: float, on_progress: Callable[[str], None]) -> None:
        """Ask Redis, then read every file."""
        # Redis first: an id is in samples.jsonl before it is there, and recorded before it leaves.
        try:
            note_redis(queue, self.dataset, self.found, look_again_s=look_again_s)
            self.queue = queue
        except redis.exceptions.RedisError as error:
            self.found.forget_waiting()
            self._redis_error = type(error).__name__
        for _ in range(_TRIES):
            begun = self._identities()
            self.sizes, self._totals = self._still_point()
            self.found.read_files(self.ledger.folder, self.sizes, dataset=self.dataset, on_progress=on_progress)
            if self._identities() == begun:
                return
            self.found.forget_files()  # records moved from a file that was not read yet to one that was
        raise StoreError(f"The files of {self.ledger.folder.path} were replaced each time that they were read.")

    def report(self) -> Report:
        """Account for what was found."""
        if self.queue is None:
            self.notes.append(f"Redis could not be asked: {self._redis_error}.")
        self._check_manifest()
        missing = self._account()
        left = self._say_what_is_left(missing)
        self._check_files()
        self._check_index()
        self._check_leftovers()
        self._check_states()
        self._check_turns()
        return Report(
            dataset=self.dataset,
            at=time.time(),
            counts=self._counts,
            problems=left + self._problems,
            notes=self.notes,
            missing=missing,
            duplicates=self.found.repeated(Kind.ACCEPTED, _SHOWN),
            bad_lines=self.found.bad,
        )

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

    def _identities(self) -> dict[Kind, int]:
        """Return the inode of each file: another one after a repair or a reclassify."""
        paths = {kind: self.ledger.folder.lines(kind) for kind in Kind}
        return {kind: path.stat().st_ino for kind, path in paths.items() if path.exists()}

    def _sizes(self) -> dict[Kind, int]:
        paths = {kind: self.ledger.folder.lines(kind) for kind in Kind}
        return {kind: path.stat().st_size for kind, path in paths.items() if path.exists()}

    def _account(self) -> list[str]:
        """Fill in the counts; return the first ids that are neither recorded nor in Redis."""
        counts, waiting = self._counts, dict.fromkeys(Waits, 0)
        for kind, waits, again, n in self.found.groups():
            if kind is Kind.REFUSED:
                counts.refused += n
                continue
            counts.samples += n
            if kind is Kind.PENDING or again:
                waiting[waits] += n
            else:
                setattr(counts, kind.value, getattr(counts, kind.value) + n)
        counts.read, counts.left = counts.refused + counts.samples, sum(waiting.values())
        if self.queue is None:
            counts.queued = counts.in_flight = counts.missing = counts.orphaned = counts.without_ticket = None
            return self.found.first(Question.MISSING, _SHOWN)
        first = list[str]()
        counts.missing = 0
        for ids in self.missing_pages():
            counts.missing += len(ids)
            first += ids[: _SHOWN - len(first)]
        counts.in_flight = waiting[Waits.FLYING]
        counts.orphaned, counts.without_ticket = waiting[Waits.ORPHANED], waiting[Waits.LOST]
        # What looked missing and came in while the files were read is queued.
        counts.queued = counts.left - counts.in_flight - counts.missing
        return first

    def missing_pages(self) -> Iterator[list[str]]:
        """Yield the ids that are neither done nor in Redis, also now that the files are read.

        A failed or rejected one is missing where Redis says that it is asked again and has lost it.
        """
        queue = self.queue
        if queue is None:
            return
        for ids in self.found.pages(Question.MISSING):
            # Queued after Redis was read, and recorded after the files were.
            gone = set(ids) - queue.waiting_ids(self.dataset, ids)
            known = self.ledger.look_up(gone)
            yield sorted(gone - {id_ for id_, entry in known.items() if entry.offset >= self.sizes.get(entry.kind, 0)})
        for ids in self.found.pages(Question.AGAIN_LOST):
            there = queue.waiting_ids(self.dataset, ids)
            yield [id_ for id_ in queue.asked_again(self.dataset, ids) if id_ not in there]

    def _say_what_is_left(self, missing: Sequence[str]) -> list[str]:
        counts, going = self._counts, (self._counts.queued or 0) + (self._counts.in_flight or 0)
        n = counts.left if counts.missing is None else counts.missing
        gone = (
            "not recorded, and without Redis nobody can tell whether they are queued"
            if counts.missing is None
            else f"neither done nor queued ({_examples(missing, n)}); run producer enqueue again{self._sources()}"
        )
        died = f", {counts.orphaned:,} of them with a worker that died" if counts.orphaned else ""
        ticketless = "in Redis without a ticket; a running worker queues them again within minutes"
        said = []
        for number, what in (
            (n, gone),
            (counts.without_ticket or 0, ticketless),
            (going - (counts.without_ticket or 0), f"still queued or in flight{died}"),
            (counts.failed, f"failed; ask again with producer retry {self.dataset}"),
        ):
            if number:
                said.append(f"{subject(number, 'sample')} {what}.")
        if not counts.samples:
            self.notes.append("There are no samples.")
        return said

    def _sources(self) -> str:
        known = self._manifest
        return f": {enqueue_command(known)}" if known and known.sources else ""

    def _check_files(self) -> None:
        found = self.found
        for kind, flaws in found.flaws.items():
            if flaws.repeated:
                first = _examples(found.repeated(kind, _SHOWN), flaws.repeated)
                where = f"on more than one line of {FILE_OF_KIND[kind]}"
                self._problems.append(f"{subject(flaws.repeated, 'id')} {where}: {first}.")
        if n := found.count(Question.FOREIGN):
            first = _examples(found.first(Question.FOREIGN, _SHOWN), n)
            self._problems.append(f"{subject(n, 'recorded or queued id')} in no samples.jsonl: {first}.")
        if bad := sum(flaws.bad for flaws in found.flaws.values()):
            self._problems.append(f"{subject(bad, 'line')} no sound record.")
        for kind, flaws in found.flaws.items():
            if flaws.torn:
                file = FILE_OF_KIND[kind]
                self._problems.append(f"The last line of {file} is torn; the next worker or enqueue mends it.")

    def _check_manifest(self) -> None:
        try:
            known = self._manifest = manifest.read(self.ledger)
        except StoreError as error:
            self._problems.append(str(error))
            return
        if known is None:
            self.notes.append("There is no manifest.json.")
        elif known.dataset != self.dataset:
            self._problems.append(f"{self.ledger.folder.manifest} belongs to the dataset {known.dataset!r}.")
        else:
            self._problems += manifest.unread_inputs(known)

    def index_differences(self) -> list[str]:
        """Return in words where the index counts other ids than the files hold."""
        if self._totals is None:
            return []
        in_files = dict.fromkeys(Kind, 0)
        for group in self.found.groups():
            in_files[group.kind] += group.n
        return [
            f"{kind}: {self._totals.count(kind):,} in the index, {n:,} in the files"
            for kind, n in in_files.items()
            if self._totals.count(kind) != n
        ]

    def _check_index(self) -> None:
        if differing := self.index_differences():
            where = self.ledger.index_path
            self._problems.append(
                f"{where} differs from the files ({'; '.join(differing)}); producer verify --repair makes it anew."
            )

    def _check_leftovers(self) -> None:
        found, folder = self.found, self.ledger.folder
        if self.queue is not None:
            pages, queue = found.pages(Question.STALE), self.queue
            if stale := sum(len(queue.waiting_ids(self.dataset, ids)) for ids in pages):
                self.notes.append(
                    f"{stale:,} payloads of recorded samples are still in Redis; their tickets drop them."
                )
        for path, what in ((folder.torn, "torn line"), (folder.quarantine, "piece")):
            if cut := sum(1 for _line in jsonl.read_lines(path)):
                self.notes.append(f"{subject(cut, what)} kept in {path.name}.")
        if any(found.flaws.values()) or found.count(Question.FOREIGN) or self.index_differences():
            self.notes.append(f"producer verify --repair {self.dataset} mends the files; nothing is deleted.")

    def _check_states(self) -> None:
        """Find files of hidden states that are gone or of another size; producer extract also reads them."""
        if not is_extraction(self.dataset):
            return
        found = check_files(self.ledger, read=False)
        if found.bad:
            again = shlex.join(["producer", "extract", self.dataset])
            first = "; ".join(found.examples[:1])
            self._problems.append(
                f"{subject(found.bad, 'recorded file')} missing or damaged ({first}); {again} makes them anew."
            )

    def _check_turns(self) -> None:
        """Find turns of accepted conversations that are gone; only their exact token ids are lost with them."""
        try:
            found = missing_turns(self.ledger)
        except StoreError as error:
            self._problems.append(str(error))
            return
        self.notes += found.mended
        if found.turns:
            self._problems.append(found.sentence(self.ledger))


def enqueue_command(known: manifest.Manifest) -> str:
    """Return the command that queues what is missing, for each source that the manifest knows."""
    if is_extraction(known.dataset):
        return shlex.join(["producer", "extract", known.dataset])
    if not known.sources:
        return f"producer enqueue SOURCE --dataset {known.dataset}"
    words = [
        shlex.join(["producer", "enqueue", entry.source, "--dataset", known.dataset])
        for entry in known.sources[-_SHOWN:]
    ]
    return " and ".join(words)


def _examples(ids: Sequence[str], n: int) -> str:
    return ", ".join(ids) + (", ..." if n > len(ids) else "")
