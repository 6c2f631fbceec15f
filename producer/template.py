"""Samples as a model's own chat template writes them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.errors import UsageError
from app.records import Message

Render = Callable[[list[Message], list[dict[str, Any]] | None], str]
"""Messages and tools -> the text that the model goes on with. Raises TemplateRefusedError."""


class TemplateRefusedError(Exception):
    """A chat template does not take a conversation; the text says why."""


def load(where: str, kwargs: dict[str, Any] | None = None) -> Render:
    """Return what renders conversations by a chat template.

    `where` is a `.jinja` file, a folder with a tokenizer, or a model's name on the hub. `kwargs` are the template's own
    options. Raises UsageError: no transformers, no such model, or one without a template.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it says at length that torch is not needed
            import transformers  # noqa: PLC0415 - takes seconds, and only in the train extra
    except ImportError as error:
        raise UsageError("--template needs transformers; run: pip install 'promptmill[train]'.") from error
    transformers.logging.set_verbosity_error()
    apply = _of_file(where) if Path(where).expanduser().is_file() else _of_model(transformers, where)

    def render(messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        try:
            return apply([_with_objects(message) for message in messages], tools, kwargs or {})
        except Exception as error:  # a template is somebody else's code
            raise TemplateRefusedError(" ".join(str(error).split())[:300] or type(error).__name__) from error

    return render


_Apply = Callable[[list[Message], list[dict[str, Any]] | None, dict[str, Any]], str]


def _of_file(where: str) -> _Apply:
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

    try:
        template = Path(where).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--template {where} cannot be read: {error}.") from error

    def apply(messages: list[Message], tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]) -> str:
        rendered, _ = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=template, add_generation_prompt=True, **kwargs
        )
        return str(rendered[0])

    return apply


def _of_model(transformers: Any, where: str) -> _Apply:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where)
    except Exception as error:  # the hub's client raises classes of half a dozen libraries
        words = " ".join(str(error).split())[:200].rstrip(".")
        raise UsageError(
            f"--template {where}: no tokenizer can be loaded ({words}); give a .jinja file, a folder or a hub id."
        ) from error
    if not tokenizer.chat_template:
        raise UsageError(f"--template {where}: its tokenizer has no chat template.")

    def apply(messages: list[Message], tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]) -> str:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
        )
        return str(text)

    return apply


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
