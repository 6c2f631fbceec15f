"""Records through `transformers serve`, which refuses unknown fields, splits reasoning off, and can die."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.records import Kind
from tests.support.aftermath import assert_balanced, assert_quiet, prompts
from tests.support.jsonl_check import check_jsonl
from tests.support.mill import Mill
from tests.support.processes import wait_until
from tests.support.real_servers import RealServer, make_tiny_model, transformers_server
from tests.support.tiny_model import ANSWER, THOUGHT, TOKENS

pytestmark = pytest.mark.slow

_SLOTS = 4
_SMALL_ENGINE = (
    "--continuous-batching",
    "--cb-block-size",
    "256",
    "--cb-num-blocks",
    "4",
    "--cb-max-batch-tokens",
    "256",
)
"""An engine with room for 1,024 tokens of all requests together; it dies of a longer answer."""
_RUN_S = 120.0
_ROWS: list[dict[str, Any]] = [
    {"prompt": "Is water wet?"},
    {"prompt": "Ist das Wasser nass? 🌊"},
    {"instruction": "Answer the question.", "input": "Is it raining?"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Shall we go?"}]},
    {
        "messages": [
            {"role": "user", "content": "May I ask you something?"},
            {"role": "assistant", "content": "Of course."},
            {"role": "user", "content": "Will you help me?"},
        ]
    },
]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the model once."""
    return make_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def transformers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Run one `transformers serve` for this file."""
    with transformers_server(tiny_model, tmp_path_factory.mktemp("transformers")) as server:
        yield server


@pytest.fixture
def asking_transformers(mill: Mill, transformers: RealServer) -> Mill:
    """Return the product, pointed at `transformers serve`."""
    mill.env.update(MILL_MODEL_URLS=f"{transformers.url}/v1", MILL_MAX_IN_FLIGHT=str(_SLOTS))
    return mill


def _records(mill: Mill, kind: Kind = Kind.ACCEPTED, dataset: str = "case") -> list[dict[str, Any]]:
    """Return the sound lines of one of the dataset's files."""
    return list(check_jsonl(mill.folder(dataset).lines(kind)).records)


def _finish(mill: Mill, count: int, dataset: str = "case") -> None:
    mill.wait_recorded(count, dataset, timeout_s=_RUN_S)
    mill.wait_idle(dataset)


def _answers(server: RealServer, status: int) -> int:
    """Return how many chat requests the server says it answered with a status."""
    return server.process.output().count(f'"POST /v1/chat/completions HTTP/1.1" {status}')


def test_reasoning_and_answer_come_apart(asking_transformers: Mill, tiny_model: Path) -> None:
    """The thought that the template began is the record's reasoning, the rest its content; options turn it off."""
    mill = asking_transformers
    mill.enqueue(_ROWS, dataset="thinking")
    mill.enqueue(_ROWS, "--chat-template-kwargs", '{"thinking": false}', dataset="direct")
    worker = mill.worker()
    _finish(mill, len(_ROWS), "thinking")
    _finish(mill, len(_ROWS), "direct")

    thinking, direct = _records(mill, dataset="thinking"), _records(mill, dataset="direct")
    assert len(thinking) == len(direct) == len(_ROWS)
    for record in thinking + direct:
        assert record["content"] == "".join(ANSWER)
        assert (record["finish_reason"], record["attempts"], record["faults"]) == ("stop", 1, [])
        assert record["model"] == str(tiny_model)
        assert record["output_ids"] is record["prompt_token_ids"] is None
        assert record["usage"]["prompt_tokens"] > 0
    for record in thinking:
        assert (record["reasoning"], record["reasoning_field"]) == ("".join(THOUGHT), "reasoning_content")
        assert record["usage"]["completion_tokens"] == TOKENS
    assert {(record["reasoning"], record["reasoning_field"]) for record in direct} == {(None, None)}
    for dataset in ("thinking", "direct"):
        assert "NOT complete" not in mill.run("verify", dataset).stdout
    assert worker.stop() == 0
    assert_quiet(worker.output())


def test_it_is_recognised_and_sent_nothing_that_it_refuses(asking_transformers: Mill, transformers: RealServer) -> None:
    """The server gives no ids and refuses to be asked for them: it is not asked, and none of its answers is a 422."""
    mill = asking_transformers
    refused, answered = _answers(transformers, 422), _answers(transformers, 200)
    mill.enqueue(prompts(8))
    mill.worker(concurrency=1)
    _finish(mill, 8)

    assert _answers(transformers, 422) == refused
    assert _answers(transformers, 200) - answered == 8
    assert [(record["attempts"], record["faults"]) for record in _records(mill)] == [(1, [])] * 8
    assert {record["backend"] for record in _records(mill)} == {"transformers"}


def test_a_refused_field_of_ours_is_asked_for_once(asking_transformers: Mill, transformers: RealServer) -> None:
    """Asked as any other, its 422 for `return_token_ids` costs one request of a worker's life, no sample an attempt."""
    mill = asking_transformers
    mill.env["MILL_PROTOCOL"] = "openai"
    refused, answered = _answers(transformers, 422), _answers(transformers, 200)
    mill.enqueue(prompts(8))
    mill.worker(concurrency=1)
    _finish(mill, 8)

    assert _answers(transformers, 422) - refused == 1
    assert _answers(transformers, 200) - answered == 8
    assert [(record["attempts"], record["faults"]) for record in _records(mill)] == [(1, [])] * 8


def test_a_field_that_the_server_does_not_know_pauses_the_dataset(
    asking_transformers: Mill, transformers: RealServer
) -> None:
    """A sampling field that the server would refuse costs no request; without it the samples are asked."""
    mill = asking_transformers
    rows = mill.write_rows(prompts(3))
    before = _answers(transformers, 422)
    mill.enqueue(rows, "--top-k", "20")
    mill.worker(concurrency=1)
    words = "transformers serve does not know top_k"
    wait_until(lambda: words in " ".join(mill.run("status", expect=None).stdout.split()), 60, "the dataset's pause")
    assert _answers(transformers, 422) == before

    mill.enqueue(rows, "--new-settings")
    mill.run("resume", "case")
    _finish(mill, 3)
    assert len(_records(mill)) == 3
    assert "NOT complete" not in mill.run("verify", "case").stdout


def test_a_refused_field_of_the_users_fails_with_the_servers_words(
    asking_transformers: Mill, transformers: RealServer
) -> None:
    """Sent all the same, it costs one request a sample and fails with the server's words."""
    mill = asking_transformers
    mill.env["MILL_ALLOW_UNKNOWN_PARAMETERS"] = "true"
    before = _answers(transformers, 422)
    mill.enqueue(prompts(3), "--top-k", "20")
    mill.worker(concurrency=1)
    _finish(mill, 3)

    for record in _records(mill, Kind.FAILED):
        assert record["reason"] == "bad_request"
        assert "Unexpected fields in the request" in record["error"]
        assert "top_k" in record["error"]
        assert record["attempts"] == 1
    assert _answers(transformers, 422) - before == 3


def test_an_answer_cut_within_its_thought_is_no_answer(asking_transformers: Mill) -> None:
    """Cut in the thought it is rejected whatever is asked for; cut in the answer it is kept where that is asked for."""
    mill = asking_transformers
    in_answer = str(TOKENS - 3)
    mill.enqueue(prompts(2), "--max-tokens", "3", "--keep-truncated", dataset="in-thought")
    mill.enqueue(prompts(2), "--max-tokens", in_answer, dataset="in-answer")
    mill.enqueue(prompts(2), "--max-tokens", in_answer, "--keep-truncated", dataset="kept")
    mill.worker()
    for dataset in ("in-thought", "in-answer", "kept"):
        _finish(mill, 2, dataset)

    in_thought, cut = (_records(mill, Kind.REJECTED, dataset) for dataset in ("in-thought", "in-answer"))
    assert [record["reason"] for record in in_thought] == ["truncated_in_think"] * 2
    assert [record["reason"] for record in cut] == ["truncated"] * 2
    assert {(record["content"], record["reasoning"]) for record in in_thought} == {("", "".join(THOUGHT[:3]))}
    for record in cut + _records(mill, dataset="kept"):
        assert (record["content"], record["reasoning"]) == ("".join(ANSWER[:2]), "".join(THOUGHT))
        assert record["finish_reason"] == "length"


def test_a_wrong_model_name_pauses_the_dataset_and_costs_no_sample(asking_transformers: Mill, tiny_model: Path) -> None:
    """The dataset waits with the server's words while others go on, and is answered once its name is right."""
    mill = asking_transformers
    rows = mill.write_rows(prompts(6), name="wrong")
    mill.enqueue(rows, "--model", "no-such-model", dataset="wrong")
    worker = mill.worker()
    worker.wait_for_output("dataset wrong is paused")
    said = " ".join(mill.run("status", "wrong", expect=None).stdout.split())
    assert "Server is pinned to" in said
    assert "no-such-model" in said
    assert mill.recorded("wrong") == 0

    mill.enqueue(prompts(4), "--model", str(tiny_model), dataset="right")
    _finish(mill, 4, "right")

    mill.enqueue(rows, "--model", str(tiny_model), "--new-settings", dataset="wrong")
    mill.run("resume", "wrong")
    _finish(mill, 6, "wrong")
    assert [(record["attempts"], record["faults"]) for record in _records(mill, dataset="wrong")] == [(1, [])] * 6
    assert "NOT complete" not in mill.run("verify", "wrong").stdout
    assert worker.stop() == 0
    assert_quiet(worker.output())


@pytest.mark.fault
def test_a_dead_engine_costs_no_sample_an_attempt(mill: Mill, tiny_model: Path, tmp_path: Path) -> None:
    """While the front end says that its engine is dead the work waits; once it is restarted all is answered."""
    rows = prompts(12)
    with transformers_server(tiny_model, tmp_path, *_SMALL_ENGINE) as server:
        mill.env.update(MILL_MODEL_URLS=server.url, MILL_MAX_IN_FLIGHT=str(_SLOTS), MILL_MAX_ATTEMPTS="2")
        mill.enqueue(rows[:4])
        worker = mill.worker()
        _finish(mill, 4)
        _kill_engine(server)
        mill.enqueue(rows)
        worker.wait_for_output("is down")
        wait_until(lambda: "is unreachable since" in _status_text(mill), 20, "a status that tells of the dead engine")
        assert mill.recorded() == 4
        server.restart()
        _finish(mill, len(rows))

    assert_balanced(mill, rows)
    faults = [fault for record in _records(mill) for fault in record["faults"]]
    assert 1 <= len(faults) <= 2 * _SLOTS
    assert {fault["fault"] for fault in faults} <= {"engine_dead", "connect"}
    assert any("CB worker is dead" in fault["message"] for fault in faults)
    assert worker.stop() == 0
    assert_quiet(worker.output())


def _status_text(mill: Mill) -> str:
    return " ".join(mill.run("status", expect=None).stdout.split())


def _kill_engine(server: RealServer) -> None:
    """Ask for an answer that is longer than the server's whole memory, of which its engine dies."""
    question = {"messages": [{"role": "user", "content": "Sing."}], "max_tokens": 1500}
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.ask("/v1/chat/completions", {**question, "chat_template_kwargs": {"endless": True}})
    caught.value.close()
    wait_until(lambda: server.health() == 503, 30, "the engine's death", detail=server.process.tail)
