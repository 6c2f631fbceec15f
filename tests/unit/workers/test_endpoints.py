"""The model servers' health, shared by all workers, and who gets the next call."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from app.places import Keys
from app.queue import Queue
from tests.conftest import RedisFactory
from tests.support.fake_client import FakeClient, until
from tests.support.redis_server import RedisServer
from workers import endpoints as module
from workers.endpoint import Endpoint, State
from workers.endpoints import Endpoints, model_of
from workers.faults import FaultKind, make_fault

URL = "http://me:secret@127.0.0.1:8001"
_PROBE_S = 0.4


@pytest.fixture(autouse=True)
def _quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the housekeeping run twenty times a second."""
    monkeypatch.setattr(module, "_TICK_S", 0.05)
    monkeypatch.setattr(module, "_SHORTEST_TICK_S", 0.02)


def _endpoints(books: Queue, *clients: FakeClient, owner: str = "me", bound: int = 8) -> Endpoints:
    made = [
        Endpoint(url=URL if number == 0 else f"http://127.0.0.1:{8001 + number}", client=client)
        for number, client in enumerate(clients)
    ]
    return Endpoints(made, redis=books.client, keys=books.keys, owner=owner, bound=bound, probe_s=_PROBE_S)


@contextlib.asynccontextmanager
async def _kept(*all_endpoints: Endpoints) -> AsyncIterator[None]:
    """Look at the servers once and keep house, as a worker does."""
    for endpoints in all_endpoints:
        await endpoints.look_at_all()
    tasks = [asyncio.create_task(endpoints.keep()) for endpoints in all_endpoints]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for endpoints in all_endpoints:
            await endpoints.close()


async def _call(endpoints: Endpoints) -> Endpoint:
    """Take a permit within ten seconds."""
    return await asyncio.wait_for(endpoints.acquire(), 10)


def _fail(endpoints: Endpoints, kind: FaultKind, *, number: int = 0) -> None:
    endpoints.failed(endpoints.all[number], make_fault(kind, f"it said {kind}"), "a-sample")


def _run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


def test_housekeeping_ends_at_once(books: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Housekeeping that is cancelled ends, even where a change wakes it at the same moment."""
    monkeypatch.setattr(module, "_TICK_S", 60.0)
    monkeypatch.setattr(module, "_SHORTEST_TICK_S", 0.0)

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient())
        await endpoints.look_at_all()
        task = asyncio.create_task(endpoints.keep())
        await until(lambda: endpoints.all[0].pool.bound)
        endpoints._nudged.clear()
        await until(lambda: endpoints._nudged._waiters)  # type: ignore[attr-defined] # it waits for the next tick
        endpoints._nudged.set()
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()

    _run(main)


def _told(books: Queue, endpoint: Endpoint) -> dict[str, str]:
    """Return what Redis says of an endpoint."""
    found = books.client.hgetall(books.keys.endpoint(endpoint.name))
    return {key.decode(): value.decode() for key, value in found.items()}  # type: ignore[union-attr]


# The first look


def test_a_server_that_answers_is_up(books: Queue) -> None:
    """The first look opens a server, calls get permits of Redis, and everybody can read its state without the login."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient(models=("one", "two")))
        async with _kept(endpoints):
            endpoint = await _call(endpoints)
            assert (endpoint.state, endpoint.pool.in_use, endpoint.models) == (State.UP, 1, ("one", "two"))
            assert not endpoint.half_open
            await until(lambda: _told(books, endpoint).get("state") == "up")
            told = _told(books, endpoint)
            assert (told["url"], told["reason"]) == ("http://127.0.0.1:8001", "ok")
            assert abs(float(told["since"]) - time.time()) < 30
            assert books.client.smembers(books.keys.endpoints) == {endpoint.name.encode()}
            assert "secret" not in endpoint.name + endpoint.shown
            endpoints.release(endpoint)
            assert endpoint.pool.in_use == 0

    _run(main)


def test_a_server_that_does_not_answer_is_down(books: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is not there at the start is told with its address and reason, and is opened when it answers."""

    async def main() -> None:
        client = FakeClient(alive=False)
        endpoints = _endpoints(books, client)
        async with _kept(endpoints):
            (endpoint,) = endpoints.all
            assert (endpoint.state, endpoint.reason) == (State.DOWN, "nobody there")
            assert endpoint.since > 0
            waiting = asyncio.create_task(endpoints.acquire())
            await until(lambda: client.probes >= 2)
            assert not waiting.done()
            client.alive = True
            assert await asyncio.wait_for(waiting, 10) is endpoint
            assert endpoint.half_open

    _run(main)
    assert "endpoint http://127.0.0.1:8001 is down: nobody there" in caplog.text


# The breaker


@pytest.mark.parametrize("kind", [FaultKind.CONNECT, FaultKind.ENGINE_DEAD, FaultKind.LOADING])
def test_faults_that_trip_at_once(books: Queue, kind: FaultKind) -> None:
    """A server that is surely away is asked nothing more after one fault; calls go to the other one."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient(alive=False), FakeClient())
        first, second = endpoints.all
        async with _kept(endpoints):
            first.set_state(State.UP, "ok")
            _fail(endpoints, kind)
            assert (first.state, first.reason) == (State.DOWN, f"it said {kind}")
            assert [await _call(endpoints) for _ in range(3)] == [second] * 3

    _run(main)


@pytest.mark.parametrize("kind", [FaultKind.SERVER_ERROR, FaultKind.CONNECTION_LOST, FaultKind.CONNECT_TIMEOUT])
def test_faults_that_trip_in_a_row(books: Queue, kind: FaultKind) -> None:
    """Five faults in a row close a server; a success between them starts the count anew."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient())
        await endpoints.look_at_all()
        (endpoint,) = endpoints.all
        for _ in range(4):
            _fail(endpoints, kind)
        endpoints.succeeded(endpoint)
        for _ in range(4):
            _fail(endpoints, kind)
        assert endpoint.state is State.UP
        _fail(endpoints, kind)
        assert (endpoint.state, endpoint.reason) == (State.DOWN, f"5 failures in a row: it said {kind}")
        assert endpoint.pool.free == 0

    _run(main)


@pytest.mark.parametrize("kind", [FaultKind.TIMEOUT, FaultKind.BAD_ANSWER, FaultKind.BAD_REQUEST, FaultKind.ABORTED])
def test_a_samples_own_faults_close_no_server(books: Queue, kind: FaultKind) -> None:
    """However many calls fail for their samples' sake, the server stays open."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient())
        await endpoints.look_at_all()
        for _ in range(20):
            _fail(endpoints, kind)
        assert endpoints.all[0].state is State.UP

    _run(main)


def test_a_server_that_comes_up_is_asked_what_it_is(books: Queue) -> None:
    """A server is asked what it is before its first call, and again after each outage: it may be another one."""

    async def main() -> None:
        client = FakeClient(alive=False)
        endpoints = _endpoints(books, client)
        (endpoint,) = endpoints.all
        async with _kept(endpoints):
            assert client.identified == 0
            client.alive = True
            await until(lambda: endpoint.state is State.UP)
            assert client.identified == 1
            _fail(endpoints, FaultKind.CONNECT)
            await until(lambda: endpoint.state is State.UP)
            assert client.identified == 2

    _run(main)


def test_a_server_that_came_back_is_closed_by_its_first_fault(books: Queue) -> None:
    """A server that answers probes again gets few calls at first, and one fault closes it; one success ends that."""

    async def main() -> None:
        client = FakeClient(alive=False)
        endpoints = _endpoints(books, client, bound=64)
        (endpoint,) = endpoints.all
        async with _kept(endpoints):
            client.alive = True
            await until(lambda: endpoint.state is State.UP)
            assert (endpoint.half_open, endpoint.pool.ceiling) == (True, 4)
            client.alive = False
            _fail(endpoints, FaultKind.SERVER_ERROR)
            assert str(endpoint.state) == "down"
            client.alive = True
            await until(lambda: endpoint.state is State.UP)
            endpoints.succeeded(endpoint)
            _fail(endpoints, FaultKind.SERVER_ERROR)
            assert str(endpoint.state) == "up"

    _run(main)


def test_an_answer_opens_a_server(books: Queue) -> None:
    """A running call that still gets its answer proves that the server is there."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient())
        await endpoints.look_at_all()
        _fail(endpoints, FaultKind.CONNECT)
        endpoints.succeeded(endpoints.all[0])
        assert endpoints.all[0].state is State.UP

    _run(main)


def test_a_server_is_sick_until_something_succeeds(books: Queue) -> None:
    """A fault is likely the server's when others fail too and nothing has succeeded since the call began."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient())
        (endpoint,) = endpoints.all
        started = time.monotonic()
        endpoint.failing.update({"one", "two", "three"})
        assert not endpoints.is_sick(endpoint, started, "one")
        assert endpoints.is_sick(endpoint, started, "another")
        endpoints.succeeded(endpoint)
        assert not endpoints.is_sick(endpoint, started, "another")
        endpoint.failing.update({"one", "two", "three"})
        assert not endpoints.is_sick(endpoint, started, "another")
        assert endpoints.is_sick(endpoint, time.monotonic() + 1, "another")

    _run(main)


def test_what_breaks_at_a_server_that_is_down_is_the_servers(books: Queue) -> None:
    """A call that began before the server fell and breaks while it has been down is not the sample's doing."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient())
        await endpoints.look_at_all()
        (endpoint,) = endpoints.all
        started = time.monotonic()
        _fail(endpoints, FaultKind.CONNECT)
        assert not endpoints.is_sick(endpoint, started, "another")  # it may have felled it
        endpoint.fell_at = started + 0.001
        await asyncio.sleep(0.01)
        assert not endpoints.is_sick(endpoint, started, "another")
        endpoint.fell_at, started = endpoint.fell_at - 2.0, started - 3.0
        assert endpoints.is_sick(endpoint, started, "another")
        endpoint.set_state(State.UP, "ok")
        assert not endpoints.is_sick(endpoint, started, "another")

    _run(main)


# Shared health


def test_one_workers_discovery_closes_the_server_for_all(books: Queue) -> None:
    """Another worker learns through Redis that a server is down, since when and why, and that it is back."""

    async def main() -> None:
        mine, its = FakeClient(), FakeClient()
        here, there = _endpoints(books, mine, owner="here"), _endpoints(books, its, owner="there")
        async with _kept(here, there):
            await until(lambda: _told(books, here.all[0]).get("state") == "up")
            mine.alive = its.alive = False
            _fail(here, FaultKind.CONNECT)
            await until(lambda: there.all[0].state is State.DOWN)
            assert there.all[0].reason == "it said connect"
            assert there.all[0].since == pytest.approx(here.all[0].since)
            mine.alive = its.alive = True
            await until(lambda: {here.all[0].state, there.all[0].state} == {State.UP})
            assert there.all[0].half_open
            assert here.all[0].half_open

    _run(main)


def test_a_server_that_is_down_is_probed_by_one_worker_at_a_time(books: Queue) -> None:
    """Two workers together probe a server no more often than MILL_PROBE_S says."""

    async def main() -> None:
        clients = [FakeClient(alive=False), FakeClient(alive=False)]
        both = [_endpoints(books, client, owner=f"w{number}") for number, client in enumerate(clients)]
        async with _kept(*both):
            before, started = sum(client.probes for client in clients), time.monotonic()
            await until(lambda: sum(client.probes for client in clients) - before >= 8, 60)
            # A turn each, one that was taken before, and its delay. Each for itself, they would have probed 16 times.
            assert (time.monotonic() - started) / _PROBE_S + 2 >= 8

    _run(main)


def test_a_state_that_redis_forgot_is_told_again(books: Queue) -> None:
    """After a wipe of Redis the worker's own view is published anew."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient(alive=False))
        (endpoint,) = endpoints.all
        async with _kept(endpoints):
            await until(lambda: _told(books, endpoint).get("state") == "down")
            books.client.flushall()
            await until(lambda: _told(books, endpoint).get("state") == "down")
            assert endpoint.state is State.DOWN

    _run(main)


def _away(server: RedisServer) -> Endpoints:
    """Return endpoints whose Redis client gives up at once."""
    return Endpoints(
        [Endpoint(url=URL, client=FakeClient(alive=False))],
        redis=server.client(),
        keys=Keys("t:"),
        owner="me",
        bound=8,
        probe_s=_PROBE_S,
    )


def test_what_changed_while_redis_was_away_is_told_later(new_redis: RedisFactory) -> None:
    """A server found down while Redis was away stays closed when it is back, whatever Redis remembers."""

    async def main() -> None:
        server = new_redis(aof=True)
        endpoints = _away(server)
        (endpoint,) = endpoints.all
        endpoint.set_state(State.UP, "ok")
        endpoint.unpublished = True
        await endpoints._exchange()
        server.kill()
        _fail(endpoints, FaultKind.CONNECT)
        await endpoints._exchange()
        server.start()
        await endpoints._exchange()
        assert endpoint.state is State.DOWN
        assert server.client().hget(Keys("t:").endpoint(endpoint.name), "state") == "down"

    _run(main)


def test_running_calls_go_on_without_redis(new_redis: RedisFactory) -> None:
    """While Redis is away the leased permits stay in use, and the housekeeping goes on."""

    async def main() -> None:
        server = new_redis()
        endpoints = _away(server)
        (endpoint,) = endpoints.all
        endpoint.client.alive = True  # type: ignore[attr-defined]
        async with _kept(endpoints):
            first, second = [asyncio.create_task(endpoints.acquire()) for _ in range(2)]
            await asyncio.wait_for(asyncio.gather(first, second), 10)
            server.kill()
            await endpoints._exchange()
            assert endpoint.pool.held >= 2
            endpoints.release(endpoint)
            assert await _call(endpoints) is endpoint
            await endpoints.give_back()

    _run(main)


# Paused


@pytest.mark.parametrize("kind", [FaultKind.UNAUTHORIZED, FaultKind.NOT_FOUND])
def test_a_server_that_refuses_everybody_is_paused_and_tried_singly(
    books: Queue, monkeypatch: pytest.MonkeyPatch, kind: FaultKind
) -> None:
    """After a 401, 403 or 404 one call at a time is let through, ever more seldom, until one succeeds."""
    monkeypatch.setattr(module, "_PAUSE_FIRST_S", 0.3)

    async def main() -> None:
        client = FakeClient()
        endpoints = _endpoints(books, client)
        (endpoint,) = endpoints.all
        async with _kept(endpoints):
            await endpoints.acquire()
            endpoints.release(endpoint)
            _fail(endpoints, kind)
            paused_at = time.monotonic()
            assert (endpoint.state, endpoint.reason) == (State.PAUSED, f"it said {kind}")
            waiting = [asyncio.create_task(endpoints.acquire()) for _ in range(3)]
            await until(lambda: any(task.done() for task in waiting))
            assert time.monotonic() - paused_at >= 0.3
            for _ in range(5):
                await asyncio.sleep(0.02)
                assert [task.done() for task in waiting] == [True, False, False]
            assert client.probes == 1  # a look tells nothing here
            _fail(endpoints, kind)
            endpoints.release(endpoint)
            await until(waiting[1].done)
            assert not waiting[2].done()
            assert endpoint.trials == 2
            endpoints.succeeded(endpoint)
            endpoints.release(endpoint)
            await until(waiting[2].done)
            assert (endpoint.state, endpoint.trials) == (State.UP, 0)

    _run(main)


def test_pauses_grow_up_to_five_minutes(books: Queue) -> None:
    """Every failed trial doubles the pause, from 15 seconds to 300."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient())
        (endpoint,) = endpoints.all
        pauses = []
        for trials in (0, 1, 2, 4, 5, 16):
            endpoint.set_state(State.PAUSED, "no")
            endpoint.trials = trials
            books.client.delete(books.keys.probe(endpoint.name))
            await endpoints._take_turn(endpoint)
            pauses.append(round(books.client.pttl(books.keys.probe(endpoint.name)) / 1000))
        assert pauses == [15, 30, 60, 240, 300, 300]

    _run(main)


# Load


def test_an_overloaded_server_is_asked_for_less(books: Queue) -> None:
    """A 429 or 503 lowers what this worker has in flight by a third, once per two seconds however many come."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient(), bound=100)
        await endpoints.look_at_all()
        pool = endpoints.all[0].pool
        pool.in_use = 50
        for _ in range(10):
            _fail(endpoints, FaultKind.OVERLOADED)
        assert (pool.ceiling, endpoints.all[0].state) == (35, State.UP)
        endpoints.all[0].slowed_at -= 2.0
        pool.in_use = 1
        _fail(endpoints, FaultKind.OVERLOADED)
        assert pool.ceiling == 1

    _run(main)


def test_a_fresh_worker_ramps_up(books: Queue) -> None:
    """Calls in flight double twice a second while more wait; where a server asked for less lately they grow slower."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient(), bound=1000)
        await endpoints.look_at_all()
        (endpoint,) = endpoints.all
        pool = endpoint.pool
        assert pool.ceiling == 64
        endpoints._raise_ceilings()
        assert pool.ceiling == 64  # nobody waits
        waiting = asyncio.create_task(endpoints.acquire())
        await asyncio.sleep(0)
        pool.in_use = 64
        for _ in range(3):
            endpoints._raise_ceilings()
        assert pool.ceiling == 128
        endpoint.raised_at -= 0.5
        endpoint.slowed_at = time.monotonic()
        pool.in_use = 128
        endpoints._raise_ceilings()
        assert pool.ceiling == 140
        waiting.cancel()

    _run(main)


def test_more_calls_get_permits_without_waiting_for_the_tick(books: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that begin to wait renew the lease at once, not at the next tick."""
    monkeypatch.setattr(module, "_TICK_S", 60.0)

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient(), bound=300)
        async with _kept(endpoints):
            await asyncio.gather(*(_call(endpoints) for _ in range(60)))
            assert endpoints.all[0].pool.in_use == 60

    _run(main)


def test_two_workers_share_the_bound(books: Queue) -> None:
    """Calls of two workers together never exceed the endpoint's bound, and reach it."""

    async def main() -> None:
        both = [_endpoints(books, FakeClient(), owner=owner, bound=6) for owner in ("a", "b")]
        running, peak = 0, 0

        async def call(endpoints: Endpoints) -> None:
            nonlocal running, peak
            endpoint = await endpoints.acquire()
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.02)
            running -= 1
            endpoints.release(endpoint)

        async with _kept(*both), asyncio.timeout(20):
            await asyncio.gather(*(call(both[number % 2]) for number in range(120)))
        assert peak == 6

    _run(main)


# Ends


def test_a_shut_house_starts_no_call(books: Queue) -> None:
    """Nothing starts while the disk refuses records, permits are left to others, and all goes on afterwards."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient())
        (endpoint,) = endpoints.all
        async with _kept(endpoints):
            endpoints.release(await _call(endpoints))
            endpoints.shut("the disk is full")
            waiting = asyncio.create_task(endpoints.acquire())
            await until(lambda: endpoint.pool.held == 0)
            assert not waiting.done()
            endpoints.shut(None)
            assert await asyncio.wait_for(waiting, 10) is endpoint

    _run(main)


def test_permits_are_given_back_and_connections_closed(books: Queue) -> None:
    """At the end nothing of this worker is left in Redis, and every client is closed."""

    async def main() -> None:
        clients = [FakeClient(), FakeClient()]
        endpoints = _endpoints(books, *clients)
        async with _kept(endpoints):
            endpoint = await _call(endpoints)
            assert books.client.hlen(books.keys.permits(endpoint.name)) == 1
            endpoints.release(endpoint)
        await endpoints.give_back()
        assert [books.client.exists(books.keys.permits(one.name)) for one in endpoints.all] == [0, 0]
        assert [client.closed for client in clients] == [True, True]

    _run(main)


def test_pauses_before_retries_end_with_the_worker(books: Queue) -> None:
    """A call that waits to be asked again is cancelled at the worker's end; until then it waits its time."""

    async def main() -> None:
        endpoints = _endpoints(books, FakeClient())
        started = time.monotonic()
        await endpoints.pause(0.05)
        assert time.monotonic() - started >= 0.04
        pausing = asyncio.create_task(endpoints.pause(60))
        await asyncio.sleep(0)
        endpoints.turn_away()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(pausing, 10)
        with pytest.raises(asyncio.CancelledError):
            await endpoints.acquire()

    _run(main)


def test_the_first_listed_model_is_taken(books: Queue) -> None:
    """The model's name is asked for once; a server that lists none has none."""

    async def main() -> None:
        lists, silent = FakeClient(models=("one", "two")), FakeClient(models=())
        endpoints = _endpoints(books, lists, silent)
        assert [await model_of(endpoints.all[0]) for _ in range(2)] == ["one", "one"]
        assert lists.probes == 1
        assert await model_of(endpoints.all[1]) is None

    _run(main)
