"""Failed and rejected samples are asked again in a new round, once, and an interrupted retry goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from app import broker as brokers
from app.feeder import Feeder
from app.ledger import Ledger
from app.places import DatasetFolder, Keys
from app.queue import Queue
from app.records import Kind
from app.retry import ask_again
from tests.conftest import Broker
from tests.support.folders import pen


@pytest.fixture
def queue(broker: Broker) -> Iterator[Queue]:
    """Return a queue with one dataset."""
    client = brokers.connect(brokers.parse(broker.url))
    made = Queue(client, Keys(broker.key_prefix))
    made.register("d", "f", {})
    yield made
    client.close()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Return a ledger with samples of every fate."""
    with Ledger.open(DatasetFolder(tmp_path / "d")) as made:
        made.commit([pen(f"t{n}", Kind.FAILED, reason="timeout") for n in range(1200)])
        made.commit([pen("b", Kind.FAILED, reason="bad_request"), pen("r", Kind.REJECTED, reason="empty"), pen("a")])
        made.commit([pen("t0", Kind.FAILED, reason="timeout", round_=1), pen("t1", round_=1)])
        yield made


@pytest.fixture
def tickets() -> list[str]:
    """Return the ids that were published, in order."""
    return []


@pytest.fixture
def feeder(queue: Queue, broker: Broker, tickets: list[str]) -> Feeder:
    """Return a feeder of that dataset that notes the tickets."""

    def publish(dataset: str, ids: Sequence[str]) -> None:
        assert dataset == "d"
        tickets.extend(ids)

    return Feeder(queue, publish, url=brokers.parse(broker.url), dataset="d", max_pending=10_000)


def test_one_class_is_asked_again_and_nothing_else(
    queue: Queue, ledger: Ledger, feeder: Feeder, tickets: list[str]
) -> None:
    """Each sample that still is of that class gets one ticket, in the round after its last; a second call adds none."""
    counts = ask_again(ledger, feeder, kind=Kind.FAILED, reason="timeout")
    assert (counts.queued, counts.waiting, counts.recorded, counts.complete) == (1199, 0, 0, True)
    assert sorted(tickets) == sorted(f"t{n}" for n in range(1200) if n != 1)
    queue.beat("w", {}, ttl_s=60)
    first, again = queue.take("d", "t0", "w").sample, queue.take("d", "t2", "w").sample
    assert first is not None
    assert again is not None
    assert (first.round, again.round, first.messages) == (2, 1, [{"role": "user", "content": "Hi"}])
    assert queue.waiting("d").again_failed == 1199

    counts = ask_again(ledger, feeder, kind=Kind.FAILED, reason="timeout")
    assert (counts.queued, counts.waiting) == (0, 1199)
    assert len(tickets) == 1199


def test_rejected_ones_only_when_asked_for(ledger: Ledger, feeder: Feeder, tickets: list[str]) -> None:
    """A kind without a class means all of that kind."""
    assert ask_again(ledger, feeder, kind=Kind.REJECTED).queued == 1
    assert tickets == ["r"]
    assert ask_again(ledger, feeder, kind=Kind.FAILED).queued == 1200
    assert "b" in tickets
    assert "a" not in tickets


def test_a_retry_that_is_stopped_goes_on_at_the_next_call(ledger: Ledger, feeder: Feeder, tickets: list[str]) -> None:
    """Stopped between two chunks it says that there is more, and the same call again queues exactly the rest."""
    looks = iter([False, True])
    counts = ask_again(ledger, feeder, kind=Kind.FAILED, stopping=lambda: next(looks))
    assert (counts.queued, counts.complete) == (500, False)
    counts = ask_again(ledger, feeder, kind=Kind.FAILED)
    assert (counts.queued, counts.waiting, counts.complete) == (700, 500, True)
    assert len(tickets) == len(set(tickets)) == 1200


def test_a_full_queue_stops_a_retry_that_may_not_wait(queue: Queue, ledger: Ledger, broker: Broker) -> None:
    """With no room left it waits only until it is told to stop, and then says that there is more."""
    told: list[str] = []
    feeder = Feeder(
        queue,
        lambda _dataset, _ids: None,
        url=brokers.parse(broker.url),
        dataset="d",
        max_pending=300,
        stopping=lambda: bool(told),
        on_wait=told.append,
    )
    counts = ask_again(ledger, feeder, kind=Kind.FAILED)
    assert (counts.queued, counts.complete) == (300, False)
    assert told == ["300 prompts wait in Redis (MILL_MAX_PENDING)"]
