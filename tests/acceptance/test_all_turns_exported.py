"""What exports, validate, verify and show make of conversations of which every assistant turn was made anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.ledger import Ledger
from app.records import Kind
from tests.conftest import ModelServerFactory
from tests.support.books import balanced, by_source_id
from tests.support.mill import Mill
from tests.support.turns import talk, turn_records, turns_file

QUIET = "no reasoning here"


@pytest.fixture
def made(mill: Mill, model_server: ModelServerFactory) -> Mill:
    """Return the product with one conversation of three turns, the second with a thought, and one of one turn."""
    model_server([{"match": "q2", "content": "two", "reasoning": "hmm"}])
    mill.enqueue([talk("q1", "q2", "q3", id="long"), talk(QUIET, id="single")], "--turns", "all")
    mill.worker()
    balanced(mill, accepted=2)
    return mill


def _export(mill: Mill, form: str, *options: str, name: str = "out.jsonl") -> tuple[str, list[dict[str, Any]], Path]:
    path = mill.path / f"{form}-{name}"
    said = mill.run("export", "case", "--format", form, "--output", str(path), "--overwrite", *options).stdout
    return said, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()], path


def test_tokens_have_a_row_for_each_turn(made: Mill) -> None:
    """Each turn is a row with the ids that it was asked and answered with, and all turns count for the vocabulary."""
    said, rows, path = _export(made, "tokens", "--order", "id")
    records = by_source_id(made)
    long, single = records["long"], records["single"]
    lines = {line["id"]: line for line in turn_records(made)}
    ids = [f"{long['id']}#turn{number}" for number in (1, 2, 3)]
    assert [row["id"] for row in rows] == [*ids, f"{single['id']}#turn1"]
    for row, made_of in zip(rows, [lines[ids[0]], lines[ids[1]], long, single], strict=True):
        prompt, output = made_of["prompt_token_ids"], made_of["output_ids"]
        assert row["input_ids"] == prompt + output
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(output)
    supervised = sum(sum(row["loss_mask"]) for row in rows)
    assert f"{supervised:,} tokens are supervised." in said
    assert "every id against the dataset" in made.run("validate", str(path), "--dataset", "case").stdout
    options = ("--format", "token-freq", "--output", str(made.path / "freq.npz"), "--vocab-size", "1114200")
    counted = made.run("export", "case", *options).stdout
    assert f"{supervised:,} output tokens of 4 records counted" in counted

    limited = _export(made, "tokens", "--order", "id", "--limit", "2", name="two.jsonl")[1]
    assert [row["id"] for row in limited] == ids[:2]
    assert _export_split(made) == [ids, [f"{single['id']}#turn1"]]


def _export_split(mill: Mill) -> list[list[str]]:
    """Export into two shares, which hold one of the conversations each, and return the ids of their rows."""
    path = mill.path / "split.jsonl"
    mill.run("export", "case", "--format", "tokens", "--output", str(path), "--split", "a=0.4,b=0.6")
    return [
        [json.loads(line)["id"] for line in file.read_text(encoding="utf-8").splitlines()]
        for file in sorted(mill.path.glob("split-*.jsonl"))
    ]


def test_a_changed_or_missing_row_is_told(made: Mill) -> None:
    """Validate finds a turn's row that contradicts its line, one that is missing, and one of a turn that never was."""
    _, rows, path = _export(made, "tokens", "--order", "id")
    stranger = f"{rows[0]['id'][:-1]}9"
    changed = [rows[0], {**rows[1], "input_ids": [*rows[1]["input_ids"][:-1], 7]}, {**rows[2], "id": stranger}, rows[3]]
    path.write_text("".join(json.dumps(row) + "\n" for row in changed), encoding="utf-8")
    said = made.run("validate", str(path), "--dataset", "case", expect=1).stdout
    for problem, id_ in (("differs", rows[1]["id"]), ("unknown_id", stranger), ("missing_id", rows[2]["id"])):
        (line,) = [line for line in said.splitlines() if f" {problem}: " in line]
        assert line.split()[:2] == ["FAIL", "1"], said
        assert f"({id_})" in said
    assert said.count("FAIL ") == 3, said


def test_conversations_learn_from_every_turn(made: Mill) -> None:
    """In openai's form all turns that were made have weight 1, and thoughts of earlier turns are kept."""
    _, rows, path = _export(made, "openai", "--order", "id", "--reasoning", "field")
    messages = rows[0]["messages"]
    assert [message.get("weight") for message in messages] == [None, 1, None, 1, None, 1]
    assert [message.get("reasoning_content") for message in messages if message["role"] == "assistant"] == [
        "",
        "hmm",
        "",
    ]
    made.run("validate", str(path), "--dataset", "case")
    _, rows, _ = _export(made, "sharegpt", "--order", "id", "--reasoning", "inline")
    assert [turn["value"] for turn in rows[0]["conversations"]] == [
        *("q1", "echo: q1", "q2", "<think>\nhmm\n</think>\n\ntwo", "q3", "echo: q3")
    ]
    _, rows, _ = _export(made, "specforge", "--order", "id", "--reasoning", "inline")
    assert [message.get("weight") for message in rows[0]["conversations"]] == [None, 1, None, 1, None, 1]
    said, _, _ = _export(made, "openai", "--reasoning", "drop")
    assert "1 of the conversations had reasoning in earlier turns that this file does not hold; --reasoning" in said


def test_a_turn_can_be_shown(made: Mill) -> None:
    """Show lists a conversation's turns, and shows one by its own id, also by the beginning of the sample's."""
    long = by_source_id(made)["long"]
    said = made.run("show", long["id"]).stdout
    for number, messages in ((1, "1 message"), (2, "3 messages"), (3, "5 messages")):
        assert f"  turn {long['id']}#turn{number}: after {messages}, 1 call, " in said
    second = made.run("show", "long#turn2").stdout
    assert f"{long['id']}#turn2 of case: accepted" in second
    assert "[assistant] echo: q1" in second
    assert "[reasoning] hmm" in second
    assert f"{turns_file(made)}" in second
    assert "[answer] echo: q3" in made.run("show", "long#turn3").stdout
    assert made.run("show", "long#turn1", "--json").json()["content"] == "echo: q1"
    assert "knows no turn" in made.run("show", "long#turn4", expect=2).stderr


def test_lost_turns_are_named(made: Mill) -> None:
    """Verify names turns that are gone or damaged and mends a torn tail; an export of tokens leaves them out."""
    long = by_source_id(made)["long"]
    path = turns_file(made)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:40])
    said = made.run("verify", "case", expect=1).stdout
    assert f"1 earlier turn is missing or damaged in {path.parent.parent} ({long['id']}#turn2), of 1 accepted" in said
    assert path.read_bytes() == first
    told, rows, _ = _export(made, "tokens")
    assert "1 left out" in told
    assert {row["id"].rpartition("#")[2] for row in rows} == {"turn1", "turn3"}
    path.write_bytes(b"x" * len(first[:-1]) + b"\n")
    assert "2 earlier turns are missing or damaged" in made.run("verify", "case", expect=1).stdout
    for edited in (second.replace(b'"two"', b'"2"'), second.replace(b'"q1"', b'"q0"')):
        assert edited != second
        path.write_bytes(first + edited)
        said = made.run("verify", "case", expect=1).stdout
        assert f"1 earlier turn is missing or damaged in {path.parent.parent} ({long['id']}#turn2)" in said
        assert "1 left out: the turns folder has no line that fits" in _export(made, "tokens")[0]
    path.write_bytes(first + second)
    made.run("verify", "case")


def test_the_folder_of_turns_is_no_dataset(made: Mill) -> None:
    """Status counts conversations alone, whatever a dataset is called, and each dataset keeps its own turns."""
    for dataset in ("turns", "a/turns"):
        made.enqueue([talk("q1", "q2", id="x")], "--turns", "all", dataset=dataset)
        made.wait_recorded(1, dataset)
    made.wait_idle("turns")
    datasets = made.status()["datasets"]
    assert {name: part["counts"]["accepted"] for name, part in datasets.items()} == {
        "case": 2,
        "turns": 1,
        "a/turns": 1,
    }
    made.run("verify")
    with Ledger(made.folder("turns")) as ledger:
        assert ledger.totals().count(Kind.ACCEPTED) == 1
