"""Many processes on one dataset folder: a lock that is not let go is told, shared folders, two runs at once."""

from __future__ import annotations

import os
import re
import sys
import uuid

import pytest

from app.ledger import Ledger
from app.lock import LockedError
from app.records import Kind
from tests.conftest import ModelServerFactory, RedisFactory
from tests.support.aftermath import (
    assert_asked_again_at_most,
    assert_asked_once,
    assert_balanced,
    assert_quiet,
    prompts,
)
from tests.support.jsonl_check import check_jsonl
from tests.support.mill import Mill
from tests.support.processes import ManagedProcess, wait_until

pytestmark = pytest.mark.fault

_HOLD = """
import signal, sys
from pathlib import Path
from app.ledger import Ledger
from app.places import DatasetFolder
with Ledger(DatasetFolder(Path(sys.argv[1]))).locked():
    print("here", flush=True)
    signal.pause()
"""


def _hold_the_lock(mill: Mill) -> ManagedProcess:
    """Start a process that takes the folder's lock and freezes with it."""
    command = [sys.executable, "-c", _HOLD, str(mill.folder().path)]
    holder = ManagedProcess(command, log_dir=mill.logs, name="holder", env=mill.env)
    holder.wait_for_output("here")
    holder.pause()
    return holder


@pytest.mark.slow
def test_a_frozen_process_that_holds_the_lock_is_named(mill: Mill, model_server: ModelServerFactory) -> None:
    """While a frozen process holds a folder's lock, worker and status name it; the work goes on when it has died."""
    server = model_server(latency_s=0.2)
    rows = prompts(60)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=4)
    mill.wait_recorded(8)
    with _hold_the_lock(mill) as holder:
        told = worker.wait_for_output("is locked by")
        assert f"{mill.folder().lock} is locked by process {holder.pid} on {os.uname().nodename} since " in told
        assert "No new request is sent" in told
        wait_until(lambda: server.in_flight == 0, 20, "no request in flight", detail=mill.tails)
        asked = server.stats["total"]

        wait_until(lambda: mill.status()["datasets"]["case"]["state"] == "stalled", 30, "a stall", detail=mill.tails)
        status = mill.status()
        notes = status["datasets"]["case"]["notes"] + status["totals"]["notes"]
        assert any(f"locked by process {holder.pid} " in note and "those of the last write" in note for note in notes)
        assert any(f"locked by process {holder.pid} " in note and note.startswith("Worker ") for note in notes)
        counts = status["datasets"]["case"]["counts"]
        assert counts["accepted"] == mill.recorded()
        assert counts["samples"] == counts["accepted"] + counts["left"] == len(rows)
        enqueue = mill.start("enqueue", str(mill.write_rows(rows)), "--dataset", "case", name="enqueue")
        assert f"is locked by process {holder.pid} " in enqueue.wait_for_output("waiting for it")
        assert server.stats["total"] == asked

        holder.kill()
        assert enqueue.wait(30) == 0, enqueue.output()
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())
    assert worker.output().count("is locked by") <= 2, "for records and for progress, once each"


@pytest.mark.slow
def test_sigterm_ends_a_worker_that_waits_for_the_lock(mill: Mill, model_server: ModelServerFactory) -> None:
    """A worker whose records wait for somebody else's lock ends when told to, and its samples are queued again."""
    model_server(latency_s=0.2)
    rows = prompts(60)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=4, drain_s=1)
    mill.wait_recorded(8)
    with _hold_the_lock(mill):
        worker.wait_for_output("is locked by")
        assert worker.stop() == 0
        assert_quiet(worker.output())
    counts = mill.counts()
    assert (counts["in_flight"], counts["missing"]) == (0, 0)
    mill.worker(concurrency=4)
    mill.wait_recorded(len(rows))
    mill.wait_idle()
    assert_balanced(mill, rows)


def test_patience_with_a_lock_ends(mill: Mill) -> None:
    """Who gave a patience hears of the holder when it is over, and gets the lock as soon as it is free."""
    mill.enqueue(["one"])
    with _hold_the_lock(mill) as holder, Ledger(mill.folder(), patience_s=0.3) as ledger:
        with pytest.raises(LockedError, match=f"locked by process {holder.pid} on .*; end that process if it hangs"):
            ledger.catch_up()
        holder.kill()
        assert ledger.catch_up() == []


@pytest.mark.slow
def test_workers_on_a_shared_folder_lose_and_double_nothing(
    mill: Mill, model_server: ModelServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MILL_SHARED_FOLDER=yes three workers, one of them killed, record each sample once, and no WAL is made."""
    mill.env["MILL_SHARED_FOLDER"] = "yes"
    monkeypatch.setenv("MILL_SHARED_FOLDER", "yes")  # for the checks, which read the index too
    server = model_server(latency_s=0.2)
    rows = prompts(600)
    mill.enqueue(rows)
    workers = [mill.worker(concurrency=8, wait=False) for _ in range(3)]
    for worker in workers:
        worker.wait_ready()
    mill.wait_recorded(100)
    workers[0].kill()
    mill.worker(concurrency=8)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    names = {path.name for path in mill.folder().path.iterdir()}
    assert mill.folder().shared_index.name in names
    assert not {name for name in names if name.endswith(("-wal", "-shm")) or name == mill.folder().index.name}
    assert_balanced(mill, rows)
    assert_asked_again_at_most(server, 8)
    for worker in workers[1:]:
        assert worker.stop() == 0
        assert_quiet(worker.output())


@pytest.mark.slow
def test_a_folder_changes_between_one_machine_and_several(mill: Mill, model_server: ModelServerFactory) -> None:
    """Each way of using a folder finds what the other has written, and asks for none of it again."""
    server = model_server()
    for number, shared in enumerate(("yes", "no", "yes", "no"), start=1):
        mill.env["MILL_SHARED_FOLDER"] = shared
        rows = prompts(4 * number)
        assert re.search(r"queued 4\b", mill.enqueue(rows).stdout)
        with mill.worker(concurrency=4) as worker:
            mill.wait_recorded(len(rows))
            assert mill.wait_idle()["accepted"] == len(rows)
            assert worker.stop() == 0
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)


@pytest.mark.slow
def test_two_runs_on_one_folder_double_no_line(
    mill: Mill, new_redis: RedisFactory, model_server: ModelServerFactory
) -> None:
    """Two runs that know nothing of each other, on one results folder, write each sample once; both end as done."""
    model_server(latency_s=0.2)
    other = Mill(
        {**mill.env, "MILL_REDIS_URL": new_redis().url, "MILL_KEY_PREFIX": f"o{uuid.uuid4().hex[:8]}:"}, mill.path
    )
    rows = prompts(120)
    try:
        for one in (mill, other):
            assert "queued 120" in one.enqueue(rows).stdout
            one.run("pause", "case")
        for one in (mill, other):
            one.worker(concurrency=4)
        for one in (mill, other):
            one.run("resume", "case")
        for one in (mill, other):
            one.wait_recorded(len(rows))
            one.wait_idle()
            assert_balanced(one, rows)
    finally:
        other.close()
    found = check_jsonl(mill.folder().lines(Kind.ACCEPTED))
    assert len(found.ids) == len(set(found.ids)) == len(rows)
    assert len({record["worker"] for record in found.records}) == 2
