"""The Celery tasks `generate` and `extract`, and what happens when a worker process starts and stops."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from typing import Any, ClassVar

import celery.apps.worker
import redis.exceptions
from celery import signals
from celery.exceptions import Reject

from app import logs, setting_checks, settings
from app.celery import EXTRACT_TASK, TASK, app
from app.errors import MillError, SettingError, UsageError
from app.records import Ticket
from workers.drain import take_over_signals
from workers.events import EventBatcher
from workers.extract.mill import ExtractMill
from workers.intake import HandedBack, SampleFailed
from workers.leases import (
    LeaseKeeper,
    QueueFollower,
    free_the_slot_of_a_lost_ack,
    keep_running_work_over_blips,
    keep_time_by_redis,
    reuse_redis_clients,
    wait_for_a_redis_that_takes_writes,
)
from workers.mill import Mill, spare_the_collector

logger = logging.getLogger(__name__)

app.steps["consumer"].update((LeaseKeeper, QueueFollower, EventBatcher))


class Process:
    """What this worker process runs; empty in Flower and in every other process that only knows the task."""

    mill: Mill | ExtractMill | None = None
    node: str = ""
    """Celery's name of this worker."""
    crowds: ClassVar[list[logs.Crowd]] = []
    """What holds repeated log lines back."""


@app.task(name=TASK, acks_late=True, ignore_result=True, throws=(SampleFailed,))
def generate(dataset: str, sample_id: str) -> None:
    """Turn one ticket into a durable record; Celery acks when this returns."""
    if Process.mill is None or isinstance(Process.mill, ExtractMill):
        raise RuntimeError("this process is not a promptmill worker that asks model servers")
    try:
        Process.mill.generate(Ticket(dataset, sample_id))
    except HandedBack as error:
        raise Reject(str(error), requeue=True) from error


@app.task(name=EXTRACT_TASK, acks_late=True, ignore_result=True, throws=(SampleFailed,))
def extract(dataset: str, sample_id: str) -> None:
    """Turn one ticket into a durable file of hidden states and its record; Celery acks when this returns."""
    if not isinstance(Process.mill, ExtractMill):
        raise RuntimeError("this process is not a promptmill worker that makes hidden states (MILL_EXTRACT)")  # noqa: TRY004
    try:
        Process.mill.extract(Ticket(dataset, sample_id))
    except HandedBack as error:
        raise Reject(str(error), requeue=True) from error


@signals.celeryd_init.connect
def name_node(instance: Any, **_signal: Any) -> None:
    """Give a worker without a name of its own one that no other worker has: containers can share host and pid."""
    user, _, host = instance.hostname.partition("@")
    if user == "celery":
        instance.hostname = f"mill-{secrets.token_hex(3)}@{host}"
    Process.node = instance.hostname
    if _log_format() == "json":
        instance.quiet = True  # Celery's banner is no JSON
        celery.apps.worker.safe_say = _say_json  # nor is what it says when it is told to end
        logging.captureWarnings(capture=True)
        early = logging.StreamHandler()  # until Celery puts its own in its place
        logging.getLogger().addHandler(early)
        dress_logs(logger=logging.getLogger())


@signals.celeryd_init.connect
def leave_gossip_out(instance: Any, **_signal: Any) -> None:
    """Do without what workers tell each other: nothing here uses it, and its channel cannot be closed in an outage."""
    instance.prepare_args = lambda **options: {**options, "without_gossip": True, "without_mingle": True}


@signals.worker_init.connect
def start(sender: Any, **_signal: Any) -> None:
    """Build and start the worker's parts; a worker that could not do its work ends here with one sentence."""
    try:
        _require_threads(sender)
        settings.load(settings.LogSettings)
        for sentence in setting_checks.unknown_variables():
            logger.warning("%s", sentence)
        owner = f"{sender.hostname}/{secrets.token_hex(3)}"
        makes = ExtractMill if settings.load(settings.ExtractSettings).extract else Mill
        mill = makes(app, owner=owner, slots=sender.concurrency)
        keep_running_work_over_blips(lambda: mill.drain.stopping)
        free_the_slot_of_a_lost_ack()
        reuse_redis_clients()
        keep_time_by_redis(LeaseKeeper.clock)
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
        ready = logs.fields("worker_ready")
        logger.info("%s is ready. %s", sender.hostname, Process.mill.describe(), extra=ready)


@signals.worker_shutdown.connect
def stop(**_signal: Any) -> None:
    """End the worker's parts after its last task."""
    if Process.mill is not None:
        Process.mill.stop()
        Process.mill = None
    for crowd in Process.crowds:
        crowd.flush()


@signals.after_setup_logger.connect
def quieten(**_signal: Any) -> None:
    """Let promptmill's own lines through at any log level of Celery's.

    Left out are the two lines that Celery writes for every task, the traceback of a ticket handed back, and a
    traceback for everything that cannot be done while Redis is away or full: a ticket that was not acked comes back
    and finds its record.
    """
    for name in ("app", "workers"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("celery.worker.strategy").setLevel(logging.WARNING)
    trace = logging.getLogger("celery.app.trace")
    trace.setLevel(logging.WARNING)
    trace.addFilter(_is_no_handing_back)
    for name in ("celery.worker.request", "celery.worker.loops", "celery.bootsteps", "kombu.transport.redis"):
        logging.getLogger(name).addFilter(_is_not_of_redis)
    logging.getLogger("py.warnings").addFilter(_is_no_preview)


@signals.after_setup_task_logger.connect
@signals.after_setup_logger.connect
def dress_logs(**signal: Any) -> None:
    """Write in the form of MILL_LOG_FORMAT, without secrets, and of many lines alike only a few with a count."""
    try:
        hidden = settings.secret_values()
    except SettingError:
        hidden = []  # the worker ends at once, and says why
    handlers = signal["logger"].handlers
    Process.crowds += logs.dress(handlers, form=_log_format(), secrets=hidden, worker=Process.node)


def _say_json(message: str, _stream: Any = None) -> None:
    """Say what Celery says inside a signal handler, where no lock of a log handler may be waited for."""
    record = logging.LogRecord("celery.worker", logging.INFO, "", 0, message, (), None)
    os.write(2, logs.JsonLines(worker=Process.node).format(record).encode() + b"\n")


def _log_format() -> str:
    try:
        return settings.load(settings.LogSettings).log_format
    except SettingError:
        return "text"  # the same


def _is_no_handing_back(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], Reject))


def _is_not_of_redis(record: logging.LogRecord) -> bool:
    """Tell whether a line is about anything but a Redis that is away, full or read-only, which the keeper tells of."""
    return not (record.exc_info and isinstance(record.exc_info[1], redis.exceptions.RedisError))


def _is_no_preview(record: logging.LogRecord) -> bool:
    """Tell whether a warning is another one than Celery's, at each lost connection, of a default of Celery 6."""
    return "CPendingDeprecationWarning" not in record.getMessage()
