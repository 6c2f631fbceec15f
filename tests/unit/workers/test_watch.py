"""Servers that are up but silent: the hung are told from the slow, and requests that a server lost are asked again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from app.errors import UsageError
from app.queue import Queue
from tests.support.fake_client import FakeClient, until
from workers import endpoints as house
from workers import watch as module
from workers.clients.base import CallFailed, Request
from workers.endpoint import Endpoint, State
from workers.endpoints import Endpoints
from workers.faults import FaultKind
from workers.gauges import Gauges

URL = "http://127.0.0.1:8001"
_PATIENCE_S = 0.4
_LOST_AFTER_S = 0.6


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let seconds stand for minutes."""
    for place, name, value in (
        (house, "_TICK_S", 0.05),
        (house, "_SHORTEST_TICK_S", 0.02),
        (house, "_HUNG_PROBE_S", 0.3),
        (module, "_SHORTEST_PATIENCE_S", _PATIENCE_S),
        (module, "_SHORTEST_TRIAL_S", 2 * _PATIENCE_S),
        (module, "_MOVED_WITHIN_S", _PATIENCE_S),
        (module, "_LOOK_EVERY_S", 0.3),
        (module, "_TRIAL_S", 0.2),
        (module, "_TRY_EVERY_S", 0.05),
        (module, "_GAUGES_EVERY_S", 0.1),
        (module, "_LOST_AFTER_S", _LOST_AFTER_S),
        (module, "_UNKNOWN_GRACE_S", 1.0),
    ):
        monkeypatch.setattr(place, name, value)


async def _ticks(endpoint: Endpoint, count: int) -> None:
    """Wait until the house was kept so many times: each time the permits are renewed, then the watch does its part."""
    for _ in range(count):
        before = endpoint.pool._valid_until
        await until(lambda was=before: endpoint.pool._valid_until != was)  # type: ignore[misc]


def _run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def _watched(books: Queue, client: FakeClient, owner: str = "me") -> AsyncIterator[Endpoint]:
    """Keep house for one endpoint, as a worker does."""
    endpoint = Endpoint(url=URL, client=client)
    endpoints = Endpoints([endpoint], redis=books.client, keys=books.keys, owner=owner, bound=8, probe_s=0.2)
    await endpoints.look_at_all()
    keeping = asyncio.create_task(endpoints.keep())
    try:
        yield endpoint
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await endpoints.close()


def _ask(endpoint: Endpoint, name: str = "q") -> asyncio.Task[object]:
    request = Request(messages=[{"role": "user", "content": name}], model="toy", sampling={}, request_id=name)
    return asyncio.create_task(endpoint.complete(request))


async def _fate(call: asyncio.Task[object]) -> FaultKind | None:
    """Return the kind of fault that a call ends with; None for an answer."""
    try:
        await asyncio.wait_for(call, 10)
    except CallFailed as failure:
        return failure.fault.kind
    return None


def _stop(*calls: asyncio.Task[object]) -> None:
    for call in calls:
        call.cancel()


# Hung


def test_a_hung_server_is_closed_and_its_calls_are_kept(books: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """A server that answers no call and two looks in a row is down; what it was asked may still be answered."""

    async def main() -> None:
        client = FakeClient()
        async with _watched(books, client) as endpoint:
            client.gate, client.silent = asyncio.Event(), True
            call = _ask(endpoint)
            await until(lambda: endpoint.state is State.DOWN)
            assert endpoint.hung
            assert "nor to 2 looks of 15 s" in endpoint.reason
            assert not call.done()
            client.gate.set()
            assert await _fate(call) is None

    _run(main)
    assert "is down: hung: no answer to anything for" in caplog.text


def test_slow_answers_are_no_hang(books: Queue) -> None:
    """A server that passes its looks and answers a request for one token stays up, however long an answer takes."""

    async def main() -> None:
        client = FakeClient()
        async with _watched(books, client) as endpoint:
            slow = asyncio.Event()
            client.gate = slow
            call = _ask(endpoint)
            await until(lambda: client.requests)
            client.gate = None  # only this one is slow
            looks = client.probes
            await until(lambda: client.probes >= looks + 3 and len(client.requests) >= 2)
            assert client.requests[1].sampling == {"max_tokens": 1}
            assert endpoint.state is State.UP
            slow.set()
            assert await _fate(call) is None

    _run(main)


def test_usual_latencies_make_patient(books: Queue) -> None:
    """A server is given four times the longest latency seen lately, so that one with slow answers is not looked at."""

    async def main() -> None:
        client = FakeClient()
        async with _watched(books, client) as endpoint:
            assert module.patience_s(endpoint) == _PATIENCE_S
            endpoint.latencies.extend([2.0, 900.0, 10.0])
            assert module.patience_s(endpoint) == 3600
            client.gate, looks = asyncio.Event(), client.probes
            call = _ask(endpoint)
            await asyncio.sleep(3 * _PATIENCE_S)
            assert client.probes == looks
            _stop(call)

    _run(main)


def test_a_server_that_is_well_in_appearance_only_is_hung(books: Queue) -> None:
    """One that passes its looks and generates nothing, not even a token, is down until it does, and then up at once."""

    async def main() -> None:
        client = FakeClient()
        async with _watched(books, client) as endpoint:
            client.gate = asyncio.Event()
            call = _ask(endpoint)
            await until(lambda: endpoint.state is State.DOWN)
            assert "passes its health check" in endpoint.reason
            probed = client.probes
            await until(lambda: client.probes >= probed + 2)  # they go well
            assert endpoint.state is State.DOWN
            client.gate = None
            await until(lambda: endpoint.state is State.UP)
            assert endpoint.half_open
            assert not call.done()
            # It answers others, and has had its time for what it was asked before.
            assert await _fate(call) is FaultKind.LOST
            assert endpoint.lost == 1

    _run(main)


def test_a_call_from_after_the_hang_is_not_lost(books: Queue) -> None:
    """Only calls from before the hang are given up, not a slow one that began after it."""

    async def main() -> None:
        client = FakeClient()
        async with _watched(books, client) as endpoint:
            client.gate, client.silent = asyncio.Event(), True
            old = _ask(endpoint, "old")
            await until(lambda: endpoint.hung)
            gate, client.gate, client.silent = client.gate, None, False
            await until(lambda: endpoint.state is State.UP)
            asked, client.gate = len(client.requests), gate
            new = _ask(endpoint, "new")
            await until(lambda: len(client.requests) > asked)
            client.gate = None  # others are answered
            assert await _fate(old) is FaultKind.LOST
            assert not new.done()
            _stop(new)

    _run(main)


def test_generated_tokens_prove_a_server_alive(books: Queue) -> None:
    """While the server's own count of tokens grows no extra request is sent to a full house."""

    async def main() -> None:
        client = FakeClient()
        async with _watched(books, client) as endpoint:
            client.gate = asyncio.Event()
            call = _ask(endpoint)
            for tokens in range(25):
                client.metrics = f"vllm:num_requests_running 1\nvllm:generation_tokens_total {tokens}\n".encode()
                await asyncio.sleep(0.06)
            assert len(client.requests) == 1
            assert endpoint.state is State.UP
            await until(lambda: endpoint.state is State.DOWN)  # the count stands still now
            _stop(call)

    _run(main)


# Lost


def _page(running: int) -> bytes:
    return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n".encode()


def test_calls_that_an_idle_server_has_forgotten_are_given_up(books: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """A server that works on nothing while calls wait has lost them: the old ones end, a new one does not."""

    async def main() -> None:
        client = FakeClient()
        client.gate, client.metrics = asyncio.Event(), _page(2)
        async with _watched(books, client) as endpoint:
            old = [_ask(endpoint, f"old {number}") for number in range(2)]
            await until(lambda: endpoint.gauges is not None and endpoint.gauges.peak == 2)
            client.metrics = _page(0)
            await until(lambda: endpoint.gauges is not None and endpoint.gauges.idle_s > _LOST_AFTER_S / 2)
            new = _ask(endpoint, "new")
            assert [await _fate(call) for call in old] == [FaultKind.LOST] * 2
            assert not new.done()
            assert endpoint.state is State.UP
            _stop(new)

    _run(main)
    assert "lost 2 of 3 requests (its /metrics shows no request at all for" in caplog.text


def test_a_server_that_counts_something_has_lost_nothing(books: Queue) -> None:
    """As long as the server has any request, of whomever, no call is given up."""

    async def main() -> None:
        client = FakeClient()
        client.gate, client.metrics = asyncio.Event(), _page(1)
        async with _watched(books, client) as endpoint:
            calls = [_ask(endpoint, f"call {number}") for number in range(3)]
            await asyncio.sleep(3 * _LOST_AFTER_S)
            assert not any(call.done() for call in calls)
            _stop(*calls)

    _run(main)


def test_numbers_that_never_moved_prove_nothing(books: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose metrics have never shown a request may not count at all."""
    monkeypatch.setattr(module, "_SHORTEST_TRIAL_S", 60.0)  # or it would be found hung before

    async def main() -> None:
        client = FakeClient()
        client.gate, client.metrics = asyncio.Event(), _page(0)
        async with _watched(books, client) as endpoint:
            call = _ask(endpoint)
            await until(lambda: endpoint.gauges is not None and endpoint.gauges.idle_s > 2 * _LOST_AFTER_S)
            assert not call.done()
            _stop(call)

    _run(main)


def test_numbers_that_were_wrong_once_prove_nothing(books: Queue) -> None:
    """Metrics that showed nothing while the server worked on a call, as behind a balancer, are not believed."""

    async def main() -> None:
        client = FakeClient()
        client.gate, client.metrics = asyncio.Event(), _page(1)
        async with _watched(books, client) as endpoint:
            call, other = _ask(endpoint), _ask(endpoint)
            await until(lambda: endpoint.gauges is not None)
            client.metrics = _page(0)
            endpoint.gauges = Gauges(running=0, waiting=0, at=time.time(), peak=1)
            endpoint.gauges_at = time.monotonic() - 10
            endpoint.hear(module.Call(time.monotonic() - 100))
            assert endpoint.gauges_are_wrong
            await asyncio.sleep(3 * _LOST_AFTER_S)
            assert not call.done()
            _stop(call, other)

    _run(main)


def test_one_worker_reads_the_metrics_for_all(books: Queue) -> None:
    """Two workers learn the same numbers from one reading per turn."""

    async def main() -> None:
        mine, its = FakeClient(), FakeClient()
        mine.metrics = its.metrics = _page(4)
        async with _watched(books, mine, "here") as here, _watched(books, its, "there") as there:
            await until(lambda: here.gauges is not None and there.gauges is not None)
            assert here.gauges is not None
            assert here.gauges.running == 4
            before, started = mine.readings + its.readings, time.monotonic()
            await until(lambda: mine.readings + its.readings - before >= 10, 60)
            # A turn each, and one that was taken before. Each for itself, they would have read twice as often.
            assert (time.monotonic() - started) / 0.1 + 2 >= 10
            assert books.client.hget(books.keys.endpoint(here.name), "gauges") is not None

    _run(main)


def test_a_server_without_metrics_is_left_alone(books: Queue) -> None:
    """A server that has no such page is asked for it once in ten minutes."""

    async def main() -> None:
        client = FakeClient()
        async with _watched(books, client) as endpoint:
            await until(lambda: client.readings)
            await _ticks(endpoint, 10)
            assert client.readings == 1
            assert endpoint.gauges is None
            left_s = books.client.pttl(books.keys.turn(f"gauges.{endpoint.name}")) / 1000
            assert 500 < left_s <= 600

    _run(main)


def test_gauges_of_another_version_are_passed_over(books: Queue) -> None:
    """What a worker of another version has written stops nothing."""

    async def main() -> None:
        client = FakeClient()
        client.metrics = None
        async with _watched(books, client) as endpoint:
            books.client.hset(books.keys.endpoint(endpoint.name), "gauges", '["what is this"]')
            before = endpoint.pool._valid_until
            await until(lambda: endpoint.pool._valid_until > before + 0.3)
            assert endpoint.gauges is None

    _run(main)


def test_a_fault_in_the_watch_does_not_end_it(books: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """A bug in one duty is logged, and the next turn does the duty again."""

    class Broken(FakeClient):
        async def read_metrics(self, *, timeout_s: float) -> bytes | None:
            await super().read_metrics(timeout_s=timeout_s)
            raise RuntimeError("a bug")

    async def main() -> None:
        client = Broken()
        async with _watched(books, client) as endpoint:
            await until(lambda: client.readings >= 2)
            assert endpoint.state is State.UP

    _run(main)
    assert "watching a model server failed" in caplog.text


def test_a_worker_that_can_ask_nothing_holds_no_server_down() -> None:
    """Where a worker lacks what it needs to ask (a tokenizer), a trial says nothing against the server."""
    endpoint = Endpoint(url="http://server", client=FakeClient(UsageError("The tokenizer m cannot be loaded")))
    assert asyncio.run(module.answers_a_trial(endpoint, timeout_s=5))
