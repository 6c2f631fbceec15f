"""Ctrl-C and SIGTERM end every command in order: what was received is on disk, the rest is back in the queue."""

from __future__ import annotations

import signal
import time

import pytest

from tests.conftest import Broker, ModelServerFactory
from tests.support.books import balanced
from tests.support.mill import Mill
from tests.support.processes import WorkerProcess, wait_until


def tickets(broker: Broker, dataset: str = "case") -> int:
    """Return how many tickets wait in the queue itself."""
    return int(str(broker.client.llen(f"{broker.key_prefix}mill.{dataset}")))


def test_ctrl_c_in_enqueue(mill: Mill, broker: Broker) -> None:
    """An interrupted enqueue ends within two seconds with 130 and its count; the next one queues the rest alone."""
    path = mill.write_rows([{"id": f"c{number}", "prompt": f"c {number}"} for number in range(20_000)])
    producer = mill.start("enqueue", str(path), "--dataset", "case")
    wait_until(lambda: tickets(broker) > 0, 20, "the first tickets", poll_s=0.01)
    producer.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert producer.wait() == 130
    assert time.monotonic() - began < 2
    assert "stopped: queued" in producer.output()
    assert "Traceback" not in producer.output()
    done = tickets(broker)
    assert done < 20_000
    told = mill.enqueue(path)
    assert f"already queued {done:,}, queued {20_000 - done:,}" in told.stdout
    assert tickets(broker) == 20_000
    counts = mill.counts()
    assert counts["samples"] == counts["queued"] == 20_000


def interrupt_once(worker: WorkerProcess) -> None:
    """Press Ctrl-C."""
    worker.send_signal(signal.SIGINT)


def end_the_group(worker: WorkerProcess) -> None:
    """Do what a shell or a container does at its end."""
    worker.send_group_signal(signal.SIGTERM)


@pytest.mark.parametrize("end", [interrupt_once, end_the_group])
def test_one_signal_lets_a_worker_finish(mill: Mill, model_server: ModelServerFactory, broker: Broker, end) -> None:
    """After one signal running requests finish, untouched samples are in the queue at once, and the exit code is 0."""
    server = model_server(latency_s=1.5)
    mill.enqueue([f"t {number}" for number in range(12)])
    worker = mill.worker(concurrency=4)
    wait_until(lambda: server.in_flight == 4, 20, "four requests")
    end(worker)
    assert worker.wait(10) == 0
    assert "Traceback" not in worker.output()
    counts = balanced(mill, accepted=4, in_flight=0)
    assert tickets(broker) == counts["left"] == 8
    mill.worker(concurrency=8)
    balanced(mill, accepted=12)
    assert len(server.requests) == 12


@pytest.mark.parametrize(
    ("number", "drain_s"),
    [
        (signal.SIGINT, 30.0),
        pytest.param(signal.SIGTERM, 30.0, marks=pytest.mark.slow),
        (signal.SIGTERM, 0.5),
    ],
    ids=str,
)
def test_a_worker_that_may_not_finish(
    mill: Mill, model_server: ModelServerFactory, broker: Broker, number: signal.Signals, drain_s: float
) -> None:
    """A second signal, or the end of MILL_DRAIN_S, hands everything back within seconds; nothing is orphaned."""
    server = model_server(latency_s=30)
    mill.enqueue([f"t {number}" for number in range(6)])
    worker = mill.worker(concurrency=4, drain_s=drain_s)
    wait_until(lambda: server.in_flight == 4, 20, "four requests")
    worker.send_signal(number)
    if drain_s > 1:
        worker.wait_for_output("stopping")
        worker.send_signal(number)
    assert worker.wait(8) is not None
    assert "Traceback" not in worker.output()
    counts = balanced(mill, accepted=0, left=6, in_flight=0, missing=0)
    assert counts["orphaned"] == 0
    assert tickets(broker) == 6
    server.set_options(latency_s=0.0)
    mill.worker()
    balanced(mill, accepted=6)
    assert len(server.requests) == 10


def test_ctrl_c_in_monitor(mill: Mill) -> None:
    """The view ends at once with 130."""
    monitor = mill.start("monitor", "--interval", "60")
    monitor.wait_for_output("no dataset yet")
    monitor.send_signal(signal.SIGINT)
    assert monitor.wait(3) == 130
    assert "Traceback" not in monitor.output()
