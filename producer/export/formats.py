"""Which export formats there are, and which options each of them takes."""

from __future__ import annotations

from typing import Any

from app.errors import UsageError
from producer.export.base import Format, FormatOptions
from producer.export.conversations import SpecForge, Speculators
from producer.export.modelopt import ModelOpt
from producer.export.openai import OpenAI
from producer.export.sharegpt import ShareGPT
from producer.export.tokens import Tokens
from producer.export.torchspec import TorchSpecKimi
from producer.export.trl import Trl

_CLASSES: dict[str, type[Any]] = {
    one.name: one for one in (Tokens, SpecForge, Speculators, TorchSpecKimi, ModelOpt, OpenAI, ShareGPT, Trl)
}
ROW_FORMATS = tuple(_CLASSES)
"""The formats that make a row of each record."""
VOCABULARY = "vocab"
FREQUENCIES = "token-freq"
FORMATS = (*ROW_FORMATS, VOCABULARY, FREQUENCIES)
"""The names that `--format` takes."""

_SPELLED = {"reasoning": "--reasoning", "status": "--status", "tools": "--no-tools", "max_length": "--max-length"}


def make_format(name: str, options: FormatOptions | None = None) -> Format[Any]:
    """Return the format of that name.

    Raises UsageError for an unknown name, and for an option that the format does not have.
    """
    options = options or FormatOptions()
    if name not in _CLASSES:
        raise unknown_format(name)
    chosen = _CLASSES[name]
    for option in options.given():
        if option not in chosen.options:
            takers = ", ".join(other for other, one in _CLASSES.items() if option in one.options)
            raise UsageError(f"The format {name} has no {_SPELLED[option]}; these formats have: {takers}.")
    if options.reasoning is not None and options.reasoning not in chosen.reasonings:
        raise UsageError(
            f"The format {name} cannot hold reasoning as {options.reasoning}; "
            f"--reasoning may be {' or '.join(chosen.reasonings)} there."
        )
    made: Format[Any] = chosen(options)
    return made


def unknown_format(name: str) -> UsageError:
    """Return the error for a name that is no format."""
    return UsageError(f"There is no export format {name!r}; choose one of {', '.join(FORMATS)}.")
