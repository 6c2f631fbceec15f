"""Prompts rendered here: the model's own tokenizer and chat template, for protocols that take token ids."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.errors import UsageError
from app.records import Message
from workers.clients.texts import OPENING

_FINGERPRINT_CHARS = 16
_WORDS = 300
_TAIL = 16
"""Ids that surely hold an opening tag and the line break after it."""


class PromptRefusedError(Exception):
    """The chat template does not take a conversation; the text says why."""


class TokenizerUnusableError(Exception):
    """A tokenizer cannot be loaded; the text says why, in one line."""


class Prompt(NamedTuple):
    """A rendered conversation."""

    ids: list[int]
    opens_thought: bool
    """Whether it ends inside a thought, so that the answer begins there."""


class Tokenizer:
    """A loaded tokenizer; every method may be called from any thread."""

    def __init__(self, loaded: Any, name: str) -> None:
        self.name = name
        self._loaded = loaded
        template = loaded.chat_template
        self.fingerprint = template_fingerprint(
            template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        )
        """That of the chat template."""
        self.end_ids = _end_ids(loaded)
        """The ids that end an answer."""

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, sampling: Mapping[str, Any]) -> Prompt:
        """Return a conversation's prompt; `sampling` may hold `chat_template_kwargs` and `reasoning_effort`.

        Raises PromptRefusedError with the template's own words.
        """
        turns = [_as_templates_want(message) for message in messages]
        options = _options(sampling)
        try:
            text = self._loaded.apply_chat_template(
                turns, tools=tools or None, tokenize=False, add_generation_prompt=True, **options
            )
            ids = self._loaded(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # a template is somebody else's code
            raise PromptRefusedError(_in_one_line(error)) from error
        return Prompt(list(ids), str(text).rstrip().endswith(OPENING))

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Tell whether a prompt ends inside a thought, so that the answer begins there."""
        return self.decode(prompt_ids[-_TAIL:]).rstrip().endswith(OPENING)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of token ids."""
        text = self._loaded.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return str(text)


class Tokenizers:
    """Loads each tokenizer once in a process, when it is first needed."""

    def __init__(self, name: str | None) -> None:
        """Take the folder or hub name of the one to use; None uses the model's name."""
        self._name = name
        self._loaded: dict[str, Tokenizer] = {}
        self._lock = threading.Lock()

    @property
    def given(self) -> bool:
        """Whether a tokenizer was named, so that it may be used where it is not needed."""
        return self._name is not None

    @property
    def fingerprints(self) -> dict[str, str]:
        """The chat templates' fingerprints by tokenizer, of those that were loaded."""
        return {name: tokenizer.fingerprint for name, tokenizer in list(self._loaded.items())}

    async def of(self, model: str) -> Tokenizer:
        """Return the tokenizer for a model, loading it in a thread.

        Raises UsageError: transformers is missing, or there is no such tokenizer, or it has no chat template.
        """
        name = self._name or model
        found = self._loaded.get(name)
        return found if found is not None else await asyncio.to_thread(self._load, name)

    def _load(self, name: str) -> Tokenizer:
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = load(name)
            return self._loaded[name]


def load(name: str) -> Tokenizer:
    """Load a tokenizer from a folder or the hub; raises UsageError (see `Tokenizers.of`)."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it says at length that torch is not needed
            import jinja2  # noqa: F401, PLC0415 - transformers needs it for templates, and does not bring it
            import transformers  # noqa: PLC0415 - takes seconds, and only these protocols need it
    except ImportError as error:
        raise UsageError(
            "MILL_PROTOCOL and MILL_TOKENIZER need transformers to render prompts: "
            "run pip install 'promptmill[train]' on the workers."
        ) from error
    transformers.logging.set_verbosity_error()
    try:
        loaded = read_tokenizer(name)
    except TokenizerUnusableError as error:
        raise UsageError(
            f"The tokenizer {name} cannot be loaded ({error}); set MILL_TOKENIZER on the workers to the model's folder "
            "or hub name."
        ) from error
    if not loaded.chat_template:
        raise UsageError(f"The tokenizer {name} has no chat template; set MILL_TOKENIZER to one that has.")
    return Tokenizer(loaded, name)


def read_tokenizer(name: str, **options: Any) -> Any:
    """Return transformers' own tokenizer from a folder or the hub; raises TokenizerUnusableError."""
    import transformers  # noqa: PLC0415 - heavy

    try:
        return transformers.AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # tokenizers raises bare ones, the hub's client those of half a dozen libraries
        raise TokenizerUnusableError(_in_one_line(error)) from error


def template_fingerprint(text: str) -> str:
    """Return 16 hex digits of the SHA-256 over a chat template."""
    return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_CHARS]


def _end_ids(loaded: Any) -> frozenset[int]:
    """Return the tokenizer's end token, and those that the model's generation config names beside it."""
    found = {loaded.eos_token_id}
    try:
        from transformers import GenerationConfig  # noqa: PLC0415 - heavy

        more = GenerationConfig.from_pretrained(loaded.name_or_path).eos_token_id
    except (ImportError, OSError, ValueError):
        more = None  # it has none
    found.update(more if isinstance(more, list) else [more])
    return frozenset(id_ for id_ in found if isinstance(id_, int))


def _options(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's options, with those that model servers make of `reasoning_effort`.

    Raises PromptRefusedError for options that are none, which `extra_body` may hold.
    """
    given = sampling.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise PromptRefusedError("chat_template_kwargs is no JSON object")
    options = dict(given)
    effort = sampling.get("reasoning_effort")
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
        options.setdefault("enable_thinking", effort != "none")
        options.setdefault("thinking", effort != "none")
    return options


def _as_templates_want(message: Message) -> Message:
    """Return a message as model servers hand it to templates.

    Text parts become one text, null an empty one, the arguments of tool calls objects (none an empty one), and thoughts
    have one name.
    Raises PromptRefusedError for parts that are no text.
    """
    turn = {**message, "content": _plain(message.get("content"))}
    if turn.get("reasoning_content") is None and isinstance(turn.get("reasoning"), str):
        turn["reasoning_content"] = turn["reasoning"]
    if turn.get("tool_calls"):
        turn["tool_calls"] = [_with_object(call) for call in turn["tool_calls"]]
    return turn


def _plain(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise PromptRefusedError("a message holds more than text, which only MILL_PROTOCOL=auto can send")
    return "\n".join(str(text) for text in texts)


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    given = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not (given is None or isinstance(given, str)):
        return call
    try:
        arguments = json.loads(given) if given else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_WORDS].rstrip(".") or type(error).__name__
