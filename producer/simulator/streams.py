"""The chunks in which the fake model server sends an answer, in the shapes of vLLM 0.33 and SGLang 0.5.

They are cut out of the whole answer, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from producer.simulator.rules import Rule, ServerOptions
from producer.simulator.shapes import to_json
from producer.simulator.tokens import GENERATE_PATH, MARKS, TOKENS_PATH, decode

_Object = dict[str, Any]


def framed(data: bytes, line_end: str) -> bytes:
    """Return an event's data as the lines of a stream."""
    end = line_end.encode()
    return b"data: " + data + end + end


def stream_events(
    path: str, answer: Mapping[str, Any], rule: Rule, *, options: ServerOptions, counted: bool
) -> list[bytes]:
    """Return the data of an answer's events; `counted` adds the usage that the request asked for."""
    if path == GENERATE_PATH:
        return [to_json(event) for event in _generate_events(answer, rule.chunk_tokens, options.incremental)]
    if path == TOKENS_PATH:
        return [to_json(event) for event in _token_events(answer, rule.chunk_tokens, counted=counted)]
    return [to_json(event) for event in _chat_events(answer, rule.chunk_tokens, counted=counted)]


def _chat_events(answer: Mapping[str, Any], size: int, *, counted: bool) -> Iterator[_Object]:
    """Yield the chunks of a chat completion: the role, thought, content, calls, the end, and the usage."""
    [choice] = answer["choices"]
    top = {
        "id": answer["id"],
        "object": "chat.completion.chunk",
        "created": answer["created"],
        "model": answer["model"],
    }
    ids = choice.get("token_ids")
    deltas = list(_deltas(choice["message"], size))
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    yield {**top, "choices": [first], "prompt_token_ids": answer.get("prompt_token_ids")}
    for number, delta in enumerate(deltas):
        end = None if number == len(deltas) - 1 else (number + 1) * size
        piece = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        yield {**top, "choices": [piece if ids is None else {**piece, "token_ids": ids[number * size : end]}]}
    last = {name: value for name, value in choice.items() if name not in {"message", "token_ids"}}
    yield {**top, "choices": [{**last, "delta": {}, **({"token_ids": ids} if ids and not deltas else {})}]}
    if counted:
        yield {**top, "choices": [], "usage": answer["usage"]}


def _deltas(message: Mapping[str, Any], size: int) -> Iterator[_Object]:
    for name, value in message.items():
        if name == "role" or not value:
            continue
        if name == "tool_calls":
            for number, call in enumerate(value):
                function = call["function"]
                yield {name: [{**call, "index": number, "function": {**function, "arguments": ""}}]}
                for piece in _cut(function["arguments"], size):
                    yield {name: [{"index": number, "function": {"arguments": piece}}]}
        elif isinstance(value, str):
            yield from ({name: piece} for piece in _cut(value, size))
        else:
            yield {name: value}


def _token_events(answer: Mapping[str, Any], size: int, *, counted: bool) -> Iterator[_Object]:
    [choice] = answer["choices"]
    pieces = list(_cut(choice["token_ids"], size))
    for number, ids in enumerate(pieces):
        reason = choice["finish_reason"] if number == len(pieces) - 1 else None
        piece = {"index": 0, "logprobs": None, "finish_reason": reason, "token_ids": ids}
        yield {"request_id": answer["id"], "choices": [piece], "usage": None}
    if counted:
        yield {"request_id": answer["id"], "choices": [], "usage": answer["usage"]}


def _generate_events(answer: Mapping[str, Any], size: int, incremental: bool) -> Iterator[_Object]:
    """Yield events of `/generate`; the last has the reason of the end, and no text of the token that ended it."""
    ids, meta = answer["output_ids"], answer["meta_info"]
    said = 0
    for start in range(0, len(ids), size):
        end = min(start + size, len(ids))
        is_last = end == len(ids)
        text = answer["text"] if is_last else _whole_text(ids[:end])
        told = {**meta, "completion_tokens": end, "finish_reason": meta["finish_reason"] if is_last else None}
        yield {
            "text": text[said:] if incremental else text,
            "output_ids": ids[start:end] if incremental else ids[:end],
            "meta_info": told,
        }
        said = len(text)


def _whole_text(ids: Sequence[int]) -> str:
    """Return the text so far without a character that is not whole yet, which servers hold back."""
    return decode([id_ for id_ in ids if id_ != MARKS["<|im_end|>"]]).rstrip("\ufffd")


def _cut(value: Any, size: int) -> Iterator[Any]:
    return (value[start : start + size] for start in range(0, len(value), size))
