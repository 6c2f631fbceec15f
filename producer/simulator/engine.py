"""The fake model server's mind: what to reply to each request, and the tallies of what it has seen."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from producer.simulator.messages import HttpReply, HttpRequest, Stream
from producer.simulator.pages import metrics_page, models_page, server_info
from producer.simulator.rules import Rule, RuleBook, ServerOptions
from producer.simulator.shapes import Refusal, chat_answer, error_body, last_user_text, refuse, to_json
from producer.simulator.streams import framed, stream_events
from producer.simulator.tokens import GENERATE_PATH, TOKENS_PATH, prompt_ids, refuse_tokens, tokens_answer, user_text
from producer.simulator.tokens import PATHS as TOKEN_PATHS
from producer.simulator.wire import Connection

CHAT_PATH = "/v1/chat/completions"
_KEY_CHARS = 200


@dataclasses.dataclass(frozen=True)
class SeenRequest:
    """One chat request as the server saw it."""

    path: str
    body: Any
    """The parsed JSON; None where it was none."""
    headers: dict[str, str]
    """Names in lower case."""
    at: float
    """Unix time of its arrival, in seconds."""
    key: str
    """Its last user text."""


class Engine:
    """Answers requests by rules; everything but `rules`, `options` and reading belongs to the server's thread."""

    def __init__(self, rules: RuleBook, options: ServerOptions, *, keep_requests: bool = True) -> None:
        self.rules = rules
        self.options = options
        self.seen: list[SeenRequest] = []
        self.connections: set[Connection] = set()
        self.accepted = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self.aborted = 0
        self.aborts: list[str] = []
        self._running: set[str] = set()
        self._rids: dict[int, str] = {}
        self._forgotten = 0
        self._keep_requests = keep_requests
        self._counts: Counter[str] = Counter()
        self._paths: Counter[str] = Counter()
        self._statuses: Counter[int] = Counter()
        self._tokens: Counter[str] = Counter()
        self._random = random.Random(options.seed)  # noqa: S311 latencies
        self._start_pause_s = options.start_down_s
        self._busy_s = 0.0
        self._busy_since = time.monotonic()

    @property
    def keep_alive_s(self) -> float:
        """Seconds after which an idle connection is closed."""
        return self.options.keep_alive_s

    def take_start_pause(self) -> float:
        """Return the seconds to refuse connections for; 0 from the second start on."""
        pause_s, self._start_pause_s = self._start_pause_s, 0.0
        return pause_s

    def connected(self, connection: Connection) -> None:
        """Note a new connection."""
        self.accepted += 1
        self.connections.add(connection)

    def disconnected(self, connection: Connection) -> None:
        """Note that a connection is gone."""
        self.connections.discard(connection)

    def begin(self, request: HttpRequest) -> HttpReply:
        """Decide the reply to a request that has just arrived."""
        self._paths[request.path] += 1
        if self._generates(request):
            self._move(1)
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            reply = self._chat(request) if request.path == CHAT_PATH else self._tokens_in(request)
            self._forgotten += reply.forget
            return dataclasses.replace(reply, hang=True) if self.options.hangs else reply
        if self.options.hangs == "everything":
            return HttpReply(hang=True)
        if not self._allowed(request):
            return self._error(401, None)
        if request.path == "/abort_request" and request.method == "POST" and self.options.dialect == "sglang":
            self.aborts.append(str((_parse_json(request.body) or {}).get("rid")))
            return HttpReply()
        return self._get(request)

    def _generates(self, request: HttpRequest) -> bool:
        path = GENERATE_PATH if self.options.dialect == "sglang" else TOKENS_PATH
        return request.method == "POST" and request.path in {CHAT_PATH, path}

    def finish(self, request: HttpRequest, reply: HttpReply, *, sent: bool) -> None:
        """Note that the reply was sent, or that the client went away before."""
        if not self._generates(request):
            return
        self._move(-1)
        self._running.discard(self._rids.pop(id(request), ""))
        self._forgotten -= reply.forget
        if sent:
            self._statuses[reply.status] += 1
        else:
            self.aborted += 1

    def stats(self) -> dict[str, Any]:
        """Return the tallies; `busy_s` is the time integral of the requests in flight, in seconds, up to `now_s`."""
        now = time.monotonic()
        return {
            "total": sum(self._paths[path] for path in (CHAT_PATH, *TOKEN_PATHS)),
            "in_flight": self.in_flight,
            "peak_in_flight": self.peak_in_flight,
            "aborted": self.aborted,
            "busy_s": self._busy_s + self.in_flight * (now - self._busy_since),
            "now_s": now,
            "accepted_connections": self.accepted,
            "open_connections": len(self.connections),
            "statuses": {str(status): count for status, count in self._statuses.items()},
            "paths": dict(self._paths),
        }

    def _move(self, change: int) -> None:
        now = time.monotonic()
        self._busy_s += self.in_flight * (now - self._busy_since)
        self._busy_since = now
        self.in_flight += change

    def _allowed(self, request: HttpRequest) -> bool:
        key = self.options.api_key
        if key is None or not request.path.startswith("/v1"):
            return True
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and token == key

    def _chat(self, request: HttpRequest) -> HttpReply:
        body = _parse_json(request.body)
        messages = body.get("messages") if isinstance(body, dict) else None
        well_formed = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
        key = last_user_text(messages or []) if well_formed else ""
        self._note(request, body, key)
        refused = self._refused(request, refuse(body, self.options))
        if refused is not None:
            return refused
        bound = self.options.max_in_flight
        if bound is not None and self.in_flight > bound:
            return self._error(503, None)
        return self._apply(self.rules.pick(key, body), body, request)

    def _tokens_in(self, request: HttpRequest) -> HttpReply:
        body = _parse_json(request.body)
        ids = prompt_ids(request.path, body)
        key = user_text(ids or [])
        self._note(request, body, key)
        refused = self._refused(request, refuse_tokens(request.path, body, self.options))
        if refused is not None:
            return refused
        rid = str(body.get("rid") or "")
        if rid and rid in self._running:
            return self._error(400, f"Duplicate request ID detected: {rid}")
        if rid:
            self._running.add(rid)
            self._rids[id(request)] = rid
        return self._apply(self.rules.pick(key, body), body, request)

    def _note(self, request: HttpRequest, body: Any, key: str) -> None:
        self._counts[key[:_KEY_CHARS]] += 1
        if self._keep_requests:
            self.seen.append(SeenRequest(request.path, body, request.headers, time.time(), key))

    def _refused(self, request: HttpRequest, refusal: Refusal | None) -> HttpReply | None:
        if not self._allowed(request):
            return self._error(401, None)
        return None if refusal is None else self._error(refusal.status, refusal.message, refusal.param)

    def _apply(self, rule: Rule, body: dict[str, Any], request: HttpRequest) -> HttpReply:
        if rule.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        content = self._body(rule, body, request)
        streamed = body.get("stream") and self.options.streams and rule.body is None and rule.status < 400
        return HttpReply(
            status=rule.status,
            body=content,
            stream=self._stream(rule, body, request, content) if streamed else None,
            content_type="text/event-stream; charset=utf-8" if streamed else rule.content_type,
            headers=rule.headers,
            delay_s=self._latency_s() if rule.delay_s is None else rule.delay_s,
            drop=rule.drop,
            hang=rule.hang or rule.forget,
            forget=rule.forget,
            endless=rule.endless,
        )

    def _body(self, rule: Rule, body: dict[str, Any], request: HttpRequest) -> bytes:
        if rule.body is not None:
            return rule.body.encode("utf-8", "surrogatepass") if isinstance(rule.body, str) else rule.body
        if rule.status >= 400:
            dialect = rule.dialect or self.options.dialect
            return error_body(rule.status, rule.message, dialect=dialect, model=str(body.get("model")))
        given_id = request.headers.get("x-request-id") or body.get("request_id") or uuid.uuid4().hex
        if request.path in TOKEN_PATHS:
            given_id = body.get("rid") or given_id
            answer = tokens_answer(request.path, body, rule, options=self.options, request_id=given_id)
        else:
            answer = chat_answer(body, rule, options=self.options, request_id=f"chatcmpl-{given_id}")
        self._tokens["prompt"] += answer.prompt_tokens
        self._tokens["generation"] += answer.completion_tokens
        return answer.body

    def _stream(self, rule: Rule, body: dict[str, Any], request: HttpRequest, content: bytes) -> Stream:
        counted = bool((body.get("stream_options") or {}).get("include_usage"))
        options = self.options
        events = stream_events(request.path, json.loads(content), rule, options=options, counted=counted)
        wire = [framed(event, options.line_end) for event in events]
        if rule.error_after is not None:
            error = error_body(500, rule.message, dialect="vllm", model=options.model)
            wire = [*wire[: rule.error_after], framed(error, options.line_end)]
        if options.says_done:
            wire.append(framed(b"[DONE]", options.line_end))
        return Stream(
            tuple(wire),
            gap_s=rule.chunk_delay_s,
            stall_after=rule.stall_after,
            cut_after=len(wire) // 2 if rule.drop == "middle" else rule.cut_after,
            comment_every_s=rule.comment_every_s,
        )

    def _latency_s(self) -> float:
        mean_s, sigma = self.options.latency_s, self.options.latency_sigma
        if mean_s <= 0 or sigma <= 0:
            return mean_s
        return self._random.lognormvariate(math.log(mean_s) - sigma * sigma / 2, sigma)

    def _error(self, status: int, message: str | None, param: str | None = None) -> HttpReply:
        options = self.options
        return HttpReply(
            status=status,
            body=error_body(status, message, dialect=options.dialect, model=options.model, param=param),
        )

    def _get(self, request: HttpRequest) -> HttpReply:
        if request.path == CHAT_PATH:
            return HttpReply(status=405, body=to_json({"detail": "Method Not Allowed"}))
        if request.path in {"/health", "/ping"}:
            return HttpReply(status=200 if self.options.healthy else 503)
        if request.path == "/metrics" and self.options.metrics:
            return HttpReply(body=self._metrics(), content_type="text/plain; version=0.0.4; charset=utf-8")
        documents: dict[str, Callable[[], dict[str, Any]]] = {
            "/v1/models": lambda: models_page(self.options),
            "/__stats": self.stats,
            "/__counts": lambda: dict(self._counts),
        }
        if self.options.dialect == "sglang":
            documents["/server_info"] = lambda: server_info(self.options)
        else:
            documents["/version"] = lambda: {"version": "0.33.0"}
        if request.path not in documents:
            return HttpReply(status=404, body=to_json({"detail": "Not Found"}))
        return HttpReply(body=to_json(documents[request.path]()))

    def _metrics(self) -> bytes:
        running = self.in_flight - self._forgotten
        return metrics_page(self.options, in_flight=self.in_flight, running=running, tokens=self._tokens)


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
