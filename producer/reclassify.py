"""Judges every answer of a dataset anew by other rules, and moves the records whose verdict changes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from app import exchange, jsonl, manifest
from app.broker import text
from app.errors import StoreError, UsageError
from app.ledger import Ledger
from app.lock import FolderLock, LockedError
from app.manifest import Manifest
from app.places import is_extraction
from app.queue import Queue
from app.records import ASKED_AGAIN, Kind
from app.rejudge import JUDGED, rules_of
from producer.judgements import Judgements, Line
from producer.rewrite import check_room

_TRIES = 4
"""How often it is begun anew while workers record retries of the same samples; the last time they wait meanwhile."""
_CHUNK = 500
_TELL_EVERY = 1000
_AGAIN = "producer reclassify"


@dataclasses.dataclass(frozen=True)
class Reclassified:
    """What came of judging a dataset anew."""

    changes: Counter[tuple[str, str]]
    """(verdict before, verdict now) -> samples; a verdict is `accepted`, or `rejected: ` and the reason."""
    unsound: int
    """Lines that are no records of the dataset, and stay where they are."""
    settings: manifest.SettingsEntry
    """The settings that enqueue has to name from now on."""
    same_settings: bool
    """Whether they were those before."""

    @property
    def changed(self) -> int:
        """How many samples have another verdict or another reason."""
        return sum(n for (before, now), n in self.changes.items() if before != now)


class _ChangedMeanwhileError(Exception):
    """What was judged is not all that counts any more."""


def reclassify(
    ledger: Ledger,
    dataset: str,
    rules: Mapping[str, Any],
    *,
    dry_run: bool = False,
    on_progress: Callable[[str], None] = lambda _words: None,
) -> Reclassified:
    """Judge all accepted and rejected records by the dataset's rules with these changes.

    Both files and the manifest are replaced together, durably: killed at any point it has done all or nothing. Workers
    may go on; they wait for the last moments alone. What they record from then on is judged by the new rules.
    Raises UsageError for what is no dataset of answers, StoreError, and DiskFullError before anything is done.
    """
    if is_extraction(dataset):
        raise UsageError(f"{dataset} holds hidden states and no answers; reclassify the dataset that they are made of.")
    try:
        with FolderLock(ledger.folder.repair_lock, patience_s=0).held():
            return _Job(ledger, dataset, rules, dry_run=dry_run, on_progress=on_progress).run()
    except LockedError as error:
        raise StoreError(f"A repair or another reclassify of {dataset!r} is at work; {error}") from error


def tell_redis(queue: Queue, ledger: Ledger, dataset: str, entry: manifest.SettingsEntry) -> int:
    """Carry the settings to the workers, and take accepted samples off the queue that were to be asked again.

    Returns how many. Raises redis.exceptions.RedisError.
    """
    if dataset not in queue.datasets():
        return 0
    queue.register(dataset, entry.fingerprint, entry.content)
    dropped = 0
    for kind in ASKED_AGAIN:
        members = map(text, queue.client.sscan_iter(queue.keys.again(dataset, kind), count=_CHUNK))
        while ids := list(itertools.islice(members, _CHUNK)):
            done = [id_ for id_, known in ledger.look_up(ids).items() if known.kind is Kind.ACCEPTED]
            dropped += len(queue.waiting_ids(dataset, done))
            queue.forget(dataset, done)
    return dropped


class _Job:
    """One reclassify."""

    def __init__(
        self,
        ledger: Ledger,
        dataset: str,
        rules: Mapping[str, Any],
        *,
        dry_run: bool,
        on_progress: Callable[[str], None],
    ) -> None:
        self._ledger = ledger
        self._dataset = dataset
        self._changes = rules
        self._dry_run = dry_run
        self._on_progress = on_progress
        self._at = time.time()

    def run(self) -> Reclassified:
        if not self._dry_run:
            self._ledger.catch_up()
            self._drop_prepared()  # by one that was killed
        for number in range(1, _TRIES + 1):
            self._ledger.catch_up()
            if repeated := self._ledger.duplicates():
                raise StoreError(
                    f"{repeated:,} accepted lines of {self._dataset!r} repeat an id; run producer verify "
                    f"{self._dataset} --repair first."
                )
            with contextlib.suppress(_ChangedMeanwhileError):
                return self._try(waits=number == _TRIES)
        raise StoreError(f"The files of {self._dataset!r} changed while they were judged; run {_AGAIN} again.")

    def _try(self, *, waits: bool) -> Reclassified:
        """Do it once; with `waits` nobody writes from the beginning on."""
        with contextlib.ExitStack() as stack:
            if waits:
                stack.enter_context(self._ledger.locked())
            before = self._manifest()
            wanted = manifest.with_rules(before, self._changes, at=self._at)
            judgements = stack.enter_context(Judgements(self._dataset, rules_of(wanted.settings[-1])))
            ends = self._judge(judgements, dict.fromkeys(JUDGED, 0))
            if not self._dry_run and judgements.changed:
                self._check_room()
                self._rewrite(judgements, ends, stack, waits=waits)
            elif not self._dry_run:
                self._write_rules(judgements, ends, stack, waits=waits)
        if not self._dry_run:
            self._ledger.catch_up()
        entry, current = wanted.settings[-1], before.current
        same = current is not None and current.content == entry.content
        return Reclassified(judgements.changes(), judgements.unsound, entry, same)

    def _manifest(self) -> Manifest:
        known = manifest.read(self._ledger)
        if known is None:
            raise StoreError(f"{self._ledger.folder.manifest} is gone; run producer enqueue with the source first.")
        if known.dataset != self._dataset:
            raise StoreError(f"{self._ledger.folder.path} is a copy of the dataset {known.dataset!r}.")
        return known

    def _judge(self, judgements: Judgements, starts: Mapping[Kind, int]) -> dict[Kind, int]:
        """Judge the whole lines from there on; return where each file's last one ended."""
        ends = dict[Kind, int]()
        for kind in (Kind.REJECTED, Kind.ACCEPTED):  # in this order, for an accepted line settles its id
            path, ends[kind] = self._ledger.folder.lines(kind), starts[kind]
            judgements.note_file(kind, path)
            for number, line in enumerate(jsonl.read_lines(path, starts[kind])):
                if not line.whole:
                    break  # it is being written, or torn
                judgements.take(kind, line.data)
                ends[kind] = line.offset + len(line.data) + 1
                if not number % _TELL_EVERY:
                    self._on_progress(f"judging {path.name}: {line.offset / 1e6:,.0f} MB, {number:,} records")
        judgements.settle()
        return ends

    def _check_room(self) -> None:
        paths = [path for path in map(self._ledger.folder.lines, JUDGED) if path.exists()]
        needed = sum(path.stat().st_size for path in paths)
        for path in paths:
            check_room(path, needed, again=_AGAIN)

    def _rewrite(
        self, judgements: Judgements, ends: Mapping[Kind, int], stack: contextlib.ExitStack, *, waits: bool
    ) -> None:
        """Write both files and the manifest anew, and let them take their places together."""
        folder = self._ledger.folder
        paths = [folder.lines(kind) for kind in JUDGED]
        with contextlib.ExitStack() as leaving:
            # Outside of the files' own ends: what was prepared vanishes, unless the journal names it by then.
            leaving.callback(self._drop_prepared)
            with jsonl.prepared(paths[0]) as accepted, jsonl.prepared(paths[1]) as rejected:
                files = {Kind.ACCEPTED: accepted, Kind.REJECTED: rejected}
                for kind, data in self._watched(judgements.lines(folder, dict.fromkeys(JUDGED, 0), ends)):
                    files[kind].write(data)
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())  # so that little is left for when the others wait
                if not waits:
                    stack.enter_context(self._ledger.locked())
                last = self._judge_the_rest(judgements, ends)
                for kind, data in judgements.lines(folder, ends, last):
                    files[kind].write(data)
            wanted = manifest.with_rules(self._manifest(), self._changes, at=self._at)
            with jsonl.prepared(folder.manifest) as file:
                file.write(manifest.encode(wanted))
            exchange.exchange(folder, [*paths, folder.manifest])

    def _drop_prepared(self) -> None:
        folder = self._ledger.folder
        if folder.journal.exists():
            return  # whoever opens the folder next ends it
        for path in (*map(folder.lines, JUDGED), folder.manifest):
            jsonl.temporary_of(path).unlink(missing_ok=True)

    def _write_rules(
        self, judgements: Judgements, ends: Mapping[Kind, int], stack: contextlib.ExitStack, *, waits: bool
    ) -> None:
        """Write the manifest alone, for no record changes."""
        if not waits:
            stack.enter_context(self._ledger.locked())
        self._judge_the_rest(judgements, ends)
        if judgements.changed:
            raise _ChangedMeanwhileError
        before = self._manifest()
        wanted = manifest.with_rules(before, self._changes, at=self._at)
        if wanted.settings != before.settings:
            jsonl.replace_file(self._ledger.folder.manifest, manifest.encode(wanted))

    def _judge_the_rest(self, judgements: Judgements, ends: Mapping[Kind, int]) -> dict[Kind, int]:
        """Judge what came in meanwhile; nobody writes now.

        Raises _ChangedMeanwhileError where it concerns samples that were judged before, or a file is another one.
        """
        last = self._judge(judgements, ends)
        paths = {kind: self._ledger.folder.lines(kind) for kind in JUDGED}
        sizes = {kind: path.stat().st_size if path.exists() else 0 for kind, path in paths.items()}
        if judgements.disturbed or last != sizes:
            raise _ChangedMeanwhileError
        return last

    def _watched(self, lines: Iterator[Line]) -> Iterator[Line]:
        for number, line in enumerate(lines):
            if not number % _TELL_EVERY:
                self._on_progress(f"writing the files anew: {number:,} records")
            yield line
