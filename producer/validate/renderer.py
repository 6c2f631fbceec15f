"""Renders conversations with a tokenizer and its chat template, as trainers do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import UsageError
from producer import tokenizers

_GENERATION_TAG = "{% generation"
_GENERATION_CONFIG = "generation_config.json"


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

        Raises TemplateRefusedError.
        """
        return tokenizers.render(self._tokenizer, self._template, messages, tools, asks=asks, arguments=self._arguments)

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
    loaded, folder, text = None, None, None
    if tokenizer is not None:
        folder = Path(tokenizer) if Path(tokenizer).is_dir() else None
        try:
            loaded = tokenizers.load_tokenizer("--tokenizer", tokenizer, trust_remote_code=trust_remote_code)
        except tokenizers.NoTokenizerError as error:
            raise UsageError(f"--tokenizer {tokenizer} cannot be loaded ({error}); give the model's folder.") from error
    if template is not None:
        text = tokenizers.read_template("--chat-template", template)
    elif loaded is not None and loaded.chat_template is not None:
        text = loaded.get_chat_template()
    return Renderer(loaded, text, arguments, folder)
