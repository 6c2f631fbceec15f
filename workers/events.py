"""Sends Celery's task events (what Flower shows) in batches instead of one publish per event."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

_FLUSH_S = 0.5
_LARGEST_BATCH = 250
"""Events in one message: about 150 kB."""


class EventBatcher(bootsteps.StartStopStep):  # type: ignore[misc] # celery is untyped
    """Flushes the dispatcher's buffer twice a second; stock Celery does at every turn of its loop, for 0.5 ms each."""

    requires = ("celery.worker.consumer.events:Events",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None

    def start(self, consumer: Any) -> None:
        """Take over the flushing of this connection's dispatcher."""
        dispatcher = consumer.event_dispatcher
        if dispatcher is not None:
            dispatcher.on_send_buffered = None
            dispatcher.buffer_limit = _LARGEST_BATCH
            self._timer = consumer.timer.call_repeatedly(_FLUSH_S, dispatcher.flush)

    def stop(self, consumer: Any) -> None:
        """Send events one by one from here on: the timer's loop ends before the last tasks do."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        dispatcher = consumer.event_dispatcher
        if dispatcher is not None:
            dispatcher.buffer_limit = 1
            dispatcher.flush()
