"""An OpenAI-style chat answer, in any server's dialect, made into a completion."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Never

import msgspec

from app.records import LARGEST_COUNT, Completion, Usage
from workers.clients.base import CallFailed
from workers.clients.texts import CLOSING, OPENING, Parts, holds_call_markup, split_channels, split_think, take_apart
from workers.faults import FaultKind, classify_error_body, make_fault
from workers.wording import quote_start

SPLIT_FROM_CONTENT = "content"
"""The reasoning field's name where the server left the reasoning in the content and it was split off here."""

_FINISHED = frozenset({"stop", "length", "tool_calls", "content_filter"})
_SURROGATE = re.compile("[\ud800-\udfff]")
_HTML = re.compile(rb"\s*<(!doctype|html|head|body)", re.IGNORECASE)
_IDS = list[Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]]


def decode_answer(body: bytes) -> dict[str, Any]:
    """Return an answer's JSON object; NaN and Infinity become null, unpaired surrogates U+FFFD.

    Raises CallFailed (bad_answer) for anything that is no JSON object.
    """
    try:
        answer = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        answer = _decode_leniently(body)
    if not isinstance(answer, dict):
        refuse("the answer is no JSON object", body)
    return answer


def parse_chat_answer(body: dict[str, Any], *, tools: bool = False) -> Completion:
    """Return the completion of a decoded chat answer: its first choice. `tools`: the request offered some.

    What decides whether the answer is usable (choice, message, texts, tool calls, finish reason) must have the
    right type; of the rest (usage, ids, names) whatever has a wrong type is unknown, hence None.
    Raises CallFailed for error bodies, answers that are none, and answers that were broken off.
    """
    if body.get("error") or body.get("object") == "error":
        raise CallFailed(classify_error_body(body))
    choice, message = _choice_and_message(body)
    finish_reason = finished(choice.get("finish_reason"), body)
    verbose = body.get("__verbose")
    raw, prompt = (
        string_or_none(verbose.get(key)) if isinstance(verbose, dict) else None for key in ("content", "prompt")
    )
    text, thoughts = _content(message.get("content"), body)
    reasoning, field = _reasoning(message, body)
    parts = Parts(reasoning, text)
    if reasoning is None and thoughts:
        parts, field = Parts(thoughts, text), SPLIT_FROM_CONTENT
    elif reasoning is None and text and (split := _split(text)):
        parts, field = split, SPLIT_FROM_CONTENT if split.reasoning else None
        raw = text if raw is None and not split.plain else raw
    tool_calls = _tool_calls(message.get("tool_calls"), body) or parts.calls
    usage = read_usage(body.get("usage"))
    if not (parts.content or parts.reasoning or tool_calls):
        refuse_silence(usage.completion_tokens, body)
    stop_reason = choice.get("stop_reason", choice.get("matched_stop"))
    completion = Completion(
        content=parts.content,
        reasoning=parts.reasoning,
        reasoning_field=field,
        tool_calls=tool_calls,
        finish_reason=finish_reason,
        stop_reason=stop_reason if isinstance(stop_reason, str) or _is_int(stop_reason) else None,
        unparsed_calls=tools and tool_calls is None and holds_call_markup(parts.content),
        raw=None if raw in derivable(parts) else raw,
        prompt_token_ids=read_ids(body.get("prompt_token_ids")) or read_ids(choice.get("prompt_token_ids")),
        output_ids=_output_ids(choice, body),
        usage=usage,
        model=string_or_none(body.get("model")),
        response_id=string_or_none(body.get("id")),
    )
    return all_thought(completion) if prompt and prompt.rstrip().endswith(OPENING) else completion


def all_thought(completion: Completion) -> Completion:
    """Return an answer to a prompt that opened a thought: a text that no tag parts was thought from end to end."""
    text = completion.content or ""
    if completion.reasoning is not None or completion.tool_calls or not text or OPENING in text or CLOSING in text:
        return completion
    return msgspec.structs.replace(completion, content=None, reasoning=text, reasoning_field=SPLIT_FROM_CONTENT)


def derivable(parts: Parts) -> tuple[str | None, ...]:
    """Return the whole texts that reasoning and content say already, so that a record need not repeat them."""
    content = parts.content or ""
    if parts.calls:
        return ("",)
    if parts.reasoning is None:
        return ("", content)
    closed = f"{parts.reasoning}{CLOSING}{content}"
    cut = () if content else (parts.reasoning, OPENING + parts.reasoning)
    return ("", closed, OPENING + closed, *cut)


def refuse_silence(completion_tokens: int | None, body: Any) -> None:
    """Raise CallFailed (empty_answer) where tokens were generated and no text came.

    A single token may be the end token alone: then the model really said nothing.
    """
    if (completion_tokens or 0) > 1:
        words = f"{completion_tokens} tokens were generated, but no text came; the answer starts"
        raise CallFailed(make_fault(FaultKind.EMPTY_ANSWER, f"{words}: {quote_start(body)}", status=200))


def finished(reason: Any, body: Any) -> str:
    """Return a finish reason that ends an answer; raises CallFailed for every other one."""
    if reason is not None and not isinstance(reason, str):
        refuse("the answer's finish_reason is no string", body)
    if reason in _FINISHED:
        return str(reason)
    kind = FaultKind.ABORTED if reason == "abort" else FaultKind.UNFINISHED
    words = f"the answer ended with finish_reason {json.dumps(reason)}; it starts: {quote_start(body)}"
    raise CallFailed(make_fault(kind, words, status=200))


def _split(text: str) -> Parts | None:
    """Split content whose reasoning the server has left in it; None: there is none, or it is unclear where."""
    if (channels := split_channels(text)) is not None:
        return channels
    return take_apart(text, opened=False, tools=False) if split_think(text) else None


def _decode_leniently(body: bytes) -> Any:
    if not body.strip():
        refuse("the answer is empty", body)
    if _HTML.match(body):
        refuse("the answer is an HTML page", body)
    try:
        return _strict(json.loads(body.decode("utf-8-sig", "replace"), parse_constant=lambda _name: None))
    except (ValueError, RecursionError):
        refuse("the answer is not JSON, or only the start of it", body)


def _strict(value: Any) -> Any:
    """Return decoded JSON with everything that strict UTF-8 JSON cannot hold replaced."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, dict):
        return {_strict(key): _strict(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse(why: str, body: Any) -> Never:
    """Raise CallFailed (bad_answer): success was signalled, but this is no answer."""
    start = quote_start(body) or "nothing"
    raise CallFailed(make_fault(FaultKind.BAD_ANSWER, f"HTTP 200, but {why}; it starts: {start}", status=200))


def _choice_and_message(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        refuse("the answer has no choices", body)
    choice = choices[0]
    if not isinstance(choice, dict):
        refuse("the answer's choice is no object", body)
    if choice.get("error"):
        raise CallFailed(classify_error_body(choice))
    message = choice.get("message")
    if not isinstance(message, dict):
        refuse("the answer's choice has no message", body)
    return choice, message


def _content(content: Any, body: dict[str, Any]) -> tuple[str | None, str]:
    """Return the text, and the reasoning that stands among the parts of a content list."""
    if content is None or isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        refuse("the answer's content is neither text nor parts", body)
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        text = part if isinstance(part, str) else _part_text(part)
        if text is None:
            refuse("the answer's content has a part without text", body)
        is_thought = isinstance(part, dict) and part.get("type") in {"thinking", "reasoning"}
        (thoughts if is_thought else texts).append(text)
    return "".join(texts), "".join(thoughts)


def _part_text(part: Any) -> str | None:
    if not isinstance(part, dict):
        return None
    for name in ("text", "thinking", "summary"):
        value = part.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            texts = [item if isinstance(item, str) else _part_text(item) for item in value]
            return None if None in texts else "".join(text for text in texts if text)
    return None


def _reasoning(message: dict[str, Any], body: dict[str, Any]) -> tuple[str | None, str | None]:
    for name in ("reasoning", "reasoning_content"):
        text = message.get(name)
        if text is not None and not isinstance(text, str):
            refuse(f"the answer's {name} is no text", body)
        if text:
            return text, name
    details = message.get("reasoning_details")
    if details is not None and not isinstance(details, list):
        refuse("the answer's reasoning_details is no list", body)
    # Encrypted details carry no text.
    text = "".join(filter(None, map(_part_text, details or ())))
    return (text, "reasoning_details") if text else (None, None)


def _tool_calls(calls: Any, body: dict[str, Any]) -> list[dict[str, Any]] | None:
    if calls is None:
        return None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        refuse("the answer's tool_calls is no list of objects", body)
    return [_tool_call(call, body) for call in calls] or None


def _tool_call(call: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are a JSON text, as some servers send the object itself."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        refuse("the answer's tool_calls has a call without a function's name", body)
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        return call
    if not isinstance(arguments, dict):
        refuse("the answer's tool_calls has a call whose arguments are no JSON object", body)
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def read_usage(usage: Any) -> Usage:
    """Return the token counts of an answer; what has a wrong type is unknown."""
    if not isinstance(usage, dict):
        return Usage()
    completion, prompt = usage.get("completion_tokens_details"), usage.get("prompt_tokens_details")
    reasoning = completion.get("reasoning_tokens") if isinstance(completion, dict) else None
    return Usage(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        reasoning_tokens=_count(usage.get("reasoning_tokens") if reasoning is None else reasoning),
        cached_tokens=_count(prompt.get("cached_tokens") if isinstance(prompt, dict) else None),
    )


def _output_ids(choice: dict[str, Any], body: dict[str, Any]) -> list[int] | None:
    verbose = body.get("__verbose")
    candidates = (
        choice.get("token_ids"),
        choice.get("response_token_ids"),
        verbose.get("tokens") if isinstance(verbose, dict) else None,
    )
    return next(filter(None, map(read_ids, candidates)), None)


def read_ids(value: Any) -> list[int] | None:
    """Return a list of token ids, or None for anything else; servers that were not asked may send an empty list."""
    if not value:
        return None
    try:
        return msgspec.convert(value, _IDS)
    except msgspec.ValidationError:
        return None


def _count(value: Any) -> int | None:
    return value if _is_int(value) and 0 <= value <= LARGEST_COUNT else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def string_or_none(value: Any) -> str | None:
    """Return a text, or None for anything else."""
    return value if isinstance(value, str) else None
