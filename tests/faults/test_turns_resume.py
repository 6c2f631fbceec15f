"""A worker that dies or ends in the middle of conversations: durable turns are never asked again."""

from __future__ import annotations

import pytest

from tests.conftest import ModelServerFactory
from tests.support.books import balanced, records
from tests.support.kill_points import Point, assert_killed, worker_that_dies
from tests.support.mill import Mill
from tests.support.processes import wait_until
from tests.support.turns import history, talk, turn_records, turns_file

pytestmark = pytest.mark.fault

_SHORT_LEASE_S = "5"
_WHOLE = history("q1", "echo: q1", "q2", "echo: q2", "q3")


def _assert_whole(mill: Mill) -> None:
    """Assert that the conversation is recorded once, on the turns that are durable."""
    balanced(mill, read=1, accepted=1, left=0)
    (record,) = records(mill)
    assert record["messages"] == _WHOLE
    assert record["content"] == "echo: q3"
    assert [turn["id"].rpartition("#")[2] for turn in record["turns"]] == ["turn1", "turn2", "turn3"]
    assert [turn["messages"] for turn in turn_records(mill)] == [_WHOLE[:1], _WHOLE[:3]]


@pytest.mark.parametrize("turn", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_worker_that_dies_between_two_turns_costs_none(
    mill: Mill, model_server: ModelServerFactory, turn: int
) -> None:
    """A worker killed when a turn has just become durable costs nothing: the next one goes on behind that turn."""
    server = model_server()
    mill.env["MILL_LEASE_S"] = _SHORT_LEASE_S
    mill.enqueue([talk("q1", "q2", "q3")], "--turns", "all")
    assert_killed(worker_that_dies(mill, Point.AFTER_FSYNC, nth=turn))
    assert len(server.requests) == turn
    mill.worker()
    _assert_whole(mill)
    assert server.counts == {"q1": 1, "q2": 1, "q3": 1}


@pytest.mark.slow
def test_a_worker_that_dies_while_it_writes_a_turn_costs_that_turn(
    mill: Mill, model_server: ModelServerFactory
) -> None:
    """Half a line of a turn is set aside, and that turn alone is asked again."""
    server = model_server()
    mill.env["MILL_LEASE_S"] = _SHORT_LEASE_S
    mill.enqueue([talk("q1", "q2", "q3")], "--turns", "all")
    assert_killed(worker_that_dies(mill, Point.INSIDE_WRITE, nth=2))
    mill.worker()
    _assert_whole(mill)
    assert server.counts == {"q1": 1, "q2": 2, "q3": 1}
    assert (turns_file(mill).parent / "torn.jsonl").exists()


def test_a_worker_that_is_killed_in_a_turn_costs_that_turn(mill: Mill, model_server: ModelServerFactory) -> None:
    """SIGKILL while the second turn is being answered: that turn is asked again, the first one is not."""
    server = model_server([{"match": "q2", "times": 1, "hang": True}])
    mill.env["MILL_LEASE_S"] = _SHORT_LEASE_S
    mill.enqueue([talk("q1", "q2", "q3")], "--turns", "all")
    first = mill.worker()
    wait_until(lambda: server.count("q2") == 1, 30, "the second turn is asked")
    first.kill()
    mill.worker()
    _assert_whole(mill)
    assert server.counts == {"q1": 1, "q2": 2, "q3": 1}


def test_a_worker_that_ends_hands_a_conversation_on(mill: Mill, model_server: ModelServerFactory) -> None:
    """SIGTERM in the middle of a conversation hands it back at once; the next worker goes on at the running turn."""
    server = model_server([{"match": "q2", "times": 1, "hang": True}])
    mill.enqueue([talk("q1", "q2", "q3")], "--turns", "all")
    first = mill.worker(drain_s=0)
    wait_until(lambda: server.count("q2") == 1, 30, "the second turn is asked")
    assert first.stop() == 0
    mill.worker()
    _assert_whole(mill)
    assert server.counts == {"q1": 1, "q2": 2, "q3": 1}


@pytest.mark.slow
def test_a_conversation_that_is_asked_twice_at_once_is_recorded_on_the_turn_that_came_first(
    mill: Mill, model_server: ModelServerFactory
) -> None:
    """Of two workers on one conversation the slower one takes the durable turn of the other in the place of its own."""
    server = model_server(
        [{"match": "q1", "times": 1, "delay_s": 4.0, "content": "late"}, {"match": "q2", "hang": True}]
    )
    mill.env["MILL_LEASE_S"] = _SHORT_LEASE_S
    mill.enqueue([talk("q1", "q2", "q3")], "--turns", "all")
    slow = mill.worker()
    wait_until(lambda: server.count("q1") == 1, 30, "the first turn is asked")
    slow.pause()
    mill.worker()
    wait_until(lambda: server.count("q2") == 1, 60, "another worker has taken the conversation over")
    slow.resume()
    wait_until(lambda: server.count("q2") == 2, 30, "the first one goes on")
    asked = [request.body["messages"] for request in server.requests if request.key == "q2"]
    assert asked == [_WHOLE[:3]] * 2
    assert [turn["content"] for turn in turn_records(mill)] == ["echo: q1"]
