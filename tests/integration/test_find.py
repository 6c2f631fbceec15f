"""A sample is found wherever it is: recorded in several rounds, waiting in Redis, being asked, or nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from app import broker as brokers
from app import find
from app.errors import StoreError, UsageError
from app.find import find_sample
from app.ledger import Ledger
from app.lock import FolderLock
from app.places import DatasetFolder, Keys, dataset_folder
from app.queue import Queue
from app.records import Kind, Sample
from tests.conftest import Broker, RedisFactory
from tests.support.folders import pen


@pytest.fixture
def queue(broker: Broker) -> Iterator[Queue]:
    """Return a queue with one dataset."""
    client = brokers.connect(brokers.parse(broker.url))
    made = Queue(client, Keys(broker.key_prefix))
    made.register("A Set", "f", {})
    yield made
    client.close()


@pytest.fixture
def folder(tmp_path: Path) -> DatasetFolder:
    """Return the folder of the dataset `A Set`, whose name is not its folder's, with a manifest."""
    made = dataset_folder(tmp_path, "A Set")
    made.path.mkdir()
    made.manifest.write_bytes(msgspec.json.encode({"dataset": "A Set", "created_at": 1.0}))
    return made


def ask(queue: Queue, id_: str, round_: int = 0) -> None:
    """Let a sample wait in Redis."""
    queue.put("A Set", [Sample(id=id_, messages=[{"role": "user", "content": f"What is {id_}?"}], round=round_)])


def test_every_round_of_a_recorded_sample(queue: Queue, folder: DatasetFolder) -> None:
    """The newest record counts; those that it replaced stand before it, oldest first, from whatever file."""
    with Ledger.open(folder) as ledger:
        ledger.commit([pen("s1", Kind.PENDING), pen("s11", Kind.PENDING)])
        ledger.commit([pen("s11", Kind.FAILED, reason="timeout"), pen("s1", Kind.FAILED, reason="timeout")])
        ledger.commit([pen("s1", Kind.REJECTED, reason="empty", round_=1, content='{"id":"s1","fake":1}')])
        ledger.commit([pen("s1", Kind.FAILED, reason="reset", round_=2)])
        ledger.commit([pen("s1", Kind.ACCEPTED, round_=3, tokens=5)])
    found = find_sample(queue, folder, "s1")
    assert (found.state, found.dataset, found.waits, found.flight) == ("accepted", "A Set", False, None)
    told = [(one["round"], one["verdict"], one["reason"]) for one in found.rounds]
    assert told == [
        (0, "failed", "timeout"),
        (1, "rejected", "empty"),
        (2, "failed", "reset"),
        (3, "accepted", None),
    ]
    assert found.record is found.rounds[-1]
    assert found.messages == [{"role": "user", "content": "Hi"}]


def test_a_file_that_is_cut_while_it_is_read(folder: DatasetFolder, tmp_path: Path) -> None:
    """Earlier rounds are read while a repair cuts their file again and again; what is there is told, nothing dies."""
    with Ledger.open(folder) as ledger:
        ledger.commit([pen("s1", Kind.FAILED, reason="timeout"), pen("s2", Kind.FAILED, reason="timeout")])
        ledger.commit([pen("s1", Kind.ACCEPTED, round_=1, tokens=5)])
    lines = folder.lines(Kind.FAILED)
    whole = lines.read_bytes() + (b'{"id":"s3","long":"' + b"x" * 1000 + b'"}\n') * 4000
    script = tmp_path / "read.py"
    script.write_text(_READER, encoding="utf-8")
    lines.write_bytes(whole)
    with subprocess.Popen([sys.executable, str(script), str(folder.path)], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"begun\n"
        while reader.poll() is None:
            os.truncate(lines, 100)
            lines.write_bytes(whole)
        said = reader.stdout.read()
    assert reader.returncode == 0
    assert said.splitlines()[-1] == b"accepted"


_READER = """
import sys, time
from pathlib import Path
from app.find import _earlier_rounds
from app.index import Entry
from app.places import DatasetFolder
from app.records import Kind

print("begun", flush=True)
until = time.monotonic() + 3
while time.monotonic() < until:
    list(_earlier_rounds(DatasetFolder(Path(sys.argv[1])), "s1", Entry(Kind.ACCEPTED, "", 1, 0, 10, 5)))
print("accepted")
"""


def test_a_folder_that_is_locked_for_long(queue: Queue, folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a folder under a long repair ends with a sentence in seconds; it blocks no thread of the page."""
    monkeypatch.setattr(find, "LOOK_PATIENCE_S", 0.1)
    with Ledger.open(folder) as ledger:
        ledger.commit([pen("s1", Kind.FAILED, reason="timeout")])
    with FolderLock(folder.lock).held(), pytest.raises(StoreError, match="is locked by"):
        find_sample(queue, folder, "s1")
    assert find_sample(queue, folder, "s1").state == "failed"


def test_a_sample_that_waits_and_one_that_is_asked(queue: Queue, folder: DatasetFolder) -> None:
    """The prompt comes out of Redis, with the worker that asks it and whether that one lives."""
    with Ledger.open(folder) as ledger:
        ledger.commit([pen("s1", Kind.PENDING), pen("s2", Kind.PENDING)])
    ask(queue, "s1")
    ask(queue, "s2")
    queue.beat("w1", {"busy": 1}, ttl_s=60)
    began = time.time()
    queue.take("A Set", "s2", "w1")
    waiting, asked = find_sample(queue, folder, "s1"), find_sample(queue, folder, "s2")
    assert (waiting.state, waiting.waits, waiting.rounds) == ("queued", True, [])
    assert waiting.messages == [{"role": "user", "content": "What is s1?"}]
    assert asked.state == "in_flight"
    assert asked.flight is not None
    assert (asked.flight.owner, asked.flight.alive) == ("w1", True)
    assert asked.flight.since == pytest.approx(began, abs=30)
    queue.part("w1")
    orphan = find_sample(queue, folder, "s2")
    assert orphan.state == "queued"
    assert orphan.flight is not None
    assert not orphan.flight.alive


def test_a_failed_sample_that_is_asked_again(queue: Queue, folder: DatasetFolder) -> None:
    """It waits, and its failure is still told."""
    with Ledger.open(folder) as ledger:
        ledger.commit([pen("s1", Kind.FAILED, reason="timeout")])
    ask(queue, "s1", 1)
    found = find_sample(queue, folder, "s1")
    assert (found.state, found.waits) == ("queued", True)
    assert [one["reason"] for one in found.rounds] == ["timeout"]


def test_a_sample_that_nobody_has(queue: Queue, folder: DatasetFolder) -> None:
    """A known id that is neither recorded nor queued is missing, a refused row is shown, an unknown id is an error."""
    with Ledger.open(folder) as ledger:
        ledger.commit([pen("s1", Kind.PENDING), pen("row9", Kind.REFUSED, reason="no_prompt")])
    assert find_sample(queue, folder, "s1").state == "missing"
    refused = find_sample(queue, folder, "row9")
    assert (refused.state, refused.rounds[0]["reason"], refused.messages) == ("refused", "no_prompt", None)
    with pytest.raises(UsageError, match="knows no sample 'other'; check the id"):
        find_sample(queue, folder, "other")


def test_a_dataset_that_only_redis_has(queue: Queue, tmp_path: Path) -> None:
    """Without its folder a waiting sample is found all the same; a dataset that nobody knows is an error."""
    ask(queue, "s1")
    assert find_sample(queue, dataset_folder(tmp_path, "A Set"), "s1").state == "queued"
    with pytest.raises(UsageError, match="is no dataset"):
        find_sample(queue, dataset_folder(tmp_path, "B Set"), "s1")


def test_without_redis_the_files_speak(new_redis: RedisFactory, folder: DatasetFolder) -> None:
    """What is recorded is shown; whether something waits is unknown, and said to be."""
    server = new_redis()
    client = brokers.connect(brokers.parse(server.url))
    gone = Queue(client, Keys("x:"))
    server.stop()
    with Ledger.open(folder) as ledger:
        ledger.commit([pen("s1", Kind.FAILED, reason="timeout"), pen("s2", Kind.PENDING)])
    for queue in (gone, None):
        found = find_sample(queue, folder, "s1")
        assert (found.state, found.waits, found.rounds[0]["reason"]) == ("failed", None, "timeout")
        assert find_sample(queue, folder, "s2").state == "unknown"
        with pytest.raises(UsageError, match="Redis could not be asked"):
            find_sample(queue, folder, "s3")
    client.close()
