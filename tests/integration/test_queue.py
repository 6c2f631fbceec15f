"""The work list in a real Redis: what waits, who has it, what got lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from app import broker as brokers
from app import celery as mill_celery
from app.places import Keys
from app.queue import Queue, Waiting, task_id
from app.records import Kind, Sample, Source
from app.tally import Done
from tests.conftest import Broker
from tests.support.processes import wait_until

DATASET = "Org/Set one"
"""A name that is not its own folder."""


@pytest.fixture
def queue(broker: Broker) -> Iterator[Queue]:
    """Return a queue with a dataset that is known and empty."""
    client = brokers.connect(brokers.parse(broker.url))
    made = Queue(client, Keys(broker.key_prefix))
    made.register(DATASET, "f" * 16, {"model": "m"})
    yield made
    client.close()


@pytest.fixture
def celery(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """Return the product's Celery app on the test's Redis."""
    monkeypatch.setenv("MILL_REDIS_URL", broker.url)
    monkeypatch.setenv("MILL_KEY_PREFIX", broker.key_prefix)
    made = mill_celery.make_app()
    yield made
    made.pool.force_close_all()
    made.close()


def _sample(id_: str, **values: Any) -> Sample:
    return Sample(id=id_, messages=[{"role": "user", "content": f"é\u2028 {id_}"}], settings="f" * 16, **values)


def _put(queue: Queue, *ids: str) -> None:
    assert queue.put(DATASET, [_sample(id_) for id_ in ids]) == list(ids)


# Filling


def test_settings_travel_with_the_dataset(queue: Queue) -> None:
    """Each set of settings is found by its fingerprint, older ones too, and the dataset is known by its own name."""
    queue.register(DATASET, "e" * 16, {"model": "n", "stop": ["é"], "top_p": None})
    assert queue.settings(DATASET, "f" * 16) == {"model": "m"}
    assert queue.settings(DATASET, "e" * 16) == {"model": "n", "stop": ["é"], "top_p": None}
    assert queue.settings(DATASET, "0" * 16) is None
    assert queue.client.hget(queue.keys.settings(DATASET), "current") == b"e" * 16
    assert queue.datasets() == [DATASET]


def test_put_is_idempotent(queue: Queue) -> None:
    """Putting a sample that waits already changes nothing and is told apart from new ones."""
    _put(queue, "a", "b")
    assert queue.put(DATASET, [_sample("b", source=Source(row=7)), _sample("c")]) == ["c"]
    assert queue.put(DATASET, []) == []
    assert queue.take(DATASET, "b", "me").sample == _sample("b")
    assert queue.waiting_ids(DATASET, ["a", "c", "x"]) == {"a", "c"}
    assert queue.waiting_ids(DATASET, []) == set()


def test_depth_counts_one_dataset_or_all(queue: Queue) -> None:
    """The number of prompts in Redis is known for each dataset and in all."""
    queue.register("other", "f" * 16, {})
    _put(queue, "a", "b")
    queue.put("other", [_sample("a")])
    assert (queue.depth(DATASET), queue.depth("other"), queue.depth("nobody"), queue.depth()) == (2, 1, 0, 3)


def test_a_run_begins_with_the_first_prompt(queue: Queue) -> None:
    """The present run of work begins when the first prompt comes in, and when the first worker comes up."""
    before = time.time()
    assert queue.tally.look(DATASET).run is None
    _put(queue, "a")
    first = queue.tally.look(DATASET).run
    assert first is not None
    assert before - 1 <= first.began <= time.time() + 1
    _put(queue, "b")
    assert queue.tally.look(DATASET).run == first
    queue.finish(DATASET, [Done("a", Kind.ACCEPTED, 7)])
    queue.begin_runs()
    second = queue.tally.look(DATASET).run
    assert second is not None
    assert second.began > first.began
    assert (first.before.accepted, second.before.accepted, second.before.tokens) == (0, 1, 7)


# Working


def test_take_and_finish(queue: Queue) -> None:
    """A sample is taken by one worker, stays its own until it is finished, and is gone afterwards."""
    _put(queue, "a")
    queue.beat("me", {}, ttl_s=60)
    first = queue.take(DATASET, "a", "me")
    assert (first.state, first.sample, first.deaths) == ("new", _sample("a"), 0)
    assert (queue.take(DATASET, "a", "me").state, queue.take(DATASET, "a", "you").state) == ("mine", "held")
    assert not queue.take(DATASET, "a", "you").sample
    queue.finish(DATASET, [Done("a", Kind.ACCEPTED)])
    gone = queue.take(DATASET, "a", "me")
    assert (gone.state, gone.sample) == ("gone", None)
    assert queue.waiting(DATASET) == Waiting()


def test_a_released_sample_is_new_again(queue: Queue) -> None:
    """A worker that gives a sample back leaves it to the next one without a death; nobody gives back another's."""
    _put(queue, "a")
    queue.beat("me", {}, ttl_s=60)
    queue.take(DATASET, "a", "me")
    queue.release(DATASET, "a", "you")
    assert queue.take(DATASET, "a", "you").state == "held"
    queue.release(DATASET, "a", "me")
    assert (queue.take(DATASET, "a", "you").state, queue.waiting(DATASET).prompts) == ("new", 1)


def test_samples_of_dead_workers_are_taken_over(queue: Queue) -> None:
    """A sample whose worker stopped beating goes to the next one, and such a death is counted until it is done."""
    _put(queue, "a")
    queue.beat("one|with|bars", {}, ttl_s=0.05)
    queue.take(DATASET, "a", "one|with|bars")
    wait_until(lambda: not queue.living(["one|with|bars"]), 10, "the end of a heartbeat")
    second = queue.take(DATASET, "a", "two")
    assert (second.state, second.deaths, queue.take(DATASET, "a", "two").deaths) == ("orphan", 1, 1)
    queue.finish(DATASET, [Done("a", Kind.FAILED)])
    _put(queue, "a")
    assert queue.take(DATASET, "a", "four").deaths == 0


def test_a_ticket_without_prompt_leaves_nothing_behind(queue: Queue) -> None:
    """Taking a sample that somebody has recorded leaves no trace of a flight."""
    queue.client.hset(queue.keys.flights(DATASET), "a", "dead|1")
    assert queue.take(DATASET, "a", "me").state == "gone"
    assert queue.client.exists(queue.keys.flights(DATASET)) == 0


def test_finish_keeps_the_books(queue: Queue) -> None:
    """Finishing drops all that Redis holds of the samples and counts them by second and kind, with accepted tokens."""
    queue.put(DATASET, [_sample(id_) for id_ in "abcdex"], {"a": Kind.FAILED, "b": Kind.REJECTED, "c": Kind.REJECTED})
    assert (queue.waiting(DATASET).again_failed, queue.waiting(DATASET).again_rejected) == (1, 2)
    for id_ in "abc":
        queue.take(DATASET, id_, "me")
    queue.finish(DATASET, [Done("a", Kind.ACCEPTED, 10), Done("b", Kind.REJECTED, 99)], at=1000.9)
    queue.finish(DATASET, [Done("d", Kind.ACCEPTED, 5), Done("e", Kind.FAILED)], at=1000.1)
    queue.finish(DATASET, [Done("x", Kind.ACCEPTED)], at=1001)
    queue.finish(DATASET, [])
    waiting = queue.waiting(DATASET)
    assert (waiting.prompts, waiting.again_failed, waiting.again_rejected) == (1, 0, 1)
    assert queue.client.hkeys(queue.keys.flights(DATASET)) == [b"c"]
    assert queue.tally.look(DATASET).seconds == {
        1000: {"accepted": 2, "rejected": 1, "failed": 1, "tokens": 15},
        1001: {"accepted": 1},
    }


def test_forget_counts_nothing(queue: Queue) -> None:
    """A sample that turned out to be recorded is dropped without being counted again."""
    queue.put(DATASET, [_sample("a"), _sample("b")], {"a": Kind.FAILED})
    queue.take(DATASET, "a", "me")
    queue.forget(DATASET, ["a"])
    queue.forget(DATASET, [])
    waiting = queue.waiting(DATASET)
    assert (waiting.prompts, waiting.in_flight, waiting.orphaned, waiting.again_failed) == (1, 0, 0, 0)
    assert queue.tally.look(DATASET).seconds == {}


def test_old_rates_are_forgotten(queue: Queue) -> None:
    """Per-second tallies are kept for 15 minutes."""
    now = int(time.time())
    for at in (now - 2000, now - 1000, now - 300, now):
        _put(queue, "a")
        queue.finish(DATASET, [Done("a", Kind.ACCEPTED, 1)], at=at)
    queue.tally.trim(DATASET)
    assert sorted(queue.tally.look(DATASET).seconds) == [now - 300, now]
    queue.tally.trim("nobody")


# Pausing


def test_paused_datasets_are_not_read(queue: Queue) -> None:
    """A paused dataset's queue is told apart from those that workers read, until it is resumed."""
    queue.register("b", "f" * 16, {})
    first, second = f"mill.{queue.keys.queue(DATASET).partition('mill.')[2]}", "mill.b"
    assert queue.queues() == ({first, second}, set())
    queue.pause(DATASET, "the key was refused")
    assert queue.queues() == ({second}, {first})
    assert (queue.waiting(DATASET).paused, queue.waiting("b").paused) == ("the key was refused", None)
    queue.resume(DATASET)
    queue.resume("b")
    assert queue.queues() == ({first, second}, set())
    assert queue.waiting(DATASET).paused is None


# Looking


def test_waiting_tells_flights_from_orphans(queue: Queue) -> None:
    """Samples of living workers are in flight, those of dead ones orphaned, and the oldest flight's age is known."""
    assert queue.waiting(DATASET) == Waiting()
    _put(queue, "a", "b", "c", "d")
    queue.beat("me", {}, ttl_s=60)
    for id_, owner in (("a", "me"), ("b", "me"), ("c", "dead")):
        queue.take(DATASET, id_, owner)
    queue.client.hset(queue.keys.flights(DATASET), "a", f"me|{time.time() - 100:.0f}")
    waiting = queue.waiting(DATASET)
    assert (waiting.prompts, waiting.in_flight, waiting.orphaned) == (4, 2, 1)
    assert waiting.ages[0] == pytest.approx(100, abs=20)


def test_workers_come_and_go(queue: Queue) -> None:
    """A worker is seen with its last heartbeat until it parts or stays silent, and is forgotten then."""
    assert queue.workers() == []
    assert queue.living([]) == set()
    queue.beat("b", {"slots": 4, "host": "h"}, ttl_s=60)
    queue.beat("a", {"slots": 1}, ttl_s=60)
    queue.beat("a", {"slots": 2}, ttl_s=60)
    queue.beat("c", {}, ttl_s=0.05)
    wait_until(lambda: queue.living("abc") == {"a", "b"}, 10, "the end of a heartbeat")
    assert queue.workers() == [{"owner": "a", "slots": 2}, {"owner": "b", "slots": 4, "host": "h"}]
    assert queue.client.smembers(queue.keys.workers) == {b"a", b"b"}
    queue.part("b")
    assert [worker["owner"] for worker in queue.workers()] == ["a"]


def test_a_turn_falls_to_one(queue: Queue) -> None:
    """A periodic duty falls to one worker per period, and each duty has its own turns."""
    assert [queue.take_turn("sweep", owner, for_s=60) for owner in ("a", "b", "a")] == [True, False, False]
    assert queue.take_turn("progress", "b", for_s=0.05)
    wait_until(lambda: queue.take_turn("progress", "a", for_s=60), 10, "the next turn")


# Tickets


def test_a_ticket_carries_no_prompt(queue: Queue, celery: Celery) -> None:
    """A message names dataset and sample and little more, on the dataset's own queue, with an id people can read."""
    mill_celery.publish(celery, DATASET, ["a"])
    raw = queue.client.lindex(queue.keys.queue(DATASET), 0)
    assert isinstance(raw, bytes)
    assert len(raw) < 1200
    headers = json.loads(raw)["headers"]
    assert (headers["task"], headers["id"]) == ("generate", task_id(DATASET, "a"))
    assert (headers["argsrepr"], headers["ignore_result"], headers["eta"]) == (f"{DATASET} a", True, None)


def test_publishing_in_bulk(queue: Queue, celery: Celery) -> None:
    """More tickets than fit into one batch all arrive, in order."""
    ids = [f"id{number}" for number in range(1001)]
    mill_celery.publish(celery, DATASET, ids)
    mill_celery.publish(celery, DATASET, [])
    raws = queue.client.lrange(queue.keys.queue(DATASET), 0, -1)
    names = [json.loads(raw)["headers"]["id"] for raw in reversed(raws)]  # type: ignore[arg-type]
    assert names == [task_id(DATASET, id_) for id_ in ids]


def test_samples_without_ticket_are_found(queue: Queue, celery: Celery) -> None:
    """Exactly those ids are lost that have a prompt and neither a waiting nor a delivered ticket."""
    ids = [f"id{number}" for number in range(1200)]
    _put(queue, *ids)
    assert queue.without_ticket(DATASET) == set(ids)
    mill_celery.publish(celery, DATASET, ids[:3] + ids[10:])
    mill_celery.publish(celery, "other", ids)
    assert queue.without_ticket(DATASET) == set(ids[3:10])
    mill_celery.publish(celery, DATASET, ids[3:10])
    assert queue.without_ticket(DATASET) == set()


def test_delivered_tickets_are_not_lost(queue: Queue, celery: Celery) -> None:
    """A ticket that a worker has fetched and not acked counts; when the worker lets go, it is back on the queue."""
    _put(queue, "a", "b", "c")
    mill_celery.publish(celery, DATASET, ["a", "b"])
    with celery.connection_for_read() as connection:
        bound = mill_celery.celery_queue(DATASET)(connection.default_channel)
        delivered = bound.get(no_ack=False)
        assert delivered is not None
        assert queue.client.llen(queue.keys.queue(DATASET)) == 1
        assert queue.without_ticket(DATASET) == {"c"}
        delivered.requeue()
    assert queue.client.llen(queue.keys.queue(DATASET)) == 2
    assert queue.without_ticket(DATASET) == {"c"}


def test_a_sample_in_a_living_workers_hands_is_not_lost(queue: Queue) -> None:
    """A sample that a living worker asks needs no ticket; one whose worker died does."""
    _put(queue, "a", "b", "c")
    queue.beat("me", {}, ttl_s=60)
    queue.take(DATASET, "a", "me")
    queue.take(DATASET, "b", "dead")
    assert queue.without_ticket(DATASET) == {"b", "c"}


def test_equal_counts_need_no_look(queue: Queue, celery: Celery) -> None:
    """A dataset without prompts has lost nothing, whatever tickets are left."""
    mill_celery.publish(celery, DATASET, ["old"])
    assert queue.without_ticket(DATASET) == set()


def test_the_celery_app_follows_the_settings(celery: Celery, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app acks late, keeps no results, runs threads, and takes lease and key prefix from the settings."""
    monkeypatch.setenv("MILL_LEASE_S", "40")
    other = mill_celery.make_app()
    options = other.conf.broker_transport_options
    assert (options["visibility_timeout"], options["global_keyprefix"]) == (30, broker.key_prefix)
    assert (celery.conf.task_acks_late, celery.conf.task_ignore_result, celery.conf.result_backend) == (
        True,
        True,
        None,
    )
    assert (celery.conf.worker_pool, celery.conf.worker_prefetch_multiplier) == ("threads", 1)
    other.close()


def test_a_celery_command_ends_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the settings cannot be used, the app that Celery asks for is one sentence and the exit code for that."""
    monkeypatch.setenv("MILL_REDIS_URL", "http://h")
    with pytest.raises(SystemExit) as caught:
        mill_celery._app_or_exit()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("promptmill: MILL_REDIS_URL cannot be used: ")
