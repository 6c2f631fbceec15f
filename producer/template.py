"""Samples as a model's own chat template writes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.errors import UsageError
from app.records import Message
from producer import tokenizers

_OPTION = "--template"

Render = Callable[[list[Message], list[dict[str, Any]] | None], str]
"""Messages and tools -> the text that the model goes on with. Raises tokenizers.TemplateRefusedError."""


def load(where: str, kwargs: dict[str, Any] | None = None) -> Render:
    """Return what renders conversations by a chat template.

    `where` is a `.jinja` file, a folder with a tokenizer, or a model's name on the hub. `kwargs` are the template's own
    options. Raises UsageError: no transformers, no such model, or one without a template.
    """
    tokenizer, template = None, None
    if Path(where).expanduser().is_file():
        template = tokenizers.read_template(_OPTION, Path(where))
    else:
        tokenizer = _tokenizer(where)

    def render(messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        turns = [_with_objects(message) for message in messages]
        return tokenizers.render(tokenizer, template, turns, tools, asks=True, arguments=kwargs or {})

    return render


def _tokenizer(where: str) -> Any:
    try:
        tokenizer = tokenizers.load_tokenizer(_OPTION, where)
    except tokenizers.NoTokenizerError as error:
        raise UsageError(
            f"{_OPTION} {where}: no tokenizer can be loaded ({error}); give a .jinja file, a folder or a hub id."
        ) from error
    if not tokenizer.chat_template:
        raise UsageError(f"{_OPTION} {where}: its tokenizer has no chat template.")
    return tokenizer


def _with_objects(message: Message) -> Message:
    """Return a message whose calls' arguments are objects, as model servers hand them to templates."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
