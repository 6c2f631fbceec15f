"""Fixtures of the ground floor's tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.ledger import Ledger
from app.places import DatasetFolder


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that a user without rights can look into; pytest's own are closed to others."""
    path = Path(tempfile.mkdtemp(prefix="mill-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def folder(tmp_path: Path) -> DatasetFolder:
    """Return a dataset folder that does not exist yet."""
    return DatasetFolder(tmp_path / "prepared" / "d")


@pytest.fixture
def ledger(folder: DatasetFolder) -> Iterator[Ledger]:
    """Return an open ledger."""
    with Ledger.open(folder) as opened:
        yield opened
