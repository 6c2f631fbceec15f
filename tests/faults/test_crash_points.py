"""SIGKILL at every named point of a sample's way: what is on disk counts, and the rest is asked again."""

from __future__ import annotations

import pytest

from tests.conftest import ModelServerFactory
from tests.support.aftermath import (
    assert_asked_again_at_most,
    assert_asked_once,
    assert_balanced,
    assert_not_asked_since,
    assert_quiet,
    prompts,
    times_asked,
)
from tests.support.kill_points import WRITE_POINTS, Point, assert_killed, producer_that_dies, worker_that_dies
from tests.support.mill import Mill
from tests.support.processes import wait_until

pytestmark = pytest.mark.fault

_SLOTS = 4
_SHORT_LEASE_S = "5"
_COUNT = 14


@pytest.mark.parametrize("point", WRITE_POINTS)
def test_death_on_the_way_to_the_ack_costs_no_answer_that_was_written(
    mill: Mill, model_server: ModelServerFactory, point: Point
) -> None:
    """A worker that dies at this point leaves one line per id, and no recorded id is asked a second time."""
    server = model_server(latency_s=0.2)
    mill.env["MILL_LEASE_S"] = _SHORT_LEASE_S
    rows = prompts(_COUNT)
    mill.enqueue(rows)

    dying = worker_that_dies(mill, point, nth=2, concurrency=_SLOTS)
    assert_killed(dying)
    survived = times_asked(mill, server)
    asked = set(server.counts)
    new = mill.worker(concurrency=_SLOTS)
    mill.wait_recorded(_COUNT)
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_not_asked_since(server, survived)
    assert_asked_once(server, set(rows) - asked)
    assert_asked_again_at_most(server, 2 * _SLOTS)
    assert new.stop() == 0
    assert_quiet(new.output())
    if point is Point.INSIDE_WRITE:
        assert mill.folder().torn.exists()


def test_a_message_lost_between_pop_and_note_comes_back(mill: Mill, model_server: ModelServerFactory) -> None:
    """A worker that dies between taking a message off its queue and noting it loses no sample: the sweep finds it."""
    server = model_server(latency_s=0.2)
    mill.env["MILL_LEASE_S"] = _SHORT_LEASE_S
    rows = prompts(_COUNT)
    mill.enqueue(rows)

    assert_killed(worker_that_dies(mill, Point.AFTER_POP, nth=3, concurrency=_SLOTS))
    new = mill.worker(concurrency=_SLOTS)
    mill.wait_recorded(_COUNT)
    mill.wait_idle()

    assert "lost tickets that are queued again: 1" in new.output()
    assert_balanced(mill, rows)
    assert_asked_again_at_most(server, 2)


@pytest.mark.parametrize(
    "point",
    [
        Point.INSIDE_WRITE,
        Point.AFTER_FSYNC,
        Point.ENQUEUE_BEFORE_PUT,
        Point.ENQUEUE_BEFORE_PUBLISH,
        Point.ENQUEUE_MID_PUBLISH,
        Point.ENQUEUE_AFTER_PUBLISH,
    ],
)
def test_an_enqueue_that_dies_is_finished_by_the_next(
    mill: Mill, model_server: ModelServerFactory, point: Point
) -> None:
    """An enqueue killed at this point and run again queues each sample, and each is asked exactly once."""
    server = model_server()
    rows = prompts(_COUNT)
    source = mill.write_rows(rows)

    assert_killed(producer_that_dies(mill, point, "enqueue", str(source), "--dataset", "case"))
    mill.enqueue(source)
    worker = mill.worker(concurrency=_SLOTS)
    mill.wait_recorded(_COUNT)
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())


def test_an_enqueue_that_dies_in_a_later_batch_keeps_the_earlier_ones(
    mill: Mill, model_server: ModelServerFactory
) -> None:
    """Killed within its second batch of 500, an enqueue run again queues the rest alone."""
    server = model_server()
    rows = prompts(1200)
    source = mill.write_rows(rows)

    words = ("enqueue", str(source), "--dataset", "case")
    assert_killed(producer_that_dies(mill, Point.ENQUEUE_MID_PUBLISH, *words, nth=2))
    said = mill.enqueue(source).stdout
    assert "already queued 1,000, queued 200" in said
    mill.worker(concurrency=32)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_asked_once(server, rows)


def test_a_rebuild_of_the_index_that_dies_is_begun_anew(mill: Mill, model_server: ModelServerFactory) -> None:
    """A `verify` killed while it rebuilds a deleted index leaves a folder whose next index is true."""
    model_server()
    rows = prompts(_COUNT)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=_SLOTS)
    mill.wait_recorded(_COUNT)
    mill.wait_idle()
    worker.stop()
    for path in mill.folder().path.glob("index.sqlite*"):
        path.unlink()

    assert_killed(producer_that_dies(mill, Point.IN_REBUILD, "verify", "case", nth=2))

    assert_balanced(mill, rows)


def test_an_export_that_dies_leaves_no_half_file(mill: Mill, model_server: ModelServerFactory) -> None:
    """An export killed while it writes leaves nothing under its name, and the next one writes every row."""
    model_server()
    rows = prompts(_COUNT)
    mill.enqueue(rows)
    mill.worker(concurrency=_SLOTS)
    mill.wait_recorded(_COUNT)
    mill.wait_idle()
    output = mill.path / "out" / "rows.jsonl"

    words = ("export", "case", "--format", "openai", "--output", str(output))
    assert_killed(producer_that_dies(mill, Point.IN_EXPORT, *words))
    assert not output.exists()
    mill.run(*words)

    assert output.read_bytes().count(b"\n") == _COUNT
    assert [path.name for path in output.parent.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("point", [Point.IN_EXPORT, Point.BEFORE_RENAME, Point.AFTER_RENAME])
def test_an_export_that_dies_leaves_the_old_file_or_the_new(
    mill: Mill, model_server: ModelServerFactory, point: Point
) -> None:
    """An export that replaces another and is killed leaves a whole file, the old one until the new one is durable."""
    model_server()
    mill.enqueue(prompts(_COUNT))
    mill.worker(concurrency=_SLOTS)
    mill.wait_recorded(_COUNT)
    output = mill.path / "out" / "rows.jsonl"
    words = ("export", "case", "--format", "openai", "--output", str(output))
    mill.run(*words, "--limit", "3")

    assert_killed(producer_that_dies(mill, point, *words, "--overwrite"))
    assert output.read_bytes().count(b"\n") == (_COUNT if point is Point.AFTER_RENAME else 3)
    mill.run(*words, "--overwrite")

    assert output.read_bytes().count(b"\n") == _COUNT
    assert [path.name for path in output.parent.iterdir()] == ["rows.jsonl"]


@pytest.mark.slow
def test_a_worker_killed_every_two_seconds_still_comes_to_an_end(mill: Mill, model_server: ModelServerFactory) -> None:
    """Five workers killed one after the other, each with its slots full, lose no sample and double no line."""
    server = model_server(latency_s=1.0)
    mill.env["MILL_LEASE_S"] = _SHORT_LEASE_S
    rows = prompts(60)
    mill.enqueue(rows)
    recorded_at_kills = dict[str, int]()
    for _ in range(5):
        worker = mill.worker(concurrency=_SLOTS)
        before = mill.recorded()
        mill.wait_recorded(before + 1, timeout_s=20)
        wait_until(lambda: server.in_flight >= 2, 20, "some work", detail=mill.tails)
        worker.kill()
        recorded_at_kills |= times_asked(mill, server)
    mill.worker(concurrency=32)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_not_asked_since(server, recorded_at_kills)
    assert sum(server.counts.values()) <= len(rows) + 5 * _SLOTS
