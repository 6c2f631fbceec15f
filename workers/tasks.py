"""The Celery task `generate`, and what happens when a worker process starts and stops."""

from __future__ import annotations

import logging
import secrets
import sys
from typing import Any

import redis.exceptions
from celery import signals
from celery.exceptions import Reject

from app import settings
from app.celery import TASK, app
from app.errors import MillError, UsageError
from app.records import Ticket
from workers.drain import take_over_signals
from workers.events import EventBatcher
from workers.leases import (
    LeaseKeeper,
    QueueFollower,
    keep_running_work_over_blips,
    reuse_redis_clients,
    wait_for_a_redis_that_takes_writes,
)
from workers.mill import Mill, spare_the_collector
from workers.story import HandedBack, SampleFailed

logger = logging.getLogger(__name__)

app.steps["consumer"].update((LeaseKeeper, QueueFollower, EventBatcher))


class Process:
    """What this worker process runs; empty in Flower and in every other process that only knows the task."""

    mill: Mill | None = None


@app.task(name=TASK, acks_late=True, ignore_result=True, throws=(SampleFailed,))
def generate(dataset: str, sample_id: str) -> None:
    """Turn one ticket into a durable record; Celery acks when this returns."""
    if Process.mill is None:
        raise RuntimeError("this process is not a promptmill worker")
    try:
        Process.mill.generate(Ticket(dataset, sample_id))
    except HandedBack as error:
        raise Reject(str(error), requeue=True) from error


@signals.celeryd_init.connect
def name_node(instance: Any, **_signal: Any) -> None:
    """Give a worker without a name of its own one that no other worker has: containers can share host and pid."""
    user, _, host = instance.hostname.partition("@")
    if user == "celery":
        instance.hostname = f"mill-{secrets.token_hex(3)}@{host}"


@signals.celeryd_init.connect
def leave_gossip_out(instance: Any, **_signal: Any) -> None:
    """Do without what workers tell each other: nothing here uses it, and its channel cannot be closed in an outage."""
    instance.prepare_args = lambda **options: {**options, "without_gossip": True, "without_mingle": True}


@signals.worker_init.connect
def start(sender: Any, **_signal: Any) -> None:
    """Build and start the worker's parts; a worker that could not do its work ends here with one sentence."""
    try:
        _require_threads(sender)
        for sentence in settings.unknown_variables():
            logger.warning("%s", sentence)
        owner = f"{sender.hostname}/{secrets.token_hex(3)}"
        mill = Mill(app, owner=owner, slots=sender.concurrency)
        keep_running_work_over_blips(lambda: mill.drain.stopping)
        reuse_redis_clients()
        wait_for_a_redis_that_takes_writes()
        QueueFollower.wanted = staticmethod(lambda: mill.keeper.queues)
        mill.start()
    except MillError as error:
        sys.stderr.write(f"promptmill: {error}\n")
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        # Celery would swallow it, and the worker would say that it is ready and never work.
        sys.stderr.write(f"promptmill: the worker could not start: {type(error).__name__}: {error}\n")
        logger.exception("the worker could not start")
        raise SystemExit(1) from error
    spare_the_collector()
    Process.mill = mill
    signals.worker_shutting_down.connect(mill.drain.signalled, weak=False)


def _require_threads(worker: Any) -> None:
    if "thread" not in str(worker.pool_cls):
        raise UsageError("promptmill's workers use Celery's threads pool; leave -P out or say -P threads.")


@signals.worker_ready.connect
def tell(sender: Any, **_signal: Any) -> None:
    """Say that the worker takes samples, and from where it gets answers."""
    if Process.mill is not None:
        take_over_signals(sender)
        Process.mill.keeper.begin()
        logger.info("%s is ready. %s", sender.hostname, Process.mill.describe())


@signals.worker_shutdown.connect
def stop(**_signal: Any) -> None:
    """End the worker's parts after its last task."""
    if Process.mill is not None:
        Process.mill.stop()
        Process.mill = None


@signals.after_setup_logger.connect
def quieten(**_signal: Any) -> None:
    """Let promptmill's own lines through at any log level of Celery's.

    Left out are the two lines that Celery writes for every task, the traceback of a ticket handed back, and a
    traceback for every ack that cannot be made while Redis is away: such a ticket comes back and finds its record.
    """
    for name in ("app", "workers"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("celery.worker.strategy").setLevel(logging.WARNING)
    trace = logging.getLogger("celery.app.trace")
    trace.setLevel(logging.WARNING)
    trace.addFilter(_is_no_handing_back)
    logging.getLogger("celery.worker.request").addFilter(_is_no_late_ack)
    logging.getLogger("py.warnings").addFilter(_is_no_preview)


def _is_no_handing_back(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], Reject))


def _is_no_late_ack(record: logging.LogRecord) -> bool:
    away = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
    return not (record.exc_info and isinstance(record.exc_info[1], away))


def _is_no_preview(record: logging.LogRecord) -> bool:
    """Tell whether a warning is another one than Celery's, at each lost connection, of a default of Celery 6."""
    return "CPendingDeprecationWarning" not in record.getMessage()
