"""Conversations of which every assistant turn is made anew: what is asked, what is recorded, where they end."""

from __future__ import annotations

import json
import re
from typing import Any

from app.ledger import Ledger
from app.records import Kind
from producer.simulator.server import ModelServer
from tests.conftest import ModelServerFactory
from tests.support.books import balanced, by_source_id, records
from tests.support.folders import fresh_picture, picture
from tests.support.mill import Mill
from tests.support.turns import history, talk, turn_records

ALL = ("--turns", "all")


def call(id_: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def histories(server: ModelServer) -> list[list[dict[str, Any]]]:
    """Return the messages of each request that came in, in order."""
    return [request.body["messages"] for request in server.requests]


def test_each_turn_is_asked_on_what_was_made_so_far(mill: Mill, model_server: ModelServerFactory) -> None:
    """Turns are asked in order on the history made so far, thoughts included, and recorded as turns and as a whole."""
    server = model_server([{"match": "q2", "content": "two", "reasoning": "hmm"}])
    row = talk("q1", "q2", "q3", id="a")
    mill.enqueue([row], *ALL, "--seed", "7")
    mill.worker()
    balanced(mill, read=1, accepted=1, rejected=0, failed=0, left=0)

    (record,) = records(mill)
    id_ = record["id"]
    last = history("q1", "echo: q1", "q2", "two", "q3")
    last[3]["reasoning_content"] = "hmm"
    assert histories(server) == [history("q1"), history("q1", "echo: q1", "q2"), last]
    assert len({request.body["seed"] for request in server.requests}) == 3
    assert (record["messages"], record["content"], record["reasoning"]) == (last, "echo: q3", None)
    assert record["source_messages"] == row["messages"][:-1]
    assert (record["reference"]["content"], record["attempts"], record["ended"]) == ("old", 3, None)
    assert [(turn["id"], turn["messages"], turn["finish_reason"]) for turn in record["turns"]] == [
        (f"{id_}#turn1", 1, "stop"),
        (f"{id_}#turn2", 3, "stop"),
        (f"{id_}#turn3", 5, "stop"),
    ]
    assert [turn["request_id"] for turn in record["turns"]] == [f"{id_}#turn{n}-r0-a1" for n in (1, 2, 3)]
    assert record["request_id"] == f"{id_}#turn3-r0-a1"

    first, second = turn_records(mill)
    assert (first["id"], first["messages"], first["content"]) == (f"{id_}#turn1", history("q1"), "echo: q1")
    assert (second["id"], second["content"], second["reasoning"]) == (f"{id_}#turn2", "two", "hmm")
    assert {line["verdict"] for line in (first, second)} == {"accepted"}

    tokens = sum(turn["usage"]["completion_tokens"] for turn in record["turns"])
    with Ledger(mill.folder()) as ledger:
        assert ledger.look_up([id_])[id_].tokens == tokens == 9 + 9 + 9
        assert picture(ledger) == fresh_picture(mill.folder())
    assert "already recorded 1" in mill.enqueue([row], *ALL, "--seed", "7").stdout
    refused = mill.enqueue([row], "--seed", "7", expect=2).stderr
    assert 'turns: "all" -> null' in refused
    assert len(server.requests) == 3


def test_records_of_last_turns_have_no_new_fields(mill: Mill, model_server: ModelServerFactory) -> None:
    """By default only the last turn is made anew, and its record says nothing of turns."""
    server = model_server()
    mill.enqueue([talk("q1", "q2", id="a")])
    mill.worker()
    balanced(mill, accepted=1)
    assert histories(server) == [history("q1", "old", "q2")]
    assert not {"turns", "ended", "source_messages"} & set(records(mill)[0])
    assert not mill.folder().all_turns.exists()
    manifest = json.loads(mill.folder().manifest.read_text(encoding="utf-8"))
    assert "turns" not in manifest["settings"][0]["content"]


def test_turns_that_could_not_be_kept_are_refused_before_anything_is_queued(mill: Mill) -> None:
    """A file in the place of the folder of turns ends enqueue with one sentence, and no ticket is made."""
    mill.folder().path.mkdir(parents=True)
    mill.folder().all_turns.write_text("in the way", encoding="utf-8")
    said = mill.enqueue([talk("q1", "q2")], *ALL, expect=1)
    assert re.search(r"case/turns(/\w+)? cannot be used: Not a directory; check the path and its rights\.", said.stderr)
    mill.folder().all_turns.unlink()
    assert mill.counts()["samples"] == 0
    assert "queued 1" in mill.enqueue([talk("q1", "q2")], *ALL).stdout


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "sub")]
SUM = [
    {"role": "user", "content": "sum"},
    {"role": "assistant", "content": "", "tool_calls": [call("s1", "add", '{"n": 1}')]},
    {"role": "tool", "tool_call_id": "s1", "content": "4"},
    {"role": "assistant", "content": "old"},
    {"role": "user", "content": "thanks"},
]


def test_tool_results_of_the_source_answer_the_model(mill: Mill, model_server: ModelServerFactory) -> None:
    """A call of the same tool gets the source's result under its own id, and the record says where it fits badly."""
    server = model_server([{"match": "sum", "times": 1, "tool_calls": [call("g1", "add", '{"n": 2}')]}])
    mill.enqueue([{"id": "a", "messages": SUM, "tools": TOOLS}], *ALL)
    mill.worker()
    balanced(mill, accepted=1)
    asks = {"role": "assistant", "content": None, "tool_calls": [call("g1", "add", '{"n": 2}')]}
    middle = [SUM[0], asks, {"role": "tool", "tool_call_id": "g1", "content": "4"}]
    assert histories(server) == [
        [SUM[0]],
        middle,
        [*middle, {"role": "assistant", "content": "echo: sum"}, {"role": "user", "content": "thanks"}],
    ]
    (record,) = records(mill)
    assert (record["ended"], len(record["turns"])) == (None, 3)
    assert record["notes"] == ["The result of 'add' after turn 1 is that of a call with other arguments."]
    assert [turn["tool_calls"] for turn in turn_records(mill)] == [asks["tool_calls"], None]


def test_conversations_that_end_early_say_why(mill: Mill, model_server: ModelServerFactory) -> None:
    """What cannot go on ends with what is there: no tool result, no call, no room, or a turn that broke a rule."""
    server = model_server(
        [
            {"match": "strange", "tool_calls": [call("g1", "sub")]},
            {"match": "cut", "content": "w" * 250},
        ],
        max_chars=450,
    )
    mill.enqueue(
        [
            {"id": "missing", "messages": [{"role": "user", "content": "strange"}, *SUM[1:]], "tools": TOOLS},
            {"id": "not called", "messages": SUM, "tools": TOOLS},
            talk("hello", "long " * 100, "after", id="overflow"),
            talk("fine", "cut", "after", id="rejected"),
            talk("short", "cut", id="last"),
        ],
        *(*ALL, "--max-tokens", "200"),
    )
    mill.worker()
    balanced(mill, read=5, accepted=3, rejected=2, failed=0)
    accepted, rejected = by_source_id(mill), by_source_id(mill, kind=Kind.REJECTED)
    found = {name: (one["ended"], one["reason"], len(one["turns"])) for name, one in {**accepted, **rejected}.items()}
    assert found == {
        "missing": ("tool_result_missing", None, 1),
        "not called": ("tool_not_called", None, 1),
        "overflow": ("context_overflow", None, 1),
        "rejected": ("turn_rejected", "truncated", 2),
        "last": (None, "truncated", 2),
    }
    before = "The conversation ended before the source's did: "
    assert accepted["missing"]["notes"] == [f"{before}turn 1 calls 'sub', of which the source has no result left."]
    assert accepted["overflow"]["notes"] == [f"{before}turn 2 does not fit into the model's context."]
    assert (accepted["overflow"]["content"], accepted["overflow"]["attempts"]) == ("echo: hello", 2)
    assert rejected["rejected"]["messages"] == history("fine", "echo: fine", "cut")
    assert rejected["rejected"]["source_messages"] == talk("fine", "cut", "after")["messages"][:-1]
    assert server.count("after") == 0
    with Ledger(mill.folder()) as ledger:
        assert picture(ledger) == fresh_picture(mill.folder())


def test_a_rejected_conversation_is_asked_again_from_its_rejected_turn_on(
    mill: Mill, model_server: ModelServerFactory
) -> None:
    """A retry of a rejected conversation asks the rejected turn and those after it, on the accepted ones before."""
    server = model_server([{"match": "q2", "content": "w" * 90}])
    mill.enqueue([talk("q1", "q2", "q3", id="a")], *ALL, "--max-tokens", "80")
    mill.worker()
    balanced(mill, rejected=1, accepted=0)
    server.set_rules()
    assert "queued 1 rejected samples again" in mill.run("retry", "case", "--rejected").stdout
    balanced(mill, rejected=0, accepted=1)
    assert server.counts == {"q1": 1, "q2": 2, "q3": 1}
    (record,) = records(mill)
    assert record["messages"] == history("q1", "echo: q1", "q2", "echo: q2", "q3")
    assert record["source_messages"] == talk("q1", "q2", "q3")["messages"][:-1]
    assert (record["round"], [turn["request_id"][-5:] for turn in record["turns"]]) == (1, ["r0-a1", "r1-a1", "r1-a1"])
    mill.run("verify")


def test_a_failed_conversation_goes_on_at_its_failed_turn(mill: Mill, model_server: ModelServerFactory) -> None:
    """A turn that is given up fails the sample as it was asked; a retry asks that turn, not those before it."""
    server = model_server([{"match": "q2", "status": 400}])
    row = talk("q1", "q2", "q3", id="a")
    mill.enqueue([row], *ALL)
    mill.worker()
    balanced(mill, failed=1, accepted=0)
    (failure,) = records(mill, kind=Kind.FAILED)
    assert (failure["reason"], failure["messages"]) == ("bad_request", row["messages"][:-1])
    assert failure["notes"] == ["It failed at turn 2; turn 1 is kept and not asked again."]
    server.set_rules()
    mill.run("retry", "case")
    balanced(mill, failed=0, accepted=1)
    assert server.counts == {"q1": 1, "q2": 2, "q3": 1}
    assert records(mill)[0]["messages"] == history("q1", "echo: q1", "q2", "echo: q2", "q3")


def test_a_conversation_is_short_by_all_its_turns(mill: Mill, model_server: ModelServerFactory) -> None:
    """--min-completion-tokens counts the tokens of all turns, also when the records are judged again."""
    model_server([{"match": "no", "content": "n"}])
    mill.enqueue([talk("q1", "q2", id="long"), talk("no1", "no2", id="short")], *ALL, "--min-completion-tokens", "18")
    mill.worker()
    balanced(mill, accepted=1, rejected=1)
    (short,) = records(mill, kind=Kind.REJECTED)
    assert (short["source"]["id"], short["reason"], short["ended"], len(short["turns"])) == (
        "short",
        "too_short",
        None,
        2,
    )
    mill.run("reclassify", "case", "--min-completion-tokens", "4")
    assert balanced(mill, accepted=2, rejected=0)["accepted"] == 2
    mill.run("reclassify", "case", "--min-completion-tokens", "19")
    balanced(mill, accepted=0, rejected=2)
