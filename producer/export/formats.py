"""Which export formats there are."""

from __future__ import annotations

from typing import Any

from app.errors import UsageError
from producer.export.base import Format, Reasoning
from producer.export.openai import OpenAI
from producer.export.sharegpt import ShareGPT
from producer.export.tokens import Tokens

FORMATS = (OpenAI.name, ShareGPT.name, Tokens.name)
"""The names that `--format` takes."""


def make_format(name: str, *, reasoning: Reasoning) -> Format[Any]:
    """Return the format of that name; `tokens` holds the reasoning's exact tokens whatever `reasoning` says.

    Raises UsageError for an unknown name, or when the format has no field for reasoning.
    """
    if name == OpenAI.name:
        return OpenAI(reasoning)
    if name == Tokens.name:
        return Tokens()
    if name != ShareGPT.name:
        raise UsageError(f"There is no export format {name!r}; choose one of {', '.join(FORMATS)}.")
    if reasoning is Reasoning.FIELD:
        raise UsageError("The format sharegpt has no field for reasoning; use --format openai, or tokens, to keep it.")
    return ShareGPT()
