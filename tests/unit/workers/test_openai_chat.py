"""The OpenAI chat client against a real HTTP server that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from app.settings import ServerSettings
from workers.clients.base import Answer, CallFailed, Probe, Request
from workers.clients.link import Link
from workers.clients.openai_chat import OpenAIChatClient
from workers.faults import Fault, FaultKind, Scope
from workers.rendering import Tokenizers

GOOD = {
    "id": "c1",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 5},
}
REQUEST = Request(
    messages=[{"role": "user", "content": "Say hello \U0001f600"}],
    model="m",
    sampling={"max_tokens": 9, "top_k": 4},
    request_id="set:one-a1",
)


@dataclasses.dataclass
class Seen:
    """One request as the server received it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int


Reply = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A server on a free local port that answers each request with the next reply, the last one for ever."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.seen: list[Seen] = []
        self.ended = asyncio.Event()
        self.url = ""
        self._connections = 0
        self._tasks = set[asyncio.Task[None]]()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side closes it, or `end`."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """End what is being served."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        try:
            while not writer.is_closing():
                seen = await read_request(reader, number)
                self.seen.append(seen)
                reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
                await reply(seen, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.ended.set()
            writer.close()


async def read_request(reader: asyncio.StreamReader, connection: int) -> Seen:
    """Read one request with its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
    method, path, _version = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    raw = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(method, path, headers, json.loads(raw) if raw else None, connection)


@contextlib.asynccontextmanager
async def serving(*replies: Reply) -> AsyncIterator[Server]:
    """Run a server for the length of a block."""
    server = Server(*replies)
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await server.end()


@contextlib.asynccontextmanager
async def asking(url: str, **changes: Any) -> AsyncIterator[OpenAIChatClient]:
    """Hold a client for the length of a block."""
    settings = {
        "api_key": "sk-very-secret",
        "request_timeout_s": 20.0,
        "connect_timeout_s": 10.0,
        "max_body_mb": 100_000 / 2**20,
    }
    link = Link(url, ServerSettings(**{**settings, **changes}), max_connections=8)
    client = OpenAIChatClient(link, Tokenizers(None), allow_unknown=False, asks_backend=False)
    try:
        yield client
    finally:
        await client.close()


def replying(
    body: Any = GOOD, status: int = 200, headers: tuple[str, ...] = (), *, kind: str = "application/json"
) -> Reply:
    """Return a reply with a body (bytes, or a value sent as JSON)."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def reply(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(raw)}", *headers]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        await writer.drain()

    return reply


async def close_at_once(_seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Close the connection without a byte."""
    writer.close()


async def never_answer(_seen: Seen, _writer: asyncio.StreamWriter) -> None:
    """Keep silent until the test ends the loop."""
    await asyncio.Event().wait()


async def cut_in_the_middle(_seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Promise a thousand bytes, send a few and close."""
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices"')
    await writer.drain()
    writer.close()


async def talk_for_ever(_seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Stream a body that has no end."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
        await writer.drain()


async def speak_another_protocol(_seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Answer as Redis does."""
    writer.write(b"-ERR unknown command\r\n")
    await writer.drain()
    writer.close()


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run a test's story with a deadline that only a hanging client meets."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story

    asyncio.run(bounded())


async def fault_from(client: OpenAIChatClient, request: Request = REQUEST) -> Fault:
    """Ask and return the fault that must come."""
    with pytest.raises(CallFailed) as failure:
        await client.complete(request)
    return failure.value.fault


def ask_once(reply: Reply, **changes: Any) -> tuple[Answer | Fault, list[Seen]]:
    """Ask a server that always replies the same way once; return the outcome and what the server saw."""
    outcome: list[Any] = []

    async def story() -> None:
        async with serving(reply) as server, asking(server.url, **changes) as client:
            try:
                outcome.append(await client.complete(REQUEST))
            except CallFailed as failure:
                outcome.append(failure.fault)
            outcome.append(server.seen)

    run(story())
    return outcome[0], outcome[1]


def test_request_on_the_wire() -> None:
    """A request carries the settings at its top level, its id and its key, and none of the SDK's telemetry."""
    answer, seen = ask_once(replying())
    assert isinstance(answer, Answer)
    assert answer.completion.content == "Hello."
    assert answer.latency_s > 0
    assert (seen[0].method, seen[0].path) == ("POST", "/v1/chat/completions")
    assert seen[0].body == {
        "model": "m",
        "messages": REQUEST.messages,
        "max_tokens": 9,
        "top_k": 4,
        "return_token_ids": True,
    }
    headers = seen[0].headers
    assert headers["authorization"] == "Bearer sk-very-secret"
    assert headers["x-request-id"] == "set:one-a1"
    assert headers["content-type"] == "application/json"
    assert headers["accept-encoding"] == "identity"
    assert not [name for name in headers if name.startswith(("x-stainless", "openai-"))]


def test_optional_fields() -> None:
    """Tools and seed are sent when given; ids in other alphabets become safe header values."""

    async def story() -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        request = dataclasses.replace(
            REQUEST, tools=tools, seed=0, want_token_ids=False, request_id="sp\u00e4t\r\nX-Evil: 1"
        )
        async with serving(replying()) as server, asking(server.url) as client:
            await client.complete(request)
        body, headers = server.seen[0].body, server.seen[0].headers
        assert (body["tools"], body["seed"]) == (tools, 0)
        assert "return_token_ids" not in body
        assert headers["x-request-id"] == "sp_t_X-Evil:_1"
        assert "x-evil" not in headers

    run(story())


def test_no_key_sends_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key nothing is sent as one, whatever keys for other services the environment holds."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-else")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-somebody-else")
    answer, seen = ask_once(replying(), api_key=None)
    assert isinstance(answer, Answer)
    assert not [value for value in seen[0].headers.values() if "somebody-else" in value]
    assert "authorization" not in seen[0].headers


def test_login_in_the_url() -> None:
    """A user name and password in the URL are sent as such and appear in no message."""

    async def story() -> None:
        async with serving(replying({"error": "no rights for bWU6cA=="}, 403)) as server:
            async with asking(server.url.replace("//", "//me:p@")) as client:
                fault = await fault_from(client)
            assert server.seen[0].headers["authorization"] == "Basic bWU6cA=="
            assert (fault.kind, fault.message) == (FaultKind.UNAUTHORIZED, "HTTP 403: no rights for ***")

    run(story())


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (replying({"error": {"message": "maximum context length is 4", "code": 400}}, 400), "context_overflow"),
        (replying({"error": {"message": "stub 400", "code": 400}}, 400), "bad_request"),
        (replying({"error": "Unauthorized"}, 401), "unauthorized"),
        (replying({"detail": "Not Found"}, 404), "not_found"),
        (replying(b"", 307, ("Location: /elsewhere",)), "not_found"),
        (replying({"object": "error", "message": "The request queue is full.", "code": 503}, 503), "overloaded"),
        (replying(b"Internal Server Error", 500, kind="text/plain"), "server_error"),
        (replying({"error": {"message": "engine dead", "code": 500}}), "bad_answer"),
        (replying(b"<html>busy</html>", kind="text/html"), "bad_answer"),
        (replying(b""), "bad_answer"),
        (replying(json.dumps(GOOD).encode()[:40]), "bad_answer"),
        (replying({"id": "x", "choices": []}), "bad_answer"),
        (replying(b"x" * 100_001), "bad_answer"),
        (talk_for_ever, "bad_answer"),
        (cut_in_the_middle, "connection_lost"),
        (close_at_once, "connection_lost"),
        (speak_another_protocol, "connect"),
    ],
)
def test_every_failure_is_one_classified_request(reply: Reply, kind: str) -> None:
    """Whatever a server does, the call ends in a fault of the right kind after exactly one request."""
    fault, seen = ask_once(reply)
    assert isinstance(fault, Fault)
    assert fault.kind == kind, fault.message
    assert len(seen) == 1


def test_endless_answer_is_not_read_to_its_end() -> None:
    """An answer over the bound is dropped and its connection closed."""

    async def story() -> None:
        async with serving(talk_for_ever) as server, asking(server.url) as client:
            fault = await fault_from(client)
            assert "MILL_MAX_BODY_MB" in fault.message
            await server.ended.wait()

    run(story())


def test_deadline_covers_the_whole_call() -> None:
    """A server that never answers, or only trickles, ends in a timeout, and its connection is closed."""

    async def trickle(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.02)

    for reply in (never_answer, trickle):
        fault, seen = ask_once(reply, request_timeout_s=0.3)
        assert isinstance(fault, Fault)
        assert fault.kind is FaultKind.TIMEOUT
        assert "0.3 s" in fault.message
        assert len(seen) == 1


def test_cancelled_call_closes_its_connection() -> None:
    """Cancelling a call hangs up at once, so that the server stops generating."""

    async def story() -> None:
        asked = asyncio.Event()

        async def wait_for_hangup(_seen: Seen, writer: asyncio.StreamWriter) -> None:
            asked.set()
            while not writer.is_closing():
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)

        async with serving(wait_for_hangup) as server, asking(server.url) as client:
            call = asyncio.create_task(client.complete(REQUEST))
            await asked.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.ended.wait()

    run(story())


def test_refused_connection_concerns_the_endpoint() -> None:
    """Where nobody listens, the fault is the endpoint's and names the address."""

    async def story() -> None:
        with socket.socket() as placeholder:
            placeholder.bind(("127.0.0.1", 0))  # bound, not listening: nobody else can take the port
            port = placeholder.getsockname()[1]
            async with asking(f"http://127.0.0.1:{port}") as client:
                fault = await fault_from(client)
                probe = await client.probe()
        assert (fault.kind, fault.scope, fault.counted) == (FaultKind.CONNECT, Scope.ENDPOINT, False)
        assert str(port) in fault.message
        assert not probe.alive
        assert str(port) in probe.words

    run(story())


def test_connection_is_kept_and_marked() -> None:
    """Calls share a kept connection, and its socket has TCP keep-alive on."""

    async def story() -> None:
        async with serving(replying()) as server, asking(server.url) as client:
            await client.complete(REQUEST)
            await client.complete(REQUEST)
            assert [seen.connection for seen in server.seen] == [1, 1]
            session = client._link.pool._sessions[False]
            [(handler, _used)] = next(iter(session.connector._conns.values()))  # type: ignore[union-attr]
            sock = handler.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60

    run(story())


def test_stale_connection_is_asked_again_at_once() -> None:
    """A kept connection that the server closes at its reuse costs the caller nothing."""

    async def story() -> None:
        async with serving(replying(), close_at_once, replying()) as server, asking(server.url) as client:
            await client.complete(REQUEST)
            answer = await client.complete(REQUEST)
            assert answer.completion.content == "Hello."
            assert [seen.connection for seen in server.seen] == [1, 1, 2]

    run(story())


def test_stale_connection_is_asked_again_only_once() -> None:
    """A server that closes the next connection as well is a lost connection, which counts."""

    async def story() -> None:
        async with serving(replying(), close_at_once) as server, asking(server.url) as client:
            await client.complete(REQUEST)
            fault = await fault_from(client)
            assert (fault.kind, fault.counted) == (FaultKind.CONNECTION_LOST, True)
            assert len(server.seen) == 3

    run(story())


def test_refused_token_ids_are_left_out_from_then_on() -> None:
    """A strict server that names the field is asked without it, at once and for good."""

    async def strict(seen: Seen, writer: asyncio.StreamWriter) -> None:
        unexpected = set(seen.body) & {"return_token_ids"}
        words = f"Unexpected fields in the request: {unexpected}"
        await (replying({"detail": words}, 422) if unexpected else replying())(seen, writer)

    async def story() -> None:
        async with serving(strict) as server, asking(server.url) as client:
            for _ in range(2):
                assert (await client.complete(REQUEST)).completion.content == "Hello."
        assert ["return_token_ids" in seen.body for seen in server.seen] == [True, False, False]
        assert [seen.body["top_k"] for seen in server.seen] == [4, 4, 4]

    run(story())


def test_other_refused_fields_are_for_the_user_to_see() -> None:
    """A field that the user set is never dropped in silence, and the ids are asked for again next time."""
    words = "Unexpected fields in the request: {'return_token_ids', 'top_k'}"

    async def story() -> None:
        replies = (replying({"detail": words}, 422), replying({"detail": "Unexpected fields: {'top_k'}"}, 422))
        async with serving(*replies, replying()) as server, asking(server.url) as client:
            fault = await fault_from(client)
            assert (fault.kind, fault.retry) == (FaultKind.BAD_REQUEST, False)
            assert "top_k" in fault.message
            await client.complete(REQUEST)
        assert ["return_token_ids" in seen.body for seen in server.seen] == [True, False, True]

    run(story())


def test_key_is_never_repeated() -> None:
    """A server that repeats the key in its words does not get it into a log or a record."""
    fault, _seen = ask_once(replying({"error": {"message": "Incorrect API key: sk-very-secret", "code": 401}}, 401))
    assert isinstance(fault, Fault)
    assert fault.message == "HTTP 401: Incorrect API key: ***"


def test_made_up_key_spoils_no_words() -> None:
    """A placeholder key of one letter is not cut out of the server's words."""
    fault, _seen = ask_once(replying({"error": "unknown token k"}, 400), api_key="k")
    assert isinstance(fault, Fault)
    assert fault.message == "HTTP 400: unknown token ***"


def test_retry_after_comes_through() -> None:
    """The server's wish to be left alone for a while reaches the fault."""
    fault, _seen = ask_once(replying(b"", 429, ("Retry-After: 7",)))
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.retry_after_s) == (FaultKind.OVERLOADED, 7.0)


def test_compressed_answer() -> None:
    """A proxy that compresses unasked is understood."""
    packed = gzip.compress(json.dumps(GOOD).encode())
    answer, _seen = ask_once(replying(packed, 200, ("Content-Encoding: gzip",)))
    assert isinstance(answer, Answer)
    assert answer.completion.content == "Hello."


MODELS = {"object": "list", "data": [{"id": "m"}, {"id": "n"}, {"name": "odd"}, None]}


@pytest.mark.parametrize(
    ("health", "models", "expected"),
    [
        ((b"", 200), (MODELS, 200), Probe(alive=True, words="ok", models=("m", "n"))),
        ((b"", 404), (MODELS, 200), Probe(alive=True, words="ok", models=("m", "n"))),
        ((b"", 200), (b"", 404), Probe(alive=True, words="ok")),
        ((b"", 200), (b"no json", 200), Probe(alive=True, words="ok")),
        ((b"", 404), ({"detail": "Not Found"}, 404), Probe(alive=False, words="HTTP 404: Not Found", refuses=True)),
        (({"status": "unhealthy"}, 503), (MODELS, 200), Probe(alive=False, words='HTTP 503: {"status":"unhealthy"}')),
        (
            (b"", 200),
            ({"error": "Unauthorized"}, 401),
            Probe(alive=False, words="HTTP 401: Unauthorized", refuses=True),
        ),
    ],
)
def test_probe(health: tuple[Any, int], models: tuple[Any, int], expected: Probe) -> None:
    """A probe tells whether a server can be sent requests, why not, and which models it lists."""

    async def story() -> None:
        async def reply(seen: Seen, writer: asyncio.StreamWriter) -> None:
            await replying(*(health if seen.path == "/health" else models))(seen, writer)

        async with serving(reply) as server, asking(server.url) as client:
            assert await client.probe() == expected
            assert {seen.method for seen in server.seen} == {"GET"}

    run(story())


def test_probe_that_waits_in_vain() -> None:
    """A server that takes the connection and says nothing is told from one that is not there."""

    async def story() -> None:
        async with serving(never_answer) as server, asking(server.url) as client:
            expected = Probe(alive=False, words="no answer within 0.2 s", timed_out=True)
            assert await client.probe(timeout_s=0.2) == expected

    run(story())


@pytest.mark.parametrize(("page", "status", "expected"), [(b"a 1\n", 200, b"a 1\n"), (b"not here", 404, b"")])
def test_metrics(page: bytes, status: int, expected: bytes) -> None:
    """The page stands beside /v1; a server without one has an empty page."""

    async def story() -> None:
        async with serving(replying(page, status)) as server, asking(server.url) as client:
            assert await client.read_metrics(timeout_s=5) == expected
            assert [seen.path for seen in server.seen] == ["/metrics"]

    run(story())


def test_metrics_that_do_not_come() -> None:
    """A server that is too busy to say, or away, is no server without the page."""

    async def story() -> None:
        async with serving(never_answer) as server, asking(server.url) as client:
            assert await client.read_metrics(timeout_s=0.2) is None
        async with asking(server.url) as client:
            assert await client.read_metrics(timeout_s=5) is None

    run(story())
