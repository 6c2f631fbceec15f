"""Takes a snapshot of a run out of Redis and the dataset folders, and keeps the progress files."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis.exceptions

from app import broker, history, jsonl, manifest
from app.broker import BrokerUrl
from app.edges import first_and_last
from app.errors import StoreError, UsageError
from app.head import decode_head
from app.histogram import Histogram, from_buckets
from app.index import Entry, Index, Totals
from app.ledger import Ledger
from app.lock import LOOK_PATIENCE_S, LockedError
from app.outlook import Scene
from app.places import DatasetFolder, dataset_folder, folder_name, is_extraction
from app.queue import Queue
from app.reckoning import Findings, combine, count, dataset_part
from app.records import Kind
from app.snapshot import BrokerState, Endpoint, Part, Snapshot
from app.surroundings import find_obstacle, read_endpoints, worth_saying
from app.tally import Counted

_BATCH = 5000
"""Lines taken into a scratch index at once."""
_TAIL_BYTES = 65536


def take_snapshot(
    queue: Queue | None,
    prepared: Path,
    datasets: Sequence[str] | None = None,
    *,
    url: BrokerUrl | None = None,
    now: Callable[[], float] | None = None,
) -> Snapshot:
    """Return the numbers of the named datasets, or of all that Redis or the prepared folder know.

    Without a queue, and where Redis does not answer, the files alone speak: what waits is null then. Rates look back
    from Redis' time, by which they are kept, unless `now` says another.
    Raises UsageError for a dataset that neither knows.
    """
    try:
        return _take(queue, prepared, datasets, url=url, now=now, notes=[])
    except redis.exceptions.RedisError as error:
        why = str(broker.translate(error, url or _UNNAMED))
        return _take(None, prepared, datasets, url=url, now=now, notes=[why])


_UNNAMED = BrokerUrl(client="", celery="", shown="MILL_REDIS_URL")


def _take(
    queue: Queue | None,
    prepared: Path,
    wanted: Sequence[str] | None,
    *,
    url: BrokerUrl | None,
    now: Callable[[], float] | None,
    notes: list[str],
) -> Snapshot:
    at = now() if now else time.time()
    known = queue.datasets() if queue else []
    workers = queue.workers() if queue else []
    endpoints = read_endpoints(queue, workers) if queue else []
    moment = queue.now() if queue and now is None else at
    scene = _scene(queue, workers, endpoints, at=at, now=moment)
    folders, strange = find_datasets(prepared, known)
    names = _choose(folders, wanted, prepared, complete=queue is not None)
    found = [_read(queue, name, folders[name]) for name in names]
    scenes = _by_work(queue, workers, endpoints, at=at, now=moment) if any(map(is_extraction, names)) else {}
    parts = [dataset_part(one, scenes.get(is_extraction(name), scene)) for name, one in zip(names, found, strict=True)]
    if queue and (danger := broker.eviction_danger(queue.client.info("memory"), str(url or _UNNAMED))):
        notes.append(danger)
    notes += [*strange, *worth_saying(workers, endpoints, now=at)]
    return Snapshot(
        at=at,
        broker=BrokerState(reachable=queue is not None, url=url.shown if url else ""),
        totals=combine(parts, found, scene, notes),
        datasets=dict(zip(names, parts, strict=True)),
        workers=workers,
        endpoints=endpoints,
    )


def _scene(
    queue: Queue | None, workers: list[dict[str, Any]], endpoints: Sequence[Endpoint], *, at: float, now: float
) -> Scene:
    changes = [endpoint.since for endpoint in endpoints if endpoint.since]
    up = [endpoint.since for endpoint in endpoints if endpoint.state == "up" and endpoint.since]
    obstacle = find_obstacle(workers, endpoints, now=at)
    return Scene(
        now=now,
        reachable=queue is not None,
        workers=workers,
        obstacle=obstacle,
        # It became one with the last server that went down; of a full disk the time is not known.
        obstacle_since=None if up or obstacle is None else max(changes, default=None),
        workers_changed_at=queue.tally.changed() if queue else None,
        server_changed_at=max(changes, default=None),
        server_up_since=min(up, default=None),
    )


def _by_work(
    queue: Queue | None, workers: list[dict[str, Any]], endpoints: Sequence[Endpoint], *, at: float, now: float
) -> dict[bool, Scene]:
    """Return who works on prompts, and who on hidden states, for which no model server is asked."""
    extractors = [worker for worker in workers if worker.get("makes")]
    askers = [worker for worker in workers if not worker.get("makes")]
    scene = _scene(queue, extractors, [], at=at, now=now)
    return {
        False: _scene(queue, askers, endpoints, at=at, now=now),
        True: dataclasses.replace(scene, started_by="producer up --extract"),
    }


def _choose(
    folders: Mapping[str, DatasetFolder], wanted: Sequence[str] | None, prepared: Path, *, complete: bool
) -> list[str]:
    unknown = [name for name in wanted or () if name not in folders]
    if unknown:
        names = ", ".join(sorted(folders)) or "none"
        where = f"{prepared} or Redis" if complete else f"{prepared} (Redis could not be asked)"
        raise UsageError(f"There is no dataset {unknown[0]!r} in {where}; known are: {names}.")
    return list(wanted) if wanted else sorted(folders)


# Datasets


def find_datasets(prepared: Path, known: Iterable[str]) -> tuple[dict[str, DatasetFolder], list[str]]:
    """Return the folders of all datasets by name, and a sentence for each folder that cannot be told.

    `known` are the names in Redis; the rest comes out of the folders' manifests, which hold the true names.
    """
    folders = {name: dataset_folder(prepared, name) for name in known}
    notes, by_folder = [], {folder.path.name for folder in folders.values()}
    for path in sorted(prepared.glob("*/manifest.json")):
        if path.parent.name in by_folder:
            continue
        folder = DatasetFolder(path.parent)
        try:
            found = manifest.read(Ledger(folder))
        except StoreError as error:
            notes.append(str(error))
            continue
        if found is None:
            continue
        if folder_name(found.dataset) == path.parent.name:
            folders[found.dataset] = folder
        else:
            notes.append(f"{path.parent} holds a copy of the dataset {found.dataset!r} and is left out.")
    return folders, notes


def _read(queue: Queue | None, dataset: str, folder: DatasetFolder) -> Findings:
    waiting = queue.waiting(dataset) if queue else None
    counted = queue.tally.look(dataset) if queue else Counted()
    totals, notes = read_totals(folder)
    if queue and waiting and count(totals, waiting).missing:
        # Enqueue writes an id down before it puts it into Redis: what came in between the two reads is not missing.
        later = queue.waiting(dataset)
        waiting = dataclasses.replace(later, prompts=max(waiting.prompts, later.prompts))
    if waiting and waiting.prompts and not totals.samples:
        notes.append(
            f"Redis holds {waiting.prompts:,} prompts that {folder.path} knows nothing of; is this the right "
            "MILL_PREPARED_DIR?"
        )
    if waiting and not waiting.prompts and not totals.samples and not folder.manifest.exists():
        notes.append(f"Redis knows this dataset, but there is no {folder.path}; is this the right MILL_PREPARED_DIR?")
    notes += _unread_inputs(folder)
    first, last = _edges(folder)
    return Findings(totals, waiting, counted, first, last, notes)


def _edges(folder: DatasetFolder) -> tuple[float | None, float | None]:
    try:
        return first_and_last(folder)
    except StoreError:
        return None, None  # whoever counts the records tells of it


def _unread_inputs(folder: DatasetFolder) -> list[str]:
    try:
        known = manifest.read(Ledger(folder))
    except StoreError:
        return []  # whoever needs the manifest tells of it
    return manifest.unread_inputs(known) if known else []


def read_totals(folder: DatasetFolder) -> tuple[Totals, list[str]]:
    """Return what a dataset folder holds, up to the last whole line, and what a person should know of it.

    The index is brought up to date first, or does without what was written last where the folder's lock is held for
    long; a folder that cannot be written is read instead.
    """
    if not folder.path.is_dir():
        return Totals({}, {}), []
    with Ledger(folder, patience_s=LOOK_PATIENCE_S) as ledger:
        try:
            notes = _brought_up_to_date(ledger)
            totals, bad, twice = ledger.totals(), len(ledger.bad_lines()), ledger.duplicates()
        except StoreError as error:
            return scan_totals(folder), [f"{error} The numbers were read from its files."]
    if bad:
        notes.append(f"{bad:,} lines in {folder.path} are no records; producer verify names them.")
    if twice:
        notes.append(f"{twice:,} accepted lines in {folder.path} repeat an id; producer verify names them.")
    return totals, notes


def _brought_up_to_date(ledger: Ledger) -> list[str]:
    try:
        return [str(mending) for mending in ledger.catch_up()]
    except LockedError as error:
        return [f"{error} The numbers are those of the last write."]


def scan_totals(folder: DatasetFolder) -> Totals:
    """Return the counts by reading every line; the folder is left as it is, in bounded memory."""
    with tempfile.TemporaryDirectory(prefix="promptmill-") as scratch:
        index = Index(Path(scratch) / "index.sqlite")
        try:
            index.make()
            for kind in Kind:
                rows = list[tuple[str, Entry]]()
                for line in jsonl.read_lines(folder.lines(kind)):
                    try:
                        head = decode_head(line.data)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        continue
                    entry = Entry(kind, head.reason or "", head.round, line.offset, len(line.data), head.tokens)
                    rows.append((head.id, entry))
                    if len(rows) >= _BATCH:
                        _merge(index, rows)
                _merge(index, rows)
            return index.totals()
        finally:
            index.close()


def _merge(index: Index, rows: list[tuple[str, Entry]]) -> None:
    with index.transaction() as change:
        change.merge(rows)
    rows.clear()


# Progress files


def write_progress(ledger: Ledger, snapshot: Snapshot, *, at: float, before: Snapshot | None = None) -> None:
    """Replace `progress.json` and append a line to `progress.jsonl`, for the dataset of this folder.

    `progress.json` is a snapshot of that dataset alone; a line is what charts need of it (app/history.py), with the
    latency of the calls since `before`, and stands at `at`, Unix seconds by Redis' clock, for workers of any machine
    write by turns; never before the line that was written last. Nothing is written for a dataset that the snapshot
    lacks.
    Raises StoreError.
    """
    name = next((name for name in snapshot.datasets if folder_name(name) == ledger.folder.path.name), None)
    if name is None:
        return
    part: Part = snapshot.datasets[name]
    alone = msgspec.structs.replace(snapshot, datasets={name: part}, totals=part)
    jsonl.replace_file(ledger.folder.progress, encode(alone))
    recent = _latencies_since(part, before.datasets.get(name) if before else None)
    p95 = recent.quantile(0.95)
    point = history.make_point(snapshot, part, at=at, latency_p95_s=None if p95 is None else round(p95, 3))
    # No fsync: recorders wait for this lock, and a lost line of progress is no loss.
    with ledger.locked(), jsonl.translated(ledger.folder.progress_log):
        _append_point(ledger.folder.progress_log, point)


def _latencies_since(part: Part, before: Part | None) -> Histogram:
    if before is None:
        return Histogram()
    now, then = (from_buckets(one.latency.buckets, one.latency.sum_s) for one in (part, before))
    return now.since(then)


def encode(snapshot: Snapshot) -> bytes:
    """Return a snapshot as strict, indented JSON."""
    return msgspec.json.format(msgspec.json.encode(snapshot), indent=2) + b"\n"


def _append_point(path: Path, point: history.Point) -> None:
    """Append a point, after cutting off a torn line that a crash left behind."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - _TAIL_BYTES)
        file.seek(begin)
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            size = begin + tail.rfind(b"\n") + 1
            file.truncate(size)
        file.seek(size)
        in_order = max(point.at, history.last_at(tail))  # Redis' clock may have been set back
        file.write(history.encode(msgspec.structs.replace(point, at=in_order)))
