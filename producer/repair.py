"""Mends what verify finds: files, index and Redis' books.

Nothing is deleted, it is safe while workers run, and a second repair finishes what a killed one began.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import kombu.exceptions
import msgspec
import redis.exceptions

from app import jsonl, manifest
from app.errors import BrokerError, StoreError
from app.feeder import Feeder, Publish
from app.ledger import Ledger, Pen
from app.lock import FolderLock, LockedError
from app.manifest import Manifest
from app.places import FILE_OF_KIND, is_extraction
from app.queue import Queue
from app.records import ASKED_AGAIN, RECORDED, Kind, KnownSample, Sample, encode_line
from app.retry import carry_settings
from producer.rewrite import Moved, rewrite
from producer.scan import Question, Scan
from producer.soundness import Piece, is_named_rightly, record_of, true_names
from producer.texts import subject
from producer.verify import LOOK_AGAIN_S, Audit, enqueue_command

_SHOWN = 5
_PLANNED = {
    "Dropped": "drop",
    "Gave": "give",
    "Made": "make",
    "Moved": "move",
    "Queued": "queue",
    "Removed": "remove",
    "Wrote": "write",
}
"""What was done, as what would be."""
_CHUNK = 500

_decode_sample = msgspec.json.Decoder(Sample).decode


@dataclasses.dataclass(frozen=True)
class Tools:
    """What a repair needs beside the folder."""

    queue: Queue
    feeder: Feeder
    publish: Publish
    on_progress: Callable[[str], None] = lambda _words: None
    look_again_s: float = LOOK_AGAIN_S


def repair(ledger: Ledger, dataset: str, tools: Tools, *, dry_run: bool = False) -> list[str]:
    """Mend what can be mended and return one sentence for each thing done, or with `dry_run` for what would be.

    Safe while workers run, and to kill at any point. A folder that is not provably the dataset's is left alone.
    Where Redis does not answer, the files are mended and a sentence says what it could not be asked for.
    What the disk refuses is said, and the rest is done.
    """
    try:
        known = manifest.read(ledger)
    except StoreError as error:
        return [f"Nothing was repaired: {error}"]
    if known is None:
        why = f"{ledger.folder.manifest} is gone, and without it nobody can tell whose folder it is"
        return [f"Nothing was repaired: {why}; run producer enqueue with its source first."]
    if known.dataset != dataset:
        return [f"Nothing was repaired: {ledger.folder.path} is a copy of the dataset {known.dataset!r}."]
    try:
        with FolderLock(ledger.folder.repair_lock, patience_s=0).held(), Scan() as found:
            audit = Audit(ledger, dataset, found)
            audit.look(tools.queue, look_again_s=tools.look_again_s, on_progress=tools.on_progress)
            mender = _Mender(ledger, dataset, tools, audit, known, dry_run=dry_run)
            return [*audit.notes, *mender.run()]
    except LockedError as error:
        return [f"Nothing was repaired: another repair is at work; {error}"]


class _Mender:
    """Mends what one audit found."""

    def __init__(
        self, ledger: Ledger, dataset: str, tools: Tools, audit: Audit, known: Manifest, *, dry_run: bool
    ) -> None:
        self._ledger = ledger
        self._dataset = dataset
        self._tools = tools
        self._audit = audit
        self._found = audit.found
        self._known = known
        self._dry_run = dry_run
        self._said = list[str]()
        self._rewritten = False

    def run(self) -> list[str]:
        for step in (self._drop_leftovers, self._mend_files, self._mend_index, self._mend_samples, self._mend_redis):
            try:
                step()
            except StoreError as error:
                self._said.append(str(error))
        return self._said

    def _say(self, n: int, one: str, many: str) -> None:
        """Say in one sentence what was done to n things; nothing for none. `{n}` is the number."""
        if n:
            words = (one if n == 1 else many).format(n=f"{n:,}")
            verb, _, rest = words.partition(" ")
            self._said.append(f"Would {_PLANNED[verb]} {rest}" if self._dry_run else words)

    # Files

    def _drop_leftovers(self) -> None:
        """Remove the half copies that a killed command left; the files that they were copied from are whole."""
        folder = self._ledger.folder
        paths = [jsonl.temporary_of(path) for path in (*map(folder.lines, Kind), folder.manifest)]
        left = [path for path in paths if path.exists()]
        if left and not self._dry_run:
            with self._ledger.locked():
                for path in left:
                    path.unlink(missing_ok=True)
        self._say(len(left), "Removed 1 half copy of a killed command.", "Removed {n} half copies of killed commands.")

    def _mend_files(self) -> None:
        """Write the files with flaws anew."""
        misnamed = self._count_misnamed()
        for kind, flaws in self._found.flaws.items():
            if not flaws and not (misnamed and kind in RECORDED):
                continue
            moved = Moved(bad=flaws.bad + misnamed[kind], repeated=flaws.repeated)
            if not self._dry_run:
                try:
                    moved = rewrite(
                        self._ledger,
                        kind,
                        self._dataset,
                        is_misnamed=self._is_misnamed,
                        on_progress=self._tools.on_progress,
                    )
                except StoreError as error:
                    self._said.append(str(error))
                    continue
            self._rewritten = self._rewritten or bool(moved)
            file, to = FILE_OF_KIND[kind], self._ledger.folder.quarantine.name
            self._say(
                moved.bad,
                f"Moved 1 piece of {file} that is no sound record of this dataset to {to}.",
                f"Moved {{n}} pieces of {file} that are no sound records of this dataset to {to}.",
            )
            self._say(
                moved.repeated,
                f"Moved 1 line of {file} that repeats an id to {to}.",
                f"Moved {{n}} lines of {file} that repeat ids to {to}.",
            )
            self._say(
                moved.rescued,
                f"Gave 1 whole record on a damaged line of {file} a line of its own.",
                f"Gave {{n}} whole records on damaged lines of {file} lines of their own.",
            )

    def _count_misnamed(self) -> collections.Counter[Kind]:
        """Count by kind the records whose id was edited: enqueue never took it, and it took that of their prompt."""
        counts = collections.Counter[Kind]()
        for ids in self._found.pages(Question.FOREIGN):
            for id_, entry in self._ledger.look_up(ids).items():
                with contextlib.suppress(StoreError):  # the index lies, and is made anew
                    counts[entry.kind] += entry.kind in RECORDED and self._is_edited(self._ledger.read(entry, id_))
        return counts

    def _is_misnamed(self, piece: Piece) -> bool:
        return self._found.holds(Question.FOREIGN, piece.judgement.id) and self._is_edited(piece.data)

    def _is_edited(self, data: bytes) -> bool:
        if is_extraction(self._dataset):
            return False
        return any(self._found.holds(Question.TAKEN, name) for name in true_names(data))

    def _mend_index(self) -> None:
        name = self._ledger.index_path.name
        if self._rewritten:
            if not self._dry_run:
                self._tools.on_progress(f"making {name} anew")
                self._ledger.catch_up()
        elif self._audit.index_differences():
            if not self._dry_run:
                self._tools.on_progress(f"making {name} anew")
                self._ledger.rebuild()
        else:
            return
        self._say(1, f"Made {name} anew.", "")

    def _mend_samples(self) -> None:
        """Write the ids that are recorded or queued, and in no samples.jsonl, into it."""
        written, unsound = 0, list[str]()
        for ids in self._found.pages(Question.FOREIGN):
            entries = self._ledger.look_up(ids)
            payloads = self._payloads([id_ for id_ in ids if id_ not in entries])
            lost, new = list[Pen](), list[Pen]()
            for id_ in ids:
                entry = entries.get(id_)
                if entry is not None and entry.kind is Kind.PENDING:
                    continue  # enqueue has written it meanwhile
                data = self._ledger.read(entry, id_) if entry else b""
                sample = record_of(data, id_, self._dataset) if entry else payloads.get(id_)
                if sample is None:
                    if not self._is_edited(data) if entry else self._found.holds(Question.IN_REDIS, id_):
                        unsound.append(id_)
                    continue  # else its record is moved
                line = encode_line(KnownSample(id=id_, row=sample.source.row))
                (lost if entry else new).append(Pen(Kind.PENDING, id_, line))
            written += len(lost) + len(new)
            if not self._dry_run:
                self._ledger.commit(lost, known_too=True)
                self._ledger.commit(new)
        self._say(
            written,
            "Wrote 1 recorded or queued id that samples.jsonl lacked into it.",
            "Wrote {n} recorded or queued ids that samples.jsonl lacked into it.",
        )
        if unsound:
            self._said.append(
                f"{len(unsound):,} recorded or queued ids are in no samples.jsonl and {self._unsound}, so they were "
                f"left as they are: {', '.join(unsound[:_SHOWN])}"
                f"{', ...' if len(unsound) > _SHOWN else ''}."
            )

    @property
    def _unsound(self) -> str:
        if is_extraction(self._dataset):
            return "do not say which sample of which dataset they are"
        return "are not those of their own prompts"

    # Redis

    def _payloads(self, ids: Sequence[str]) -> dict[str, Sample]:
        """Return the waiting samples of those ids that are rightly named."""
        if self._audit.queue is None or not ids:
            return {}
        return {
            id_: sample
            for id_, sample in self._audit.queue.payloads(self._dataset, ids).items()
            if is_named_rightly(sample, self._dataset)
        }

    def _mend_redis(self) -> None:
        queue = self._audit.queue
        if queue is None:
            self._said.append(
                "Redis could not be asked for payloads and tickets, so nothing was queued again and nothing stale "
                "dropped; run producer verify --repair once more when it answers."
            )
            return
        try:
            if not self._dry_run and self._dataset not in queue.datasets() and queue.depth(self._dataset):
                carry_settings(queue, self._ledger, self._dataset)
            self._drop_stale(queue)
            self._queue_lost_rounds(queue)
            self._publish_lost(queue)
            self._say_what_is_missing()
        except (redis.exceptions.RedisError, kombu.exceptions.KombuError, BrokerError) as error:
            why = str(error) if isinstance(error, BrokerError) else type(error).__name__
            self._said.append(f"Redis failed meanwhile ({why}); run producer verify --repair once more.")

    def _drop_stale(self, queue: Queue) -> None:
        dropped = 0
        for ids in self._found.pages(Question.STALE):
            entries, payloads = self._ledger.look_up(ids), queue.payloads(self._dataset, ids)
            done = [id_ for id_, sample in payloads.items() if id_ in entries and entries[id_].settles(sample.round)]
            dropped += len(done)
            if not self._dry_run:
                queue.forget(self._dataset, {id_: payloads[id_].round for id_ in done})
        self._say(
            dropped,
            "Dropped the payload of 1 recorded sample from Redis.",
            "Dropped the payloads of {n} recorded samples from Redis.",
        )
        for ids in self._found.pages(Question.NOT_AGAIN):
            if not self._dry_run:
                queue.forget(self._dataset, ids)
        flights = queue.flights(self._dataset)
        alive = queue.living(set(flights.values()))
        dead = [id_ for id_, owner in flights.items() if owner not in alive]
        gone = sorted(set(dead) - queue.waiting_ids(self._dataset, dead))
        if not self._dry_run:
            queue.drop_flights(self._dataset, gone)
        self._say(
            len(gone),
            "Dropped the note that a dead worker asks 1 sample that does not wait any more.",
            "Dropped the notes that dead workers ask {n} samples that do not wait any more.",
        )

    def _queue_lost_rounds(self, queue: Queue) -> None:
        """Queue the failed and rejected samples again that were being asked again until Redis lost them."""
        queued = 0
        for ids in self._found.pages(Question.AGAIN_LOST):
            waiting = queue.waiting_ids(self._dataset, ids)
            lost = {id_: kind for id_, kind in queue.asked_again(self._dataset, ids).items() if id_ not in waiting}
            entries = self._ledger.look_up(lost)
            samples = [
                msgspec.structs.replace(_decode_sample(self._ledger.read(entry, id_)), round=entry.round + 1)
                for id_, entry in entries.items()
                if entry.kind in ASKED_AGAIN
            ]
            if self._dry_run:
                queued += len(samples)
                continue
            carry_settings(queue, self._ledger, self._dataset)
            before = {sample.id: entries[sample.id].kind for sample in samples}
            queued += sum(fed.queued for fed in self._tools.feeder.feed(samples, before))
        self._say(
            queued,
            "Queued 1 sample again that was to be asked again and that Redis had lost.",
            "Queued {n} samples again that were to be asked again and that Redis had lost.",
        )

    def _publish_lost(self, queue: Queue) -> None:
        """Give the samples a ticket that have none."""
        published = 0
        lost = queue.without_ticket(self._dataset, thorough=True) if self._found.count(Question.LOST) else set()
        for page in self._found.pages(Question.LOST, size=_CHUNK):
            ids = [id_ for id_ in page if id_ in lost]
            published += len(ids)
            if ids and not self._dry_run:
                self._tools.publish(self._dataset, ids)
        self._say(published, "Gave 1 sample in Redis its lost ticket.", "Gave {n} samples in Redis their lost tickets.")

    def _say_what_is_missing(self) -> None:
        missing = 0
        for ids in self._audit.missing_pages():
            # A record that was rescued just now is done, and a failed one has its prompt.
            known = self._ledger.look_up(ids)
            missing += sum(id_ not in known or known[id_].kind not in RECORDED for id_ in ids)
        if missing:
            self._said.append(
                f"{subject(missing, 'sample')} neither done nor in Redis, and the prompts are only in their source: "
                f"run {enqueue_command(self._known)}, with the options of the first time."
            )
