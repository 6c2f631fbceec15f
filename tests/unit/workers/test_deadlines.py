"""Deadlines that are worked out from the tokens asked for and the speed seen."""

from __future__ import annotations

import asyncio
import time

import pytest

from app.records import Usage
from workers.clients.deadlines import (
    AUTO,
    ENOUGH_ANSWERS,
    LATE_S,
    LONGEST_S,
    SHORTEST_S,
    STREAM_DEADLINES,
    UNKNOWN_SPEED_S,
    Deadline,
    Deadlines,
    Wait,
)


def _after(answers: list[tuple[float, int]]) -> Deadlines:
    deadlines = Deadlines(AUTO)
    for latency_s, tokens in answers:
        deadlines.answered(latency_s, Usage(completion_tokens=tokens))
    return deadlines


async def _hear(wait: Wait, *, tokens: int) -> None:
    """Have some tokens come, and then nothing more."""
    async with wait:
        for _ in range(tokens):
            wait.token()
            await asyncio.sleep(0.005)
        await asyncio.Event().wait()


def test_a_fixed_deadline_stays_whatever_is_seen() -> None:
    """A number is a number."""
    deadlines = Deadlines(600)
    for _ in range(100):
        deadlines.answered(1.0, Usage(completion_tokens=100))
    deadline = deadlines.of({"max_tokens": 8192})
    assert (deadline.seconds, deadline.why) == (600, "MILL_REQUEST_TIMEOUT_S")


def test_it_is_half_an_hour_until_enough_was_seen() -> None:
    """Too few answers tell nothing, nor do answers without a count; nor can a request without a limit be foretold."""
    deadlines = _after([(10.0, 1000)] * (ENOUGH_ANSWERS - 1))
    deadlines.answered(10.0, Usage())
    assert deadlines.of({"max_tokens": 1000}).seconds == UNKNOWN_SPEED_S
    deadlines.answered(10.0, Usage(completion_tokens=1000))
    assert deadlines.of({"max_tokens": 100_000}).seconds == pytest.approx(3 * 100_000 * 0.01)
    assert deadlines.of({}).seconds == UNKNOWN_SPEED_S


def test_it_follows_the_tokens_and_the_slow_answers() -> None:
    """Nine tenths of quick answers do not shorten what slow ones need, and the words say the numbers."""
    deadlines = _after([(10.0, 1000)] * 90 + [(40.0, 1000)] * 10)
    deadline = deadlines.of({"max_tokens": 10_000})
    assert deadline.seconds == pytest.approx(3 * (30 + 10_000 * 0.04))
    assert "3 times (30 s and 10000 tokens of 0.04 s), by the last 100 answers" in deadline.why
    assert deadlines.of({"max_tokens": 10, "max_completion_tokens": 10_000}).seconds == deadline.seconds


def test_it_has_a_floor_and_a_ceiling() -> None:
    """A quick server is allowed two minutes, and none more than six hours."""
    assert _after([(0.1, 1000)] * 40).of({"max_tokens": 10}).seconds == SHORTEST_S
    assert _after([(100.0, 10)] * 40).of({"max_tokens": 100_000}).seconds == LONGEST_S


def test_a_missed_deadline_allows_twice_as_much_once_for_all_calls_before_it() -> None:
    """Many calls that miss the same deadline say it once; later answers take it back."""
    deadlines = _after([(10.0, 1000)] * 40)
    before = deadlines.of({"max_tokens": 10_000}).seconds
    started = time.monotonic()
    for _ in range(10):
        deadlines.missed(started=started)
    assert deadlines.of({"max_tokens": 10_000}).seconds == pytest.approx(2 * before)
    for _ in range(256):
        deadlines.answered(10.0, Usage(completion_tokens=1000))
    assert deadlines.of({"max_tokens": 10_000}).seconds == pytest.approx(before)


def test_a_wait_ends_at_its_deadline_and_stays_where_tokens_come() -> None:
    """Tokens put the end off for as long as the stall timeout lasts; their absence ends the wait."""

    async def story() -> None:
        wait = Wait(Deadline(0.05, "a test"), stall_s=1)
        with pytest.raises(TimeoutError):
            await _hear(wait, tokens=0)
        assert wait.overdue
        assert wait.fault().message == "no answer within 0.05 s (a test)"
        wait = Wait(Deadline(60, "a test"), stall_s=0.1)
        with pytest.raises(TimeoutError):
            await _hear(wait, tokens=5)
        assert not wait.overdue
        assert wait.fault().kind == "stalled"

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_stream_that_drips_for_ever_is_ended() -> None:
    """Tokens keep a stream alive beyond its deadline, and not beyond twelve times it; that uses up an attempt."""

    async def story() -> None:
        wait = Wait(Deadline(0.05, "a test"), stall_s=20)
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await _hear(wait, tokens=100_000)
        assert time.monotonic() - started >= STREAM_DEADLINES * 0.05
        fault = wait.fault()
        assert (fault.kind, fault.counted) == ("timeout", True)
        assert fault.message == "the stream had not ended after 12 times its deadline of 0.05 s (a test)"

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_worker_that_stood_still_reads_first_and_judges_then() -> None:
    """What came while the process itself was stopped counts, though every timer has run out meanwhile."""

    async def story() -> None:
        server, client = asyncio.StreamReader(), Wait(Deadline(0.05, "a test"), stall_s=0.05)
        async with client:
            client.token()
            asyncio.get_running_loop().call_later(0.01, server.feed_data, b"more")
            time.sleep(LATE_S + 0.2)  # noqa: ASYNC251 - the loop stands still, which is the point
            assert await server.read(9) == b"more"
            client.token()

    asyncio.run(asyncio.wait_for(story(), 30))
