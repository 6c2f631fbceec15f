"""What records will hold, field by field, as the canaries show it, and what became of the canaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from app.preflight import Canary, Report


class Field(msgspec.Struct, frozen=True):
    """One field of a record."""

    name: str
    present: int
    """Answers that have it, of `answers`."""
    answers: int
    source: str
    """Where it comes from; why it is null where none has it."""


def fields(report: Report) -> list[Field]:
    """Return the fields that depend on the server; none where nothing was answered."""
    answers = [one for server in report.servers for one in server.canaries if one.verdict != "failed"]
    if not answers:
        return []

    def field(name: str, has: Callable[[Canary], object], source: str, lacking: str) -> Field:
        present = sum(bool(has(one)) for one in answers)
        return Field(name, present, len(answers), source if present else lacking)

    ends = ", ".join(sorted({one.ids_end for one in answers if one.ids_end})) or "not known"
    found = [
        field("content", lambda one: one.content_chars, "the answer's text", "null or empty"),
        field("reasoning", lambda one: one.reasoning_chars, _reasoning_source(answers), "null: none came"),
        field("output_ids", lambda one: one.output_ids, f"the server's, exact; they end with: {ends}", "null: none"),
        field("prompt_token_ids", lambda one: one.prompt_ids, "exact", "null: the server gives none"),
        field("usage.prompt_tokens", lambda one: one.prompt_tokens is not None, "counted by the server", "unknown"),
        field(
            "usage.completion_tokens", lambda one: one.completion_tokens is not None, "counted by the server", "unknown"
        ),
        field("usage.reasoning_tokens", lambda one: one.reasoning_tokens is not None, "counted by it", "not counted"),
        field("raw", lambda one: one.raw, "the whole text, where the other fields do not say it", "not needed"),
    ]
    if any(one.tools for one in answers):
        found.append(field("tool_calls", lambda one: one.tool_calls, "parsed", "null: none came"))
    return found


def _reasoning_source(answers: Sequence[Canary]) -> str:
    names = sorted({one.reasoning_field for one in answers if one.reasoning_field})
    return ", ".join("split off the content" if name == "content" else f"the field {name}" for name in names)


def verdicts(report: Report) -> dict[str, int]:
    """Return how many canaries were accepted, rejected and failed, the latter two with their reasons."""
    canaries = [one for server in report.servers for one in server.canaries]
    told = Counter(one.verdict if one.reason is None else f"{one.verdict}: {one.reason}" for one in canaries)
    return dict(sorted(told.items()))
