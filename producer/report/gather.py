"""Gathers what a report tells, out of the files alone: numbers, distributions, points over time, failures, settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from app import history, manifest
from app.errors import StoreError, UsageError
from app.failures import FailureBook, Group
from app.history import Point
from app.ledger import Ledger
from app.manifest import Manifest
from app.places import DatasetFolder, dataset_folder
from app.progress import take_snapshot
from app.records import Kind
from app.snapshot import Part, Snapshot
from producer.report.scan import Scan, scan, size_of

MOST_POINTS = 240
"""Points of a chart: a column of it is wider than a pixel then."""

Tell = Callable[[str, int, int], None]
"""Told of a dataset's name, the bytes read and all bytes that will be read."""


@dataclasses.dataclass(frozen=True)
class Section:
    """All that is told of one dataset, or of all together."""

    name: str
    part: Part
    scan: Scan
    points: Sequence[Point]
    failures: Sequence[tuple[Group, int]] = ()
    """Classes, and how many samples are on disk so now; the largest first."""
    manifest: Manifest | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything on the page."""

    at: float
    """Unix seconds."""
    folder: Path
    snapshot: Snapshot
    whole: Section | None
    """All datasets together, where there are several."""
    sections: Sequence[Section]


def gather(prepared: Path, datasets: Sequence[str], *, tell: Tell) -> Report:
    """Read everything, each record once.

    Raises UsageError where there is no such dataset, StoreError.
    """
    snapshot = take_snapshot(None, prepared, datasets or None)
    if not snapshot.datasets:
        raise UsageError(f"There is no dataset in {prepared}; producer enqueue makes one.")
    folders = {name: dataset_folder(prepared, name) for name in snapshot.datasets}
    sizes = {name: size_of(folder) for name, folder in folders.items()}
    progress = _Progress(sum(sizes.values()), tell)
    sections = [_section(name, folders[name], snapshot, progress) for name in folders]
    return Report(snapshot.at, prepared, snapshot, _together(sections, snapshot), sections)


class _Progress:
    """Counts the bytes that have been read."""

    def __init__(self, total: int, tell: Tell) -> None:
        self._read = 0
        self._total = total
        self._tell = tell

    def of(self, name: str) -> Callable[[int], None]:
        """Return what is told of more bytes of a dataset."""

        def add(more: int) -> None:
            self._read += more
            self._tell(name, self._read, self._total)

        return add


def _section(name: str, folder: DatasetFolder, snapshot: Snapshot, progress: _Progress) -> Section:
    part = snapshot.datasets[name]
    return Section(
        name=name,
        part=part,
        scan=scan(folder, tell=progress.of(name)),
        points=history.read_points(folder, most=MOST_POINTS),
        failures=_failures(folder, part),
        manifest=_manifest(folder),
    )


def _failures(folder: DatasetFolder, part: Part) -> list[tuple[Group, int]]:
    counts = {(kind, reason): n for kind in (Kind.FAILED, Kind.REJECTED) for reason, n in part.reasons[kind].items()}
    if not counts:
        return []
    book = FailureBook(folder)
    groups = {(group.kind, group.reason): group for group in book.look()}
    while not book.complete:
        groups = {(group.kind, group.reason): group for group in book.look()}
    known = [(groups.get(key) or Group(*key), n) for key, n in counts.items()]
    return sorted(known, key=lambda item: (item[0].kind is not Kind.FAILED, -item[1]))


def _manifest(folder: DatasetFolder) -> Manifest | None:
    try:
        with Ledger(folder) as ledger:
            return manifest.read(ledger)
    except StoreError:
        return None  # the snapshot's notes tell of it


def _together(sections: Sequence[Section], snapshot: Snapshot) -> Section | None:
    if len(sections) < 2:
        return None
    whole = Scan()
    for section in sections:
        whole.merge(section.scan)
    points = history.combine_points([section.points for section in sections], most=MOST_POINTS)
    return Section("All datasets", snapshot.totals, whole, points)
