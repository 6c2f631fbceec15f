"""What the doctor makes of what was seen: levels and sentences, estimates, and eighty columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.preflight import CANARY, Canary, Refusal, Report, Server, Thought
from producer.commands import reading
from producer.doctor import recorded
from producer.doctor.checks import Check, Level
from producer.doctor.choice import Chosen, choose
from producer.doctor.estimate import estimate, spread
from producer.doctor.gate import findings
from producer.doctor.redis_checks import clock
from producer.doctor.render import Findings, lines
from producer.doctor.servers import check_servers
from producer.interval import Range
from producer.reading import Opened, Reading

URL = "http://gpu1:8000"


def canary(id_: str = CANARY, **fields: Any) -> Canary:
    """Return an accepted canary with exact ids, unless told otherwise."""
    plain = {
        "verdict": "accepted",
        "latency_s": 2.0,
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "completion_tokens": 100,
        "content_chars": 40,
        "output_ids": True,
        "prompt_ids": True,
        "ids_end": "eos",
        "record_bytes": 1000,
    }
    return Canary(id=id_, **{**plain, **fields})


def server(*canaries: Canary, **fields: Any) -> Server:
    """Return a vLLM server that is up."""
    plain = {
        "url": URL,
        "state": "up",
        "backend": "vllm 0.33.0",
        "shown": "vLLM 0.33.0",
        "models": ["m"],
        "model": "m",
        "context": 4096,
        "canaries": list(canaries),
    }
    return Server(**{**plain, **fields})


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


THOUGHT: dict[str, Any] = {"reasoning_field": "reasoning", "reasoning_chars": 9}


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


# Estimates


def test_a_spread_needs_enough_known_values() -> None:
    """Of fewer than eight known values nothing is said; the 95th percentile is one of the values."""
    assert spread([5] * 7 + [None] * 99) is None
    seen = spread([None, *range(1, 21)])
    assert seen is not None
    assert seen.p95 == 19


def report(*canaries: Canary, in_flight: float = 32.0) -> Report:
    """Return what one server was seen to do."""
    return Report(servers=[server(*canaries, in_flight=in_flight)], max_in_flight=128)


def test_time_and_disk_are_ranges_of_what_was_seen() -> None:
    """Equal canaries give the two ends alone: as fast with the bound full, or no more at once than was seen."""
    canaries = [canary(f"c{n}") for n in range(32)]
    made = estimate(report(*canaries, in_flight=20.0), canaries, 1280)
    assert made is not None
    assert (made.samples, made.whole, made.in_flight, made.seen_in_flight) == (1280, True, 128, 20.0)
    assert made.total_tokens == Range(140_800.0, 140_800.0)
    assert made.seconds == Range(2.0 * 1280 / 128, 2.0 * 1280 / 20)
    assert made.record_bytes == Range(1_280_000.0, 1_280_000.0)


def test_nothing_is_invented() -> None:
    """Without a row count it is for a thousand; unknown tokens stay unknown; too few canaries give no estimate."""
    canaries = [canary(f"c{n}", prompt_tokens=None, completion_tokens=None) for n in range(8)]
    made = estimate(report(*canaries), canaries, None)
    assert made is not None
    assert (made.samples, made.whole, made.total_tokens, made.prompt_tokens) == (1000, False, None, None)
    assert estimate(report(*canaries[:7]), canaries[:7], 100) is None
    failed = [canary(f"f{n}", verdict="failed") for n in range(32)]
    assert estimate(report(*failed), failed, 100) is None


# Canaries


def opener(one: Reading, first: int) -> Opened:
    """Open as the command does."""
    return reading.open_rows(one, first_rows=first)


def drawn(one: Reading, number: int, *, rows: int | None) -> Chosen:
    """Draw as the command does."""
    return choose(one, number, rows=rows, max_row_bytes=2**20, open_rows=opener)


def write(path: Path, prompts: Sequence[str]) -> Path:
    """Write rows."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return path


def test_canaries_are_drawn_from_all_first_rows_and_always_the_same(tmp_path: Path) -> None:
    """They are spread over the rows that are read, do not repeat, and are the same in the next look."""
    source = write(tmp_path / "rows.jsonl", [f"prompt {n}" for n in range(6000)])
    chosen = drawn(Reading(source=str(source)), 32, rows=None)
    assert (chosen.read, chosen.found, chosen.rows, chosen.total) == (5000, 5000, 6000, 6000)
    rows = [sample.source.row or 0 for sample in chosen.samples]
    assert len(set(rows)) == 32
    assert max(rows) > 3000
    assert min(rows) < 2000
    again = drawn(Reading(source=str(source)), 32, rows=None)
    assert [one.id for one in again.samples] == [one.id for one in chosen.samples]


def test_samples_of_the_whole_are_reckoned_from_the_rows_that_were_read(tmp_path: Path) -> None:
    """Rows that are no samples count off; --limit bounds them; what is not known stays unknown."""
    source = write(tmp_path / "rows.jsonl", ["", *(f"p {n}" for n in range(9))])
    chosen = drawn(Reading(source=str(source)), 4, rows=None)
    assert (len(chosen.samples), chosen.rows, chosen.total) == (4, 10, 9)
    assert drawn(Reading(source=str(source)), 4, rows=1000).total == 900
    assert drawn(Reading(source=str(source), limit=5), 4, rows=None).rows == 5
    many = write(tmp_path / "many.jsonl", [f"p {n}" for n in range(5001)])
    filtered = drawn(Reading(source=str(many), filters=("prompt~p",)), 4, rows=None)
    assert (filtered.rows, filtered.total) == (None, None)


# Words


def test_the_text_fits_into_eighty_columns_and_steers_no_terminal() -> None:
    """Every line is at most 80 columns wide, foreign words are harmless, and the end says how it stands."""
    canaries = [canary(f"c{n}") for n in range(32)]
    seen = report(*canaries)
    bad = Check(Level.FAIL, "server.canary", "a canary failed: \x1b[31mred " + "word " * 60, URL)
    plain = Check(Level.OK, "redis.clock", "fine.")
    text = list(
        lines(
            Findings(
                ok=False,
                checks=[plain, bad],
                recorded=recorded.fields(seen),
                canaries=recorded.verdicts(seen),
                source="rows.jsonl: 32 canaries.",
                estimate=estimate(seen, canaries, 88_088),
            )
        )
    )
    assert max(map(len, text)) <= 80
    assert "\x1b" not in "".join(text)
    assert text[0] == "Redis"
    assert text[1] == "  ok    fine."
    assert text[-1] == "doctor: 1 finding would waste the run or keep it from beginning (fail)."
    assert "canaries: accepted 32." in text
    assert "  tokens: 9.69 million to 9.69 million." in text
    assert "  output_ids               32 of 32  the server's, exact; they end with: eos" in text


def test_what_will_be_recorded_counts_the_answers() -> None:
    """Failed canaries are no answers; each field says how many have it and where it comes from."""
    seen = Report(servers=[server(canary(**THOUGHT), canary("x", reasoning_chars=0), canary("f", verdict="failed"))])
    told_fields = {one.name: (one.present, one.answers, one.source) for one in recorded.fields(seen)}
    assert told_fields["reasoning"] == (1, 2, "the field reasoning")
    assert told_fields["content"] == (2, 2, "the answer's text")
    assert told_fields["usage.reasoning_tokens"] == (0, 2, "not counted")
    assert "tool_calls" not in told_fields
    assert recorded.verdicts(seen) == {"accepted": 2, "failed": 1}
    assert recorded.fields(Report(servers=[])) == []
