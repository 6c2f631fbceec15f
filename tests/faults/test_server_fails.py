"""The model server is away, dies, hangs or hangs up: the work waits, no sample pays for it, and it goes on."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.conftest import ModelServerFactory
from tests.support.aftermath import assert_asked_once, assert_balanced, assert_quiet, prompts
from tests.support.mill import Mill
from tests.support.processes import wait_until
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.fault

_SLOTS = 16
_BACK_WITHIN_S = 10
"""Seconds after the server's return within which work resumes, with room for a busy machine."""


def _faults(mill: Mill) -> list[list[dict[str, object]]]:
    """Return the failed calls of each accepted record."""
    return [json.loads(line)["faults"] for line in mill.out().read_bytes().splitlines()]


def _status_text(mill: Mill, expect: int) -> str:
    return " ".join(mill.run("status", expect=expect).stdout.split())


class _HangingUp:
    """Accepts connections on a port, counts them and closes them without a word."""

    def __init__(self, port: int) -> None:
        self.accepted = 0
        self._socket = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._serve, name="hanging-up", daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _address = self._socket.accept()
                self.accepted += 1
                connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@contextlib.contextmanager
def _hanging_up(port: int) -> Iterator[_HangingUp]:
    listener = _HangingUp(port)
    try:
        yield listener
    finally:
        listener.close()


def test_a_worker_may_start_before_its_server(mill: Mill, model_server: ModelServerFactory) -> None:
    """Without a server a worker waits and status says since when; once there is one, all is done at the first try."""
    server = model_server()
    server.stop()
    rows = prompts(40)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=_SLOTS)
    worker.wait_for_output("is down")
    said = _status_text(mill, expect=1)
    assert "model server is unreachable since" in said
    assert server.url in said

    server.start()
    mill.wait_recorded(1, timeout_s=_BACK_WITHIN_S)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert not any(_faults(mill))
    assert worker.stop() == 0
    assert_quiet(worker.output())


@pytest.mark.slow
def test_a_server_that_dies_for_a_while_costs_no_sample_an_attempt(
    mill: Mill, model_server: ModelServerFactory
) -> None:
    """A server gone for 15 s fails nothing even where one attempt is all there is, and meets few connections."""
    server = model_server(latency_s=0.5)
    mill.env["MILL_MAX_ATTEMPTS"] = "2"
    rows = prompts(160)
    mill.enqueue(rows)
    workers = [mill.worker(concurrency=_SLOTS // 2) for _ in range(2)]
    mill.wait_recorded(40)

    server.stop()
    gone_at = time.monotonic()
    said = wait_until(
        lambda: "model server is unreachable since" in _status_text(mill, expect=1), 10, "status that tells of it"
    )
    assert said
    time.sleep(max(0.0, 15 - (time.monotonic() - gone_at)))
    done = mill.recorded()
    server.start()
    mill.wait_recorded(done + 1, timeout_s=_BACK_WITHIN_S)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    faults = _faults(mill)
    assert sum(map(len, faults)) <= 2 * _SLOTS
    assert max(map(len, faults)) <= 2
    for worker in workers:
        assert worker.stop() == 0
        assert_quiet(worker.output())


@pytest.mark.slow
def test_a_port_that_hangs_up_is_knocked_at_seldom(mill: Mill, model_server: ModelServerFactory) -> None:
    """A port that accepts and closes at once is probed every MILL_PROBE_S by one worker, and no sample fails by it."""
    server = model_server(latency_s=0.5)
    rows = prompts(96)
    mill.enqueue(rows)
    for _ in range(2):
        mill.worker(concurrency=_SLOTS // 2)
    mill.wait_recorded(16)

    server.stop()
    with _hanging_up(server.port) as listener:
        wait_until(lambda: "unreachable since" in mill.run("status", expect=None).stdout, 20, "a status that says so")
        before, watch_s = listener.accepted, 6
        time.sleep(watch_s)
        knocks = listener.accepted - before
    server.start()
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert 0 < knocks <= 2 * watch_s / float(mill.env["MILL_PROBE_S"])
    assert_balanced(mill, rows)


@pytest.mark.slow
def test_a_frozen_server_that_goes_on_is_waited_for(mill: Mill) -> None:
    """A server process stopped for 10 s answers late, and reads each sample's request exactly once.

    Connections whose keep-alive ran out while it stood still are closed by it as soon as it goes on.
    """
    rows = prompts(64)
    with ServerProcess(mill.logs, latency_s=0.5) as server:
        mill.env["MILL_MODEL_URLS"] = server.url
        mill.enqueue(rows)
        worker = mill.worker(concurrency=_SLOTS)
        mill.wait_recorded(16)
        server.process.pause()
        time.sleep(10)
        server.process.resume()
        mill.wait_recorded(len(rows))
        mill.wait_idle()
        assert set(server.counts().values()) == {1}
        assert worker.stop() == 0
    assert_balanced(mill, rows)
    assert max(map(len, _faults(mill))) <= 1
    assert_quiet(worker.output())
