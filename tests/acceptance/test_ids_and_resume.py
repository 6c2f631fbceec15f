"""What makes a sample the same sample, and that whatever is recorded or queued is never asked again."""

from __future__ import annotations

from collections import Counter

import pytest

from app.records import Kind, sample_seed
from tests.conftest import Broker, ModelServerFactory
from tests.support.books import balanced, by_source_id, records
from tests.support.mill import Mill
from tests.support.processes import wait_until


def test_one_id_with_two_prompts(mill: Mill, model_server: ModelServerFactory) -> None:
    """Two prompts under one id are both asked, under distinct stable ids, and told; an exact copy is counted away."""
    model_server()
    rows = [
        {"id": "a", "prompt": "Describe a lake."},
        {"id": "b", "prompt": "Describe a wood."},
        {"id": "a", "prompt": "Describe a moor."},
        {"id": "b", "prompt": "Describe a wood."},
    ]
    told = mill.enqueue(rows)
    assert "'a' stands at row 1 and, with another prompt, at row 3" in told.stderr
    assert "refused 1 (duplicates 1)" in told.stdout
    mill.worker()
    mill.wait_recorded(3)
    assert " queued 0\n" in mill.enqueue(rows).stdout
    balanced(mill, read=4, refused=1, accepted=3)
    assert Counter(record["source"]["id"] for record in records(mill)) == {"a": 2, "b": 1}
    (copy,) = records(mill, kind=Kind.REFUSED)
    assert (copy["row"], copy["detail"]) == (4, "the same prompt as row 2")


def test_rows_without_ids_may_move(mill: Mill, model_server: ModelServerFactory) -> None:
    """Without ids the content makes the id: rows may move, gain columns and change their key order for nothing."""
    server = model_server()
    rows = [{"messages": [{"role": "user", "content": f"topic {letter}"}], "n": 1} for letter in "ABCD"]
    mill.enqueue([*rows, {"prompt": "topic A"}])
    mill.worker()
    mill.wait_recorded(4)
    moved = [{"n": 2, **row, "note": "more"} for row in reversed(rows)]
    told = mill.enqueue([{"prompt": "topic new"}, *moved, {"prompt": "topic A "}])
    assert "already recorded 4, already queued 0, queued 2" in told.stdout
    counts = balanced(mill, accepted=6, left=0)
    assert len(server.requests) == counts["samples"] == 6
    for record in records(mill):
        assert record["content"] == f"echo: {record['messages'][-1]['content']}"


def test_enqueue_is_safe_at_any_time(mill: Mill, model_server: ModelServerFactory) -> None:
    """Enqueued twice before a run and once during it, every sample is asked once, and the second says what waits."""
    server = model_server(latency_s=0.1)
    rows = [f"n {number}" for number in range(120)]
    mill.enqueue(rows)
    assert "already queued 120, queued 0" in mill.enqueue(rows).stdout
    mill.worker(concurrency=8)
    mill.wait_recorded(20)
    assert "resuming:" in mill.enqueue(rows).stdout
    balanced(mill, read=120, samples=120, accepted=120)
    assert len(server.requests) == 120


def test_holes_after_a_kill(mill: Mill, model_server: ModelServerFactory) -> None:
    """After a SIGKILL with early rows unfinished and late ones recorded, exactly the unfinished are asked again."""
    server = model_server([{"match": "slow", "delay_s": 3}])
    rows = [{"id": f"o{n}", "prompt": f"{'slow' if n % 3 == 0 else 'quick'} {n}"} for n in range(12)]
    mill.enqueue(rows)
    worker = mill.worker(concurrency=6)
    mill.wait_recorded(8)
    worker.kill()
    assert set(by_source_id(mill)) == {f"o{n}" for n in range(12) if n % 3}
    told = mill.enqueue(rows)
    assert "already recorded 8, already queued 4, queued 0" in told.stdout
    mill.worker(concurrency=6)
    balanced(mill, accepted=12)
    assert {server.count(str(row["prompt"])) for row in rows if row["prompt"].startswith("quick")} == {1}
    assert {server.count(str(row["prompt"])) for row in rows if row["prompt"].startswith("slow")} == {2}


def test_samples_per_prompt_and_seeds(mill: Mill, model_server: ModelServerFactory, broker: Broker) -> None:
    """N samples of a prompt have N ids and N seeds, which follow from the run's seed alone, also after a wipe."""
    server = model_server()
    options = ("--samples-per-prompt", "3", "--seed", "42", "--temperature", "1")
    mill.enqueue(["Roll a die.", "Flip a coin."], *options)
    worker = mill.worker()
    mill.wait_recorded(6)
    worker.stop()
    first = {record["id"]: record["seed"] for record in records(mill)}
    assert len(set(first.values())) == 6
    assert first == {id_: sample_seed(42, id_) for id_ in first}
    assert Counter(id_.partition(".")[0] for id_ in first).most_common() == [
        (id_, 3) for id_ in dict.fromkeys(id_.partition(".")[0] for id_ in first)
    ]
    mill.out().unlink()
    broker.client.flushall()
    mill.enqueue(["Flip a coin.", "Roll a die."], *options)
    mill.worker()
    balanced(mill, read=6, samples=6, accepted=6)
    assert {record["id"]: record["seed"] for record in records(mill)} == first
    assert sorted(request.body["seed"] for request in server.requests) == sorted([*first.values()] * 2)


def test_a_bounded_window_in_redis(mill: Mill, model_server: ModelServerFactory, broker: Broker) -> None:
    """Enqueue keeps at most MILL_MAX_PENDING prompts in Redis, waits for room, and finishes while workers run."""
    model_server(latency_s=0.02)
    mill.env["MILL_MAX_PENDING"] = "20"
    path = mill.write_rows([f"prompt {number}" for number in range(150)])
    producer = mill.start("enqueue", str(path), "--dataset", "case")
    line = producer.wait_for_output("waiting for room")
    assert "no worker is running" in line
    deepest = 0

    def depth() -> int:
        nonlocal deepest
        deepest = max(deepest, int(str(broker.client.hlen(f"{broker.key_prefix}prompts:case"))))
        return deepest

    assert depth() == 20
    mill.worker(concurrency=4)
    wait_until(lambda: depth() and not producer.running, 60, "the end of enqueue", poll_s=0.01)
    assert producer.returncode == 0
    assert deepest <= 20
    balanced(mill, read=150, accepted=150)


def test_a_wiped_redis_loses_nothing(mill: Mill, model_server: ModelServerFactory, broker: Broker) -> None:
    """After Redis was wiped status and verify say what to do, and enqueue queues exactly what is not recorded."""
    server = model_server()
    mill.enqueue(["one", "two"])
    worker = mill.worker()
    mill.wait_recorded(2)
    worker.stop()
    mill.enqueue(["one", "two", "three", "four"])
    broker.client.flushall()
    counts = balanced(mill, accepted=2, missing=2)
    assert counts["queued"] == 0
    told = mill.run("status", expect=1).stdout
    assert "2 samples are neither done nor queued; run producer enqueue again." in told
    assert "run producer enqueue again" in mill.run("verify", expect=1).stdout
    assert "already recorded 2, already queued 0, queued 2" in mill.enqueue(["one", "two", "three", "four"]).stdout
    mill.worker()
    balanced(mill, accepted=4)
    assert len(server.requests) == 4


@pytest.mark.parametrize("word", ["1000000000", "3"])
def test_a_limit_reads_no_further(mill: Mill, word: str) -> None:
    """--limit counts rows, and a later run without it takes the rest."""
    rows = [f"row {number}" for number in range(5)]
    took = min(5, int(word))
    assert f"read {took}, " in mill.enqueue(rows, "--limit", word).stdout
    assert f"already queued {took}, queued {5 - took}" in mill.enqueue(rows).stdout
