"""Whole runs over each protocol: what is asked, what stands in the records, and what is refused before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.records import Kind
from producer.simulator.tokens import END, MARKS, decode, encode
from tests.conftest import ModelServerFactory
from tests.support.aftermath import assert_quiet
from tests.support.books import balanced, records
from tests.support.byte_tokenizer import make_byte_tokenizer
from tests.support.mill import Mill
from tests.support.processes import wait_until

_RULES: list[dict[str, Any]] = [
    {"match": "think", "reasoning": "Hm, é \U0001f305.", "content": "Yes \U0001f305."},
    {"match": "thought only", "content": None, "reasoning": "All of it."},
    {"match": "abort", "finish_reason": "abort", "times": 1},
    {"match": "busy", "status": 503, "times": 1},
]
_PROMPTS = [*(f"plain {number}" for number in range(12)), "think", "abort", "busy", "x" * 50]
_DIALECTS = {"sglang": "sglang", "vllm-tokens": "vllm"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Return a folder with the fake server's tokenizer."""
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    return make_byte_tokenizer(tmp_path / "tokenizer")


@pytest.mark.parametrize("protocol", list(_DIALECTS))
def test_a_run_over_token_ids(mill: Mill, model_server: ModelServerFactory, tokenizer: Path, protocol: str) -> None:
    """Every record has the ids that were sent and that came, which decode to its text; aborts and loads are retried."""
    server = model_server(_RULES, dialect=_DIALECTS[protocol])
    mill.env |= {"MILL_PROTOCOL": protocol, "MILL_TOKENIZER": str(tokenizer), "MILL_BACKOFF_S": "0.1"}
    mill.enqueue(_PROMPTS, "--max-tokens", "64", "--seed", "3", "--temperature", "0.7")
    worker = mill.worker()
    balanced(mill, accepted=len(_PROMPTS), failed=0)

    templates = set()
    for record in records(mill):
        text = f"<think>{record['reasoning']}</think>" if record["reasoning"] else ""
        assert record["output_ids"] == [*encode(text + record["content"]), MARKS[END]]
        assert record["content"] in decode(record["output_ids"])
        asked = record["messages"][-1]["content"]
        assert decode(record["prompt_token_ids"]) == f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        assert (record["protocol"], record["ids"], record["ids_end"]) == (protocol, "server", "eos")
        assert record["backend"].split()[0] == _DIALECTS[protocol]
        assert record["ids_check"] in {"ok", None}
        templates.add(record["template"])
    assert len(templates) == 1
    by_prompt = {record["messages"][-1]["content"]: record for record in records(mill)}
    assert [fault["fault"] for fault in by_prompt["abort"]["faults"]] == ["aborted"]
    assert [fault["fault"] for fault in by_prompt["busy"]["faults"]] == ["overloaded"]
    assert by_prompt["think"]["reasoning"] == "Hm, é \U0001f305."
    limits = [request.body["sampling_params"] for request in server.requests]
    assert {params.get("max_new_tokens") or params.get("max_tokens") for params in limits} == {64}
    mill.run("export", "case", "--format", "tokens", "--output", "tokens.jsonl")
    assert (mill.path / "tokens.jsonl").read_bytes().count(b"\n") == len(_PROMPTS)
    assert worker.stop() == 0
    assert_quiet(worker.output())


def test_thought_alone_and_cut_thought_are_no_answers(
    mill: Mill, model_server: ModelServerFactory, tokenizer: Path
) -> None:
    """Over /generate, too, an answer that is all thought is rejected by the rule that it breaks."""
    model_server(_RULES, dialect="sglang")
    mill.env |= {"MILL_PROTOCOL": "sglang", "MILL_TOKENIZER": str(tokenizer)}
    mill.enqueue(["thought only"], "--max-tokens", "64", dataset="whole")
    mill.enqueue(["thought only"], "--max-tokens", "5", dataset="cut")
    mill.worker()
    balanced(mill, "whole", rejected=1)
    balanced(mill, "cut", rejected=1)
    [whole], [cut] = records(mill, "whole", kind=Kind.REJECTED), records(mill, "cut", kind=Kind.REJECTED)
    assert (whole["reason"], whole["reasoning"]) == ("answer_in_reasoning", "All of it.")
    assert (cut["reason"], cut["reasoning"], cut["ids_end"]) == ("truncated_in_think", "All ", "none")


def test_a_misspelt_parameter_costs_no_request(mill: Mill, model_server: ModelServerFactory) -> None:
    """The dataset is paused before its first request with the name and a near one; put right, it goes on."""
    server = model_server()
    rows = mill.write_rows(["one", "two"])
    mill.enqueue(rows, "--extra-body", '{"repetition_penality": 1.1}')
    mill.worker()
    words = "vLLM 0.33.0 does not know repetition_penality (did you mean repetition_penalty"
    wait_until(lambda: words in " ".join(mill.run("status", expect=None).stdout.split()), 30, "the dataset's pause")
    assert server.requests == ()
    assert "--new-settings" in " ".join(mill.run("status", expect=None).stdout.split())

    mill.enqueue(rows, "--extra-body", '{"repetition_penalty": 1.1}', "--new-settings")
    mill.run("resume", "case")
    balanced(mill, accepted=2, failed=0)
    assert {request.body["repetition_penalty"] for request in server.requests} == {1.1}
    assert [record["backend"] for record in records(mill)] == ["vllm 0.33.0"] * 2


def test_unknown_parameters_are_sent_where_that_is_wanted(mill: Mill, model_server: ModelServerFactory) -> None:
    """With MILL_ALLOW_UNKNOWN_PARAMETERS, or with a plain MILL_PROTOCOL=openai, the server gets what was asked for."""
    server = model_server()
    mill.env["MILL_ALLOW_UNKNOWN_PARAMETERS"] = "true"
    mill.enqueue(["one"], "--extra-body", '{"brand_new": 1}', dataset="allowed")
    first = mill.worker()
    balanced(mill, "allowed", accepted=1)
    assert first.stop() == 0
    del mill.env["MILL_ALLOW_UNKNOWN_PARAMETERS"]
    mill.env["MILL_PROTOCOL"] = "openai"
    mill.enqueue(["two"], "--extra-body", '{"brand_new": 2}', dataset="plain")
    mill.worker()
    balanced(mill, "plain", accepted=1)
    assert [request.body["brand_new"] for request in server.requests] == [1, 2]
    [plain] = records(mill, "plain")
    assert (plain["backend"], plain["protocol"]) == (None, "openai")


def test_a_worker_without_the_tokenizer_says_so(mill: Mill, model_server: ModelServerFactory) -> None:
    """A protocol without its tokenizer pauses the dataset with the sentence that says what is missing."""
    server = model_server(dialect="sglang")
    mill.env |= {"MILL_PROTOCOL": "sglang", "MILL_TOKENIZER": "/no/such/tokenizer"}
    mill.enqueue(["one", "two"])
    mill.worker()
    wait_until(
        lambda: any(word in mill.run("status", expect=None).stdout for word in ("MILL_TOKENIZER", "transformers")),
        60,
        "the dataset's pause",
    )
    assert server.requests == ()
    assert mill.counts()["failed"] == 0
