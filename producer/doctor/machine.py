"""This machine: settings, the folder of results, its disk, open files."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from app import mounts, setting_checks
from app.errors import StoreError
from app.ledger import Ledger
from app.places import dataset_folder
from app.preflight import Files
from app.settings import StoreSettings
from producer.doctor.checks import Check, Level
from producer.measures import size

_LOW_BYTES = 10**9
"""Less free space than this is worth a warning, whatever the estimate says."""


def check_settings_names() -> Iterator[Check]:
    """Look for variables and file entries that no setting reads."""
    unknown = setting_checks.unknown_variables()
    for sentence in unknown:
        yield Check(Level.WARN, "settings.names", sentence)
    if not unknown:
        yield Check(Level.OK, "settings.names", "every MILL_ variable is a setting.")


def check_folder(store: StoreSettings, dataset: str | None) -> Iterator[Check]:
    """Look whether results can be written, without leaving anything behind."""
    folder = _existing(store.prepared_dir)
    try:
        _write_and_remove(folder)
        if dataset is not None and (place := dataset_folder(store.prepared_dir, dataset)).path.is_dir():
            with Ledger(place) as ledger:
                ledger.check_writable()
        yield Check(Level.OK, "disk.writable", f"{store.prepared_dir} can be written.")
    except (StoreError, OSError) as error:
        why = str(error) if isinstance(error, StoreError) else f"{folder}: {error.strerror}; check it and its rights."
        yield Check(Level.FAIL, "disk.writable", why)
    if mounts.is_shared(store.prepared_dir.absolute()):
        words = "lies on a disk that several machines may share; its lock must work there (docs/several-machines.md)."
        yield Check(Level.NOTE, "disk.shared", f"{store.prepared_dir} {words}")


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    path = folder.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _write_and_remove(folder: Path) -> None:
    probe = folder / f".probe-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        probe.write_bytes(b"ok\n")
    finally:
        probe.unlink(missing_ok=True)


def check_space(store: StoreSettings, needed: tuple[float, float] | None) -> Iterator[Check]:
    """Compare the free space with the bytes that the run is estimated to need, least and most; None: not known."""
    folder = _existing(store.prepared_dir)
    free = shutil.disk_usage(folder).free
    told = f"{size(free)} are free at {folder}"
    if needed is not None and needed[0] > free:
        sentence = f"{told}, and the records need about {size(needed[0])} to {size(needed[1])}; use a larger disk."
        yield Check(Level.FAIL, "disk.space", sentence)
    elif needed is not None and needed[1] > free:
        sentence = f"{told}, and the records may need {size(needed[1])}; free some space or use a larger disk."
        yield Check(Level.WARN, "disk.space", sentence)
    elif free < _LOW_BYTES:
        yield Check(Level.WARN, "disk.space", f"only {told}; free some space or set MILL_PREPARED_DIR to another disk.")
    else:
        yield Check(Level.OK, "disk.space", f"{told}.")


def check_files(files: Files) -> Iterator[Check]:
    """Compare the limit on open files with what one worker with a slot for every request needs."""
    if files.hard is not None and files.hard < files.needed:
        sentence = (
            f"a worker with {files.slots} slots needs {files.needed} open files and may have {files.hard}; raise the "
            f"limit (ulimit -Hn {files.needed}) or share the slots among several workers."
        )
        yield Check(Level.WARN, "machine.files", sentence)
    else:
        limit = "without limit" if files.hard is None else f"of {files.hard}"
        sentence = f"{files.needed} open files {limit} are enough for one worker with {files.slots} slots."
        yield Check(Level.OK, "machine.files", sentence)
