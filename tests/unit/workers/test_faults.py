"""Faults: which failed call means what, and what is done about it."""

from __future__ import annotations

import asyncio
import email.utils
import json
import socket
import subprocess
import sys
from typing import Any

import aiohttp
import httpx2
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.faults import (
    MAX_MESSAGE_CHARS,
    TREATMENTS,
    FaultKind,
    Scope,
    backoff_s,
    classify_answer,
    classify_error_body,
    classify_exception,
    make_fault,
    parse_retry_after,
)

NOW = 1_790_000_000.0


def vllm(message: str, code: int, type_: str = "BadRequestError", **more: Any) -> bytes:
    """Return an error body in vLLM's and OpenAI's form."""
    return json.dumps({"error": {"message": message, "type": type_, "param": None, "code": code, **more}}).encode()


def sglang(message: str, code: int) -> bytes:
    """Return an error body in SGLang's flat form."""
    return json.dumps({"object": "error", "message": message, "type": str(code), "param": None, "code": code}).encode()


def fastapi(detail: Any) -> bytes:
    """Return an error body in FastAPI's form."""
    return json.dumps({"detail": detail}).encode()


ANSWERS = [
    (400, vllm("This model's maximum context length is 4096 tokens. However, ...", 400), FaultKind.CONTEXT_OVERFLOW),
    (
        400,
        sglang("The input (9 tokens) is longer than the model's context length (4 tokens).", 400),
        "context_overflow",
    ),
    (400, sglang("Requested token count exceeds the model's maximum context length of 4", 400), "context_overflow"),
    (400, vllm("the request exceeds the available context size", 400, "exceed_context_size_error"), "context_overflow"),
    (400, b'{"error":{"message":"too long","code":"context_length_exceeded"}}', "context_overflow"),
    (413, vllm("prompt is too long", 413), "context_overflow"),
    (500, vllm("context shift is disabled", 500, "server_error"), "context_overflow"),
    (500, vllm("Context size has been exceeded.", 500, "server_error"), "context_overflow"),
    (400, vllm("1 validation error: temperature must be a number", 400), "bad_request"),
    (400, b'{"error":"invalid type: text must be a string"}', "bad_request"),
    (400, b"not json at all", "bad_request"),
    (405, fastapi("Method Not Allowed"), "bad_request"),
    (413, b"<html>Request Entity Too Large</html>", "bad_request"),
    (422, fastapi("Unexpected fields in the request: {'top_k'}"), "bad_request"),
    (422, fastapi([{"loc": ["body", "n"], "msg": "Input should be 1", "input": "flagged"}]), "bad_request"),
    (401, b'{"error":"Unauthorized"}', "unauthorized"),
    (402, vllm("Insufficient credits", 402), "unauthorized"),
    (403, b"Forbidden", "unauthorized"),
    (403, vllm("Your input was flagged for violence", 403), "bad_request"),
    (404, vllm("The model `x` does not exist.", 404, "NotFoundError"), "not_found"),
    (404, fastapi("Not Found"), "not_found"),
    (400, vllm("Server is pinned to /m", 400), "not_found"),
    (400, b'{"error":{"message":"no such thing","code":"model_not_found"}}', "not_found"),
    (307, b"", "not_found"),
    (501, vllm("not supported by this server", 501), "not_found"),
    (400, sglang("Duplicate request ID detected: a", 400), "duplicate_id"),
    (408, b"", "timeout"),
    (504, b"<html>Gateway Time-out</html>", "timeout"),
    (503, sglang("Request running timeout reached.", 503), "timeout"),
    (429, b"", "overloaded"),
    (503, b"", "overloaded"),
    (529, b"", "overloaded"),
    (503, vllm("The engine is currently busy, retry later", 503, "Service Unavailable"), "overloaded"),
    (503, sglang("The request queue is full.", 503), "overloaded"),
    (503, sglang("The request is aborted by a higher priority request.", 503), "overloaded"),
    (503, sglang("Request waiting timeout reached.", 503), "overloaded"),
    (503, vllm("Loading model", 503, "unavailable_error"), "loading"),
    (503, sglang("Using priority is disabled for this server.", 503), "priority_disabled"),
    (503, sglang("Out of memory even after retracting all other requests", 503), "server_error"),
    (500, sglang("Out of memory even after retracting all other requests", 500), "server_error"),
    (500, vllm("Internal server error", 500, "InternalServerError"), "server_error"),
    (500, b"Internal Server Error", "server_error"),
    (502, b"<html>Bad Gateway</html>", "server_error"),
    (409, b"", "server_error"),
    (425, b"", "server_error"),
    (500, vllm("EngineCore encountered an issue. See stack trace", 500), "engine_dead"),
    (500, vllm("The server had an error while processing your request.", 500), "engine_dead"),
    (503, b'{"error":"CB worker is dead and cannot accept request r1: boom"}', "engine_dead"),
]


@pytest.mark.parametrize(("status", "body", "kind"), ANSWERS)
def test_status_and_words_decide_the_kind(status: int, body: bytes, kind: str) -> None:
    """Every error shape of the known servers is told apart by its status and the server's own words."""
    fault = classify_answer(status, {}, body, now=NOW)
    assert fault.kind == kind
    assert fault.status == status
    assert (fault.scope, fault.retry, fault.counted) == TREATMENTS[fault.kind]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (vllm("it is so", 500), "HTTP 500: it is so"),
        (sglang("it is so", 500), "HTTP 500: it is so"),
        (b'{"error":"it is so"}', "HTTP 500: it is so"),
        (fastapi("it is so"), "HTTP 500: it is so"),
        (fastapi([{"loc": ["body", "n"], "msg": "wrong", "input": "secret prompt"}]), "HTTP 500: body.n: wrong"),
        (fastapi({"message": "it is so"}), "HTTP 500: it is so"),
        (b'"it is so"', "HTTP 500: it is so"),
        (b'{"odd":1}', 'HTTP 500: {"odd":1}'),
        (b"[]", "HTTP 500: Internal Server Error"),
        (b"<html>\n busy </html>", "HTTP 500: <html> busy </html>"),
        (b"\xff\x00", "HTTP 500: \ufffd"),
        (b"", "HTTP 500: Internal Server Error"),
    ],
)
def test_message_is_the_servers_words(body: bytes, words: str) -> None:
    """The message repeats what the server said in whichever shape, and leaves an echoed prompt out."""
    assert classify_answer(500, {}, body, now=NOW).message == words


def test_redirect_names_its_target() -> None:
    """A redirect tells which URL to set."""
    fault = classify_answer(301, {"Location": "https://new.example/v1"}, b"", now=NOW)
    assert "https://new.example/v1" in fault.message


def test_what_concerns_everybody_uses_up_no_attempt() -> None:
    """A fault of the server as a whole or of its load never counts against a sample, and is always retried."""
    for kind, treatment in TREATMENTS.items():
        if treatment.scope is not Scope.SAMPLE:
            assert not treatment.counted, kind
            assert treatment.retry, kind
    assert set(TREATMENTS) == set(FaultKind)


@pytest.mark.parametrize(
    ("kind", "scope", "retry", "counted"),
    [
        ("unauthorized", "endpoint", True, False),
        ("not_found", "endpoint", True, False),
        ("connect", "endpoint", True, False),
        ("connect_timeout", "endpoint", True, False),
        ("engine_dead", "endpoint", True, False),
        ("loading", "endpoint", True, False),
        ("overloaded", "load", True, False),
        ("stale_connection", "sample", True, False),
        ("aborted", "sample", True, False),
        ("timeout", "sample", True, True),
        ("connection_lost", "sample", True, True),
        ("server_error", "sample", True, True),
        ("bad_answer", "sample", True, True),
        ("context_overflow", "sample", False, True),
        ("bad_request", "sample", False, True),
        ("priority_disabled", "sample", False, True),
    ],
)
def test_treatment(kind: str, scope: str, *, retry: bool, counted: bool) -> None:
    """Each kind of fault has its one treatment."""
    fault = make_fault(FaultKind(kind), "words")
    assert (fault.scope, fault.retry, fault.counted) == (scope, retry, counted)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        ({"error": {"message": "engine dead", "code": 500}}, "bad_answer", 500),
        ({"error": {"message": "slow down", "code": "429"}}, "overloaded", 429),
        ({"error": {"message": "no key", "code": 401}}, "unauthorized", 401),
        ({"error": {"message": "maximum context length is 4", "code": 400}}, "context_overflow", 400),
        ({"error": {"message": "maximum context length is 4"}}, "context_overflow", 200),
        ({"error": {"message": "upstream failed", "code": None}}, "bad_answer", 200),
        ({"error": "upstream failed"}, "bad_answer", 200),
        ({"object": "error", "message": "busy", "code": 503}, "overloaded", 503),
    ],
)
def test_error_inside_a_success(body: dict[str, Any], kind: str, status: int) -> None:
    """An error under HTTP 200 counts by its own code, and its body is quoted."""
    fault = classify_error_body(body)
    assert (fault.kind, fault.status) == (kind, status)
    assert msgspec.json.encode(body).decode() in fault.message


def test_dead_engine_under_a_success_ends_by_itself() -> None:
    """A server that answers others is not paused for one body that says 'engine dead': the attempts run out."""
    fault = classify_error_body({"error": {"message": "engine dead", "code": 500}})
    assert fault.counted
    assert fault.scope is Scope.SAMPLE


@given(status=st.integers(300, 599), body=st.binary(max_size=300), header=st.text(max_size=30))
def test_any_answer_is_a_fault(status: int, body: bytes, header: str) -> None:
    """No status, body or header makes the classification itself fail; the message is one bounded printable line."""
    fault = classify_answer(status, {"Retry-After": header}, body, now=NOW)
    assert 0 < len(fault.message) <= MAX_MESSAGE_CHARS
    assert fault.message.isprintable()
    assert fault.retry_after_s is None or fault.retry_after_s > 0


def test_message_is_bounded() -> None:
    """A server that talks for ever fills no log."""
    assert len(classify_answer(500, {}, vllm("x" * 10_000, 500), now=NOW).message) == MAX_MESSAGE_CHARS
    assert len(classify_answer(500, {}, vllm("x" * 1_000_000, 500), now=NOW).message) < MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        (" 3 ", 3.0),
        ("0.25", 0.25),
        ("200", 200.0),
        (email.utils.formatdate(NOW + 4, usegmt=True), 4.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", None),
        ("0", None),
        ("0.0", None),
        ("-5", None),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("1e3", None),
        ("1_0", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_forms(value: str | None, seconds: float | None) -> None:
    """Seconds and dates ahead are honoured; zero, past and garbage leave the wait to the own backoff."""
    assert parse_retry_after(value, NOW) == seconds


def test_retry_after_reaches_the_fault_under_any_spelling() -> None:
    """The header is found whatever its case."""
    assert classify_answer(429, {"retry-AFTER": "3"}, b"", now=NOW).retry_after_s == 3.0


@given(attempt=st.integers(-3, 10_000), draw=st.floats(0, 1, exclude_max=True))
def test_backoff_is_never_nothing_and_never_too_long(attempt: int, draw: float) -> None:
    """Every wait lies between half the first backoff and the longest."""
    assert 0.5 <= backoff_s(attempt, first_s=1.0, max_s=60.0, random=lambda: draw) <= 60.0


def test_backoff_doubles() -> None:
    """The ceiling doubles with each attempt up to its bound."""
    waits = [backoff_s(attempt, first_s=1.0, max_s=5.0, random=lambda: 0.0) for attempt in (1, 2, 3, 4, 5)]
    assert waits == [0.5, 1.0, 2.0, 2.5, 2.5]


REQUEST = httpx2.Request("POST", "http://127.0.0.1:1/v1/chat/completions")
KEY = aiohttp.client_reqrep.ConnectionKey("host", 1, False, True, None, None, None)  # noqa: FBT003 - aiohttp's form


def caused(error: BaseException, *causes: BaseException) -> BaseException:
    """Return the error with a chain of declared causes."""
    link = error
    for cause in causes:
        link.__cause__ = cause
        link = cause
    return error


def connection_error(*causes: BaseException) -> BaseException:
    """Return what the SDK raises for a failed connection."""
    return caused(openai.APIConnectionError(request=REQUEST), *causes)


def timeout_error(*causes: BaseException) -> BaseException:
    """Return what the SDK raises for every timeout."""
    return caused(openai.APITimeoutError(request=REQUEST), *causes)


EXCEPTIONS = [
    (aiohttp.ClientConnectorError(KEY, ConnectionRefusedError(111, "refused")), "connect"),
    (aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(-2, "unknown")), "connect"),
    (aiohttp.InvalidUrlClientError("http:///"), "connect"),
    (caused(aiohttp.ConnectionTimeoutError("slow"), TimeoutError()), "connect_timeout"),
    (aiohttp.SocketTimeoutError("slow"), "timeout"),
    (aiohttp.ServerDisconnectedError(), "connection_lost"),
    (aiohttp.ClientOSError(104, "reset"), "connection_lost"),
    (aiohttp.ClientConnectionResetError("closing"), "connection_lost"),
    (aiohttp.ClientPayloadError("cut"), "connection_lost"),
    (timeout_error(httpx2.ConnectTimeout("t")), "connect_timeout"),
    (timeout_error(httpx2.PoolTimeout("t")), "connect_timeout"),
    (timeout_error(httpx2.ReadTimeout("t")), "timeout"),
    (timeout_error(httpx2.ConnectTimeout("t"), aiohttp.ServerDisconnectedError()), "connection_lost"),
    (connection_error(httpx2.ConnectError("refused")), "connect"),
    (connection_error(httpx2.UnsupportedProtocol("ftp")), "connect"),
    (connection_error(httpx2.RemoteProtocolError("closed")), "connection_lost"),
    (connection_error(httpx2.ReadError("reset")), "connection_lost"),
    (connection_error(httpx2.DecodingError("gzip")), "bad_answer"),
    (connection_error(), "connection_lost"),
    (timeout_error(), "timeout"),
    (json.JSONDecodeError("no", "x", 0), "bad_answer"),
    (msgspec.DecodeError("no"), "bad_answer"),
    (TimeoutError(), "timeout"),
    (ConnectionRefusedError(111, "refused"), "connect"),
    (ConnectionResetError(104, "reset"), "connection_lost"),
    (socket.gaierror(-2, "unknown"), "connect"),
]


@pytest.mark.parametrize(("error", "kind"), EXCEPTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_exceptions_by_class(error: BaseException, kind: str) -> None:
    """A client library's exception is told apart by its class and its declared causes, whatever the SDK calls it."""
    fault = classify_exception(error)
    assert fault is not None
    assert fault.kind == kind
    assert fault.message


def test_status_error_of_the_sdk_is_its_answer() -> None:
    """An exception that carries an answer is classified by that answer, Retry-After included."""
    answer = httpx2.Response(429, headers={"retry-after": "7"}, content=b"", request=REQUEST)
    fault = classify_exception(openai.RateLimitError("no", response=answer, body=None))
    assert fault is not None
    assert (fault.kind, fault.status, fault.retry_after_s) == (FaultKind.OVERLOADED, 429, 7.0)


@pytest.mark.parametrize(
    "error", [TypeError("x"), KeyError("x"), ValueError("x"), OSError(28, "disk full"), asyncio.CancelledError()]
)
def test_bugs_are_no_faults(error: BaseException) -> None:
    """A mistake in the program, a full disk and a cancellation are not dressed up as a failed call."""
    assert classify_exception(error) is None


def test_bug_while_handling_a_fault_stays_a_bug() -> None:
    """A bug that merely happens during the handling of a lost connection is not taken for it."""
    error = TypeError("bug")
    error.__context__ = ConnectionResetError(104, "reset")
    assert classify_exception(error) is None


def test_circle_of_causes_ends() -> None:
    """Exceptions that name each other as causes do not hang the worker."""
    first, second = TypeError("a"), TypeError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify_exception(first) is None


def test_wire_side_imports_nothing_heavy() -> None:
    """Importing the worker's wire side loads neither openai nor aiohttp."""
    code = (
        "import sys, workers.faults, app.verdict, workers.clients.openai_chat;"
        "sys.exit(bool({'openai', 'aiohttp', 'httpx2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
