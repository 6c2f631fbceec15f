"""Several real processes that append to one dataset folder at once, and one that is killed in the middle."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.ledger import Ledger
from app.places import DatasetFolder
from app.records import Kind
from tests.support.folders import fresh_picture, pen, picture
from tests.support.jsonl_check import JsonlCheck, check_jsonl
from tests.support.processes import ManagedProcess, wait_until

SAMPLES = 240
GROUP = 6

_WRITER = """
import os, random, signal, sys
from pathlib import Path
from app import jsonl, ledger
from app.places import DatasetFolder
from tests.support.folders import pen

folder, seed, samples, group, dies = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]

def wait_for_death(*_args):
    print("here", flush=True)
    signal.pause()

def write_half(descriptor, data):
    os.write(descriptor, data[: len(data) // 2])
    wait_for_death()

if dies == "inside-the-write":
    jsonl._write_all = write_half
if dies == "before-the-index":
    ledger.IndexTransaction.merge = wait_for_death
if dies == "with-the-lock":
    ledger.Ledger._catch_up = wait_for_death

ids = random.Random(seed).sample(range(samples), samples)
with ledger.Ledger.open(DatasetFolder(folder)) as opened:
    print("open", flush=True)
    for start in range(0, samples, group):
        pens = [pen(f"s{n}", content=f"by {seed} " + "x" * (n * 37 % 2000)) for n in ids[start : start + group]]
        new = opened.commit(pens).new
        print(*[one.id for one, fresh in zip(pens, new) if fresh], flush=True)
print("done", flush=True)
"""


class Writers:
    """Starts writers on one folder and gathers what they say they wrote."""

    def __init__(self, path: Path) -> None:
        self.folder = DatasetFolder(path / "d")
        self._logs = path / "logs"
        self._processes: list[ManagedProcess] = []

    def start(self, dies: str = "never") -> ManagedProcess:
        """Start one that writes all samples in an order of its own."""
        seed = len(self._processes)
        words = [str(self.folder.path), str(seed), str(SAMPLES), str(GROUP), dies]
        process = ManagedProcess([sys.executable, "-c", _WRITER, *words], log_dir=self._logs, name=f"writer{seed}")
        self._processes.append(process)
        return process

    def claimed(self) -> list[str]:
        """Return the ids that writers were told they had written."""
        return [
            word for one in self._processes for word in one.output().split() if word not in {"open", "here", "done"}
        ]

    def close(self) -> None:
        """Kill whoever still runs."""
        for process in self._processes:
            process.close()

    def check(self) -> JsonlCheck:
        """Assert that every sample is recorded exactly once, and that the index says so; return the file's lines."""
        found = check_jsonl(self.folder.lines(Kind.ACCEPTED))
        assert found.problems == ()
        assert sorted(found.ids) == sorted(f"s{number}" for number in range(SAMPLES))
        claimed = self.claimed()
        assert len(claimed) == len(set(claimed))
        assert set(claimed) <= set(found.ids)
        with Ledger.open(self.folder) as ledger:
            assert ledger.catch_up() == []
            assert picture(ledger) == fresh_picture(self.folder)
            assert (ledger.totals().count(Kind.ACCEPTED), ledger.duplicates(), ledger.bad_lines()) == (SAMPLES, 0, [])
        return found


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    """Return writers on a new folder; all are gone afterwards."""
    with contextlib.closing(Writers(tmp_path)) as made:
        yield made


def test_writers_share_a_folder(writers: Writers) -> None:
    """Processes that record the same samples at the same time write each exactly once, on lines of their own."""
    started = [writers.start() for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    found = writers.check()
    assert sorted(writers.claimed()) == sorted(found.ids)
    assert not writers.folder.torn.exists()


@pytest.mark.fault
@pytest.mark.parametrize("where", ["inside-the-write", "before-the-index", "with-the-lock"])
def test_a_writer_that_dies_holds_nobody_up(where: str, writers: Writers) -> None:
    """A writer killed at the worst moments frees the lock, loses no finished line and spoils no one else's."""
    dying = writers.start(where)
    dying.wait_for_output("here")
    others = [writers.start() for _ in range(2)]
    for process in others:
        process.wait_for_output("open")
    assert writers.claimed() == []
    dying.kill()
    assert [process.wait(60) for process in others] == [0, 0]
    writers.check()
    if where != "inside-the-write":
        assert not writers.folder.torn.exists()


@pytest.mark.fault
def test_a_writer_killed_inside_a_write_leaves_a_torn_line(writers: Writers) -> None:
    """What a killed writer had written of its lines is kept: whole ones count, the torn one is put aside."""
    dying = writers.start("inside-the-write")
    dying.wait_for_output("here")
    dying.kill()
    path = writers.folder.lines(Kind.ACCEPTED)
    left = path.read_bytes()
    whole, _, torn = left.rpartition(b"\n")
    assert torn
    assert writers.start().wait(60) == 0
    writers.check()
    kept = json.loads(writers.folder.torn.read_bytes())
    assert base64.b64decode(kept["base64"]) == torn
    assert kept["offset"] == len(whole) + 1
    assert path.read_bytes().startswith(whole + b"\n")


@pytest.mark.fault
def test_a_writer_killed_at_any_moment(writers: Writers) -> None:
    """SIGKILL in the middle of the work costs nothing that was written, and the others finish."""
    victim, *others = [writers.start() for _ in range(3)]
    wait_until(lambda: len(victim.output().split()) > random.Random().randrange(1, 20), 30, "some lines of the victim")
    if victim.running:
        victim.kill()
    assert [process.wait(60) for process in others] == [0, 0]
    writers.check()


def test_readers_never_see_half_a_group(writers: Writers) -> None:
    """Whoever looks while others write sees counts that only grow and entries whose lines are whole."""
    started = [writers.start() for _ in range(2)]
    with Ledger.open(writers.folder) as ledger:
        last = 0
        while any(process.running for process in started):
            count = ledger.totals().count(Kind.ACCEPTED)
            assert count >= last
            last = count
            known = ledger.look_up(f"s{number}" for number in random.Random(count).sample(range(SAMPLES), 5))
            assert all(json.loads(ledger.read(entry))["id"] == id_ for id_, entry in known.items())
        assert ledger.totals().count(Kind.ACCEPTED) == SAMPLES
    assert [process.wait(60) for process in started] == [0, 0]


def test_pen_of_the_writers_is_the_products(writers: Writers) -> None:
    """A recorded line is the line that was handed in, whoever wrote it."""
    assert writers.start().wait(60) == 0
    with Ledger.open(writers.folder) as ledger:
        entry = ledger.look_up(["s1"])["s1"]
        assert ledger.read(entry) + b"\n" == pen("s1", content="by 0 " + "x" * 37).line
