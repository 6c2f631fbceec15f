"""Streamed answers: the same records as whole ones, and faults where a stream stands still, breaks or ends badly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from app.records import Completion
from app.settings import ServerSettings
from producer.simulator.rules import Rule
from producer.simulator.server import ModelServer
from tests.support.byte_tokenizer import loaded_tokenizers
from tests.support.fake_client import until
from workers.clients.base import CallFailed, Client, Request
from workers.clients.make import make_client
from workers.faults import Fault

CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": "é", "b": [1, 2]}'}}
OTHER_CALL = {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}}
ANSWERS = {
    "text": Rule(content="Hi \U0001f305. " * 20),
    "thought": Rule(reasoning="Hm, é.", content="Hi."),
    "thought_alone": Rule(reasoning="Hm.", content=None),
    "tags_in_the_content": Rule(content="<think>Hm.</think>Hi."),
    "calls": Rule(tool_calls=[CALL, OTHER_CALL]),
    "calls_and_text": Rule(tool_calls=[CALL], content="I call."),
    "cut": Rule(content="y" * 300),
    "cut_in_thought": Rule(reasoning="x" * 300),
    "nothing": Rule(content=""),
    "stop_reason": Rule(stop_reason="END"),
    "aborted": Rule(finish_reason="abort"),
    "unfinished": Rule(finish_reason=None),
    "silent": Rule(content=None, usage={"prompt_tokens": 1, "completion_tokens": 9}),
    "refused": Rule(status=429, headers={"retry-after": "7"}),
}
SERVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("auto", {"dialect": "vllm"}),
    "plain": ("openai", {"dialect": "vllm"}),
    "crlf": ("auto", {"dialect": "vllm", "line_end": "\r\n"}),
    "without_done": ("auto", {"dialect": "vllm", "says_done": False}),
    "does_not_stream": ("auto", {"dialect": "vllm", "streams": False}),
    "sglang_chat": ("auto", {"dialect": "sglang", "token_ids": False}),
    "generate": ("sglang", {"dialect": "sglang"}),
    "generate_incremental": ("sglang", {"dialect": "sglang", "incremental": True}),
    "vllm_tokens": ("vllm-tokens", {"dialect": "vllm"}),
}
PROTOCOLS = {"auto": "vllm", "sglang": "sglang", "vllm-tokens": "vllm"}

every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run a test's story with a deadline."""
    asyncio.run(asyncio.wait_for(story, 60))


def request(**changes: Any) -> Request:
    """Return a question."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Say hi"}],
        "model": "toy-model",
        "sampling": {"max_tokens": 200},
        "request_id": "s-r0-a1",
    }
    return Request(**{**fields, **changes})


@contextlib.asynccontextmanager
async def asking(server: ModelServer, protocol: str = "auto", **settings: Any) -> AsyncIterator[Client]:
    """Hold a client that knows its server, for the length of a block."""
    servers = ServerSettings(protocol=protocol, **{"stream": True, **settings})
    client = make_client(server.url, servers, loaded_tokenizers(), max_connections=8)
    try:
        await client.identify()
        yield client
    finally:
        await client.close()


async def outcome(client: Client, **changes: Any) -> Completion | Fault:
    """Return what one question comes to."""
    try:
        return (await client.complete(request(**changes))).completion
    except CallFailed as failure:
        return failure.fault


async def fault_of(client: Client, **changes: Any) -> Fault:
    """Return the fault that one question fails with."""
    found = await outcome(client, **changes)
    assert isinstance(found, Fault)
    return found


@pytest.mark.parametrize("size", [3, 1000])
@pytest.mark.parametrize("server", SERVERS)
def test_a_streamed_answer_is_the_whole_one(server: str, size: int) -> None:
    """For every protocol and kind of answer the completion, or the fault, is the same, however it is cut."""
    protocol, options = SERVERS[server]

    async def story() -> None:
        with ModelServer(**options) as model:
            async with asking(model, protocol, stream=False) as whole, asking(model, protocol) as streaming:
                for name, rule in ANSWERS.items():
                    model.set_rules(default=dataclasses.replace(rule, chunk_tokens=size))
                    expected, found = await outcome(whole), await outcome(streaming)
                    if isinstance(expected, Fault) and isinstance(found, Fault):
                        expected, found = (dataclasses.replace(one, message="") for one in (expected, found))
                    notes = found.notes if isinstance(found, Completion) and server == "sglang_chat" else []
                    if notes:
                        assert "MILL_PROTOCOL=sglang" in notes[0]
                        notes.clear()
                    assert found == expected, name
            assert [one.body.get("stream") for one in model.requests[:2]][1] is True

    run(story())


def test_tokens_are_counted_only_where_the_server_takes_the_question() -> None:
    """`stream_options` goes to vLLM and SGLang; SGLang is not asked for ids, which it refuses in a stream."""

    async def story(dialect: str) -> None:
        with ModelServer(dialect=dialect) as server:
            async with asking(server) as client:
                said = await outcome(client)
            assert isinstance(said, Completion)
            body = server.requests[-1].body
            assert body["stream_options"] == {"include_usage": True}
            assert body.get("return_token_ids") == (True if dialect == "vllm" else None)
            assert said.usage.completion_tokens == len("echo: Say hi") + 1

    run(story("vllm"))
    run(story("sglang"))


def test_a_strict_server_is_asked_again_without_what_it_names() -> None:
    """A server that refuses `stream_options` and the ids by name is asked without them from then on."""
    refusal = json.dumps({"detail": "Unexpected fields in the request: {'return_token_ids', 'stream_options'}"})
    rules = [Rule(match=name, where="body", status=422, body=refusal) for name in ("return_token", "stream_options")]

    async def story() -> None:
        with ModelServer(rules) as server:
            async with asking(server, "openai") as client:
                for _ in range(2):
                    said = await outcome(client)
                    assert isinstance(said, Completion)
                    assert (said.content, said.output_ids) == ("echo: Say hi", None)
            assert len(server.requests) == 3

    run(story())


@every_protocol
def test_a_stream_that_stands_still_is_a_stall_and_is_ended_at_the_server(protocol: str) -> None:
    """Once tokens came, their absence ends the call long before its deadline, and the server hears of it."""
    rule = Rule(content="abcdefgh" * 8, chunk_tokens=4, stall_after=3)

    async def story() -> None:
        with ModelServer(default=rule, dialect=PROTOCOLS[protocol]) as server:
            async with asking(server, protocol, stall_timeout_s=0.3) as client:
                fault = await fault_of(client)
                assert fault.kind == "stalled"
                assert "no token for 0.3 s (MILL_STALL_TIMEOUT_S)" in fault.message
                assert (fault.retry, fault.counted, fault.scope, fault.status) == (True, False, "sample", None)
                await until(lambda: server.aborted == 1)
                if protocol == "sglang":
                    await until(lambda: server.aborts == ("s-r0-a1",))

    run(story())


@every_protocol
def test_a_cancelled_stream_is_ended_at_the_server(protocol: str) -> None:
    """A worker that ends, or a call that is given up, leaves no stream running."""
    rule = Rule(content="abcdefgh" * 8, chunk_tokens=4, chunk_delay_s=0.05, stall_after=10)

    async def story() -> None:
        tokens = asyncio.Event()
        with ModelServer(default=rule, dialect=PROTOCOLS[protocol]) as server:
            async with asking(server, protocol) as client:
                call = asyncio.ensure_future(client.complete(request(on_token=tokens.set)))
                await tokens.wait()
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                await until(lambda: server.aborted == 1)
                if protocol == "sglang":
                    await until(lambda: server.aborts == ("s-r0-a1",))

    run(story())


def test_a_slow_stream_lives_beyond_the_deadline_of_a_silent_call() -> None:
    """The deadline is for the first token; after it an answer may take as long as its tokens keep coming."""
    slow = Rule(content="abcdefgh", chunk_tokens=1, chunk_delay_s=0.25)

    async def story() -> None:
        with ModelServer(default=slow) as server:
            async with asking(server, request_timeout_s=1, stall_timeout_s=20) as client:
                started = time.monotonic()
                said = await outcome(client)
                assert isinstance(said, Completion)
                assert said.content == "abcdefgh"
                assert time.monotonic() - started > 1

    run(story())


def test_a_stream_that_drips_for_ever_is_ended_at_the_server_too() -> None:
    """Tokens that keep coming do not keep a call for ever: it ends at twelve times its deadline."""
    drip = Rule(content="a" * 300, finish_reason="stop", chunk_tokens=1, chunk_delay_s=0.1)

    async def story() -> None:
        with ModelServer(default=drip) as server:
            async with asking(server, request_timeout_s=0.75, stall_timeout_s=20) as client:
                fault = await fault_of(client)
                assert (fault.kind, fault.counted) == ("timeout", True)
                assert "12 times its deadline of 0.75 s (MILL_REQUEST_TIMEOUT_S)" in fault.message
                await until(lambda: server.aborted == 1)

    run(story())


def test_a_request_that_waits_for_its_turn_is_not_stalled() -> None:
    """Before the first token only the deadline counts: a full queue says nothing."""

    async def story() -> None:
        with ModelServer(default=Rule(delay_s=1)) as server:
            async with asking(server, stall_timeout_s=0.1) as client:
                assert isinstance(await outcome(client), Completion)
        with ModelServer(default=Rule(hang=True)) as server:
            async with asking(server, stall_timeout_s=0.1, request_timeout_s=0.5) as client:
                fault = await fault_of(client)
                assert (fault.kind, fault.message) == ("timeout", "no answer within 0.5 s (MILL_REQUEST_TIMEOUT_S)")

    run(story())


def test_comments_keep_a_waiting_stream_alive_and_not_a_running_one() -> None:
    """A server that sends comments while a request waits must go on with them; once tokens came, only tokens count."""

    async def story() -> None:
        waiting = Rule(delay_s=2, comment_every_s=0.05)
        stuck = Rule(content="a" * 40, chunk_tokens=4, stall_after=4, comment_every_s=0.05)
        silent = Rule(comment_every_s=0.3, delay_s=0.35, stall_after=0, content="b")
        with ModelServer([Rule(**{**dataclasses.asdict(waiting), "times": 1})], default=stuck) as server:
            async with asking(server, stall_timeout_s=1) as client:
                assert isinstance(await outcome(client), Completion)
                assert (await fault_of(client)).kind == "stalled"
            server.set_rules(default=dataclasses.replace(silent, delay_s=1000))
            async with asking(server, stall_timeout_s=0.2) as client:
                fault = await fault_of(client)
                assert fault.kind == "stalled"
                assert "no token and no comment for 0.2 s" in fault.message

    run(story())


@every_protocol
@pytest.mark.parametrize("done", [True, False])
def test_an_error_inside_a_stream_is_a_fault_whatever_ends_it(protocol: str, done: bool) -> None:
    """`[DONE]` is no proof: an error among the chunks fails the call, as the status that it could not be."""
    dialect = PROTOCOLS[protocol]

    async def story() -> None:
        rule = Rule(content="a" * 40, chunk_tokens=4, error_after=3, message="EngineCore encountered an issue.")
        with ModelServer(default=rule, dialect=dialect, says_done=done) as server:
            async with asking(server, protocol) as client:
                fault = await fault_of(client)
                assert (fault.kind, fault.status) == ("engine_dead", 500)
                server.set_rules(default=dataclasses.replace(rule, message="Something broke."))
                assert (await fault_of(client)).kind == "server_error"

    run(story())


@every_protocol
def test_half_a_stream_is_no_answer(protocol: str) -> None:
    """A connection that breaks, and a stream that ends well without a finish reason, bring nothing."""
    dialect = PROTOCOLS[protocol]

    async def story() -> None:
        with ModelServer(default=Rule(content="a" * 40, chunk_tokens=4, cut_after=5), dialect=dialect) as server:
            async with asking(server, protocol) as client:
                assert (await fault_of(client)).kind == "connection_lost"
                server.set_rules(default=Rule(content="a" * 40, finish_reason=None))
                assert (await fault_of(client)).kind == "unfinished"

    run(story())


def test_what_is_no_chunk_is_a_bad_answer() -> None:
    """Streams of something else, of nothing, or of more than the bound fail with words that say so."""
    bodies = {
        "data: {cut\n\ndata: [DONE]\n\n": "not JSON",
        "data: [DONE]\n\n": "no choices",
        ": keep-alive\n\n": "no choices",
        'data: {"choices": [{"error": {"message": "upstream", "code": 502}}]}\n\n': "upstream",
    }

    async def story() -> None:
        with ModelServer() as server:
            async with asking(server, max_body_mb=0.01) as client:
                for body, words in bodies.items():
                    server.set_rules(default=Rule(body=body, content_type="text/event-stream"))
                    fault = await fault_of(client)
                    assert words in fault.message
                    assert fault.kind == ("server_error" if words == "upstream" else "bad_answer")
                server.set_rules(default=Rule(content="a" * 9000, finish_reason="stop"))
                fault = await fault_of(client)
                assert fault.kind == "bad_answer"
                assert "MILL_MAX_BODY_MB" in fault.message

    run(story())


def test_connections_of_streams_are_used_again() -> None:
    """A stream is read to its end, with and without `[DONE]`, so that one connection serves many."""

    async def story(*, done: bool) -> None:
        with ModelServer(says_done=done) as server:
            async with asking(server) as client:
                for _ in range(20):
                    assert isinstance(await outcome(client), Completion)
            assert server.accepted_connections == 1

    run(story(done=True))
    run(story(done=False))


def test_other_servers_chunks_are_understood() -> None:
    """Reasoning details, content in parts, whole calls without numbers, and a usage on the last chunk."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    deltas: list[Any] = [
        {"role": "assistant", "content": None, "reasoning_details": [{"type": "reasoning.text", "text": "Hm"}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "m."}]},
        {"content": [{"type": "text", "text": "Hi"}]},
        {"content": "!"},
        {"tool_calls": [call]},
    ]
    chunks: list[Any] = [{"id": "x", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})
    chunks.insert(2, {"choices": [{"index": 1, "delta": {"content": "another choice"}}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)

    async def story() -> None:
        with ModelServer(default=Rule(body=body, content_type="text/event-stream")) as server:
            async with asking(server) as client:
                said = await outcome(client)
        assert isinstance(said, Completion)
        assert (said.reasoning, said.reasoning_field, said.content) == ("Hmm.", "reasoning_details", "Hi!")
        assert said.tool_calls == [{**call, "function": {"name": "f", "arguments": '{"a": 1}'}}]
        assert (said.usage.prompt_tokens, said.usage.completion_tokens, said.response_id) == (3, 5, "x")

    run(story())
