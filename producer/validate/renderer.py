"""Renders conversations with a tokenizer and its chat template, as trainers do."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import UsageError

_GENERATION_TAG = "{% generation"
_GENERATION_CONFIG = "generation_config.json"


class RenderError(Exception):
    """The template refuses a conversation; the words are its own."""


class Renderer:
    """A chat template, with the tokenizer that it belongs to where one was given."""

    def __init__(self, tokenizer: Any, template: str | None, arguments: Mapping[str, Any], folder: Path | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._arguments = dict(arguments)
        self._folder = folder

    @property
    def renders(self) -> bool:
        """Whether there is a template."""
        return self._template is not None

    @property
    def marks_answers(self) -> bool:
        """Whether the template has the marks that trainers with an assistant-only loss need."""
        text = (self._template or "").replace("{%-", "{%")
        return _GENERATION_TAG in text

    @property
    def vocab_size(self) -> int | None:
        """How many ids the tokenizer has."""
        return len(self._tokenizer) if self._tokenizer is not None else None

    def end_tokens(self) -> dict[int, str]:
        """Return the ids that end an answer, with their texts: the tokenizer's and those of its generation config."""
        if self._tokenizer is None:
            return {}
        ids = {self._tokenizer.eos_token_id}
        path = self._folder / _GENERATION_CONFIG if self._folder else None
        if path is not None and path.is_file():
            more = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(more if isinstance(more, list) else [more])
        known = [id_ for id_ in ids if isinstance(id_, int)]
        return dict(zip(known, self._tokenizer.convert_ids_to_tokens(known), strict=True))

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, asks: bool) -> str:
        """Return the conversation as one text; `asks` adds what stands before an answer.

        Raises RenderError.
        """
        import jinja2  # noqa: PLC0415 heavy

        options = {
            "tools": list(tools) if tools else None,
            "add_generation_prompt": asks,
            "chat_template": self._template,
            **self._arguments,
        }
        try:
            if self._tokenizer is not None:
                return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
            from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 heavy

            rendered, _ = render_jinja_template(conversations=[list(messages)], **options)
            return str(rendered[0])
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RenderError(f"{type(error).__name__}: {error}") from error

    def count(self, text: str) -> int | None:
        """Return how many tokens a rendered text has; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def load_renderer(
    tokenizer: str | None, template: Path | None, arguments: Mapping[str, Any], *, trust_remote_code: bool
) -> Renderer:
    """Load what was named: a tokenizer (a folder, or a name on the hub), a template file, or both.

    Raises UsageError when transformers is missing, or they cannot be loaded.
    """
    transformers = _transformers()
    loaded, folder = None, None
    if tokenizer is not None:
        folder = Path(tokenizer) if Path(tokenizer).is_dir() else None
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(f"--tokenizer {tokenizer} cannot be loaded ({first}); give the model's folder.") from error
    text = None
    if template is not None:
        try:
            text = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--chat-template {template} cannot be read ({error}).") from error
    elif loaded is not None and loaded.chat_template is not None:
        text = loaded.get_chat_template()
    return Renderer(loaded, text, arguments, folder)


def _transformers() -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns that there is no torch, which rendering does without
    try:
        import jinja2  # noqa: F401, PLC0415 transformers needs it for templates, and does not bring it
        import transformers  # noqa: PLC0415 heavy
    except ImportError as error:
        raise UsageError(
            "Rendering needs transformers, which is not installed: run `pip install 'promptmill[train]'`."
        ) from error
    finally:
        logging.disable(before)
    return transformers
