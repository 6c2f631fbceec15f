"""Answers in all their shapes: what is kept of them, which are accepted, and what can be exported."""

from __future__ import annotations

import json

import pyarrow.parquet

from app.records import Kind
from producer.simulator.shapes import decode
from tests.conftest import ModelServerFactory
from tests.support.books import balanced, by_source_id, records
from tests.support.mill import Mill

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
NO_CHOICES = '{"id":"x","object":"chat.completion","choices":[]}'
RULES = [
    {"match": "cut thought", "content": None, "reasoning": "thinking", "finish_reason": "length"},
    {"match": "new field", "content": "done", "reasoning": "thought", "reasoning_field": "reasoning"},
    {"match": "old field", "content": "done", "reasoning": "thought", "reasoning_field": "reasoning_content"},
    {"match": "tool", "tool_calls": [CALL]},
    {"match": "no choices", "body": NO_CHOICES},
    {"match": "error inside", "body": '{"error":{"message":"engine sneezed","code":422}}'},
    {"match": "page", "body": "<html>busy</html>", "content_type": "text/html"},
    {"match": "empty body", "body": ""},
    {"match": "no usage", "usage": None},
    {"match": "odd characters", "content": "smile \U0001f600 \x00 nul"},
    {
        "match": "half a pair",
        "body": json.dumps(
            {
                "choices": [
                    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x \ud83d y"}}
                ],
            }
        ),
    },
]
NAMES = [str(rule["match"]) for rule in RULES]


def test_shapes_of_answers(mill: Mill, model_server: ModelServerFactory) -> None:
    """Reasoning under either name, tool calls and odd characters are kept; what is no answer fails and is quoted."""
    server = model_server(RULES)
    mill.enqueue([{"id": name, "prompt": name} for name in [*NAMES, "plain"]], "--min-completion-tokens", "1")
    worker = mill.worker(concurrency=8)
    mill.wait_recorded(12)
    assert worker.running
    accepted, failed = by_source_id(mill), by_source_id(mill, kind=Kind.FAILED)
    balanced(mill, read=12, rejected=1, failed=len(failed))
    (cut,) = records(mill, kind=Kind.REJECTED)
    assert (cut["content"], cut["reasoning"], cut["reason"]) == (None, "thinking", "truncated_in_think")
    for name, field in (("new field", "reasoning"), ("old field", "reasoning_content")):
        record = accepted[name]
        assert (record["content"], record["reasoning"], record["reasoning_field"]) == ("done", "thought", field)
    assert accepted["tool"]["tool_calls"] == [CALL]
    assert accepted["tool"]["finish_reason"] == "tool_calls"
    assert accepted["no usage"]["usage"]["completion_tokens"] is None
    assert accepted["odd characters"]["content"] == "smile \U0001f600 \x00 nul"
    assert accepted["plain"]["content"] == "echo: plain"
    assert {"no choices", "error inside", "page", "empty body"} <= set(failed)
    for name, quoted in (("no choices", '"choices":[]'), ("error inside", "engine sneezed"), ("page", "<html>busy")):
        assert quoted in failed[name]["error"]
    for name in ("no choices", "page", "empty body"):
        assert server.count(name) == failed[name]["attempts"] == 4, "bounded retries"
        assert [fault["fault"] for fault in failed[name]["faults"]] == ["bad_answer"] * 4


def test_broken_answers(mill: Mill, model_server: ModelServerFactory) -> None:
    """Endless, huge, cut, aborted and empty answers fail after bounded tries, say so, and quote what came."""
    broken = {
        "endless body": ({"endless": True}, "bad_answer", "larger than 1048576 bytes (MILL_MAX_BODY_MB)"),
        "huge body": ({"body": "[" + "1," * 2**20}, "bad_answer", "it starts: [1,1,1"),
        "cut body": ({"body": '{"choices":[{"message":{"content":"half a'}, "bad_answer", "half a"),
        "aborted": ({"content": "half a text", "finish_reason": "abort"}, "aborted", "half a text"),
        "no reason": ({"content": "some text", "finish_reason": None}, "unfinished", "some text"),
        "nothing": (
            {"content": "", "usage": {"completion_tokens": 9}},
            "empty_answer",
            "9 tokens were generated, but no text",
        ),
    }
    server = model_server([{"match": name, **rule} for name, (rule, _kind, _quoted) in broken.items()])
    mill.env |= {"MILL_MAX_BODY_MB": "1", "MILL_MAX_ATTEMPTS": "2", "MILL_BACKOFF_MAX_S": "0.1"}
    mill.enqueue([{"id": name, "prompt": name} for name in [*broken, "plain"]])
    worker = mill.worker(concurrency=8)
    balanced(mill, accepted=1, failed=len(broken))
    failed = by_source_id(mill, kind=Kind.FAILED)
    for name, (_rule, kind, quoted) in broken.items():
        assert failed[name]["reason"] == kind
        assert quoted in failed[name]["error"], failed[name]["error"]
        tries = 22 if kind == "aborted" else 2  # an engine that aborts is excused for a while
        assert server.count(name) == failed[name]["attempts"] == tries
    assert " is down" not in worker.output()


def test_rules_for_answers(mill: Mill, model_server: ModelServerFactory) -> None:
    """Too short and truncated answers are kept whole as rejected, apart from the accepted, and can be asked again."""
    server = model_server(
        [
            {"match": "short", "content": "no"},
            {"match": "long", "content": "word " * 40},
            {"match": "leak", "content": "one <think>half</think> and the other half"},
        ]
    )
    rows = [{"id": name, "prompt": name} for name in ("short", "long", "leak", "this is fine and comes back as it is")]
    options = ("--min-completion-tokens", "10", "--max-tokens", "100")
    mill.enqueue(rows, *options)
    mill.worker()
    balanced(mill, accepted=1, rejected=3, failed=0)
    rejected = by_source_id(mill, kind=Kind.REJECTED)
    assert {name: record["reason"] for name, record in rejected.items()} == {
        "short": "too_short",
        "long": "truncated",
        "leak": "think_leak",
    }
    assert rejected["short"]["content"] == "no"
    assert len(rejected["long"]["content"]) == 100
    mill.run("status")
    mill.run("verify")
    assert "already recorded 4" in mill.enqueue(rows, *options).stdout, (
        "rejected ones are not asked again by themselves"
    )
    server.set_rules()
    told = mill.run("retry", "case", "--rejected", "--fault", "truncated").stdout
    assert "queued 1 rejected samples again" in told
    mill.wait_recorded(5)
    assert len(server.requests) == 5
    mill.enqueue([{"id": "cut", "prompt": "w" * 50}], "--max-tokens", "20", "--keep-truncated", dataset="kept")
    mill.wait_recorded(1, "kept")
    (record,) = records(mill, "kept")
    assert (record["finish_reason"], len(record["content"])) == ("length", 20)


def test_exports_read_back(mill: Mill, model_server: ModelServerFactory) -> None:
    """Every export holds each accepted record once; tokens are the server's own, and what has none is counted."""
    server = model_server([{"match": "think", "content": "An answer.", "reasoning": "Let me see."}])
    mill.enqueue(
        [
            {
                "id": "a",
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi."}],
            },
            {"id": "b", "prompt": "think first"},
        ]
    )
    mill.worker()
    mill.wait_recorded(2)
    server.set_options(token_ids=False)
    mill.enqueue([{"id": "c", "prompt": "without ids"}])
    balanced(mill, accepted=3)
    ids = {record["id"] for record in records(mill)}

    def export(form: str, name: str, *options: str) -> str:
        output = str(mill.path / name)
        return mill.run("export", "case", "--format", form, "--output", output, *options).stdout

    export("openai", "chat.jsonl", "--reasoning", "field")
    rows = [json.loads(line) for line in (mill.path / "chat.jsonl").read_text().split("\n") if line]
    assert {row["id"] for row in rows} == ids
    thought = next(row for row in rows if row["messages"][0]["content"] == "think first")
    assert thought["messages"][-1]["content"] == "An answer."
    assert "Let me see." in json.dumps(thought["messages"][-1])
    export("sharegpt", "share.parquet")
    table = pyarrow.parquet.read_table(mill.path / "share.parquet").to_pylist()
    assert len(table) == 3
    told = export("tokens", "tokens.parquet")
    assert "1 left out" in told
    tokens = pyarrow.parquet.read_table(mill.path / "tokens.parquet").to_pylist()
    assert len(tokens) == 2
    by_id = {record["id"]: record for record in records(mill)}
    for row in tokens:
        record = by_id[row["id"]]
        assert row["input_ids"] == record["prompt_token_ids"] + record["output_ids"]
        assert row["loss_mask"] == [0] * len(record["prompt_token_ids"]) + [1] * len(record["output_ids"])
        assert record["content"] in decode(record["output_ids"])
    mill.run("export", "case", "--format", "openai", "--output", str(mill.path / "chat.jsonl"), expect=2)
