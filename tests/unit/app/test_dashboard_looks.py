"""One look serves all viewers: never twice at once, never older than told, and trouble does not stick."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from app.dashboard.looks import SharedLook


class Reader:
    """Counts how often it is read; waits while it is told to."""

    def __init__(self) -> None:
        self.reads = 0
        self.running = 0
        self.most = 0
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def __call__(self) -> bytes:
        """Read."""
        self.running += 1
        self.most = max(self.most, self.running)
        self.gate.wait(20)
        self.reads += 1
        self.running -= 1
        if self.error:
            raise self.error
        return str(self.reads).encode()


@pytest.fixture
def executor() -> Iterator[concurrent.futures.Executor]:
    """Return threads to read in."""
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        yield threads


def test_many_viewers_share_one_look(executor: concurrent.futures.Executor) -> None:
    """Fifty requests at once are answered by one read, and the next one within its time too."""
    reader = Reader()

    async def scenario() -> None:
        look = SharedLook(reader, executor, fresh_s=60)
        answers = await asyncio.gather(*(look.get() for _ in range(50)))
        assert {one.body for one in answers} == {b"1"}
        assert (await look.get()).body == b"1"

    asyncio.run(scenario())
    assert (reader.reads, reader.most) == (1, 1)


def test_an_old_look_is_replaced(executor: concurrent.futures.Executor) -> None:
    """What is not fresh any more is read anew, and the answer is the new one where reading is quick."""
    reader = Reader()

    async def scenario() -> None:
        look = SharedLook(reader, executor, fresh_s=0, rest=-1)
        assert [(await look.get()).body for _ in range(3)] == [b"1", b"2", b"3"]

    asyncio.run(scenario())


def test_a_slow_look_keeps_nobody_waiting(executor: concurrent.futures.Executor) -> None:
    """While the next look takes long, the last one is shown, and its age tells; too old a one is waited for."""
    reader, other = Reader(), Reader()

    async def scenario() -> None:
        look = SharedLook(reader, executor, fresh_s=0, usable_s=60, rest=-1)
        first = await look.get()
        reader.gate.clear()
        second = await look.get()
        assert second.body == first.body
        assert second.age_s > 0.2
        assert reader.reads == 1
        reader.gate.set()
        impatient = SharedLook(other, executor, fresh_s=0, usable_s=0, rest=-1)
        assert [(await impatient.get()).body, (await impatient.get()).body] == [b"1", b"2"]

    asyncio.run(scenario())
    assert reader.most == 1


def test_a_costly_look_rests_for_longer(executor: concurrent.futures.Executor) -> None:
    """What took half a second is not read again half a second later, however many ask: a core is not kept busy."""
    reads: list[float] = []

    def read() -> bytes:
        reads.append(time.monotonic())
        time.sleep(0.2)
        return b""

    async def scenario() -> None:
        look = SharedLook(read, executor, fresh_s=0)
        deadline = time.monotonic() + 2.2
        while time.monotonic() < deadline:
            await look.get()
            await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert 2 <= len(reads) <= 3
    assert all(later - before >= 0.99 for before, later in itertools.pairwise(reads))


def test_trouble_is_told_and_the_next_viewer_looks_again(executor: concurrent.futures.Executor) -> None:
    """An error reaches whoever waited for the look, and does not stay."""
    reader = Reader()

    async def scenario() -> None:
        look = SharedLook(reader, executor, fresh_s=60)
        reader.error = OSError("the disk is gone")
        with pytest.raises(OSError, match="the disk is gone"):
            await look.get()
        reader.error = None
        assert (await look.get()).body == b"2"

    asyncio.run(scenario())


def test_a_viewer_who_leaves_does_not_end_the_look(executor: concurrent.futures.Executor) -> None:
    """A request that is cancelled while it waits leaves the look to the others."""
    reader = Reader()

    async def scenario() -> None:
        look = SharedLook(reader, executor, fresh_s=60)
        reader.gate.clear()
        gone, stays = asyncio.ensure_future(look.get()), asyncio.ensure_future(look.get())
        await asyncio.sleep(0)
        gone.cancel()
        reader.gate.set()
        assert (await stays).body == b"1"

    asyncio.run(scenario())
    assert reader.reads == 1
