"""The Celery app, so that `celery -A app worker|flower|inspect` just works; tasks are loaded by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from typing import Any

import kombu
from celery import Celery
from celery.app.amqp import AMQP

from app import broker, settings
from app.errors import MillError
from app.places import is_extraction, queue_name
from app.queue import task_id

TASK = "generate"
"""The name of the task that turns a ticket into a durable record."""
EXTRACT_TASK = "extract"
"""The name of the task that turns a ticket into a file of hidden states and its record."""
EXTRACT_SLOTS = 64
"""Tickets that a worker of hidden states holds at once, for batches of like lengths."""
LEASE_SHARE = 0.75
"""Share of MILL_LEASE_S after which an unrefreshed delivery is taken back; the rest is for noticing it."""
_PUBLISH_BATCH = 500
_RECONNECT_S = 4


class _Connection(kombu.Connection):
    """Looks for a lost Redis every few seconds, however long it was away; kombu's own pauses grow to 30."""

    def ensure_connection(self, *args: Any, **options: Any) -> Any:
        """Connect, trying again until it works."""
        return super().ensure_connection(*args, **{"interval_max": _RECONNECT_S, **options})


class _Amqp(AMQP):  # type: ignore[misc] # celery is untyped
    """Celery's own, with those connections."""

    login: broker.PasswordFile | None = None

    def Connection(self, *args: Any, **options: Any) -> _Connection:  # noqa: N802 Celery's name
        """Return a connection that reads its password anew each time it is made, where it is in a file."""
        return _Connection(*args, **{"credential_provider": self.login, **options})


def make_app() -> Celery:
    """Build the app from the settings; nothing connects before it is used.

    Raises SettingError.
    """
    at, store = settings.load(settings.BrokerSettings), settings.load(settings.StoreSettings)
    lease_s = settings.load(settings.WorkerSettings).lease_s
    slots = _slots()
    url = broker.resolve(at, store)
    made = Celery("promptmill", broker=url.celery, include=["workers.tasks"], amqp=_Amqp, set_as_current=True)
    made.amqp.login = url.login
    made.conf.update(
        broker_connection_retry=True,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # the default gives up after 100 tries
        broker_channel_error_retry=True,  # a Redis that is full or read-only for a while is waited for
        broker_transport_options=_transport_options(at.key_prefix, lease_s),
        task_acks_late=True,
        task_acks_on_failure_or_timeout=True,
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_default_queue="mill",
        task_default_exchange="mill",
        task_default_routing_key="mill",
        task_serializer="json",
        accept_content=["json"],
        worker_pool="threads",
        worker_concurrency=slots,
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_send_task_events=True,
        worker_hijack_root_logger=True,
        worker_enable_remote_control=True,
    )
    settings.set_default_variable("FLOWER_CONF", str(resources.files("app").joinpath("dashboard/flowerconfig.py")))
    return made


def _slots() -> int:
    """Return how many tickets a worker works on at once; raises SettingError."""
    servers = settings.load(settings.ServerSettings)
    if settings.load(settings.ExtractSettings).extract:
        return EXTRACT_SLOTS
    bound = servers.max_in_flight * max(1, len(servers.model_urls))
    return bound + max(16, bound * 6 // 100)  # a few more than permits, so that one always waits


def _transport_options(key_prefix: str, lease_s: float) -> dict[str, Any]:
    """Return what kombu is told of Redis."""
    return {
        "global_keyprefix": key_prefix,
        "visibility_timeout": lease_s * LEASE_SHARE,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 5,
        "unacked_mutex_expire": 10,  # seconds; the default of 300 lets a killed sweeper block everybody
        "queue_order_strategy": "round_robin",
        "priority_steps": [0],
        # With the default of 10, acks that end together fail, which is only logged (see docs/design/lease.md).
        "max_connections": 65536,
        "socket_keepalive": True,
        "socket_connect_timeout": 5,
        "socket_timeout": 60,
        "health_check_interval": 25,
    }


def publish(app: Celery, dataset: str, ids: Sequence[str]) -> None:
    """Put one ticket per id on the dataset's queue, in bulk."""
    queue, task = celery_queue(dataset), EXTRACT_TASK if is_extraction(dataset) else TASK
    with app.producer_pool.acquire(block=True) as producer, producer.batch(max_size=_PUBLISH_BATCH):
        for sample_id in ids:
            # As app.send_task does it, less what nobody reads: a tenth of the message.
            message = app.amqp.create_task_message(
                task_id(dataset, sample_id),
                task,
                (dataset, sample_id),
                argsrepr=f"{dataset} {sample_id}",
                kwargsrepr="",
                ignore_result=True,
            )
            app.amqp.send_task_message(producer, task, message, queue=queue, retry=False)


def celery_queue(dataset: str) -> kombu.Queue:
    """Return the dataset's Celery queue."""
    name = queue_name(dataset)
    return kombu.Queue(name, exchange=name, routing_key=name)


def _app_or_exit() -> Celery:
    try:
        return make_app()
    except MillError as error:  # `celery -A app ...` would show it as a traceback
        sys.stderr.write(f"promptmill: {error}\n")
        raise SystemExit(error.exit_code) from None


app = _app_or_exit()
