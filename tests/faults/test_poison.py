"""Prompts that kill whoever asks them are set aside after three deaths; what flew beside them is answered."""

from __future__ import annotations

import random
import time

import pytest

from app import broker as brokers
from app.places import Keys
from app.records import Kind
from tests.conftest import Broker, ModelServerFactory
from tests.support.aftermath import assert_quiet, prompts
from tests.support.books import balanced, records
from tests.support.mill import Mill
from tests.support.processes import WorkerProcess, wait_until
from tests.support.server_process import ServerProcess

pytestmark = [pytest.mark.fault, pytest.mark.slow]

_MOST_DEATHS = 8
"""Deaths that one prompt may cost at most before it is set aside: more than three, for suspects also fly together."""
_LEASE_S = "5"


def _assert_set_aside(mill: Mill, poisons: list[str], innocents: list[str]) -> None:
    """Assert that exactly these prompts are failed as poison, and all others accepted, in books that balance."""
    balanced(mill, failed=len(poisons), accepted=len(innocents), queued=0, in_flight=0, missing=0, rejected=0)
    failed = {str(record["messages"][-1]["content"]): record for record in records(mill, kind=Kind.FAILED)}
    assert sorted(failed) == sorted(poisons)
    for record in failed.values():
        assert record["reason"] == "poison"
        assert 3 <= record["attempts"] <= _MOST_DEATHS
        assert f"{record['attempts']} workers or model servers died while this sample was asked" in record["error"]
        assert "producer retry case --fault poison" in record["error"]
    accepted = sorted(str(record["messages"][-1]["content"]) for record in records(mill))
    assert accepted == sorted(innocents)


def _assert_adds_up(mill: Mill) -> None:
    """Assert that nothing is lost in the middle of it all."""
    counts = mill.counts()
    settled = counts["accepted"] + counts["rejected"] + counts["failed"]
    assert counts["samples"] == settled + counts["queued"] + counts["in_flight"], counts
    assert counts["missing"] == 0, counts


def _worker_that_asks(mill: Mill, broker: Broker, prompt: str, workers: list[WorkerProcess]) -> WorkerProcess | None:
    """Return the worker that asks a prompt now."""
    keys = Keys(broker.key_prefix)
    for id_, flight in broker.client.hgetall(keys.flights("case")).items():
        payload = broker.client.hget(keys.prompts("case"), id_)
        if payload is not None and f'"{prompt}"' in brokers.text(payload):
            owner = brokers.text(flight)
            return next((one for one in workers if one.running and owner.startswith(f"{one.name}@")), None)
    return None


def test_prompts_that_kill_the_server_are_set_aside(mill: Mill) -> None:
    """Two prompts that kill the server's process fail as poison, wherever they stand; the rest is accepted."""
    poisons, innocents = ["POISON one", "POISON two"], prompts(60)
    rows = [*innocents[:5], poisons[0], *innocents[5:40], poisons[1], *innocents[40:]]
    rules = [{"match": "POISON", "kill": True}]
    with ServerProcess(mill.logs, latency_s=0.3, rules=rules) as server:
        mill.env["MILL_MODEL_URLS"] = server.url
        mill.enqueue(rows)
        workers = [mill.worker(concurrency=6) for _ in range(2)]
        deaths = 0
        while mill.recorded() < len(rows):
            wait_until(
                lambda: not server.process.running or mill.recorded() >= len(rows), 60, "an end", detail=mill.tails
            )
            if not server.process.running:
                deaths += 1
                assert deaths <= len(poisons) * _MOST_DEATHS, mill.tails()
                _assert_adds_up(mill)
                server.start()
        mill.wait_idle()
        _assert_set_aside(mill, poisons, innocents)
        mill.run("retry", "case", "--fault", "poison")
        assert mill.counts()["queued"] + mill.counts()["in_flight"] == len(poisons)
        for worker in workers:
            worker.stop()
            assert_quiet(worker.output())


def test_a_prompt_that_kills_its_worker_is_set_aside(
    mill: Mill, broker: Broker, model_server: ModelServerFactory
) -> None:
    """A prompt whose worker dies each time fails as poison; what that worker asked beside it is accepted."""
    poison, innocents = "POISON", prompts(40)
    server = model_server(rules=[{"match": poison, "hang": True}], latency_s=0.5)
    mill.env["MILL_LEASE_S"] = _LEASE_S
    mill.enqueue([*innocents[:6], poison, *innocents[6:]])
    workers = [mill.worker(concurrency=4) for _ in range(2)]
    deaths, asked = 0, 0
    while mill.recorded() <= len(innocents):
        wait_until(
            lambda seen=asked: server.count(poison) > seen or mill.recorded() > len(innocents),  # type: ignore[misc]
            60,
            "an end",
            detail=mill.tails,
        )
        if server.count(poison) > asked:
            asked = server.count(poison)
            dying = _worker_that_asks(mill, broker, poison, workers)
            assert dying is not None, mill.tails()
            dying.kill()
            deaths += 1
            assert deaths <= _MOST_DEATHS, mill.tails()
            _assert_adds_up(mill)
            workers.append(mill.worker(concurrency=4))
    mill.wait_idle()
    _assert_set_aside(mill, [poison], innocents)


def test_hundreds_of_suspects_drain_beside_the_others(
    mill: Mill, broker: Broker, model_server: ModelServerFactory
) -> None:
    """300 innocent suspects are answered in some rounds of answers, while other samples keep the slots busy."""
    latency_s, slots = 1.0, 48
    server = model_server(latency_s=latency_s)
    suspects, others = prompts(300, "suspect"), prompts(300, "other")
    mill.enqueue(suspects)
    keys = Keys(broker.key_prefix)
    ids = broker.client.hkeys(keys.prompts("case"))
    broker.client.hset(keys.deaths("case"), mapping=dict.fromkeys(ids, "2|4"))
    mill.enqueue(others, dataset="others")

    worker = mill.worker(concurrency=slots)
    begun = time.monotonic()
    mill.wait_recorded(len(others), "others")
    others_s = time.monotonic() - begun
    mill.wait_recorded(len(suspects))
    took_s = time.monotonic() - begun

    ideal_s = (len(suspects) + len(others)) / slots * latency_s
    assert took_s < 2 * ideal_s + 10, (took_s, others_s, server.stats)
    mill.wait_idle()
    balanced(mill, accepted=len(suspects), failed=0, queued=0, in_flight=0, missing=0)
    assert not broker.client.exists(keys.suspects, keys.deaths("case"))
    assert worker.stop() == 0
    assert_quiet(worker.output())


def test_busy_workers_that_are_killed_convict_nobody(mill: Mill, model_server: ModelServerFactory) -> None:
    """Workers that are killed three times while they are busy fail no sample, and everything is answered."""
    server = model_server(latency_s=2.0)
    mill.env["MILL_LEASE_S"] = _LEASE_S
    rows, dice = prompts(60), random.Random(3)
    mill.enqueue(rows)
    for number in range(3):
        worker = mill.worker(concurrency=8, name=f"victim{number}")
        wait_until(lambda: server.in_flight >= 8, 30, "a busy worker", detail=mill.tails)
        recorded = mill.recorded()
        if dice.random() < 0.5:
            mill.wait_recorded(recorded + 1)
        worker.kill()
        wait_until(lambda: server.in_flight == 0, 10, "the end of its requests")
        _assert_adds_up(mill)
    mill.worker(concurrency=16)
    mill.wait_recorded(len(rows))
    mill.wait_idle()
    balanced(mill, accepted=len(rows), failed=0, rejected=0, queued=0, in_flight=0, missing=0)
