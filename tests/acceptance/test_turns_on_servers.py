"""Conversations whose turns are all made anew, on each kind of server: what was asked, kept and recorded of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.records import Kind
from producer.simulator import shapes, tokens
from tests.conftest import ModelServerFactory
from tests.support.aftermath import assert_quiet
from tests.support.books import balanced, records
from tests.support.byte_tokenizer import make_byte_tokenizer
from tests.support.conversations import Message, Talk, chat_rules, expected_of, generate_rules, talks
from tests.support.jsonl_check import check_jsonl
from tests.support.mill import Mill
from tests.support.real_servers import (
    LLAMA_CONTROL_IDS,
    LLAMA_END_IDS,
    llama_server,
    make_tiny_model,
    transformers_server,
)
from tests.support.recording_proxy import RecordingProxy

_FEW, _MANY = 15, 200
_SLOTS = 4
_LONGEST_S = 1500.0
_BIG_ENGINE = (
    "--continuous-batching",
    "--cb-block-size",
    "32",
    "--cb-num-blocks",
    "256",
    "--cb-max-batch-tokens",
    "512",
)

Record = dict[str, Any]
few_or_many = pytest.mark.parametrize(
    "count", [_FEW, pytest.param(_MANY, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)


@few_or_many
def test_on_a_chat_server(mill: Mill, model_server: ModelServerFactory, count: int) -> None:
    """Every turn is asked once with the turns made so far, tools get the source's results, and ids are the server's."""
    server = model_server(chat_rules())
    made = _run(mill, talks(count), "--seed", "5")

    _assert_asked_once(_flat(made), [request.body["messages"] for request in server.requests])
    for talk, turns in made.items():
        assert turns[-1]["ended"] == talk.ended
    for turn in _flat(made):
        assert turn["ids"] == "server"
        assert shapes.decode(turn["prompt_token_ids"]) == shapes.render_prompt(turn["messages"])
        spoken = json.dumps(turn["tool_calls"]) if turn["tool_calls"] else turn["content"]
        assert shapes.decode(turn["output_ids"]) == spoken
        assert len(turn["output_ids"]) == turn["usage"]["completion_tokens"]


@few_or_many
def test_on_token_ids(mill: Mill, model_server: ModelServerFactory, tmp_path: Path, count: int) -> None:
    """Over SGLang's /generate each prompt is the template's rendering of the turns made so far, and ids are exact."""
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    server = model_server(generate_rules(), dialect="sglang")
    mill.env |= {"MILL_PROTOCOL": "sglang", "MILL_TOKENIZER": str(make_byte_tokenizer(tmp_path / "tokenizer"))}
    made = _run(mill, talks(count))

    sent = [tokens.decode(request.body["input_ids"]) for request in server.requests]
    assert Counter(sent) == Counter(_rendered(turn["messages"]) for turn in _flat(made))
    for talk, turns in made.items():
        assert turns[-1]["ended"] == talk.ended
    for turn in _flat(made):
        assert (turn["ids"], turn["ids_end"]) == ("server", "eos")
        assert turn["ids_check"] in {"ok", None}
        assert tokens.decode(turn["prompt_token_ids"]) == _rendered(turn["messages"])
        text = turn["content"] if turn["raw"] is None else turn["raw"]
        assert tokens.decode(turn["output_ids"]) == text + tokens.END
        assert len(turn["output_ids"]) == turn["usage"]["completion_tokens"]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(600)
def test_a_killed_worker_costs_no_finished_turn(mill: Mill, model_server: ModelServerFactory) -> None:
    """After kill -9 in the middle no durable turn is asked again, and every conversation becomes what it would have."""
    conversations = talks(_MANY)
    server = model_server(chat_rules(), latency_s=0.05)
    _enqueue(mill, conversations)
    first = mill.worker(concurrency=8)
    mill.wait_recorded(_MANY // 3, timeout_s=_LONGEST_S)
    first.kill()
    kept, finished = _kept_turns(mill), records(mill)
    durable = [turn["messages"] for turn in kept + finished]
    assert {turn["id"].partition("#")[0] for turn in kept} - {record["id"] for record in finished}, "none was half done"
    mill.worker(concurrency=8)
    mill.wait_recorded(_MANY, timeout_s=_LONGEST_S)
    made = _conversations(mill, conversations)

    seen = Counter(_key(request.body["messages"]) for request in server.requests)
    assert {seen[_key(history)] for history in durable} == {1}
    assert set(seen) == {_key(turn["messages"]) for turn in _flat(made)}
    assert seen.total() - len(seen) <= 8  # what the dead worker was waiting for


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_llama_cpp(mill: Mill, tmp_path: Path) -> None:
    """A real model's turns become the next turns' history, each with the ids that the server decodes to its text."""
    with llama_server(tmp_path, slots=_SLOTS) as server, RecordingProxy(server.port) as proxy:
        mill.env.update(MILL_MODEL_URLS=proxy.url, MILL_MAX_IN_FLIGHT=str(_SLOTS))
        made = _run(mill, talks(_MANY), "--max-tokens", "8", "--keep-truncated", "--seed", "5")
        _assert_asked_once(_flat(made), [body["messages"] for body in proxy.requests])
        for turn in _flat(made):
            ids, text = turn["output_ids"], turn["content"] if turn["raw"] is None else turn["raw"]
            assert len(ids) == turn["usage"]["completion_tokens"]
            assert (ids[-1] in LLAMA_END_IDS) == (turn["ids_end"] == "eos") == (turn["finish_reason"] == "stop")
            spoken = [id_ for id_ in ids if id_ not in LLAMA_CONTROL_IDS]
            assert server.ask("/detokenize", {"tokens": spoken})["content"] == text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_transformers_serve(mill: Mill, tmp_path: Path) -> None:
    """A server that gives no ids gets the thoughts and answers of the turns made so far, each turn once."""
    model = make_tiny_model(tmp_path)
    with transformers_server(model, tmp_path, *_BIG_ENGINE) as server, RecordingProxy(server.port) as proxy:
        mill.env.update(MILL_MODEL_URLS=proxy.url, MILL_MAX_IN_FLIGHT=str(_SLOTS))
        made = _run(mill, talks(_MANY), "--max-tokens", "24")
        _assert_asked_once(_flat(made), [body["messages"] for body in proxy.requests])
    for turn in _flat(made):
        assert (turn["content"], turn["reasoning"]) == ("Yes, gladly!", "Let me think.")
        assert (turn["output_ids"], turn["prompt_token_ids"], turn["ids"]) == (None, None, None)


def _enqueue(mill: Mill, conversations: Sequence[Talk], *options: str) -> None:
    mill.enqueue([talk.row for talk in conversations], "--turns", "all", *options)


def _run(mill: Mill, conversations: Sequence[Talk], *options: str) -> dict[Talk, list[Record]]:
    """Have them all made by one worker, and return each one's turns as they must be (see `_conversations`)."""
    _enqueue(mill, conversations, *options)
    worker = mill.worker(concurrency=_SLOTS)
    mill.wait_recorded(len(conversations), timeout_s=_LONGEST_S)
    made = _conversations(mill, conversations)
    assert worker.stop() == 0
    assert_quiet(worker.output())
    return made


def _conversations(mill: Mill, conversations: Sequence[Talk]) -> dict[Talk, list[Record]]:
    """Return each conversation's turns, the last of which is its record; assert that they are what must become of it.

    Each is recorded once, each turn answers the turns made before it, and it ends where it must.
    """
    mill.wait_idle()
    accepted, rejected = records(mill), records(mill, kind=Kind.REJECTED)
    balanced(mill, accepted=len(accepted), rejected=len(rejected), failed=0)
    by_id = {record["source"]["id"]: record for record in accepted + rejected}
    assert len(accepted) + len(rejected) == len(by_id) == len(conversations)
    kept = {turn["id"]: turn for turn in _kept_turns(mill)}
    made = {}
    for talk in conversations:
        record = by_id[talk.id]
        turns = made[talk] = [*(kept[turn["id"]] for turn in record["turns"][:-1]), record]
        assert [turn["id"] for turn in record["turns"]] == [f"{record['id']}#turn{n + 1}" for n in range(len(turns))]
        expected = expected_of(talk, [_said(turn) for turn in turns])
        assert [turn["messages"] for turn in turns] == expected.histories
        assert record["ended"] == (expected.ended if record["verdict"] == "accepted" else "turn_rejected")
        assert record["source_messages"] == talk.row["messages"][:-1]
    return made


def _kept_turns(mill: Mill) -> list[Record]:
    """Return the turns that are durable before their conversation is recorded."""
    [file] = mill.folder().path.glob(f"turns/*/{mill.out().name}")
    return list(check_jsonl(file).records)


def _flat(made: dict[Talk, list[Record]]) -> list[Record]:
    return [turn for turns in made.values() for turn in turns]


def _said(turn: Record) -> Message:
    """Return a turn as the history of the next one holds it."""
    optional = {"reasoning_content": turn["reasoning"], "tool_calls": turn["tool_calls"]}
    said = {"role": "assistant", "content": turn["content"]}
    return said | {name: value for name, value in optional.items() if value}


def _assert_asked_once(turns: Iterable[Record], sent: Iterable[list[Message]]) -> None:
    """Assert that the server was sent each turn's history once, and nothing else."""
    assert Counter(map(_key, sent)) == Counter(_key(turn["messages"]) for turn in turns)


def _key(messages: list[Message]) -> str:
    return json.dumps(messages, sort_keys=True)


def _rendered(messages: Iterable[Message]) -> str:
    """Return a prompt as the template of `make_byte_tokenizer` renders it."""
    text = ""
    for message in messages:
        text += f"{tokens.START}{message['role']}\n{(message['content'] or '').lstrip(chr(10))}"
        for call in message.get("tool_calls", ()):
            function = call["function"]
            text += (
                f'\n<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
            )
        text += f"{tokens.END}\n"
    return f"{text}{tokens.START}assistant\n"
