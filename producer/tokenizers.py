"""Tokenizers and chat templates: loaded by transformers without its warnings, and rendered."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import UsageError

_ERROR_CHARS = 300


class NoTokenizerError(Exception):
    """There is no tokenizer, or a broken one; the text says why, on one line."""


class TemplateRefusedError(Exception):
    """A chat template does not take a conversation; the words are its own."""


def load_tokenizer(option: str, where: str, *, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer out of a folder, or by its name on the hub.

    Raises NoTokenizerError, and UsageError, which names the option, where transformers is missing.
    """
    transformers = _transformers(option)
    try:
        return transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    except Exception as error:  # the hub's client raises classes of half a dozen libraries, tokenizers this very one
        raise NoTokenizerError(_in_one_line(error).rstrip(".")) from error


def read_template(option: str, path: Path) -> str:
    """Read a `.jinja` file.

    Raises UsageError, which names the option, where transformers is missing or the file cannot be read.
    """
    _transformers(option)
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path} cannot be read ({error}).") from error


def render(
    tokenizer: Any,
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    *,
    asks: bool,
    arguments: Mapping[str, Any],
) -> str:
    """Return a conversation as one text, by the template or else the tokenizer's own; one of the two may be None.

    `asks` adds what stands before an answer; `arguments` are the template's own. Raises TemplateRefusedError.
    """
    import jinja2  # noqa: PLC0415 heavy

    options = {"tools": list(tools) if tools else None, "add_generation_prompt": asks, "chat_template": template}
    options |= arguments
    try:
        if tokenizer is not None:
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 heavy

        rendered, _ = render_jinja_template(conversations=[list(messages)], **options)
        return str(rendered[0])
    # What a template's own expressions raise: it is somebody else's code.
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise TemplateRefusedError(f"{type(error).__name__}: {_in_one_line(error)}") from error


def _transformers(option: str) -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns that there is no torch, which rendering does without
    try:
        import jinja2  # noqa: F401, PLC0415 transformers needs it for templates, and does not bring it
        import transformers  # noqa: PLC0415 heavy
    except ImportError as error:
        raise UsageError(f"{option} needs transformers; run: pip install 'promptmill[train]'.") from error
    finally:
        logging.disable(before)
    transformers.logging.set_verbosity_error()
    return transformers


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_ERROR_CHARS] or type(error).__name__
