"""A whole worker process's inside: it refuses what cannot work, works, tells of itself, and ends cleanly."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery

import app as ground_floor
from app import celery as mill_celery
from app.broker import parse
from app.errors import BrokerUnreachableError, DiskFullError, SettingError, StoreError, UnwritableError, UsageError
from app.places import DatasetFolder
from app.queue import Queue
from app.records import Kind, Sample, Ticket
from producer.ports import free_port
from tests.conftest import ModelServerFactory
from tests.support.folders import largest_file, pen
from tests.support.processes import wait_until
from workers.intake import HandedBack
from workers.mill import Mill, raise_file_limit
from workers.permits import Gate
from workers.reporter import Reporter

DATASET = "d"
_WAIT_S = 30.0


@pytest.fixture
def celery(mill_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """Return the product's Celery app; the test's variables count for this process."""
    for name, value in mill_env.items():
        monkeypatch.setenv(name, value)
    made = mill_celery.make_app()
    yield made
    made.pool.force_close_all()
    made.close()


Build = Callable[..., Mill]


@pytest.fixture
def build(
    celery: Celery, folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch, mill_env: dict[str, str]
) -> Iterator[Build]:
    """Build mills, with variables of the test's own; they are ended after it."""
    assert folder.manifest.exists()
    made: list[Mill] = []

    def make(*, start: bool = True, **variables: str) -> Mill:
        for name, value in {**mill_env, **variables}.items():
            monkeypatch.setenv(name, value)
        mill = Mill(celery, owner=f"w@h/{len(made)}", slots=4)
        made.append(mill)
        if start:
            mill.start()
        return mill

    yield make
    for mill in made:
        if mill._story is None:  # it was not started
            mill._loop.stop()
            mill._client.close()
        elif not mill._loop.loop.is_closed():
            mill.stop()


def _put(books: Queue, *ids: str) -> None:
    books.put(DATASET, [Sample(id=id_, messages=[{"role": "user", "content": id_}], settings="f" * 16) for id_ in ids])


@pytest.fixture
def list_(books: Queue) -> Queue:
    """Return the work list, whose dataset asks for the model that the server lists."""
    books.register(DATASET, "f" * 16, {})
    return books


# What is refused


def test_a_worker_needs_to_know_a_server(build: Build) -> None:
    """Without MILL_MODEL_URLS a worker does not start, and the variable is named."""
    with pytest.raises(SettingError, match=r"MILL_MODEL_URLS is not set; .*http://127\.0\.0\.1:8000/v1"):
        build()


def test_a_worker_needs_redis(build: Build, model_server: ModelServerFactory) -> None:
    """Without Redis a worker does not start, and the address is named."""
    model_server()
    url = f"redis://127.0.0.1:{free_port()}/0"
    with pytest.raises(BrokerUnreachableError, match=url):
        build(MILL_REDIS_URL=url)


def test_a_folder_that_cannot_be_written_is_refused_before_any_request(
    build: Build, list_: Queue, folder: DatasetFolder, model_server: ModelServerFactory
) -> None:
    """A dataset with work whose folder cannot be used stops the worker at its start; one without work does not."""
    server = model_server()
    folder.torn.mkdir()
    build(start=False)
    _put(list_, "a")
    with pytest.raises(UnwritableError, match=str(folder.torn)):
        build(start=False)
    shutil.rmtree(folder.path)
    with pytest.raises(StoreError, match=r"has no manifest\.json; set this worker's MILL_PREPARED_DIR"):
        build(start=False)
    assert not folder.path.exists()
    assert server.stats["paths"] == {}


def test_folders_of_hidden_states_are_left_to_those_who_make_them(
    build: Build, list_: Queue, model_server: ModelServerFactory
) -> None:
    """A worker that asks model servers, and never writes hidden states, starts where their folder is not."""
    model_server()
    list_.register("d.hidden", "f" * 16, {})
    list_.put("d.hidden", [Sample(id="a", messages=[], settings="f" * 16)])
    assert build(start=False).describe().startswith("4 slots")


def test_too_little_space_is_refused(
    build: Build, list_: Queue, model_server: ModelServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with less space than records need stops the worker at its start."""
    model_server()
    _put(list_, "a")
    monkeypatch.setattr("app.settings.MIN_FREE_DISK_BYTES", 2**62)
    with pytest.raises(DiskFullError, match="free some space"):
        build(start=False)


def test_a_mill_that_has_not_started_does_no_work(build: Build, model_server: ModelServerFactory) -> None:
    """Work before the start is a bug and says so; ending before the start is none."""
    model_server()
    mill = build(start=False)
    with pytest.raises(RuntimeError, match="has not started"):
        mill.generate(Ticket(DATASET, "a"))
    assert mill._hand_back() == 0
    mill._turn_away()
    mill._on_stall("full")


# Work


def test_tickets_become_records(
    build: Build, list_: Queue, folder: DatasetFolder, model_server: ModelServerFactory
) -> None:
    """A started mill turns tickets into records through a real server, on its own permits, and drops their payloads."""
    server = model_server(latency_s=0.05)
    ids = [f"s{number}" for number in range(12)]
    _put(list_, *ids)
    mill = build(MILL_MAX_IN_FLIGHT="3")
    with ThreadPoolExecutor(6) as slots:
        for slot in [slots.submit(mill.generate, Ticket(DATASET, id_)) for id_ in ids]:
            slot.result(_WAIT_S)
    records = [json.loads(line) for line in folder.lines(Kind.ACCEPTED).read_bytes().splitlines()]
    assert sorted(record["id"] for record in records) == sorted(ids)
    assert {record["worker"] for record in records} == {"w@h/0"}
    assert {record["model"] for record in records} == {"toy-model"}
    assert server.peak_in_flight == 3
    assert list_.depth(DATASET) == 0


def test_a_worker_tells_of_itself(build: Build, list_: Queue, model_server: ModelServerFactory) -> None:
    """The heartbeat says who, where, how much and how it is, and the ready line names servers without their keys."""
    server = model_server(latency_s=60)
    url = server.url.replace("http://", "http://me:secret@")
    _put(list_, "a")
    mill = build(MILL_MODEL_URLS=url)
    assert mill.describe() == (
        f"4 slots; model servers: {server.url}, vLLM 0.33.0 (at most 128 requests each); Redis: {mill._url.shown}"
    )
    with ThreadPoolExecutor(1) as slots:
        slot = slots.submit(mill.generate, Ticket(DATASET, "a"))
        wait_until(lambda: server.in_flight, _WAIT_S)
        beat = mill._heartbeat()
        assert (beat["node"], beat["pid"], beat["slots"], beat["busy"]) == ("w@h/0", os.getpid(), 4, 1)
        assert (beat["version"], beat["state"], beat["note"]) == (ground_floor.__version__, "running", None)
        (name,) = beat["in_flight"]
        assert (beat["in_flight"][name], beat["bound"][name]) == (1, 128)
        assert beat["held"][name] >= 1
        assert (beat["backend"], beat["templates"]) == ({name: "vllm 0.33.0"}, {})
        assert "secret" not in json.dumps(beat) + mill.describe()
        wait_until(lambda: list_.workers()[0]["busy"] == 1, what="a heartbeat in Redis that says so")

        mill.drain.signalled(sig="SIGQUIT")
        assert mill._heartbeat()["state"] == "draining"
        with pytest.raises(HandedBack):
            slot.result(_WAIT_S)
    wait_until(lambda: server.aborted == 1, what="a server that heard of it")


def test_progress_is_written(
    build: Build, list_: Queue, folder: DatasetFolder, model_server: ModelServerFactory
) -> None:
    """The first worker writes the datasets' progress files by itself."""
    model_server()
    _put(list_, "a", "b")
    mill = build(MILL_PROGRESS_S="0.1")
    mill.generate(Ticket(DATASET, "a"))
    wait_until(folder.progress.exists, _WAIT_S)

    def accepted() -> bool:
        return bool(json.loads(folder.progress.read_bytes())["totals"]["counts"]["accepted"] == 1)

    wait_until(accepted, _WAIT_S, "progress that counts the record")


def test_without_datasets_there_is_no_progress(list_: Queue, folder: DatasetFolder) -> None:
    """A worker that waits for its first dataset writes nothing, and writes as soon as there is one."""
    list_.client.flushall()
    reporter = Reporter(list_, folder.path.parent, parse("redis://127.0.0.1/0"))
    reporter.write()
    assert not folder.progress.exists()
    assert not folder.progress_log.exists()
    list_.register(DATASET, "f" * 16, {})
    reporter.write()
    assert folder.progress.exists()
    assert folder.progress_log.exists()


def test_a_lost_ticket_is_published_again(build: Build, list_: Queue, model_server: ModelServerFactory) -> None:
    """A payload without a ticket gets one from the worker's sweep."""
    model_server()
    _put(list_, "a")
    build()
    wait_until(lambda: list_.client.llen(list_.keys.queue(DATASET)) == 1, _WAIT_S, "a new ticket")


def test_a_full_disk_stops_requests_and_not_the_worker(
    build: Build, list_: Queue, folder: DatasetFolder, model_server: ModelServerFactory
) -> None:
    """While the disk is full no request is sent and the heartbeat says why; then all goes on by itself."""
    server = model_server()
    _put(list_, "a", "b")
    mill = build()
    folder.path.mkdir(parents=True, exist_ok=True)  # progress may have come first
    folder.lines(Kind.ACCEPTED).write_bytes(pen("big", content="x" * 2**20).line)
    most = folder.lines(Kind.ACCEPTED).stat().st_size + 10
    with ThreadPoolExecutor(2) as slots, largest_file(most):
        first = slots.submit(mill.generate, Ticket(DATASET, "a"))
        wait_until(lambda: _gate(mill).shut, _WAIT_S, "a gate that is shut")
        second = slots.submit(mill.generate, Ticket(DATASET, "b"))
        wait_until(lambda: _gate(mill).waiting, _WAIT_S, "a call that waits")
        beat = mill._heartbeat()
        assert beat["state"] == "waiting for disk"
        assert "cannot grow" in beat["note"]
        assert server.stats["total"] == 1
    first.result(_WAIT_S)
    second.result(_WAIT_S)
    assert mill._heartbeat()["state"] == "running"
    assert folder.lines(Kind.ACCEPTED).read_bytes().count(b"\n") == 3


def test_a_mill_ends_cleanly(build: Build, list_: Queue, model_server: ModelServerFactory) -> None:
    """After `stop` no thread of the mill runs, and Redis knows neither its heartbeat nor its permits."""
    model_server()
    _put(list_, "a")
    mill = build()
    mill.generate(Ticket(DATASET, "a"))
    mill.stop()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mill-")]
    assert list_.workers() == []
    assert not list(list_.client.scan_iter(f"{list_.keys.prefix}permits:*"))


def _gate(mill: Mill) -> Gate:
    assert mill._endpoints is not None
    return mill._endpoints.gate


# Open files


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """Set this process's soft limit on open files; it is put back after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_on_open_files_is_raised_as_far_as_needed(file_limit: Callable[[int], None]) -> None:
    """The soft limit becomes what the slots need, and is left alone where it is enough."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    file_limit(256)
    raise_file_limit(64)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, hard)
    raise_file_limit(100)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (364, hard)


def test_too_many_slots_for_the_hard_limit_are_refused(file_limit: Callable[[int], None]) -> None:
    """Slots that need more files than this process may ever have are refused, with the number that fits."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    file_limit(256)
    with pytest.raises(UsageError) as caught:
        raise_file_limit(hard)
    assert str(caught.value) == (
        f"{hard} slots need {3 * hard + 64} open files and this process may have {hard}; raise the limit "
        f"(ulimit -n {3 * hard + 64}) or lower the concurrency (-c {(hard - 64) // 3})."
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256
