"""What Redis hears of a record counts once and of its own round alone, however often and however late it is told."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator

import pytest
import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from app import broker as brokers
from app.places import Keys, suspect_field
from app.queue import Queue
from app.records import Kind, Sample
from app.tally import Done
from tests.conftest import Broker
from tests.support.lossy_proxy import LossyProxy

DATASET = "Org/Set one"
OUTCOMES = [
    Done("a", Kind.ACCEPTED, 100, prompt_tokens=7, latency_s=1.25),
    Done("b", Kind.REJECTED, 50, prompt_tokens=8, latency_s=2.5),
    Done("c", Kind.FAILED),
]
LIAR = {"role": "user", "content": '","round":9,"settings":"f"}'}
"""A prompt that looks like the end of a payload of another round."""


@pytest.fixture
def queue(broker: Broker) -> Iterator[Queue]:
    """Return a queue with a dataset that is known and empty."""
    client = brokers.connect(brokers.parse(broker.url))
    made = Queue(client, Keys(broker.key_prefix))
    made.register(DATASET, "f" * 16, {"model": "m"})
    yield made
    client.close()


def sample(id_: str, *, round_: int = 0, settings: str = "f" * 16) -> Sample:
    """Return a sample whose prompt looks like the end of a payload."""
    return Sample(id=id_, messages=[LIAR], reference={**LIAR, "round": 9}, round=round_, settings=settings)


def put(queue: Queue, *ids: str, round_: int = 0) -> None:
    """Let samples wait."""
    assert queue.put(DATASET, [sample(id_, round_=round_) for id_ in ids]) == list(ids)


# Counted once


def test_finishing_twice_counts_once(queue: Queue) -> None:
    """Counters, rates and distributions are the same after a second call, and after a third in another company."""
    put(queue, "a", "b", "c", "d")
    queue.finish(DATASET, OUTCOMES, at=1000)
    once = queue.tally.look(DATASET)
    assert once.seconds == {1000: {"accepted": 1, "rejected": 1, "failed": 1, "tokens": 100}}
    assert (once.stats.latency.count, once.stats.lengths.count, once.stats.prompt_tokens) == (2, 1, 15)
    queue.finish(DATASET, OUTCOMES, at=1000)
    assert queue.tally.look(DATASET) == once
    queue.finish(DATASET, [*OUTCOMES, Done("d", Kind.FAILED), Done("d", Kind.FAILED)], at=1001)
    assert queue.tally.look(DATASET).seconds == {**once.seconds, 1001: {"failed": 1}}


def test_a_lost_answer_counts_nothing_twice(queue: Queue, broker: Broker) -> None:
    """Redis has counted, its answer is lost on the way, the worker tells it again: all is counted once."""
    put(queue, "a", "b", "c")
    parts = urllib.parse.urlsplit(broker.url)
    assert parts.port is not None
    with LossyProxy(parts.port) as proxy:
        through = redis.Redis(port=proxy.port, db=int(parts.path.strip("/") or 0), retry=Retry(NoBackoff(), 0))
        far = Queue(through, queue.keys)
        far.finish(DATASET, [Done("x", Kind.FAILED)], at=999)  # loads the script
        proxy.lose_answer(b"EVALSHA")
        with pytest.raises(redis.exceptions.ConnectionError):
            far.finish(DATASET, OUTCOMES, at=1000)
        assert proxy.lost == 1
        assert queue.waiting(DATASET).prompts == 0
        far.finish(DATASET, OUTCOMES, at=1001)
        through.close()
    found = queue.tally.look(DATASET)
    assert found.seconds == {1000: {"accepted": 1, "rejected": 1, "failed": 1, "tokens": 100}}
    assert (found.stats.settled, found.stats.latency.count) == (3, 2)


def test_a_suspect_widens_the_lane_once(queue: Queue) -> None:
    """A recorded suspect makes room in the lane, for an hour; telling it again, or forgetting one, makes no more."""
    put(queue, "a", "b")
    for id_ in "ab":
        queue.client.hset(queue.keys.suspects, suspect_field(DATASET, id_), "w|alone")
    queue.finish(DATASET, [Done("a", Kind.FAILED)])
    queue.finish(DATASET, [Done("a", Kind.FAILED)])
    queue.forget(DATASET, ["b"])
    assert queue.client.get(queue.keys.lane) == b"1"
    assert 3500 < int(str(queue.client.ttl(queue.keys.lane))) <= 3600
    assert queue.client.exists(queue.keys.suspects) == 0


def test_many_samples_are_finished_in_one_call(queue: Queue) -> None:
    """A group larger than a script takes at once is dropped and counted whole."""
    ids = [f"s{number}" for number in range(2500)]
    put(queue, *ids)
    queue.finish(DATASET, [Done(id_, Kind.ACCEPTED, 2) for id_ in ids], at=1000)
    assert queue.tally.look(DATASET).seconds == {1000: {"accepted": 2500, "tokens": 5000}}
    assert queue.depth(DATASET) == 0


# Each round its own


@pytest.mark.parametrize("settings", ["f" * 16, ""])
def test_late_books_of_a_round_leave_the_next_one(queue: Queue, settings: str) -> None:
    """A retry that is queued before Redis hears of the round before stays queued, and is asked by whoever comes."""
    put(queue, "a")
    queue.beat("w", {}, ttl_s=60)
    queue.take(DATASET, "a", "w")
    again = sample("a", round_=1, settings=settings)
    assert queue.put(DATASET, [again], {"a": Kind.FAILED}) == ["a"]
    queue.finish(DATASET, [Done("a", Kind.FAILED)])
    queue.forget(DATASET, {"a": 0})
    waiting = queue.waiting(DATASET)
    assert (waiting.prompts, waiting.in_flight, waiting.again_failed) == (1, 0, 1)
    taken = queue.take(DATASET, "a", "other")
    assert (taken.state, taken.sample, taken.deaths) == ("new", again, 0)
    queue.finish(DATASET, [Done("a", Kind.FAILED)])
    assert queue.take(DATASET, "a", "other").state == "mine"
    queue.finish(DATASET, [Done("a", Kind.ACCEPTED, 5, round=1)])
    assert queue.waiting(DATASET).prompts == queue.waiting(DATASET).again_failed == 0
    assert queue.tally.look(DATASET).stats.accepted == 1


def test_a_later_record_drops_an_earlier_round(queue: Queue) -> None:
    """A payload of a round that is recorded already, or of one before it, goes; without a round any goes."""
    for round_, recorded in ((0, 0), (0, 3), (3, 3), (10, 12)):
        put(queue, "a", round_=round_)
        queue.forget(DATASET, {"a": recorded})
        assert queue.depth(DATASET) == 0
    put(queue, "a", "b", round_=4)
    queue.forget(DATASET, {"a": 3, "b": 4})
    assert queue.waiting_ids(DATASET, ["a", "b"]) == {"a"}
    queue.forget(DATASET, ["a"])
    assert queue.depth(DATASET) == 0


def test_an_earlier_round_is_never_put_over_a_later_one(queue: Queue) -> None:
    """Whoever puts a sample in an older round, or in the same one again, finds it waiting as it was."""
    put(queue, "a", round_=2)
    before = queue.payloads(DATASET, ["a"])
    for round_ in (0, 1):
        assert queue.put(DATASET, [sample("a", round_=round_)], replace=True) == []
    assert queue.put(DATASET, [sample("a", round_=2, settings="e" * 16)]) == []
    assert queue.payloads(DATASET, ["a"]) == before
    new = sample("a", round_=2, settings="e" * 16)
    assert queue.put(DATASET, [new], replace=True) == []
    assert queue.payloads(DATASET, ["a"]) == {"a": new}
