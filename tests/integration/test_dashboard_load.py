"""Flower's memory after a long run: 100,000 tasks that all told of themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import celery
import pytest

from tests.conftest import Broker
from tests.support.flower import FlowerProcess
from tests.support.processes import wait_until

TASKS = 100_000
BATCH = 500
AHEAD = 2_000
"""Tasks that Flower may be behind: Redis cuts off a listener that is too far behind, and it then misses events."""
MOST_BYTES = 500_000_000


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has in use."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def real_pid(flower: FlowerProcess) -> int:
    """Return the process of Flower itself, below the wrapper that watches the tests."""
    pid = flower.pid
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        pid = int(children[0])
    return pid


@pytest.fixture
def flower(broker: Broker, tmp_path: Path) -> Iterator[FlowerProcess]:
    """Start Flower as shipped."""
    env = {
        "MILL_REDIS_URL": broker.url,
        "MILL_KEY_PREFIX": broker.key_prefix,
        "MILL_PREPARED_DIR": str(tmp_path / "prepared"),
        "MILL_STATE_DIR": str(tmp_path / "state"),
    }
    with FlowerProcess(env, log_dir=tmp_path) as process:
        yield process.wait_ready()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_100_000_tasks_fit_into_500_mb(broker: Broker, flower: FlowerProcess) -> None:
    """After 100,000 tasks, each with its three events, Flower has seen them all and uses less than 500 MB."""
    app = celery.Celery(broker=broker.url, set_as_current=False)
    app.conf.broker_transport_options = {"global_keyprefix": broker.key_prefix}
    wait_until(lambda: broker.client.pubsub_numpat() > 0, 30, "Flower's subscription to events")

    def seen() -> int:
        workers = flower.ask("/workers?json=1").json()["data"]
        return sum(worker.get("task-succeeded", 0) for worker in workers)

    with (
        app.connection_for_write() as connection,
        # In batches, as our workers send them.
        app.events.Dispatcher(
            connection, hostname="w@host", buffer_group={"task"}, buffer_limit=3 * BATCH
        ) as dispatcher,
    ):
        dispatcher.send("worker-online", sw_ident="mill", sw_ver="1", sw_sys="Linux")
        for first in range(0, TASKS, BATCH):
            for number in range(first, first + BATCH):
                task, now = f"openmath:problem-{number:06d}-0123456789ab", time.time()
                dispatcher.send(
                    "task-received", uuid=task, name="generate", args=task.replace(":", " "), kwargs="", retries=0
                )
                dispatcher.send("task-started", uuid=task, name="generate", timestamp=now)
                dispatcher.send("task-succeeded", uuid=task, name="generate", runtime=31.5, result="None")
            wait_until(lambda sent=first + BATCH: seen() >= sent - AHEAD, 60, "Flower to keep up", poll_s=0.2)
    wait_until(lambda: seen() == TASKS, 60, "all tasks", poll_s=0.5)
    app.close()
    assert resident_bytes(real_pid(flower)) < MOST_BYTES
    assert flower.ask("/pipeline/data").status == 200
