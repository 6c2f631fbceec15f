"""Permits inside one process: handed on in order, none lost, none beyond what is leased."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.permits import PERMIT_TTL_S, Block, Gate, Pool


def _pool(held: int, *, clock: Callable[[], float] = lambda: 0.0) -> Pool:
    """Return an open pool with so many permits; its clock stands still unless given."""
    pool = Pool(clock=clock)
    pool.count()
    pool.renew(Block(held, bound=held, others=0))
    pool.open = True
    return pool


def _gate(*pools: Pool) -> Gate:
    return Gate(pools, on_wait=lambda: None)


async def _settle() -> None:
    """Let every task run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def _run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


# The pool


def test_an_open_pool_frees_the_smallest_of_its_bounds() -> None:
    """What may start is the leased permits, or the own ceiling where that is lower, less the calls that run."""
    pool = _pool(5)
    assert (pool.held, pool.free, pool.bound) == (5, 5, 5)
    pool.in_use = 2
    assert pool.free == 3
    pool.ceiling = 3
    assert pool.free == 1
    pool.in_use = 4
    assert pool.free == 0
    pool.in_use, pool.open = 0, False
    assert pool.free == 0


def test_a_new_pool_lets_nothing_start() -> None:
    """Before its first lease a pool has no permit."""
    pool = Pool()
    pool.open = True
    assert (pool.held, pool.free) == (0, 0)


def test_a_lease_that_runs_out_stops_new_calls() -> None:
    """Without a renewal permits are gone before Redis gives them to somebody else, and a renewal brings them back."""
    now = [100.0]
    pool = _pool(4, clock=lambda: now[0])
    now[0] += PERMIT_TTL_S - 2.5
    assert pool.free == 4
    now[0] += 0.5
    assert (pool.held, pool.free) == (0, 0)
    assert now[0] < 100.0 + PERMIT_TTL_S
    pool.count()
    pool.renew(Block(2, bound=4, others=2))
    assert (pool.held, pool.free) == (2, 2)


def test_a_late_answer_prolongs_no_lease() -> None:
    """Redis leases from when it ran the script: a block counts from when it was asked for, not from the answer."""
    now = [100.0]
    pool = _pool(4, clock=lambda: now[0])
    now[0] += 1.0
    pool.count()
    asked = now[0]
    now[0] += PERMIT_TTL_S - 4.0
    pool.renew(Block(4, bound=4, others=0))
    assert pool.free == 4
    now[0] = asked + PERMIT_TTL_S - 1.0
    assert (pool.held, pool.free) == (0, 0)
    pool.count()
    now[0] += PERMIT_TTL_S
    pool.renew(Block(4, bound=4, others=0))
    assert pool.free == 0


def test_only_the_fair_share_is_handed_on() -> None:
    """A block may cover running calls beyond this worker's share; no new call starts until enough of them ended."""
    pool = _pool(10)
    pool.in_use = 10
    pool.count()
    pool.renew(Block(10, bound=10, others=0, share=5))
    pool.in_use = 5
    assert (pool.held, pool.free) == (5, 0)
    pool.in_use = 4
    assert pool.free == 1


def test_nothing_grows_while_a_block_is_renewed() -> None:
    """Between the count that Redis is told and its answer calls may be followed by others, but their number stays."""
    pool = _pool(8)
    pool.in_use = 3
    assert pool.count() == 3
    assert pool.free == 0
    pool.in_use = 2
    assert pool.free == 1
    pool.keep()
    assert pool.free == 6
    pool.count()
    pool.renew(Block(4, bound=8, others=4))
    assert pool.free == 2


def test_a_lease_that_runs_out_holds_waiting_calls() -> None:
    """A call that waits is not handed a permit whose lease has run out, but is with the next renewal."""

    async def main() -> None:
        now = [0.0]
        pool = _pool(1, clock=lambda: now[0])
        gate = _gate(pool)
        await gate.acquire()
        waiting = asyncio.create_task(gate.acquire())
        await _settle()
        now[0] = PERMIT_TTL_S
        gate.release(pool)
        await _settle()
        assert not waiting.done()
        pool.count()
        pool.renew(Block(1, bound=1, others=0))
        gate.hand_out()
        assert await waiting is pool

    _run(main)


# The gate


def test_first_come_first_served() -> None:
    """Waiting calls get their permits in the order in which they came, and a late comer does not overtake them."""

    async def main() -> None:
        pool = _pool(1)
        gate, order = _gate(pool), list[int]()

        async def call(number: int) -> None:
            await gate.acquire()
            order.append(number)
            await asyncio.sleep(0)
            gate.release(pool)

        tasks = [asyncio.create_task(call(number)) for number in range(6)]
        await asyncio.gather(*tasks)
        assert order == list(range(6))
        assert (pool.in_use, gate.waiting) == (0, 0)

    _run(main)


def test_a_permit_is_handed_on_at_once() -> None:
    """The next call has the permit before the release returns: no other call and no tick comes between."""

    async def main() -> None:
        pool = _pool(1)
        gate = _gate(pool)
        await gate.acquire()
        waiting = asyncio.create_task(gate.acquire())
        await _settle()
        assert gate.waiting == 1
        gate.release(pool)
        assert (pool.in_use, gate.waiting) == (1, 0)
        late = asyncio.create_task(gate.acquire())
        await _settle()
        assert waiting.done()
        assert not late.done()
        gate.release(pool)
        assert await late is pool

    _run(main)


def test_whoever_has_to_wait_says_so() -> None:
    """The owner of the permits hears of each call that waits, and of none that need not."""

    async def main() -> None:
        heard = []
        gate = Gate([_pool(1)], on_wait=lambda: heard.append(1))
        await gate.acquire()
        assert not heard
        waiting = asyncio.create_task(gate.acquire())
        await _settle()
        assert len(heard) == 1
        waiting.cancel()

    _run(main)


def test_the_least_loaded_server_is_asked() -> None:
    """Calls go where the smallest share of the permits is in use, so that servers of any size fill evenly."""

    async def main() -> None:
        small, large = _pool(2), _pool(8)
        gate = _gate(small, large)
        for _ in range(5):
            await gate.acquire()
        assert (small.in_use, large.in_use) == (1, 4)
        for _ in range(5):
            await gate.acquire()
        assert (small.in_use, large.in_use) == (2, 8)

    _run(main)


def test_another_server_is_preferred_for_a_retry() -> None:
    """A call that avoids a server gets another one, and the same one where no other is free."""

    async def main() -> None:
        first, second = _pool(4), _pool(1)
        gate = _gate(first, second)
        assert await gate.acquire(avoid=first) is second
        assert await gate.acquire(avoid=first) is first

    _run(main)


def test_a_shut_gate_lets_nobody_through() -> None:
    """While the gate is shut calls wait although permits are free, and all go on once it opens."""

    async def main() -> None:
        pool = _pool(2)
        gate = _gate(pool)
        gate.shut = "the disk is full"
        calls = [asyncio.create_task(gate.acquire()) for _ in range(2)]
        await _settle()
        gate.hand_out()
        await _settle()
        assert (gate.waiting, pool.in_use) == (2, 0)
        gate.shut = None
        gate.hand_out()
        await asyncio.gather(*calls)
        assert (gate.waiting, pool.in_use) == (0, 2)

    _run(main)


def test_a_permit_given_to_a_cancelled_call_goes_on() -> None:
    """A call that is cancelled in the tick in which it got its permit passes it on."""

    async def main() -> None:
        pool = _pool(1)
        gate = _gate(pool)
        await gate.acquire()
        first, second = asyncio.create_task(gate.acquire()), asyncio.create_task(gate.acquire())
        await _settle()
        gate.release(pool)
        first.cancel()
        assert await second is pool
        assert first.cancelled()
        gate.release(pool)
        assert pool.in_use == 0

    _run(main)


def test_a_waiting_call_may_be_cancelled_while_a_permit_comes_free() -> None:
    """A call that is cancelled just before a permit would have been its own ends so, and the next one gets it."""

    async def main() -> None:
        pool = _pool(1)
        gate = _gate(pool)
        await gate.acquire()
        first, second = asyncio.create_task(gate.acquire()), asyncio.create_task(gate.acquire())
        await _settle()
        first.cancel()
        gate.release(pool)
        assert await second is pool
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (pool.in_use, gate.waiting) == (1, 0)

    _run(main)


def test_who_is_turned_away_ends_as_cancelled() -> None:
    """At the worker's end waiting calls and new ones are cancelled, and running ones give their permits back."""

    async def main() -> None:
        pool = _pool(1)
        gate = _gate(pool)
        await gate.acquire()
        waiting = [asyncio.create_task(gate.acquire()) for _ in range(3)]
        await _settle()
        gate.turn_away()
        gate.release(pool)
        ends = await asyncio.gather(*waiting, gate.acquire(), return_exceptions=True)
        assert [type(end) for end in ends] == 4 * [asyncio.CancelledError]
        assert (pool.in_use, gate.waiting) == (0, 0)

    _run(main)


_STEP = st.one_of(
    st.tuples(st.just("acquire"), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("renew"), st.integers(0, 4)),
    st.tuples(st.just("open"), st.integers(0, 1)),
    st.tuples(st.just("shut"), st.integers(0, 1)),
    st.tuples(st.just("tick"), st.just(0)),
)


class _Crowd:
    """Calls that come, wait, are cancelled and end, over two pools."""

    def __init__(self) -> None:
        self.pools = [_pool(2), _pool(1)]
        self.gate = _gate(*self.pools)
        self.tasks: list[asyncio.Task[Pool]] = []

    async def do(self, step: str, number: int) -> None:
        if step == "acquire":
            self.tasks.append(asyncio.create_task(self.gate.acquire()))
        elif step == "release":
            holding = [task for task in self.tasks if task.done() and not task.cancelled()]
            if holding:
                task = holding[number % len(holding)]
                self.tasks.remove(task)
                self.gate.release(task.result())
        elif step == "cancel" and self.tasks:
            self.tasks[number % len(self.tasks)].cancel()
        elif step == "renew":
            self.pools[number % 2].count()
            self.pools[number % 2].renew(Block(number, bound=4, others=0))
            self.gate.hand_out()
        elif step == "open":
            self.pools[number].open = not self.pools[number].open
            self.gate.hand_out()
        elif step == "shut":
            self.gate.shut = "why" if number else None
            self.gate.hand_out()
        elif step == "tick":
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Open everything; every call that was not cancelled must get its permit, and give it back."""
        self.gate.shut = None
        for pool in self.pools:
            pool.open = True
            pool.count()
            pool.renew(Block(2, bound=2, others=0))
        self.gate.hand_out()
        async with asyncio.timeout(5):
            for task in self.tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    self.gate.release(await task)


@settings(max_examples=300, deadline=None)
@given(st.lists(_STEP, max_size=40))
def test_no_permit_is_lost(steps: list[tuple[str, int]]) -> None:
    """However calls come, are cancelled and end, every permit in use has one holder, and all come back in the end."""

    async def main() -> None:
        crowd = _Crowd()
        for number in range(6):
            await crowd.do("acquire", number)
        await _settle()
        for step, number in steps:
            await crowd.do(step, number)
        await _settle()
        holders: list[Any] = [task.result() for task in crowd.tasks if task.done() and not task.cancelled()]
        assert [pool.in_use for pool in crowd.pools] == [holders.count(pool) for pool in crowd.pools]
        assert crowd.gate.waiting == sum(not task.done() for task in crowd.tasks)
        await crowd.finish()
        assert [pool.in_use for pool in crowd.pools] == [0, 0]
        assert crowd.gate.waiting == 0

    _run(main)
