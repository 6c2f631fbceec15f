"""What the fake model server answers where token ids go in: SGLang's `/generate` and vLLM's `/inference/v1/generate`.

Here a token is a byte of UTF-8, and a few marks are tokens of their own, so that a real tokenizer can be made that has
the same ids (`tests.support.byte_tokenizer`).
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from producer.simulator.rules import AUTO, ECHO, Rule, ServerOptions
from producer.simulator.shapes import Answer, Refusal, to_json

GENERATE_PATH = "/generate"
TOKENS_PATH = "/inference/v1/generate"
PATHS = frozenset({GENERATE_PATH, TOKENS_PATH})

START, END, THINK, END_THINK = "<|im_start|>", "<|im_end|>", "<think>", "</think>"
MARKS = {START: 256, END: 257, THINK: 258, END_THINK: 259}
"""The tokens that are no bytes, by their texts; `<|im_end|>` ends an answer."""
_TEXTS = {id_: mark for mark, id_ in MARKS.items()}
_SPLIT = re.compile("(" + "|".join(map(re.escape, MARKS)) + ")")
_USER = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


def encode(text: str) -> list[int]:
    """Return the byte tokens of a text."""
    pieces = filter(None, _SPLIT.split(text))
    return [id_ for piece in pieces for id_ in ([MARKS[piece]] if piece in MARKS else list(piece.encode()))]


def decode(ids: Sequence[int]) -> str:
    """Return the text of byte tokens; a character that was cut becomes U+FFFD."""
    return b"".join(_TEXTS[id_].encode() if id_ in _TEXTS else bytes([id_]) for id_ in ids).decode("utf-8", "replace")


def prompt_ids(path: str, body: Any) -> list[int] | None:
    """Return the ids of the prompt that a request sends; None where there are none."""
    ids = body.get("input_ids" if path == GENERATE_PATH else "token_ids") if isinstance(body, dict) else None
    return ids if isinstance(ids, list) and ids and all(type(id_) is int for id_ in ids) else None


def user_text(ids: Sequence[int]) -> str:
    """Return the last user text of a rendered prompt."""
    found = _USER.findall(decode(ids))
    return found[-1] if found else ""


def refuse_tokens(path: str, body: Any, options: ServerOptions) -> Refusal | None:
    """Return why the request cannot be served: SGLang refuses what vLLM cuts down."""
    ids = prompt_ids(path, body)
    if ids is None:
        return Refusal(400, "invalid type: the request has no token ids")
    limit, most = options.max_model_len, _limit(path, body, options)
    if path == GENERATE_PATH and len(ids) >= limit:
        return Refusal(
            400, f"The input ({len(ids)} tokens) is longer than the model's context length ({limit} tokens)."
        )
    if path == GENERATE_PATH and len(ids) + most > limit:
        words = f"Requested token count exceeds the model's maximum context length of {limit} tokens."
        return Refusal(400, words)
    if path == TOKENS_PATH and body.get("model") not in {None, options.model}:
        return Refusal(404, f"The model `{body['model']}` does not exist.", "model")
    if path == TOKENS_PATH and len(ids) > limit:
        words = f"This model's maximum context length is {limit} tokens. However, your prompt contains {len(ids)}"
        return Refusal(400, f"{words} input tokens.", "input_tokens")
    return None


def _limit(path: str, body: Mapping[str, Any], options: ServerOptions) -> int:
    params = body.get("sampling_params") or {}
    if path == GENERATE_PATH:
        return int(params.get("max_new_tokens", 128))
    return int(params.get("max_tokens", options.max_model_len))


def tokens_answer(path: str, body: Mapping[str, Any], rule: Rule, *, options: ServerOptions, request_id: str) -> Answer:
    """Return the answer that a rule asks for; `body` has passed `refuse_tokens`."""
    prompt = prompt_ids(path, body) or []
    room = options.max_model_len - len(prompt)
    limit = min(_limit(path, body, options), room)
    finish = "stop" if rule.finish_reason == AUTO else rule.finish_reason
    ids = encode(_written(rule, user_text(prompt), opened=decode(prompt).rstrip().endswith(THINK)))
    if finish == "stop":
        ids.append(MARKS[END])
    if len(ids) > limit and rule.finish_reason == AUTO:
        ids, finish = ids[:limit], "length"
    made = _Made(prompt, ids, finish, request_id)
    document = made.as_sglang(rule.stop_reason) if path == GENERATE_PATH else made.as_vllm(options.model)
    return Answer(to_json(document), len(prompt), len(ids))


def _written(rule: Rule, user: str, *, opened: bool) -> str:
    """Return all that the model writes: thought, answer, and calls as Qwen writes them."""
    thought = "" if rule.reasoning is None else f"{'' if opened else THINK}{rule.reasoning}{END_THINK}"
    content = "" if rule.tool_calls and rule.content == ECHO else rule.content or ""
    calls = []
    for call in rule.tool_calls or ():
        function = call["function"]
        said = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        calls.append(f"\n<tool_call>\n{json.dumps(said)}\n</tool_call>")
    return thought + content.replace("{user}", user) * rule.repeat + "".join(calls)


@dataclasses.dataclass(frozen=True)
class _Made:
    """What the toy model wrote, before it takes a server's shape."""

    prompt: list[int]
    ids: list[int]
    finish: str | None
    request_id: str

    def as_sglang(self, matched: str | int | None) -> dict[str, Any]:
        ended = self.ids[-1:] == [MARKS[END]]
        reasons: dict[str | None, Any] = {
            "stop": {"type": "stop", "matched": MARKS[END] if matched is None else matched},
            "length": {"type": "length", "length": len(self.ids)},
            "abort": {"type": "abort", "message": "Abort in waiting queue", "status_code": None, "err_type": None},
            None: None,
        }
        meta = {
            "id": self.request_id,
            "finish_reason": reasons.get(self.finish, {"type": self.finish}),
            "prompt_tokens": len(self.prompt),
            "weight_version": "default",
            "num_retractions": 0,
            "completion_tokens": len(self.ids),
            "cached_tokens": 0,
            "e2e_latency": 0.1,
            "response_sent_to_client_ts": time.time(),
        }
        text = decode(self.ids[:-1] if ended else self.ids)
        return {"text": text, "output_ids": self.ids, "meta_info": meta}

    def as_vllm(self, model: str) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": None, "finish_reason": self.finish, "token_ids": self.ids}
        counts = (len(self.prompt), len(self.prompt) + len(self.ids), len(self.ids))
        return {
            "id": f"generate-tokens-{self.request_id}",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": dict(zip(("prompt_tokens", "total_tokens", "completion_tokens"), counts, strict=True)),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }
