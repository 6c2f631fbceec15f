"""Conversations in the shapes that datasets have them: what is asked, what is refused, what the server refuses."""

from __future__ import annotations

import json
from typing import Any

from app.records import Kind
from tests.conftest import ModelServerFactory
from tests.support.books import balanced, by_source_id, records
from tests.support.mill import Mill


def turns(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    """Return turns under ShareGPT's keys."""
    return [{"from": role, "value": text} for role, text in pairs]


def chat(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    """Return turns under OpenAI's keys."""
    return [{"role": role, "content": text} for role, text in pairs]


SHAREGPT: dict[str, dict[str, Any]] = {
    "plain": {"conversations": turns(("human", "hi"), ("gpt", "hello"), ("human", "bye?"))},
    "aliases": {"conversations": turns(("User ", "a"), ("chatgpt", "b"), ("user", "c"))},
    "system": {"conversations": turns(("system", "Be brief."), ("human", "x"), ("bing", "y"), ("HUMAN", "z"))},
    "column": {"system": "Be slow.", "conversations": turns(("human", "under a system column"))},
    "mixed keys": {"conversations": chat(("user", "openai turns in the other column"))},
    "other way": {"messages": turns(("human", "sharegpt turns in the other column"))},
    "tool": {
        "conversations": turns(
            ("human", "2+2?"),
            ("function_call", json.dumps({"name": "add", "arguments": {"a": 2, "b": 2}})),
            ("observation", "4"),
        )
    },
    "stranger": {"conversations": turns(("narrator", "who am I?"), ("human", "q"))},
    "other field": {"conversations": [{"from": "human", "text": "elsewhere"}]},
    "lone result": {"conversations": turns(("human", "t"), ("tool_response", "ok"))},
}


def test_role_names_of_other_worlds(mill: Mill, model_server: ModelServerFactory) -> None:
    """Known role names become the server's; unknown ones and missing fields are refused by row, with the word."""
    server = model_server(strict_roles=True)
    mill.enqueue([{"id": name, **row} for name, row in SHAREGPT.items()])
    mill.worker()
    balanced(mill, read=10, refused=3, accepted=6, failed=1)
    roles = {request.key: [turn["role"] for turn in request.body["messages"]] for request in server.requests}
    assert roles["bye?"] == roles["c"] == ["user", "assistant", "user"]
    assert roles["z"] == ["system", "user", "assistant", "user"]
    assert roles["under a system column"] == ["system", "user"]
    assert roles["2+2?"] == ["user", "assistant", "tool"]
    assert set(by_source_id(mill, kind=Kind.FAILED)) == {"tool"}
    refused = {row["row"]: f"{row['reason']}: {row['detail']}" for row in records(mill, kind=Kind.REFUSED)}
    assert list(refused) == [8, 9, 10]
    assert "narrator" in refused[8]
    assert "'value'" in refused[9]
    assert "tool_response" in refused[10]


SHAPES: dict[str, dict[str, Any]] = {
    "reference": {"messages": chat(("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "kept"))},
    "empty reference": {"messages": chat(("user", "open"), ("assistant", ""))},
    "plain": {"messages": chat(("user", "plain"))},
    "only system": {"messages": chat(("system", "s"))},
    "no turns": {"messages": []},
    "null": {"messages": None},
    "nothing": {},
    "assistant first": {"messages": chat(("assistant", "I begin"), ("user", "then I"))},
    "two users": {"messages": chat(("user", "first"), ("user", "second"))},
    "two answers": {"messages": chat(("user", "x"), ("assistant", "a"), ("assistant", "b"), ("user", "y"))},
    "late system": {"messages": chat(("user", "early"), ("system", "late"), ("user", "after"))},
    "two systems": {"messages": chat(("system", "s1"), ("system", "s2"), ("user", "asked"))},
}


def test_shapes_of_conversations(mill: Mill, model_server: ModelServerFactory) -> None:
    """A last answer is kept as the reference, what cannot be asked is refused, what the server refuses fails once."""
    server = model_server(strict_roles=True)
    mill.enqueue([{"id": name, **row} for name, row in SHAPES.items()])
    mill.worker()
    balanced(mill, read=12, refused=4, accepted=3, failed=5)
    accepted = by_source_id(mill)
    assert accepted["reference"]["reference"] == {"role": "assistant", "content": "kept"}
    assert [turn["content"] for turn in accepted["reference"]["messages"]] == ["q1", "a1", "q2"]
    assert [row["row"] for row in records(mill, kind=Kind.REFUSED)] == [4, 5, 6, 7]
    failed = by_source_id(mill, kind=Kind.FAILED)
    assert set(failed) == {"assistant first", "two users", "two answers", "late system", "two systems"}
    for record in failed.values():
        assert (record["attempts"], record["reason"]) == (1, "bad_request")
        assert "roles must alternate" in record["error"]
    assert len(server.requests) == 8
    mill.run("status", expect=1)


def test_prompts_that_do_not_fit(mill: Mill, model_server: ModelServerFactory) -> None:
    """A prompt over the context fails after one request with the server's words, and is asked again only when told."""
    server = model_server(max_chars=2000)
    rows = [{"id": f"l{n}", "prompt": f"{n} " + "w " * (1500 if n % 2 else 5)} for n in range(5)]
    mill.enqueue(rows)
    mill.worker()
    balanced(mill, accepted=3, failed=2, left=0)
    for record in by_source_id(mill, kind=Kind.FAILED).values():
        assert (record["attempts"], record["reason"]) == (1, "context_overflow")
        assert "maximum context length" in record["error"]
    told = mill.run("status", expect=1).stdout
    assert "context_overflow 2" in told
    mill.run("monitor", "--until-done", expect=1)
    again = "left aside 2 that failed for good (context_overflow 2): producer retry case asks again"
    assert f" queued 0; {again}\n" in mill.enqueue(rows).stdout
    assert " queued 0\n" in mill.enqueue(rows, "--no-retry-failed").stdout
    assert len(server.requests) == 5
    none = mill.run("retry", "case", "--fault", "timeout").stdout
    assert none == "case: nothing to ask again: no sample has failed with timeout.\n"
    server.set_options(max_chars=None)
    assert "queued 2 failed samples again" in mill.run("retry", "case", "--fault", "context_overflow").stdout
    balanced(mill, accepted=5, failed=0)
    assert {record["round"] for record in records(mill)} == {0, 1}
    mill.run("status")
    mill.run("verify")


def test_what_was_refused_is_asked_again_when_told(mill: Mill, model_server: ModelServerFactory) -> None:
    """Enqueue asks a refused sample again with --retry-failed, and with --new-settings; a run of a recipe likewise."""
    model_server([{"match": "bad", "status": 400}])
    rows = ["good", "bad"]
    mill.enqueue(rows)
    mill.worker()
    balanced(mill, accepted=1, failed=1, left=0)
    aside = "left aside 1 that failed for good (bad_request 1)"
    assert f"queued 0; {aside}" in mill.enqueue(rows).stdout
    recipe = mill.path / "recipe.toml"
    recipe.write_text(f'[[dataset]]\nname = "case"\nsource = "{mill.write_rows(rows)}"\n', encoding="utf-8")
    assert aside in mill.run("run", str(recipe)).stderr
    for told in (("--retry-failed",), ("--temperature", "0.5", "--new-settings")):
        said = mill.enqueue(rows, *told).stdout
        assert "queued 1 (asked again 1)\n" in said
        balanced(mill, accepted=1, failed=1, left=0)
