"""The simulated model server keeps the wire contract that the product is built on."""

from __future__ import annotations

import asyncio
import email.utils
import http.client
import json
import socket
import struct
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from producer.simulator.rules import Rule, RuleBook
from producer.simulator.server import ModelServer
from producer.simulator.shapes import EOS_ID, decode
from tests.support.processes import PROJECT_ROOT, ManagedProcess, wait_until

CHAT = "/v1/chat/completions"
JSON_HEADERS = {"Content-Type": "application/json"}


@pytest.fixture
def server() -> Iterator[ModelServer]:
    """Run a server without rules."""
    with ModelServer() as server:
        yield server


def request(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """Return a chat request body with one user message."""
    return {"model": "toy-model", "messages": [{"role": "user", "content": text}], **fields}


def call(
    server: ModelServer, body: Any = None, *, path: str = CHAT, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send one request over a fresh connection; without a body it is a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, payload, JSON_HEADERS | (headers or {}))
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def chat(server: ModelServer, body: Any, **options: Any) -> tuple[int, Any]:
    """Send a chat request and parse the JSON answer."""
    status, _headers, raw = call(server, body, **options)
    return status, json.loads(raw)


def test_plain_answer_has_vllms_shape(server: ModelServer) -> None:
    """An answer echoes the last user text in vLLM's fields and nothing is guessed where ids were not asked for."""
    status, answer = chat(server, request("hi", frobnicate=1))
    choice = answer["choices"][0]
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {
        "role": "assistant",
        "content": "echo: hi",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", None, None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == len("echo: hi") + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_token_ids_decode_to_the_answer() -> None:
    """Asked-for ids are exact: they decode to reasoning and content, end in EOS, and are as many as usage says."""
    with ModelServer([Rule(reasoning="hm ", content="yes 😀")]) as server:
        _status, answer = chat(server, request(return_token_ids=True))
    choice = answer["choices"][0]
    assert choice["message"]["reasoning"] == "hm "
    assert decode(choice["token_ids"]) == "<think>hm </think>yes 😀"
    assert choice["token_ids"][-1] == EOS_ID
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


def test_max_tokens_cuts_with_length() -> None:
    """An answer that is longer than max_tokens ends with finish_reason length and no EOS, inside the thinking too."""
    with ModelServer([Rule(match="think", reasoning="a long thought"), Rule(content="abcdef")]) as server:
        _status, plain = chat(server, request("plain", max_tokens=4, return_token_ids=True))
        _status, thinking = chat(server, request("think", max_tokens=4))
        _status, exact = chat(server, request("plain", max_tokens=7))
    assert plain["choices"][0]["message"]["content"] == "abcd"
    assert plain["choices"][0]["finish_reason"] == "length"
    assert decode(plain["choices"][0]["token_ids"]) == "abcd"
    assert plain["usage"]["completion_tokens"] == 4
    assert thinking["choices"][0]["message"]["content"] is None
    assert thinking["choices"][0]["message"]["reasoning"] == "a l"
    assert exact["choices"][0]["finish_reason"] == "stop"


def test_tool_calls() -> None:
    """A tool call answer has null content and finish_reason tool_calls."""
    tool_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with ModelServer([Rule(tool_calls=[tool_call])]) as server:
        _status, answer = chat(server, request())
    message = answer["choices"][0]["message"]
    assert (message["content"], message["tool_calls"]) == (None, [tool_call])
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_sglang_dialect() -> None:
    """The SGLang dialect answers with reasoning_content and empty content, and refuses with flat errors."""
    rules = [Rule(match="bad", status=400, message="no"), Rule(content=None, reasoning="r", finish_reason="length")]
    with ModelServer(rules, dialect="sglang") as server:
        _status, answer = chat(server, request(return_token_ids=True))
        status, error = chat(server, request("bad"))
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("", "r")
    assert decode(choice["response_token_ids"]) == "<think>r</think>"
    assert status == 400
    assert error == {"object": "error", "message": "no", "type": "BadRequestError", "param": None, "code": 400}


@pytest.mark.parametrize(
    ("options", "body", "status", "words"),
    [
        ({}, request() | {"model": "x"}, 404, "The model `x` does not exist."),
        ({}, {"model": "toy-model"}, 400, "validation error"),
        ({"max_chars": 50}, request("y" * 60), 400, "This model's maximum context length is 50 tokens. However,"),
        ({"max_model_len": 100}, request(max_tokens=101), 400, "max_tokens=101"),
        ({"strict_roles": True}, {"messages": [{"role": "assistant", "content": "a"}]}, 400, "must alternate"),
        ({"reject_empty": True}, request(" "), 400, "cannot be empty"),
        ({"max_in_flight": 0}, request(), 503, "The engine is currently busy"),
    ],
)
def test_refusals(options: dict[str, Any], body: dict[str, Any], status: int, words: str) -> None:
    """What vLLM refuses is refused with its status, its error shape and its words."""
    with ModelServer(**options) as server:
        got, answer = chat(server, body)
    assert got == status
    assert words in answer["error"]["message"]
    assert answer["error"]["code"] == status


def test_context_is_filled_silently() -> None:
    """A prompt that fits is answered in what is left of the context, though max_tokens asked for more."""
    with ModelServer([Rule(content="z" * 200)], max_model_len=100) as server:
        _status, answer = chat(server, request(max_tokens=100))
    assert answer["usage"]["total_tokens"] == 100
    assert answer["choices"][0]["finish_reason"] == "length"


def test_api_key() -> None:
    """With a key, /v1 needs the bearer token and /health does not."""
    with ModelServer(api_key="k") as server:
        assert chat(server, request()) == (401, {"error": "Unauthorized"})
        assert call(server, path="/v1/models")[0] == 401
        assert call(server, path="/health")[0] == 200
        assert chat(server, request(), headers={"Authorization": "Bearer k"})[0] == 200


def test_other_routes(server: ModelServer) -> None:
    """Health, models, version and metrics answer as vLLM's do; unknown paths are 404."""
    chat(server, request())
    assert call(server, path="/health")[::2] == (200, b"")
    model = json.loads(call(server, path="/v1/models")[2])["data"][0]
    assert (model["id"], model["max_model_len"]) == ("toy-model", 131_072)
    assert json.loads(call(server, path="/version")[2]) == {"version": "0.33.0"}
    assert b'vllm:num_requests_running{engine="0",model_name="toy-model"} 0.0' in call(server, path="/metrics")[2]
    assert call(server, path="/nope")[0] == 404
    assert json.loads(call(server, path="/__stats")[2])["total"] == 1
    assert json.loads(call(server, path="/__counts")[2]) == {"hello": 1}
    server.set_options(healthy=False)
    assert call(server, path="/health")[0] == 503


def test_rules_are_spent_in_order() -> None:
    """The first live rule wins, counts down, and gives way to the next."""
    rules: list[dict[str, Any]] = [
        {"match": "x", "times": 2, "status": 429, "headers": {"Retry-After": "@date+30"}},
        {"content": "ok"},
    ]
    with ModelServer(rules) as server:
        replies = [call(server, request("x")) for _ in range(3)]
        assert [status for status, _, _ in replies] == [429, 429, 200]
        at = email.utils.parsedate_to_datetime(replies[0][1]["retry-after"]).timestamp()
        assert 20 < at - time.time() < 40
        assert server.count("x") == 3
        assert server.requests[0].body["messages"][0]["content"] == "x"
        assert server.requests[0].headers["content-type"] == "application/json"
        server.set_rules([Rule(content="new")])
        assert chat(server, request("x"))[1]["choices"][0]["message"]["content"] == "new"


def test_rule_may_match_the_whole_body() -> None:
    """A rule with where=body sees every field of the request, unescaped."""
    book = RuleBook([Rule(match="émile", where="body", status=500)])
    assert book.pick("hello", {"user": "émile"}).status == 500
    assert book.pick("émile", {}).status == 200


@pytest.mark.parametrize("raw", [b"", b"<html>busy</html>", b'{"choices":[{"message":{"content":NaN}}]}'])
def test_raw_bodies(raw: bytes) -> None:
    """A raw body comes as it is, with its content type."""
    with ModelServer([Rule(body=raw, content_type="text/html")]) as server:
        status, headers, body = call(server, request())
    assert (status, headers["content-type"], body) == (200, "text/html", raw)


def test_lone_surrogates_stay_escapes() -> None:
    r"""A lone surrogate travels as \ud800, for it has no UTF-8 bytes."""
    with ModelServer([Rule(content="a\ud800")]) as server:
        assert b'"content":"a\\ud800"' in call(server, request())[2]


def test_null_usage_and_extra_message_fields() -> None:
    """Usage can be null and other servers' message fields can be added."""
    with ModelServer([Rule(usage=None, message_fields={"reasoning_content": "r"})]) as server:
        _status, answer = chat(server, request())
    assert answer["usage"] is None
    assert answer["choices"][0]["message"]["reasoning_content"] == "r"


@pytest.mark.parametrize(
    ("drop", "error"),
    [
        ("before", http.client.RemoteDisconnected),
        ("reset", ConnectionResetError),
        ("headers", http.client.IncompleteRead),
        ("middle", http.client.IncompleteRead),
    ],
)
def test_drops(drop: str, error: type[Exception]) -> None:
    """A dropped answer breaks off where the rule says."""
    with ModelServer([Rule(drop=drop)]) as server, pytest.raises(error):  # type: ignore[arg-type]
        call(server, request())


def test_drop_after_closes_a_kept_connection() -> None:
    """A connection dropped after a whole answer is closed though it was to be kept."""
    with ModelServer([Rule(drop="after")]) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("POST", CHAT, json.dumps(request()), JSON_HEADERS)
        response = connection.getresponse()
        assert json.loads(response.read())["object"] == "chat.completion"
        assert response.getheader("connection") != "close"
        sock = connection.sock
        assert sock.recv(1) == b""
        connection.close()


def test_hanging_request_is_aborted_by_its_client() -> None:
    """A hanging request is in flight until its client goes away, and counts as aborted then."""
    with ModelServer([Rule(hang=True)]) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=0.2)
        connection.request("POST", CHAT, json.dumps(request()), JSON_HEADERS)
        with pytest.raises(TimeoutError):
            connection.getresponse()
        assert server.in_flight == 1
        connection.close()
        wait_until(lambda: server.aborted == 1, 5, "the abort")
        assert server.in_flight == 0


def test_endless_body_never_ends() -> None:
    """An endless body goes on until the client goes away, held back while it does not read."""
    with ModelServer([Rule(endless=True)]) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("POST", CHAT, json.dumps(request()), JSON_HEADERS)
        response = connection.getresponse()
        assert len(response.read(1_000_000)) == 1_000_000
        response.close()
        connection.close()
        wait_until(lambda: server.aborted == 1, 5, "the abort")


def test_repeat_makes_big_bodies() -> None:
    """A repeated content is not cut at max_tokens."""
    with ModelServer([Rule(content="0123456789", repeat=300_000)]) as server:
        _status, answer = chat(server, request(max_tokens=5))
    assert len(answer["choices"][0]["message"]["content"]) == 3_000_000


def test_concurrent_requests_are_counted() -> None:
    """Delays run side by side, and the peak says how many waited at once."""

    async def ask_all(server: ModelServer) -> None:
        async with aiohttp.ClientSession() as session:

            async def ask(number: int) -> None:
                async with session.post(server.url + CHAT, json=request(f"q{number}")) as response:
                    assert response.status == 200
                    await response.read()

            await asyncio.gather(*(ask(number) for number in range(20)))

    with ModelServer(default=Rule(delay_s=0.3)) as server:
        began = time.monotonic()
        asyncio.run(ask_all(server))
        assert time.monotonic() - began < 4
        assert server.peak_in_flight == 20
        assert set(server.counts.values()) == {1}
        assert server.stats["busy_s"] >= 20 * 0.29


def test_chunked_request_bodies(server: ModelServer) -> None:
    """A request body in chunks is read like one with a length."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    pieces = [b'{"messages":[{"role":"user",', b'"content":"parts"}]}']
    connection.request("POST", CHAT, iter(pieces), JSON_HEADERS, encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()
    assert server.count("parts") == 1


def test_stop_and_start_on_the_same_port(server: ModelServer) -> None:
    """A stopped server refuses connections and cuts open ones; started again it keeps port and tallies."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as idle:
        port = server.port
        wait_until(lambda: server.accepted_connections == 1, 5, "the idle connection")
        server.stop()
        assert idle.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        chat(server, request())
    server.start()
    assert server.port == port
    assert chat(server, request())[0] == 200
    assert server.accepted_connections == 2


def test_start_down_refuses_at_first() -> None:
    """A server that starts late refuses connections until then."""
    with ModelServer(start_down_s=0.5) as server:
        with pytest.raises(ConnectionRefusedError):
            chat(server, request())

        def answers() -> bool:
            try:
                return chat(server, request())[0] == 200
            except ConnectionRefusedError:
                return False

        wait_until(answers, 10, "an answer")


def test_idle_connections_are_closed() -> None:
    """A connection that idles longer than keep-alive after an answer is closed; before it asks, it has all the time."""
    with (
        ModelServer(keep_alive_s=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as idle,
    ):
        idle.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert b"".join(iter(lambda: idle.recv(4096), b"")).startswith(b"HTTP/1.1 200 OK\r\n")
        silent.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert silent.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")


def test_client_reset_is_survived(server: ModelServer) -> None:
    """A client that resets its connection in the middle of a request leaves the server whole."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert chat(server, request())[0] == 200


def test_runs_as_a_program(tmp_path: Path) -> None:
    """As a program it says where it listens, follows its rules file, shows its tallies and ends at SIGTERM."""
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"rules": [{"match": "a", "content": "b"}], "server": {"model": "m"}}))
    command = [sys.executable, "-m", "producer.simulator.server", "--port", "0", "--rules", str(rules)]
    with ManagedProcess(command, log_dir=tmp_path, name="model", cwd=PROJECT_ROOT) as program:
        url = json.loads(program.wait_for_output("listening"))["listening"]
        data = json.dumps(request("a") | {"model": "m"}).encode()
        with urllib.request.urlopen(urllib.request.Request(url + CHAT, data, JSON_HEADERS), timeout=10) as response:  # noqa: S310  our own URL
            assert json.load(response)["choices"][0]["message"]["content"] == "b"
        with urllib.request.urlopen(url + "/__stats", timeout=10) as response:  # noqa: S310  our own URL
            assert json.load(response)["statuses"] == {"200": 1}
        assert program.stop() == 0
