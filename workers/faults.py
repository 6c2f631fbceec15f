"""What a failed model call means: foreign answers and exceptions become faults with a known treatment."""

from __future__ import annotations

import dataclasses
import datetime as dt
import email.utils
import enum
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from app import records
from workers.wording import code_of, one_line, quote_start, reason_phrase, words_of, words_of_body

MAX_MESSAGE_CHARS = 500
_MAX_DOUBLINGS = 30


class FaultKind(enum.StrEnum):
    """The classes of failed calls."""

    CONNECT = "connect"
    """Refused, unreachable, unknown host, a failed TLS handshake, or no HTTP spoken there."""
    CONNECT_TIMEOUT = "connect_timeout"
    TIMEOUT = "timeout"
    """No whole answer within the deadline, ours or the server's own."""
    STALLED = "stalled"
    """A streamed answer had begun, and no token came for too long."""
    CONNECTION_LOST = "connection_lost"
    """Reset, cut in the middle of the answer, or closed without one."""
    STALE_CONNECTION = "stale_connection"
    """The server closed an idle kept-alive connection at the moment of its reuse."""
    LOST = "lost"
    """The server has forgotten the request: it works on nothing while we wait, or hung and came back without it."""
    OVERLOADED = "overloaded"
    """The server asks for less: rate limit, full queue, paused engine."""
    SERVER_ERROR = "server_error"
    ENGINE_DEAD = "engine_dead"
    """The front end answers, but says that the engine behind it has died."""
    LOADING = "loading"
    """The server is up, its model is not yet."""
    UNAUTHORIZED = "unauthorized"
    """Wrong or missing key, no right to the model, or no credit left."""
    NOT_FOUND = "not_found"
    """Unknown model or path."""
    CONTEXT_OVERFLOW = records.CONTEXT_OVERFLOW
    BAD_REQUEST = records.BAD_REQUEST
    PRIORITY_DISABLED = "priority_disabled"
    """The request sets a priority and the server takes none; SGLang says so with a 503."""
    DUPLICATE_ID = "duplicate_id"
    """An earlier request with the same id still runs."""
    BAD_ANSWER = "bad_answer"
    """Success was signalled, but what came is no chat answer."""
    ABORTED = "aborted"
    """The engine gave the request up half-way (pause, weight update, shutdown)."""
    UNFINISHED = "unfinished"
    """The answer ended for no reason that makes it whole: error, repetition, unknown or null."""
    EMPTY_ANSWER = "empty_answer"
    """Tokens were generated, yet no text, reasoning or tool call came."""
    POISON = records.POISON
    """Workers or model servers died each time that it was asked."""


class Scope(enum.StrEnum):
    """Whom a fault concerns."""

    SAMPLE = "sample"
    """This sample alone."""
    ENDPOINT = "endpoint"
    """The server as a whole, which is to be left alone until it is well."""
    LOAD = "load"
    """The server's load: everybody should ask for less."""


class Treatment(NamedTuple):
    """What to do about a kind of fault."""

    scope: Scope
    retry: bool
    counted: bool
    """Whether it uses up one of the sample's attempts."""


_FOR_SAMPLE = Treatment(Scope.SAMPLE, retry=True, counted=True)
_FOR_GOOD = Treatment(Scope.SAMPLE, retry=False, counted=True)
_FOR_ENDPOINT = Treatment(Scope.ENDPOINT, retry=True, counted=False)
_FOR_LOAD = Treatment(Scope.LOAD, retry=True, counted=False)
_FOR_FREE = Treatment(Scope.SAMPLE, retry=True, counted=False)

TREATMENTS: Mapping[FaultKind, Treatment] = {
    FaultKind.CONNECT: _FOR_ENDPOINT,
    FaultKind.CONNECT_TIMEOUT: _FOR_ENDPOINT,
    FaultKind.TIMEOUT: _FOR_SAMPLE,
    # The server or the way to it stands still, mostly; excused a bounded number of times.
    FaultKind.STALLED: _FOR_FREE,
    # Counted, for a prompt that kills the server looks like this too.
    FaultKind.CONNECTION_LOST: _FOR_SAMPLE,
    FaultKind.STALE_CONNECTION: _FOR_FREE,
    FaultKind.LOST: _FOR_FREE,
    FaultKind.OVERLOADED: _FOR_LOAD,
    FaultKind.SERVER_ERROR: _FOR_SAMPLE,
    FaultKind.ENGINE_DEAD: _FOR_ENDPOINT,
    FaultKind.LOADING: _FOR_ENDPOINT,
    FaultKind.UNAUTHORIZED: _FOR_ENDPOINT,
    FaultKind.NOT_FOUND: _FOR_ENDPOINT,
    FaultKind.CONTEXT_OVERFLOW: _FOR_GOOD,
    FaultKind.BAD_REQUEST: _FOR_GOOD,
    FaultKind.PRIORITY_DISABLED: _FOR_GOOD,
    FaultKind.DUPLICATE_ID: _FOR_SAMPLE,
    FaultKind.BAD_ANSWER: _FOR_SAMPLE,
    FaultKind.ABORTED: _FOR_FREE,
    FaultKind.UNFINISHED: _FOR_SAMPLE,
    FaultKind.EMPTY_ANSWER: _FOR_SAMPLE,
    FaultKind.POISON: _FOR_GOOD,
}
"""The one table of what each kind of fault leads to."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One failed call and what to do about it."""

    kind: FaultKind
    scope: Scope
    retry: bool
    counted: bool
    message: str
    """The server's words or the start of its answer, one printable line of at most 500 characters."""
    status: int | None = None
    """HTTP status, where an answer came."""
    retry_after_s: float | None = None
    """Seconds for which the server asked to be left alone; None: use the own backoff."""


def make_fault(
    kind: FaultKind, message: str, *, status: int | None = None, retry_after_s: float | None = None
) -> Fault:
    """Return a fault with the treatment of its kind and a bounded one-line message."""
    treatment = TREATMENTS[kind]
    line = one_line(message, MAX_MESSAGE_CHARS) or kind.value
    return Fault(kind, treatment.scope, treatment.retry, treatment.counted, line, status, retry_after_s)


class _Sign(NamedTuple):
    """Words of a server that say more than its status."""

    kind: FaultKind
    first_status: int
    last_status: int
    words: re.Pattern[str]


def _sign(kind: FaultKind, first: int, last: int, words: str) -> _Sign:
    return _Sign(kind, first, last, re.compile(words, re.IGNORECASE | re.MULTILINE))


# Servers say these things under several statuses, so their words are the only sign. First match wins.
_SIGNS = (
    # llama.cpp answers 500 when the context fills while it generates, which no retry mends.
    _sign(
        FaultKind.CONTEXT_OVERFLOW,
        400,
        500,
        r"maximum context length|model's (maximum )?context|context[ _]length[ _]exceeded|exceed_context_size"
        r"|context size (has been |was )?exceeded|exceeds the (available |maximum )?context|context shift is disabled"
        r"|context window|prompt is too long|maximum model length",
    ),
    _sign(FaultKind.PRIORITY_DISABLED, 400, 599, r"priority is disabled"),
    _sign(FaultKind.DUPLICATE_ID, 400, 499, r"duplicate request id"),
    _sign(
        FaultKind.NOT_FOUND,
        400,
        422,
        r"model_not_found|server is pinned to|\bmodel \S{1,200} (does not exist|not found)",
    ),
    # A provider's filter that refuses this prompt, not the key.
    _sign(FaultKind.BAD_REQUEST, 403, 403, r"flagged|moderation"),
    _sign(FaultKind.LOADING, 500, 503, r"loading( the)? model|model is (still |currently )?(being )?load"),
    _sign(
        FaultKind.ENGINE_DEAD,
        500,
        503,
        r"engine\s?dead|enginecore encountered"
        r"|(engine|engine ?core|worker)\b.{0,40}\b(is dead|has died|died|is not running|terminated)"
        # vLLM's answer between the death of its engine and its own exit.
        r"|^the server had an error while processing your request\.?$",
    ),
    # Under a 503, but the sample's own: it would come back for ever if it counted as load.
    _sign(FaultKind.SERVER_ERROR, 500, 503, r"out of memory"),
    _sign(FaultKind.TIMEOUT, 500, 503, r"running timeout reached"),
)

_KIND_OF_STATUS: Mapping[int, FaultKind] = {
    401: FaultKind.UNAUTHORIZED,
    402: FaultKind.UNAUTHORIZED,
    403: FaultKind.UNAUTHORIZED,
    404: FaultKind.NOT_FOUND,
    407: FaultKind.UNAUTHORIZED,
    408: FaultKind.TIMEOUT,
    409: FaultKind.SERVER_ERROR,
    425: FaultKind.SERVER_ERROR,
    429: FaultKind.OVERLOADED,
    501: FaultKind.NOT_FOUND,
    503: FaultKind.OVERLOADED,
    504: FaultKind.TIMEOUT,
    529: FaultKind.OVERLOADED,
}


def _kind_of(status: int, signs: str) -> FaultKind:
    for sign in _SIGNS:
        if sign.first_status <= status <= sign.last_status and sign.words.search(signs):
            return sign.kind
    if status < 400:
        return FaultKind.NOT_FOUND  # a redirect: the address is wrong for everybody
    return _KIND_OF_STATUS.get(status, FaultKind.SERVER_ERROR if status >= 500 else FaultKind.BAD_REQUEST)


def classify_answer(status: int, headers: Mapping[str, str], body: bytes, *, now: float) -> Fault:
    """Return the fault of an answer whose status is not a success; `now` is Unix time in seconds."""
    found = {name.lower(): value for name, value in headers.items()}
    words, signs = words_of_body(body)
    if 300 <= status < 400:
        words = f"redirects to {found.get('location', 'nowhere')}; set the URL that it redirects to"
    message = f"HTTP {status}: {words or reason_phrase(status)}"
    retry_after = parse_retry_after(found.get("retry-after"), now)
    return make_fault(_kind_of(status, signs), message, status=status, retry_after_s=retry_after)


def classify_error_body(obj: Any, *, streamed: bool = False) -> Fault:
    """Return the fault of an error inside a successful answer, by the error's own code where it has one.

    A code of 5xx is a bad answer, which is the sample's: a server that answers with success is not down, and were
    it taken for that, the sample would be asked for very long. In a stream (`streamed`) it is what it says: the status
    was sent before the server could know.
    """
    words, signs = words_of(obj)
    code = code_of(obj)
    kind = _kind_of(code or 500, signs)
    if not streamed and kind in {FaultKind.ENGINE_DEAD, FaultKind.LOADING, FaultKind.SERVER_ERROR}:
        kind = FaultKind.BAD_ANSWER
    if code is None and kind is not FaultKind.CONTEXT_OVERFLOW:
        kind = FaultKind.BAD_ANSWER
    said = f"{words} " if words else ""
    message = f"HTTP 200 with an error inside: {said}({quote_start(obj)})"
    return make_fault(kind, message, status=code or 200)


_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)


def parse_retry_after(value: str | None, now: float) -> float | None:
    """Return the seconds that a Retry-After header asks for, or None where the own backoff is to be used.

    Seconds, fractions and HTTP dates are understood. Zero, negative and past values are None as well: a retry at
    once is never what an overloaded server needs. The result is not bounded.
    """
    text = (value or "").strip()
    if _SECONDS.fullmatch(text):
        return float(text) or None
    try:
        date = email.utils.parsedate_to_datetime(text)
        at = date if date.tzinfo else date.replace(tzinfo=dt.UTC)
        wait = at.timestamp() - now
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return wait if wait > 0 else None


def backoff_s(attempt: int, *, first_s: float, max_s: float, random: Callable[[], float]) -> float:
    """Return the seconds to wait after failed attempt number `attempt` (from 1).

    The ceiling doubles from `first_s` to `max_s`; the wait lies between half the ceiling and the ceiling, so that
    samples that failed together do not come back together. `random` returns 0 <= x < 1.
    """
    ceiling = min(max_s, first_s * 2.0 ** min(max(attempt, 1) - 1, _MAX_DOUBLINGS))
    return ceiling * (0.5 + 0.5 * random())


def classify_exception(error: BaseException, *, now: float | None = None) -> Fault | None:
    """Return the fault that a client library's exception stands for, or None: then it is a bug and must be raised.

    Only classes decide, over the chain of declared causes. `now` is Unix time in seconds.
    """
    from workers.foreign import fault_of  # noqa: PLC0415 - openai and aiohttp are slow to import

    return fault_of(error, now=time.time() if now is None else now)
