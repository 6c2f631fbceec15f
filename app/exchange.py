"""Gives several files of a dataset folder new contents at once: a kill at any point leaves all of them old, or all new.

Each new file is prepared beside the old one and fsynced; a journal that names them is the moment from which they count.
Whoever opens the folder next under its lock ends what the journal says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from app import jsonl
from app.errors import StoreError
from app.places import DatasetFolder


class _Journal(msgspec.Struct):
    """The files whose prepared contents count from now on."""

    files: list[str]


_decode = msgspec.json.Decoder(_Journal).decode


def exchange(folder: DatasetFolder, paths: Iterable[Path]) -> None:
    """Put what was prepared for each of the folder's paths (`jsonl.prepared`) into its place, all or nothing.

    The caller holds the folder's lock. Raises StoreError; what the journal says is then done by the next one.
    """
    journal = _Journal([path.name for path in paths])
    with jsonl.replacing(folder.journal) as file:
        file.write(msgspec.json.encode(journal) + b"\n")
    finish(folder)


def finish(folder: DatasetFolder, *, shared: bool = False) -> None:
    """End an exchange that was begun, if one was. The caller holds the folder's lock.

    `shared`: the folder lies on a network disk, which may remember for seconds that a file is not there.
    Raises StoreError.
    """
    with jsonl.translated(folder.journal):
        there = folder.journal in folder.path.iterdir() if shared else folder.journal.exists()
        if not there:
            return
        data = folder.journal.read_bytes()
    try:
        journal = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"{folder.journal} cannot be understood ({error}); the disk has lost what promptmill wrote there."
        raise StoreError(message) from error
    for name in journal.files:
        _take_place(folder.path / name)
    with jsonl.translated(folder.journal):
        folder.journal.unlink()
        jsonl.fsync_folder(folder.path)


def _take_place(path: Path) -> None:
    real, new = Path(os.path.realpath(path)), jsonl.temporary_of(path)
    with jsonl.translated(path):
        if new.exists():  # else it was renamed before a kill
            new.replace(real)
            jsonl.fsync_folder(real.parent)
