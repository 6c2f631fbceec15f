"""Redis' clock as a process knows it."""

from __future__ import annotations

import dataclasses
import time

import pytest
import redis.exceptions

from app import broker as brokers
from app.clock import RedisClock
from app.places import Keys
from app.queue import Queue, take_turn
from tests.conftest import Broker
from tests.support.redis_server import absent_redis


@dataclasses.dataclass
class Clocks:
    """The monotonic clock of a process and the clock of a Redis; the latter can be set."""

    monotonic: float = 100.0
    redis: float = 1_800_000_000.0
    delay_s: float = 0.0
    """Seconds that an answer takes."""
    asked: int = 0

    def time(self) -> tuple[int, int]:
        """Answer as a Redis client does."""
        self.asked += 1
        self.pass_by(self.delay_s / 2)
        said = int(self.redis), round(self.redis % 1 * 1e6)
        self.pass_by(self.delay_s / 2)
        return said

    def pass_by(self, seconds: float) -> None:
        """Let time pass for both."""
        self.monotonic += seconds
        self.redis += seconds


def test_time_is_redis_time_and_goes_on_without_it() -> None:
    """One answer is enough for ten seconds; meanwhile the monotonic clock counts."""
    clocks = Clocks()
    clock = RedisClock(monotonic=lambda: clocks.monotonic)
    assert clock.read(clocks) == pytest.approx(clocks.redis)
    clocks.pass_by(9)
    assert clock.read(clocks) == clock.now() == pytest.approx(clocks.redis)
    assert clocks.asked == 1
    clocks.pass_by(2)
    clock.read(clocks)
    assert clocks.asked == 2


def test_before_the_first_answer_the_machines_own_clock_must_do() -> None:
    """A process that has never reached Redis still knows some time."""
    assert RedisClock().now() == pytest.approx(time.time(), abs=5)


def test_an_answer_that_came_late_changes_nothing() -> None:
    """A Redis that takes seconds to answer says too little about the time."""
    clocks = Clocks()
    clock = RedisClock(monotonic=lambda: clocks.monotonic)
    clock.ask(clocks)
    clocks.delay_s = 8.0
    clocks.redis += 3.0
    clock.ask(clocks)
    assert clock.now() == pytest.approx(clocks.redis - 3.0)
    assert not clock.stepped_within(60)


@pytest.mark.parametrize("step_s", [7200.0, -7200.0, 3.0])
def test_a_clock_that_was_set_is_noticed_and_followed(step_s: float) -> None:
    """When Redis' clock jumps, its new time is taken and the jump is known for as long as somebody asks for it."""
    clocks = Clocks()
    clock = RedisClock(monotonic=lambda: clocks.monotonic)
    clock.ask(clocks)
    clocks.pass_by(30)
    clock.ask(clocks)
    assert not clock.stepped_within(60)
    clocks.redis += step_s
    clock.ask(clocks)
    assert clock.now() == pytest.approx(clocks.redis)
    clocks.pass_by(59)
    assert clock.stepped_within(60)
    clocks.pass_by(2)
    assert not clock.stepped_within(60)


def test_drift_is_no_step() -> None:
    """A difference that grows slowly is followed in silence."""
    clocks = Clocks()
    clock = RedisClock(monotonic=lambda: clocks.monotonic)
    for _ in range(100):
        clock.ask(clocks)
        clocks.pass_by(10)
        clocks.redis += 0.5
    assert not clock.stepped_within(3600)


def test_a_redis_that_is_away_is_told() -> None:
    """Whoever asks hears of it; the time known so far goes on."""
    clock = RedisClock()
    with pytest.raises(redis.exceptions.ConnectionError):
        clock.read(absent_redis())


def test_the_books_go_by_redis_time(broker: Broker) -> None:
    """Tallies and sessions are in Redis' time, to the second."""
    client = brokers.connect(brokers.parse(broker.url))
    queue = Queue(client, Keys(broker.key_prefix))
    seconds, _ = broker.client.time()
    assert queue.now() == pytest.approx(seconds, abs=2)
    client.close()


def test_a_turn_from_before_the_clock_was_set_back_is_over(broker: Broker) -> None:
    """A turn lasts as long as it was taken for; one that seems to last for hours is taken over at once."""
    client, key = broker.client, f"{broker.key_prefix}turn:sweep"
    assert take_turn(client, key, "a", for_s=15)
    assert not take_turn(client, key, "b", for_s=15)
    assert not take_turn(client, key, "b", for_s=5, longest_s=20)
    client.pexpire(key, 3_600_000)  # what an hour set back leaves of it
    assert not take_turn(client, key, "b", for_s=15, longest_s=4000)
    assert take_turn(client, key, "b", for_s=15)
    assert client.get(key) == "b"
    assert 0 < client.pttl(key) <= 15_000
