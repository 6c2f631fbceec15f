"""What the doctor makes of model servers as they were seen: a level and a sentence for each thing."""

from __future__ import annotations

from typing import Any

import pytest

from app.preflight import Refusal, Report, Server, Thought
from producer.doctor.checks import Check, Level
from producer.doctor.gate import findings
from producer.doctor.redis_checks import clock
from producer.doctor.servers import check_servers
from tests.support.canaries import THOUGHT, URL, canary, server


def found(*servers: Server, **fields: Any) -> dict[str, Check]:
    """Return the checks of these servers by name."""
    checks = list(check_servers(Report(servers=list(servers), **fields), "doctor"))
    assert len({check.name for check in checks}) == len(checks) or len(servers) > 1
    return {check.name: check for check in checks}


def told(name: str, *servers: Server, **fields: Any) -> tuple[str, str]:
    """Return level and sentence of one check."""
    check = found(*servers, **fields)[name]
    return check.level.value, check.sentence


def test_a_good_server_has_nothing_to_mend() -> None:
    """Everything that can be known is ok; what cannot be known is a note, and neither warns."""
    levels = {name: check.level.value for name, check in found(server(canary())).items()}
    assert levels == {
        "server.backend": "ok",
        "server.models": "ok",
        "server.context": "ok",
        "server.canary": "ok",
        "server.ids": "ok",
        "server.decode": "note",
        "server.reasoning": "note",
        "server.template": "note",
    }
    assert told("server.canary", server(canary())) == (
        "ok",
        "a canary was answered in 2.0 s (stop, 100 tokens, 50 a second).",
    )


@pytest.mark.parametrize(
    ("state", "words", "sentence"),
    [
        (
            "down",
            "[Errno 111] Connection refused",
            "it cannot be reached from here ([Errno 111] Connection refused); start it, or take",
        ),
        ("silent", "no answer within 15 s", "it does not answer (no answer within 15 s); start it anew, or take"),
        ("refuses", "HTTP 401", "it refuses our requests (HTTP 401); check MILL_API_KEY."),
        ("unwell", "HTTP 503", "it answers with an error (HTTP 503); wait until it is ready, or check its URL in"),
    ],
)
def test_a_server_that_cannot_be_used_fails(state: str, words: str, sentence: str) -> None:
    """One sentence says what is the case and what to do; nothing else is said of the server."""
    (check,) = found(Server(url=URL, state=state, words=words)).values()  # type: ignore[arg-type]
    assert (check.level, check.name, check.server) == (Level.FAIL, "server.reachable", URL)
    assert check.sentence.startswith(f"the model server {URL}: {sentence}")


def test_refusals_fail_with_their_remedy() -> None:
    """What would pause the dataset fails here, under the name of what is wrong."""
    refusal = Refusal("context", "max_tokens 8192 does not fit into the context of 4096 tokens of m", "give less")
    checks = found(server(refusals={"doctor": [refusal], "another": []}))
    assert [name for name, check in checks.items() if check.level is Level.FAIL] == ["server.context"]
    assert checks["server.context"].sentence == (
        "max_tokens 8192 does not fit into the context of 4096 tokens of m; give less."
    )


@pytest.mark.parametrize(
    ("fields", "level", "sentence"),
    [
        (
            {"verdict": "failed", "reason": "unauthorized", "error": "HTTP 401: no."},
            "fail",
            "a canary failed as unauthorized: HTTP 401: no; check MILL_API_KEY.",
        ),
        (
            {"verdict": "failed", "reason": "overloaded", "error": "HTTP 503: queue full."},
            "warn",
            (
                "a canary failed as overloaded: HTTP 503: queue full; ask fewer at once (MILL_MAX_IN_FLIGHT), or wait "
                "until others are done with it."
            ),
        ),
        (
            {"verdict": "rejected", "reason": "truncated"},
            "warn",
            "a canary was rejected as truncated; raise --max-tokens, or say --keep-truncated.",
        ),
        (
            {"verdict": "rejected", "reason": "answer_in_reasoning"},
            "fail",
            (
                "a canary was rejected as answer_in_reasoning; the server's --reasoning-parser takes the answer for "
                "thought: start it with another one."
            ),
        ),
    ],
)
def test_a_canary_that_is_not_accepted_says_why(fields: dict[str, Any], level: str, sentence: str) -> None:
    """What befalls every answer fails; what may befall one warns; both name the reason and the way out."""
    assert told("server.canary", server(canary(**fields))) == (level, sentence)


def test_the_datasets_canaries_are_judged_together() -> None:
    """Some that are not accepted warn, with the commonest reason; none accepted is a failure."""
    bad = [canary(f"b{n}", verdict="rejected", reason="truncated") for n in range(3)]
    odd = canary("o", verdict="failed", reason="timeout", error="late")
    good = canary("g")
    level, sentence = told("server.samples", server(canary(), good, *bad, odd))
    assert (level, sentence) == (
        "warn",
        (
            "4 of the dataset's 5 canaries were not accepted, 3 of them as truncated; raise --max-tokens, or say "
            "--keep-truncated."
        ),
    )
    assert told("server.samples", server(canary(), *bad))[0] == "fail"
    assert told("server.samples", server(canary(), good)) == ("ok", "all 1 of the dataset's canaries were accepted.")


@pytest.mark.parametrize(
    ("backend", "fields", "level", "words"),
    [
        ("vllm 0.4", {"output_ids": False, "prompt_ids": False}, "warn", "it gives no token ids"),
        ("transformers", {"output_ids": False, "prompt_ids": False}, "note", "it gives no token ids"),
        ("vllm 0.33.0", {"notes": ["output_ids left out: 3 ids and 4 tokens"]}, "warn", "output_ids left out: 3 ids"),
        ("vllm 0.33.0", {}, "ok", "output_ids and prompt_token_ids are exact, as many as it counts (1 of 1 answers)."),
        ("llama.cpp b1", {"prompt_ids": False}, "ok", "output_ids are exact, as many as it counts (1 of 1 answers)."),
    ],
)
def test_token_ids_are_exact_or_it_is_said_why_not(
    backend: str, fields: dict[str, Any], level: str, words: str
) -> None:
    """A server that could give ids and does not is worth a warning; one that cannot, a note."""
    seen = told("server.ids", server(canary(**fields), backend=backend))
    assert seen[0] == level
    assert seen[1].startswith(words)


def test_ids_that_do_not_decode_fail() -> None:
    """The tokenizer of the settings is not the model's: every export of ids would be wrong."""
    assert told("server.decode", server(canary(ids_check="mismatch")), tokenizer="x")[0] == "fail"
    assert told("server.decode", server(canary(ids_check="ok")), tokenizer="x")[0] == "ok"


def reasoning(on: dict[str, Any], off: dict[str, Any]) -> tuple[str, str]:
    """Return what is said of a pair."""
    pair = Thought(on=canary(**on), off=canary(**off))
    return told("server.thinking", server(canary(), thought=pair))


@pytest.mark.parametrize(
    ("on", "off", "level", "words"),
    [
        (THOUGHT, {}, "ok", '--chat-template-kwargs \'{"enable_thinking": true}\' (or "thinking") thinks, and false'),
        (
            THOUGHT,
            THOUGHT,
            "note",
            "enable_thinking and thinking in --chat-template-kwargs make no difference: it thinks",
        ),
        (
            {},
            {},
            "note",
            "enable_thinking and thinking in --chat-template-kwargs make no difference: it thinks neither",
        ),
        ({}, THOUGHT, "warn", "it thinks with thinking off and not with it on"),
        (
            THOUGHT,
            {"verdict": "rejected", "reason": "answer_in_reasoning", **THOUGHT},
            "warn",
            "with thinking off, the whole answer lies in the reasoning and the content is empty",
        ),
        (
            {"verdict": "rejected", "reason": "truncated_in_think", **THOUGHT},
            {},
            "warn",
            "a canary was cut within its thought after 100 tokens; raise --max-tokens.",
        ),
        (
            {"verdict": "failed", "reason": "bad_request", "error": "no kwargs"},
            {},
            "warn",
            "thinking could not be switched: the canary failed as bad_request (no kwargs).",
        ),
    ],
)
def test_switching_thinking_is_told(on: dict[str, Any], off: dict[str, Any], level: str, words: str) -> None:
    """Asked with thinking on and off, the server shows whether the options do anything."""
    seen = reasoning(on, off)
    assert (seen[0], seen[1].startswith(words)) == (level, True), seen


@pytest.mark.parametrize(
    ("fields", "level", "words"),
    [
        (THOUGHT, "ok", "reasoning comes in the field reasoning, apart from the content."),
        ({"reasoning_field": "content", "reasoning_chars": 9}, "warn", "it leaves the reasoning in the content"),
        ({"verdict": "rejected", "reason": "think_leak"}, "fail", "think tags stand in the content"),
        ({}, "note", "no canary was answered with reasoning"),
    ],
)
def test_the_reasoning_parser_is_on(fields: dict[str, Any], level: str, words: str) -> None:
    """Reasoning in a field of its own is right; in the content the server lacks its parser."""
    seen = told("server.reasoning", server(canary(**fields)))
    assert (seen[0], seen[1].startswith(words)) == (level, True), seen


@pytest.mark.parametrize(
    ("fields", "level", "words"),
    [
        ({"tool_calls": 1}, "ok", "1 of 1 canaries with tools were answered with calls that it parsed."),
        ({}, "warn", "none of 1 canaries with tools was answered with a call"),
        ({"verdict": "rejected", "reason": "unparsed_calls"}, "warn", "calls stand as text in the content"),
        (
            {"verdict": "failed", "reason": "bad_request", "error": '"auto" tool choice requires'},
            "fail",
            'it refuses requests with tools ("auto" tool choice requires); start vLLM with --enable-auto-tool-choice',
        ),
    ],
)
def test_tools_need_a_parser(fields: dict[str, Any], level: str, words: str) -> None:
    """Calls that the server parsed are right; the remedy names the two flags."""
    seen = told("server.tools", server(canary(), canary("t", tools=True, **fields)))
    assert (seen[0], seen[1].startswith(words)) == (level, True), seen


def test_servers_that_differ_are_told() -> None:
    """One dataset would hold answers of two models or contexts; what a server does not tell is not compared."""
    other = server(canary(), url="http://gpu2:8000", context=2048, template=None)
    assert told("servers.alike", server(canary(), template="abc"), other) == (
        "warn",
        f"the servers differ in context ({URL}: 4096; http://gpu2:8000: 2048); one dataset would hold answers of both.",
    )
    assert told("servers.alike", server(), server(url="http://b"))[0] == "ok"


@pytest.mark.parametrize(
    ("ahead_s", "level", "words"),
    [
        (4.9, "ok", "the clock of Redis and this machine's agree within 5 s."),
        (-90.2, "warn", "the clock of Redis is 90 s behind this machine's; leases go by Redis"),
        (12.0, "warn", "the clock of Redis is 12 s ahead of this machine's; leases go by Redis"),
    ],
)
def test_clocks(ahead_s: float, level: str, words: str) -> None:
    """More than five seconds are worth a word."""
    check = clock("redis.clock", "Redis", ahead_s)
    assert (check.level.value, check.sentence.startswith(words)) == (level, True)


def test_the_gate_says_each_thing_once() -> None:
    """The same finding at several servers is one sentence; of several datasets each is named."""
    refusal = Refusal("model", "vLLM has no model x but y", "give --model")
    one = Server(url="http://a", state="up", refusals={"d": [refusal]})
    two = Server(url="http://b", state="up", refusals={"d": [refusal]})
    assert findings(Report(servers=[one, two])) == ["http://a, http://b: vLLM has no model x but y; give --model."]
    both = Server(url="http://a", state="up", refusals={"d": [refusal], "e": [refusal], "f": []})
    assert findings(Report(servers=[both])) == ["d; e: http://a: vLLM has no model x but y; give --model."]
