"""The bodies that the fake model server sends: answers and errors in the shapes of vLLM 0.33 and SGLang 0.5.

The toy tokenizer makes one token of each code point, its id being `ord(character)`. Three special tokens lie above
Unicode: EOS, which decodes to nothing, and the two think tags, which decode to their text. So for every answer
`decode(token_ids)` is the answer's text, with the reasoning between its tags, and an id is always exact.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from producer.simulator.rules import AUTO, ECHO, Dialect, Rule, ServerOptions

EOS_ID = 0x110000
THINK_ID = 0x110001
END_THINK_ID = 0x110002
_SPECIAL = {EOS_ID: "", THINK_ID: "<think>", END_THINK_ID: "</think>"}

_ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "Service Unavailable",
}
_ERROR_WORDS = {
    404: "The model `{model}` does not exist.",
    429: "Rate limit exceeded.",
    500: "Internal server error",
    503: "The engine is currently busy. Please retry later.",
}


def encode(text: str) -> list[int]:
    """Return the toy tokens of a text."""
    return [ord(char) for char in text]


def decode(token_ids: Iterable[int]) -> str:
    """Return the text of toy tokens."""
    return "".join(_SPECIAL[id_] if id_ in _SPECIAL else chr(id_) for id_ in token_ids)


def text_of(content: Any) -> str:
    """Return a message's content as one text, whether it is a string, a list of parts or null."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last user message; empty where there is none."""
    return next((text_of(one.get("content")) for one in reversed(messages) if one.get("role") == "user"), "")


def render_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """Apply the toy chat template."""
    turns = [f"<|{one.get('role')}|>{text_of(one.get('content'))}\n" for one in messages]
    return "".join(turns) + "<|assistant|>"


def to_json(value: Any) -> bytes:
    """Encode as the servers do, in raw UTF-8; lone surrogates stay escapes, for UTF-8 has no bytes for them."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def error_body(status: int, message: str | None, *, dialect: Dialect, model: str, param: str | None = None) -> bytes:
    """Return an error body in the dialect's shape."""
    if status == 401 and message is None:
        return to_json({"error": "Unauthorized"})
    words = message if message is not None else _ERROR_WORDS.get(status, f"Refused with status {status}.")
    error = {
        "message": words.replace("{model}", model),
        "type": _ERROR_TYPES.get(status, "Error"),
        "param": param,
        "code": status,
    }
    return to_json({"object": "error", **error} if dialect == "sglang" else {"error": error})


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a request is refused before generation."""

    status: int
    message: str | None
    param: str | None = None


def refuse(body: Any, options: ServerOptions) -> Refusal | None:
    """Return why the request cannot be served, or None; checked in the servers' own order."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        return Refusal(400, "1 validation error: {'type': 'missing', 'loc': ('body', 'messages')}")
    if body.get("stream_options") and not body.get("stream"):
        return Refusal(400, "Stream options can only be defined when `stream=True`.", "stream_options")
    if body.get("stream") and body.get("return_token_ids") and options.dialect == "sglang" and options.token_ids:
        return Refusal(400, "return_token_ids is not supported with streaming.", "return_token_ids")
    if body.get("model") not in {None, options.model}:
        return Refusal(404, f"The model `{body['model']}` does not exist.", "model")
    return _refuse_conversation(body["messages"], options) or _refuse_length(body, options)


def _refuse_conversation(messages: list[Any], options: ServerOptions) -> Refusal | None:
    if not all(isinstance(one, dict) for one in messages):
        return Refusal(400, "1 validation error: {'type': 'dict_type', 'loc': ('body', 'messages')}")
    if options.reject_empty and not last_user_text(messages).strip():
        return Refusal(400, "The decoder prompt cannot be empty", "prompt")
    if options.strict_roles:
        roles = [one.get("role") for one in messages]
        turns = roles[1:] if roles[0] == "system" else roles
        if turns != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
            return Refusal(400, "Conversation roles must alternate user/assistant/user/assistant/...")
    return None


def _refuse_length(body: Mapping[str, Any], options: ServerOptions) -> Refusal | None:
    length = len(render_prompt(body["messages"]))
    limit = options.max_model_len if options.max_chars is None else options.max_chars
    if length > limit:
        message = (
            f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {length} "
            f"input tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value={length})"
        )
        return Refusal(400, message, "input_tokens")
    for name in ("max_tokens", "max_completion_tokens"):
        asked = body.get(name)
        if isinstance(asked, int) and asked > options.max_model_len:
            message = (
                f"{name}={asked} cannot be greater than max_model_len={options.max_model_len}. "
                f"Please request fewer output tokens. (parameter={name}, value={asked})"
            )
            return Refusal(400, message, name)
    return None


@dataclasses.dataclass(frozen=True)
class _Generated:
    """What the toy model wrote, before it takes a dialect's shape."""

    content: str | None
    reasoning: str | None
    tool_calls: list[dict[str, Any]] | None
    finish_reason: str | None
    thinking_ended: bool = True

    @property
    def has_eos(self) -> bool:
        return self.finish_reason in {"stop", "tool_calls"}

    @property
    def output_tokens(self) -> int:
        thought = 0 if self.reasoning is None else 1 + len(self.reasoning) + self.thinking_ended
        return thought + len(self._spoken()) + self.has_eos

    def _spoken(self) -> str:
        calls = json.dumps(self.tool_calls) if self.tool_calls else ""
        return (self.content or "") + calls

    def token_ids(self) -> list[int]:
        ids = [] if self.reasoning is None else [THINK_ID, *encode(self.reasoning)]
        if self.reasoning is not None and self.thinking_ended:
            ids.append(END_THINK_ID)
        return [*ids, *encode(self._spoken()), *([EOS_ID] if self.has_eos else [])]


def _generate(rule: Rule, user_text: str, limit: int) -> _Generated:
    """Write the rule's answer and cut it at `limit` tokens where the rule leaves the finish reason open."""
    content = rule.content
    if rule.tool_calls and content == ECHO:
        content = None
    if content is not None:
        content = content.replace("{user}", user_text) * rule.repeat
    calls = [dict(call) for call in rule.tool_calls] if rule.tool_calls else None
    if rule.finish_reason != AUTO:
        return _Generated(content, rule.reasoning, calls, rule.finish_reason)
    whole = _Generated(content, rule.reasoning, calls, "tool_calls" if calls else "stop")
    if whole.output_tokens <= limit or rule.repeat > 1:
        return whole
    if whole.reasoning is not None and limit < len(whole.reasoning) + 2:
        thought = whole.reasoning[: max(0, limit - 1)]
        return _Generated(None, thought, None, "length", thinking_ended=False)
    room = limit - (0 if whole.reasoning is None else len(whole.reasoning) + 2)
    return _Generated((content or "")[:room], whole.reasoning, None, "length")


@dataclasses.dataclass(frozen=True)
class Answer:
    """A finished answer and what the metrics count of it."""

    body: bytes
    prompt_tokens: int
    completion_tokens: int


def chat_answer(body: Mapping[str, Any], rule: Rule, *, options: ServerOptions, request_id: str) -> Answer:
    """Return the chat completion that the rule asks for; `body` has passed `refuse`."""
    dialect = rule.dialect or options.dialect
    prompt = render_prompt(body["messages"])
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or options.max_model_len
    limit = min(int(asked), max(0, options.max_model_len - len(prompt)))
    generated = _generate(rule, last_user_text(body["messages"]), limit)
    document: dict[str, Any] = {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": options.model,
        "choices": [_choice(generated, rule, dialect)],
        "usage": _usage(len(prompt), generated, dialect) if rule.usage == AUTO else rule.usage,
    }
    if body.get("return_token_ids") and options.token_ids:
        _add_token_ids(document, encode(prompt), generated.token_ids(), dialect)
    elif dialect == "vllm":
        document["prompt_token_ids"] = None
    return Answer(to_json(document), len(prompt), generated.output_tokens)


def _choice(generated: _Generated, rule: Rule, dialect: Dialect) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": generated.content}
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
    choice["finish_reason"] = generated.finish_reason
    if dialect == "vllm":
        message.update(refusal=None, annotations=None, audio=None, function_call=None)
        message[rule.reasoning_field or "reasoning"] = generated.reasoning
        choice.update(stop_reason=rule.stop_reason, token_ids=None)
    else:
        message["content"] = generated.content or ""
        message[rule.reasoning_field or "reasoning_content"] = generated.reasoning
        choice["matched_stop"] = EOS_ID if rule.stop_reason is None and generated.has_eos else rule.stop_reason
    if generated.tool_calls:
        message["tool_calls"] = generated.tool_calls
    message.update(rule.message_fields)
    return choice


def _usage(prompt_tokens: int, generated: _Generated, dialect: Dialect) -> dict[str, Any]:
    completion = generated.output_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
    }
    if generated.reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": len(generated.reasoning)}
        if dialect == "sglang":
            usage["reasoning_tokens"] = len(generated.reasoning)
    return usage


def _add_token_ids(document: dict[str, Any], prompt: list[int], output: list[int], dialect: Dialect) -> None:
    choice = document["choices"][0]
    if dialect == "vllm":
        document["prompt_token_ids"] = prompt
        choice["token_ids"] = output
    else:
        choice["prompt_token_ids"] = prompt
        choice["response_token_ids"] = output
