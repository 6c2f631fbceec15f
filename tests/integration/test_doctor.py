"""`producer doctor`, and the cheap look before every enqueue, with real servers, a real Redis and their faults."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest

from app import broker
from producer.doctor.redis_checks import check_redis
from producer.ports import free_port
from producer.simulator.rules import Rule
from tests.conftest import ModelServerFactory, RedisFactory
from tests.support.mill import Mill
from tests.support.page_server import page_server
from tests.support.processes import wait_until
from tests.support.real_servers import LLAMA_CONTEXT_TOKENS, llama_server

THINKS = Rule(reasoning="Let me see.", content="It is Paris.")


def doctor(mill: Mill, *arguments: str, expect: int = 0) -> dict[str, Any]:
    """Return what the doctor says as JSON."""
    document = mill.run("doctor", *arguments, "--json", expect=expect).json()
    assert isinstance(document, dict)
    assert document["ok"] == (expect == 0)
    return document


def bad(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return level and name of each check that warns or fails, but for the test Redis' lack of persistence."""
    found = [(check["level"], check["name"]) for check in document["checks"] if check["level"] in {"warn", "fail"}]
    return [one for one in found if one != ("warn", "redis.persistence")]


def sentence(document: dict[str, Any], name: str) -> str:
    """Return the one sentence of a check."""
    (told,) = [check["sentence"] for check in document["checks"] if check["name"] == name]
    return str(told)


def test_a_healthy_run_passes_and_is_estimated(mill: Mill, model_server: ModelServerFactory) -> None:
    """Redis, disk and server are well; the canaries ask for real, with the real settings, and nothing is recorded."""
    server = model_server(rules=[Rule(match="France", content="Paris.", reasoning="Hm.")], default=THINKS)
    source = mill.write_rows([f"prompt {n}" for n in range(200)])
    found = doctor(mill, str(source), "--max-tokens", "100", "--temperature", "0.7", "--canaries", "20")
    assert bad(found) == []
    assert found["canaries"] == {"accepted": 21}
    assert "20 samples, drawn evenly from the first 200 rows; 200 rows, 100% of them samples" in found["source"]
    fields = {one["name"]: (one["present"], one["source"]) for one in found["recorded"]}
    assert fields["output_ids"] == (21, "the server's, exact; they end with: eos")
    assert fields["reasoning"] == (21, "the field reasoning")
    estimate = found["estimate"]
    assert (estimate["samples"], estimate["whole"], estimate["canaries"]) == (200, True, 20)
    assert estimate["in_flight"] == 128
    assert 0 < estimate["seen_in_flight"] <= 21
    answer = 1 + len("Let me see.") + 1 + len("It is Paris.") + 1
    assert estimate["completion_tokens"]["mean"] == {"low": answer, "high": answer}
    assert estimate["record_bytes"]["low"] > 200 * 500
    bodies = [request.body for request in server.requests]
    assert len(bodies) == 23
    assert {(body["max_tokens"], body["temperature"]) for body in bodies} == {(100, 0.7)}
    switched = [body["chat_template_kwargs"] for body in bodies if "chat_template_kwargs" in body]
    assert sorted(switched, key=str) == [
        {"enable_thinking": False, "thinking": False},
        {"enable_thinking": True, "thinking": True},
    ]
    assert server.peak_in_flight <= 32
    assert not mill.prepared.exists()


@pytest.mark.parametrize(
    ("fault", "expected", "words"),
    [
        (
            {"arguments": ("--model", "other")},
            [("warn", "server.models"), ("fail", "server.model"), ("fail", "server.canary")],
            (
                "vLLM 0.33.0 has no model other but toy-model; give --model as the server lists it, or start the "
                "server with that model."
            ),
        ),
        pytest.param(
            {"max_model_len": 4096},
            [("fail", "server.context"), ("fail", "server.canary")],
            (
                "max_tokens 8192 does not fit into the context of 4096 tokens of toy-model; give --max-tokens 2048 or "
                "less, or start the server with a larger context."
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"default": Rule(content="<think>Hm.</think>Paris.")},
            [("warn", "server.reasoning")],
            (
                "it leaves the reasoning in the content, between think tags, which promptmill splits off; start the "
                "server with the model's --reasoning-parser, so that reasoning tokens are counted too."
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"token_ids": False},
            [("warn", "server.ids")],
            "it gives no token ids: output_ids and prompt_token_ids are null; a newer version gives them.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"api_key": "sk-secret"},
            [("fail", "server.reachable")],
            ("it refuses our requests (HTTP 401 for /v1/models: Unauthorized); check MILL_API_KEY."),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_fault_of_a_server_is_one_finding(
    mill: Mill,
    model_server: ModelServerFactory,
    fault: dict[str, Any],
    expected: list[tuple[str, str]],
    words: str,
) -> None:
    """A wrong model, a small context, a missing parser, missing ids and a wrong key: each says what to do."""
    options = {"default": THINKS, **fault}
    arguments = options.pop("arguments", ())
    model_server(**options)
    failing = any(level == "fail" for level, _ in expected)
    found = doctor(mill, *arguments, expect=1 if failing else 0)
    assert bad(found) == expected
    _, name = next((one for one in expected if one[0] == "fail"), expected[0])
    assert sentence(found, name).endswith(words)


def test_servers_that_are_down_or_silent_fail_and_hold_nothing_up(mill: Mill, model_server: ModelServerFactory) -> None:
    """The well one is asked all the same; its clock is compared with ours."""
    silent = model_server(hangs="generation")
    gone = f"http://127.0.0.1:{free_port()}"
    pages = {"/v1/models": {"data": [{"id": "toy-model", "owned_by": "openai"}]}}
    with page_server(pages, ahead_s=600) as ahead:
        mill.env["MILL_MODEL_URLS"] = f"{silent.url},{gone},{ahead}"
        found = doctor(mill, "--timeout", "1", expect=1)
    checks = {(check["server"], check["name"]): check for check in found["checks"]}
    assert checks[silent.url, "server.canary"]["sentence"] == (
        "a canary failed as timeout: no answer within 1 s (--timeout, MILL_REQUEST_TIMEOUT_S); the server is slow or "
        "hangs: ask fewer at once (MILL_MAX_IN_FLIGHT), or give --timeout more seconds."
    )
    assert checks[gone, "server.reachable"]["level"] == "fail"
    assert checks[ahead, "server.clock"]["level"] == "warn"
    assert "600 s ahead of" in checks[ahead, "server.clock"]["sentence"]
    assert checks[ahead, "server.canary"]["level"] == "fail"
    assert found["recorded"] == []


def redis_findings(url: str) -> dict[str, tuple[str, str]]:
    """Return level and sentence of each check of a Redis, by its name."""
    return {check.name: (check.level.value, check.sentence) for check in check_redis(broker.parse(url))}


def test_a_redis_that_drops_keys_fails(new_redis: RedisFactory) -> None:
    """The policy is named with what mends it; memory that is used up fails, and an append-only file is seen."""
    server = new_redis(maxmemory="50mb", policy="allkeys-lru")
    client = server.client()
    found = redis_findings(server.url)
    assert {name: level for name, (level, _) in found.items()} == {
        "redis.reachable": "ok",
        "redis.eviction": "fail",
        "redis.persistence": "warn",
        "redis.memory": "ok",
        "redis.clock": "ok",
    }
    assert "run: redis-cli CONFIG SET maxmemory-policy noeviction." in found["redis.eviction"][1]
    assert found["redis.memory"][1].endswith(" of 52.4 MB (maxmemory).")
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("appendonly", "yes")
    client.config_set("maxmemory", "100kb")
    mended = redis_findings(server.url)
    assert mended["redis.eviction"] == ("ok", "it drops no keys (maxmemory-policy noeviction).")
    assert mended["redis.persistence"] == ("ok", "it writes an append-only file: the queue survives its restart.")
    assert mended["redis.memory"][0] == "fail"


def test_a_redis_that_cannot_be_used_is_one_failure(new_redis: RedisFactory) -> None:
    """A wrong password, a read-only replica and nobody there: each says so, and the password is in none of them."""
    server = new_redis(password="hunter2")  # noqa: S106
    assert redis_findings(server.url)["redis.reachable"][0] == "ok"
    wrong = redis_findings(server.url.replace("hunter2", "hunter3"))
    assert {name: level for name, (level, _) in wrong.items()} == {"redis.reachable": "fail"}
    assert "hunter" not in wrong["redis.reachable"][1]
    server.client().replicaof("127.0.0.1", free_port())
    level, sentence_ = redis_findings(server.url)["redis.writes"]
    assert (level, sentence_) == (
        "fail",
        f"Redis at {broker.parse(server.url)} is read-only (a replica?); point MILL_REDIS_URL at the primary.",
    )
    server.stop()
    gone = redis_findings(server.url)
    assert {name: level for name, (level, _) in gone.items()} == {"redis.reachable": "fail"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_the_canaries_end_with_the_doctor(
    mill: Mill, model_server: ModelServerFactory, number: signal.Signals, code: int
) -> None:
    """After Ctrl-C, and even after a SIGKILL, no request is left at the server."""
    server = model_server(default=Rule(delay_s=600))
    running = mill.start("doctor")
    wait_until(lambda: server.in_flight == 1, 60, "the canary")
    running.send_signal(number)
    assert running.wait(30) == code
    wait_until(lambda: server.in_flight == 0, 30, "the end of the canary")
    assert "Traceback" not in running.output()


def test_without_a_terminal_it_is_eighty_columns_of_text(mill: Mill, model_server: ModelServerFactory) -> None:
    """Nothing is coloured, no line is too wide, no secret is in it; without canaries nothing is asked."""
    server = model_server(api_key="sk-topsecret")
    mill.env["MILL_API_KEY"] = "sk-topsecret"
    mill.env["MILL_NONSENSE"] = "1"
    told = mill.run("doctor", "--no-canary")
    assert server.requests == ()
    lines = told.stdout.splitlines()
    assert max(len(line) for line in lines if "/" not in line) <= 80  # a path is never broken
    assert lines[0] == "this machine"
    assert any(line.startswith("  warn  MILL_NONSENSE is not a setting of promptmill") for line in lines)
    assert lines[-1] == "doctor: nothing stands in the way, 2 to look at (warn)."
    assert "\x1b" not in told.stdout
    assert "topsecret" not in told.stdout + told.stderr


def test_without_a_server_or_a_sample_it_says_so(mill: Mill) -> None:
    """No MILL_MODEL_URLS is a finding; a source without a sample is wrong usage."""
    found = doctor(mill, expect=1)
    assert sentence(found, "server.reachable").startswith("MILL_MODEL_URLS is not set; give the model server's URL")
    empty = mill.write_rows([{"prompt": ""}])
    assert "is a sample; see preview." in mill.run("doctor", str(empty), expect=2).stderr


# The cheap look


def test_enqueue_refuses_what_would_waste_the_run_before_anything_is_queued(
    mill: Mill, model_server: ModelServerFactory
) -> None:
    """A model that is not there costs no folder, no key in Redis and no request; --no-preflight queues all the same."""
    server = model_server(max_model_len=4096)
    told = mill.enqueue(["one"], "--model", "other", expect=2, preflight=True)
    assert told.stderr == (
        f"producer: {server.url}: vLLM 0.33.0 has no model other but toy-model; give --model as the server lists it, "
        "or start the server with that model. "
        f"{server.url}: max_tokens 8192 does not fit into the context of 4096 tokens of other; give --max-tokens 2048 "
        "or less, or start the server with a larger context. "
        "Nothing was queued (--no-preflight queues it all the same).\n"
    )
    assert not mill.folder().path.exists()
    assert server.requests == ()
    assert "queued 1" in mill.enqueue(["one"], "--model", "other").stdout


def test_enqueue_goes_on_where_servers_cannot_be_looked_at(mill: Mill, model_server: ModelServerFactory) -> None:
    """A server that is down or silent is a note; the samples are queued for when it is there."""
    silent = model_server(hangs="everything")
    gone = f"http://127.0.0.1:{free_port()}"
    mill.env["MILL_MODEL_URLS"] = f"{silent.url},{gone}"
    told = mill.enqueue(["one"], preflight=True)
    assert "queued 1" in told.stdout
    why = "it does not answer (no answer within 2 s); everything is queued all the same."
    assert f"producer: the model server {silent.url}: {why}" in told.stderr
    assert f"producer: the model server {gone}: it cannot be reached from here (" in told.stderr


def test_run_refuses_by_dataset(mill: Mill, model_server: ModelServerFactory) -> None:
    """One dataset of a recipe that cannot work stops the run before anything is queued, and is named."""
    model_server()
    rows = mill.write_rows(["one"])
    recipe = mill.path / "recipe.toml"
    parts = [f'[[dataset]]\nname = "{name}"\nsource = {json.dumps(str(rows))}\n' for name in ("good", "odd")]
    recipe.write_text(f'{parts[0]}\n{parts[1]}settings = {{ model = "other" }}\n', encoding="utf-8")
    told = mill.run("run", str(recipe), expect=2)
    assert "producer: odd: http://" in told.stderr
    assert not mill.prepared.exists()


@pytest.mark.slow
def test_the_doctor_of_a_real_llama_cpp(mill: Mill) -> None:
    """A real server is recognised, its slot's context and template are read, and its ids are exact."""
    with llama_server(mill.path / "llama", slots=4) as server:
        mill.env.update(MILL_MODEL_URLS=server.url, MILL_MAX_IN_FLIGHT="4")
        refused = doctor(mill, "--no-canary", expect=1)
        assert bad(refused) == [("fail", "server.context")]
        assert f"the context of {LLAMA_CONTEXT_TOKENS} tokens" in sentence(refused, "server.context")
        source = mill.write_rows([f"Name {n} fruits." for n in range(3, 12)])
        found = doctor(mill, str(source), "--max-tokens", "16", "--keep-truncated", "--seed", "1")
        assert bad(found) == []
        assert sentence(found, "server.backend").startswith("it is llama.cpp")
        assert re.search(
            r"the server's chat template has the fingerprint [0-9a-f]{16}\.", sentence(found, "server.template")
        )
        fields = {one["name"]: one["present"] for one in found["recorded"]}
        assert (fields["output_ids"], fields["prompt_token_ids"]) == (10, 0)
        assert found["estimate"]["samples"] == 9
