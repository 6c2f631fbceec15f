"""Asking until there is a completion: what is retried, what counts, what is kept, and what is sent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
import redis

from app import settings
from app.places import Keys
from app.records import Attempt, Sample, sample_seed
from app.settings import GenerationSettings, ServerSettings, generation_from_content
from tests.conftest import ModelServerFactory
from tests.support.fake_client import FakeClient, Reply, completion, until
from workers import caller as module
from workers.caller import Caller, ModelMissing, Outcome, ParametersRefusedError, Suspected
from workers.clients.backends import Backend
from workers.clients.base import Client, Request
from workers.clients.make import make_client
from workers.endpoints import Endpoint, Endpoints, State
from workers.faults import TREATMENTS, FaultKind, Scope, make_fault
from workers.permits import Block
from workers.rendering import Tokenizers

SAMPLE = Sample(id="s1", messages=[{"role": "user", "content": "Hi"}])
_GENERATION = generation_from_content({"model": "toy"})
_EXCUSED = 20


class Room:
    """A caller with its endpoints, all open, without Redis: whatever closes is opened again at once."""

    def __init__(self, *clients: Client, permits: int = 8, **limits: Any) -> None:
        self.endpoints = Endpoints(
            [Endpoint(url=f"http://server{number}", client=client) for number, client in enumerate(clients)],
            redis=redis.Redis(),  # never used
            keys=Keys(),
            owner="me",
            bound=permits,
            probe_s=1,
        )
        for endpoint in self.endpoints.all:
            endpoint.pool.count()
            endpoint.pool.renew(Block(permits, permits, 0))
        self.deaths, self.survives = 0, 100
        values = {"backoff_s": 0.001, "backoff_max_s": 0.002, **limits}
        self.caller = Caller(self.endpoints, settings.load(settings.WorkerSettings, **values))

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep every endpoint open."""

        async def keep_open() -> None:
            while True:
                for endpoint in self.endpoints.all:
                    if endpoint.state is not State.UP:
                        endpoint.set_state(State.UP, "ok")
                    endpoint.pool.ceiling = 1000
                self.endpoints.gate.hand_out()
                await asyncio.sleep(0.001)

        task = asyncio.create_task(keep_open())
        try:
            yield
        finally:
            task.cancel()

    async def note_death(self) -> bool:
        """Count a death of a server; the sample becomes a suspect with the last one that it may survive."""
        self.deaths += 1
        return self.deaths > self.survives

    async def ask(self, sample: Sample = SAMPLE, generation: GenerationSettings = _GENERATION) -> Outcome:
        """Ask one sample, in at most ten seconds, and see its permit come back."""
        async with self.open(), asyncio.timeout(10):
            outcome = await self.caller.ask(sample, generation, on_death=self.note_death)
        assert [endpoint.pool.in_use for endpoint in self.endpoints.all] == [0] * len(self.endpoints.all)
        return outcome

    def well(self, kind: FaultKind) -> Callable[[Request], Reply]:
        """Return a step that fails while other calls of the server succeed, so that the fault is the sample's."""

        def reply(_request: Request) -> Reply:
            self.endpoints.succeeded(self.endpoints.all[0])
            return kind

        return reply


def _ask(client: FakeClient, generation: GenerationSettings = _GENERATION, **limits: Any) -> Outcome:
    return asyncio.run(Room(client, **limits).ask(generation=generation))


def _ask_where_others_fail(client: FakeClient, **limits: Any) -> Outcome:
    room = Room(client, **limits)
    for endpoint in room.endpoints.all:
        endpoint.failing.update({"another", "a third", "a fourth"})
    return asyncio.run(room.ask())


def _ask_well(kinds: Sequence[FaultKind], **limits: Any) -> tuple[Outcome, FakeClient]:
    """Ask a sample whose first calls fail so at a server that is well."""
    client = FakeClient()
    room = Room(client, **limits)
    client.script = [room.well(kind) for kind in kinds]
    return asyncio.run(room.ask()), client


def _run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


# One call


def test_an_answer_becomes_an_outcome() -> None:
    """A completion at the first call comes back with where, when and how it was made."""
    before = time.time()
    outcome = _ask(FakeClient(completion("Yes.", model="toy-v2")))
    assert outcome.completion == completion("Yes.", model="toy-v2")
    assert outcome.fault is None
    assert (outcome.endpoint, outcome.protocol, outcome.model) == ("http://server0", "fake", "toy-v2")
    assert (outcome.attempts, outcome.faults, outcome.latency_s) == (1, [], 0.25)
    assert before <= outcome.started_at <= outcome.finished_at <= time.time()
    assert (outcome.request_id, outcome.seed) == ("s1-r0-a1", None)


def test_the_request_is_what_the_settings_say() -> None:
    """Messages, tools, model and exactly the sampling that was set are sent."""
    client = FakeClient()
    tools = [{"type": "function", "function": {"name": "f"}}]
    sample = Sample(id="s2", messages=[{"role": "user", "content": "x"}], tools=tools)
    generation = generation_from_content({"model": "big", "temperature": 0.5, "extra_body": {"priority": 1}})
    asyncio.run(Room(client).ask(sample, generation))
    (request,) = client.requests
    assert (request.messages, request.tools, request.model) == (sample.messages, tools, "big")
    assert request.sampling == {"max_tokens": 8192, "temperature": 0.5, "priority": 1}
    assert request.seed is None


def test_the_model_is_taken_from_the_servers_list() -> None:
    """Without a model in the settings the first one that the server lists is asked for, and recorded."""
    client = FakeClient(completion(model=None), models=("listed", "other"))
    outcome = _ask(client, generation_from_content({}))
    assert (client.requests[0].model, outcome.model) == ("listed", "listed")


def test_a_server_without_a_list_is_asked_all_the_same() -> None:
    """A server that lists no models gets the name `default`, and nothing is guessed in the record."""
    client = FakeClient(completion(model=None), models=())
    outcome = _ask(client, generation_from_content({}))
    assert (client.requests[0].model, outcome.model) == ("default", None)


def test_every_sample_has_a_seed_of_its_own() -> None:
    """The seed follows from the run's seed and the sample's id alone, so it is the same at every call and resume."""
    client = FakeClient(FaultKind.ABORTED)
    outcome = _ask(client, generation_from_content({"model": "toy", "seed": 7}))
    assert {request.seed for request in client.requests} == {sample_seed(7, "s1")} == {outcome.seed}


def test_every_call_has_a_name_of_its_own() -> None:
    """Request ids differ between calls and rounds, so that no server takes a retry for a duplicate."""
    client = FakeClient(FaultKind.ABORTED, FaultKind.ABORTED)
    room = Room(client)
    outcome = asyncio.run(room.ask())
    assert [request.request_id for request in client.requests] == ["s1-r0-a1", "s1-r0-a2", "s1-r0-a3"]
    assert outcome.request_id == "s1-r0-a3"
    again = asyncio.run(room.ask(Sample(id="s1", messages=SAMPLE.messages, round=1)))
    assert again.request_id == "s1-r1-a1"


# The table of treatments

_RETRIED = [kind for kind, treatment in TREATMENTS.items() if treatment.retry]
_COUNTED = [kind for kind in _RETRIED if TREATMENTS[kind].counted]
_FREE = [kind for kind in _RETRIED if not TREATMENTS[kind].counted]
_FINAL = [kind for kind in FaultKind if kind not in _RETRIED]


@pytest.mark.parametrize("kind", _FINAL)
def test_what_no_retry_mends_is_given_up_at_once(kind: FaultKind) -> None:
    """A permanent refusal costs one call, whatever attempts are left."""
    client = FakeClient(kind)
    outcome = _ask(client)
    assert (len(client.requests), outcome.attempts) == (1, 1)
    assert outcome.fault is not None
    assert (outcome.fault.kind, outcome.fault.message) == (kind, f"fake {kind}")
    assert (outcome.completion, outcome.latency_s, outcome.model) == (None, None, "toy")


@pytest.mark.parametrize("kind", _COUNTED)
def test_a_samples_own_fault_uses_up_an_attempt(kind: FaultKind) -> None:
    """With two attempts a sample survives one such fault and is given up after the second."""
    outcome, client = _ask_well([kind], max_attempts=2)
    assert outcome.completion is not None
    assert (outcome.attempts, [fault.fault for fault in outcome.faults]) == (2, [kind])

    outcome, client = _ask_well([kind, kind], max_attempts=2)
    assert outcome.completion is None
    assert outcome.fault is not None
    assert (outcome.fault.kind, outcome.attempts, len(client.requests)) == (kind, 2, 2)


@pytest.mark.parametrize("kind", _FREE)
def test_a_servers_fault_uses_up_none(kind: FaultKind) -> None:
    """With a single attempt a sample survives any number of such faults, up to twenty for its own sake."""
    outcome, _client = _ask_well([kind] * 5, max_attempts=1)
    assert outcome.completion is not None
    assert (outcome.attempts, [fault.fault for fault in outcome.faults]) == (6, [kind] * 5)


_BOUNDED = [kind for kind in _FREE if TREATMENTS[kind].scope is Scope.SAMPLE or kind is FaultKind.ENGINE_DEAD]


@pytest.mark.parametrize("kind", [kind for kind in _FREE if kind not in _BOUNDED])
def test_a_server_that_is_away_fails_no_sample(kind: FaultKind) -> None:
    """Faults of the server as a whole are never counted, however many there are."""
    outcome, client = _ask_well([kind] * (_EXCUSED + 10), max_attempts=1)
    assert outcome.completion is not None
    assert len(client.requests) == _EXCUSED + 11


@pytest.mark.parametrize("kind", _BOUNDED)
def test_what_costs_nothing_is_bounded(kind: FaultKind) -> None:
    """A sample whose calls end for free again and again is given up in the end."""
    outcome, client = _ask_well([kind] * 100, max_attempts=2)
    assert outcome.completion is None
    assert len(client.requests) == _EXCUSED + 2


@pytest.mark.parametrize("kind", [FaultKind.SERVER_ERROR, FaultKind.CONNECTION_LOST])
def test_faults_of_a_sick_server_are_excused_within_bounds(kind: FaultKind) -> None:
    """While a server fails everybody its errors use up no attempt, but twenty times at most."""
    client = FakeClient(*[kind] * 100)
    outcome = _ask_where_others_fail(client, max_attempts=2)
    assert outcome.completion is None
    assert len(client.requests) == _EXCUSED + 2

    outcome = _ask_where_others_fail(FakeClient(*[kind] * _EXCUSED), max_attempts=1)
    assert outcome.completion is not None


@pytest.mark.parametrize("kind", [FaultKind.SERVER_ERROR, FaultKind.CONNECTION_LOST])
def test_a_sample_that_alone_fails_is_given_up(kind: FaultKind) -> None:
    """A sample that fails a server all by itself, the last one of a run perhaps, uses up its attempts."""
    client = FakeClient(*[kind] * 100)
    assert _ask(client, max_attempts=3).completion is None
    assert len(client.requests) == 3


def test_the_newest_sixteen_faults_are_kept() -> None:
    """The record of failed calls is bounded, each with its class, place, time and words."""
    before = time.time()
    outcome = _ask(FakeClient(FaultKind.CONNECT, *[FaultKind.OVERLOADED] * 19, FaultKind.LOADING))
    assert outcome.attempts == 22
    assert [fault.fault for fault in outcome.faults] == ["overloaded"] * 15 + ["loading"]
    last = outcome.faults[-1]
    assert (last.endpoint, last.message) == ("server0-" + last.endpoint[-6:], "fake loading")
    assert before <= last.at <= time.time()


# Lost connections


def test_a_connection_lost_to_a_dying_server_is_refunded() -> None:
    """A lost connection that is followed by a refused one was the server's death: the attempt comes back."""
    lost, refused = FaultKind.CONNECTION_LOST, FaultKind.CONNECT
    outcome, _client = _ask_well([lost, refused, lost, refused, refused, lost], max_attempts=2)
    assert outcome.completion is not None
    assert outcome.attempts == 7


def test_only_one_attempt_is_refunded() -> None:
    """Refused connections give back the one attempt that was lost, not more."""
    lost, refused = FaultKind.CONNECTION_LOST, FaultKind.CONNECT
    outcome, _client = _ask_well([lost, refused, refused, refused, lost, lost], max_attempts=2)
    assert outcome.completion is None
    assert outcome.attempts == 6


def test_a_loss_long_ago_is_not_refunded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that proves unreachable only much later did not break the connection by dying."""
    monkeypatch.setattr(module, "_REFUND_S", 0.0)
    outcome, _client = _ask_well(
        [FaultKind.CONNECTION_LOST, FaultKind.CONNECT, FaultKind.CONNECTION_LOST], max_attempts=2
    )
    assert outcome.completion is None


# Servers that die


def _leaving(client: FakeClient, kind: FaultKind) -> Callable[[Request], Reply]:
    """Return a step that fails as the server goes away with it."""

    def reply(_request: Request) -> Reply:
        client.alive = False
        return kind

    return reply


def _returning(client: FakeClient) -> Callable[[Request], Reply]:
    def reply(_request: Request) -> Reply:
        client.alive = True
        return completion()

    return reply


@pytest.mark.parametrize("kind", [FaultKind.CONNECTION_LOST, FaultKind.ENGINE_DEAD])
def test_a_death_of_the_server_is_told_and_costs_no_attempt(kind: FaultKind) -> None:
    """A server that dies during a call is looked at, found gone and told of; the sample is asked on, for nothing."""
    client = FakeClient()
    client.script = [_leaving(client, kind), _returning(client)]
    room = Room(client, max_attempts=1)
    outcome = asyncio.run(room.ask())
    assert outcome.completion is not None
    assert [fault.fault for fault in outcome.faults] == [kind]
    assert room.deaths == 1


@pytest.mark.parametrize("kind", [FaultKind.CONNECTION_LOST, FaultKind.ENGINE_DEAD, FaultKind.SERVER_ERROR])
def test_a_server_that_is_there_has_not_died(kind: FaultKind) -> None:
    """No death is told of a server that answers a look, whatever it said to the call."""
    room = Room(FakeClient(kind))
    assert asyncio.run(room.ask()).completion is not None
    assert room.deaths == 0


def test_a_dead_engine_behind_a_server_that_is_there_stops_nobody_else() -> None:
    """One backend of several, or one that a supervisor has back at once: the server stays up for all other samples."""
    client = FakeClient()
    room = Room(client, max_attempts=1)
    (endpoint,) = room.endpoints.all
    states: list[State] = []

    def reply(_request: Request) -> Reply:
        states.append(endpoint.state)
        room.endpoints.succeeded(endpoint)
        return FaultKind.ENGINE_DEAD

    async def main() -> None:
        endpoint.set_state(State.UP, "ok")
        endpoint.back_at, since = 1.0, endpoint.since
        outcome = await room.ask()
        assert outcome.fault is not None
        assert outcome.fault.kind is FaultKind.ENGINE_DEAD
        assert (endpoint.back_at, endpoint.since) == (1.0, since)

    client.script = [reply] * 100
    asyncio.run(main())
    assert states == [State.UP] * (_EXCUSED + 1)
    assert room.deaths == 0


def test_a_death_that_shows_late_is_told() -> None:
    """A server that was seen once more after it broke the connection, and refuses then, has died of it all the same."""
    room = Room(FakeClient(FaultKind.CONNECTION_LOST, FaultKind.CONNECT))
    assert asyncio.run(room.ask()).completion is not None
    assert room.deaths == 1


def test_a_suspect_is_not_asked_on() -> None:
    """Where the deaths make the sample a suspect it is given back at once, with its permit."""
    client = FakeClient()
    client.script = [_leaving(client, FaultKind.CONNECTION_LOST)]
    room = Room(client)
    room.survives = 0
    with pytest.raises(Suspected, match="http://server0 died while it worked on sample s1"):
        asyncio.run(room.ask())
    assert (len(client.requests), room.endpoints.all[0].pool.in_use) == (1, 0)


def test_calls_that_find_a_dead_server_have_no_part_in_its_death() -> None:
    """Calls in flight are all told of a death, one that begins before it is known here is not, and none pays."""

    async def main() -> None:
        client = FakeClient(*[FaultKind.CONNECTION_LOST] * 4)
        room, client.alive, client.gate = Room(client, max_attempts=1), False, asyncio.Event()
        (endpoint,) = room.endpoints.all
        endpoint.set_state(State.UP, "ok")
        endpoint.half_open = False
        tasks = [asyncio.create_task(room.caller.ask(SAMPLE, _GENERATION, on_death=room.note_death)) for _ in range(3)]
        await until(lambda: client.in_flight == 3)
        client.look_gate = asyncio.Event()
        client.gate.set()
        await until(lambda: client.in_flight == 0)
        tasks.append(asyncio.create_task(room.caller.ask(SAMPLE, _GENERATION, on_death=room.note_death)))
        await until(lambda: len(client.requests) == 4)
        client.look_gate.set()
        await until(lambda: endpoint.state is State.DOWN)
        assert client.probes == 1
        client.alive = True
        async with room.open(), asyncio.timeout(10):
            outcomes = await asyncio.gather(*tasks)
        assert [len(outcome.faults) for outcome in outcomes] == [1] * 4
        assert room.deaths == 3

    _run(main)


# Waiting


def test_retry_after_is_honoured() -> None:
    """A server that names a time is left alone for it, although the own backoff would be over."""
    started = time.monotonic()
    _ask(FakeClient(make_fault(FaultKind.OVERLOADED, "busy", retry_after_s=0.3)))
    assert 0.3 <= time.monotonic() - started < 5


def test_retry_after_is_capped() -> None:
    """No server puts a sample off for longer than MILL_RETRY_AFTER_MAX_S, and half a second of jitter."""
    started = time.monotonic()
    _ask(FakeClient(make_fault(FaultKind.OVERLOADED, "busy", retry_after_s=90_000)), retry_after_max_s=0.1)
    assert 0.1 <= time.monotonic() - started < 5


def test_a_stale_connection_is_replaced_at_once() -> None:
    """A kept-alive connection that had ended needs no pause."""
    started = time.monotonic()
    outcome = _ask(FakeClient(FaultKind.STALE_CONNECTION), backoff_s=60.0, backoff_max_s=60.0)
    assert outcome.attempts == 2
    assert time.monotonic() - started < 5


def test_the_own_backoff_grows() -> None:
    """Without a Retry-After the pauses double from MILL_BACKOFF_S on, to MILL_BACKOFF_MAX_S."""
    room = Room(FakeClient(), backoff_s=1.0, backoff_max_s=6.0)
    tries, pauses = module.Tries(), []
    for _ in range(5):
        tries.faults.append(Attempt("timeout", "server", 0.0))
        pauses.append(room.caller._pause_s(make_fault(FaultKind.TIMEOUT, ""), tries))
    ceilings = [1, 2, 4, 6, 6]
    assert all(ceiling / 2 <= pause <= ceiling for pause, ceiling in zip(pauses, ceilings, strict=True)), pauses


def test_the_permit_is_free_while_a_sample_waits() -> None:
    """With one permit another sample is asked and answered while the first one waits for its retry."""

    async def main() -> None:
        fault = make_fault(FaultKind.OVERLOADED, "busy", retry_after_s=0.5)
        client = FakeClient(fault)
        room = Room(client, permits=1)
        async with room.open(), asyncio.timeout(10):
            first = asyncio.create_task(room.caller.ask(SAMPLE, _GENERATION, on_death=room.note_death))
            await until(lambda: client.requests)
            for number in range(3):
                other = Sample(id=f"other{number}", messages=SAMPLE.messages)
                await room.caller.ask(other, _GENERATION, on_death=room.note_death)
            assert not first.done()
            assert (await first).attempts == 2
        assert client.peak_in_flight == 1

    _run(main)


def test_a_retry_prefers_another_server() -> None:
    """A sample that failed at one server goes to another."""

    async def main() -> None:
        first, second = FakeClient(FaultKind.TIMEOUT), FakeClient(FaultKind.TIMEOUT)
        outcome = await Room(first, second).ask()
        assert outcome.attempts == 3
        assert len({fault.endpoint for fault in outcome.faults}) == 2

    _run(main)


def test_the_next_call_does_not_meet_a_server_known_to_be_down() -> None:
    """The outcome of a call is noted before its permit goes on, so a waiting call stays back from a dead server."""

    async def main() -> None:
        client = FakeClient(FaultKind.CONNECT)
        client.gate = asyncio.Event()
        room = Room(client, permits=1)
        (endpoint,) = room.endpoints.all
        endpoint.set_state(State.UP, "ok")
        asked = [room.caller.ask(SAMPLE, _GENERATION, on_death=room.note_death) for _ in range(3)]
        tasks = [asyncio.create_task(one) for one in asked]
        await until(lambda: client.requests)
        client.gate.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert (len(client.requests), endpoint.state, endpoint.pool.in_use) == (1, State.DOWN, 0)
        async with room.open(), asyncio.timeout(10):
            await asyncio.gather(*tasks)

    _run(main)


# Ends


def test_a_cancelled_call_gives_its_permit_back() -> None:
    """Cancelling a sample ends its call and frees the permit for the next one."""

    async def main() -> None:
        client = FakeClient(latency_s=60)
        room = Room(client, permits=1)
        async with room.open():
            task = asyncio.create_task(room.caller.ask(SAMPLE, _GENERATION, on_death=room.note_death))
            await until(lambda: client.in_flight)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (client.in_flight, room.endpoints.all[0].pool.in_use) == (0, 0)

    _run(main)


def test_a_bug_in_a_client_gives_the_permit_back() -> None:
    """An exception that is no fault comes through, and costs no permit."""
    room = Room(FakeClient(KeyError("oops")))
    with pytest.raises(KeyError, match="oops"):
        asyncio.run(room.ask())
    assert room.endpoints.all[0].pool.in_use == 0


def test_a_model_that_the_server_does_not_have_is_told() -> None:
    """A server with other models than the one asked for stays open; the dataset hears of it, with both names."""
    client = FakeClient(FaultKind.NOT_FOUND, models=("one", "two"))
    room = Room(client)
    endpoint = room.endpoints.all[0]
    endpoint.models = client.models
    with pytest.raises(ModelMissing, match=r"http://server0 has no model 'toy' but one, two .*--new-settings"):
        asyncio.run(room.ask())
    assert (endpoint.state, endpoint.pool.in_use) == (State.UP, 0)


def test_a_path_that_nobody_finds_is_waited_for() -> None:
    """A 404 for a model that the server does list concerns the server, and costs the sample nothing."""
    client = FakeClient(FaultKind.NOT_FOUND, models=("toy",))
    room = Room(client, max_attempts=1)
    room.endpoints.all[0].models = client.models
    assert asyncio.run(room.ask()).attempts == 2


def test_parameters_that_a_server_would_pass_over_are_not_sent() -> None:
    """A server that would not act on a parameter is not asked: the dataset hears of it, the permit is free."""
    client = FakeClient()
    client.refused = "vLLM 0.33.0 does not know top_kk"
    room = Room(client)
    with pytest.raises(ParametersRefusedError, match=r"http://server0: vLLM 0\.33\.0 does not know top_kk"):
        asyncio.run(room.ask())
    assert client.requests == []
    assert room.endpoints.all[0].pool.in_use == 0


def test_the_outcome_says_what_answered() -> None:
    """The record's backend is what the server was found to be when it answered."""
    client = FakeClient()
    client.backend = Backend("vllm", "0.33.0")
    assert asyncio.run(Room(client).ask()).backend == "vllm 0.33.0"
    assert asyncio.run(Room(FakeClient()).ask()).backend is None


# A real server


def test_over_a_real_socket(model_server: ModelServerFactory) -> None:
    """Through the real client a 500 and a cut answer are retried, and the third call's answer is the outcome."""
    server = model_server(rules=[{"status": 500, "times": 1}, {"drop": "middle", "times": 1}, {"content": "Done."}])

    async def main() -> Outcome:
        servers = ServerSettings(protocol="openai", request_timeout_s=10, connect_timeout_s=5, max_body_mb=1)
        client = make_client(server.url, servers, Tokenizers(None), max_connections=2)
        try:
            return await Room(client, max_attempts=3).ask(generation=generation_from_content({"seed": 1}))
        finally:
            await client.close()

    outcome = asyncio.run(main())
    assert outcome.completion is not None
    assert (outcome.completion.content, outcome.model) == ("Done.", "toy-model")
    assert [fault.fault for fault in outcome.faults] == ["server_error", "connection_lost"]
    assert [seen.headers["x-request-id"] for seen in server.requests] == ["s1-r0-a1", "s1-r0-a2", "s1-r0-a3"]
    assert {seen.body["seed"] for seen in server.requests} == {sample_seed(1, "s1")}
