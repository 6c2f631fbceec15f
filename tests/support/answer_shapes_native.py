"""Answers of the endpoints that take and give token ids, and every field of the completion that each must become.

The ids are those of `tests.support.byte_tokenizer`; `fields` leave out what each completion has (see `common_of`).
"""

from __future__ import annotations

from typing import Any

from producer.simulator.tokens import END, MARKS, encode
from tests.support.answer_shapes import CALL, CALL_TEXT, Shape, kept_usage

QUESTION = [{"role": "user", "content": "Say \u00e9."}]
PROMPT = encode("<|im_start|>user\nSay \u00e9.<|im_end|>\n<|im_start|>assistant\n")
REQUEST_ID = "s-r0-a1"
_EOS = MARKS[END]
_CALLED = [{**CALL, "id": "call_0"}]
_HARMONY = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes."


def common_of(shape: Shape) -> dict[str, Any]:
    """Return the fields that every completion of the shape's endpoint has, unless the shape says otherwise."""
    if shape.backend == "sglang":
        return {"response_id": REQUEST_ID, "prompt_token_ids": PROMPT, "ids_check": "ok"}
    return {"response_id": f"generate-tokens-{REQUEST_ID}", "prompt_token_ids": PROMPT, "model": "toy-model"}


def _ids(text: str, *, eos: bool = True) -> list[int]:
    return [*encode(text), *([_EOS] if eos else [])]


def _sglang(text: str, ids: list[int] | None, reason: Any = None, **meta: Any) -> dict[str, Any]:
    """Return an answer of SGLang's `/generate`."""
    count = len(ids or ())
    counts = {"prompt_tokens": len(PROMPT), "completion_tokens": count, "cached_tokens": 1, "reasoning_tokens": 0}
    reason = reason or {"type": "stop", "matched": _EOS}
    facts = {"id": REQUEST_ID, "finish_reason": reason, "weight_version": "default", "e2e_latency": 0.1}
    return {"text": text, "output_ids": ids, "meta_info": {**facts, **counts, **meta}}


def _vllm(ids: list[int] | None, finish: Any = "stop", **usage: Any) -> dict[str, Any]:
    """Return an answer of vLLM's `/inference/v1/generate`."""
    choice = {"index": 0, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    count = len(ids or ())
    counts = {"prompt_tokens": len(PROMPT), "completion_tokens": count, "total_tokens": len(PROMPT) + count, **usage}
    name = f"generate-tokens-{REQUEST_ID}"
    return {"id": name, "created": 1, "model": "toy-model", "choices": [choice], "usage": counts}


def _said(ids: list[int], end: str | None = "eos", **fields: Any) -> dict[str, Any]:
    cached = {"cached_tokens": 1, "reasoning_tokens": 0}
    usage = kept_usage(len(PROMPT), len(ids), **cached)
    return {"output_ids": ids, "ids": "server", "ids_end": end, "finish_reason": "stop", "usage": usage, **fields}


def _of_sglang(ids: list[int], end: str | None = "eos", **fields: Any) -> dict[str, Any]:
    return _said(ids, end, **{"stop_reason": _EOS if end == "eos" else None, **fields})


def _of_vllm(ids: list[int], end: str | None = "eos", **fields: Any) -> dict[str, Any]:
    return _said(ids, end, **{"usage": kept_usage(len(PROMPT), len(ids)), **fields})


_THOUGHT = "<think>\nSo.\n</think>\n\nHello."
_LENGTH = {"type": "length", "length": 5}
SGLANG_NATIVE = [
    Shape("plain", "sglang", _sglang("Hello.", _ids("Hello.")), _of_sglang(_ids("Hello."), content="Hello.")),
    Shape(
        "a thought with both tags",
        "sglang",
        _sglang(_THOUGHT, _ids(_THOUGHT)),
        _of_sglang(_ids(_THOUGHT), content="\n\nHello.", reasoning="\nSo.\n", reasoning_field="content"),
    ),
    Shape(
        "Kimi: the end of the thought alone",
        "sglang",
        _sglang("So.</think>Hello.", _ids("So.</think>Hello.")),
        _of_sglang(_ids("So.</think>Hello."), content="Hello.", reasoning="So.", reasoning_field="content"),
    ),
    Shape(
        "cut within its thought",
        "sglang",
        _sglang("<think>So", _ids("<think>So", eos=False), _LENGTH),
        _of_sglang(
            _ids("<think>So", eos=False),
            "none",
            reasoning="So",
            reasoning_field="content",
            finish_reason="length",
        ),
    ),
    Shape(
        "cut within a character",
        "sglang",
        _sglang("caf\ufffd", _ids("caf\u00e9", eos=False)[:-1], _LENGTH),
        _of_sglang(_ids("caf\u00e9", eos=False)[:-1], "none", content="caf\ufffd", finish_reason="length"),
    ),
    Shape(
        "cut within a character, which the server leaves out",
        "sglang",
        _sglang("caf", _ids("caf\u00e9", eos=False)[:-1], _LENGTH),
        _of_sglang(_ids("caf\u00e9", eos=False)[:-1], "none", content="caf", finish_reason="length"),
    ),
    Shape(
        "ended by a stop string, which is trimmed off the text alone",
        "sglang",
        _sglang("Hello", _ids("Hello.", eos=False), {"type": "stop", "matched": "."}),
        _of_sglang(_ids("Hello.", eos=False), "stop", content="Hello", stop_reason="."),
        sampling={"stop": ["."]},
    ),
    Shape(
        "gpt-oss",
        "sglang",
        _sglang(_HARMONY, _ids(_HARMONY)),
        _of_sglang(_ids(_HARMONY), content="Yes.", reasoning="So.", reasoning_field="content", raw=_HARMONY),
    ),
    Shape(
        "a call of a tool",
        "sglang",
        _sglang(CALL_TEXT, _ids(CALL_TEXT)),
        _of_sglang(_ids(CALL_TEXT), tool_calls=_CALLED, finish_reason="tool_calls", raw=CALL_TEXT),
        tools=True,
    ),
    Shape(
        "a call that is no sound JSON",
        "sglang",
        _sglang("<tool_call>\n{", _ids("<tool_call>\n{")),
        _of_sglang(_ids("<tool_call>\n{"), content="<tool_call>\n{", unparsed_calls=True),
        tools=True,
    ),
    Shape(
        "fewer ids than it counted",
        "sglang",
        _sglang("Hello.", _ids("Hello."), completion_tokens=9),
        {
            **_of_sglang(_ids("Hello."), content="Hello."),
            "output_ids": None,
            "ids_end": None,
            "ids_check": None,
            "usage": kept_usage(len(PROMPT), 9, cached_tokens=1, reasoning_tokens=0),
            "notes": ["output_ids left out: the server gave 7 ids and counted 9 tokens"],
        },
    ),
    Shape(
        "no ids at all",
        "sglang",
        _sglang("Hello.", None, completion_tokens=7),
        {
            **_of_sglang(_ids("Hello."), content="Hello."),
            "output_ids": None,
            "ids_end": None,
            "ids_check": None,
        },
    ),
    Shape(
        "ids that do not decode to its text",
        "sglang",
        _sglang("Hello.", _ids("Jello.")),
        _of_sglang(_ids("Jello."), content="Hello.", ids_check="mismatch"),
    ),
    Shape("aborted", "sglang", _sglang("He", _ids("He"), {"type": "abort", "message": "paused"}), fault="aborted"),
    Shape("no finish reason", "sglang", {"text": "He", "output_ids": [72], "meta_info": {}}, fault="unfinished"),
    Shape("tokens and no text", "sglang", _sglang("", _ids("ab"), _LENGTH), fault="empty_answer"),
    Shape("a list, as of several prompts", "sglang", [_sglang("He", _ids("He"))], fault="bad_answer"),
    Shape("an error with status 200", "sglang", {"error": {"message": "it failed"}}, fault="bad_answer"),
]
VLLM_NATIVE = [
    Shape("plain", "vllm", _vllm(_ids("Hello.")), _of_vllm(_ids("Hello."), content="Hello.")),
    Shape(
        "a thought with both tags",
        "vllm",
        _vllm(_ids(_THOUGHT)),
        _of_vllm(_ids(_THOUGHT), content="\n\nHello.", reasoning="\nSo.\n", reasoning_field="content"),
    ),
    Shape(
        "cut within a character",
        "vllm",
        _vllm(_ids("caf\u00e9", eos=False)[:-1], "length"),
        _of_vllm(_ids("caf\u00e9", eos=False)[:-1], "none", content="caf\ufffd", finish_reason="length"),
    ),
    Shape(
        "ended by a stop string",
        "vllm",
        _vllm(_ids("Hello.", eos=False)),
        _of_vllm(_ids("Hello.", eos=False), "stop", content="Hello", stop_reason="."),
        sampling={"stop": ["."]},
    ),
    Shape(
        "a call of a tool",
        "vllm",
        _vllm(_ids(CALL_TEXT)),
        _of_vllm(_ids(CALL_TEXT), tool_calls=_CALLED, finish_reason="tool_calls", raw=CALL_TEXT),
        tools=True,
    ),
    Shape("aborted", "vllm", _vllm(_ids("He"), "abort"), fault="aborted"),
    Shape("ended by the repetition detector", "vllm", _vllm(_ids("He"), "repetition"), fault="unfinished"),
    Shape("no choices", "vllm", {"id": "x", "choices": []}, fault="bad_answer"),
]
NATIVE_SHAPES = [*SGLANG_NATIVE, *VLLM_NATIVE]
