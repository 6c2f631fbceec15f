"""The disk fails while workers run: full in the middle of a write, read-only, gone, edited by hand, slow."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from app.places import DatasetFolder
from producer.simulator.rules import Rule
from producer.simulator.server import ModelServer
from tests.conftest import ModelServerFactory
from tests.support.aftermath import assert_asked_once, assert_balanced, assert_quiet, prompts, recorded_prompts
from tests.support.folders import mounted
from tests.support.mill import Mill
from tests.support.processes import PROJECT_ROOT, ManagedProcess, WorkerProcess, run_command, wait_until

pytestmark = pytest.mark.fault

_ANSWER_BYTES = 60_000
"""Answers are so long that the file of records outgrows the index and the logs."""


def _start(
    mill: Mill, model_server: ModelServerFactory, count: int = 60
) -> tuple[ModelServer, list[str], WorkerProcess]:
    """Let a worker record a few of so many long answers."""
    server = model_server(default=Rule(content="x" * _ANSWER_BYTES), latency_s=0.3)
    rows = prompts(count)
    mill.enqueue(rows, "--max-tokens", "100000")
    worker = mill.worker(concurrency=4)
    mill.wait_recorded(12)
    return server, rows, worker


def _assert_held(mill: Mill, server: ModelServer, worker: WorkerProcess, *words: str) -> None:
    """Assert that the worker holds its records, asks for nothing and says why, in its log and in status."""
    told = worker.wait_for_output("No new request is sent")
    for word in words:
        assert word in told
    wait_until(lambda: server.in_flight == 0, 20, "no request in flight", detail=mill.tails)
    asked = server.stats["total"]
    status = wait_until(lambda: (said := mill.status())["workers"][0]["note"] and said, 20, "a note", detail=mill.tails)
    assert status["workers"][0]["state"] == "waiting for disk"
    assert server.stats["total"] == asked


def _assert_finished(mill: Mill, server: ModelServer, rows: Sequence[str], worker: WorkerProcess) -> None:
    mill.wait_recorded(len(rows))
    mill.wait_idle()
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())


@pytest.mark.slow
def test_a_disk_that_ends_in_the_middle_of_a_line(mill: Mill, model_server: ModelServerFactory) -> None:
    """A write that stops half-way is taken back, its records wait, and are written whole when there is room."""
    server, rows, worker = _start(mill, model_server)
    limits = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
    room = mill.out().stat().st_size + _ANSWER_BYTES // 2
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (room, limits[1]))

    _assert_held(mill, server, worker, "cannot grow", "of case wait")
    assert mill.out().read_bytes().endswith(b"\n")
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, limits)
    _assert_finished(mill, server, rows, worker)
    assert not mill.folder().torn.exists()


@pytest.mark.slow
def test_a_disk_that_becomes_read_only(mill: Mill, model_server: ModelServerFactory) -> None:
    """On a disk that becomes read-only the work is held, and goes on by itself when it can be written again."""
    server, rows, worker = _start(mill, model_server)
    # As a second mount over the first: files that are open keep the first from being remounted.
    with mounted(mill.prepared, "--bind", str(mill.prepared)) as done:
        if not done:
            pytest.skip("a read-only disk needs root, in a container that allows mounts")
        subprocess.run(["mount", "-o", "remount,ro,bind", str(mill.prepared)], check=True)
        _assert_held(mill, server, worker, "Read-only file system")
    _assert_finished(mill, server, rows, worker)


@pytest.mark.slow
def test_a_folder_that_is_moved_away_and_back(mill: Mill, model_server: ModelServerFactory) -> None:
    """Without its folder a worker holds what it has, makes no new one, and goes on when the folder is back."""
    server, rows, worker = _start(mill, model_server)
    path = mill.folder().path
    away = path.with_name("away")
    path.rename(away)
    assert str(path) in worker.wait_for_output("No new request is sent")
    wait_until(lambda: server.in_flight == 0, 20, "no request in flight", detail=mill.tails)
    assert not path.exists()
    away.rename(path)
    _assert_finished(mill, server, rows, worker)


@pytest.mark.slow
def test_a_folder_that_is_deleted_is_made_and_filled_again(mill: Mill, model_server: ModelServerFactory) -> None:
    """After somebody deleted the folder enqueue makes it again; the same worker then records every sample in it."""
    _server, rows, worker = _start(mill, model_server, 40)
    worker.pause()
    shutil.rmtree(mill.folder().path)
    worker.resume()
    worker.wait_for_output("No new request is sent")
    assert not mill.folder().path.exists()
    mill.enqueue(rows, "--max-tokens", "100000")
    mill.wait_recorded(len(rows))
    mill.wait_idle()
    assert_balanced(mill, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())


@pytest.mark.slow
def test_a_file_that_is_edited_while_work_runs(mill: Mill, model_server: ModelServerFactory) -> None:
    """Lines cut out by hand are missed and asked again after enqueue; nothing else is asked or recorded twice."""
    server, rows, worker = _start(mill, model_server)
    worker.pause()
    lines = mill.out().read_bytes().splitlines(keepends=True)
    kept = recorded_prompts(mill)[3:]
    beside = mill.out().with_suffix(".edited")
    beside.write_bytes(b"".join(lines[3:]))
    beside.replace(mill.out())
    worker.resume()
    mill.wait_recorded(len(rows) - 3)
    counts = mill.wait_idle()
    assert (counts["accepted"], counts["missing"]) == (len(rows) - 3, 3)

    assert "queued 3" in mill.enqueue(rows, "--max-tokens", "100000").stdout
    mill.wait_recorded(len(rows))
    mill.wait_idle()
    assert_balanced(mill, rows)
    assert_asked_once(server, kept)
    assert sum(server.counts.values()) == len(rows) + 3
    assert worker.stop() == 0
    assert_quiet(worker.output())


_SLOW_DISK = """
import os, time
_true = os.fdatasync
def _slow(descriptor):
    time.sleep(1.0)
    _true(descriptor)
os.fdatasync = _slow
"""


@pytest.mark.slow
def test_a_disk_whose_fsync_takes_a_second_slows_only_the_disk(
    mill: Mill, model_server: ModelServerFactory, tmp_path: Path
) -> None:
    """With an fsync of a second, answers share one: 64 samples in 16 slots take seconds, not a minute."""
    server = model_server(latency_s=0.2)
    rows = prompts(64)
    mill.enqueue(rows)
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SLOW_DISK, encoding="utf-8")
    slow = {"PYTHONPATH": f"{folder}{os.pathsep}{PROJECT_ROOT}"}
    worker = mill.worker(concurrency=16, extra_env=slow)
    mill.wait_recorded(len(rows), timeout_s=30)
    mill.wait_idle()
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())


# Rights


def _without_override(*words: str) -> list[str]:
    """Return a command that rights bind as they bind everybody, root too."""
    if os.geteuid() != 0:
        return list(words)
    drop = "--bounding-set=-dac_override,-dac_read_search"
    if shutil.which("setpriv") is None or subprocess.run(["setpriv", drop, "true"], check=False).returncode:
        pytest.skip("setpriv takes root's right to ignore rights, on a system that allows it")
    return ["setpriv", drop, *words]


@contextlib.contextmanager
def _folder_without_write(folder: DatasetFolder) -> Iterator[None]:
    folder.path.chmod(0o555)
    yield
    folder.path.chmod(0o755)


@contextlib.contextmanager
def _file_without_write(folder: DatasetFolder) -> Iterator[None]:
    path = folder.path / "raw_responses.jsonl"
    path.touch()
    path.chmod(0o444)
    yield
    path.chmod(0o644)


@contextlib.contextmanager
def _lock_without_write(folder: DatasetFolder) -> Iterator[None]:
    folder.lock.chmod(0o444)
    yield
    folder.lock.chmod(0o644)


@pytest.mark.parametrize("spoil", [_folder_without_write, _file_without_write, _lock_without_write])
def test_files_without_write_rights_are_found_before_any_request(
    mill: Mill, model_server: ModelServerFactory, spoil: object
) -> None:
    """Folder, records or lock without write rights: enqueue and worker end with the path, and nothing is asked."""
    server = model_server()
    rows = prompts(6)
    mill.enqueue(rows)
    file = mill.write_rows(prompts(9))
    producer = "import sys; from producer.cli import main; sys.argv[0] = 'producer'; sys.exit(main())"
    enqueue = [sys.executable, "-c", producer, "enqueue", str(file), "--dataset", "case"]
    work = [sys.executable, "-m", "celery", "-A", "app", "worker", "-c", "2"]
    with spoil(mill.folder()):  # type: ignore[operator]
        said = run_command(_without_override(*enqueue), env=mill.env, cwd=mill.path)
        assert said.code == 1, said
        assert str(mill.folder().path) in said.stderr
        assert len(said.stderr.strip().splitlines()) == 1
        with ManagedProcess(_without_override(*work), log_dir=mill.logs, name="bound", env=mill.env) as worker:
            assert worker.wait() == 1
            assert str(mill.folder().path) in worker.output()
            assert_quiet(worker.output())
    assert server.stats["total"] == 0
    assert mill.counts()["queued"] == 6
