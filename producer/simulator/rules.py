"""What the fake model server is told to do: rules for single requests, options for the whole server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

AUTO: Final = "auto"
"""The value of a rule's field that the server works out by itself."""

ECHO = "echo: {user}"
"""The answer's text unless a rule says otherwise; `{user}` becomes the last user text."""

Dialect = Literal["vllm", "sglang"]
Drop = Literal["before", "headers", "middle", "after", "reset"]
Hang = Literal["everything", "generation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What to do with the requests that match; the first rule that matches and is not spent wins."""

    match: str = ""
    """Substring to look for; empty matches every request."""
    where: Literal["user", "body"] = "user"
    """Look in the last user text, or in the whole request body as JSON without escapes."""
    times: int | None = None
    """How often the rule fires before it is spent; None is for ever."""
    delay_s: float | None = None
    """Seconds before the answer; None takes the server's latency."""
    status: int = 200
    """HTTP status; 400 and above answer with an error body in the dialect's shape."""
    message: str | None = None
    """The error's words; None takes the usual words of the status."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """More response headers; the value `@date+N` becomes the HTTP date in N seconds (N may be negative)."""
    content: str | None = ECHO
    """The answer's text, or None for null; `{user}` becomes the last user text."""
    repeat: int = 1
    """Multiplies the content, for big bodies."""
    reasoning: str | None = None
    """The answer's reasoning."""
    reasoning_field: str | None = None
    """The message field of the reasoning; None takes the dialect's (`reasoning` or `reasoning_content`)."""
    tool_calls: Sequence[Mapping[str, Any]] | None = None
    """Tool calls of the answer; they make content null unless it is given."""
    finish_reason: str | None = AUTO
    """`auto` says stop, tool_calls, or length when max_tokens cut the answer; a given one is never cut."""
    stop_reason: str | int | None = None
    """The choice's stop_reason (SGLang: matched_stop)."""
    usage: Mapping[str, Any] | Literal["auto"] | None = AUTO
    """Replaces the usage object; None is null."""
    message_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More fields of the message, for shapes of other servers."""
    body: str | bytes | None = None
    """The whole response body as it is; the status stays the rule's."""
    content_type: str = "application/json"
    """The response's content type."""
    dialect: Dialect | None = None
    """Answers in another dialect than the server's."""
    drop: Drop | None = None
    """Close before any byte, after the headers, in the middle of the body, right after a keep-alive answer, or
    reset the connection instead of answering."""
    hang: bool = False
    """Never answer."""
    kill: bool = False
    """Kill the server's process with SIGKILL as the request comes in; only where it has one of its own."""
    forget: bool = False
    """Never answer, and count the request in /metrics no more."""
    endless: bool = False
    """Send body bytes until the client goes away."""
    chunk_tokens: int = 16
    """Tokens of one chunk, where the client asks for a stream."""
    chunk_delay_s: float = 0.0
    """Seconds between two chunks of a stream; 0 sends them all at once."""
    stall_after: int | None = None
    """Send nothing more after this many chunks of a stream, and keep the connection."""
    cut_after: int | None = None
    """Close the connection after this many chunks of a stream."""
    error_after: int | None = None
    """Send an error with the rule's message after this many chunks of a stream, then end it as if all were well."""
    comment_every_s: float | None = None
    """Send `: keep-alive` this often while a stream has nothing to send: before its first chunk and when it stalls."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the whole server behaves."""

    model: str = "toy-model"
    """The one model it serves; a request for another is answered 404."""
    dialect: Dialect = "vllm"
    """Whose response and error shapes it speaks."""
    max_model_len: int = 131_072
    """Context length in tokens: larger max_tokens are refused, prompt + max_tokens is cut down to it."""
    max_chars: int | None = None
    """Prompts with more characters are refused with the context-length words; max_tokens does not matter."""
    strict_roles: bool = False
    """Refuse conversations that are not system?, user, assistant, ..., user."""
    reject_empty: bool = False
    """Refuse prompts whose last user text is blank."""
    api_key: str | None = None
    """Refuse /v1 requests without this bearer token."""
    max_in_flight: int | None = None
    """Answer 503 to requests above this many at once."""
    latency_s: float = 0.0
    """Mean seconds of an answer that no rule delays."""
    latency_sigma: float = 0.0
    """Sigma of the lognormal spread around the mean; 0 is a constant latency."""
    seed: int = 0
    """Seed of the latencies."""
    start_down_s: float = 0.0
    """Seconds after the first start in which connections are refused."""
    keep_alive_s: float = 5.0
    """Seconds after which an idle connection is closed; vLLM's default."""
    token_ids: bool = True
    """Honour return_token_ids; False ignores it, as old servers do."""
    healthy: bool = True
    """False makes /health answer 503."""
    hangs: Hang | None = None
    """Take connections and answer nothing, or nothing but health checks and the like."""
    metrics: bool = True
    """False answers /metrics with 404."""
    streams: bool = True
    """False passes over `stream` and sends the whole answer, as few servers do."""
    says_done: bool = True
    """End streams with `[DONE]`; False does not, as transformers serve."""
    incremental: bool = False
    """SGLang's `/generate` streams what is new (--incremental-streaming-output) instead of all so far."""
    line_end: str = "\n"
    """What ends the lines of a stream; the standard allows CRLF."""


class RuleBook:
    """Rules in order, with a count of how often each has fired."""

    def __init__(self, rules: Iterable[Rule | Mapping[str, Any]] = (), default: Rule | None = None) -> None:
        self._rules = [rule if isinstance(rule, Rule) else Rule(**rule) for rule in rules]
        self._default = default or Rule()
        self._fired = [0] * len(self._rules)

    def pick(self, user_text: str, body: Mapping[str, Any]) -> Rule:
        """Return the first live rule that matches and count it, or the default."""
        for number, rule in enumerate(self._rules):
            if rule.times is not None and self._fired[number] >= rule.times:
                continue
            text = user_text if rule.where == "user" else json.dumps(body, ensure_ascii=False)
            if rule.match in text:
                self._fired[number] += 1
                return rule
        return self._default


def load_rules(path: Path) -> tuple[RuleBook, ServerOptions]:
    """Read `{"rules": [...], "default": {...}, "server": {...}}`; every part may be left out."""
    document = json.loads(path.read_text(encoding="utf-8"))
    default = Rule(**document.get("default", {}))
    return RuleBook(document.get("rules", []), default), ServerOptions(**document.get("server", {}))
