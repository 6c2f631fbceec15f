"""How log lines are written: as text or JSON, without secrets, and of many alike only a few with a count."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import datetime as dt
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

WINDOW_S = 60.0
"""Seconds over which lines that are alike are counted together."""
FEW = 3
"""Lines alike that are written in a window; the others are counted."""
MASK = "***"
WITHHELD = "[...]"
_MOST_KINDS = 1000
"""Kinds of lines that are remembered at once."""
_PRIVATE_CHARS = 12
"""From so many characters in a row on, words of a server are taken to repeat the prompt."""
_SHORTEST_SECRET = 4
_FIELDS = "mill_fields"
_SUMMARY = "mill_summary"

_about: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("about")


def fields(event: str, **values: Any) -> dict[str, Any]:
    """Return what a logging call takes as `extra`: the event's word and its fields, without those that are None."""
    return {_FIELDS: {"event": event, **{name: value for name, value in values.items() if value is not None}}}


@contextlib.contextmanager
def about(**values: Any) -> Iterator[None]:
    """Give these fields to every line that is written inside, by this thread or asyncio task."""
    token = _about.set({**_about.get({}), **values})
    try:
        yield
    finally:
        _about.reset(token)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the structured fields of a line."""
    return {**_about.get({}), **getattr(record, _FIELDS, {})}


class Discreet:
    """Words of a server, for a log: where they repeat a text that is private, that part is left out.

    Worked out only if the line is written.
    """

    def __init__(self, words: str, private: Callable[[], Iterable[str]]) -> None:
        self._words = words
        self._private = private

    def __str__(self) -> str:
        """Return the words without what is private."""
        return withhold(self._words, self._private())


def withhold(words: str, private: Iterable[str]) -> str:
    """Replace every run of 12 characters or more (or the whole text) that also stands in one of the private texts."""
    for text in private:
        words = _withhold(words, " ".join(text.split()))
    return words


def _withhold(words: str, text: str) -> str:
    if len(text) <= _PRIVATE_CHARS:
        return words.replace(text, WITHHELD) if len(text) >= _SHORTEST_SECRET else words
    kept, at = list[str](), 0
    while at < len(words):
        end = at + _PRIVATE_CHARS
        if end > len(words) or words[at] == " " or words[at:end] not in text:
            kept.append(words[at])
            at += 1
            continue
        while end < len(words) and words[at : end + 1] in text:
            end += 1
        kept.append(WITHHELD)
        at = end
    return "".join(kept)


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the line's own fields, and a traceback as text."""

    def __init__(self, **constant: Any) -> None:
        """Take fields that every line gets."""
        super().__init__()
        self._constant = constant

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        moment = dt.datetime.fromtimestamp(record.created, dt.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._constant,
            **fields_of(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = type(record.exc_info[1]).__name__
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class Masked(logging.Formatter):
    """Another formatter's lines, with every secret made `***`."""

    def __init__(self, inner: logging.Formatter, secrets: Sequence[str]) -> None:
        super().__init__()
        self._inner = inner
        # The longest first, for one may hold another.
        self._secrets = sorted({one for one in secrets if len(one) >= _SHORTEST_SECRET}, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = self._inner.format(record)
        for secret in self._secrets:
            line = line.replace(secret, MASK)
        return line


@dataclasses.dataclass
class _Kind:
    """Lines that are alike, in one window."""

    began: float
    written: int = 0
    held_back: int = 0
    last: logging.LogRecord | None = None


class Crowd(logging.Filter):
    """Lets the first few of many lines alike through and tells how many more came, when their window is over.

    Alike are lines of one logger and one message template with the same fault, endpoint and exception. It sits on one
    handler, and writes the counts there.
    """

    def __init__(self, handler: logging.Handler, *, window_s: float = WINDOW_S, few: int = FEW) -> None:
        super().__init__()
        self._handler = handler
        self._window_s = window_s
        self._few = few
        self._lock = threading.Lock()
        self._kinds: dict[tuple[object, ...], _Kind] = {}
        self._timer: threading.Timer | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether this line is written."""
        if hasattr(record, _SUMMARY):
            return True
        setattr(record, _FIELDS, fields_of(record))  # what is around it now may be gone when it is told of
        now, key = time.monotonic(), _likeness(record)
        with self._lock:
            over = self._end_windows(now)
            kind = self._kinds.setdefault(key, _Kind(began=now))
            passes = kind.written < self._few
            if passes:
                kind.written += 1
            else:
                kind.held_back += 1
                kind.last = record
                self._wake_later()
        self._tell(over)
        return passes

    def flush(self) -> None:
        """Tell of everything that was held back, now."""
        with self._lock:
            over, self._kinds = list(self._kinds.values()), {}
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._tell(over)

    def _end_windows(self, now: float) -> list[_Kind]:
        over = {key: kind for key, kind in self._kinds.items() if now - kind.began >= self._window_s}
        if len(self._kinds) - len(over) >= _MOST_KINDS:
            over = dict(self._kinds)
        for key in over:
            del self._kinds[key]
        return list(over.values())

    def _wake_later(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._window_s, self._wake)
            self._timer.daemon = True
            self._timer.start()

    def _wake(self) -> None:
        with self._lock:
            self._timer = None
            over = self._end_windows(time.monotonic())
            if any(kind.held_back for kind in self._kinds.values()):
                self._wake_later()
        self._tell(over)

    def _tell(self, over: Iterable[_Kind]) -> None:
        for kind in over:
            if kind.held_back and kind.last is not None:
                self._handler.handle(self._summary(kind, kind.last))

    def _summary(self, kind: _Kind, last: logging.LogRecord) -> logging.LogRecord:
        seconds = max(1.0, min(self._window_s, time.monotonic() - kind.began))
        record = copy.copy(last)
        record.msg = "... and %s more in the last %.0f s, the last one: %s"
        record.args = (f"{kind.held_back:,}", seconds, last.getMessage())
        record.exc_info = record.exc_text = None
        record.created = time.time()
        setattr(record, _SUMMARY, True)
        setattr(record, _FIELDS, {**getattr(last, _FIELDS), "more": kind.held_back})
        return record


def _likeness(record: logging.LogRecord) -> tuple[object, ...]:
    known = getattr(record, _FIELDS, {})
    template = record.getMessage() if record.msg == "%s" else record.msg
    error = type(record.exc_info[1]).__name__ if record.exc_info and record.exc_info[1] else None
    fault = known.get("fault")
    # What is no fault is news for each dataset, and so is each state of a server.
    news = (known.get("dataset"), known.get("state")) if fault is None else ()
    return record.name, str(template), fault, known.get("endpoint"), error, *news


def dress(handlers: Iterable[logging.Handler], *, form: str, secrets: Sequence[str], worker: str) -> list[Crowd]:
    """Make handlers write in the form `text` or `json`; return what holds their repeated lines back."""
    crowds = []
    for handler in handlers:
        inner = JsonLines(worker=worker) if form == "json" else handler.formatter or logging.Formatter()
        handler.setFormatter(Masked(inner, secrets))
        crowd = Crowd(handler)
        handler.addFilter(crowd)
        crowds.append(crowd)
    return crowds
