"""SIGKILL at every step of a reclassify: all of it is done, or nothing, and every sample is counted once."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from app import broker
from app.ledger import Ledger, Pen
from app.places import Keys
from app.queue import Queue
from app.records import Kind, Record, Sample, Usage, encode_line
from app.tally import Done
from tests.conftest import ModelServerFactory
from tests.support.aftermath import assert_asked_once, assert_quiet, prompts
from tests.support.folders import fresh_picture, picture
from tests.support.kill_points import RECLASSIFY_POINTS, Point, assert_killed, producer_that_dies
from tests.support.mill import Mill

pytestmark = pytest.mark.fault

_COUNT = 12
_WORDS = ("reclassify", "case", "--min-completion-tokens", "6")
_OLD, _NEW = {"accepted": 10, "rejected": 2}, {"accepted": 5, "rejected": 7}
_QUICK = {(Point.RECLASSIFY_BEFORE_JOURNAL, 1), (Point.AFTER_RENAME, 2), (Point.RECLASSIFY_BEFORE_BOOKS, 1)}
"""The points that the default run tries: nothing done, half done, all done."""
_POINTS = [
    pytest.param(*place, marks=() if place in _QUICK else pytest.mark.slow, id=f"{place[0]}-{place[1]}")
    for place in RECLASSIFY_POINTS
]
_NOTHING_DONE = {Point.RECLASSIFY_IN_COPY, Point.RECLASSIFY_BEFORE_JOURNAL, Point.BEFORE_RENAME}


def _queue(mill: Mill) -> Queue:
    return Queue(broker.connect(broker.parse(mill.env["MILL_REDIS_URL"])), Keys(mill.env["MILL_KEY_PREFIX"]))


def _record(one: Sample, tokens: int) -> Pen:
    """Return the line of an answer with so many tokens; those of more than 10 were cut."""
    cut = tokens > 10
    record = Record(
        id=one.id,
        dataset="case",
        verdict=Kind.REJECTED if cut else Kind.ACCEPTED,
        reason="truncated" if cut else None,
        source=one.source,
        messages=one.messages,
        content="Recorded before.",
        finish_reason="length" if cut else "stop",
        usage=Usage(completion_tokens=tokens),
        sampling={},
        settings=one.settings,
        finished_at=float(tokens),
    )
    return Pen(record.verdict, one.id, encode_line(record), record.reason or "", 0, tokens)


def _fill(mill: Mill) -> None:
    """Record every sample but the last, with 1, 2, 3, ... tokens; one that was cut is to be asked again."""
    mill.enqueue(prompts(_COUNT + 1))
    queue = _queue(mill)
    with Ledger.open(mill.folder()) as ledger:
        ids = [id_ for id_, _entry in ledger.entries()]
        samples = sorted(queue.payloads("case", ids).values(), key=lambda one: one.source.row or 0)[:_COUNT]
        pens = [_record(one, number) for number, one in enumerate(samples, start=1)]
        ledger.commit(pens)
    queue.finish("case", [Done(pen.id, pen.kind, pen.tokens) for pen in pens])


def _lines(mill: Mill) -> dict[Kind, list[bytes]]:
    paths = {kind: mill.folder().lines(kind) for kind in (Kind.ACCEPTED, Kind.REJECTED)}
    return {kind: path.read_bytes().splitlines() for kind, path in paths.items()}


def _counts(mill: Mill) -> dict[str, int]:
    counts = mill.counts()
    assert counts["samples"] == counts["accepted"] + counts["rejected"] + counts["failed"] + counts["left"]
    assert counts["left"] == counts["queued"] + counts["in_flight"] + counts["missing"]
    return {kind: counts[kind] for kind in _OLD}


def _open(mill: Mill) -> dict[str, int]:
    """Open the folder, as any process does that comes next, and count."""
    with Ledger.open(mill.folder()) as ledger:
        ledger.catch_up()
        assert picture(ledger) == fresh_picture(mill.folder())
        return {kind: ledger.totals().count(Kind(kind)) for kind in _OLD}


@pytest.mark.parametrize(("point", "nth"), _POINTS)
def test_a_reclassify_that_dies_has_done_all_or_nothing(mill: Mill, point: Point, nth: int) -> None:
    """Killed at this point, whoever comes next finds every record once, all by the old rules or all by the new."""
    _fill(mill)
    before = Counter(json.loads(line)["id"] for lines in _lines(mill).values() for line in lines)

    assert_killed(producer_that_dies(mill, point, *_WORDS, nth=nth))
    wanted = _OLD if point in _NOTHING_DONE else _NEW
    assert _open(mill) == wanted
    files = _lines(mill)
    assert {kind.value: len(lines) for kind, lines in files.items()} == wanted
    assert Counter(json.loads(line)["id"] for lines in files.values() for line in lines) == before
    assert all(json.loads(line)["verdict"] == kind for kind, lines in files.items() for line in lines)
    manifest = json.loads(mill.folder().manifest.read_bytes())
    rules = [entry["content"]["min_completion_tokens"] for entry in manifest["settings"]]
    assert rules == ([0] if wanted is _OLD else [0, 6])

    mill.run(*_WORDS)
    assert _open(mill) == _NEW
    assert not [path for path in mill.folder().path.iterdir() if path.name.endswith((".tmp", "exchange.json"))]
    counts = mill.run("verify", "case", "--json", expect=1).json()["case"]["counts"]  # the last one is still queued
    assert counts.items() >= {**_NEW, "queued": 1, "missing": 0}.items()


@pytest.mark.slow
@pytest.mark.parametrize(("point", "nth"), [(Point.RECLASSIFY_BEFORE_JOURNAL, 1), (Point.AFTER_RENAME, 2)])
def test_a_worker_ends_what_a_dead_reclassify_began(
    mill: Mill, model_server: ModelServerFactory, point: Point, nth: int
) -> None:
    """A worker that opens the folder next puts the rest into place and judges its own record by the rules in force."""
    server = model_server()
    _fill(mill)
    assert_killed(producer_that_dies(mill, point, *_WORDS, "--allow-think-leak", nth=nth))
    worker = mill.worker()
    mill.wait_recorded(_COUNT + 1)
    mill.wait_idle()
    wanted = _OLD if point in _NOTHING_DONE else _NEW
    assert sum(_counts(mill).values()) == sum(wanted.values()) + 1
    assert not mill.folder().journal.exists()
    assert_asked_once(server, prompts(_COUNT + 1))
    assert worker.stop() == 0
    assert_quiet(worker.output())


def test_an_accepted_sample_is_not_asked_again(mill: Mill) -> None:
    """A rejected sample that waits to be asked again, and is accepted now, leaves the queue; the books balance."""
    _fill(mill)
    mill.run("retry", "case", "--rejected")
    assert mill.counts()["left"] == 3

    said = mill.run("reclassify", "case", "--keep-truncated")
    assert "2 samples that were to be asked again are accepted now, and were taken off the queue." in said.stderr
    assert _counts(mill) == {"accepted": 12, "rejected": 0}
    assert mill.counts()["left"] == 1


def test_without_redis_the_tickets_drop_themselves(mill: Mill, model_server: ModelServerFactory) -> None:
    """A reclassify while Redis is away changes the files; a worker finds what is accepted and asks the rest alone."""
    server = model_server()
    _fill(mill)
    mill.run("retry", "case", "--rejected")
    url = mill.env["MILL_REDIS_URL"]
    mill.env["MILL_REDIS_URL"] = "redis://127.0.0.1:1/0"
    said = mill.run("reclassify", "case", "--keep-truncated")
    assert "Redis could not be told" in said.stderr
    mill.env["MILL_REDIS_URL"] = url

    worker = mill.worker()
    mill.wait_recorded(_COUNT + 1)
    mill.wait_idle()
    assert _counts(mill) == {"accepted": 13, "rejected": 0}
    assert set(server.counts) == {prompts(_COUNT + 1)[-1]}
    assert worker.stop() == 0


@pytest.mark.slow
def test_workers_go_on_during_reclassifies(mill: Mill, model_server: ModelServerFactory) -> None:
    """Rules that change again and again while workers record cost no record and no call, and the last ones count."""
    server = model_server(latency_s=0.05)
    rows = prompts(400)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=8)
    seen = list[int]()
    for number, least in enumerate(("1000000", "0", "1000000", "0", "1000000")):
        mill.wait_recorded(20 + 60 * number)
        mill.run("reclassify", "case", "--min-completion-tokens", least)
        counts = mill.counts()
        assert counts["samples"] == 400
        assert counts["accepted"] + counts["rejected"] + counts["failed"] + counts["left"] == 400
        seen.append(counts["accepted"])
    mill.wait_idle()

    assert _counts(mill) == {"accepted": 0, "rejected": 400}
    assert seen[0] == seen[2] == seen[4] == 0
    mill.run("reclassify", "case", "--min-completion-tokens", "0")
    assert _counts(mill) == {"accepted": 400, "rejected": 0}
    assert_asked_once(server, rows)
    mill.run("verify", "case")
    with Ledger.open(mill.folder()) as ledger:
        assert picture(ledger) == fresh_picture(mill.folder())
    assert worker.stop() == 0
    assert_quiet(worker.output())


def test_enqueue_has_to_give_the_new_rules(mill: Mill) -> None:
    """After a reclassify the old command line is refused with the field named, and the new one goes on."""
    _fill(mill)
    mill.run(*_WORDS)
    source = mill.path / "rows.jsonl"
    refused = mill.enqueue(source, expect=2)
    assert "min_completion_tokens: 6 -> 0" in refused.stderr
    assert "already recorded 12" in mill.enqueue(source, "--min-completion-tokens", "6").stdout
