"""A worker that lives for many runs, and one that is process 1 of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ModelServerFactory
from tests.support.aftermath import assert_asked_once, assert_balanced, assert_quiet, prompts
from tests.support.mill import Mill
from tests.support.processes import WORKER_READY, ManagedProcess, wait_until

pytestmark = pytest.mark.fault


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
def test_files_and_memory_stay_level_over_many_runs(mill: Mill, model_server: ModelServerFactory) -> None:
    """One worker works through five datasets' runs; open files and memory do not grow after the second."""
    server = model_server(latency_s=0.05)
    worker = mill.worker(concurrency=16)
    rows: list[str] = []
    files, memory = [], []
    for number in range(5):
        rows += prompts(300, f"run {number} prompt")
        mill.enqueue(rows)
        mill.wait_recorded(len(rows))
        mill.wait_idle()
        files.append(_open_files(worker.pid))
        memory.append(_resident_mib(worker.pid))

    assert max(files[2:]) <= files[1] + 20, files  # Redis connections for acks that end together, one per slot at most
    assert max(memory[2:]) <= memory[1] + 12, memory
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())


def _may_unshare() -> bool:
    words = ["unshare", "--fork", "--pid", "--mount-proc", "true"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_worker_that_is_process_1_ends_in_order(mill: Mill, model_server: ModelServerFactory) -> None:
    """As process 1 of a PID namespace a worker obeys SIGTERM: it finishes what runs and hands the rest back."""
    if not _may_unshare():
        pytest.skip("a PID namespace needs rights that this user does not have")
    server = model_server(latency_s=2.0)
    rows = prompts(24)
    mill.enqueue(rows)
    worker = [sys.executable, "-m", "celery", "-A", "app", "worker", "-c", "4"]
    command = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child", *worker]
    with ManagedProcess(command, log_dir=mill.logs, name="first", env=mill.env) as process:
        process.wait_for_output(WORKER_READY)
        wait_until(lambda: server.in_flight == 4, 30, "4 requests in flight", detail=process.tail)
        (inner,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        os.kill(int(inner), signal.SIGTERM)
        assert process.wait(20) == 0
        assert_quiet(process.output())
    done = mill.recorded()
    assert 4 <= done == sum(server.counts.values())
    counts = mill.counts()
    assert (counts["queued"], counts["in_flight"]) == (len(rows) - done, 0)
    server.set_options(latency_s=0.1)
    mill.worker(concurrency=8)
    mill.wait_recorded(len(rows))
    mill.wait_idle()
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
