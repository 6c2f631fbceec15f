"""What stop signals mean: a deadline, and now at the second one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.processes import wait_until
from workers.drain import Drain, take_over_signals


class House:
    """What a drain turns away and hands back, and when."""

    def __init__(self, drain_s: float) -> None:
        self.turned_away = 0
        self.handed_back: list[float] = []
        self.left = 3
        self.drain = Drain(drain_s, hand_back=self._hand_back, turn_away=self._turn_away)

    def _turn_away(self) -> None:
        self.turned_away += 1

    def _hand_back(self) -> int:
        self.handed_back.append(time.monotonic())
        count, self.left = self.left, 0
        return count

    @property
    def watching(self) -> bool:
        """Whether the drain's thread runs."""
        return self.drain._thread.is_alive()


@pytest.fixture
def houses() -> Iterator[list[House]]:
    """Return a list whose houses are ended after the test."""
    made: list[House] = []
    yield made
    for house in made:
        house.drain.end()
        house.drain._thread.join(10)


def _start(houses: list[House], drain_s: float) -> House:
    house = House(drain_s)
    houses.append(house)
    house.drain.start()
    return house


def test_the_first_signal_sets_a_deadline(houses: list[House], caplog: pytest.LogCaptureFixture) -> None:
    """After SIGTERM what has not begun is turned away at once, and what runs is handed back only at the deadline."""
    caplog.set_level("INFO", logger="workers.drain")
    house = _start(houses, 0.5)
    assert not house.drain.stopping
    signalled_at = time.monotonic()
    house.drain.signalled()
    assert house.drain.stopping
    wait_until(lambda: house.turned_away, 5)
    assert not house.handed_back
    wait_until(lambda: house.handed_back, 5)
    assert house.handed_back[0] - signalled_at >= 0.5
    wait_until(lambda: len(house.handed_back) >= 2, 5, "another look for late ones")
    assert house.turned_away == 1
    assert "0 s to finish, a second signal hands them back now" in caplog.text
    assert caplog.text.count("handed 3 unfinished samples back") == 1


def test_the_second_signal_hands_back_now(houses: list[House]) -> None:
    """A second signal brings the deadline forward."""
    house = _start(houses, 600)
    house.drain.signalled(sig="SIGTERM", how="Warm", exitcode=0)
    wait_until(lambda: house.turned_away, 5)
    house.drain.signalled(sig="SIGINT")
    wait_until(lambda: house.handed_back, 5)


def test_sigquit_hands_back_at_once(houses: list[House]) -> None:
    """SIGQUIT counts as two signals."""
    house = _start(houses, 600)
    house.drain.signalled(sig="SIGQUIT")
    wait_until(lambda: house.handed_back, 5)


def test_no_time_to_finish_is_possible(houses: list[House]) -> None:
    """With MILL_DRAIN_S=0 the first signal hands back."""
    house = _start(houses, 0)
    house.drain.signalled()
    wait_until(lambda: house.handed_back, 5)


@pytest.mark.parametrize("signals", [0, 1, 2])
def test_a_worker_that_has_finished_is_not_watched(houses: list[House], signals: int) -> None:
    """Once everything has ended the watch ends too, before, within and after the deadline."""
    house = _start(houses, 600)
    for _ in range(signals):
        house.drain.signalled()
    wait_until(lambda: house.turned_away == min(signals, 1), 5)
    house.drain.end()
    wait_until(lambda: not house.watching, 5)


def test_ctrl_c_and_sigquit_are_taken_over() -> None:
    """Ctrl-C and SIGQUIT get Celery's handler for a warm end instead of their own."""
    assert threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        take_over_signals(SimpleNamespace(hostname="w@h"))
        after = {number: signal.getsignal(number) for number in before}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number, handler in after.items():
        assert callable(handler)
        assert handler is not before[number]
        assert handler.__module__ == "celery.apps.worker"
