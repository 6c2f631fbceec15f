"""The story of an extract ticket up to the model: what a worker's end, a pause and a folder's trouble leave behind."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from app import manifest, settings
from app.ledger import Ledger
from app.lock import FolderLock
from app.places import dataset_folder
from app.queue import Queue
from app.records import Kind, Sample, Ticket
from tests.support.folders import pen
from tests.support.processes import wait_until
from workers import intake
from workers.extract.engine import Engine
from workers.extract.story import ExtractStory
from workers.intake import HandedBack
from workers.recorder import Recorder

DATASET = "d.hidden"
TICKET = Ticket(DATASET, "a")
_WAIT_S = 20.0


class Stage:
    """A story over a real work list and folder, with an engine that no sample reaches."""

    def __init__(self, books: Queue, prepared: Path) -> None:
        self.books = books
        self.folder = dataset_folder(prepared, DATASET)
        self.stopping = False
        self.recorder = Recorder(books, on_stall=lambda _why: None)
        self._pool = ThreadPoolExecutor(2)
        self.story = ExtractStory(
            books=books,
            owner="me",
            store=settings.load(settings.StoreSettings, prepared_dir=prepared),
            recorder=self.recorder,
            engine=Engine("cpu"),
            stopping=lambda: self.stopping,
        )
        books.register(DATASET, "f" * 16, {})
        books.put(DATASET, [Sample(id="a", messages=[], settings="f" * 16)])
        with Ledger.open(self.folder) as ledger:
            manifest.fix_settings(ledger, DATASET, settings.generation_from_content({}), {}, new=True)

    def start(self) -> Future[None]:
        """Begin the ticket's work in a slot."""
        return self._pool.submit(self.story.extract, TICKET)

    def close(self) -> None:
        """End everything."""
        self.stopping = True
        self.recorder.stop()
        self._pool.shutdown()


@pytest.fixture
def stage(books: Queue, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Return a stage whose waits are short."""
    monkeypatch.setattr(intake, "_RETRY_S", 0.05)
    monkeypatch.setattr(intake, "_PAUSED_S", 0.01)
    monkeypatch.setattr(intake, "LOCK_PATIENCE_S", 0.2)
    made = Stage(books, prepared)
    yield made
    made.close()


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_worker_that_ends_while_it_waits_for_the_disk(
    stage: Stage, books: Queue, monkeypatch: pytest.MonkeyPatch, *, is_locked: bool
) -> None:
    """A ticket whose folder is away or locked goes back when the worker ends, and its sample is blamed for nothing."""
    monkeypatch.setattr(intake, "_MAX_TRIES", 1000)
    with contextlib.ExitStack() as trouble:
        if is_locked:
            trouble.enter_context(FolderLock(stage.folder.lock).held())
        else:
            shutil.rmtree(stage.folder.path)
        slot = stage.start()
        wait_until(lambda: stage.recorder.stalled)
        assert (books.flights(DATASET), stage.story.intake.datasets) == ({}, {DATASET})
        stage.stopping = True
        with pytest.raises(HandedBack):
            slot.result(_WAIT_S)
    assert books.flights(DATASET) == {}
    assert books.take(DATASET, "a", "somebody else").deaths == 0


def test_a_paused_dataset_takes_its_ticket_back(stage: Stage, books: Queue) -> None:
    """A ticket that its worker had before the pause goes back, and any worker may have the sample after it."""
    books.beat("me", {}, ttl_s=60)
    books.take(DATASET, "a", "me")
    books.pause(DATASET, "by hand")
    with pytest.raises(HandedBack):
        stage.start().result(_WAIT_S)
    assert books.flights(DATASET) == {}
    books.resume(DATASET)
    assert books.take(DATASET, "a", "somebody else").state == "new"


def test_a_sample_that_is_recorded_is_not_made_again(stage: Stage, books: Queue) -> None:
    """A redelivered ticket of a recorded sample ends at once, and its payload is dropped."""
    with Ledger.open(stage.folder) as ledger:
        ledger.commit([pen("a", Kind.ACCEPTED)])
    stage.start().result(_WAIT_S)
    assert books.depth(DATASET) == 0
