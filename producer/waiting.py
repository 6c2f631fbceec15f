"""What Redis says of a dataset's ids, taken into a scan of its files."""

from __future__ import annotations

import time
from typing import cast

from app.broker import text
from app.queue import Queue
from app.records import ASKED_AGAIN
from producer.scan import Scan, Waits


def note_redis(queue: Queue, dataset: str, found: Scan, *, look_again_s: float) -> None:
    """Take down what waits, what is asked, and what no ticket will ever ask for.

    An id without a ticket is looked for again `look_again_s` seconds later, for tickets move.
    Raises redis.exceptions.RedisError.
    """
    _note_payloads(queue, dataset, found)
    lost = queue.without_ticket(dataset, thorough=True)
    if lost:
        time.sleep(look_again_s)
        lost &= queue.without_ticket(dataset, thorough=True)
    found.note_progress(lost, Waits.LOST)


def _note_payloads(queue: Queue, dataset: str, found: Scan) -> None:
    keys, client = queue.keys, queue.client
    found.note_waiting(map(text, cast("list[bytes]", client.hkeys(keys.prompts(dataset)))), Waits.QUEUED)
    owners = queue.flights(dataset)
    alive = queue.living(set(owners.values()))
    found.note_progress((id_ for id_, owner in owners.items() if owner in alive), Waits.FLYING)
    found.note_progress((id_ for id_, owner in owners.items() if owner not in alive), Waits.ORPHANED)
    for kind in ASKED_AGAIN:
        found.note_again(map(text, cast("set[bytes]", client.smembers(keys.again(dataset, kind)))))
