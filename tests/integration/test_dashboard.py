"""The Pipeline page's requests, against a real Flower beside a real run: same numbers as status, guarded controls."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.ledger import Ledger
from app.places import dataset_folder
from app.records import Kind
from producer.simulator.server import ModelServer
from tests.support.flower import FlowerProcess
from tests.support.folders import pen
from tests.support.mill import Mill
from tests.support.processes import wait_until
from tests.support.redis_server import RedisServer

LOGIN = "ada:a long password"
ODD = "My Prompts & <b>"
MOST_BYTES = 50_000
MOST_S = 0.020


@dataclasses.dataclass(frozen=True)
class World:
    """A finished run of two datasets with failures, and three Flowers beside it."""

    mill: Mill
    server: RedisServer
    open: FlowerProcess
    """Without a login."""
    guarded: FlowerProcess
    """With one."""
    read_only: FlowerProcess
    """With one, and read-only."""


@pytest.fixture(scope="module")
def world(redis_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Run two datasets to their end, with failures and rejections, and start the Flowers."""
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "redis").mkdir()
    rules: list[dict[str, Any]] = [
        {"match": "too long", "status": 400, "message": "This model's maximum context length is 10 tokens."},
        {"match": "<script>", "status": 422, "message": "<script>alert(1)</script>"},
        {"match": "cut", "finish_reason": "length"},
        {"match": "flaky", "status": 500, "times": 1},
    ]
    with RedisServer(folder / "redis") as server, ModelServer(rules, latency_s=1) as model:
        env = {
            "MILL_REDIS_URL": server.url,
            "MILL_KEY_PREFIX": "dash:",
            "MILL_PREPARED_DIR": str(folder / "prepared"),
            "MILL_STATE_DIR": str(folder / "state"),
            "MILL_PROGRESS_S": "0.5",
            "MILL_BACKOFF_S": "0.1",
            "MILL_MODEL_URLS": model.url,
        }
        mill = Mill(env, folder)
        flowers = [
            FlowerProcess({**env, "FLOWER_UNAUTHENTICATED_API": "1"}, log_dir=folder),
            FlowerProcess(env, log_dir=folder, login=LOGIN),
            FlowerProcess(env, log_dir=folder, login=LOGIN, arguments=("--read_only",)),
        ]
        try:
            mill.enqueue(["good 1", "good 2", "too long 1", "too long 2", "cut", "flaky"], dataset="chat")
            mill.enqueue(["fine", "evil <script>", {"nothing": 1}], dataset=ODD)
            mill.worker(concurrency=2)
            mill.wait_recorded(6, "chat")
            mill.wait_recorded(2, ODD)
            for flower in flowers:
                flower.wait_ready()
            yield World(mill, server, *flowers)
        finally:
            for flower in flowers:
                flower.close()
            mill.close()


MOVING = {"at", "rates", "oldest_in_flight_s", "workers", "endpoints"}
"""What two looks at the same moment may see differently."""


def still(document: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot without what moves, and without the histograms, which the page leaves out."""

    def part(one: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {k: v for k, v in value.items() if k != "buckets"} if isinstance(value, dict) else value
            for name, value in one.items()
            if name not in MOVING
        }

    kept = {name: value for name, value in document.items() if name not in MOVING}
    return {
        **kept,
        "totals": part(document["totals"]),
        "datasets": {name: part(one) for name, one in document["datasets"].items()},
    }


def test_the_numbers_are_those_of_status(world: World) -> None:
    """Counts, tokens, latency, ETA, reasons and notes of the page are those of `producer status --json`."""

    def same() -> bool:
        return still(world.open.data()["snapshot"]) == still(world.mill.status())

    wait_until(same, 30, "the same numbers", poll_s=0.5, detail=world.open.data)
    counts = world.open.data()["snapshot"]["totals"]["counts"]
    assert (counts["accepted"], counts["failed"], counts["rejected"], counts["refused"]) == (4, 3, 1, 1)


def test_failures_are_grouped_with_examples_that_lead_to_the_sample(world: World) -> None:
    """A class has its count, times, the server's words and ids; the sample's page shows prompt, attempts and record."""
    classes = {(one["dataset"], one["reason"]): one for one in world.open.data()["failures"]}
    overflow = classes["chat", "context_overflow"]
    assert (overflow["kind"], overflow["count"], overflow["lines"], len(overflow["ids"])) == ("failed", 2, 2, 2)
    assert overflow["first_at"] <= overflow["last_at"] <= time.time()
    assert "maximum context length is 10 tokens" in overflow["error"]
    assert classes["chat", "truncated"]["kind"] == "rejected"

    page = world.open.ask(f"/pipeline/sample?dataset=chat&id={overflow['ids'][0]}")
    assert page.status == 200
    for words in ("too long", "context_overflow", "maximum context length is 10 tokens", "&quot;sampling&quot;"):
        assert words in page.text
    found = world.open.ask(f"/pipeline/sample.json?dataset=chat&id={overflow['ids'][0]}").json()
    assert (found["state"], found["rounds"][0]["verdict"]) == ("failed", "failed")


def test_what_servers_and_prompts_say_is_never_markup(world: World) -> None:
    """A prompt or an error with a script in it is shown as text, in a dataset with an odd name."""
    evil = next(one for one in world.open.data()["failures"] if one["dataset"] == ODD)
    assert "<script>alert(1)</script>" in evil["error"]
    page = world.open.ask(f"/pipeline/sample?dataset=My%20Prompts%20%26%20%3Cb%3E&id={evil['ids'][0]}")
    assert page.status == 200
    assert "<script>alert(1)" not in page.text
    assert "evil <script>" not in page.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page.text
    assert "&lt;b&gt;" in page.text


def test_a_sample_that_does_not_exist_is_told_in_a_sentence(world: World) -> None:
    """The page and the JSON say what is wrong with 404, also for a dataset that is no name at all."""
    page = world.open.ask("/pipeline/sample?dataset=chat&id=nope")
    assert (page.status, "knows no sample" in page.text) == (404, True)
    assert "knows no sample" in world.open.ask("/pipeline/sample.json?dataset=chat&id=nope").json()["error"]
    for dataset in ("", "nowhere", "..%2F..", "%00"):
        answer = world.open.ask(f"/pipeline/sample.json?dataset={dataset}&id=x")
        assert answer.status in {400, 404}, answer
    assert world.open.ask("/pipeline/history?dataset=nowhere").status == 404
    assert world.open.ask("/pipeline/history?span=forever").status == 400


def test_the_charts_come_out_of_stored_points(world: World) -> None:
    """The columns have one value for each moment, and what was accepted is in them, per dataset and for all."""

    def accepted(dataset: str, span: str) -> float:
        columns = world.open.ask(f"/pipeline/history?span={span}&dataset={dataset}").json()
        moments, rates = columns["t"], columns["samples_per_s"]
        lengths = {len(columns[name]) for name in ("samples_per_s", "tokens_per_s", "in_flight", "bound", "queued")}
        assert lengths == {len(moments)}
        step = moments[1] - moments[0]
        return sum(rate * step for rate in rates if rate)

    wait_until(
        lambda: accepted("", "15m") == pytest.approx(4, abs=1.01), 30, "what was accepted, in the chart", poll_s=1
    )
    assert accepted("chat", "15m") == pytest.approx(3, abs=1.01)
    columns = world.open.ask("/pipeline/history?span=run").json()
    assert max(n for n in columns["failures"]["context_overflow"] if n is not None) == 2
    assert [n for n in columns["queued"] if n is not None][-1] == 0


def test_the_page_is_first_and_in_flowers_navigation(world: World) -> None:
    """`/` leads to it, every page of Flower links to it, and Flower's own pages are where they were."""
    first = world.open.ask("/")
    assert (first.status, first.headers["location"]) == (302, "/pipeline")
    for path in ("/workers", "/tasks", "/broker"):
        page = world.open.ask(path)
        assert page.status == 200, path
        links = re.findall(r'class="nav-link[^"]*"\s+href="([^"]+)"', page.text)
        assert links[:4] == ["/pipeline", "/workers", "/tasks", "/broker"], path


def test_nothing_comes_from_elsewhere(world: World) -> None:
    """The page's policy allows files of this Flower alone, no inline script or style is in it, and all files exist."""
    page = world.open.ask("/pipeline")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in page.headers
    assert not re.findall(r"<script(?![^>]*\bsrc=)", page.text)
    assert not re.findall(r"<style|\sstyle=|\son\w+=", page.text)
    files = re.findall(r'<(?:script|link)[^>]+(?:src|href)="([^"]+)"', page.text)
    assert any("uPlot" in file for file in files)
    for file in files:
        answer = world.open.ask(file)
        assert file.startswith("/"), file
        assert answer.status == 200, file
    assert world.open.ask("/pipeline/static/../handlers.py").status in {403, 404}


def test_other_sites_learn_nothing(world: World) -> None:
    """No header lets another site read samples, not even where FLOWER_UNAUTHENTICATED_API opens Flower's own API."""
    assert world.open.ask("/api/workers").headers["access-control-allow-origin"] == "*"
    for path in ("/pipeline/data", "/pipeline/sample.json?dataset=chat&id=x"):
        asked = world.open.ask(path, headers={"Origin": "https://evil.example"})
        assert not [name for name in asked.headers if name.startswith("access-control")]
    assert world.open.ask("/pipeline/control", method="OPTIONS").status == 405


PAGES = ("/", "/pipeline", "/pipeline/data", "/pipeline/sample.json?dataset=chat&id=x", "/metrics", "/metrics/flower")


@pytest.mark.parametrize("path", PAGES)
def test_another_sites_name_shows_nothing_without_a_login(world: World, path: str) -> None:
    """A page whose own name leads to this machine (DNS rebinding) is refused in a sentence; a login admits any name."""
    port = world.open.port
    for host in (f"evil.example:{port}", "evil.example", f"127.0.0.1.evil.example:{port}", "192.168.1.7", ""):
        answer = world.open.ask(path, headers={"Host": host})
        assert (answer.status, "Without a login" in answer.text) == (403, True), host
        assert answer.text.count("\n") <= 1
        assert "prompts" not in answer.text
    for host in (f"localhost:{port}", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert world.open.ask(path, headers={"Host": host}).status in {200, 302, 404}, host
    assert world.guarded.ask(path, headers={"Host": f"mill.example:{port}"}).status in {200, 302, 404}


def test_without_a_login_nothing_can_be_changed(world: World) -> None:
    """A Flower that knows nobody shows no control and refuses every order, and says how to get one."""
    page = world.open.ask("/pipeline")
    assert 'data-act="pause"' not in page.text
    assert "FLOWER_BASIC_AUTH" in page.text
    for token in (True, False):
        answer = world.open.press({"action": "pause", "dataset": "chat"}, token=token)
        assert answer.status == 403
    assert "needs a login" in world.open.press({"action": "pause", "dataset": "chat"}).json()["error"]
    assert world.mill.status("chat")["datasets"]["chat"]["state"] == "done"


def test_read_only_means_read_only(world: World) -> None:
    """Whoever is logged in to a read-only Flower may look and not touch."""
    assert 'data-act="pause"' not in world.read_only.ask("/pipeline").text
    answer = world.read_only.press({"action": "set_bound", "bound": 1})
    assert (answer.status, "read-only" in answer.json()["error"]) == (403, True)
    assert world.guarded.data()["bound"] is None


def test_an_order_needs_the_login_and_the_token(world: World) -> None:
    """Without the login, with a wrong one, without the page's token, or with another one, nothing happens."""
    order = {"action": "set_bound", "bound": 1}
    assert world.guarded.press(order, login=None).status == 401
    assert world.guarded.press(order, login="ada:wrong").status == 401
    for token in (False, "", "2|00000000|00000000000000000000000000000000|1"):
        assert world.guarded.press(order, token=token).status == 403, token
    foreign = {"Content-Type": "application/json", "Sec-Fetch-Site": "cross-site"}
    assert world.guarded.ask("/pipeline/control", method="POST", body=order, headers=foreign).status == 403
    for path in ("/pipeline", "/pipeline/data", "/pipeline/history", "/pipeline/sample.json?dataset=chat&id=x"):
        assert world.guarded.ask(path, login=None).status == 401, path
    assert world.guarded.data()["bound"] is None


def test_pausing_retrying_and_bounding_from_the_page(world: World) -> None:
    """With login and token a dataset is paused and goes on, a class is asked again, and the bound is set and unset."""
    flower, mill = world.guarded, world.mill
    assert 'data-act="pause"' in flower.ask("/pipeline").text
    paused = flower.press({"action": "pause", "dataset": "chat"})
    assert (paused.status, paused.json()["said"]) == (200, "chat is paused; running requests finish.")
    again = flower.press({"action": "retry", "dataset": "chat", "kind": "failed", "reason": "context_overflow"})
    assert again.json()["said"] == "chat: queued 2 failed samples (context_overflow) again."
    part = mill.status("chat")["datasets"]["chat"]
    assert (part["state"], part["counts"]["queued"], part["counts"]["failed"]) == ("paused", 2, 0)
    assert any("ada" in note for note in part["notes"])
    assert flower.press({"action": "retry", "dataset": "chat"}).json()["said"].endswith("2 were waiting already.")

    assert flower.press({"action": "resume", "dataset": "chat"}).json()["said"] == "chat goes on."
    wait_until(lambda: mill.counts("chat")["failed"] == 2, 30, "the retried samples", poll_s=0.5)
    (overflow,) = [one for one in flower.data()["failures"] if one["reason"] == "context_overflow"]
    wait_until(lambda: [x["lines"] for x in flower.data()["failures"] if x["reason"] == "context_overflow"] == [4], 20)
    found = flower.ask(f"/pipeline/sample.json?dataset=chat&id={overflow['ids'][0]}").json()
    assert [one["round"] for one in found["rounds"]] == [0, 1]

    assert flower.press({"action": "set_bound", "bound": 3}).status == 200
    wait_until(lambda: flower.data()["bound"] == 3, 10, "the bound")
    assert flower.press({"action": "set_bound", "bound": None}).status == 200
    wait_until(lambda: flower.data()["bound"] is None, 10, "no bound")


@pytest.mark.parametrize(
    "order",
    [
        {"action": "pause", "dataset": "nowhere"},
        {"action": "pause"},
        {"action": "explode", "dataset": "chat"},
        {"action": "retry", "dataset": "chat", "kind": "accepted"},
        {"action": "set_bound", "bound": 0},
        {"action": "set_bound", "bound": "many"},
        {"action": "pause", "dataset": "chat", "more": 1},
        ["pause"],
        None,
    ],
    ids=json.dumps,
)
def test_an_order_that_makes_no_sense_is_refused(world: World, order: object) -> None:
    """The answer is one sentence for the person and no 500."""
    answer = world.guarded.press(order)
    assert answer.status == 404
    assert answer.json()["error"].endswith(".")
    assert "Traceback" not in world.guarded.output()


def test_the_data_are_small_and_fast(world: World, tmp_path: Path) -> None:
    """With eight datasets and a hundred classes of failures an answer has less than 50 kB and takes less than 20 ms."""
    env = {**world.mill.env, "MILL_PREPARED_DIR": str(tmp_path), "MILL_KEY_PREFIX": "eight:"}
    for number in range(8):
        folder = dataset_folder(tmp_path, f"dataset-{number}")
        with Ledger.open(folder) as ledger:
            folder.manifest.write_text(json.dumps({"dataset": f"dataset-{number}", "created_at": 1.0}))
            ids = [f"{number}-{sample:05d}" for sample in range(500)]
            ledger.commit([pen(id_, Kind.PENDING) for id_ in ids])
            ledger.commit([pen(id_, tokens=400) for id_ in ids[:300]])
            ledger.commit([pen(id_, Kind.FAILED, reason=f"kind_{int(id_[-2:]) % 13}") for id_ in ids[300:]])
    with FlowerProcess(env, log_dir=tmp_path / "logs") as flower:
        flower.wait_ready()
        document = flower.data()
        assert len(document["snapshot"]["datasets"]) == 8
        assert document["failures"]
        assert document["more_failures"] == 8 * 13 - len(document["failures"])
        took, sizes = [], []
        for _ in range(60):
            begin = time.perf_counter()
            answer = flower.ask("/pipeline/data")
            took.append(time.perf_counter() - begin)
            sizes.append(len(answer.body))
        assert max(sizes) < MOST_BYTES
        assert sorted(took)[len(took) // 4] < MOST_S, took
        assert len(flower.ask("/pipeline/history?span=6h").body) < MOST_BYTES


@pytest.mark.slow
def test_without_redis_the_files_speak(world: World, tmp_path: Path) -> None:
    """While Redis is gone the page shows what is recorded, says so, refuses orders in a sentence, and recovers."""
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as server:
        env = {**world.mill.env, "MILL_REDIS_URL": server.url}
        with FlowerProcess(env, log_dir=tmp_path, login=LOGIN) as flower:
            flower.wait_ready()
            wait_until(lambda: flower.data()["snapshot"]["broker"]["reachable"], 20)
            server.kill()
            wait_until(lambda: not flower.data()["snapshot"]["broker"]["reachable"], 30, "a page without Redis")
            document = flower.data()["snapshot"]
            assert document["datasets"]["chat"]["counts"]["accepted"] == 3
            assert document["datasets"]["chat"]["counts"]["queued"] is None
            answer = flower.press({"action": "pause", "dataset": "chat"})
            assert (answer.status, "cannot be reached" in answer.json()["error"]) == (503, True)
            server.start()
            wait_until(lambda: flower.data()["snapshot"]["broker"]["reachable"], 30, "Redis again")


@pytest.mark.slow
def test_a_prefix_before_every_address(world: World, tmp_path: Path) -> None:
    """Behind a proxy with FLOWER_URL_PREFIX the page, its files and its links all have the prefix."""
    with FlowerProcess(world.mill.env, log_dir=tmp_path, arguments=("--url_prefix=mill",)) as flower:
        flower.wait_ready()
        assert flower.ask("/mill/").headers["location"] == "/mill/pipeline"
        page = flower.ask("/mill/pipeline").text
        assert 'data-url="/mill/pipeline"' in page
        for file in re.findall(r'<(?:script|link)[^>]+(?:src|href)="([^"]+)"', page):
            assert file.startswith("/mill/")
            assert flower.ask(file).status == 200, file
        assert flower.ask("/mill/pipeline/data").status == 200
