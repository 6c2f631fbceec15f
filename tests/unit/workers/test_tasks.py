"""The Celery task and the worker's start and stop, in this process; real workers are run by the fault tests."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import celery.concurrency.prefork
import celery.concurrency.thread
import kombu.transport.redis
import pytest
import redis.exceptions
from celery import signals
from celery.exceptions import Reject

from app.celery import TASK, app
from app.records import Ticket
from tests.conftest import ModelServerFactory
from workers import tasks
from workers.intake import HandedBack, SampleFailed
from workers.leases import QueueFollower


class _Mill:
    """Stands where the started mill does, and ends every ticket in the same way."""

    def __init__(self, end: Exception | None = None) -> None:
        self.end = end
        self.tickets: list[Ticket] = []

    def generate(self, ticket: Ticket) -> None:
        """Do as told."""
        self.tickets.append(ticket)
        if self.end is not None:
            raise self.end


@pytest.fixture
def put_mill(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this process run such a mill."""

    def put(end: Exception | None = None) -> _Mill:
        mill = _Mill(end)
        monkeypatch.setattr(tasks.Process, "mill", mill)
        return mill

    return put


def test_the_task_is_known_by_its_name() -> None:
    """The app that everybody imports has the task, acked late, without results, whose given-up samples are expected."""
    task = app.tasks[TASK]
    assert task.name == tasks.generate.name == "generate"
    assert (task.acks_late, task.ignore_result, task.throws) == (True, True, (SampleFailed,))


def test_a_task_does_its_ticket(put_mill: Any) -> None:
    """The message's two words are the ticket."""
    mill = put_mill()
    tasks.generate("d", "a")
    assert mill.tickets == [Ticket("d", "a")]


def test_a_ticket_that_is_handed_back_is_requeued(put_mill: Any) -> None:
    """Celery puts the ticket back at once."""
    put_mill(HandedBack())
    with pytest.raises(Reject) as caught:
        tasks.generate("d", "a")
    assert caught.value.requeue is True


def test_other_ends_are_celerys(put_mill: Any) -> None:
    """A given-up sample fails its task."""
    put_mill(SampleFailed("timeout: no answer"))
    with pytest.raises(SampleFailed):
        tasks.generate("d", "a")


def test_only_a_worker_does_tickets() -> None:
    """A process that merely knows the task, like Flower, refuses to run it."""
    assert tasks.Process.mill is None
    with pytest.raises(RuntimeError, match="not a promptmill worker"):
        tasks.generate("d", "a")


def test_nodes_get_names_of_their_own() -> None:
    """Workers without a name of their own never share one, and a given name is kept."""
    names = set()
    for _ in range(20):
        instance = SimpleNamespace(hostname="celery@box")
        tasks.name_node(instance)
        names.add(instance.hostname)
    assert len(names) == 20
    assert all(name.startswith("mill-") and name.endswith("@box") for name in names)
    instance = SimpleNamespace(hostname="mine@box")
    tasks.name_node(instance)
    assert instance.hostname == "mine@box"


# Start and stop


@pytest.fixture
def _celery_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take back what a start changes in Celery, kombu and this process."""
    transport = kombu.transport.redis
    changed = {
        transport.QoS: ("restore_unacked_once", "restore_visible"),
        transport.Channel: ("_disconnect_pools", "_create_client"),
        transport.Transport: ("register_with_event_loop",),
    }
    for owner, names in changed.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(QueueFollower, "wanted", QueueFollower.wanted)
    receivers, thresholds = list(signals.worker_shutting_down.receivers), gc.get_threshold()
    yield
    tasks.stop()
    signals.worker_shutting_down.receivers[:] = receivers
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def _worker(pool: type = celery.concurrency.thread.TaskPool) -> Any:
    return SimpleNamespace(hostname="w@h", concurrency=2, pool_cls=pool)


@pytest.mark.usefixtures("_celery_as_it_was")
def test_a_worker_starts_and_stops(
    mill_env: dict[str, str],
    model_server: ModelServerFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A start builds the mill, hears signals, tells of unknown variables; the stop ends it, and a second is none."""
    model_server()
    for name, value in {**mill_env, "MILL_MAX_TOKEN": "1"}.items():
        monkeypatch.setenv(name, value)
    tasks.start(_worker())
    mill = tasks.Process.mill
    assert mill is not None
    assert "did you mean MILL_MAX_TOKENS?" in caplog.text
    assert QueueFollower.wanted() == mill.keeper.queues
    signals.worker_shutting_down.send(sender="w@h", sig="SIGTERM", how="Warm", exitcode=0)
    assert mill.drain.stopping
    tasks.stop()
    assert tasks.Process.mill is None
    tasks.stop()


@pytest.mark.usefixtures("_celery_as_it_was")
def test_a_worker_that_cannot_work_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """A start that cannot work ends with one sentence and the error's exit code."""
    with pytest.raises(SystemExit) as caught:
        tasks.start(_worker())
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("promptmill: MILL_MODEL_URLS is not set; ")
    assert tasks.Process.mill is None


def test_other_pools_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A pool without threads is refused with the option to leave out."""
    with pytest.raises(SystemExit) as caught:
        tasks.start(_worker(celery.concurrency.prefork.TaskPool))
    assert caught.value.code == 2
    assert "leave -P out" in capsys.readouterr().err


def test_other_processes_have_nothing_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    """A process without a mill ignores Celery's signals: it says nothing and leaves the process' signals alone."""
    caplog.set_level("INFO", "workers")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    tasks.tell(_worker())
    tasks.stop()
    assert not caplog.records
    assert {number: signal.getsignal(number) for number in before} == before
    assert tasks.Process.mill is None


# Logging


@pytest.fixture
def _loggers_as_they_were() -> Iterator[None]:
    """Take back the levels, filters and warnings that the worker sets."""
    names = ("app", "workers", "celery.worker.strategy", "celery.app.trace", "celery.worker.request")
    before = {name: (logging.getLogger(name).level, list(logging.getLogger(name).filters)) for name in names}
    with warnings.catch_warnings():
        yield
    for name, (level, filters) in before.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).filters[:] = filters


@pytest.mark.usefixtures("_loggers_as_they_were")
def test_the_log_holds_what_a_person_wants_to_know() -> None:
    """Our own lines come through; lines for every task, for tickets handed back, and for late acks do not."""
    tasks.quieten()
    assert logging.getLogger("workers.story").isEnabledFor(logging.INFO)
    assert not logging.getLogger("celery.app.trace").isEnabledFor(logging.INFO)

    def passes(logger: str, error: Exception | None) -> bool:
        info = None
        if error is not None:
            try:
                raise error
            except type(error):
                info = sys.exc_info()
        record = logging.LogRecord(logger, logging.ERROR, __file__, 1, "words", (), info)
        return bool(logging.getLogger(logger).filter(record))

    assert not passes("celery.app.trace", Reject("", requeue=True))
    assert passes("celery.app.trace", KeyError("oops"))
    assert passes("celery.app.trace", None)
    assert not passes("celery.worker.request", redis.exceptions.ConnectionError("away"))
    assert passes("celery.worker.request", KeyError("oops"))
