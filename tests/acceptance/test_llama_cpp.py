"""Real prompts become real records through llama.cpp's own server with SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.records import Kind
from tests.support.aftermath import assert_balanced, assert_quiet
from tests.support.jsonl_check import check_jsonl
from tests.support.mill import Mill
from tests.support.processes import wait_until
from tests.support.real_servers import (
    LLAMA_CONTEXT_TOKENS,
    LLAMA_CONTROL_IDS,
    LLAMA_END_IDS,
    RealServer,
    llama_server,
)

_MODEL = "SmolLM2-135M-Instruct"
_SLOTS = 4
_RUN_S = 120.0
"""Seconds that a dozen short answers may take on a busy machine."""

_PLAIN = [
    "Name three fruits.",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs has a spider?",
    "Übersetze ins Englische: Guten Morgen 🌅",
]
_CONVERSATIONS: list[list[dict[str, str]]] = [
    [
        {"role": "system", "content": "You answer with a single word."},
        {"role": "user", "content": "Which colour has grass?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada, how can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "system", "content": "You are a poet."},
        {"role": "user", "content": "Write a line about rain."},
        {"role": "assistant", "content": "Rain taps the roof like a patient friend."},
        {"role": "user", "content": "Now one about snow."},
    ],
]
_SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Is the moon a planet?"},
        {"from": "gpt", "value": "No, it is a satellite of the earth."},
    ]
}
_ROWS: list[dict[str, Any]] = [
    *({"prompt": text} for text in _PLAIN),
    *({"messages": messages} for messages in _CONVERSATIONS),
    _SHAREGPT,
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Run one llama.cpp server for this file."""
    with llama_server(tmp_path_factory.mktemp("llama"), slots=_SLOTS) as server:
        yield server


@pytest.fixture
def asking_llama(mill: Mill, llama: RealServer) -> Mill:
    """Return the product, pointed at the llama.cpp server."""
    mill.env.update(MILL_MODEL_URLS=f"{llama.url}/v1", MILL_MAX_IN_FLIGHT=str(_SLOTS))
    return mill


def _records(mill: Mill, kind: Kind = Kind.ACCEPTED, dataset: str = "case") -> list[dict[str, Any]]:
    """Return the sound lines of one of the dataset's files."""
    return list(check_jsonl(mill.folder(dataset).lines(kind)).records)


def _finish(mill: Mill, count: int, dataset: str = "case") -> None:
    mill.wait_recorded(count, dataset, timeout_s=_RUN_S)
    mill.wait_idle(dataset)


def test_prompts_and_conversations_become_records(asking_llama: Mill, llama: RealServer) -> None:
    """Each row gives one record with a real answer, and the server read every turn of it through its own template."""
    mill = asking_llama
    mill.enqueue(_ROWS, "--max-tokens", "24", "--keep-truncated", "--seed", "7")
    worker = mill.worker()
    _finish(mill, len(_ROWS))

    records = _records(mill)
    asked = [record["messages"] for record in records]
    sharegpt = [{"role": "user", "content": "Is the moon a planet?"}]
    expected = [[{"role": "user", "content": text}] for text in _PLAIN] + _CONVERSATIONS + [sharegpt]
    assert sorted(map(json.dumps, asked)) == sorted(map(json.dumps, expected))
    for record in records:
        assert record["content"].strip()
        assert record["reasoning"] is None
        usage = record["usage"]
        assert usage["prompt_tokens"] == _count_prompt_tokens(llama, record["messages"])
        assert record["finish_reason"] in {"stop", "length"}
        assert 1 <= usage["completion_tokens"] <= 24
        assert usage["completion_tokens"] == 24 or record["finish_reason"] == "stop"
        assert usage["cached_tokens"] is not None
        assert (record["model"], record["endpoint"], record["attempts"]) == (_MODEL, llama.url, 1)
    assert len({record["seed"] for record in records}) == len(_ROWS)
    assert "complete" in mill.run("verify", "case").stdout
    assert worker.stop() == 0
    assert_quiet(worker.output())


def _assert_exact(record: dict[str, Any], server: RealServer) -> None:
    """Assert that the answer's ids are the server's own: as many as it counted, and its text when it decodes them.

    A character that the limit cuts is U+FFFD in both; tokens of control are in the ids alone.
    """
    ids, text = record["output_ids"], record["content"] if record["raw"] is None else record["raw"]
    assert len(ids) == record["usage"]["completion_tokens"]
    assert (record["ids"], record["backend"].split()[0]) == ("server", "llama.cpp")
    assert record["ids_end"] == ("eos" if record["finish_reason"] == "stop" else "none")
    assert (ids[-1] in LLAMA_END_IDS) == (record["ids_end"] == "eos")
    spoken = [id_ for id_ in ids if id_ not in LLAMA_CONTROL_IDS]
    assert server.ask("/detokenize", {"tokens": spoken})["content"] == text
    assert record["notes"] == []


def test_exact_output_ids_come_by_themselves(asking_llama: Mill, llama: RealServer) -> None:
    """The server is recognised and asked in its own way: every answer has the ids that it was made of."""
    mill = asking_llama
    mill.enqueue(_PLAIN, "--max-tokens", "48", "--keep-truncated", "--seed", "11")
    mill.worker()
    _finish(mill, len(_PLAIN))

    for record in _records(mill):
        _assert_exact(record, llama)
        assert record["prompt_token_ids"] is None  # it never gives those
    tokens = mill.run("export", "case", "--format", "tokens", "--output", "tokens.jsonl", expect=1)
    assert (
        f"{len(_PLAIN)} left out: the server gave exact token ids of the answer, but none of the prompt"
        in tokens.stdout + tokens.stderr
    )
    assert not (mill.path / "tokens.jsonl").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_answers_are_exact(asking_llama: Mill, llama: RealServer) -> None:
    """Each of 200 real answers, those that are rejected too, has ids that the server decodes to the record's text."""
    mill = asking_llama
    subjects = ("the sea", "the number {}", "un café nº {}", "\U0001f305 and {}")
    prompts = [f"Say something about {subjects[number % 4].format(number)} ({number})." for number in range(200)]
    mill.enqueue(prompts, "--max-tokens", "16", "--keep-truncated", "--seed", "1")
    mill.worker()
    mill.wait_recorded(len(prompts), timeout_s=900)
    mill.wait_idle()

    # A small model may say nothing at all, or the same all over: such an answer is rejected, and has its ids too.
    answered = _records(mill) + (_records(mill, Kind.REJECTED) if mill.folder().lines(Kind.REJECTED).exists() else [])
    assert sorted(record["messages"][-1]["content"] for record in answered) == sorted(prompts)
    for record in answered:
        _assert_exact(record, llama)


def test_a_character_that_the_limit_cuts_is_marked(asking_llama: Mill, llama: RealServer) -> None:
    """Cut at every length, emojis of several tokens each have exact ids, and the whole text tells of the cut one."""
    mill = asking_llama
    for limit in range(1, 8):
        words = ("--max-tokens", str(limit), "--keep-truncated", "--temperature", "0")
        mill.enqueue(["Repeat exactly: " + "\U0001f305\U0001f9a9" * 5], *words, dataset=f"cut-{limit}")
    mill.worker()
    for limit in range(1, 8):
        _finish(mill, 1, f"cut-{limit}")

    records = [record for limit in range(1, 8) for record in _records(mill, dataset=f"cut-{limit}")]
    for record in records:
        _assert_exact(record, llama)
    assert [record["raw"] or record["content"] for record in records] == [
        *("\ufffd", "\ufffd", "\U0001f305"),
        *("\U0001f305\ufffd", "\U0001f305\ufffd", "\U0001f305\U0001f9a9", "\U0001f305\U0001f9a9\ufffd"),
    ]


def test_ids_that_the_server_was_not_asked_for_are_null(asking_llama: Mill) -> None:
    """Asked as any other server (MILL_PROTOCOL=openai) it gives no ids, and no export makes them up out of the text."""
    mill = asking_llama
    mill.env["MILL_PROTOCOL"] = "openai"
    mill.enqueue(_PLAIN, "--max-tokens", "16", "--keep-truncated")
    mill.worker()
    _finish(mill, len(_PLAIN))

    for record in _records(mill):
        assert (record["output_ids"], record["prompt_token_ids"], record["ids"]) == (None, None, None)
        assert (record["ids_end"], record["backend"]) == (None, None)
    mill.run("export", "case", "--format", "openai", "--output", "chat.jsonl")
    rows = [json.loads(line) for line in (mill.path / "chat.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert len(rows) == len(_PLAIN)


def test_a_parameter_that_it_would_pass_over_is_told(asking_llama: Mill) -> None:
    """llama.cpp has another name for the repetition penalty, and says nothing about ours: the dataset is paused."""
    mill = asking_llama
    mill.enqueue(_PLAIN, "--repetition-penalty", "1.1", "--max-tokens", "16")
    mill.worker()
    words = "does not know repetition_penalty (did you mean repeat_penalty?)"
    wait_until(lambda: words in " ".join(mill.run("status", expect=None).stdout.split()), 30, "the dataset's pause")
    assert mill.counts()["queued"] == len(_PLAIN)


def test_cut_answers_are_kept_as_told(asking_llama: Mill) -> None:
    """An answer cut at the limit is rejected as truncated with its text, or accepted where that was asked for."""
    mill = asking_llama
    story = ["Tell me a long story about a dog.", "Explain in detail how a steam engine works."]
    mill.enqueue(story, "--max-tokens", "6", dataset="strict")
    mill.enqueue(story, "--max-tokens", "6", "--keep-truncated", dataset="lenient")
    mill.worker()
    _finish(mill, len(story), "strict")
    _finish(mill, len(story), "lenient")

    rejected, accepted = _records(mill, Kind.REJECTED, "strict"), _records(mill, dataset="lenient")
    assert [record["reason"] for record in rejected] == ["truncated"] * len(story)
    assert [record["reason"] for record in accepted] == [None] * len(story)
    for record in rejected + accepted:
        assert record["finish_reason"] == "length"
        assert record["usage"]["completion_tokens"] == 6
        assert record["content"].strip()
    assert not mill.out("strict").exists()
    for dataset in ("strict", "lenient"):
        assert "NOT complete" not in mill.run("verify", dataset).stdout


def test_a_prompt_longer_than_the_context_fails_at_once(asking_llama: Mill) -> None:
    """It costs one request and fails with the server's own words; its neighbours are answered."""
    mill = asking_llama
    mill.enqueue(["word " * 2 * LLAMA_CONTEXT_TOKENS, *_PLAIN[:3]], "--max-tokens", "8", "--keep-truncated")
    mill.worker()
    _finish(mill, 4)

    [failed] = _records(mill, Kind.FAILED)
    assert failed["reason"] == "context_overflow"
    assert f"exceeds the available context size ({LLAMA_CONTEXT_TOKENS} tokens)" in failed["error"]
    assert failed["attempts"] == 1
    assert failed["content"] is None
    assert len(_records(mill)) == 3
    assert "1 sample is failed" in mill.run("verify", "case", expect=1).stdout


@pytest.mark.fault
def test_a_server_killed_in_the_middle_costs_nothing(mill: Mill, tmp_path: Path) -> None:
    """After kill -9 of the server and its return on the same port every prompt has one answer, and none has failed."""
    prompts = [f"Count upwards from {number}." for number in range(12)]
    with llama_server(tmp_path, slots=_SLOTS) as server:
        mill.env.update(MILL_MODEL_URLS=server.url, MILL_MAX_IN_FLIGHT=str(_SLOTS), MILL_MAX_ATTEMPTS="2")
        mill.enqueue(prompts, "--max-tokens", "32", "--keep-truncated")
        worker = mill.worker()
        mill.wait_recorded(2, timeout_s=_RUN_S)
        server.process.kill()
        done = mill.recorded()
        assert done < len(prompts), "the server was too fast to be killed in the middle"
        worker.wait_for_output("is down")
        server.start()
        _finish(mill, len(prompts))

    assert_balanced(mill, prompts)
    assert sum(bool(record["faults"]) for record in _records(mill)) <= _SLOTS
    assert worker.stop() == 0
    assert_quiet(worker.output())


def _count_prompt_tokens(server: RealServer, messages: list[dict[str, str]]) -> int:
    """Return how many tokens the server itself makes of a conversation."""
    prompt = server.ask("/apply-template", {"messages": messages})["prompt"]
    tokens = server.ask("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})["tokens"]
    return len(tokens)
