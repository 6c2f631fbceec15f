"""What a server says about an error, in whichever of the known shapes it says it."""

from __future__ import annotations

import http
from typing import Any

import msgspec

MAX_QUOTE_CHARS = 200
_MAX_WORDS_BYTES = 64 * 1024


def one_line(text: str, limit: int) -> str:
    """Return `text` as one printable line of at most `limit` characters."""
    start = text[: 4 * limit]
    printable = "".join(char if char.isprintable() else " " for char in start)
    return " ".join(printable.split())[:limit]


def quote_start(body: Any) -> str:
    """Return the start of an answer (bytes as they came, or decoded JSON) for a message."""
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return one_line(raw[: 4 * MAX_QUOTE_CHARS].decode("utf-8", "replace"), MAX_QUOTE_CHARS)


def reason_phrase(status: int) -> str:
    """Return the standard words of an HTTP status."""
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "no words"


def words_of_body(body: bytes) -> tuple[str, str]:
    """Return the server's words for a person, and all its text that may hold a sign."""
    if len(body) <= _MAX_WORDS_BYTES:
        try:
            return words_of(msgspec.json.decode(body))
        except (ValueError, RecursionError):
            pass
    text = quote_start(body)
    return text, text


def words_of(obj: Any) -> tuple[str, str]:
    """Return the same for decoded JSON: `{"error": {...}}`, `{"error": "..."}`, flat, FastAPI's, or a bare string."""
    error = obj.get("error") if isinstance(obj, dict) else None
    holder = error if isinstance(error, dict) else obj
    if isinstance(error, str):
        words = error
    elif isinstance(holder, dict):
        words = _text(holder.get("message")) or _text(holder.get("detail"))
    else:
        words = holder if isinstance(holder, str) else ""
    words = words or (quote_start(obj) if obj else "")
    labels = [_text(holder.get(key)) for key in ("type", "code")] if isinstance(holder, dict) else []
    return words, "\n".join([words, *labels]).strip()


def _text(value: Any) -> str:
    """Return a message field as text; FastAPI's `detail` may be a list of {loc, msg, input}."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "; ".join(filter(None, map(_text, value)))
    if isinstance(value, dict):
        # The input is left out: it is the user's prompt.
        place = value.get("loc")
        where = ".".join(map(str, place)) + ": " if isinstance(place, list) else ""
        return where + (_text(value.get("msg")) or _text(value.get("message")))
    return ""


def code_of(obj: Any) -> int | None:
    """Return the HTTP status (400 to 599) that an error body carries as its code, if it does."""
    error = obj.get("error") if isinstance(obj, dict) else None
    code = (error if isinstance(error, dict) else obj).get("code") if isinstance(obj, dict) else None
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code <= 599 else None
