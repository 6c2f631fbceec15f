"""Task events go out in batches, and none is held back when the worker ends."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kombu
import pytest
from celery import Celery
from celery.events.dispatcher import EventDispatcher
from celery.worker.consumer.events import Events
from kombu.asynchronous.timer import Timer

from workers.events import EventBatcher

_Timer: Any = Timer
"""It is untyped."""


@pytest.fixture
def app() -> Iterator[Celery]:
    """Return a Celery app on a broker in this process."""
    made = Celery("t", broker="memory://", set_as_current=False)
    yield made
    made.close()


class Watched:
    """A consumer with Celery's real dispatcher, set up as Celery does, and what arrives of its events."""

    def __init__(self, app: Celery) -> None:
        self.connection = app.connection_for_write()
        self.event_dispatcher = app.events.Dispatcher(
            self.connection, hostname="w@h", buffer_group=["task"], on_send_buffered=self._flush_at_every_turn
        )
        self.timer = _Timer()
        self.arrived: list[Any] = []
        channel = self.connection.default_channel
        receiver = app.events.Receiver(self.connection, handlers={"*": self.arrived.append})
        for consumer in receiver.get_consumers(functools.partial(kombu.Consumer, channel), channel):
            consumer.consume()

    def _flush_at_every_turn(self) -> None:
        self.event_dispatcher.flush()

    def send(self, count: int) -> None:
        """Send events of tasks."""
        for number in range(count):
            self.event_dispatcher.send("task-received", uuid=str(number))

    def drain(self) -> int:
        """Take in what was published; return how many messages that were."""
        messages = 0
        while True:
            try:
                self.connection.drain_events(timeout=0.05)
            except TimeoutError:
                return messages
            messages += 1


@pytest.fixture
def watched(app: Celery) -> Iterator[Watched]:
    """Return a consumer whose events are watched."""
    made = Watched(app)
    yield made
    made.event_dispatcher.close()
    made.connection.release()


def test_events_wait_for_the_next_flush(watched: Watched) -> None:
    """Task events are published together, in one message, when the timer says so, in their order."""
    batcher = EventBatcher(watched)
    batcher.start(watched)
    watched.send(100)
    assert watched.drain() == 0
    (entry,) = list(watched.timer.queue)
    assert 0 < entry.eta - time.monotonic() <= 0.5
    entry.entry()
    assert watched.drain() == 1
    assert [event["uuid"] for event in watched.arrived] == [str(number) for number in range(100)]
    batcher.stop(watched)
    assert entry.entry.canceled


def test_a_batch_is_bounded(watched: Watched) -> None:
    """More than 250 events do not wait for the timer."""
    batcher = EventBatcher(watched)
    batcher.start(watched)
    watched.send(600)
    assert watched.drain() == 2
    assert len(watched.arrived) == 500
    batcher.stop(watched)
    watched.drain()
    assert len(watched.arrived) == 600


def test_after_the_end_events_go_one_by_one(watched: Watched) -> None:
    """What tasks send after the timer has ended is published at once."""
    batcher = EventBatcher(watched)
    batcher.start(watched)
    batcher.stop(watched)
    watched.send(3)
    assert watched.drain() == 3
    assert len(watched.arrived) == 3


def test_a_worker_without_events_needs_no_batches() -> None:
    """Where Celery made no dispatcher there is nothing to take over."""
    consumer = SimpleNamespace(event_dispatcher=None, timer=_Timer())
    batcher = EventBatcher(consumer)
    batcher.start(consumer)
    batcher.stop(consumer)
    assert not list(consumer.timer.queue)


def test_the_dispatcher_is_as_it_was_studied() -> None:
    """Celery buffers task events, flushes a full buffer, and else calls `on_send_buffered`, which we change."""
    assert {"buffer_group", "buffer_limit", "on_send_buffered"} <= set(inspect.signature(EventDispatcher).parameters)
    send = inspect.getsource(EventDispatcher.send)
    assert send.index("len(buf) >= self.buffer_limit") < send.index("elif self.on_send_buffered")
    assert "buffer_group=['task']" in inspect.getsource(Events.start)
    assert "celery.worker.consumer.events:Events" in EventBatcher.requires
