"""An export's file appears whole or not at all, whatever happens to the disk, the process or the path."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import DiskFullError, StoreError, UsageError
from app.ledger import Ledger
from app.places import DatasetFolder
from producer.export.run import export
from tests.support.exports import ids_of, ledger_with, many, record
from tests.support.folders import largest_file
from tests.support.processes import subprocess_env


def test_an_existing_output_is_refused(tmp_path: Path) -> None:
    """A file that is there is replaced only with overwrite, a folder never."""
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")
    (tmp_path / "folder.jsonl").mkdir()
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        with pytest.raises(UsageError, match="exists already; choose another --output, or replace it"):
            export(ledger, format="tokens", output=output)
        assert output.read_text() == "old\n"
        export(ledger, format="tokens", output=output, overwrite=True)
        assert ids_of(output) == ["a"]
        with pytest.raises(UsageError, match="is a folder"):
            export(ledger, format="tokens", output=tmp_path / "folder.jsonl", overwrite=True)


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    """A file that somebody else makes while the export runs is not replaced without overwrite."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", [record("a")]) as ledger, pytest.raises(UsageError, match="exists already"):
        export(ledger, format="tokens", output=output, on_progress=lambda *_: output.write_text("theirs\n"))
    assert output.read_text() == "theirs\n"
    assert not (tmp_path / ".out.jsonl.tmp").exists()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, suffix: str) -> None:
    """A write that the disk refuses is one sentence, and neither harms the old output nor leaves rubbish."""
    output = tmp_path / f"out{suffix}"
    output.write_bytes(b"old")
    ids = [number * 7919 % 100_003 for number in range(30_000)]
    with ledger_with(tmp_path / "d", [record("a", prompt_token_ids=ids)]) as ledger:
        ledger.catch_up()
        with largest_file(40_000), pytest.raises(DiskFullError, match="cannot grow"):
            export(ledger, format="tokens", output=output, overwrite=True)
    assert output.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", output.name]


def test_an_unwritable_place_is_one_sentence(tmp_path: Path) -> None:
    """An output below something that is no folder is refused in one sentence that names it."""
    (tmp_path / "file").write_text("x")
    with ledger_with(tmp_path / "d", [record("a")]) as ledger, pytest.raises(StoreError, match=r"out\.jsonl cannot be"):
        export(ledger, format="tokens", output=tmp_path / "file" / "out.jsonl")


def test_two_exports_of_one_path(tmp_path: Path) -> None:
    """While another process writes the same output, an export is refused and disturbs nothing."""
    output, temporary = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.tmp"
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        with temporary.open("wb") as theirs:
            fcntl.flock(theirs, fcntl.LOCK_EX)
            with pytest.raises(StoreError, match="Another export is writing"):
                export(ledger, format="tokens", output=output)
            assert temporary.exists()
        export(ledger, format="tokens", output=output)
    assert ids_of(output) == ["a"]


@pytest.mark.parametrize("fate", ["renamed", "removed"])
def test_a_finished_export_is_never_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str) -> None:
    """An export that opens the temporary file just before its last owner renames or removes it takes a new one."""
    output, temporary, theirs = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.tmp", tmp_path / "theirs.jsonl"
    temporary.write_text("finished\n")
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB and temporary.exists() and temporary.stat().st_size:
            temporary.rename(theirs)
            if fate == "renamed":
                temporary.write_text("")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        export(ledger, format="tokens", output=output)
    assert theirs.read_text() == "finished\n"
    assert ids_of(output) == ["a"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from app.ledger import Ledger
from app.places import DatasetFolder
from producer.export.run import export

def die(done, total):
    os.kill(os.getpid(), signal.SIGKILL)

with Ledger.open(DatasetFolder(Path(sys.argv[1]))) as ledger:
    export(ledger, format="sharegpt", output=Path(sys.argv[2]), overwrite=True, on_progress=die)
"""


@pytest.mark.fault
@pytest.mark.parametrize("old", [b"", b'{"id": "old"}\n'])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_killed_export_leaves_the_old_file_or_none(tmp_path: Path, old: bytes, suffix: str) -> None:
    """SIGKILL in the middle leaves the old output or none, and the next export clears what remained and succeeds."""
    output, temporary = tmp_path / f"out{suffix}", tmp_path / f".out{suffix}.tmp"
    if old:
        output.write_bytes(old)
    with ledger_with(tmp_path / "d", many(30, chars=300_000)):
        pass
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "d"), str(output)]
    assert subprocess.run(command, env=subprocess_env(), check=False).returncode == -signal.SIGKILL
    assert (output.read_bytes() if output.exists() else b"") == old
    assert temporary.stat().st_size > 1_000_000 or suffix == ".parquet"
    with Ledger.open(DatasetFolder(tmp_path / "d")) as ledger:
        assert export(ledger, format="sharegpt", output=output, overwrite=True).exported == 30
    assert not temporary.exists()
    if suffix == ".jsonl":
        assert json.loads(output.read_bytes().splitlines()[-1])["id"] == "s00029"
