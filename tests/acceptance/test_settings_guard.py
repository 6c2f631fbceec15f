"""Settings that change what a record means travel with the dataset and never change unnoticed."""

from __future__ import annotations

import json

import pytest

from tests.conftest import ModelServerFactory
from tests.support.books import balanced, by_source_id
from tests.support.mill import Mill


def test_other_settings_need_a_word(mill: Mill, model_server: ModelServerFactory) -> None:
    """A second enqueue with other settings is refused by name; --new-settings goes on, each record with its own."""
    server = model_server()
    first = [{"id": f"old{number}", "prompt": f"old {number}"} for number in range(3)]
    mill.enqueue(first, "--max-tokens", "50", "--temperature", "0.5")
    # A worker's own variables say nothing about what is generated.
    mill.worker(extra_env={"MILL_MAX_TOKENS": "7", "MILL_TEMPERATURE": "0.9"})
    mill.wait_recorded(3)
    told = mill.enqueue([*first, "new"], "--max-tokens", "60", "--temperature", "0.5", expect=2)
    assert "max_tokens: 50 -> 60" in told.stderr
    assert "temperature" not in told.stderr
    assert told.stderr.count("\n") == 1
    both = [*first, {"id": "new", "prompt": "new"}]
    told = mill.enqueue(both, "--max-tokens", "60", "--stop", "END", "--new-settings")
    assert "already recorded 3, already queued 0, queued 1" in told.stdout
    balanced(mill, accepted=4)
    records = by_source_id(mill)
    assert records["old0"]["sampling"] == {"max_tokens": 50, "temperature": 0.5}
    assert records["new"]["sampling"] == {"max_tokens": 60, "stop": ["END"]}
    manifest = json.loads(mill.folder().manifest.read_text())
    fingerprints = [entry["fingerprint"] for entry in manifest["settings"]]
    assert [records["old0"]["settings"], records["new"]["settings"]] == fingerprints
    sent = {request.key: request.body for request in server.requests}
    assert (sent["old 1"]["max_tokens"], sent["old 1"]["temperature"]) == (50, 0.5)
    assert sent["new"]["max_tokens"] == 60
    assert "temperature" not in sent["new"], "only what was set is sent"
    assert "seed" not in sent["new"]


def test_a_wrong_adapter_at_first_locks_nothing(mill: Mill, model_server: ModelServerFactory) -> None:
    """An adapter that reads none of the rows is refused before anything is made; the right one needs no other word."""
    model_server()
    rows = [{"question": f"question {number}", "answer": ""} for number in range(3)]
    told = mill.enqueue(rows, "--adapter", "messages", expect=2)
    assert "nothing that --adapter messages reads" in told.stderr
    assert told.stderr.count("\n") == 1
    assert not mill.prepared.exists()
    refused = mill.enqueue([{"question": "", "prompt": "hello"}], "--adapter", "question", expect=1)
    assert "no row of the 1 is a sample" in refused.stderr
    told = mill.enqueue(rows)
    assert "already queued 0, queued 3" in told.stdout
    mill.worker()
    mill.wait_recorded(3)
    balanced(mill, accepted=3, refused=1)


def test_what_is_sent_beside_the_prompt(mill: Mill, model_server: ModelServerFactory) -> None:
    """Template options, extra fields, a system prompt and the model's name reach the server and the record."""
    server = model_server(model="other-model")
    options = ("--model", "other-model", "--system", "Be kind.", "--chat-template-kwargs", '{"enable_thinking": false}')
    mill.enqueue(["hello"], *options, "--extra-body", '{"min_tokens": 1}')
    mill.worker()
    mill.wait_recorded(1)
    (request,) = server.requests
    assert request.body["chat_template_kwargs"] == {"enable_thinking": False}
    assert (request.body["min_tokens"], request.body["model"]) == (1, "other-model")
    assert request.body["messages"][0] == {"role": "system", "content": "Be kind."}
    (record,) = by_source_id(mill).values()
    assert record["sampling"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert record["model"] == "other-model"


def test_settings_that_cannot_be_used(mill: Mill) -> None:
    """A wrong value is named with its variable or option in one sentence and exit code 2, before anything is made."""
    for options, word in (
        (("--temperature", "-1"), "--temperature cannot be used: "),
        (("--top-p", "nan"), "--top-p cannot be used: "),
        (("--max-tokens", "0"), "--max-tokens cannot be used: input should be greater than or equal to 1."),
        (("--chat-template-kwargs", "[1]"), "--chat-template-kwargs"),
        (("--extra-body", "{"), "--extra-body"),
        (("--adapter", "no-such"), "no-such"),
    ):
        told = mill.enqueue(["x"], *options, expect=2)
        assert word in told.stderr, told.stderr
        assert told.stderr.strip().count("\n") == 0, told.stderr
    mill.env["MILL_MAX_TOKENS"] = "0"
    assert "MILL_MAX_TOKENS cannot be used" in mill.enqueue(["x"], "--top-p", "0.9", expect=2).stderr
    del mill.env["MILL_MAX_TOKENS"]
    mill.env["MILL_MAX_PENDING"] = "many"
    assert "MILL_MAX_PENDING" in mill.enqueue(["x"], expect=2).stderr
    assert not mill.prepared.exists()


@pytest.mark.parametrize("command", ["enqueue", "run", "retry", "extract"])
@pytest.mark.parametrize(("variable", "value"), [("MILL_MODEL_URLS", "htp://x"), ("MILL_MAX_IN_FLIGHT", "abc")])
def test_a_mistyped_setting_leaves_nothing_behind(mill: Mill, command: str, variable: str, value: str) -> None:
    """Also a setting that only workers use ends a command in its own name, before a dataset's folder is made."""
    rows = mill.write_rows(["x"])
    recipe = mill.path / "recipe.toml"
    recipe.write_text(f'[[dataset]]\nname = "case"\nsource = "{rows}"\n')
    words = {
        "enqueue": ("enqueue", str(rows), "--dataset", "case"),
        "run": ("run", str(recipe)),
        "retry": ("retry", "case"),
        "extract": ("extract", "case"),
    }
    mill.env[variable] = value
    told = mill.run(*words[command], expect=2)
    assert told.stderr.startswith(f"producer: {variable} cannot be used: "), told.stderr
    assert told.stderr.count("\n") == 1
    assert not mill.prepared.exists()
