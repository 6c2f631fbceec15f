"""What a person may change from the page: pause, resume, ask a class of failures again, the bound in flight."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from app.broker import BrokerUrl
from app.errors import UsageError
from app.feeder import Feeder
from app.ledger import Ledger
from app.lock import LOOK_PATIENCE_S
from app.places import DatasetFolder, dataset_folder
from app.queue import Queue
from app.records import Kind
from app.retry import ask_again, carry_settings

RETRY_S = 60.0
"""Seconds after which a retry stops between two chunks; a second press goes on."""
MAX_BOUND = 65536


class Action(enum.StrEnum):
    """What can be asked for."""

    PAUSE = "pause"
    RESUME = "resume"
    RETRY = "retry"
    SET_BOUND = "set_bound"


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person has pressed."""

    action: Action
    dataset: str = ""
    kind: Kind = Kind.FAILED
    """Of a retry: failed or rejected."""
    reason: str | None = None
    """Of a retry: the class."""
    bound: int | None = None
    """Of set_bound: requests in flight per model server, over all workers; null gives it back to the settings."""


def parse_order(body: bytes) -> Order:
    """Return the order in a request's body.

    Raises UsageError for anything else.
    """
    try:
        return msgspec.json.decode(body, type=Order)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"The order cannot be understood: {error}.") from error


class Controls:
    """Carries orders out; every method may block and is for a thread of its own."""

    def __init__(self, queue: Queue, celery_app: Any, *, url: BrokerUrl, prepared: Path, max_pending: int) -> None:
        self._queue = queue
        self._celery_app = celery_app
        self._url = url
        self._prepared = prepared
        self._max_pending = max_pending

    def carry_out(self, order: Order, *, by: str) -> str:
        """Do what the order says and return one sentence about it.

        Raises MillError.
        """
        if order.action is Action.SET_BOUND:
            return self._set_bound(order.bound)
        if order.dataset not in self._queue.datasets():
            raise UsageError(f"Redis knows no dataset {order.dataset!r}.")
        if order.action is Action.PAUSE:
            self._queue.pause(order.dataset, f"by {by} on the dashboard")
            return f"{order.dataset} is paused; running requests finish."
        if order.action is Action.RESUME:
            self._queue.resume(order.dataset)
            return f"{order.dataset} goes on."
        return self._retry(order)

    def _retry(self, order: Order) -> str:
        if order.kind not in {Kind.FAILED, Kind.REJECTED}:
            raise UsageError("Only failed or rejected samples can be asked again.")
        deadline = time.monotonic() + RETRY_S

        def stopping() -> bool:
            return time.monotonic() > deadline

        with Ledger.open(self._existing_folder(order.dataset), patience_s=LOOK_PATIENCE_S) as ledger:
            ledger.catch_up()
            carry_settings(self._queue, ledger, order.dataset)
            feeder = Feeder(
                self._queue,
                partial(_publish, self._celery_app),
                url=self._url,
                dataset=order.dataset,
                max_pending=self._max_pending,
                stopping=stopping,
            )
            counts = ask_again(ledger, feeder, kind=order.kind, reason=order.reason, stopping=stopping)
        which = f"{order.kind} samples" + (f" ({order.reason})" if order.reason else "")
        waiting = f"; {counts.waiting:,} were waiting already" if counts.waiting else ""
        rest = "" if counts.complete else "; there are more, press again"
        return f"{order.dataset}: queued {counts.queued:,} {which} again{waiting}{rest}."

    def _existing_folder(self, dataset: str) -> DatasetFolder:
        folder = dataset_folder(self._prepared, dataset)
        if not folder.path.is_dir():
            raise UsageError(f"There is no {folder.path}; Flower needs the MILL_PREPARED_DIR of the workers.")
        return folder

    def _set_bound(self, bound: int | None) -> str:
        if bound is not None and not 1 <= bound <= MAX_BOUND:
            raise UsageError(f"The bound must be between 1 and {MAX_BOUND:,} requests in flight.")
        self._queue.set_bound(bound)
        if bound is None:
            return "MILL_MAX_IN_FLIGHT of the workers bounds the requests in flight again."
        return f"At most {bound:,} requests are in flight per model server from now on."


def _publish(celery_app: Any, dataset: str, ids: Sequence[str]) -> None:
    from app.celery import publish  # noqa: PLC0415 - Flower has loaded it; whoever reads this module alone has not

    publish(celery_app, dataset, ids)
