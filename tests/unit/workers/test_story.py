"""The story of a ticket, from the work list to the file, over a real Redis and a real folder."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app import jsonl, manifest, settings
from app.errors import UnwritableError
from app.ledger import Ledger
from app.lock import FolderLock
from app.places import DatasetFolder, Keys, dataset_folder
from app.queue import Queue
from app.records import Kind, Sample, Ticket
from tests.conftest import RedisFactory
from tests.support.fake_client import FakeClient, completion
from tests.support.folders import pen
from tests.support.processes import wait_until
from workers import intake as module
from workers.caller import Caller
from workers.clients.base import Request
from workers.endpoints import Endpoint, Endpoints, State
from workers.fault_tally import FaultTally
from workers.faults import FaultKind
from workers.intake import HandedBack, SampleFailed
from workers.loop import LoopThread
from workers.permits import Block
from workers.recorder import Recorder
from workers.story import Story

DATASET = "d"
TICKET = Ticket(DATASET, "a")
_WAIT_S = 20.0


class Stage:
    """A story with everything around it; the model client is the only stand-in."""

    def __init__(self, books: Queue, prepared: Path, client: FakeClient) -> None:
        self.books = books
        self.client = client
        self.stopping = False
        self.said: list[str | None] = []
        self._loop = LoopThread()
        self._loop.start()
        self._pool = ThreadPoolExecutor(4)
        self.endpoints = self._loop.call(self._open(), timeout_s=10)
        self.recorder = Recorder(books, on_stall=self.said.append)
        self.story = Story(
            books=books,
            owner="me",
            store=settings.load(settings.StoreSettings, prepared_dir=prepared),
            caller=Caller(self.endpoints, settings.load(settings.WorkerSettings, max_attempts=2, backoff_s=0.001)),
            recorder=self.recorder,
            faults=FaultTally(),
            loop=self._loop,
            stopping=lambda: self.stopping,
        )

    async def _open(self) -> Endpoints:
        endpoint = Endpoint(url="http://server", client=self.client)
        endpoint.pool.count()
        endpoint.pool.renew(Block(8, 8, 0))
        endpoint.set_state(State.UP, "ok")
        return Endpoints([endpoint], redis=self.books.client, keys=self.books.keys, owner="me", bound=8, probe_s=1)

    def generate(self, ticket: Ticket = TICKET) -> None:
        """Do a ticket's work, as a slot does."""
        self.start(ticket).result(_WAIT_S)

    def start(self, ticket: Ticket = TICKET) -> Future[None]:
        """Begin a ticket's work in a slot."""
        return self._pool.submit(self.story.generate, ticket)

    def stop(self) -> None:
        """Let the worker begin to end, as a signal does."""
        self.stopping = True
        self._loop.soon(self.endpoints.turn_away)

    def close(self) -> None:
        """End everything."""
        self.stop()
        self.story.hand_back()
        self.recorder.stop()
        self._pool.shutdown()
        self._loop.stop()


@pytest.fixture
def client() -> FakeClient:
    """Return the model client."""
    return FakeClient()


@pytest.fixture
def stage(
    books: Queue, prepared: Path, folder: DatasetFolder, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    """Return a stage whose waits are short."""
    assert folder.manifest.exists()
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    monkeypatch.setattr(module, "_PAUSED_S", 0.01)
    made = Stage(books, prepared, client)
    yield made
    made.close()


def _put(books: Queue, *ids: str, **values: Any) -> None:
    values = {"settings": "f" * 16, **values}
    books.put(DATASET, [Sample(id=id_, messages=[{"role": "user", "content": id_}], **values) for id_ in ids])


def _waits(books: Queue, id_: str = "a") -> bool:
    """Tell whether the payload is still in the work list."""
    return books.waiting_ids(DATASET, [id_]) == {id_}


def _is_free(books: Queue, id_: str = "a") -> bool:
    """Tell whether nobody has the sample, by taking it as another worker."""
    return books.take(DATASET, id_, "somebody else").state == "new"


def _lines(folder: DatasetFolder, kind: Kind = Kind.ACCEPTED) -> int:
    path = folder.lines(kind)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _live(books: Queue, owner: str = "me") -> None:
    books.beat(owner, {}, ttl_s=60)


# What is asked


def test_a_sample_is_asked_and_recorded(stage: Stage, books: Queue, ledger: Ledger, folder: DatasetFolder) -> None:
    """A ticket becomes one durable record with the worker's name, and its payload leaves the work list."""
    _put(books, "a", "b")
    stage.generate()
    assert _lines(folder) == 1
    entry = ledger.look_up(["a"])["a"]
    assert entry.kind is Kind.ACCEPTED
    assert b'"worker":"me"' in ledger.read(entry)
    assert (_waits(books, "a"), _waits(books, "b")) == (False, True)
    assert stage.story.intake.busy == 0


def test_a_rejected_sample_is_no_failure(stage: Stage, books: Queue, folder: DatasetFolder, client: FakeClient) -> None:
    """An answer that breaks a rule ends the task like an accepted one."""
    client.script = [completion("")]
    _put(books, "a")
    stage.generate()
    assert (_lines(folder), _lines(folder, Kind.REJECTED), _waits(books)) == (0, 1, False)


def test_a_sample_that_is_given_up_fails_the_task(
    stage: Stage, books: Queue, folder: DatasetFolder, client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The task fails with the fault's class and words, but only after the failure is on disk."""
    client.script = [FaultKind.BAD_REQUEST]
    _put(books, "a")
    with pytest.raises(SampleFailed, match="bad_request: fake bad_request"):
        stage.generate()
    assert (_lines(folder, Kind.FAILED), _waits(books)) == (1, False)
    assert "sample a failed: bad_request" in caplog.text


def test_a_sample_with_a_recorded_failure_is_asked_in_its_next_round(
    stage: Stage, books: Queue, ledger: Ledger, folder: DatasetFolder
) -> None:
    """A retry has a higher round than the failure on disk, and is asked; one of the same round is not."""
    ledger.commit([pen("a", Kind.FAILED, reason="timeout"), pen("b", Kind.FAILED, reason="timeout")])
    _put(books, "a", round=1)
    _put(books, "b", round=0)
    stage.generate()
    stage.generate(Ticket(DATASET, "b"))
    assert (_lines(folder), len(stage.client.requests)) == (1, 1)
    assert (_waits(books, "a"), _waits(books, "b")) == (False, False)


def test_a_sample_that_enqueue_wrote_down_is_asked(stage: Stage, books: Queue, ledger: Ledger) -> None:
    """An id that is on disk only as taken by enqueue is not finished."""
    ledger.commit([pen("a", Kind.PENDING)])
    _put(books, "a")
    stage.generate()
    assert ledger.look_up(["a"])["a"].kind is Kind.ACCEPTED


# What is not asked


def test_a_sample_that_is_gone(stage: Stage, books: Queue) -> None:
    """A ticket without a payload has been done, and is done again by nobody."""
    stage.generate()
    assert not stage.client.requests


def test_a_sample_that_another_worker_asks(stage: Stage, books: Queue) -> None:
    """A second ticket of a sample that a living worker asks is dropped; the sample stays that worker's."""
    _put(books, "a")
    _live(books, "other")
    books.take(DATASET, "a", "other")
    stage.generate()
    assert not stage.client.requests
    assert books.take(DATASET, "a", "other").state == "mine"


def test_a_sample_that_was_finished(stage: Stage, books: Queue, ledger: Ledger) -> None:
    """A redelivered ticket of a recorded sample makes no call, and its payload is dropped."""
    ledger.commit([pen("a")])
    _put(books, "a")
    stage.generate()
    assert (stage.client.requests, _waits(books)) == ([], False)


def test_an_orphan_whose_line_is_on_disk(stage: Stage, books: Queue, ledger: Ledger, folder: DatasetFolder) -> None:
    """A worker that died between the fsync and the index has finished its sample: the file itself is looked at."""
    _put(books, "opener", "a")
    stage.generate(Ticket(DATASET, "opener"))  # the ledger is open and caught up by now
    books.take(DATASET, "a", "dead worker")
    jsonl.append(folder.lines(Kind.ACCEPTED), pen("a").line)
    stage.generate()
    assert (len(stage.client.requests), _lines(folder), _waits(books)) == (1, 2, False)


def test_an_orphan_that_was_never_answered(
    stage: Stage, books: Queue, folder: DatasetFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """A dead worker's sample is asked; after a second death it is told, put behind the others, and asked then."""
    _put(books, "a", "b")
    books.take(DATASET, "b", "dead worker")
    stage.generate(Ticket(DATASET, "b"))
    assert (_lines(folder), caplog.text) == (1, "")
    for number in range(2):
        books.take(DATASET, "a", f"dead worker {number}")
    with pytest.raises(HandedBack):
        stage.generate()
    assert "died more than once while sample a was asked" in caplog.text
    assert (_lines(folder), _waits(books)) == (1, True)
    stage.generate()
    assert (_lines(folder), _waits(books)) == (2, False)


def test_a_torn_line_of_a_dead_worker(
    stage: Stage, books: Queue, folder: DatasetFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """What a dead worker left of a line is moved away and told, and the sample is asked."""
    _put(books, "opener", "a")
    stage.generate(Ticket(DATASET, "opener"))
    books.take(DATASET, "a", "dead worker")
    jsonl.append(folder.lines(Kind.ACCEPTED), pen("a").line[:-9])
    stage.generate()
    assert (_lines(folder), folder.torn.exists()) == (2, True)
    assert "was torn" in caplog.text


def test_a_sample_of_its_own(stage: Stage, books: Queue, folder: DatasetFolder) -> None:
    """A ticket that comes back to the worker that had it (its ack was lost) is worked on again by it."""
    _put(books, "a")
    _live(books)
    books.take(DATASET, "a", "me")
    stage.generate()
    assert _lines(folder) == 1


def test_a_second_copy_of_a_ticket(stage: Stage, books: Queue, client: FakeClient) -> None:
    """A copy that comes while this worker works on the ticket returns at once, and no second call is made."""
    client.latency_s = 0.5
    _put(books, "a")
    first = stage.start()
    wait_until(lambda: client.in_flight)
    assert stage.story.intake.busy == 1
    stage.generate()
    assert not first.done()
    first.result(_WAIT_S)
    assert len(client.requests) == 1


def test_a_paused_dataset_takes_its_ticket_back(stage: Stage, books: Queue) -> None:
    """A ticket that was delivered before its dataset was paused goes back to the queue unasked."""
    _put(books, "a")
    books.pause(DATASET, "by hand")
    with pytest.raises(HandedBack):
        stage.generate()
    assert not stage.client.requests
    books.resume(DATASET)
    assert _is_free(books)


def test_a_dataset_that_asks_for_a_missing_model_is_paused(
    stage: Stage, books: Queue, client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the server has other models the dataset is paused with that as the reason, and the ticket goes back."""
    client.script = [FaultKind.NOT_FOUND]
    stage.endpoints.all[0].models = ("other",)
    _put(books, "a")
    with pytest.raises(HandedBack):
        stage.generate()
    assert "has no model 'toy' but other" in str(books.pause_reason(DATASET))
    assert "dataset d is paused" in caplog.text
    books.resume(DATASET)
    assert _is_free(books)


# Deaths


def _suspect(books: Queue, *ids: str) -> None:
    """Let two workers die over samples."""
    _put(books, *ids)
    for owner in ("one", "two", "three"):
        for id_ in ids:
            books.take(DATASET, id_, f"dead worker {owner}")
    for id_ in ids:
        books.release(DATASET, id_, "dead worker three")


def test_poison_is_given_up_unasked(
    stage: Stage, books: Queue, ledger: Ledger, folder: DatasetFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """A sample over which a third worker died alone fails with that as its record, and no request is made."""
    _suspect(books, "a")
    assert books.take(DATASET, "a", "third dead worker").sample
    with pytest.raises(SampleFailed, match="poison: 3 workers or model servers died while this sample was asked"):
        stage.generate()
    assert (stage.client.requests, _waits(books), _lines(folder, Kind.FAILED)) == ([], False, 1)
    record = ledger.read(ledger.look_up(["a"])["a"])
    assert b'"reason":"poison"' in record
    assert b'"attempts":3,' in record
    assert b"producer retry d --fault poison asks it again" in record
    assert "sample a failed: poison" in caplog.text


def test_poison_whose_answer_is_on_disk_is_none(
    stage: Stage, books: Queue, ledger: Ledger, folder: DatasetFolder
) -> None:
    """What was recorded before the last death counts: nothing is given up."""
    _suspect(books, "a")
    assert books.take(DATASET, "a", "third dead worker").sample
    ledger.commit([pen("a")])
    stage.generate()
    assert (_lines(folder), _lines(folder, Kind.FAILED), _waits(books)) == (1, 0, False)


def test_a_suspect_waits_for_the_lane_in_the_queue(stage: Stage, books: Queue, folder: DatasetFolder) -> None:
    """While another suspect is asked a suspect's ticket goes back after a while, and later it is asked."""
    _suspect(books, "a", "b")
    _live(books, "other")
    assert books.take(DATASET, "b", "other").sample
    with pytest.raises(HandedBack):
        stage.generate()
    assert (stage.client.requests, _waits(books)) == ([], True)
    books.release(DATASET, "b", "other")
    stage.generate()
    assert _lines(folder) == 1


def test_a_wait_for_the_lane_ends_with_the_worker(stage: Stage, books: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspect that waits for the lane goes back at once when the worker is told to end."""
    monkeypatch.setattr(module, "_LANE_WAIT_S", 60.0)
    _suspect(books, "a", "b")
    _live(books, "other")
    books.take(DATASET, "b", "other")
    slot = stage.start()
    wait_until(lambda: stage.story.intake.busy)
    stage.stop()
    with pytest.raises(HandedBack):
        slot.result(_WAIT_S)


def test_a_servers_death_is_counted_and_the_second_hands_the_sample_back(
    stage: Stage, books: Queue, client: FakeClient, folder: DatasetFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """A sample goes on after the first death of its server; after the second its ticket goes behind the others."""
    endpoint = stage.endpoints.all[0]

    def dying(_request: Request) -> FaultKind:
        client.alive = False
        return FaultKind.CONNECTION_LOST

    def come_back() -> None:
        client.alive = True
        endpoint.set_state(State.UP, "ok")
        stage.endpoints.gate.hand_out()

    client.script = [dying, dying]
    _put(books, "a")
    _live(books)
    slot = stage.start()
    wait_until(lambda: endpoint.state is State.DOWN)
    assert (stage.story.intake.busy, slot.done()) == (1, False)
    stage._loop.soon(come_back)
    with pytest.raises(HandedBack):
        slot.result(_WAIT_S)
    assert "died more than once while sample a was asked" in caplog.text
    assert (_waits(books), books.waiting(DATASET).in_flight) == (True, 0)
    stage._loop.soon(come_back)
    stage.generate()
    assert _lines(folder) == 1


# Settings


def test_settings_come_from_the_manifest_where_redis_has_none(
    stage: Stage, books: Queue, ledger: Ledger, client: FakeClient
) -> None:
    """After a wipe of Redis the settings that a sample was enqueued with are found in the folder."""
    generation = settings.generation_from_content({"model": "from-manifest", "max_tokens": 5})
    fingerprint = manifest.fix_settings(ledger, DATASET, generation, {}, new=True).fingerprint
    _put(books, "a", "b", settings=fingerprint)
    stage.generate()
    stage.generate(Ticket(DATASET, "b"))
    assert [request.model for request in client.requests] == ["from-manifest"] * 2
    assert client.requests[0].sampling == {"max_tokens": 5}


def test_settings_that_nobody_knows(stage: Stage, books: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """A sample whose settings are nowhere is not asked with others: it waits for the next enqueue."""
    _put(books, "a", settings="0" * 16)
    stage.generate()
    assert (stage.client.requests, _waits(books)) == ([], False)
    assert "the settings 0000000000000000 of sample a are not known; run producer enqueue again" in caplog.text


def test_settings_of_another_version_pause_the_dataset(stage: Stage, books: Queue) -> None:
    """Settings that this version cannot read pause their dataset in one sentence, and cost the sample nothing."""
    books.register(DATASET, "e" * 16, {"max_tokens": "many"})
    _put(books, "a", settings="e" * 16)
    _live(books)
    with pytest.raises(HandedBack):
        stage.generate()
    assert "do not fit this version" in str(books.pause_reason(DATASET))
    books.resume(DATASET)
    assert _is_free(books)


# Trouble


def test_a_bug_lets_go_of_the_sample(stage: Stage, books: Queue, client: FakeClient) -> None:
    """An unexpected error reaches the task, and the sample is free for whoever gets its ticket next."""
    client.script = [KeyError("oops")]
    _put(books, "a")
    _live(books)
    with pytest.raises(KeyError, match="oops"):
        stage.generate()
    assert (_waits(books), stage.story.intake.busy) == (True, 0)
    assert _is_free(books)


def test_a_bug_that_comes_back_pauses_the_dataset(
    stage: Stage, books: Queue, client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The third unexpected error of a sample is no chance: its dataset waits for a person, and nothing is lost."""
    client.script = [KeyError("oops")] * 4
    _put(books, "a")
    for _ in range(2):
        with pytest.raises(KeyError):
            stage.generate()
    assert books.pause_reason(DATASET) is None
    with pytest.raises(HandedBack):
        stage.generate()
    assert "sample a ended in an unexpected error 3 times: KeyError; see" in str(books.pause_reason(DATASET))
    assert "oops" not in caplog.text
    assert "Traceback" in caplog.text
    books.resume(DATASET)
    with pytest.raises(KeyError):
        stage.generate()
    assert _waits(books)


def test_a_folder_that_cannot_be_opened_is_waited_for(
    stage: Stage, books: Queue, folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the folder cannot be used no call is made and the reason is told; then the work goes on by itself."""
    monkeypatch.setattr(module, "_MAX_TRIES", 1000)
    aside = folder.path.rename(folder.path.with_name("aside"))
    folder.path.write_text("in the way")
    _put(books, "a")
    slot = stage.start()
    wait_until(lambda: stage.recorder.stalled)
    assert f"{folder.path} is not the folder of the dataset 'd'" in str(stage.recorder.stalled)
    assert "No new request is sent for dataset d." in caplog.text
    assert stage.recorder.waits(stage.story.intake.datasets)
    assert not stage.client.requests
    folder.path.unlink()
    aside.rename(folder.path)
    slot.result(_WAIT_S)
    assert _lines(folder) == 1
    assert (stage.recorder.stalled, stage.said) == (None, [])


def test_a_folder_that_stays_away_lets_other_datasets_work(
    stage: Stage, books: Queue, folder: DatasetFolder, prepared: Path
) -> None:
    """A dataset whose folder is away gives its ticket back after some tries, and never stops another's requests."""
    books.register("e", "f" * 16, {"model": "toy"})
    other = dataset_folder(prepared, "e")
    other.path.mkdir()
    other.manifest.write_bytes(folder.manifest.read_bytes())
    away = folder.path.rename(folder.path.with_name("away"))
    _put(books, "a")
    books.put("e", [Sample(id="b", messages=[{"role": "user", "content": "b"}], settings="f" * 16)])
    slot = stage.start()
    wait_until(lambda: stage.recorder.stalled)
    stage.generate(Ticket("e", "b"))
    with pytest.raises(HandedBack):
        slot.result(_WAIT_S)
    assert (_lines(other), stage.said, stage.recorder.waits({"e"})) == (1, [], False)
    assert (books.flights(DATASET), len(stage.client.requests)) == ({}, 1)
    away.rename(folder.path)
    stage.generate()
    assert (_lines(folder), stage.recorder.stalled) == (1, None)


def test_nothing_is_asked_whose_answer_could_not_be_recorded(stage: Stage, books: Queue, folder: DatasetFolder) -> None:
    """A sample that waits for a permit as its dataset's folder begins to refuse is not asked, and goes back."""
    _put(books, "a", "b")
    pool = stage.endpoints.all[0].pool
    pool.ceiling = 0
    slot = stage.start()
    wait_until(lambda: stage.endpoints.gate.waiting == 1)
    stage.recorder.stall(DATASET, "write", UnwritableError("no rights."))
    pool.ceiling = 8
    stage._loop.soon(stage.endpoints.gate.hand_out)
    with pytest.raises(HandedBack):
        slot.result(_WAIT_S)
    with pytest.raises(HandedBack):
        stage.generate(Ticket(DATASET, "b"))
    assert (stage.client.requests, books.flights(DATASET), pool.in_use) == ([], {}, 0)
    stage.recorder.stall(DATASET, "write", None)
    stage.generate()
    assert _lines(folder) == 1


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_worker_that_ends_while_it_waits_for_the_disk(
    stage: Stage, books: Queue, folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch, *, is_locked: bool
) -> None:
    """A ticket whose folder is away or locked goes back when the worker ends, and its sample is blamed for nothing."""
    monkeypatch.setattr(module, "LOCK_PATIENCE_S", 0.2)
    monkeypatch.setattr(module, "_MAX_TRIES", 1000)
    _put(books, "a")
    with contextlib.ExitStack() as trouble:
        if is_locked:
            trouble.enter_context(FolderLock(folder.lock).held())
        else:
            shutil.rmtree(folder.path)
        slot = stage.start()
        wait_until(lambda: stage.recorder.stalled)
        assert books.flights(DATASET) == {}
        stage.stop()
        with pytest.raises(HandedBack):
            slot.result(_WAIT_S)
    assert books.flights(DATASET) == {}
    assert books.take(DATASET, "a", "somebody else").deaths == 0


def test_a_worker_that_ends_while_it_catches_up_blames_nobody(
    stage: Stage, books: Queue, folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orphan that waits for its folder's lock goes back at the worker's end with no death but its owner's."""
    monkeypatch.setattr(module, "LOCK_PATIENCE_S", 0.2)
    _put(books, "opener", "a")
    stage.generate(Ticket(DATASET, "opener"))
    books.take(DATASET, "a", "dead worker")
    with FolderLock(folder.lock).held():
        slot = stage.start()
        wait_until(lambda: stage.recorder.stalled)
        stage.stop()
        with pytest.raises(HandedBack):
            slot.result(_WAIT_S)
    assert books.flights(DATASET) == {}
    assert books.take(DATASET, "a", "somebody else").deaths == 1


def test_redis_away_is_waited_for(
    new_redis: RedisFactory, prepared: Path, folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ticket that was delivered just before Redis went away is worked on when it is back."""
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    server = new_redis(aof=True)
    books = Queue(server.client(), Keys("t:"))
    books.register(DATASET, "f" * 16, {"model": "toy"})
    _put(books, "a")
    stage = Stage(books, prepared, FakeClient())
    try:
        server.kill()
        slot = stage.start()
        with pytest.raises(TimeoutError):
            slot.result(0.3)
        server.start()
        slot.result(_WAIT_S)
        assert _lines(folder) == 1
        assert not _waits(books)
        server.kill()
        slot = stage.start()
        stage.stop()
        with pytest.raises(HandedBack):
            slot.result(_WAIT_S)
    finally:
        stage.close()


# The worker's end


def test_a_worker_that_ends_takes_nothing_new(stage: Stage, books: Queue) -> None:
    """After the signal a delivered ticket goes back untouched."""
    _put(books, "a")
    stage.stopping = True
    with pytest.raises(HandedBack):
        stage.generate()
    assert _is_free(books)


def test_running_requests_can_be_handed_back(stage: Stage, books: Queue, client: FakeClient) -> None:
    """Handing back cancels the calls at the server and frees the samples, whose slots end at once."""
    client.latency_s = 60.0
    _put(books, "a", "b")
    _live(books)
    slots = [stage.start(Ticket(DATASET, id_)) for id_ in ("a", "b")]
    wait_until(lambda: client.in_flight == 2)
    stage.stop()
    assert stage.story.hand_back() == 2
    for slot in slots:
        with pytest.raises(HandedBack):
            slot.result(_WAIT_S)
    assert client.in_flight == 0
    assert stage.story.hand_back() == 0
    assert _is_free(books, "a")
    assert _is_free(books, "b")


def test_running_requests_may_finish_before_the_deadline(
    stage: Stage, books: Queue, client: FakeClient, folder: DatasetFolder
) -> None:
    """After the signal a request that runs is answered and recorded, and one that waits for a permit goes back."""
    client.gate = asyncio.Event()
    _put(books, "a", "b")
    stage.endpoints.all[0].pool.ceiling = 1
    first = stage.start()
    wait_until(lambda: client.in_flight == 1)
    second = stage.start(Ticket(DATASET, "b"))
    wait_until(lambda: stage.endpoints.gate.waiting == 1)
    stage.stop()
    with pytest.raises(HandedBack):
        second.result(_WAIT_S)
    assert not first.done()
    stage._loop.soon(client.gate.set)
    first.result(_WAIT_S)
    assert (_lines(folder), _is_free(books, "b")) == (1, True)


def test_many_slots_at_once(stage: Stage, books: Queue, folder: DatasetFolder) -> None:
    """Tickets that many slots work on, each twice, are recorded once each."""
    ids = [f"s{number}" for number in range(40)]
    _put(books, *ids)
    slots = [stage.start(Ticket(DATASET, id_)) for id_ in ids * 2]
    for slot in slots:
        slot.result(_WAIT_S)
    assert (_lines(folder), len(stage.client.requests), books.depth(DATASET)) == (40, 40, 0)
