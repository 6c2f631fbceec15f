"""Makes token ids of a record's text with the target model's own template, for servers that gave no exact ids."""

from __future__ import annotations

import json
import threading
from typing import Any

from app.extraction import Plan, Reason, Refusal, Sequence, SourceRecord
from workers.extract.model import ModelUnusableError
from workers.rendering import TokenizerUnusableError, read_tokenizer


class Retokenizer:
    """Renders conversations; a tokenizer is loaded once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokenizers: dict[str, Any] = {}

    def sequence(self, record: SourceRecord, plan: Plan) -> Sequence | Refusal:
        """Return the ids of the prompt as rendered, and of what the template makes of the answer behind it.

        Refuses an answer whose reasoning or content does not come through the template: a draft trained on it would
        never see that part.
        Raises ModelUnusableError where there is no tokenizer or template.
        """
        with self._lock:  # tokenizers are not made for many threads
            tokenizer = self._tokenizers.get(plan.model) or self._load(plan)
            return _render(tokenizer, record)

    def _load(self, plan: Plan) -> Any:
        try:
            tokenizer = read_tokenizer(plan.model, trust_remote_code=plan.trust_remote_code, local_files_only=True)
        except TokenizerUnusableError as error:
            raise ModelUnusableError(f"The tokenizer of {plan.model} cannot be loaded: {error}.") from error
        if not tokenizer.chat_template:
            raise ModelUnusableError(f"The tokenizer of {plan.model} has no chat template; --retokenize needs one.")
        self._tokenizers[plan.model] = tokenizer
        return tokenizer


def _render(tokenizer: Any, record: SourceRecord) -> Sequence | Refusal:
    import jinja2  # noqa: PLC0415 heavy

    answer: dict[str, Any] = {"role": "assistant", "content": record.content or ""}
    if record.reasoning:
        answer["reasoning_content"] = record.reasoning
    if record.tool_calls:
        answer["tool_calls"] = record.tool_calls
    options = {"tools": record.tools or None, "tokenize": False}
    messages = _with_arguments([*record.messages, answer])
    try:
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(messages, **options)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        return Refusal(Reason.CANNOT_TOKENIZE, f"the chat template does not take it: {error}")
    text = whole.removeprefix(prompt)
    for name, part in (("reasoning", record.reasoning), ("content", record.content)):
        if part and part.strip() not in text:
            return Refusal(Reason.LOST_THOUGHT, f"the chat template leaves out the answer's {name}, or changes it")
    if text == whole:
        words = "with its answer the conversation begins otherwise than the prompt that asks for one"
        return Refusal(Reason.CANNOT_TOKENIZE, f"{words}; the template rewrites history")
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    output_ids = tokenizer.encode(text, add_special_tokens=False)
    return Sequence(prompt_ids, output_ids, retokenized=True) if output_ids else Refusal(Reason.NO_ANSWER, "no tokens")


def _with_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose tool calls have their arguments as objects, which templates expect."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
