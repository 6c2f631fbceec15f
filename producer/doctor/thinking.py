"""Reasoning: which field it comes in, and whether the options of the chat template switch it on and off."""

from __future__ import annotations

from collections.abc import Iterator

from app.preflight import Canary, Server
from producer.doctor.checks import Check, Level

_SPLIT_HERE = "content"
"""The field's name where think tags stood in the content and were split off by promptmill."""


def check_reasoning(server: Server) -> Iterator[Check]:
    """Look at the canaries' reasoning, then at the pair that was asked with thinking on and off."""
    pair = [server.thought.on, server.thought.off] if server.thought else []
    seen = [*server.canaries, *pair]
    fields = sorted({one.reasoning_field for one in seen if one.reasoning_field})
    name, url = "server.reasoning", server.url
    if any(one.reason == "think_leak" for one in seen):
        sentence = "think tags stand in the content, and such answers are rejected; start the server with the model's"
        yield Check(Level.FAIL, name, f"{sentence} --reasoning-parser.", url)
    elif _SPLIT_HERE in fields:
        sentence = (
            "it leaves the reasoning in the content, between think tags, which promptmill splits off; start the server "
            "with the model's --reasoning-parser, so that reasoning tokens are counted too."
        )
        yield Check(Level.WARN, name, sentence, url)
    elif fields:
        yield Check(Level.OK, name, f"reasoning comes in the field {', '.join(fields)}, apart from the content.", url)
    else:
        sentence = "no canary was answered with reasoning; if the model thinks, see --reasoning-parser of the server."
        yield Check(Level.NOTE, name, sentence, url)
    if server.thought is not None:
        yield _switch(server.thought.on, server.thought.off, url)


def _switch(on: Canary, off: Canary, url: str) -> Check:
    """Say what switching did."""
    name = "server.thinking"
    failed = next((one for one in (on, off) if one.verdict == "failed"), None)
    if failed is not None:
        sentence = f"thinking could not be switched: the canary failed as {failed.reason} ({failed.error})."
        return Check(Level.WARN, name, sentence, url)
    if off.reason == "answer_in_reasoning":
        sentence = (
            "with thinking off, the whole answer lies in the reasoning and the content is empty; for a dataset without "
            "thinking start the server without --reasoning-parser, or with one that heeds enable_thinking."
        )
        return Check(Level.WARN, name, sentence, url)
    cut = next((one for one in (on, off) if one.reason == "truncated_in_think"), None)
    if cut is not None:
        sentence = f"a canary was cut within its thought after {cut.completion_tokens} tokens; raise --max-tokens."
        return Check(Level.WARN, name, sentence, url)
    thinks_on, thinks_off = bool(on.reasoning_chars), bool(off.reasoning_chars)
    if thinks_on and not thinks_off:
        sentence = '--chat-template-kwargs \'{"enable_thinking": true}\' (or "thinking") thinks, and false does not.'
        return Check(Level.OK, name, sentence, url)
    if thinks_off and not thinks_on:
        sentence = "it thinks with thinking off and not with it on; look at the chat template before you rely on it."
        return Check(Level.WARN, name, sentence, url)
    always = "it thinks either way" if thinks_on else "it thinks neither way"
    sentence = f"enable_thinking and thinking in --chat-template-kwargs make no difference: {always}."
    return Check(Level.NOTE, name, sentence, url)
