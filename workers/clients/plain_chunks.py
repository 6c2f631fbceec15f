"""Chunks of chat completions that say nothing but text and ids, as nearly all do, decoded the cheaper for it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PlainDelta(msgspec.Struct, forbid_unknown_fields=True):
    """What is new of a message: text alone."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    role: Any = None
    tool_calls: None = None


class PlainChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The first choice, which is not at its end."""

    delta: PlainDelta
    index: Literal[0] = 0
    token_ids: list[int] | None = None
    finish_reason: None = None
    logprobs: None = None
    stop_reason: None = None
    matched_stop: None = None


class PlainChunk(msgspec.Struct, forbid_unknown_fields=True):
    """A chunk; decoding one that says anything else is an error."""

    choices: tuple[PlainChoice]
    id: Any = None
    object: Literal["chat.completion.chunk"] | None = None
    created: Any = None
    model: Any = None
    system_fingerprint: Any = None
    usage: None = None


PLAIN_CHUNKS = msgspec.json.Decoder(PlainChunk)
