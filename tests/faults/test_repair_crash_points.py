"""SIGKILL at every step of a repair: the files are whole, and a second repair finishes what the first began."""

from __future__ import annotations

import itertools
import signal
from collections import Counter

import pytest

from app import broker
from app.ledger import Ledger, Pen
from app.places import Keys
from app.queue import Queue
from app.records import Kind, Record, Sample, encode_line
from app.settings import GenerationSettings
from tests.conftest import ModelServerFactory
from tests.support.aftermath import assert_asked_once, assert_balanced, assert_quiet, prompts
from tests.support.folders import fresh_picture, picture
from tests.support.jsonl_check import assert_strict
from tests.support.kill_points import REPAIR_POINTS, Point, assert_killed, producer_that_dies
from tests.support.mill import Mill
from tests.support.processes import wait_until
from tests.support.repairs import quarantined

pytestmark = pytest.mark.fault

_OLD, _NEW = prompts(8, "old"), prompts(6, "new")
_TORN = b'{"id":"torn'


def _queue(mill: Mill) -> Queue:
    return Queue(broker.connect(broker.parse(mill.env["MILL_REDIS_URL"])), Keys(mill.env["MILL_KEY_PREFIX"]))


def _record(one: Sample) -> bytes:
    """Return the line that a worker would have written."""
    record = Record(
        id=one.id,
        dataset="case",
        verdict=Kind.ACCEPTED,
        source=one.source,
        messages=one.messages,
        content="Recorded before.",
        sampling=GenerationSettings().content(),
        settings=one.settings,
    )
    return encode_line(record)


def _ids(mill: Mill) -> list[str]:
    with Ledger.open(mill.folder()) as ledger:
        return [id_ for id_, _entry in ledger.entries()]


def _damage(mill: Mill) -> list[bytes]:
    """Record some samples, lose every ticket, and spoil two files; return the bytes that must be kept aside."""
    queue, folder = _queue(mill), mill.folder()
    with Ledger.open(folder) as ledger:
        ids = _ids(mill)
        lines = {id_: _record(one) for id_, one in queue.payloads("case", ids).items()}
        first = [id_ for id_ in ids if b"old " in lines[id_]]
        ledger.commit([Pen(Kind.ACCEPTED, id_, lines[id_]) for id_ in first])
    with folder.lines(Kind.ACCEPTED).open("ab") as file:
        file.write(_TORN + b"\n" + lines[first[0]] + lines[first[1]])
    known = folder.lines(Kind.PENDING)
    lost = first[2].encode()
    kept = [line for line in known.read_bytes().splitlines(keepends=True) if lost not in line]
    known.write_bytes(b"".join(kept))
    queue.client.delete(queue.keys.queue("case"))
    return [_TORN, lines[first[0]][:-1], lines[first[1]][:-1]]


def _repair_twice(mill: Mill, point: Point, nth: int) -> None:
    """Kill a repair at the point, assert that no byte is lost, and assert that the next one ends it."""
    mill.enqueue([*_OLD, *_NEW])
    cut, path = _damage(mill), mill.out()
    spoilt = path.read_bytes()

    assert_killed(producer_that_dies(mill, point, "verify", "case", "--repair", nth=nth))
    kept = path.read_bytes().splitlines() + [data for _file, _at, data, _why in _whole_pieces(mill)]
    assert not Counter(spoilt.splitlines()) - Counter(kept)

    counts = mill.run("verify", "case", "--repair", "--json", expect=1).json()["case"]["counts"]
    wanted = {"samples": len(_OLD + _NEW), "accepted": len(_OLD), "queued": len(_NEW), "missing": 0}
    assert counts.items() >= {**wanted, "without_ticket": 0}.items()
    assert {data for _file, _at, data, _why in _whole_pieces(mill)} == set(cut)
    assert_strict(path, count=len(_OLD))
    assert_strict(mill.folder().lines(Kind.PENDING), count=len(_OLD + _NEW))
    assert not list(mill.folder().path.glob(".*.tmp"))
    with Ledger.open(mill.folder()) as ledger:
        assert picture(ledger) == fresh_picture(mill.folder())


@pytest.mark.parametrize(("point", "nth"), REPAIR_POINTS)
def test_a_repair_that_dies_is_finished_by_the_next(mill: Mill, point: Point, nth: int) -> None:
    """Killed at this point, a repair loses no byte; the next one ends it, and only what is not recorded waits."""
    _repair_twice(mill, point, nth)
    queue = _queue(mill)
    asked = [message["content"] for one in queue.payloads("case", _ids(mill)).values() for message in one.messages]
    assert sorted(asked) == sorted(_NEW)
    assert not queue.without_ticket("case", thorough=True)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "nth"), REPAIR_POINTS[1::3])
def test_a_worker_goes_on_after_a_repair_that_died(
    mill: Mill, model_server: ModelServerFactory, point: Point, nth: int
) -> None:
    """After a repair killed at this point and a second one, a worker asks what is left, once, and the books balance."""
    server = model_server()
    _repair_twice(mill, point, nth)
    worker = mill.worker()
    mill.wait_recorded(len(_OLD + _NEW))
    mill.wait_idle()

    assert_balanced(mill, [*_OLD, *_NEW])
    assert set(server.counts) == set(_NEW)
    assert_asked_once(server, _NEW)
    assert worker.stop() == 0
    assert_quiet(worker.output())


def _whole_pieces(mill: Mill) -> list[tuple[str, int, bytes, str]]:
    """Return what is in the quarantine file, a torn last line left out."""
    path = mill.folder().quarantine
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        data = path.read_bytes()
        path.write_bytes(data[: data.rfind(b"\n") + 1])
    return quarantined(mill.folder())


def test_ctrl_c_leaves_whole_files(mill: Mill, model_server: ModelServerFactory) -> None:
    """A repair that is interrupted while it copies leaves the old file, no half copy, and ends with 130."""
    model_server()
    mill.enqueue(_OLD)
    _damage(mill)
    path = mill.folder().lines(Kind.ACCEPTED)
    line = path.read_bytes().splitlines(keepends=True)[0]
    with path.open("ab") as file:
        for _ in itertools.repeat(None, 60_000):
            file.write(line)
    spoilt = path.read_bytes()
    copy = path.with_name(f".{path.name}.tmp")

    repair = mill.start("verify", "case", "--repair")
    wait_until(copy.exists, 60, "the copy", poll_s=0.01, detail=repair.tail)
    repair.send_signal(signal.SIGINT)
    assert repair.wait(60) == 130

    assert path.read_bytes() == spoilt
    assert not copy.exists()
    assert "interrupted" in repair.output()


@pytest.mark.slow
def test_workers_go_on_during_a_repair(mill: Mill, model_server: ModelServerFactory) -> None:
    """Repairs of a file that a worker writes to at that moment cost no record, and no sample is asked twice."""
    server = model_server(latency_s=0.05)
    rows = prompts(400)
    mill.enqueue(rows)
    mill.worker(concurrency=8)
    for number in range(4):
        mill.wait_recorded(20 + 40 * number)
        with Ledger.open(mill.folder()) as ledger, ledger.locked():
            data = mill.out().read_bytes()
            with mill.out().open("ab") as file:
                file.write(data.splitlines(keepends=True)[number] + _TORN + b"\n")
        mill.run("verify", "case", "--repair", expect=None)
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert len(quarantined(mill.folder())) == 8
