"""What the machine does not give (disk, rights, open files) and what the user bounds (requests in flight)."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.places import DatasetFolder
from tests.conftest import ModelServerFactory
from tests.support.aftermath import (
    assert_asked_again_at_most,
    assert_asked_once,
    assert_balanced,
    assert_quiet,
    prompts,
)
from tests.support.folders import mounted
from tests.support.mill import Mill
from tests.support.processes import run_command, wait_until

pytestmark = pytest.mark.fault

_DISK_MIB = 96


# The disk


def _fill_up(folder: Path) -> Path:
    """Write a file until the disk is full, and return it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass
    assert not os.statvfs(folder).f_bavail
    return ballast


def test_a_full_disk_holds_the_work_and_loses_nothing(mill: Mill, model_server: ModelServerFactory) -> None:
    """On a full disk answers wait in memory, status says so, no new one is asked for; with room all are written."""
    server = model_server(latency_s=0.5)
    mill.prepared.mkdir()
    with mounted(mill.prepared, "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs") as done:
        if not done:
            pytest.skip("a small disk can only be mounted as root, in a container that allows it")
        rows = prompts(320)
        mill.enqueue(rows)
        worker = mill.worker(concurrency=8)
        mill.wait_recorded(16)

        ballast = _fill_up(mill.prepared)
        worker.wait_for_output("No new request is sent")
        wait_until(lambda: server.in_flight == 0, 20, "no request in flight")
        held = server.stats["total"] - mill.recorded()
        assert 1 <= held <= 8 + 8
        status = wait_until(lambda: _status_with(mill, "free some space"), 20, "a note", detail=mill.tails)
        assert {one["state"] for one in status["workers"]} == {"waiting for disk"}
        assert server.stats["total"] - mill.recorded() == held
        ballast.unlink()
        mill.wait_recorded(len(rows))
        mill.wait_idle()

        assert_balanced(mill, rows)
        assert_asked_once(server, rows)
        assert worker.stop() == 0
        assert_quiet(worker.output())
        assert worker.output().count("\n") < 120, "a full disk is told once, not every second"
        for process in mill._processes:
            process.close()


def _status_with(mill: Mill, words: str) -> dict[str, Any] | None:
    """Return what status says, once a note of it has these words."""
    status = mill.status()
    return status if any(words in note for note in status["totals"]["notes"]) else None


def test_sigterm_ends_a_worker_whose_disk_is_full(mill: Mill, model_server: ModelServerFactory) -> None:
    """A worker that holds records for a full disk gives their tickets back when its drain is over, and ends."""
    model_server(latency_s=0.2)
    mill.prepared.mkdir()
    with mounted(mill.prepared, "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs") as done:
        if not done:
            pytest.skip("a small disk can only be mounted as root, in a container that allows it")
        rows = prompts(200)
        mill.enqueue(rows)
        worker = mill.worker(concurrency=4, drain_s=1)
        mill.wait_recorded(8)
        ballast = _fill_up(mill.prepared)
        worker.wait_for_output("No new request is sent")
        assert worker.stop() == 0
        ballast.unlink()
        counts = mill.counts()
        assert (counts["in_flight"], counts["missing"]) == (0, 0)
        mill.worker(concurrency=16)
        mill.wait_recorded(len(rows))
        mill.wait_idle()
        assert_balanced(mill, rows)
        for process in mill._processes:
            process.close()


def test_a_worker_refuses_a_disk_that_is_nearly_full(mill: Mill, model_server: ModelServerFactory) -> None:
    """With less than 64 MiB free, enqueue and worker end with one sentence before any request."""
    server = model_server()
    mill.prepared.mkdir()
    with mounted(mill.prepared, "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs") as done:
        if not done:
            pytest.skip("a small disk can only be mounted as root, in a container that allows it")
        mill.enqueue(prompts(4))
        (mill.prepared / "ballast").write_bytes(b"\0" * (_DISK_MIB - 60) * 2**20)
        refused = mill.enqueue(prompts(8), expect=1)
        assert "at least 64 MiB are needed" in refused.stderr
        worker = mill.worker(wait=False)
        assert worker.wait() == 1
        assert "at least 64 MiB are needed" in worker.output()
        assert_quiet(worker.output())
    assert server.stats["total"] == 0


# Rights


@contextlib.contextmanager
def _read_only(folder: DatasetFolder) -> Iterator[None]:
    with mounted(folder.path, "--bind", str(folder.path)) as done:
        if not done:
            pytest.skip("a read-only folder needs root, in a container that allows mounts")
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder.path)], check=True)
        yield


@contextlib.contextmanager
def _file_in_its_place(folder: DatasetFolder) -> Iterator[None]:
    aside = folder.path.with_name("aside")
    folder.path.rename(aside)
    folder.path.write_bytes(b"not a folder")
    yield
    folder.path.unlink()
    aside.rename(folder.path)


@contextlib.contextmanager
def _link_to_nothing(folder: DatasetFolder) -> Iterator[None]:
    path = folder.path / "raw_responses.jsonl"
    path.symlink_to("/nowhere/at/all")
    yield
    path.unlink()


@contextlib.contextmanager
def _folder_in_the_files_place(folder: DatasetFolder) -> Iterator[None]:
    path = folder.path / "raw_responses.jsonl"
    path.mkdir()
    yield
    path.rmdir()


@pytest.mark.parametrize("spoil", [_read_only, _file_in_its_place, _link_to_nothing, _folder_in_the_files_place])
def test_an_output_that_cannot_be_written_is_found_before_any_request(
    mill: Mill,
    model_server: ModelServerFactory,
    spoil: Callable[[DatasetFolder], contextlib.AbstractContextManager[None]],
) -> None:
    """A worker whose dataset folder cannot be written ends with the path and the reason, and has asked nothing."""
    server = model_server()
    rows = prompts(6)
    mill.enqueue(rows)
    folder = mill.folder()
    with spoil(folder):
        worker = mill.worker(wait=False)
        assert worker.wait() == 1
        assert str(folder.path) in worker.output()
        assert_quiet(worker.output())
        enqueued = mill.enqueue(prompts(9), expect=1)
        assert str(folder.path) in enqueued.stderr
        assert len(enqueued.stderr.strip().splitlines()) == 1
    assert server.stats["total"] == 0

    mill.worker()
    mill.wait_recorded(len(rows))
    mill.wait_idle()
    assert_balanced(mill, rows)


# Open files


def test_too_few_open_files_are_refused_at_the_start(mill: Mill, model_server: ModelServerFactory) -> None:
    """`ulimit -n 64` with 128 slots ends with exit code 2 and one sentence that names both numbers."""
    server = model_server()
    mill.enqueue(prompts(6))
    command = f"ulimit -n 64; exec {shlex.quote(sys.executable)} -m celery -A app worker -c 128"
    finished = run_command(["bash", "-c", command], env=mill.env, cwd=mill.path)

    assert finished.code == 2, finished
    sentence = next(line for line in finished.stderr.splitlines() if line.startswith("promptmill: "))
    assert "128 slots need 448 open files and this process may have 64" in sentence
    assert_quiet(finished.stderr + finished.stdout)
    assert server.stats["total"] == 0


# Requests in flight


@pytest.mark.slow
def test_all_workers_together_keep_the_bound(mill: Mill, model_server: ModelServerFactory) -> None:
    """Three workers of 8 slots and MILL_MAX_IN_FLIGHT=6 never have more than 6 requests at the server, and reach 6."""
    server = model_server(latency_s=0.3)
    mill.env["MILL_MAX_IN_FLIGHT"] = "6"
    rows = prompts(150)
    workers = [mill.worker(concurrency=8, wait=False) for _ in range(3)]
    for worker in workers:
        worker.wait_ready()
    mill.enqueue(rows)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert server.peak_in_flight == 6
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert len({one["worker"] for one in _records(mill)}) > 1


def _records(mill: Mill) -> list[dict[str, str]]:
    """Return the accepted records so far."""
    lines = mill.out().read_bytes().splitlines() if mill.out().exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_the_permits_of_a_dead_worker_come_free(mill: Mill, model_server: ModelServerFactory) -> None:
    """After a SIGKILL the other worker gets the whole bound within the permits' 30 s, and never more than it."""
    server = model_server(latency_s=1.0)
    mill.env["MILL_MAX_IN_FLIGHT"] = "6"
    rows = prompts(400)
    mill.enqueue(rows)
    first, _second = mill.worker(concurrency=8), mill.worker(concurrency=8)
    wait_until(lambda: len({one["worker"] for one in _records(mill)}) == 2, 30, "both at work", detail=mill.tails)

    first.kill()
    wait_until(lambda: server.in_flight < 6, 10, "fewer requests in flight")
    wait_until(lambda: server.in_flight == 6, 30 + 10, "the whole bound in use", detail=mill.tails)

    assert server.peak_in_flight == 6
    assert_asked_again_at_most(server, 6)
